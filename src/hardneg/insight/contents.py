"""What a report is made from, and what one of its parts is."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from hardneg.insight.runs import Group
from hardneg.insight.samples import Evidence
from hardneg.printable import printable


@dataclass(frozen=True)
class Contents:
    """Everything that parts draw from.

    Args:
        groups: of runs, in the order of the page.
        baseline: the row that others are compared with.
        extra: values by metric of rows without runs, by name.
        evidence: what each group's encoder sees, or a sentence that says why it cannot be looked at.
        extra_notes: notes by metric on rows without runs, by name.
    """

    groups: Sequence[Group]
    baseline: str
    extra: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    evidence: Mapping[str, Evidence | str] = field(default_factory=dict)
    extra_notes: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """One part of the page. key: its anchor · see: one sentence that says what to see · see, body: HTML."""

    key: str
    title: str
    see: str
    body: str

    def html(self) -> str:
        """The part as a section of the page."""
        return (
            f'<section id="{self.key}" aria-labelledby="{self.key}-title">'
            f'<h2 id="{self.key}-title">{escape(self.title)}</h2>'
            f'<p class="see">{self.see}</p>{self.body}</section>'
        )


def scrolling(table: str, label: str) -> str:
    """A table that scrolls inside its own box where the screen is too narrow, so that the page does not."""
    # A box that scrolls must be reachable by keyboard.
    return f'<div class="wide" role="region" tabindex="0" aria-label="{plain(label)}">{table}</div>'


def named(text: str) -> str:
    """A text from elsewhere: escaped, and isolated, so that its direction of writing ends with it.

    Examples:
        >>> named("<b>")
        '<bdi>&lt;b&gt;</bdi>'
    """
    return f"<bdi>{escape(text)}</bdi>"


def breakable(name: str) -> str:
    """As `named`, better broken after dots, commas and equal signs than elsewhere: a phone has little room.

    Examples:
        >>> breakable("objective.preset=<b>")
        '<bdi>objective.<wbr>preset=<wbr>&lt;b&gt;</bdi>'
    """
    return f"<bdi>{'<wbr>'.join(map(escape, re.split(r'(?<=[.,=/])(?=.)', name)))}</bdi>"


def plain(text: str) -> str:
    """A text from elsewhere as an attribute or as code: escaped, with hidden marks made visible."""
    return escape(printable(text))


def missing(contents: Contents) -> str:
    """A note for each group whose encoder cannot be looked at."""
    reasons = [(group.name, contents.evidence.get(group.name, "was not looked at")) for group in contents.groups]
    return "".join(
        f'<p class="note"><strong>{named(name)}</strong>: {named(reason)}</p>'
        for name, reason in reasons
        if isinstance(reason, str)
    )

"""The input of a report, and the sections it consists of."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from hardneg.evaluation import MetricFormat
from hardneg.evaluation.results import merged_formats
from hardneg.insight.runs import Group
from hardneg.insight.samples import EmbeddingSummary
from hardneg.printable import printable


@dataclass(frozen=True)
class Contents:
    """Everything that a report shows.

    Args:
        groups: of runs, in the order of the page.
        baseline: the row that others are compared with.
        extra_rows: values by name and metric of rows without runs.
        summaries: by group, a summary of its embeddings, or the reason why there is none.
        extra_notes: notes by name and metric on rows without runs.
        failed: errors by name of runs that failed.
        heading: of the columns of names: what was compared.
        explored: the data of the explorer, or the reason why there are none.
    """

    groups: Sequence[Group]
    baseline: str
    extra_rows: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    summaries: Mapping[str, EmbeddingSummary | str] = field(default_factory=dict)
    extra_notes: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    heading: str = "method"
    explored: Mapping[str, Any] | str = "not loaded"

    @property
    def is_comparison(self) -> bool:
        """Whether there is more than one row."""
        return len(self.groups) + len(self.extra_rows) > 1

    @property
    def unit(self) -> str:
        """What the samples are: "images", "graphs", or "samples" if that is not known or differs."""
        units = {summary.unit for summary in self.available_summaries.values()}
        return units.pop() if len(units) == 1 else "samples"

    @property
    def has_no_labels(self) -> bool:
        """Whether samples were read, and none of them has a label."""
        summaries = self.available_summaries.values()
        return bool(summaries) and all(summary.histograms is None for summary in summaries)

    @property
    def formats(self) -> dict[str, MetricFormat]:
        """The formats of metrics that are not built in, from the run folders."""
        return merged_formats(run.evaluation for group in self.groups for run in group.runs)

    @property
    def available_summaries(self) -> dict[str, EmbeddingSummary]:
        """The summaries of the groups that have one."""
        found = ((group.name, self.summaries.get(group.name)) for group in self.groups)
        return {name: summary for name, summary in found if isinstance(summary, EmbeddingSummary)}


@dataclass(frozen=True)
class Part:
    """A section of the page.

    key: its id · hint: HTML, one sentence that explains how to read it · body: HTML · assets: style sheets and scripts
    of the folder ``page`` that it needs besides those of every page
    """

    key: str
    title: str
    hint: str
    body: str
    assets: tuple[str, ...] = ()

    def html(self) -> str:
        """The section as HTML."""
        return (
            f'<section id="{self.key}" aria-labelledby="{self.key}-title">'
            f'<h2 id="{self.key}-title">{escape(self.title)}</h2>'
            f'<p class="hint">{self.hint}</p>{self.body}</section>'
        )


def scrollable(table: str, label: str) -> str:
    """Put a table into a box that scrolls if the screen is too narrow, so that the page does not."""
    # A box that scrolls must be reachable by keyboard.
    return f'<div class="wide" role="region" tabindex="0" aria-label="{visible(label)}">{table}</div>'


def isolated(text: str) -> str:
    """Escape untrusted text and isolate its writing direction from the text around it.

    Examples:
        >>> isolated("<b>")
        '<bdi>&lt;b&gt;</bdi>'
    """
    return f"<bdi>{escape(text)}</bdi>"


def breakable(name: str) -> str:
    """As `isolated`, with line breaks allowed after dots, commas, slashes and equal signs, but not inside a number.

    Examples:
        >>> breakable("objective.beta=<b>"), breakable("beta 0.5")
        ('<bdi>objective.<wbr>beta=<wbr>&lt;b&gt;</bdi>', '<bdi>beta 0.5</bdi>')
    """
    return f"<bdi>{'<wbr>'.join(map(escape, re.split(r'(?<=[.,=/])(?=[^0-9])', name)))}</bdi>"


def visible(text: str) -> str:
    """Escape untrusted text for an attribute or for code, with invisible control characters written out."""
    return escape(printable(text))


def unavailable(contents: Contents) -> str:
    """A note for each group whose embeddings cannot be shown, with the reason."""
    reasons = [(group.name, contents.summaries.get(group.name, "not loaded")) for group in contents.groups]
    return "".join(
        f'<p class="note"><strong>{isolated(name)}</strong>: {isolated(reason)}</p>'
        for name, reason in reasons
        if isinstance(reason, str)
    )

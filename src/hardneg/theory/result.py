"""What a numerical check of a published statement returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["holds", "holds with a correction", "does not hold as printed", "not refuted"]
Cell = str | float | bool


@dataclass(frozen=True)
class Line:
    """A line of a chart: a name and its points."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Chart:
    """Lines over a common axis; description: what they show, for readers who do not see them."""

    x_label: str
    y_label: str
    description: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Finding:
    """The verdict on one statement, with the numbers it was computed from.

    name: of the statement in its paper · statement: what it says · source: the paper · verdict: computed from the
    numbers · found: what was found, in a sentence or two · numbers: by name · columns, rows: a table · chart: or None

    Examples:
        >>> Finding("Lemma 0", "1 ≤ 2", "an example", "holds", "It does.", {"gap": 1.0}).verdict
        'holds'
    """

    name: str
    statement: str
    source: str
    verdict: Verdict
    found: str
    numbers: Mapping[str, float]
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = field(default=())
    chart: Chart | None = None


def verdict_of(printed: bool, corrected: bool = False) -> Verdict:
    """The verdict, given whether the printed statement and its correction agree with all numbers.

    Examples:
        >>> verdict_of(True), verdict_of(False, True), verdict_of(False)
        ('holds', 'holds with a correction', 'does not hold as printed')
    """
    if printed:
        return "holds"
    return "holds with a correction" if corrected else "does not hold as printed"

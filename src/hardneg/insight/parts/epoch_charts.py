"""Charts of a quantity by epoch, one line per row of the report."""

import statistics
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from hardneg.evaluation.metrics import is_number
from hardneg.insight import svg
from hardneg.insight.contents import breakable, isolated, scrollable
from hardneg.insight.runs import Group

_MAX_POINTS = 200  # of a line: more are not visible, and make the page larger
_TABLE_EPOCHS = 6  # in the table below a chart
_LEAST_SPAN = 5.0  # percentage points on an axis: less would magnify noise

Read = Callable[[dict[str, Any]], object]


def from_insight(key: str) -> Read:
    """Reads a measurement of `hardneg.training.callbacks.embedding_diagnostics` from a line of metrics."""
    return lambda line: line["insight"].get(key) if isinstance(line.get("insight"), dict) else None


def last_values(group: Group, read: Read) -> list[float]:
    """The last value of each run of a row that has one."""
    found = [[value for line in run.metrics if is_number(value := read(line))] for run in group.runs]
    return [float(values[-1]) for values in found if values]  # type: ignore[arg-type]


def epoch_chart(lines: Sequence[svg.Series], title: str, unit: str, meaning: str, percent: bool = False) -> str:
    """A chart with its table. lines: not empty · percent: whether the values are percentages"""
    ends = ", ".join(f"{line.name} {line.y[-1]:.4g}" for line in lines)
    text = f"{title} ({unit}) by epoch. Last values: {ends}."
    chart = svg.line_chart(lines, "epoch", unit, text, _LEAST_SPAN if percent else None)
    return (
        f'<figure class="chart" data-chart><figcaption>{isolated(title)} <span>{escape(meaning)}</span></figcaption>'
        f"{chart}{epoch_table(lines, title, unit)}</figure>"
    )


def rows_chart(
    groups: Sequence[Group], read: Read, title: str, unit: str, meaning: str, percent: bool = False
) -> str | None:
    """The chart of one quantity for all rows that have it; None if none has. percent: draw shares in percent"""
    lines = [series(group, number, read, 100.0 if percent else 1.0) for number, group in enumerate(groups)]
    lines = [line for line in lines if line.x]
    return epoch_chart(lines, title, unit, meaning, percent) if lines else None


def row_legend(groups: Sequence[Group]) -> str:
    """Buttons with the color and mark of each row; none for a single row."""
    if len(groups) == 1:
        return ""
    entries = "".join(
        f'<li><button type="button" aria-pressed="false" data-name="{escape(group.name)}">{svg.swatch(number)}'
        f"{isolated(group.name)}</button></li>"
        for number, group in enumerate(groups)
    )
    return f'<ul class="legend" aria-label="Rows: press one to show it alone">{entries}</ul>'


def series(group: Group, number: int, read: Read, scale: float) -> svg.Series:
    """Mean, minimum and maximum over seeds at each epoch."""
    at: dict[int, list[float]] = {}
    for run in group.runs:
        for line in run.metrics:
            value = read(line)
            epoch = line.get("epoch")
            if isinstance(value, int | float) and is_number(value) and isinstance(epoch, int) and is_number(epoch):
                at.setdefault(epoch, []).append(scale * value)
    epochs = thinned(sorted(at))
    several = any(len(at[epoch]) > 1 for epoch in epochs)
    return svg.Series(
        group.name,
        number,
        epochs,
        [statistics.fmean(at[epoch]) for epoch in epochs],
        [min(at[epoch]) for epoch in epochs] if several else (),
        [max(at[epoch]) for epoch in epochs] if several else (),
    )


def thinned(epochs: list[int], most: int = _MAX_POINTS) -> list[int]:
    """At most ``most`` of the epochs, evenly spaced, with the first and the last one.

    Examples:
        >>> thinned([1, 2, 3, 4, 5, 6, 7, 8, 9], most=3)
        [1, 5, 9]
    """
    if len(epochs) <= most:
        return epochs
    return [epochs[round(index * (len(epochs) - 1) / (most - 1))] for index in range(most)]


def epoch_table(lines: Sequence[svg.Series], title: str, unit: str) -> str:
    """The values of the chart at a few epochs."""
    epochs = thinned(sorted({int(x) for line in lines for x in line.x}), _TABLE_EPOCHS)
    head = "".join(f'<th scope="col">{epoch}</th>' for epoch in epochs)
    rows = []
    for line in lines:
        at = dict(zip(line.x, line.y, strict=True))
        cells = "".join(f'<td class="number">{at[epoch]:.4g}</td>' if epoch in at else "<td>–</td>" for epoch in epochs)
        rows.append(f'<tr><th scope="row">{breakable(line.name)}</th>{cells}</tr>')
    table = (
        f'<table><caption class="hidden">{isolated(title)}, {escape(unit)}, by epoch</caption>'
        f'<thead><tr><th scope="col">epoch</th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )
    return f"<details><summary>Table</summary>{scrollable(table, f'{title} by epoch')}</details>"

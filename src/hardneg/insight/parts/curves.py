"""How training went: loss, kNN and what the objective says of its negatives, over epochs."""

import statistics
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from hardneg.insight import svg
from hardneg.insight.contents import Contents, Part, breakable, named, scrolling
from hardneg.insight.runs import Group, is_finite

_MOST = 200  # points of a line: more cannot be told apart, and would only make the page larger
_ROWS = 6  # of the table beside a chart

# Name, unit and what it means; what is not listed is drawn too, under its own name.
_KNOWN: dict[str, tuple[str, str, str]] = {
    "loss": ("Loss", "nats", "its height depends on the objective: compare shapes, not levels"),
    "knn": ("kNN accuracy", "%", "on the test set, by the encoder’s features"),
    "effective_negatives": ("Effective negatives", "per anchor", "how many negatives the weights leave: 1/Σq²"),
    "support": ("Negatives in the support", "per anchor", "after masks and bands"),
    "positive_score": ("Score of positives", "cosine / t", "mean over positives"),
    "negative_score": ("Score of negatives", "cosine / t", "mean over the support"),
    "floored": ("Floored anchors", "per batch", "their negatives get no gradient"),
    "without_candidates": ("Anchors without negatives", "per batch", "they contribute nothing"),
    "without_positives": ("Anchors without positives", "per batch", "they contribute nothing"),
    "false_negatives": ("False negatives", "% of pairs", "pairs of a batch that share a class"),
    "mean_cosine": ("Cosine of batch pairs", "cosine", "higher: harder batches; of the last batch of an epoch"),
    "anchors": ("Anchors", "per batch", "of the last batch of an epoch"),
}

_SHARES = ("knn", "false_negatives")  # drawn in percent

Reading = Callable[[dict[str, Any]], object]


def curves(contents: Contents) -> Part:
    """One chart for each quantity that moves, one line for each group."""
    see = "The line is the mean over seeds, the band their minimum and maximum; touch or hover a chart to read it."
    figures = [
        figure
        for key, read in _quantities(contents.groups)
        if (figure := _figure(contents.groups, key, read)) is not None
    ]
    if not figures:
        return Part("curves", "Training", see, '<p class="note">The runs hold no metrics yet.</p>')
    legend = "".join(
        f'<li><button type="button" aria-pressed="false" data-name="{escape(group.name)}">{svg.swatch(number)}'
        f"{named(group.name)}</button></li>"
        for number, group in enumerate(contents.groups)
    )
    body = (
        f'<ul class="legend" aria-label="Groups: press one to see it alone">{legend}</ul>'
        f'{_diverged(contents.groups)}<div class="charts">{"".join(figures)}</div>'
    )
    return Part("curves", "Training", see, body)


def _quantities(groups: Sequence[Group]) -> list[tuple[str, Reading]]:
    """What there is to draw: loss and kNN, then what objective and batches report, the best known first."""
    reported = {
        (key, source)
        for group in groups
        for run in group.runs
        for line in run.metrics
        for source in ("objective", "batches")
        if isinstance(line.get(source), dict)
        for key in line[source]
        if not key.endswith("_seconds")  # time has a part of its own
    }
    known = list(_KNOWN)
    order = sorted(reported, key=lambda entry: (known.index(entry[0]) if entry[0] in known else len(known), entry))

    def direct(key: str) -> Reading:
        return lambda line: line.get(key)

    def inner(key: str, source: str) -> Reading:
        return lambda line: line[source].get(key) if isinstance(line.get(source), dict) else None

    return [("loss", direct("loss")), ("knn", direct("knn")), *((entry[0], inner(*entry)) for entry in order)]


def _figure(groups: Sequence[Group], key: str, read: Reading) -> str | None:
    """The chart of one quantity, or nothing where it is the same number throughout."""
    title, unit, meaning = _KNOWN.get(key, (key.replace("_", " "), "value", "reported by the objective"))
    lines = [_series(group, number, read, 100.0 if key in _SHARES else 1.0) for number, group in enumerate(groups)]
    lines = [line for line in lines if line.x]
    values = {y for line in lines for y in (*line.y, *line.low, *line.high)}
    if not values or (len(values) == 1 and key not in ("loss", "knn")):
        return None
    ends = ", ".join(f"{line.name} {line.y[-1]:.4g}" for line in lines)
    chart = svg.line_chart(lines, "epoch", unit, f"{title} ({unit}) over epochs. At the end: {ends}.")
    return (
        f'<figure class="chart" data-chart><figcaption>{named(title)} <span>{escape(meaning)}</span></figcaption>'
        f"{chart}{_table(lines, title, unit)}</figure>"
    )


def _series(group: Group, number: int, read: Reading, scale: float) -> svg.Series:
    """Mean, minimum and maximum over the seeds at each epoch that any of them has reached."""
    at: dict[int, list[float]] = {}
    for run in group.runs:
        for line in run.metrics:
            value = read(line)
            epoch = line.get("epoch")
            if isinstance(value, int | float) and is_finite(value) and isinstance(epoch, int) and is_finite(epoch):
                at.setdefault(epoch, []).append(scale * value)
    epochs = _thinned(sorted(at))
    several = any(len(at[epoch]) > 1 for epoch in epochs)
    return svg.Series(
        group.name,
        number,
        epochs,
        [statistics.fmean(at[epoch]) for epoch in epochs],
        [min(at[epoch]) for epoch in epochs] if several else (),
        [max(at[epoch]) for epoch in epochs] if several else (),
    )


def _thinned(epochs: list[int], most: int = _MOST) -> list[int]:
    """At most so many of them, evenly spread, the first and the last among them.

    Examples:
        >>> _thinned([1, 2, 3, 4, 5, 6, 7, 8, 9], most=3)
        [1, 5, 9]
    """
    if len(epochs) <= most:
        return epochs
    return [epochs[round(place * (len(epochs) - 1) / (most - 1))] for place in range(most)]


def _table(lines: Sequence[svg.Series], title: str, unit: str) -> str:
    """The chart as numbers, at a few epochs."""
    epochs = _thinned(sorted({int(x) for line in lines for x in line.x}), _ROWS)
    head = "".join(f'<th scope="col">{epoch}</th>' for epoch in epochs)
    rows = []
    for line in lines:
        at = dict(zip(line.x, line.y, strict=True))
        cells = "".join(f'<td class="number">{at[epoch]:.4g}</td>' if epoch in at else "<td>–</td>" for epoch in epochs)
        rows.append(f'<tr><th scope="row">{breakable(line.name)}</th>{cells}</tr>')
    table = (
        f'<table><caption class="hidden">{named(title)}, {escape(unit)}, by epoch</caption>'
        f'<thead><tr><th scope="col">epoch</th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )
    return f"<details><summary>As numbers</summary>{scrolling(table, f'{title} as numbers')}</details>"


def _diverged(groups: Sequence[Group]) -> str:
    """Say which runs have a loss that is no number: a line that merely ends would hide it."""
    notes = []
    for group in groups:
        for run in group.runs:
            bad = [line.get("epoch") for line in run.metrics if "loss" in line and not is_finite(line["loss"])]
            if bad:
                notes.append(f"{named(group.name)}, seed {run.seed}: from epoch {named(str(bad[0]))}")
    return f'<p class="note">The loss is not finite: {"; ".join(notes)}.</p>' if notes else ""

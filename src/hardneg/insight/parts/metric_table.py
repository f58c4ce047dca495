"""Which is better, and is it more than noise: the table of metrics, and every seed as a dot."""

import re
import statistics
from collections.abc import Mapping, Sequence
from html import escape

from hardneg.insight import svg
from hardneg.insight.contents import Contents, Part, breakable, named, scrolling
from hardneg.insight.significance import clear_best, difference

_TITLES = {"knn": "kNN", "nearest": "1-NN", "linear": "linear readout"}
_MARK = "*"  # at a number that has a note
_FEW = re.compile(r"few_(\d+)")

Rows = Mapping[str, Mapping[str, Sequence[float]]]
Notes = Mapping[str, Mapping[str, Sequence[str]]]


def comparison(contents: Contents) -> Part:
    """Mean ± std over seeds of each metric, and the difference to the baseline with its standard error."""
    rows = _rows(contents)
    metrics, notes = _metrics(rows), _notes(contents)
    if not metrics:
        body = '<p class="note">No run has an evaluation yet: evaluate the runs, or train with kNN switched on.</p>'
        return Part("comparison", "Comparison", "Nothing has been measured.", _unfinished(contents) + body)
    winners = {metric: clear_best({name: row.get(metric, ()) for name, row in rows.items()}) for metric in metrics}
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{_shown(metric)}'
        f'<span class="unit">{_unit(rows, metric)}</span></button></th>'
        for metric in metrics
    )
    lines = []
    for name, row in rows.items():
        seeds = max((len(values) for values in row.values()), default=0)
        role = ' <span class="tag">baseline</span>' if name == contents.baseline else ""
        cells = "".join(_cell(rows, notes, name, metric, contents.baseline, winners[metric]) for metric in metrics)
        lines.append(
            f'<tr><th scope="row" data-value="{escape(name)}">{breakable(name)}{role}</th>'
            f'<td class="number" data-value="{seeds}">{seeds or "–"}</td>{cells}</tr>'
        )
    table = (
        '<table class="sortable"><caption class="hidden">Metrics of each group of runs</caption><thead><tr>'
        '<th scope="col" aria-sort="none"><button type="button">negatives</button></th>'
        f'<th scope="col" aria-sort="none"><button type="button">seeds</button></th>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>"
    )
    body = (
        _unfinished(contents)
        + scrolling(table, "Comparison table")
        + _noted(notes)
        + _legend(contents.baseline)
        + _dots(contents, rows, metrics)
    )
    return Part("comparison", "Comparison", _finding(winners), body)


def _rows(contents: Contents) -> dict[str, dict[str, list[float]]]:
    rows = {name: {metric: [*values] for metric, values in row.items()} for name, row in contents.extra.items()}
    for group in contents.groups:
        metrics = dict.fromkeys(metric for run in group.runs for metric in run.evaluation)
        rows[group.name] = {metric: group.values(metric) for metric in metrics}
    return rows


def _notes(contents: Contents) -> Notes:
    """By row and metric, what the numbers do not say; only where there is something."""
    notes = {name: {metric: [*texts] for metric, texts in row.items()} for name, row in contents.extra_notes.items()}
    for group in contents.groups:
        metrics = dict.fromkeys(metric for run in group.runs for metric in run.notes if metric in run.evaluation)
        notes[group.name] = {metric: group.notes(metric) for metric in metrics}
    return notes


def _noted(notes: Notes) -> str:
    """The notes in words, below the table."""
    return "".join(
        f'<p class="note">{_MARK} {escape(_title(metric))} of <em>{escape(name)}</em>: {escape("; ".join(texts))}.</p>'
        for name, row in notes.items()
        for metric, texts in row.items()
        if texts
    )


def _metrics(rows: Rows) -> list[str]:
    """All metrics: the known ones first, then those from few labels by their number, then others as they come."""
    found = list(dict.fromkeys(metric for row in rows.values() for metric, values in row.items() if values))

    def rank(metric: str) -> tuple[int, int]:
        few = _FEW.fullmatch(metric)
        known = list(_TITLES)
        return (1, int(few[1])) if few else (0, known.index(metric)) if metric in known else (2, 0)

    return sorted(found, key=rank)


def _title(metric: str) -> str:
    few = _FEW.fullmatch(metric)
    return f"{few[1]} label{'s' * (few[1] != '1')}/class" if few else _TITLES.get(metric, metric.replace("_", " "))


def _shown(metric: str) -> str:
    """The title as HTML; that of a metric that is not known here comes from a file."""
    return escape(_title(metric)) if metric in _TITLES or _FEW.fullmatch(metric) else named(_title(metric))


def _scale(rows: Rows, metric: str) -> float:
    """100 where all values are fractions, which are shown as percentages."""
    values = [value for row in rows.values() for value in row.get(metric, ())]
    return 100.0 if all(0 <= value <= 1 for value in values) else 1.0


def _unit(rows: Rows, metric: str) -> str:
    return " %" if _scale(rows, metric) == 100 else ""


def _cell(rows: Rows, notes: Notes, name: str, metric: str, baseline: str, winner: str | None) -> str:
    values = rows[name].get(metric, ())
    if not values:
        return '<td class="number" data-value="">–</td>'
    scale = _scale(rows, metric)
    mean = statistics.fmean(values)
    shown = _number(scale * mean, scale)
    if name == winner:
        shown = f"<strong>{shown}</strong>"
    if texts := notes.get(name, {}).get(metric):
        shown += f'<abbr title="{escape("; ".join(texts))}">{_MARK}</abbr>'
    if len(values) > 1:
        shown += f' <span class="spread">± {_number(scale * statistics.stdev(values), scale)}</span>'
    against = rows.get(baseline, {}).get(metric, ())
    if name != baseline and against:
        change = difference(values, against)
        mark = ("▲" if change.mean > 0 else "▼") if change.clear else "≈"
        kind = ("up" if change.mean > 0 else "down") if change.clear else "level"
        sign = "+" if change.mean >= 0 else "−"
        error = f" ± {_number(scale * change.error, scale)}" if change.error is not None else ""
        shown += f'<span class="change {kind}">{mark} {sign}{_number(abs(scale * change.mean), scale)}{error}</span>'
    return f'<td class="number" data-value="{mean:.9g}">{shown}</td>'


def _number(value: float, scale: float) -> str:
    return (f"{value:.1f}" if scale == 100 else f"{value:.3g}").replace("-", "−")


def _finding(winners: Mapping[str, str | None]) -> str:
    """The one sentence: who is ahead, where that is more than noise."""
    by_row: dict[str, list[str]] = {}
    for metric, name in winners.items():
        if name is not None:
            by_row.setdefault(name, []).append(_shown(metric))
    if not by_row:
        return "Nothing here is clearly the best: the rows in front are within the noise of their seeds."
    ahead = "; ".join(f"{named(name)} in {', '.join(metrics)}" for name, metrics in by_row.items())
    level = [_shown(metric) for metric, name in winners.items() if name is None]
    return f"Clearly the best: {ahead}." + (f" Within the noise: {', '.join(level)}." if level else "")


def _legend(baseline: str) -> str:
    return (
        '<p class="small">Mean ± standard deviation over seeds. Below it the difference to '
        f"<em>{named(baseline)}</em> ± its standard error (seeds taken as independent; a row with one value lends the "
        "other's spread): ▲ and ▼ are beyond the noise at 95 % (Welch’s t-test), ≈ is not. "
        "Bold: the best, where it is clear of every other row by the same test.</p>"
    )


def _dots(contents: Contents, rows: Rows, metrics: Sequence[str]) -> str:
    styles: dict[str, int | str] = {group.name: number for number, group in enumerate(contents.groups)}
    figures = []
    for metric in metrics:
        scale = _scale(rows, metric)
        given = [
            (name, styles.get(name, "plain"), [scale * value for value in row[metric]])
            for name, row in rows.items()
            if row.get(metric)
        ]
        means = ", ".join(f"{name} {_number(statistics.fmean(values), scale)}" for name, _, values in given)
        unit = "%" if scale == 100 else "value"
        chart = svg.dot_chart(given, unit, f"{_title(metric)}, each seed a dot. Means: {means}.")
        figures.append(f'<figure class="chart"><figcaption>{_shown(metric)}</figcaption>{chart}</figure>')
    return (
        f"<details><summary>Every seed as a dot</summary>"
        f'<p class="small">One dot per seed, a bar at the mean; axes do not begin at 0.</p>'
        f'<div class="charts">{"".join(figures)}</div></details>'
    )


def _unfinished(contents: Contents) -> str:
    notes = []
    for group in contents.groups:
        for run in group.runs:
            done, wanted = run.epochs
            if isinstance(wanted, int) and done < wanted:
                notes.append(f"{named(group.name)}, seed {run.seed}: {done} of {wanted} epochs")
    return f'<p class="note">Not finished: {"; ".join(notes)}.</p>' if notes else ""

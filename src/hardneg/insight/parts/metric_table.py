"""Section "Comparison": a table of all metrics with significance tests, and a chart of the values of all seeds."""

import statistics
from collections.abc import Mapping, Sequence
from html import escape

from hardneg.evaluation.metrics import MetricFormat, columns
from hardneg.evaluation.results import is_minor
from hardneg.insight import svg
from hardneg.insight.contents import Contents, Part, breakable, isolated, scrollable, visible
from hardneg.insight.significance import difference, significant_best
from hardneg.insight.verdict import verdict

_KEY = "comparison"
_MARK = "*"  # marks a number that has a note
_LEAST_SPAN = 5.0  # percentage points on the axis of a chart: less would magnify noise

Rows = Mapping[str, Mapping[str, Sequence[float]]]
Notes = Mapping[str, Mapping[str, Sequence[str]]]


def metric_table(contents: Contents) -> Part:
    """Mean ± std over seeds of each metric, and the difference to the baseline with its standard error."""
    rows, notes = _rows(contents), _notes(contents)
    metrics = columns(rows, contents.formats)
    title = "Comparison" if contents.is_comparison else "Evaluation"
    if not metrics:
        hint = "There are no metrics yet."
        body = '<p class="note">No run has an evaluation: run <code>hardneg evaluate</code>.</p>'
        if contents.has_no_labels:
            hint, body = "Not evaluated: the data have no labels.", ""
        return Part(_KEY, title, hint, _failed(contents) + _unfinished(contents) + body)
    best = {
        metric: significant_best({name: row.get(metric, ()) for name, row in rows.items()}, shown.better)
        for metric, shown in metrics.items()
    }
    head = "".join(
        f'<th scope="col" aria-sort="none" data-better="{shown.better}"><button type="button">'
        f'{isolated(shown.heading)}<span class="unit">{shown.unit}</span></button></th>'
        for shown in metrics.values()
    )
    lines = []
    for name, row in rows.items():
        seeds = max((len(values) for values in row.values()), default=0)
        is_baseline = name == contents.baseline and contents.is_comparison
        tag = ' <span class="tag">baseline</span>' if is_baseline else ""
        cells = "".join(
            _cell(
                row.get(metric, ()),
                shown,
                () if name == contents.baseline else rows.get(contents.baseline, {}).get(metric, ()),
                notes.get(name, {}).get(metric, ()),
                name == best[metric],
            )
            for metric, shown in metrics.items()
        )
        lines.append(
            f'<tr><th scope="row" data-value="{escape(name)}">{breakable(name)}{tag}</th>'
            f'<td class="number" data-value="{seeds}">{seeds or "–"}</td>{cells}</tr>'
        )
    table = (
        '<table class="sortable"><caption class="hidden">Metrics of each row</caption><thead><tr>'
        f'<th scope="col" aria-sort="none"><button type="button">{isolated(contents.heading)}</button></th>'
        f'<th scope="col" aria-sort="none"><button type="button">seeds</button></th>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>"
    )
    body = (
        _failed(contents)
        + _unfinished(contents)
        + scrollable(table, "Table of metrics")
        + _note_lines(notes, metrics)
        + _legend(contents, rows, metrics)
        + _dots(contents, rows, metrics)
    )
    found = "<br>".join(verdict(rows, metrics, contents.baseline, isolated))
    hint = f'<span class="verdict">{found}</span>' if found else "Metrics of the trained encoder, with frozen weights."
    return Part(_KEY, title, hint, body)


def _rows(contents: Contents) -> dict[str, dict[str, list[float]]]:
    """Values by row and metric."""
    rows = {name: {metric: [*values] for metric, values in row.items()} for name, row in contents.extra_rows.items()}
    for group in contents.groups:
        metrics = dict.fromkeys(metric for run in group.runs for metric in run.evaluation)
        rows[group.name] = {metric: group.values(metric) for metric in metrics}
    return rows


def _notes(contents: Contents) -> Notes:
    """Notes by row and metric, for the metrics that have one."""
    notes = {name: {metric: [*texts] for metric, texts in row.items()} for name, row in contents.extra_notes.items()}
    for group in contents.groups:
        metrics = dict.fromkeys(
            metric for run in group.runs for metric in run.evaluation.notes if metric in run.evaluation
        )
        notes[group.name] = {metric: group.notes(metric) for metric in metrics}
    return notes


def _note_lines(notes: Notes, metrics: Mapping[str, MetricFormat]) -> str:
    """The text of each note, below the table; those that change no result are folded."""
    lines: dict[bool, list[str]] = {False: [], True: []}
    for name, row in notes.items():
        for metric, texts in row.items():
            for minor, found in lines.items():
                kept = [text for text in texts if is_minor(text) == minor]
                if kept and metric in metrics:
                    start = '<p class="small">' if minor else f'<p class="note">{_MARK} '
                    text = f"of <em>{isolated(name)}</em>: {isolated('; '.join(kept))}.</p>"
                    found.append(f"{start}{isolated(metrics[metric].title)} {text}")
    folded = f"<details><summary>Notes on fits</summary>{''.join(lines[True])}</details>" if lines[True] else ""
    return "".join(lines[False]) + folded


def _cell(
    values: Sequence[float], shown: MetricFormat, baseline: Sequence[float], notes: Sequence[str], is_best: bool
) -> str:
    """One cell. values: of the seeds · baseline: values to compare with; empty for the baseline itself."""
    if not values:
        return '<td class="number" data-value="">–</td>'
    mean = statistics.fmean(values)
    text = shown.number(mean)
    if is_best:
        text = f"<strong>{text}</strong>"
    if serious := [note for note in notes if not is_minor(note)]:
        text += f'<abbr title="{visible("; ".join(serious))}">{_MARK}</abbr>'
    if len(values) > 1:
        text += f' <span class="spread">± {shown.number(statistics.stdev(values))}</span>'
    if baseline:
        change = difference(values, baseline)
        kind = ("better" if shown.improves(change.mean) else "worse") if change.significant else "level"
        arrow = {"better": "▲", "worse": "▼", "level": "≈"}[kind]
        error = f" ± {shown.number(change.error)}" if change.error is not None else ""
        text += f'<span class="change {kind}">{arrow} {shown.number(change.mean, "+")}{error}</span>'
    return f'<td class="number" data-value="{mean:.9g}">{text}</td>'


def _legend(contents: Contents, rows: Rows, metrics: Mapping[str, MetricFormat]) -> str:
    """How to read the table."""
    sentences = []
    several = any(len(values) > 1 for row in rows.values() for values in row.values())
    base = f"<em>{isolated(contents.baseline)}</em>"
    if several:
        sentences.append("Mean ± standard deviation over seeds.")
    if several and contents.is_comparison:
        sentences.append(
            f"Below it, the difference from {base} ± its standard error: ▲ significantly better, ▼ significantly "
            "worse, ≈ not significant (Welch’s t-test at the 0.05 level, seeds taken as independent; a row with one "
            "value borrows the standard deviation of the other row). Bold: significantly better than every other row."
        )
    elif contents.is_comparison:
        sentences.append(f"Below each value, its difference from {base}.")
    if any(shown.better == "lower" for shown in metrics.values()):
        sentences.append("↓ in a heading: lower is better.")
    return f'<p class="small">{" ".join(sentences)}</p>' if sentences else ""


def _dots(contents: Contents, rows: Rows, metrics: Mapping[str, MetricFormat]) -> str:
    """A chart for each metric with the value of every seed; nothing for a single value per metric."""
    if not contents.is_comparison and len(contents.groups[0].runs) < 2:
        return ""
    styles: dict[str, int | str] = {group.name: number for number, group in enumerate(contents.groups)}
    figures = []
    for metric, shown in metrics.items():
        given = [
            (name, styles.get(name, "plain"), [shown.scaled(value) for value in row[metric]])
            for name, row in rows.items()
            if row.get(metric)
        ]
        means = ", ".join(
            f"{name} {shown.number(statistics.fmean(row[metric]))}" for name, row in rows.items() if row.get(metric)
        )
        text = f"{shown.title} of every seed. Means: {means}."
        chart = svg.dot_chart(given, shown.unit.strip() or "value", text, _LEAST_SPAN if shown.percent else None)
        figures.append(f'<figure class="chart"><figcaption>{isolated(shown.heading)}</figcaption>{chart}</figure>')
    return (
        f"<details><summary>Values of all seeds</summary>"
        f'<p class="small">One mark per seed, and a bar at the mean. The axes do not start at 0.</p>'
        f'<div class="charts">{"".join(figures)}</div></details>'
    )


def _failed(contents: Contents) -> str:
    notes = [f"{isolated(name)}: {isolated(error)}" for name, error in contents.failed.items()]
    return f'<p class="note">Failed: {"; ".join(notes)}.</p>' if notes else ""


def _unfinished(contents: Contents) -> str:
    notes = []
    for group in contents.groups:
        for run in group.runs:
            done, planned = run.epochs
            if isinstance(planned, int) and done < planned:
                notes.append(f"{isolated(group.name)}, seed {run.seed}: {done} of {planned} epochs")
    return f'<p class="note">Not finished: {"; ".join(notes)}.</p>' if notes else ""

"""Plots of the recorded runs of a table, as the SVG files of the documentation."""

import statistics
from pathlib import Path

from evidence_tables import Table, columns_of, rows_of

from hardneg.insight.svg import Series
from hardneg.insight.svg_file import dot_chart_file, line_chart_file

MOST_ROWS = 24  # of a chart of all runs


def plots(table: Table, out: Path) -> dict[str, str]:
    """The text of each plot by the name of its file: kNN by epoch of the table's ``curves``, and of all runs at last.

    Rows without a run are left out. A table without curves has no plots, one of many rows only that by epoch.
    """
    runs = {name: lines for name, lines in rows_of(table, out).items() if lines}
    read = {heading: each for heading, each in columns_of(table).items() if heading.startswith("kNN")}
    curves = [name for name in table.curves if name in runs]
    if not curves:
        return {}
    series = []
    for style, name in enumerate(curves):
        points = []
        for heading, reading in read.items():
            values = [100 * value for line in runs[name] if (value := reading(line)) is not None]
            if values:
                spread = statistics.stdev(values) if len(values) > 1 else 0.0
                points.append((int(heading.rpartition(" ")[2]), statistics.fmean(values), spread))
        epochs, means, spreads = zip(*points, strict=True)
        low, high = ([m + sign * s for m, s in zip(means, spreads, strict=True)] for sign in (-1, 1))
        series.append(Series(name, style, epochs, means, low, high))
    what = f"kNN accuracy on {table.data}"
    about = f"{what} by epoch: mean and standard deviation over seeds"
    found = {f"results-{table.name}-epochs.svg": line_chart_file(series, "epoch", "kNN, %", about)}
    last = list(read.values())[-1]
    rows = []
    for name, lines in runs.items():
        values = [100 * value for line in lines if (value := last(line)) is not None]
        if values:
            rows.append((f"{statistics.fmean(values):.1f} · {name}", 0, values))  # long names are cut
    if len(rows) <= MOST_ROWS:
        about = f"{what} after training: a mark for each seed, a bar at the mean"
        found[f"results-{table.name}.svg"] = dot_chart_file(rows, "kNN, %", about)
    return found

"""What the commands print: results on stdout, notes on stderr, tables of comparisons."""

import importlib
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hardneg.printable import printable

# What is piped into a file has no width of its own.
out, err = Console(width=None if sys.stdout.isatty() else 160), Console(stderr=True)
MARK = "*"  # at a number that has a note
METRIC_TITLES = {
    "knn": "kNN",
    "nearest": "1-NN",
    "few_1": "1 label a class",
    "few_5": "5 labels a class",
    "linear": "linear",
    "svm": "SVM, 10 folds",
}


def say(message: str, style: str | None = None) -> None:
    """A result: names in it may hold what rich would take for markup, or a terminal for commands."""
    out.print(printable(message), style=style, markup=False, highlight=False, soft_wrap=True)


def fail(message: str) -> None:
    """One line that says what to mend, and exit code 2."""
    err.print(f"error: {_one_line(message)}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(2)


def note(message: str) -> None:
    """A remark, in one line."""
    err.print(f"note: {_one_line(message)}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def remark(message: str) -> None:
    """A line on stderr, in the colours of the terminal."""
    err.print(printable(message), markup=False, highlight=False, soft_wrap=True)


def cell(text: str) -> str:
    """A text from elsewhere for a table of rich."""
    return escape(printable(text))


def print_json(content: Any) -> None:
    """A result for machines."""
    sys.stdout.write(json.dumps(content, indent=1) + "\n")


def show_table(
    rows: Mapping[str, Mapping[str, Sequence[float]]],
    notes: Mapping[str, Mapping[str, Sequence[str]]],
    baseline: str,
    as_json: bool,
    more: Mapping[str, Any],
) -> None:
    """The table of a comparison: mean ± std in percent, and the difference to the baseline ± its standard error.

    rows, notes: by row and metric; a number with a note is marked
    """
    compared = importlib.import_module("hardneg.insight.significance")
    metrics = [name for name in METRIC_TITLES if any(name in row for row in rows.values())]
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for name, row in rows.items():
        summary[name] = {}
        for metric in metrics:
            if values := row.get(metric):
                base = rows.get(baseline, {}).get(metric)
                gap = compared.difference(values, base) if base else None
                summary[name][metric] = {
                    "mean": statistics.fmean(values),
                    "std": statistics.stdev(values) if len(values) > 1 else None,
                    "runs": len(values),
                    "difference": None if gap is None else gap.mean,
                    "standard_error": None if gap is None else gap.error,
                    "notes": [*notes.get(name, {}).get(metric, ())],
                }
    if as_json:
        print_json({**more, "baseline": baseline, "rows": summary})
        return
    table = Table(title="accuracy on the test set, %", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("negatives", overflow="fold")
    for metric in metrics:
        table.add_column(METRIC_TITLES[metric], justify="right", no_wrap=True)
    for name, figures in summary.items():
        cells = [_cell(figures[metric], name == baseline) if metric in figures else "–" for metric in metrics]
        table.add_row(cell(name), *cells)
    out.print(table)
    say(f"mean ± std over seeds; below, the difference to {baseline} ± its standard error", style="dim")
    for name, figures in summary.items():
        for metric, figure in figures.items():
            if figure["notes"]:
                say(f"{MARK} {METRIC_TITLES[metric]} of {name}: {'; '.join(figure['notes'])}")


def _one_line(message: str) -> str:
    return printable(" ".join(message.split()))


def _cell(figure: Mapping[str, Any], is_baseline: bool) -> str:
    def percent(name: str, sign: str = "") -> str:
        number = figure[name]
        return "" if number is None else f"{100 * number:{sign}.1f}"

    spread = f"±{percent('std')}" if figure["std"] is not None else ""
    text = percent("mean") + spread + MARK * bool(figure["notes"])
    if not is_baseline and figure["difference"] is not None:
        error = f"±{percent('standard_error')}" if figure["standard_error"] is not None else ""
        text += f"\n[dim]{percent('difference', '+')}{error}[/]"
    return text

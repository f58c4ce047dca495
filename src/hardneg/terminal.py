"""Output of the commands: results on stdout, notes and errors on stderr, tables of comparisons."""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hardneg.printable import printable

if TYPE_CHECKING:
    from hardneg.evaluation import MetricFormat

# A pipe or a file has no width.
out, err = Console(width=None if sys.stdout.isatty() else 160), Console(stderr=True)
MARK = "*"  # marks a number that has a note


def say(message: str, style: str | None = None) -> None:
    """Print a result; neither markup of rich nor control characters in it take effect."""
    out.print(printable(message), style=style, markup=False, highlight=False, soft_wrap=True)


def fail(message: str, code: int = 2) -> None:
    """Print an error in one line and exit with this code."""
    err.print(f"error: {_one_line(message)}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


def note(message: str) -> None:
    """Print a note in one line."""
    err.print(f"note: {_one_line(message)}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def remark(message: str) -> None:
    """Print a line on stderr in the default color."""
    err.print(printable(message), markup=False, highlight=False, soft_wrap=True)


def cell(text: str) -> str:
    """Escape a text for a cell of a rich table."""
    return escape(printable(text))


def print_json(content: Any) -> None:
    """Print a result as JSON."""
    sys.stdout.write(json.dumps(content, indent=1) + "\n")


def show_table(
    rows: Mapping[str, Mapping[str, Sequence[float]]],
    notes: Mapping[str, Mapping[str, Sequence[str]]],
    baseline: str,
    as_json: bool,
    more: Mapping[str, Any],
    formats: Mapping[str, "MetricFormat"] | None = None,
    failed: Mapping[str, int] | None = None,
) -> None:
    """Print a comparison: mean ± std of each metric, and the difference to the baseline ± its standard error.

    rows: values by row and metric · notes: by row and metric; a number with a note is marked · baseline: a row ·
    more: further entries of the JSON · formats: of metrics that are not registered · failed: number of failed runs by
    row, for the table
    """
    # Imported here: both import torch, which commands that print no table do not need.
    from hardneg.evaluation.metrics import columns
    from hardneg.insight.significance import difference, significant_best

    metrics = columns(rows, formats)
    best = {
        metric: significant_best({name: row.get(metric, ()) for name, row in rows.items()}, shown.better)
        for metric, shown in metrics.items()
    }
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for name, row in rows.items():
        summary[name] = {}
        for metric in metrics:
            if values := row.get(metric):
                base = rows.get(baseline, {}).get(metric)
                gap = difference(values, base) if base else None
                summary[name][metric] = {
                    "mean": statistics.fmean(values),
                    "std": statistics.stdev(values) if len(values) > 1 else None,
                    "runs": len(values),
                    "difference": None if gap is None else gap.mean,
                    "standard_error": None if gap is None else gap.error,
                    "significant": gap is not None and gap.significant,
                    "best": best[metric] == name,
                    "notes": [*notes.get(name, {}).get(metric, ())],
                }
    if as_json:
        described = {metric: asdict(shown) for metric, shown in metrics.items()}
        print_json({**more, "baseline": baseline, "metrics": described, "rows": summary})
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", overflow="fold")
    for shown in metrics.values():
        table.add_column(cell(shown.heading + shown.unit), justify="right", no_wrap=True)
    failed = failed or {}
    for name, entries in {**summary, **{name: summary.get(name, {}) for name in failed}}.items():
        cells = [
            _cell(entries[metric], shown, name == baseline) if metric in entries else "–"
            for metric, shown in metrics.items()
        ]
        lost = failed.get(name, 0)
        table.add_row(cell(name) + (f"\n[red]{lost} failed run{'s' * (lost > 1)}[/]" if lost else ""), *cells)
    out.print(table)
    say(
        f"mean ± std over seeds; below, the difference to {baseline} ± its standard error: ▲ better, ▼ worse, ≈ not "
        "significant at 95 %; bold: significantly better than every other row",
        style="dim",
    )
    for name, entries in summary.items():
        for metric, entry in entries.items():
            if entry["notes"]:
                say(f"{MARK} {metrics[metric].title} of {name}: {'; '.join(entry['notes'])}")


def _one_line(message: str) -> str:
    return printable(" ".join(message.split()))


def _cell(entry: Mapping[str, Any], shown: "MetricFormat", is_baseline: bool) -> str:
    """One entry of the summary as markup of rich."""
    spread = "" if entry["std"] is None else f"±{shown.number(entry['std'])}"
    text = shown.number(entry["mean"]) + spread + MARK * bool(entry["notes"])
    if entry["best"]:
        text = f"[bold]{text}[/]"
    if not is_baseline and (change := entry["difference"]) is not None:
        arrow = ("▲" if shown.improves(change) else "▼") if entry["significant"] else "≈"
        error = "" if entry["standard_error"] is None else f"±{shown.number(entry['standard_error'])}"
        text += f"\n[dim]{arrow} {shown.number(change, '+')}{error}[/]"
    return text

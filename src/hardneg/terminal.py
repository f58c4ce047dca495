"""Output of the commands: results on stdout, notes and errors on stderr, tables of comparisons."""

import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hardneg.printable import printable

if TYPE_CHECKING:
    from hardneg.evaluation import MetricFormat

# A pipe or a file has no width.
out, err = Console(width=None if sys.stdout.isatty() else 160), Console(stderr=True)
MARK = "*"  # marks a number that has a note
_NAME_WIDTH = 32  # columns that the names of a table take at the cost of metrics
_HEADING_WIDTH = 9  # of the lines of a metric's heading, if its cells are narrower
_ONE_LINE = 18  # names up to this width are not broken


def say(message: str, style: str | None = None) -> None:
    """Print a result; neither markup of rich nor control characters in it take effect."""
    out.print(printable(message), style=style, markup=False, highlight=False, soft_wrap=True)


def say_list(parts: Iterable[str]) -> None:
    """Print results one after the other, with line breaks between them where the terminal ends."""
    lines: list[str] = []
    for part in map(printable, parts):
        if lines and cell_len(f"{lines[-1]} · {part}") <= out.width:
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    for line in lines:
        say(line)


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
    heading: str = "method",
) -> None:
    """Print a comparison: mean ± std of each metric, and the difference to the baseline ± its standard error.

    rows: values by row and metric · notes: by row and metric; a number with a note is marked · baseline: a row ·
    more: further entries of the JSON · formats: of metrics that are not registered · failed: number of failed runs by
    row, for the table · heading: of the column of names

    A narrow terminal shows fewer metrics, with a note; names are never cut.
    """
    # Imported here: both import torch, which commands that print no table do not need.
    from hardneg.evaluation.metrics import columns
    from hardneg.evaluation.results import is_minor
    from hardneg.insight.significance import difference, significant_best
    from hardneg.insight.verdict import verdict

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
    for entries in summary.values():
        for entry in entries.values():
            entry["notes"] = [text for text in entry["notes"] if not is_minor(text)]
    failed = failed or {}
    named = {**summary, **{name: summary.get(name, {}) for name in failed}}
    cells = {
        metric: [_cell(row[metric], shown, name == baseline) if metric in row else "–" for name, row in named.items()]
        for metric, shown in metrics.items()
    }
    heads = {metric: _heading(shown.heading + shown.unit, cells[metric]) for metric, shown in metrics.items()}
    labels = [
        cell(name) + (f"\n[red]{lost} failed run{'s' * (lost > 1)}[/]" if (lost := failed.get(name, 0)) else "")
        for name in named
    ]
    _print_table(heading, labels, heads, cells)
    out.print()
    for sentence in verdict(rows, metrics, baseline):
        _paragraph(sentence)
    _paragraph(_legend(baseline, len(named) > 1, any(len(v) > 1 for row in rows.values() for v in row.values())), "dim")
    for name, entries in summary.items():
        for metric, entry in entries.items():
            if entry["notes"]:
                say(f"{MARK} {metrics[metric].title} of {name}: {'; '.join(entry['notes'])}")


def _print_table(heading: str, labels: Sequence[str], heads: Mapping[str, str], cells: Mapping[str, list[str]]) -> None:
    """Print a table of rows with two lines; in a terminal that is too narrow, without its last metrics."""
    names = [Text.from_markup(label).plain for label in labels]
    words = [cell_len(word) for name in names for word in name.split()]
    # A short name takes one line, a long one the two lines of its row; a word longer than the bound is folded.
    lines = (cell_len(name) if cell_len(name) <= _ONE_LINE else cell_len(name) // 2 + 2 for name in names)
    needed = min(max([cell_len(heading), *words, *lines]), _NAME_WIDTH)
    widths = {metric: _width([head, *cells[metric]]) + 2 for metric, head in heads.items()}
    kept = [*heads]
    while out.is_terminal and len(kept) > 1 and needed + sum(widths[metric] for metric in kept) > out.width:
        kept.pop()
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, show_edge=False)
    table.add_column(cell(heading), overflow="fold", min_width=needed)
    for metric in kept:
        table.add_column(heads[metric], justify="right", no_wrap=True)
    for row, label in enumerate(labels):
        table.add_row(label, *(cells[metric][row] for metric in kept))
    # A file has no width: all columns are printed.
    whole = sum(widths.values()) + max(map(cell_len, names), default=0)
    out.print(table, width=None if out.is_terminal else max(out.width, whole), crop=False)
    if len(kept) < len(heads):
        left = len(heads) - len(kept)
        note(f"{left} more metric{'s' * (left > 1)} in a wider terminal, or with --json")


def _heading(title: str, cells: Sequence[str]) -> str:
    """The heading of a metric, on several lines if it is wider than the cells below."""
    lines, width = [""], max(_width(cells), _HEADING_WIDTH)
    for word in re.findall(r"(?:[^\s/]+(?: %$)?/?|/)\s*", printable(title)):  # breaks after spaces and slashes
        if lines[-1] and cell_len((lines[-1] + word).rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return "\n".join(escape(line.rstrip()) for line in lines)


def _width(cells: Sequence[str]) -> int:
    """The width of the widest line of these cells, which are markup of rich."""
    return max((cell_len(line) for text in cells for line in Text.from_markup(text).plain.split("\n")), default=0)


def _legend(baseline: str, several_rows: bool, several_seeds: bool) -> str:
    """How to read a table."""
    if not several_seeds:
        return f"below, the difference from {baseline}" if several_rows else ""
    differences = (
        f"; below, the difference from {baseline} ± its standard error\n"
        "▲ better, ▼ worse, ≈ not significant at the 0.05 level\n"
        "bold: significantly better than every other row"
    )
    return "mean ± std over seeds" + differences * several_rows


def _paragraph(text: str, style: str | None = None) -> None:
    """Print a result, broken between words."""
    if text:
        out.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=not out.is_terminal)


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

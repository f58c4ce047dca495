"""``hardneg theory``: numerical checks of the papers' theorems."""

import platform
import shlex
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

import hardneg
from hardneg.cli.app import Json, app
from hardneg.printable import printable
from hardneg.progress import progress
from hardneg.terminal import cell, out, print_json, say

if TYPE_CHECKING:
    from hardneg.theory import Finding

_COLORS = {
    "holds": "green",
    "holds with a correction": "yellow",
    "does not hold as printed": "red",
    "not refuted": "cyan",
}


def _family_names(incomplete: str) -> list[str]:
    from hardneg.theory import FAMILIES

    return [name for name in (*FAMILIES, "all") if name.startswith(incomplete)]


@app.command(epilog="Examples:\n\n    hardneg theory\n\n    hardneg theory cnce\n\n    hardneg theory all --to theory/")
def theory(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Families to check, or **all**.", autocompletion=_family_names),
    ] = None,
    to: Annotated[Path | None, typer.Option(help="Folder for theory.json and a chart per family.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer examples: a few seconds per family.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the random examples.")] = 0,
    as_json: Json = False,
) -> None:
    """Check the papers' theorems about hard negatives numerically; without NAME, list the families."""
    from hardneg.theory import FAMILIES

    if not names:
        if to is not None or quick:
            raise ValueError("--to and --quick need a family: hardneg theory all")
        _list(as_json)
        return
    from hardneg import checks  # imports torch, which the list does not need

    for name in names:
        checks.choice("NAME", name, (*FAMILIES, "all"))
    if to is not None and to.exists() and not to.is_dir():
        raise ValueError(f"--to={to} is not a folder: name another")
    if to is not None:
        to.mkdir(parents=True, exist_ok=True)  # before the work: the folder may not be writable
    chosen = [name for name in FAMILIES if name in names or "all" in names]
    command = shlex.join(["hardneg", *sys.argv[1:]])
    content: dict[str, Any] = {"command": command, "seed": seed, "quick": quick, **_versions(), "families": {}}
    charts: dict[str, str] = {}
    for name in chosen:
        family = FAMILIES[name]
        steps, begun = range(len(family.checks)), time.perf_counter()
        found = [
            family.run_check(number, quick, seed)
            for number in (steps if as_json else progress(steps, f"theory {name}"))
        ]
        seconds = round(time.perf_counter() - begun, 1)
        content["families"][name] = {
            "title": family.title,
            "seconds": seconds,
            "findings": [{key: value for key, value in asdict(each).items() if key != "chart"} for each in found],
        }
        charts.update(_chart(name, found))
        if not as_json:
            _show(name, family.title, found)
    if to is not None:
        _write(to, content, charts)
    if as_json:
        print_json(content)
    elif to is not None:
        say(f"wrote {', '.join(str(to / file) for file in ('theory.json', *charts))}")


def _list(as_json: bool) -> None:
    from hardneg.theory import FAMILIES

    if as_json:
        print_json({name: family.title for name, family in FAMILIES.items()})
        return
    table = Table("family", "what is checked", box=None)
    for name, family in FAMILIES.items():
        table.add_row(name, cell(family.title))
    out.print(table)
    say("run: hardneg theory NAME, or hardneg theory all")


def _show(name: str, title: str, found: "list[Finding]") -> None:
    """Print the verdict, the sentence and the table of each finding."""
    out.print(f"[bold]{cell(name)}[/] · {cell(title)}\n{cell(found[0].source)}\n", highlight=False)
    for each in found:
        out.print(f"[bold]{cell(each.name)}[/]: [{_COLORS[each.verdict]}]{each.verdict}[/]", highlight=False)
        for text, style in ((each.statement, "italic"), (each.found, None)):
            out.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=not out.is_terminal)
        table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, show_edge=False)
        for number, column in enumerate(each.columns):
            is_text = bool(each.rows) and isinstance(each.rows[0][number], str)
            table.add_column(cell(column), justify="left" if is_text else "right", overflow="fold")
        for row in each.rows:
            table.add_row(*(cell(_text(entry)) for entry in row))
        out.print(table)
        out.print()


def _text(entry: object) -> str:
    if isinstance(entry, bool):
        return "yes" if entry else "no"
    return f"{entry:.4g}" if isinstance(entry, float) else str(entry)


def _chart(name: str, found: "list[Finding]") -> dict[str, str]:
    """The SVG file of the first finding with a chart, by file name."""
    from hardneg.insight.svg import Series
    from hardneg.insight.svg_file import line_chart_file

    for chart in (each.chart for each in found if each.chart is not None):
        series = [Series(line.name, number, line.x, line.y) for number, line in enumerate(chart.lines)]
        return {f"{name}.svg": line_chart_file(series, chart.x_label, chart.y_label, chart.description)}
    return {}


def _write(folder: Path, content: dict[str, Any], charts: dict[str, str]) -> None:
    import json

    (folder / "theory.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for file, text in charts.items():
        (folder / file).write_text(text, encoding="utf-8")


def _versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("torch", "numpy", "scipy")}
    return {"hardneg": hardneg.__version__, "python": platform.python_version(), **packages}

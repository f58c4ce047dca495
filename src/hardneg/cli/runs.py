"""``hardneg evaluate``, ``report`` and ``export``: what is done with trained runs."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from hardneg.cli.app import Json, Trust, app, import_from_here
from hardneg.terminal import MARK, cell, out, print_json, say


@app.command(
    epilog="""Examples:

    hardneg evaluate runs/cifar10-simclr-1

    hardneg evaluate runs/cifar10-simclr-1 --data data/cifar100.npz    (transfer)"""
)
def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    data: Annotated[str | None, typer.Option(help="Evaluate on these data instead (transfer).")] = None,
    size: Annotated[int | None, typer.Option(help="Side of their images [default: as in training].")] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Evaluate the frozen encoder of a run: kNN, 1-NN, a few labels per class, linear probe."""
    from hardneg.training.evaluate import evaluate as evaluate_run

    if trust:
        import_from_here()
    with _naming_options():
        figures = evaluate_run(run, data, size, trust=trust)
    if as_json:
        print_json(figures.to_json())
        return
    notes = figures.main_notes
    table = Table("metric", "value", title=cell(f"{run}" + (f" on {data}" if data else "")))
    for name, figure in figures.items():
        shown = figures.format(name)
        table.add_row(cell(shown.heading), f"{shown.text(figure)}{MARK * (name in notes)}")
    out.print(table)
    if figures.measured:
        say(figures.measured)
    for name, note_text in notes.items():
        say(f"{MARK} {figures.format(name).title}: {note_text}")


@app.command(epilog="Examples:\n\n    hardneg report runs/compare\n\n    hardneg report runs/a runs/b --to report.html")
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or of comparisons.")],
    to: Annotated[Path | None, typer.Option(help="The page [default: report.html in the first folder].")] = None,
    baseline: Annotated[str | None, typer.Option(help="The row to compare with [default: the first].")] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML page: table, curves, histograms, hardest negatives, command and recipe."""
    from hardneg.insight.report import write_report
    from hardneg.training import compare as comparing

    if trust:
        import_from_here()
    folders = [folder for entry in runs for folder in _runs_below(entry)]
    failed: dict[str, str] = {}
    for entry in runs:
        failed |= comparing.read_failures(entry)
    names = heading = None
    if len(runs) == 1 and (rows := comparing.read_rows(runs[0], folders)) is not None:
        folders.sort(key=lambda folder: [*rows.names].index(folder.parent.name))
        names, heading = [rows.names[folder.parent.name] for folder in folders], rows.heading
        if baseline is None and rows.baseline in names:  # unless all of its runs failed
            baseline = rows.baseline
    page = write_report(
        folders, to or runs[0] / "report.html", names, baseline, trust=trust, failed=failed, heading=heading
    )
    print_json({"report": str(page)}) if as_json else say(str(page))


@app.command(epilog="Example:\n\n    hardneg export runs/cifar10-simclr-1 --format onnx --to encoder.onnx")
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    form: Annotated[
        str, typer.Option("--format", help="safetensors, torchscript, torch_export or onnx.")
    ] = "safetensors",
    to: Annotated[Path | None, typer.Option(help="The file [default: exported.* in the run's folder].")] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Write the encoder for use elsewhere, and check the file by loading it and comparing outputs."""
    import hardneg.export as exporting

    if trust:
        import_from_here()
    made, difference = exporting.export_run(run, form, to, trust=trust)
    if as_json:
        print_json({"file": str(made), "difference": difference})
        return
    say(f"{made}: outputs differ by at most {difference:.1e}")


@contextmanager
def _naming_options() -> Iterator[None]:
    """Name the arguments of an evaluation in an error as the options of the command."""
    options = {"source": "--data", "size": "--size"}
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        message = re.sub(r"^(source|size)\b|(?<![\w.])(source|size)(?==)", lambda name: options[name[0]], str(error))
        if message == str(error):
            raise
        raise type(error)(message) from error


def _runs_below(folder: Path) -> list[Path]:
    """The folder itself if it is a run, else the runs below it."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}: give the folder of a run or of a comparison")
    found = [file.parent for file in sorted(folder.glob("**/recipe.yaml"))]
    if not found:
        raise ValueError(f"{folder} holds no run: recipe.yaml is missing")
    return found

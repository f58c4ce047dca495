"""The command line: thin commands over the library; every error in the input is reported in one line.

Progress and notes are written to stderr, results to stdout. Exit code 2: the input was invalid; nothing was changed.
Exit code 1: a run failed, or the doctor found something broken.
"""

import dataclasses
import io
import os
import shlex
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from hardneg import mining_command
from hardneg.printable import printable
from hardneg.terminal import MARK, cell, err, fail, note, out, print_json, remark, say, show_table

if TYPE_CHECKING:
    from hardneg.training.compare import Run

# Modules that take seconds to import (torch, lightning) are imported in the commands, so that --help is fast.
app = typer.Typer(
    name="hardneg",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Choose the negatives of contrastive learning. Begin with **hardneg demo**.",
)
INTERRUPTED = 130


def _recipe_names(incomplete: str) -> list[str]:
    folder = Path(__file__).parent / "recipes"
    return sorted(file.stem for file in folder.glob("*.yaml") if file.stem.startswith(incomplete))


Recipe = Annotated[
    str | None,
    typer.Argument(help="A built-in recipe (see **hardneg recipes**) or a YAML file.", autocompletion=_recipe_names),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that differ from the recipe.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines, and no progress.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Run the code that the folder names as its encoder, **module:callable**.")
]


@app.command(
    epilog="""Examples:

    hardneg train digits-simclr

    hardneg train cifar10-simclr objective.preset=hcl objective.beta=1 trainer.epochs=100

    hardneg train my.yaml data.source=photos/ data.size=96 --run runs/photos

    hardneg train --resume runs/photos

    hardneg train --resume runs/photos trainer.epochs=300    (longer than planned)"""
)
def train(
    recipe: Recipe = None,
    overrides: Overrides = None,
    run: Annotated[Path | None, typer.Option(help="Folder of the run [default: runs/RECIPE-1, -2, …].")] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this folder.")] = None,
    evaluate: Annotated[bool, typer.Option(help="Evaluate the encoder afterwards, if there are labels.")] = True,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Train an encoder by a recipe. Ctrl-C or a crash leaves a run that **--resume** continues exactly."""
    from hardneg.training import recipe as recipes
    from hardneg.training import run as runs
    from hardneg.training.callbacks.progress_bar import Bar, bars
    from hardneg.training.evaluate import evaluate as evaluate_run

    settings, epochs = None, None
    if resume is not None:
        epochs = _more_epochs([*([] if recipe is None else [recipe]), *(overrides or [])])
        if run is not None:
            raise ValueError("--resume continues a run in its folder: leave out --run")
    else:
        trust = True  # the user has started this recipe
        if recipe is None:
            raise ValueError("name a recipe, e.g. hardneg train digits-simclr, or give --resume FOLDER")
        if "=" in recipe and not Path(recipe).is_file():
            raise ValueError(f"the recipe comes first: hardneg train RECIPE {recipe}")
        recipes.check_once(overrides or [])
        settings = recipes.load(recipes.find(recipe), overrides or [])
    if trust:
        _import_from_here()
    with _folder_of(run or resume, recipe) as folder, bars(Console(stderr=True, quiet=as_json)) as progress:
        os.environ["HARDNEG_RUN"] = str(folder)
        bar = Bar(progress, folder.name)
        result = runs.train(settings, folder, resume is not None, [bar], epochs=epochs, trust=trust)
    if "LOCAL_RANK" in os.environ:  # one of several processes
        time.sleep(1)  # Python aborts if a thread of gloo's still holds a tensor when it is shut down (pytorch#190489)
    if not _is_first():
        return  # the first process of all machines prints the results
    figures = None
    if evaluate:
        try:
            figures = evaluate_run(folder, trust=trust)
        except (ValueError, FileNotFoundError) as error:
            note(f"not evaluated: {error}")
    if as_json:
        print_json({"run": str(folder), "metrics": result.metrics, "evaluation": figures.to_json() if figures else {}})
        return
    say(f"trained in {folder}: loss {result.metrics['loss']:.4f} after epoch {result.metrics['epoch']}")
    if figures:
        noted = {name: f" ({note})" for name, note in figures.notes.items()}
        say(
            " · ".join(
                f"{(shown := figures.format(name)).title} {shown.text(figure)}{noted.get(name, '')}"
                for name, figure in figures.items()
            )
        )
    say(f"next: hardneg report {_named(folder)}", style="dim")


@app.command(
    epilog="""Examples:

    hardneg compare digits-simclr --over objective.preset=simclr,debiased,hcl --seeds 3

    hardneg compare cifar10-simclr trainer.epochs=100 --over 'objective={preset: simclr},{preset: hcl, beta: 1}'

    hardneg compare cifar10-simclr cifar10-simclr-prosampler --run runs/samplers

Run the same command again after an interruption: finished runs are kept, the others are resumed."""
)
def compare(
    recipes: Annotated[
        list[str], typer.Argument(metavar="RECIPE... [KEY=VALUE]...", help="Recipes, then settings for all.")
    ],
    over: Annotated[
        list[str] | None, typer.Option(help="key=value,value…: a dimension of the grid; may be repeated.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds, from 0 on.")] = 3,
    run: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs/compare"),
    baseline: Annotated[
        str | None, typer.Option(help="The row to compare with, by its name or as typed [default: the first].")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train recipes × settings × seeds and print mean ± std, with the difference to a baseline."""
    from hardneg.training import compare as comparing
    from hardneg.training.recipe import needs_trust

    _import_from_here()
    names = [entry for entry in recipes if "=" not in entry]
    cells = comparing.grid(names, [entry for entry in recipes if "=" in entry], over or [])
    rows = comparing.rows(cells, baseline, "recipe" if len(names) > 1 else None)
    runs = comparing.plan(cells, run, range(seeds))
    comparing.check_data(runs)
    failed = _carry_out(runs, quiet=as_json)
    more = {"run": str(run), "failed": failed}
    comparing.write_rows(run, rows)
    comparing.write_failures(run, failed)
    show_table(
        comparing.results(runs),
        comparing.notes(runs),
        rows.baseline,
        as_json,
        more,
        comparing.formats(runs),
        Counter(name.rpartition(", seed ")[0] for name in failed),
        rows.heading,
    )
    if not as_json:
        trusted = " --trust" * any(needs_trust(planned.settings) for planned in cells)
        say(f"next: hardneg report {shlex.quote(str(run))}{trusted}", style="dim")
    if failed:
        raise typer.Exit(1)


@app.command(epilog="Example:\n\n    hardneg demo --seeds 5 --run runs/digits")
def demo(
    everything: Annotated[
        bool, typer.Option("--all", help="Add the methods with a memory and the batch samplers.")
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 3,
    run: Annotated[Path, typer.Option(help="Folder of all runs and of the report.")] = Path("runs/demo"),
    epochs: Annotated[int | None, typer.Option(min=1, help="Of each run [default: the recipe's].")] = None,
    as_json: Json = False,
) -> None:
    """Compare ways of choosing negatives on scikit-learn's digits: a table and a report in three minutes on a CPU."""
    import torch

    from hardneg import demo as shown
    from hardneg.insight.report import write_report
    from hardneg.training import compare as comparing

    torch.set_num_threads(1)  # the tensors are small: synchronizing threads would cost more time than it saves
    cells = shown.cells(everything, () if epochs is None else (f"trainer.epochs={epochs}",))
    runs = comparing.plan(cells, run, range(seeds))
    finished = sum(planned.finished for planned in runs)
    if finished:
        note(f"{finished} of {len(runs)} runs are already in {run} and are not repeated; remove it to start again")
    failed = _carry_out(runs, quiet=as_json)
    untrained, notes = shown.untrained_rows(list(range(seeds)))
    comparing.write_rows(run, comparing.rows(cells))
    comparing.write_failures(run, failed)
    begun = [planned for planned in runs if (planned.folder / "recipe.yaml").exists()]
    if not begun:
        raise typer.Exit(1)  # the errors are printed already
    page = write_report(
        [planned.folder for planned in begun],
        run / "report.html",
        names=[planned.cell.name for planned in begun],
        baseline="SimCLR",
        extra_rows=untrained,
        extra_notes=notes,
        failed=failed,
    )
    rows, notes = {**untrained, **comparing.results(runs)}, {**notes, **comparing.notes(runs)}
    more = {"run": str(run), "report": str(page), "failed": failed}
    show_table(rows, notes, "SimCLR", as_json, more, failed=Counter(name.rpartition(", seed ")[0] for name in failed))
    if not as_json:
        say(f"report: {page}")
    if failed:
        raise typer.Exit(1)


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
        _import_from_here()
    figures = evaluate_run(run, data, size, trust=trust)
    if as_json:
        print_json(figures.to_json())
        return
    table = Table("metric", "value", title=cell(f"{run}" + (f" on {data}" if data else "")))
    for name, figure in figures.items():
        shown = figures.format(name)
        table.add_row(cell(shown.heading), f"{shown.text(figure)}{MARK * (name in figures.notes)}")
    out.print(table)
    for name, note_text in figures.notes.items():
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
        _import_from_here()
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


@app.command(epilog="Examples:\n\n    hardneg recipes\n\n    hardneg recipes cifar10-simclr > mine.yaml")
def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this one.", autocompletion=_recipe_names)] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema that editors complete from.")] = False,
    as_json: Json = False,
) -> None:
    """List the recipes, or print one as YAML as a starting point for your own."""
    from hardneg.training import recipe
    from hardneg.training.yaml_files import text_of

    if schema:
        print_json(recipe.json_schema())
        return
    if name is not None and as_json:
        print_json(recipe.tree_of(recipe.load(recipe.find(name))))
        return
    if name is not None:
        text = text_of(recipe.find(name))
        if sys.stdout.isatty():
            sys.stdout.write(printable(text))
        else:
            sys.stdout.buffer.write(text.encode())  # recipes are UTF-8 in every locale
        return
    abouts = {each: recipe.about(file) for each, file in recipe.known().items()}
    if as_json:
        print_json(abouts)
        return
    table = Table("recipe", "what it reproduces", box=None)
    for each, about in abouts.items():
        table.add_row(each, cell(about))
    out.print(table)


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
        _import_from_here()
    made, difference = exporting.export_run(run, form, to, trust=trust)
    if as_json:
        print_json({"file": str(made), "difference": difference})
        return
    say(f"{made}: outputs differ by at most {difference:.1e}")


@app.command(epilog="Examples:\n\n    hardneg doctor\n\n    hardneg doctor --warm --batch-size 1024 --dim 256")
def doctor(
    warm: Annotated[
        bool, typer.Option("--warm", help="Compile the GPU kernels of all presets ahead, instead of the checks.")
    ] = False,
    batch_size: Annotated[int | None, typer.Option(min=2, help="With --warm [default: 256].")] = None,
    dim: Annotated[int | None, typer.Option(min=1, help="Of the embeddings, with --warm [default: 128].")] = None,
    as_json: Json = False,
) -> None:
    """Check versions, devices, data and extras, and print how to fix what is missing."""
    from hardneg.doctor import examine

    if warm:
        _warm_up(batch_size or 256, dim or 128, as_json)
        return
    if batch_size is not None or dim is not None:
        raise ValueError("--batch-size and --dim belong to --warm: add it, or leave them out")
    findings = examine()
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
        return
    colors = {"ok": "green", "missing": "dim", "warning": "yellow", "broken": "red"}
    table = Table("what", "", "found", "fix", box=None)
    for finding in findings:
        color = colors[finding.status]
        table.add_row(finding.name, f"[{color}]{finding.status}[/]", cell(finding.detail), cell(finding.fix))
    out.print(table)
    if any(finding.status == "broken" for finding in findings):
        raise typer.Exit(1)


def _warm_up(batch_size: int, dim: int, as_json: bool) -> None:
    """Compile the kernels of all presets, and print the seconds of each."""
    from hardneg.warm_up import warm_up

    done = list(warm_up(batch_size, dim))
    if as_json:
        print_json([dataclasses.asdict(each) for each in done])
    else:
        table = Table("preset", "dtype", "seconds", "", box=None)
        for each in done:
            error = " ".join(each.error.split())
            table.add_row(each.preset, each.dtype, f"{each.seconds:.2f}", f"[red]{cell(error)}[/]" if error else "")
        out.print(table)
        say(f"{sum(each.seconds for each in done):.1f} s for embeddings of shape ({batch_size}, {dim})")
    if any(each.error for each in done):
        raise typer.Exit(1)


mining_command.register(app)


def main() -> None:
    """Run the command line; errors in the input are printed in one line, with exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: characters the terminal lacks are not an error
    warnings.showwarning = lambda message, *rest, **more: note(str(message))
    try:
        code = typer.main.get_command(app)(standalone_mode=False)
        if code == INTERRUPTED:  # typer has turned Ctrl-C into this
            _stop()
        sys.exit(code if isinstance(code, int) else 0)
    except (typer.Abort, KeyboardInterrupt) as error:
        if isinstance(error.__cause__, EOFError):  # which typer treats as the end of the input
            fail(f"a file ended too early ({error.__cause__}): HARDNEG_TRACEBACK=1 shows which")
        _stop()
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("HARDNEG_TRACEBACK"):
            raise
        remedy = isinstance(error, ImportError) and "pip install" not in str(error)
        fail(str(error) + (': pip install "hardneg[train]"' if remedy else ""), getattr(error, "exit_code", 2))
    except Exception as error:
        # Errors of the command-line parser, whose classes typer does not export.
        if not hasattr(error, "format_message"):
            raise
        fail(f"{error.format_message()} Help: hardneg --help")


def _stop() -> None:
    folder = os.environ.get("HARDNEG_RUN")
    again = "nothing was written" if sys.argv[1:2] == ["train"] else "the same command resumes it"
    if folder is not None:
        begun = (Path(folder) / "recipe.yaml").exists()
        again = f"resume with: hardneg train --resume {_named(Path(folder))}" if begun else "nothing was written"
    remark(f"\nstopped; {again}")
    sys.exit(INTERRUPTED)


def _import_from_here() -> None:
    """Allow imports from the current directory, for user-defined encoders; only if the recipe is trusted."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def _named(folder: Path) -> str:
    """A run folder as an argument of the next command, with ``--trust`` if that is needed."""
    from hardneg.training import recipe

    trusted = recipe.needs_trust(recipe.load(folder / "recipe.yaml"))
    return shlex.quote(str(folder)) + " --trust" * trusted


def _folder_of(named: Path | None, recipe: str | None) -> AbstractContextManager[Path]:
    """The folder of a run: as given, or a new one, unique to this process; removed if the run leaves it empty."""
    from hardneg.training import run_folder

    # The further processes of one run are started with this command line, and must find the same folder.
    if "LOCAL_RANK" in os.environ and "HARDNEG_RUN" in os.environ:
        return nullcontext(Path(os.environ["HARDNEG_RUN"]))
    if named is not None:
        return nullcontext(named)
    root, stem = Path("runs"), Path(recipe or "run").stem
    return run_folder.numbered(root, stem) if _is_first() else nullcontext(root / stem)  # which writes nothing


def _more_epochs(settings: list[str]) -> int | None:
    """The number of epochs that a run is resumed with; any other setting is an error."""
    from hardneg.training import yaml_files

    if not settings:
        return None
    key, _, text = settings[0].partition("=")
    if len(settings) > 1 or key != "trainer.epochs":
        raise ValueError(
            "--resume continues a run as it was started: leave out the recipe and all settings except trainer.epochs"
        )
    epochs = yaml_files.parse(text, "the value of trainer.epochs")
    if not isinstance(epochs, int) or isinstance(epochs, bool):
        raise ValueError(f"trainer.epochs must be an integer, got {text!r}")
    return epochs


def _is_first() -> bool:
    """Whether this is the first process of the run on all machines, or the only one."""
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"


def _runs_below(folder: Path) -> list[Path]:
    """The folder itself if it is a run, else the runs below it."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}: give the folder of a run or of a comparison")
    found = [file.parent for file in sorted(folder.glob("**/recipe.yaml"))]
    if not found:
        raise ValueError(f"{folder} holds no run: recipe.yaml is missing")
    return found


def _carry_out(runs: Sequence["Run"], quiet: bool) -> dict[str, str]:
    """Train the unfinished runs, with progress bars; returns the error message of each run that failed."""
    from hardneg.training import compare as comparing
    from hardneg.training.callbacks.progress_bar import Bar, bars

    failed: dict[str, str] = {}
    with bars(Console(stderr=True, quiet=quiet)) as progress:
        whole = progress.add_task("all runs", total=len(runs), facts="")

        def watched(planned: "Run") -> list[Bar]:
            return [Bar(progress, f"{planned.cell.name}, seed {planned.seed}")]

        for done, error in comparing.carry_out(runs, watched):
            progress.advance(whole)
            name = f"{done.cell.name}, seed {done.seed}"
            if error is not None:
                failed[name] = " ".join(str(error).split())
                note(f"failed: {name}: {error}")
            elif not quiet and not err.is_terminal:  # one line per run in a log file
                remark(f"done: {name}")
    return failed

"""``hardneg compare`` and ``hardneg demo``: several runs and a table."""

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hardneg.cli.app import Json, app, import_from_here
from hardneg.terminal import err, note, remark, say, show_table

if TYPE_CHECKING:
    from hardneg.training.compare import Run


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

    import_from_here()
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


def _carry_out(runs: Sequence["Run"], quiet: bool) -> dict[str, str]:
    """Train the unfinished runs, with progress bars; returns the error message of each run that failed."""
    from hardneg.training import compare as comparing
    from hardneg.training.callbacks.progress_bar import Bar, bars
    from hardneg.training.callbacks.progress_lines import ProgressLines

    failed: dict[str, str] = {}
    with bars(Console(stderr=True, quiet=quiet)) as progress:
        whole = progress.add_task("all runs", total=len(runs), facts="")

        def watched(planned: "Run") -> list[Bar | ProgressLines]:
            name = f"{planned.cell.name}, seed {planned.seed}"
            if err.is_terminal:
                return [Bar(progress, name)]
            return [] if quiet else [ProgressLines(remark, name)]

        for done, error in comparing.carry_out(runs, watched):
            progress.advance(whole)
            name = f"{done.cell.name}, seed {done.seed}"
            if error is not None:
                failed[name] = " ".join(str(error).split())
                note(f"failed: {name}: {error}")
            elif not quiet and not err.is_terminal:  # one line per run in a log file
                remark(f"done: {name}")
    return failed

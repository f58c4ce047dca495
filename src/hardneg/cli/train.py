"""``hardneg train``."""

import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hardneg.cli.app import Json, Overrides, Recipe, Trust, app, import_from_here, named
from hardneg.terminal import err, note, print_json, remark, say, say_list


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
    from hardneg.training.callbacks.progress_lines import Plan, ProgressLines
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
        import_from_here()
    with _folder_of(run or resume, recipe) as folder, bars(Console(stderr=True, quiet=as_json)) as progress:
        os.environ["HARDNEG_RUN"] = str(folder)
        bar = Bar(progress, folder.name) if err.is_terminal else ProgressLines(remark)
        callbacks = [] if as_json else [Plan(remark), bar]
        result = runs.train(settings, folder, resume is not None, callbacks, epochs=epochs, trust=trust)
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
    reached = f"loss {result.metrics['loss']:.4f} after epoch {result.metrics['epoch']}"
    if result.already_finished:
        say(f"already finished, with {reached}: nothing to train; add trainer.epochs=N to train longer")
    else:
        say(f"trained in {folder}: {reached}")
    if figures:
        noted = {name: f" ({note})" for name, note in figures.main_notes.items()}
        say_list(
            f"{(shown := figures.format(name)).title} {shown.text(figure)}{noted.get(name, '')}"
            for name, figure in figures.items()
        )
        if figures.measured:
            say(figures.measured)
    say(f"next: hardneg report {named(folder)}", style="dim")


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

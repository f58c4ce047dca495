"""The application of the command line, and what its commands share."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

import hardneg

# Modules that take seconds to import (torch, lightning) are imported in the commands, so that --help is fast.
app = typer.Typer(
    name="hardneg",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def recipe_names(incomplete: str) -> list[str]:
    """The built-in recipes whose names begin with a text, for completion in shells."""
    folder = Path(__file__).parents[1] / "recipes"
    return sorted(file.stem for file in folder.glob("*.yaml") if file.stem.startswith(incomplete))


Recipe = Annotated[
    str | None,
    typer.Argument(help="A built-in recipe (see **hardneg recipes**) or a YAML file.", autocompletion=recipe_names),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that differ from the recipe.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines, and no progress.")]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Run the code that the folder names, **module:callable**: encoder, views, data, metrics."
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hardneg {hardneg.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Choose the negatives of contrastive learning. Begin with **hardneg demo**."""


def import_from_here() -> None:
    """Allow imports from the current directory, for user-defined encoders; only if the recipe is trusted."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def named(folder: Path) -> str:
    """A run folder as an argument of the next command, with ``--trust`` if that is needed."""
    from hardneg.training import recipe

    trusted = recipe.needs_trust(recipe.load(folder / "recipe.yaml"))
    return shlex.quote(str(folder)) + " --trust" * trusted

"""``hardneg recipes`` and ``hardneg doctor``."""

import dataclasses
import sys
from typing import Annotated

import typer
from rich.table import Table

from hardneg.cli.app import Json, app, recipe_names
from hardneg.printable import printable
from hardneg.terminal import cell, out, print_json, say


@app.command(epilog="Examples:\n\n    hardneg recipes\n\n    hardneg recipes cifar10-simclr > mine.yaml")
def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this one.", autocompletion=recipe_names)] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema that editors complete from.")] = False,
    as_json: Json = False,
) -> None:
    """List the recipes, or print one as YAML as a starting point for your own."""
    from hardneg.training import recipe_files
    from hardneg.training.yaml_files import text_of

    if schema:
        from hardneg.training.recipe import json_schema

        print_json(json_schema())
        return
    if name is not None and as_json:
        from hardneg.training.recipe import load, tree_of

        print_json(tree_of(load(recipe_files.find(name))))
        return
    if name is not None:
        text = text_of(recipe_files.find(name))
        if sys.stdout.isatty():
            sys.stdout.write(printable(text))
        else:
            sys.stdout.buffer.write(text.encode())  # recipes are UTF-8 in every locale
        return
    abouts = {each: recipe_files.about(file) for each, file in recipe_files.known().items()}
    if as_json:
        print_json(abouts)
        return
    table = Table("recipe", "what it is for", box=None)
    for each, about in abouts.items():
        table.add_row(each, cell(about))
    out.print(table)


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

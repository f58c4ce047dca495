"""``hardneg data``: published data sets."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from hardneg.cli.app import Json, app
from hardneg.terminal import cell, out, print_json, say


@app.command(
    epilog="""Examples:

    hardneg data

    hardneg data cifar10 --from ~/Downloads/cifar-10-python.tar.gz

    hardneg data cifar10 --from hf:uoft-cs/cifar10

    hardneg data tu:MUTAG --from ~/Downloads/MUTAG.zip

    hardneg data tu:MUTAG --download"""
)
def data(
    name: Annotated[str | None, typer.Argument(help="A set of images (listed without a name), or tu:NAME.")] = None,
    source: Annotated[
        str | None, typer.Option("--from", help="The archive, a folder that holds it, or hf:NAME [default: --to].")
    ] = None,
    to: Annotated[Path, typer.Option(help="The folder in which recipes find the set.")] = Path("data"),
    download: Annotated[bool, typer.Option("--download", help="Download the archive if it is not there.")] = False,
    as_json: Json = False,
) -> None:
    """Put a published data set where recipes find it: CIFAR-10, STL-10, TinyImageNet, the TU graphs."""
    from hardneg import published_data

    sets = published_data.known(to) if name is None else [published_data.prepare(name, to, source, download)]
    if as_json:
        print_json([dataclasses.asdict(each) for each in sets])
    elif name is None:
        table = Table("name", "data.source", "", "contents", box=None)
        for each in sets:
            table.add_row(each.name, cell(each.source), "[green]there[/]" if each.present else "", cell(each.about))
        out.print(table)
        say("graphs: hardneg data tu:NAME, such as tu:MUTAG", style="dim")
    else:
        say(f"{sets[0].source}: {sets[0].about}")

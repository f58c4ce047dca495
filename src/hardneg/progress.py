"""A progress bar for loops outside a trainer."""

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from hardneg.printable import printable


def progress(steps: range, title: str) -> Iterator[int]:
    """Iterate over the steps with a progress bar on stderr, by rich if installed; only if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield from steps
        return
    title = printable(title)
    try:
        console: Any = import_module("rich.console").Console(stderr=True)
        name = import_module("rich.markup").escape(title)
        yield from import_module("rich.progress").track(steps, name, console=console, transient=True)
    except ImportError:
        for done, step in enumerate(steps):
            print(f"\r{title}: {100 * done // len(steps)} % ", end="", file=sys.stderr, flush=True)
            yield step
        print("\r" + " " * (len(title) + 8) + "\r", end="", file=sys.stderr, flush=True)

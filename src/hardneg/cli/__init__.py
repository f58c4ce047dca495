"""The command line: thin commands over the library; every error in the input is reported in one line.

Progress and notes are written to stderr, results to stdout. Exit code 2: the input was invalid; nothing was changed.
Exit code 1: a run failed, or the doctor found something broken.
"""

import io
import os
import re
import sys
import warnings
from pathlib import Path

import typer

# These add their commands to the application, in the order of --help.
from hardneg.cli import train  # noqa: F401

# isort: split
from hardneg.cli import compare, data, explore, information, mine, runs, theory  # noqa: F401
from hardneg.cli.app import app, named
from hardneg.terminal import fail, note, remark

INTERRUPTED = 130


def main() -> None:
    """Run the command line; errors in the input are printed in one line, with exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: characters the terminal lacks are not an error
    told: set[str] = set()  # data are read several times in one command, and would warn each time

    def show_once(message: Warning | str, *rest: object, **more: object) -> None:
        if (text := str(message)) not in told:
            told.add(text)
            note(text)

    shown, run = warnings.showwarning, os.environ.get("HARDNEG_RUN")
    warnings.showwarning = show_once
    try:
        code = typer.main.get_command(app)(args=sys.argv[1:] or ["--help"], standalone_mode=False)
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
        fail(f"{_in_plain_words(error.format_message()).rstrip('.')}.{_setting_meant(error)} Help: hardneg --help")
    finally:  # for a program that calls this and goes on: its next torchrun must not find the folder of this run
        warnings.showwarning = shown
        os.environ.pop("HARDNEG_RUN", None)
        if run is not None:
            os.environ["HARDNEG_RUN"] = run


def _in_plain_words(message: str) -> str:
    """An error of the command-line parser, where it quotes its validator, in the form of the other errors.

    Examples:
        >>> _in_plain_words("Invalid value for '--seeds': Input should be greater than or equal to 1")
        '--seeds must be ≥ 1'
    """
    found = re.fullmatch(r"Invalid value for '([^']*)': Input should be (.*?)\.?", message)
    if found is None:
        return message
    option, wanted = found.groups()
    for theirs, ours in (("greater than or equal to", "≥"), ("less than or equal to", "≤")):
        wanted = wanted.replace(theirs, ours)
    return f"{option} must be {wanted.partition(', unable to parse')[0]}{_given(option)}"


def _given(option: str) -> str:
    """The value that the command line gives for an option, as the end of an error."""
    value = next((each.partition("=")[2] for each in sys.argv if each.startswith(f"{option}=")), None)
    if value is None and option in sys.argv[:-1]:
        value = sys.argv[sys.argv.index(option) + 1]
    return "" if value is None else f", got {value!r}"


def _setting_meant(error: Exception) -> str:
    """A hint if an unknown option, such as ``--epochs 9``, is the name of a setting, ``trainer.epochs=9``."""
    option = getattr(error, "option_name", None)
    if option is None or sys.argv[1] not in ("train", "compare"):
        return ""
    given = next((entry for entry in sys.argv if entry.partition("=")[0] == option), option)
    following = sys.argv[sys.argv.index(given) + 1 :] if given in sys.argv else []
    text = given.partition("=")[2] or next((entry for entry in following[:1] if entry[:1] != "-"), "VALUE")
    name = option.lstrip("-")
    if "." in name:
        return f" Settings have no dashes: write {name}={text}."
    from hardneg.training import recipe, recipe_errors

    keys = recipe_errors.keys_named(name, recipe.model("simclr", "images"))
    return f" Did you mean {' or '.join(f'{key}={text}' for key in keys)}?" if keys else ""


def _stop() -> None:
    command = sys.argv[1] if sys.argv[1:] else ""
    again = f"the same command {'resumes' if command in ('compare', 'mine') else 'repeats'} it"
    if command == "train":
        folder = os.environ.get("HARDNEG_RUN")
        begun = folder is not None and (Path(folder) / "recipe.yaml").exists()
        again = (
            f"resume with: hardneg train --resume {named(Path(folder))}" if folder and begun else "nothing was written"
        )
    remark(f"\nstopped; {again}")
    sys.exit(INTERRUPTED)

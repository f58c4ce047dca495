"""The command line as tests call it."""

import sys

import pytest

from hardneg import cli


def hardneg(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command run in this process."""
    before = sys.argv
    sys.argv = ["hardneg", *arguments]
    try:
        with pytest.raises(SystemExit) as stop:
            cli.main()
    finally:
        sys.argv = before
    printed = capsys.readouterr()
    return int(stop.value.code or 0), printed.out, printed.err

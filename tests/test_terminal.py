"""What the terminal shows of names from elsewhere: no escape sequences, no reversed text, no markup."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from hardneg import terminal
from hardneg.printable import printable
from hardneg.training.callbacks.progress_bar import bars

RED, TITLE, REVERSED, ISOLATED = "\x1b[31m", "\x1b]0;mine\x07", "\u202egnp.exe", "\u2066a\u2069"
CARRIAGE, C1, SEPARATOR = "a\rb", "\x9b31m", "a\u2028b"
BAD = "[bold]x[/bold][/nothing]" + RED + TITLE + REVERSED + ISOLATED + CARRIAGE + C1 + SEPARATOR


def assert_harmless(text: str) -> None:
    assert not [letter for letter in text if (ord(letter) < 32 and letter != "\n") or 127 <= ord(letter) < 160]
    assert not [letter for letter in text if ord(letter) in {0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F),
                                                             *range(0x2066, 0x206A)}]  # fmt: skip


def test_what_cannot_be_seen_is_written_out() -> None:
    assert printable("a\x1bb\u202ec\x9bd\r") == "a\\x1bb\\u202ec\\x9bd\\r"
    assert printable("τ⁺ שלום 好 é 👍🏽\n\tend") == "τ⁺ שלום 好 é 👍🏽\n\tend"
    assert printable("\ud800") == "\\ud800"  # of a file name that is not UTF-8
    assert_harmless(printable(BAD))


def test_every_way_of_printing_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    for name in ("out", "err"):
        monkeypatch.setattr(terminal, name, Console(file=file, width=400, no_color=True))
    terminal.say(BAD)
    terminal.note(BAD)
    with pytest.raises(SystemExit):
        terminal.fail(BAD)
    terminal.show_table({BAD: {"knn": [0.5, 0.6]}, "b": {"knn": [0.5]}}, {}, "b", False, {})
    assert_harmless(file.getvalue())
    assert file.getvalue().count("[bold]x[/bold][/nothing]") == 4
    assert file.getvalue().count("\\u202egnp.exe") == 4


def test_a_bar_shows_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    with bars(Console(file=file, width=400, force_terminal=True, no_color=True)) as progress:
        progress.add_task(BAD, total=1, facts="")
    assert "[bold]x[/bold][/nothing]\\x1b[31m" in file.getvalue()
    assert "\u202e" not in file.getvalue()


def test_a_name_in_a_recipe_reaches_no_terminal(tmp_path: Path) -> None:
    """A real process: errors, notes and printed recipes."""
    (tmp_path / "bad.yaml").write_text('about: "\\x1b[31m"\nencoder: {name: "\\x1b]0;mine\\x07"}\n# \u202e hidden\n')
    command = [sys.executable, "-m", "hardneg", "train", "bad.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert_harmless(done.stderr)

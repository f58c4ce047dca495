"""Terminal output: untrusted names are printed without escape sequences, and tables mark differences correctly."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from hardneg import terminal
from hardneg.evaluation import MetricFormat
from hardneg.printable import printable
from hardneg.training.callbacks.progress_bar import bars

RED, TITLE, REVERSED, ISOLATED = "\x1b[31m", "\x1b]0;mine\x07", "\u202egnp.exe", "\u2066a\u2069"
CARRIAGE, C1, SEPARATOR = "a\rb", "\x9b31m", "a\u2028b"
BAD = "[bold]x[/bold][/nothing]" + RED + TITLE + REVERSED + ISOLATED + CARRIAGE + C1 + SEPARATOR


def assert_harmless(text: str) -> None:
    assert not [letter for letter in text if (ord(letter) < 32 and letter != "\n") or 127 <= ord(letter) < 160]
    assert not [letter for letter in text if ord(letter) in {0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F),
                                                             *range(0x2066, 0x206A)}]  # fmt: skip


def test_invisible_characters_are_escaped() -> None:
    assert printable("a\x1bb\u202ec\x9bd\r") == "a\\x1bb\\u202ec\\x9bd\\r"
    assert printable("τ⁺ שלום 好 é 👍🏽\n\tend") == "τ⁺ שלום 好 é 👍🏽\n\tend"
    assert printable("\ud800") == "\\ud800"  # from a file name that is not UTF-8
    assert_harmless(printable(BAD))


def test_every_function_prints_untrusted_names_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    for name in ("out", "err"):
        monkeypatch.setattr(terminal, name, Console(file=file, width=400, no_color=True))
    terminal.say(BAD)
    terminal.note(BAD)
    with pytest.raises(SystemExit):
        terminal.fail(BAD)
    terminal.show_table({BAD: {"knn": [0.5, 0.6]}, "b": {"knn": [0.5]}}, {}, "b", False, {})
    assert_harmless(file.getvalue())
    assert file.getvalue().count("[bold]x[/bold][/nothing]") == 5
    assert file.getvalue().count("\\u202egnp.exe") == 5


ROWS = {
    "base": {"knn": [0.80, 0.81, 0.82], "uniformity": [-1.0, -1.1, -1.2]},
    "one": {"knn": [0.90, 0.91, 0.92], "uniformity": [-2.0, -2.1, -2.2]},
    "two": {"knn": [0.70, 0.71, 0.72], "uniformity": [0.5, 0.6, 0.7]},
    "three": {"knn": [0.79, 0.81, 0.83], "uniformity": [-1.0, -1.1, -1.21]},
}
FORMATS = {"uniformity": MetricFormat("uniformity", better="lower", percent=False)}


def test_a_table_marks_better_and_worse_by_the_direction_of_the_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(terminal, "out", Console(file=file, width=200, force_terminal=True, color_system="standard"))
    terminal.show_table(ROWS, {}, "base", False, {}, FORMATS)
    text = file.getvalue()
    assert "kNN %" in text
    assert "uniformity ↓" in text
    lines = text.splitlines()

    def differences(name: str) -> str:
        return lines[next(i for i, line in enumerate(lines) if line.split()[:1] == [name]) + 1]

    assert "▲ +10.0±0.8" in differences("one")
    assert "▲ −1±0.0816" in differences("one")  # lower is better
    assert "▼ −10.0±0.8" in differences("two")
    assert "▼ +1.7±0.0816" in differences("two")
    assert differences("three").count("≈") == 2
    bold = [line for line in lines if "\x1b[1m91.0±1.0" in line]
    assert len(bold) == 1
    assert "\x1b[1m−2.1±0.1" in bold[0]  # the lowest is the best
    assert "91.0" in differences("base")  # the baseline has no line of differences: the next row follows


FIVE = {
    name: {metric: [0.9 + gain, 0.91 + gain, 0.92 + gain] for metric in ("knn", "nearest", "linear", "few_1", "few_5")}
    for name, gain in (("simclr", 0.0), ("hcl (beta 1, tau_plus 0.1)", 0.001), ("temperature 0.2", 0.05))
}


def printed(monkeypatch: pytest.MonkeyPatch, width: int, rows: dict[str, dict[str, list[float]]]) -> list[str]:
    file = io.StringIO()
    for name in ("out", "err"):
        console = Console(file=file, width=width, force_terminal=True, no_color=True, color_system=None)
        monkeypatch.setattr(terminal, name, console)
    terminal.show_table(rows, {}, "simclr", False, {}, heading="loss")
    return file.getvalue().splitlines()


@pytest.mark.parametrize(("width", "metrics"), [(60, 3), (80, 5), (120, 5)])
def test_a_table_fits_its_terminal_and_drops_metrics_rather_than_names(
    monkeypatch: pytest.MonkeyPatch, width: int, metrics: int
) -> None:
    lines = printed(monkeypatch, width, FIVE)
    assert max(map(len, lines)) <= width
    rule = next(number for number, line in enumerate(lines) if line.startswith("───"))
    assert lines[rule - 1].startswith("loss ")
    assert lines[rule + 1].split() == ["simclr", *["91.0±1.0"] * metrics]
    names = " ".join(line[: len(lines[rule]) - 12 * metrics].strip() for line in lines[rule + 1 : rule + 6])
    assert " ".join(names.split()) == "simclr hcl (beta 1, tau_plus 0.1) temperature 0.2"
    # All cells of a column end at the same place.
    ends = {tuple(m.end() for m in re.finditer(r"±\d\.\d", line)) for line in lines[rule + 1 : rule + 6]}
    assert len({end for end in ends if end}) == 1
    left_out = [line for line in lines if "more metric" in line]
    assert left_out == ([] if metrics == 5 else ["note: 2 more metrics in a wider terminal, or with --json"])
    assert "temperature 0.2 beats simclr in every metric." in " ".join(" ".join(lines).split())
    if width >= 80:
        assert lines[-3:] == [
            "mean ± std over seeds; below, the difference from simclr ± its standard error",
            "▲ better, ▼ worse, ≈ not significant at the 0.05 level",
            "bold: significantly better than every other row",
        ]


def test_a_list_of_results_is_broken_between_results(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(terminal, "out", Console(file=file, width=20, force_terminal=True, color_system=None))
    terminal.say_list(["kNN 38.9 %", "1-NN 3 %", "linear probe 38.9 %", "1 label/class 31.9 %"])
    assert file.getvalue().splitlines() == ["kNN 38.9 %", "1-NN 3 %", "linear probe 38.9 %", "1 label/class 31.9 %"]
    file.truncate(file.seek(0))
    terminal.say_list(["kNN 9 %", "1-NN 3 %", "linear probe 38.9 %"])
    assert file.getvalue().splitlines() == ["kNN 9 % · 1-NN 3 %", "linear probe 38.9 %"]


def test_a_heading_has_no_empty_lines_and_single_seeds_no_test(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {name: {metric: values[:1] for metric, values in row.items()} for name, row in FIVE.items()}
    lines = printed(monkeypatch, 80, one)
    assert [line.split() for line in lines[:2]] == [
        ["linear", "1", "label/", "5", "labels/"],
        ["loss", "kNN", "%", "1-NN", "%", "probe", "%", "class", "%", "class", "%"],
    ]
    assert "±" not in "".join(lines)
    assert "significant" not in "".join(lines)


def test_long_names_fold_and_leave_one_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"simclr": FIVE["simclr"], "w" * 200: FIVE["simclr"], "好" * 60: FIVE["simclr"]}
    lines = printed(monkeypatch, 60, rows)
    assert max(map(cell_len, lines)) <= 60
    table = "".join(lines[: next(number for number, line in enumerate(lines) if "more metric" in line)])
    assert table.count("w") == 200
    assert table.count("好") == 60
    assert table.count("91.0±1.0") in (3, 6)


def test_a_file_gets_all_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(terminal, "out", Console(file=file, width=60))
    terminal.show_table(FIVE, {}, "simclr", False, {})
    rows = [line for line in file.getvalue().splitlines() if "91.0±1.0" in line]
    assert rows[0].count("91.0±1.0") == 5


def test_json_describes_the_metrics_and_the_significance(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.show_table(ROWS, {}, "base", True, {"run": "here"}, FORMATS)
    printed = json.loads(capsys.readouterr().out)
    assert printed["metrics"]["uniformity"] == {"title": "uniformity", "better": "lower", "percent": False}
    assert printed["metrics"]["knn"]["better"] == "higher"
    one, three = (printed["rows"][name]["uniformity"] for name in ("one", "three"))
    assert one["difference"] == pytest.approx(-1)
    assert (one["significant"], one["best"], three["significant"], three["best"]) == (True, True, False, False)
    assert not printed["rows"]["two"]["uniformity"]["best"]


def test_a_progress_bar_shows_untrusted_names_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    with bars(Console(file=file, width=400, force_terminal=True, no_color=True)) as progress:
        progress.add_task(BAD, total=1, facts="")
    assert "[bold]x[/bold][/nothing]\\x1b[31m" in file.getvalue()
    assert "\u202e" not in file.getvalue()


def test_control_characters_of_a_recipe_are_escaped(tmp_path: Path) -> None:
    """In a real process: errors, notes and printed recipes."""
    (tmp_path / "bad.yaml").write_text('about: "\\x1b[31m"\nencoder: {name: "\\x1b]0;mine\\x07"}\n# \u202e hidden\n')
    command = [sys.executable, "-m", "hardneg", "train", "bad.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert_harmless(done.stderr)

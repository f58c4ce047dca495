"""`hardneg theory`: the list, verdicts and tables, files, and one line for every mistake."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from commands import hardneg
from rich.console import Console

from hardneg.cli import theory
from hardneg.theory import FAMILIES


def test_without_a_name_the_families_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, _ = hardneg(capsys, "theory")
    assert code == 0
    assert all(name in printed for name in FAMILIES)
    code, printed, _ = hardneg(capsys, "theory", "--json")
    assert json.loads(printed) == {name: family.title for name, family in FAMILIES.items()}


def test_a_family_prints_its_verdicts_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(theory, "out", Console(width=80, force_terminal=True, color_system=None))
    code, printed, _ = hardneg(capsys, "theory", "hscl", "--quick")
    assert code == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed)
    assert "Lemma 1: holds" in plain
    assert "H-SCL ≤ H-UCL" in " ".join(plain.split())
    assert max(map(len, plain.splitlines())) <= 80


def test_results_are_written_as_json_and_svg(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "new" / "theory"
    code, printed, _ = hardneg(capsys, "theory", "hscl", "prosampler", "--quick", "--json", "--to", str(folder))
    assert code == 0
    content = json.loads(printed)
    assert content == json.loads((folder / "theory.json").read_text(encoding="utf-8"))
    assert list(content["families"]) == ["hscl", "prosampler"]
    assert content["seed"] == 0
    assert {"hardneg", "python", "torch", "numpy", "scipy", "command"} <= set(content)
    assert sorted(file.name for file in folder.iterdir()) == ["hscl.svg", "prosampler.svg", "theory.json"]
    drawing = ElementTree.parse(folder / "prosampler.svg").getroot()
    assert "printed bound" in "".join(drawing.itertext())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cncee"], "NAME='cncee' is not known: did you mean 'cnce'?"),
        (["hscl", "\x1b[31m"], "is not known"),
        (["--quick"], "--to and --quick need a family: hardneg theory all"),
        (["hscl", "--seed", "-1"], "--seed"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed, error = hardneg(capsys, "theory", *arguments)
    assert (code, printed) == (2, "")
    assert message in error
    assert error.count("\n") == 1
    assert "\x1b" not in error
    assert not list(tmp_path.iterdir())


def test_a_file_is_not_replaced_by_the_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    code, _, error = hardneg(capsys, "theory", "all", "--to", str(file))
    assert code == 2
    assert "is not a folder" in error
    assert file.read_text() == "kept"


def test_an_interruption_does_not_promise_to_resume(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(FAMILIES["hcl"]), "run_check", interrupted)
    code, _, err = hardneg(capsys, "theory", "hcl", "--quick")
    assert code == 130
    assert err.strip() == "stopped; the same command repeats it"

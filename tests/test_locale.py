"""Texts are UTF-8 in files whatever the locale is, and no locale stops the command line."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
ASCII = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "LANG": "C"}
QUICK = ["trainer.epochs=1", "trainer.knn_every=0", "trainer.accelerator=cpu"]


def hardneg(folder: Path, *arguments: str, **environment: str) -> tuple[int, bytes, str]:
    """Exit code, stdout and stderr of the command line in a process of its own."""
    command = [sys.executable, "-m", "hardneg", *arguments]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **ASCII, **environment}
    settings.pop("PYTHONIOENCODING", None)
    done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, timeout=240)
    return done.returncode, done.stdout, done.stderr.decode("ascii")  # what an ASCII terminal is sent is ASCII


def test_the_processes_of_these_tests_have_an_ascii_locale() -> None:
    code = "import locale, sys; print(locale.getpreferredencoding(False), sys.stdout.encoding)"
    settings = {**os.environ, **ASCII}
    done = subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, timeout=60, check=True)
    assert done.stdout.split() == [b"ANSI_X3.4-1968", b"ascii"]


@pytest.mark.slow
def test_recipes_are_listed_and_printed_in_an_ascii_locale(tmp_path: Path) -> None:
    code, out, err = hardneg(tmp_path, "recipes")
    assert code == 0, err
    out.decode("ascii")
    assert b"digits-simclr" in out
    code, out, err = hardneg(tmp_path, "recipes", "--json")
    assert code == 0, err
    assert "digits-simclr" in json.loads(out.decode("ascii"))
    files = sorted((ROOT / "src/hardneg/recipes").glob("*.yaml"))
    other = [file for file in files if not file.read_text(encoding="utf-8").isascii()]
    assert other  # else the rest shows nothing
    # Printed into a file it must be read again, so its bytes are those of the recipe.
    code, out, err = hardneg(tmp_path, "recipes", other[0].stem)
    assert code == 0, err
    assert out == other[0].read_bytes()


@pytest.mark.slow
def test_a_run_with_names_beyond_ascii_works_in_an_ascii_locale(tmp_path: Path) -> None:
    about = "Größe β, 学习"
    (tmp_path / "mine.yaml").write_text(f"about: {about}\ndata: {{source: digits}}\n", encoding="utf-8")
    code, _, err = hardneg(tmp_path, "train", "mine.yaml", *QUICK, "--run", "läuft")
    assert code == 0, err
    assert yaml.safe_load((tmp_path / "läuft" / "recipe.yaml").read_text(encoding="utf-8"))["about"] == about
    code, _, err = hardneg(tmp_path, "report", "läuft")
    assert code == 0, err
    assert about in (tmp_path / "läuft" / "report.html").read_text(encoding="utf-8")
    code, _, err = hardneg(tmp_path, "train", "fehlt-ß")
    assert code == 2
    assert err.count("\n") == 1


# What is left to the locale warns at the line that leaves it.
WATCHED = """
import sys, warnings
warnings.filterwarnings("error", category=EncodingWarning, module=r"hardneg(\\.|$)")
from hardneg import cli
cli.warnings.showwarning = lambda *rest, **more: None
for arguments in {commands!r}:
    sys.argv = ["hardneg", *arguments]
    try:
        cli.main()
    except SystemExit as stop:
        assert not stop.code, (arguments, stop.code)
"""


@pytest.mark.slow
def test_no_command_leaves_an_encoding_to_the_locale(tmp_path: Path) -> None:
    commands = [
        ["recipes"],
        ["recipes", "digits-simclr"],
        ["train", "digits-simclr", QUICK[0], QUICK[2], "trainer.knn_every=1", "--run", "run"],
        ["train", "--resume", "run"],
        *[["evaluate", "run", "--data", "digits"]] * 2,
        ["report", "run"],
        ["export", "run"],
        *[["compare", "digits-simclr", *QUICK, "--seeds", "1", "--json"]] * 2,
    ]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNDEFAULTENCODING": "1", "HARDNEG_TRACEBACK": "1"}
    command = [sys.executable, "-c", WATCHED.format(commands=commands)]
    done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")


def unspecified(file: Path) -> list[str]:
    """Calls that open text, or read a process's output as text, without naming an encoding."""
    found = []
    for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        words = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
        modes = [word for word in words if isinstance(word, str) and word and not set(word) - set("rwaxbt+")]
        plain = isinstance(call.func, ast.Name)  # `open` as a method of a data set takes an index, of a path a mode
        text = (
            name in ("read_text", "write_text")
            or (name == "open" and (plain or bool(modes)) and not any("b" in mode for mode in modes))
            or (name in ("run", "Popen", "check_output") and "text" in named)
        )
        if text and "encoding" not in named:
            found.append(f"{file.relative_to(ROOT)}:{call.lineno}")
    return found


def test_every_text_file_is_opened_with_an_encoding() -> None:
    files = [file for folder in ("src", "benchmarks", "scripts") for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    assert [place for file in files for place in unspecified(file)] == []

"""YAML from elsewhere: every key once, no aliases, bounded in size and depth, one line for every other error."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from hardneg.insight.runs import read_run
from hardneg.training import recipe

BOMB = b"a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"a%d: &a%d [%s]\n" % (level, level, b", ".join([b"*a%d" % (level - 1)] * 9)) for level in range(1, 12)
)
CASES: dict[str, tuple[bytes, str]] = {
    "alias bomb": (BOMB, "aliases"),
    "merge bomb": (b"a: &a {x: 1}\nb: {<<: [*a, *a]}\n", "aliases"),
    "self-reference": (b"objective: &a [*a]\n", "aliases.* line 1"),
    "merge key": (b"data:\n  <<: {source: digits}\n", "'<<'.* line 2"),
    "deep flow": (b"about: " + b"[" * 20_000, "deeper than 32 levels"),
    "deep mappings": (b"{a: " * 5_000 + b"1" + b"}" * 5_000, "deeper than 32 levels"),
    "deep blocks": (b"".join(b" " * level + b"- \n" for level in range(200)), "deeper than 32 levels"),
    "too large": (b"about: " + b"x" * 70_000, "larger than 65,536 bytes"),
    "same key twice": (b"seed: 1\ntrainer:\n  epochs: 1\n  epochs: 2\n", "key 'epochs' occurs twice.* line 4"),
    "same part twice": (b"data: {source: digits}\nseed: 0\ndata: {size: 8}\n", "key 'data' occurs twice.* line 3"),
    "same key in another spelling": (b"objective: {true: 1, yes: 2}\n", "occurs twice.* line 1"),
    "empty": (b"", "is empty"),
    "only comments": (b"# nothing\n", "is empty"),
    "no keys": (b"{}\n", "is empty"),
    "list": (b"- a\n", "must hold keys and values, got list"),
    "scalar": (b"digits\n", "must hold keys and values, got str"),
    "number": (b"0\n", "must hold keys and values, got int"),
    "two documents": (b"seed: 1\n---\nseed: 2\n", "single document"),
    "tab": (b"data:\n\tsource: digits\n", r"line 2"),
    "binary": (bytes(range(256)), "not UTF-8"),
    "escape character": (b"about: \x1b[31m\n", "unacceptable character"),
    "latin-1": ("about: café\n".encode("latin-1"), "not UTF-8"),
    "utf-16": ("seed: 1\n".encode("utf-16"), "not UTF-8"),
    "huge number": (b"seed: " + b"9" * 5_000 + b"\n", "not readable YAML"),
    "no date": (b"about: 2001-99-99\n", "not readable YAML"),
    "bad tag": (b"seed: !!bool maybe\n", "not readable YAML"),
    "code": (b"about: !!python/object/apply:os.system [touch made]\n", "could not determine a constructor"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_file_gives_one_short_line_at_once(tmp_path: Path, case: str) -> None:
    content, message = CASES[case]
    file = tmp_path / "recipe.yaml"
    file.write_bytes(content)
    for read in (lambda: recipe.load(file), lambda: read_run(tmp_path)):
        start = time.monotonic()
        with pytest.raises(ValueError, match=message) as raised:
            read()
        assert time.monotonic() - start < 5
        assert "recipe.yaml" in str(raised.value)
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 500
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize("case", ["alias bomb"])
def test_the_command_line_refuses_an_alias_bomb_with_little_memory(tmp_path: Path, case: str) -> None:
    (tmp_path / "bad.yaml").write_bytes(CASES[case][0])
    limited = (
        "import resource, sys\n"
        "from hardneg import cli\n"
        "sys.argv = ['hardneg', 'train', 'bad.yaml']\n"
        "try:\n    cli.main()\n"
        "finally:\n    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", limited], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("error: bad.yaml ")
    assert int(done.stdout) < 4_000  # MiB, nearly all of it torch; the bomb would be a thousand times that
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("objective={preset: hcl, preset: simclr}", "key 'preset' occurs twice"),
        ("objective=&a [*a]", "aliases"),
        ("about=" + "[" * 2_000, "deeper than 32 levels"),
        ("about=2001-99-99", "the value of about is not readable YAML"),
        ("objective={1: 2}", "objective must have text for keys, got 1"),
        ("evaluation.metrics=[{1: 2}]", "evaluation.metrics must have text for keys, got 1"),
        ("views.options={mean: {1: 2}}", "views.options.mean must have text for keys, got 1"),
    ],
)
def test_values_on_the_command_line_follow_the_same_rules(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        recipe.load({}, [override])
    assert "\n" not in str(raised.value)


def test_text_of_every_language_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    about = "τ⁺ und Schönes, 好, שלום"
    (tmp_path / "a.yaml").write_bytes(f"about: {about}\n".encode())
    (tmp_path / "b.yaml").write_bytes(b"\xef\xbb\xbf" + f"about: {about}\n".encode())
    assert recipe.load(tmp_path / "a.yaml").about == recipe.load(tmp_path / "b.yaml").about == about


def test_a_recipe_with_shared_lists_is_written_and_read_back(tmp_path: Path) -> None:
    shared = [0.5, 0.5]
    settings = recipe.load({"views": {"options": {"mean": shared, "std": shared}}})
    (tmp_path / "recipe.yaml").write_text(recipe.dump(settings), encoding="utf-8")
    assert recipe.load(tmp_path / "recipe.yaml") == settings


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder: give a YAML file"):
        recipe.find(tmp_path)
    with pytest.raises(ValueError, match="is a folder: give a YAML file"):
        recipe.load(tmp_path)
    (tmp_path / "recipe.yaml").write_text("seed: 0\n")
    with pytest.raises(ValueError, match=r"is a run: give --resume .*, or its recipe\.yaml"):
        recipe.find(tmp_path)
    with pytest.raises(ValueError, match="there is no file"):
        recipe.load(tmp_path / "other.yaml")

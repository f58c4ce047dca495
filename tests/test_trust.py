"""Run folders from elsewhere: reading, reporting on, evaluating, exporting and resuming them runs no code of theirs."""

import contextlib
import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import hardneg
from safetensors.torch import save_file
from torch import nn

from hardneg import cli, load_encoder
from hardneg.export import export, export_run, read_info
from hardneg.images import encoders
from hardneg.insight.report import write_report
from hardneg.insight.samples import HUBS
from hardneg.training import recipe, run, saved_run
from hardneg.training.compare import carry_out, grid, plan
from hardneg.training.evaluate import evaluate

QUICK = ["trainer.epochs=1", "trainer.knn_every=0", "trainer.accelerator=cpu"]
OWN = """
from pathlib import Path
from torch import nn

Path({mark!r}).touch()  # importing runs code, too

def small(width=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width))
"""


@pytest.fixture(autouse=True)
def _path(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def hostile(
    folder: Path, name: str, options: dict[str, Any], finished: bool = True, more: dict[str, Any] | None = None
) -> Path:
    """A complete run folder whose recipe names code; more: other sections than the encoder."""
    folder.mkdir()
    settings = recipe.load(more or {"encoder": {"name": name, "options": options}}, QUICK)
    (folder / "recipe.yaml").write_text(recipe.dump(settings), encoding="utf-8")
    (folder / "environment.json").write_text('{"command": ["hardneg"], "threads": 1}')
    (folder / "evaluation.json").write_text('{"knn": 0.9}')
    if finished:
        save_file({"weight": torch.zeros(2)}, folder / "encoder.safetensors", {"shape": "1,8,8"})
    else:
        torch.save({"state_dict": {}}, folder / "last.ckpt")
    return folder


COMMANDS = {
    "evaluate": ["evaluate", "theirs"],
    "evaluate elsewhere": ["evaluate", "theirs", "--data", "digits"],
    "export": ["export", "theirs"],
    "resume": ["train", "--resume", "theirs"],
}


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", ["command", "import"])
def test_an_encoder_named_in_a_folder_is_not_imported_without_trust(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, kind: str, finished: bool
) -> None:
    mark = tmp_path / "mark"
    if kind == "command":
        name, options = "os:system", {"command": f"touch {mark}"}
    else:
        name, options = "theirs_to_import:small", {}
        (tmp_path / "theirs_to_import.py").write_text(OWN.format(mark=str(mark)))
    folder = hostile(tmp_path / "theirs", name, options, finished)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    code, out, err = hardneg(capsys, *COMMANDS[command])
    assert not mark.exists()
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert f"encoder.name={name!r}" in err
    assert "--trust" in err
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


PARTS = {
    "data.source": {"data": {"source": "theirs_to_import:small"}},
    "views.preset": {"views": {"preset": "theirs_to_import:small"}},
    "evaluation.metrics": {"evaluation": {"metrics": ["knn", "theirs_to_import:small"]}},
    "data.source of graphs": {"method": "graphcl", "data": {"source": "theirs_to_import:small"}},
    "views.preset of graphs": {"method": "graphcl", "views": {"preset": "theirs_to_import:small"}},
}


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("part", PARTS)
def test_no_part_of_a_recipe_in_a_folder_is_imported_without_trust(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, part: str, command: str, finished: bool
) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "theirs_to_import.py").write_text(OWN.format(mark=str(mark)))
    folder = hostile(tmp_path / "theirs", "", {}, finished, PARTS[part])
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    code, out, err = hardneg(capsys, *COMMANDS[command])
    assert not mark.exists()
    assert "theirs_to_import" not in sys.modules
    assert (code, out) == (2, "")
    if command == "export" and (part == "evaluation.metrics" or (finished and part.startswith("data"))):
        assert "is code that" not in err  # it is not needed, and the error is that of the weights
        return
    assert f"{part.partition(' ')[0]}='theirs_to_import:small' is code that the folder asks to run" in err
    assert "--trust" in err
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.parametrize("part", PARTS)
def test_a_report_imports_no_part_of_a_recipe_without_trust(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, part: str
) -> None:
    (tmp_path / "theirs_to_import.py").write_text(OWN.format(mark=str(tmp_path / "mark")))
    hostile(tmp_path / "theirs", "", {}, more=PARTS[part])
    code, _, err = hardneg(capsys, "report", "theirs")
    assert code == 0
    assert "--trust" in err
    assert not (tmp_path / "mark").exists()


def test_a_report_leaves_out_what_needs_code_of_the_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    folder = hostile(tmp_path / "theirs", "os:system", {"command": f"touch {mark}"})
    code, _, err = hardneg(capsys, "report", "theirs")
    assert not mark.exists()
    assert code == 0
    assert len(err.strip().splitlines()) == 1
    assert "encoder.name='os:system'" in err
    assert "--trust" in err
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "--trust" in page
    assert "90.0" in page  # what needs no encoder is there


def test_python_functions_do_not_trust_a_folder_either(tmp_path: Path) -> None:
    folder = hostile(tmp_path / "theirs", "os:system", {"command": f"touch {tmp_path / 'mark'}"})
    for read in (saved_run.load_run, evaluate, export_run, lambda f: run.train(recipe.load({}), f, resume=True)):
        with pytest.raises(ValueError, match=r"encoder\.name='os:system' .*trust=True"):
            read(folder)
    with pytest.warns(UserWarning, match="encoder.name='os:system'"):
        write_report([folder], tmp_path / "report.html")
    assert not (tmp_path / "mark").exists()


def test_the_encoder_of_a_trusted_folder_is_loaded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "mine_to_import.py").write_text(OWN.format(mark=str(mark)))
    own = ["encoder={name: 'mine_to_import:small', hidden: 16, outputs: 8}"]
    code, out, err = hardneg(capsys, "train", "digits-simclr", *QUICK, *own, "--run", "mine")
    assert code == 0, err  # a recipe that the user starts is trusted
    assert mark.exists()
    assert "hardneg report mine --trust" in out
    for command in (["evaluate", "mine"], ["export", "mine"], ["train", "--resume", "mine"]):
        assert hardneg(capsys, *command)[0] == 2
        code, _, err = hardneg(capsys, *command, "--trust")
        assert code == 0, err
    code, _, err = hardneg(capsys, "report", "mine", "--trust")
    assert (code, err) == (0, "")
    assert (tmp_path / "mine" / "report.html").read_text(encoding="utf-8").count("<img") == 6 * (1 + 6 + 3) + HUBS


def test_the_encoder_of_a_run_is_used_without_importing_its_data_and_metrics(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "data_to_import.py").write_text(
        "import numpy as np\n"
        "def images(split):\n"
        "    return np.arange(32 * 64, dtype=np.uint8).reshape(32, 8, 8), np.arange(32) % 2\n"
    )
    own = ["data.source=data_to_import:images", "trainer.batch_size=16", "--run", "mine"]
    code, _, err = hardneg(capsys, "train", "digits-simclr", *QUICK, *own)
    assert code == 0, err
    del sys.modules["data_to_import"]
    assert hardneg(capsys, "export", "mine")[0] == 0
    assert load_encoder(tmp_path / "mine")(np.zeros((8, 8), dtype=np.uint8)).dim() == 1
    code, _, err = hardneg(capsys, "evaluate", "mine")
    assert (code, "data.source='data_to_import:images' is code" in err) == (2, True)
    (tmp_path / "mine" / "encoder.safetensors").unlink()  # then the shape of a sample is that of the data
    code, _, err = hardneg(capsys, "export", "mine")
    assert (code, "data.source='data_to_import:images' is code" in err) == (2, True)
    assert "data_to_import" not in sys.modules


def test_a_comparison_trusts_the_recipe_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "compared_module.py").write_text(OWN.format(mark=str(tmp_path / "mark")))
    monkeypatch.syspath_prepend(tmp_path)
    own = [*QUICK, "encoder={name: 'compared_module:small', hidden: 16, outputs: 8}"]
    runs = plan(grid(["digits-simclr"], own), tmp_path / "compared", range(1))
    assert [error for _, error in carry_out(runs)] == [None]
    (runs[0].folder / "encoder.safetensors").unlink()  # begun, not finished
    assert [error for _, error in carry_out(runs)] == [None]


def test_modules_beside_a_run_are_not_imported(tmp_path: Path) -> None:
    """Also if the report is made in the folder that holds them."""
    hostile(tmp_path / "theirs", "tiny", {})
    for name in ("yaml", "lightning", "sklearn", "safetensors", "PIL", "networkx", "scipy"):
        (tmp_path / f"{name}.py").write_text(f"import os\nos.system('touch {tmp_path}/mark-{name}')\n")
    # -P: as the installed command starts, without the current folder on the path
    command = [sys.executable, "-P", "-c", "from hardneg.__main__ import main; main()", "report", "theirs"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert [file.name for file in tmp_path.glob("mark-*")] == []
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("form", ["zip", "plain", "state dict"])
@pytest.mark.parametrize("command", ["evaluate", "resume", "report"])
def test_a_pickled_checkpoint_is_not_unpickled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, form: str
) -> None:
    mark = tmp_path / "mark"
    folder = hostile(tmp_path / "theirs", "tiny", {}, finished=False)
    if form == "zip":
        torch.save(Bomb(mark), folder / "last.ckpt")
    elif form == "plain":
        (folder / "last.ckpt").write_bytes(pickle.dumps(Bomb(mark)))
    else:
        torch.save(
            {"state_dict": {"encoder.x": Bomb(mark)}, "pytorch-lightning_version": "2.6.0"}, folder / "last.ckpt"
        )
    arguments = {"evaluate": ["evaluate", "theirs"], "report": ["report", "theirs"]}
    before = sys.argv
    sys.argv = ["hardneg", *arguments.get(command, ["train", "--resume", "theirs"])]
    try:
        with pytest.raises((SystemExit, Exception)):
            cli.main()
    finally:
        sys.argv = before
    assert not mark.exists()
    capsys.readouterr()
    with contextlib.suppress(Exception):
        torch.load(folder / "last.ckpt", weights_only=False)
    assert mark.exists()  # it would have


@pytest.mark.parametrize("name", ["next.ckpt", "metrics.jsonl", "run.lock", "evaluation.json.new", "report.html.new"])
def test_nothing_is_written_through_a_link_in_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder = tmp_path / "theirs"
    run.train(recipe.load(recipe.find("digits-simclr"), QUICK), folder)
    (folder / "encoder.safetensors").unlink()
    (folder / "last.ckpt").unlink()
    (folder / name).unlink(missing_ok=True)
    (tmp_path / "precious").write_text("mine")
    (folder / name).symlink_to(tmp_path / "precious")
    hardneg(capsys, "train", "--resume", "theirs")
    hardneg(capsys, "evaluate", "theirs")
    hardneg(capsys, "report", "theirs")
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("os:system", {"command": "touch mark"}, "not a class or a function written in Python"),
        ("subprocess:run", {"args": ["touch", "mark"]}, "belongs to Python's own subprocess"),
        ("subprocess:Popen", {"args": ["touch", "mark"]}, "is a class, but not a torch.nn.Module"),
        ("builtins:int", {}, "is a class, but not a torch.nn.Module"),
        ("numpy:save", {"file": "mark", "arr": 0}, "must return a torch.nn.Module"),
        ("torch:nn", {}, "cannot be called"),
        ("torch.nn:NoSuchThing", {}, "could not be imported"),
        ("no_such_module_at_all:x", {}, "could not be imported"),
        (":x", {}, "could not be imported"),
        (".x:y", {}, "could not be imported"),
        ("torch.nn:", {}, "could not be imported"),
        ("broken_on_import:x", {}, "could not be imported: SyntaxError"),
        ("annotated:text", {}, "is annotated to return str"),
    ],
)
def test_the_callable_of_an_encoder_is_checked_before_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], message: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_on_import.py").write_text("def x(:\n")
    (tmp_path / "annotated.py").write_text("def text() -> str:\n    open('mark', 'w').close()\n    return ''\n")
    with pytest.raises(ValueError, match=message) as raised:
        encoders.build(name, **options)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "mark").exists() or name == "numpy:save"


def test_classes_functions_partials_and_decorated_functions_make_encoders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "networks_of_all_kinds.py").write_text(
        "import functools\n"
        "from torch import nn\n"
        "class Net(nn.Flatten):\n"
        "    @classmethod\n"
        "    def made(cls): return cls()\n"
        "def plain(): return Net()\n"
        "def annotated() -> 'nn.Module': return Net()\n"
        "def unresolved() -> 'NotImported': return Net()\n"
        "part = functools.partial(Net, start_dim=1)\n"
        "made = Net.made\n"
        "cached = functools.lru_cache(plain)\n"
    )
    for name in ("Net", "plain", "annotated", "unresolved", "part", "made", "cached"):
        assert isinstance(encoders.build(f"networks_of_all_kinds:{name}"), nn.Flatten)


@pytest.mark.parametrize("suffix", [".pt", ".pt2"])
def test_metadata_of_an_export_are_read_without_loading_the_program(tmp_path: Path, suffix: str) -> None:
    mark = tmp_path / "mark"
    form = {".pt": "torchscript", ".pt2": "torch_export"}[suffix]
    good = export(nn.Flatten(), torch.rand(1, 2, 3), tmp_path / "good", form, {"note": "mine"})
    bad = tmp_path / f"bad{suffix}"
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(bad, "w") as target:
        for member in source.namelist():
            keep = member.endswith("hardneg.json")
            target.writestr(member, source.read(member) if keep else pickle.dumps(Bomb(mark)))
    assert read_info(bad) == read_info(good)
    assert read_info(good)["note"] == "mine"
    assert not mark.exists()
    (tmp_path / f"no{suffix}").write_bytes(np.arange(99).tobytes())
    with pytest.raises(ValueError, match="is not a file that hardneg exported"):
        read_info(tmp_path / f"no{suffix}")


def test_json_of_a_folder_is_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = hostile(tmp_path / "theirs", "tiny", {})
    for name in ("evaluation.json", "environment.json", "metrics.jsonl"):
        content = (folder / name).read_text() if (folder / name).exists() else ""
        (folder / name).write_text("[" * 200_000)
        code, _, err = hardneg(capsys, "report", "theirs")
        assert code == (0 if name == "metrics.jsonl" else 2)
        assert "Traceback" not in err
        (folder / name).write_text(content)
    assert json.loads((folder / "evaluation.json").read_text())

"""The command line: output, files written, and one line for every mistake."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import hardneg
from insight.folders import make_run
from PIL import Image

from hardneg.training import compare, recipe

QUICK = ["trainer.epochs=2", "trainer.knn_every=1"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def process(*arguments: str, **more: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hardneg", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

    def restore_sigint() -> None:  # a shell in the background lets its children ignore SIGINT
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen(command, env=environment, preexec_fn=restore_sigint, **pipes, **more)  # type: ignore[call-overload, no-any-return]


def tree(folder: Path) -> dict[str, bytes]:
    """The content of every file below a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run on digits."""
    folder: Path = tmp_path_factory.mktemp("cli") / "run"
    done = process("train", "digits-simclr", *QUICK, "--run", str(folder), "--json")
    out, err = done.communicate(timeout=300)
    assert done.returncode == 0, err
    assert json.loads(out)["run"] == str(folder)
    return folder


def test_train_evaluates_the_encoder_and_prints_only_json(finished: Path) -> None:
    figures = json.loads((finished / "evaluation.json").read_text())
    assert set(figures) == {"knn", "nearest", "few_1", "few_5", "linear"}
    assert all(0 < figure <= 1 for figure in figures.values())


def test_train_names_the_folder_and_the_next_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for number in (1, 2):
        code, out, _ = hardneg(capsys, "train", "digits-simclr", "trainer.epochs=1", "--no-evaluate")
        assert code == 0
        assert f"digits-simclr-{number}" in out
        assert "hardneg report" in out
        assert (tmp_path / "runs" / f"digits-simclr-{number}" / "last.ckpt").exists()


def test_evaluate_repeats_the_evaluation_of_training_and_transfers_to_other_data(
    capsys: pytest.CaptureFixture[str], finished: Path, tmp_path: Path
) -> None:
    code, out, err = hardneg(capsys, "evaluate", str(finished), "--json")
    assert code == 0, err
    assert json.loads(out) == json.loads((finished / "evaluation.json").read_text())

    rng = np.random.default_rng(0)
    labels = np.arange(60) % 2
    images = (rng.integers(0, 60, (60, 8, 8)) + 180 * labels[:, None, None]).astype(np.uint8)
    np.savez(tmp_path / "other.npz", train_images=images[:40], train_labels=labels[:40],
             test_images=images[40:], test_labels=labels[40:])  # fmt: skip
    code, out, err = hardneg(capsys, "evaluate", str(finished), "--data", "other.npz", "--json")
    assert code == 0, err
    assert json.loads(out)["nearest"] == 1.0  # bright and dark images: easy for any encoder
    assert json.loads((finished / "transfer.json").read_text())["other.npz"]["nearest"] == 1.0
    assert "other.npz" not in (finished / "evaluation.json").read_text()


def test_every_command_with_results_prints_them_as_json(
    capsys: pytest.CaptureFixture[str], finished: Path, tmp_path: Path
) -> None:
    page, weights = str(tmp_path / "page.html"), str(tmp_path / "encoder.safetensors")
    for arguments, key in (
        (["report", str(finished), "--to", page], "report"),
        (["export", str(finished), "--to", weights], "file"),
        (["recipes"], "digits-simclr"),
        (["recipes", "digits-simclr"], "objective"),
        (["evaluate", str(finished)], "knn"),
    ):
        code, out, err = hardneg(capsys, *arguments, "--json")
        assert code == 0, err
        assert key in json.loads(out)
    code, out, _ = hardneg(capsys, "doctor", "--json")
    assert {"name", "status", "detail", "fix"} == set(json.loads(out)[0])


def test_recipes_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = hardneg(capsys, "recipes")
    assert code == 0
    assert "cifar10-simclr" in out
    code, out, _ = hardneg(capsys, "recipes", "digits-simclr")
    assert code == 0
    assert "source: digits" in out
    code, out, _ = hardneg(capsys, "recipes", "--schema")
    assert code == 0
    assert json.loads(out) == recipe.json_schema()


def test_help_ends_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("train", "compare", "demo", "evaluate", "report", "recipes", "export"):
        code, out, _ = hardneg(capsys, command, "--help")
        assert code == 0
        assert f"hardneg {command} " in out.split("Example")[-1]


def npz(folder: Path, **arrays: np.ndarray) -> str:
    np.savez(folder / "data.npz", **arrays)  # type: ignore[arg-type]
    return f"data.source={folder / 'data.npz'}"


MISTAKES = {
    "missing file": (["train", "digits-simclr", "data.source=no/such/file.npz"], "does not exist"),
    "unknown recipe": (["train", "digit-simclr"], "did you mean digits-simclr"),
    "unknown recipe file": (["train", "mine.yaml"], "there is no file 'mine.yaml'"),
    "misspelt key": (["train", "digits-simclr", "trainer.epoch=3"], "did you mean trainer.epochs"),
    "wrong type": (["train", "digits-simclr", "trainer.epochs=many"], "trainer.epochs must be an integer, got 'many'"),
    "unreadable value": (["train", "digits-simclr", "objective={preset: ["], "not readable YAML"),
    "unknown device": (["train", "digits-simclr", "trainer.accelerator=abacus"], "trainer.accelerator=abacus"),
    "absent device": (["train", "digits-simclr", "trainer.accelerator=tpu"], "is not available here"),
    "unknown precision": (["train", "digits-simclr", "trainer.precision=7-bit"], "trainer.precision"),
    "unknown method": (["train", "digits-simclr", "method=simclear"], "method='simclear' is not known"),
    "unknown views": (["train", "digits-simclr", "views.preset=simclear"], "views.preset='simclear' is not known"),
    "unknown option of views": (["train", "digits-simclr", "views.options={blurr: 1}"], "blurr"),
    "unknown encoder": (["train", "digits-simclr", "encoder.name=resnet17"], "resnet18"),
    "batch too large": (
        ["train", "digits-simclr", "trainer.batch_size=5000"],
        "trainer.batch_size=5000 is more than the 1297 samples",
    ),
    "resume of a foreign folder": (["train", "--resume", "."], "holds no run to resume"),
    "resume of nothing": (["train", "--resume", "nowhere"], "holds no run to resume"),
    "resume and a recipe": (["train", "digits-simclr", "--resume", "."], "leave out the recipe"),
    "no recipe": (["train"], "name a recipe"),
    "settings before the recipe": (["train", "trainer.epochs=3"], "the recipe comes first"),
    "unknown command": (["trian"], "No such command 'trian'"),
    "unknown option": (["train", "--fast"], "--fast"),
    "report of nothing": (["report", "nowhere"], "there is no folder 'nowhere'"),
    "report of no run": (["report", "."], "holds no run"),
    "evaluate no run": (["evaluate", "."], "is not a run"),
    "export no run": (["export", "."], "is not a run"),
    "nothing to compare": (["compare", "trainer.epochs=3"], "nothing to compare"),
    "no values to go over": (["compare", "digits-simclr", "--over", "optimizer.lr"], "must be key=value,value"),
    "same row twice": (["compare", "digits-simclr", "--over", "trainer.epochs=1,1"], "occurs twice"),
    "same value twice": (["compare", "digits-simclr", "--over", "optimizer.lr=1e-3,0.001"], "are the same recipe"),
    "same key over twice": (
        ["compare", "digits-simclr", "--over", "trainer.epochs=1,2", "--over", "trainer.epochs=3,4"],
        "trainer.epochs is given twice",
    ),
    "fixed and gone over": (
        ["compare", "digits-simclr", "trainer.epochs=9", "--over", "trainer.epochs=1,2"],
        "trainer.epochs is given twice",
    ),
    "overwritten by what is gone over": (
        ["compare", "digits-simclr", "--over", "objective.temperature=0.2,0.5", "--over", "objective={preset: hcl}"],
        "objective={preset: hcl} would undo objective.temperature",
    ),
    "same recipe twice": (["compare", "digits-simclr", "digits-simclr"], "occurs twice"),
    "same setting twice": (["train", "digits-simclr", "seed=1", "seed=2"], "seed is given twice"),
    "overwritten setting": (
        ["train", "digits-simclr", "objective.temperature=0.2", "objective={preset: hcl}"],
        "objective={preset: hcl} would undo objective.temperature",
    ),
    "folder for a recipe": (
        ["train", "."],
        ". is a folder: give a YAML file, or the name of a built-in recipe; for the images in it, my-images "
        "data.source=.",
    ),
    "no source": (["train", "my-images"], "no data are named: add data.source=FOLDER with your folder"),
    "folder for a setting": (["train", "my-images", "."], "got '.': did you mean data.source=.?"),
    "setting without its section": (
        ["train", "digits-simclr", "epochs=3"],
        "epochs is not a key of the recipe: did you mean trainer.epochs?",
    ),
    "preset without its section": (
        ["train", "digits-simclr", "preset=hcl"],
        "did you mean views.preset or objective.preset?",
    ),
    "setting as an option": (
        ["train", "digits-simclr", "--epochs", "9"],
        "No such option: --epochs. Did you mean trainer.epochs=9? Help: hardneg --help",
    ),
    "setting as an option with =": (["train", "digits-simclr", "--preset=hcl"], "or objective.preset=hcl?"),
    "option that is no setting": (["evaluate", "run", "--epochs", "9"], "--epochs. Help: hardneg --help"),
    "seeds to go over": (["compare", "digits-simclr", "--over", "seed=0,1"], "set their number with --seeds"),
    "several devices": (["compare", "digits-simclr", "trainer.devices=2"], "a comparison trains on one device"),
    "several nodes": (["compare", "digits-simclr", "trainer.nodes=2"], "trainer.nodes=2: a comparison trains on one"),
    "no epochs": (["train", "digits-simclr", "trainer.epochs=0"], "trainer.epochs must be ≥ 1, got 0"),
    "negative rate": (["train", "digits-simclr", "optimizer.lr=-1"], "optimizer.lr must be > 0"),
    "no outputs": (["train", "digits-simclr", "encoder.outputs=0"], "encoder.outputs must be ≥ 1, got 0"),
    "unknown compile mode": (["train", "digits-simclr", "trainer.compile=foo"], "trainer.compile"),
    "no single loss": (["train", "digits-simclr", "objective.reduction=none"], "objective.reduction=none"),
    "batch of one": (["train", "digits-simclr", "trainer.batch_size=1"], "leaves no negatives"),
    "queue without a memory": (["train", "digits-simclr", "objective.preset=moco"], "use method=moco"),
    "kernel that is not there": (["train", "digits-simclr", "objective.backend=fused"], "fused"),
    "option of an encoder": (["train", "digits-simclr", "encoder.options={foo: 1}"], "options of encoder='tiny'"),
    "encoder for other images": (
        ["train", "digits-simclr", "encoder.name=resnet18", "encoder.options={channels: 3}"],
        "does not take an image of shape (1, 8, 8)",
    ),
    "encoder without features": (
        ["train", "digits-simclr", "encoder.name=torch.nn:Identity"],
        "must return (B, features)",
    ),
    "ring inside out": (
        ["train", "digits-ir", "objective={preset: ring_nce, lower: 0.9, upper: 0.5}"],
        "upper must be > 0.9",
    ),
    "setting of another method": (
        ["train", "digits-simclr", "memory.queue=1024"],
        "memory.queue is not used by method=simclr on images: leave it out, or use method=moco",
    ),
    "misspelt setting of the method": (
        ["train", "digits-moco", "memory.que=1024"],
        "did you mean memory.queue?",
    ),
    "setting of graphs": (
        ["train", "digits-simclr", "data.features=degree"],
        "data.features is not used by method=simclr on images: leave it out",
    ),
    "last batch that split batch-norm cannot divide": (
        ["train", "digits-moco", "batches.drop_last=false"],
        "does not divide a batch of 17 samples in a process: choose a divisor, or 1 for plain batch-norm; or set "
        "batches.drop_last=true",
    ),
    "views of another size than the encoder takes": (
        ["train", "digits-simclr", "views.options.size=16"],
        "a forward pass of 2 samples failed",
    ),
    "seed of a comparison": (["compare", "digits-simclr", "seed=9"], "set their number with --seeds"),
    "no seeds": (["compare", "digits-simclr", "--seeds", "0"], "--seeds must be ≥ 1, got '0'"),
    "resuming nothing": (["train", "--resume", "runs/nope"], "no run to resume: the folder does not exist"),
    "evaluating nothing": (["evaluate", "runs/nope"], "runs/nope is not a run: the folder does not exist"),
    "exporting nothing": (["export", "runs/nope"], "runs/nope is not a run: the folder does not exist"),
    "more devices than cores": (["train", "digits-simclr", "trainer.accelerator=cpu", "trainer.devices=9999"], "cores"),
    "one text": (["train", "sentences-simcse", "data.source=letter.txt"], "has 1 sample to train on"),
    "unknown baseline": (["compare", "digits-simclr", "--baseline", "x"], "baseline='x' is not a row"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_prints_one_line_exits_with_2_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, mistake: str
) -> None:
    (tmp_path / "letter.txt").write_text("text")
    arguments, message = MISTAKES[mistake]
    code, out, err = hardneg(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert err.startswith("error: ")
    assert message in err
    assert tree(tmp_path) == {"letter.txt": b"text"}


def test_missing_labels_are_refused_before_anything_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = npz(tmp_path, images=np.zeros((300, 8, 8), np.uint8))
    before = tree(tmp_path)
    code, _, err = hardneg(capsys, "train", "digits-simclr", "objective.preset=scl", source)
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert "has no labels" in err
    assert tree(tmp_path) == before


def test_unreadable_images_are_refused_before_anything_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for number in range(20):
        Image.new("L", (8, 8), number).save(images / f"{number}.png")
    (images / "3.png").write_bytes(b"no image")
    before = tree(tmp_path)
    code, _, err = hardneg(capsys, "train", "digits-simclr", f"data.source={images}", "trainer.batch_size=4")
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert "3.png" in err
    assert "More than 1 % are broken" in err
    assert tree(tmp_path) == before


def test_a_full_disk_is_reported_before_anything_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(10**9, 10**9 - 10**6, 10**6))
    code, _, err = hardneg(capsys, "train", "digits-simclr")
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert "1 MB free" in err
    assert tree(tmp_path) == {}


def test_a_run_in_use_by_another_process_is_not_changed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    other = process("train", "digits-simclr", "trainer.epochs=100000", "--run", "run", cwd=tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "last.ckpt").exists():
            assert time.monotonic() < deadline
            assert other.poll() is None
            time.sleep(0.2)
        code, _, err = hardneg(capsys, "train", "--resume", "run")
        assert (code, len(err.strip().splitlines())) == (2, 1)
        assert "in use by another process" in err
        code, _, err = hardneg(capsys, "train", "digits-simclr", "--run", "run")
        assert (code, len(err.strip().splitlines())) == (2, 1)
        assert "holds a run already" in err
        assert other.poll() is None
    finally:
        other.send_signal(signal.SIGINT)
        _, err = other.communicate(timeout=60)
    assert other.returncode == 130
    assert "stopped; resume with: hardneg train --resume run" in err


@pytest.mark.slow
def test_ctrl_c_leaves_a_run_that_resumes_exactly(finished: Path, tmp_path: Path) -> None:
    stopped = process("train", "digits-simclr", *QUICK, "--run", "run", cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "metrics.jsonl").exists() and stopped.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    stopped.send_signal(signal.SIGINT)
    stopped.communicate(timeout=60)
    resumed = process("train", "--resume", "run", cwd=tmp_path)
    _, err = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, err
    assert (tmp_path / "run" / "encoder.safetensors").read_bytes() == (finished / "encoder.safetensors").read_bytes()


@pytest.mark.slow
def test_two_processes_share_one_run_and_only_the_first_prints(tmp_path: Path) -> None:
    both = process("train", "digits-simclr", "trainer.epochs=1", "trainer.devices=2", "--json", cwd=tmp_path)
    out, err = both.communicate(timeout=300)
    assert both.returncode == 0, err
    assert json.loads(out)["run"] == str(Path("runs") / "digits-simclr-1")
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["digits-simclr-1"]


def test_a_run_is_not_overwritten_by_one_that_started_later(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hardneg.training import build

    read = build.data

    def overtaken(settings: recipe.Recipe, given: build.Given) -> Any:
        monkeypatch.setattr(build, "data", read)
        assert hardneg(capsys, "train", "digits-simclr", "trainer.epochs=1", "seed=4", "--run", "same")[0] == 0
        return read(settings, given)

    monkeypatch.setattr(build, "data", overtaken)
    code, _, err = hardneg(capsys, "train", "digits-simclr", "trainer.epochs=1", "--run", "same")
    assert code == 2
    assert "holds a run already" in err
    assert "seed: 4" in (tmp_path / "same" / "recipe.yaml").read_text()


def test_a_folder_without_environment_is_not_resumed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.yaml").write_text("{}")
    code, _, err = hardneg(capsys, "train", "--resume", "mine")
    assert code == 2
    assert "environment.json is missing" in err
    assert tree(tmp_path) == {"mine/recipe.yaml": b"{}"}


def test_names_with_brackets_and_spaces_are_printed_unchanged(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = hardneg(capsys, "train", "digits-simclr", "trainer.epochs=1", "--run", "a [/b] c")
    assert code == 0, err
    assert "trained in a [/b] c:" in out
    assert "hardneg report 'a [/b] c'" in out


@pytest.mark.slow
def test_checkpoints_are_written_without_the_temporary_folder(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": "/proc"}  # where nothing can be written
    command = [sys.executable, "-m", "hardneg", "train", "digits-simclr", "trainer.epochs=1", "--run", "run"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "encoder.safetensors").stat().st_mode & 0o044  # readable for others, too


def test_the_report_of_a_comparison_has_its_names_its_order_and_its_baseline(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cells = compare.grid(["digits-simclr"], [], ["objective.preset=simclr,debiased,hcl"])
    for cell in cells:
        make_run(cell.folder(tmp_path / "runs", 0), cell.settings.objective["preset"], epochs=1)

    def shown(*more: str) -> tuple[list[str], str]:
        code, _, err = hardneg(capsys, "report", "runs", *more)
        assert code == 0, err
        text = Path("runs", "report.html").read_text(encoding="utf-8")
        rows = re.findall(r'<th scope="row" data-value="([^"]+)">.*?</th>', text)
        return rows, re.findall(r'data-value="([^"]+)">[^"]*<span class="tag">baseline', text)[0]

    assert shown() == (["debiased", "hcl", "simclr"], "debiased")  # in the order of the folders
    compare.write_rows(tmp_path / "runs", compare.rows(cells, "hcl"))
    assert shown() == (["simclr", "debiased", "hcl"], "hcl")
    assert shown("--baseline", "simclr")[1] == "simclr"
    shutil.rmtree(tmp_path / "runs" / "objective.preset=hcl")  # a baseline whose runs all failed
    assert shown() == (["simclr", "debiased"], "simclr")


def test_a_comparison_continues_after_a_failed_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    grid = ["compare", "digits-simclr", "trainer.epochs=1", "--over", "optimizer.lr=1e-3,1e30,1e-2", "--seeds", "1"]
    code, out, err = hardneg(capsys, *grid, "--json")
    assert code == 1
    table = json.loads(out)
    assert list(table["rows"]) == ["lr 0.001", "lr 0.01"]
    assert list(table["failed"]) == ["lr 1e+30, seed 0"]
    assert "failed: lr 1e+30, seed 0" in err


def test_a_comparison_of_data_without_labels_is_refused_before_it_trains(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = npz(tmp_path, images=np.zeros((60, 8, 8), np.uint8))
    before = tree(tmp_path)
    code, _, err = hardneg(capsys, "compare", "digits-simclr", source, "trainer.batch_size=16")
    assert code == 2
    assert "has no labels" in err
    assert tree(tmp_path) == before


def test_evaluating_an_unfinished_run_saves_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    stopped = process("train", "digits-simclr", "trainer.epochs=100000", "--run", "run", cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "last.ckpt").exists() and stopped.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    stopped.kill()
    stopped.communicate(timeout=60)
    code, out, err = hardneg(capsys, "evaluate", "run", "--json")
    assert code == 0, err
    assert json.loads(out)["knn"] > 0
    assert "unfinished" in err
    assert not (tmp_path / "run" / "evaluation.json").exists()


def test_gray_and_color_images_are_converted_for_evaluation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 2
    gray = (rng.integers(0, 60, (60, 8, 8)) + 180 * labels[:, None, None]).astype(np.uint8)
    color = np.repeat(gray[..., None], 3, axis=3)
    source = npz(tmp_path, train_images=color[:40], train_labels=labels[:40], test_images=gray[40:],
                 test_labels=labels[40:])  # fmt: skip
    quick = ["trainer.epochs=1", "trainer.batch_size=16", "trainer.knn_every=1"]
    code, out, err = hardneg(capsys, "train", "digits-simclr", source, *quick, "--run", "run", "--json")
    assert code == 0, err
    assert json.loads(out)["evaluation"]["nearest"] == 1.0
    code, out, err = hardneg(capsys, "evaluate", "run", "--data", "digits", "--json")
    assert code == 0, err
    assert json.loads(out)["nearest"] > 0.5


QUICK_NPZ = ["trainer.epochs=1", "trainer.batch_size=16", "trainer.knn_every=0"]


def test_a_run_finds_its_data_from_every_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    npz(tmp_path / "here", images=rng.integers(0, 256, (60, 8, 8), np.uint8), labels=np.arange(60) % 2)
    monkeypatch.chdir(tmp_path / "here")
    code, _, err = hardneg(capsys, "train", "digits-simclr", "data.source=data.npz", *QUICK_NPZ, "--run", "run")
    assert code == 0, err
    assert recipe.load(Path("run", "recipe.yaml")).data.source == str(tmp_path / "here" / "data.npz")
    grid = ["compare", "digits-simclr", "data.source=data.npz", *QUICK_NPZ, "--seeds", "1", "--json"]
    first = hardneg(capsys, *grid, "--run", str(tmp_path / "grid"))
    assert first[0] == 0, first[2]

    monkeypatch.chdir(tmp_path / "there")
    run = str(Path("..", "here", "run"))
    for command in (["evaluate", run], ["train", "--resume", run], ["report", run]):
        code, _, err = hardneg(capsys, *command)
        assert (code, err) == (0, ""), command
    assert (tmp_path / "here" / "run" / "report.html").read_text(encoding="utf-8").count("<img") > 6
    # A relative path from another folder names the same comparison.
    again = hardneg(capsys, *grid[:2], "data.source=../here/data.npz", *grid[3:], "--run", "../grid")
    assert json.loads(again[1])["rows"] == json.loads(first[1])["rows"]


def test_missing_data_are_named_with_the_key_to_change(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    source = npz(tmp_path, images=rng.integers(0, 256, (60, 8, 8), np.uint8), labels=np.arange(60) % 2)
    code, _, err = hardneg(capsys, "train", "digits-simclr", source, *QUICK_NPZ, "--run", "run")
    assert code == 0, err
    (tmp_path / "data.npz").rename(tmp_path / "moved.npz")
    before = tree(tmp_path)
    for command in (["evaluate", "run"], ["train", "--resume", "run"]):
        code, out, err = hardneg(capsys, *command)
        assert (code, out, len(err.strip().splitlines())) == (2, "", 1)
        assert f"data.source='{tmp_path / 'data.npz'}' does not exist" in err
        assert "run/recipe.yaml" in err
        assert tree(tmp_path) == before
    code, _, err = hardneg(capsys, "report", "run", "--to", "page.html")
    assert code == 0
    assert "does not exist" in err
    assert "does not exist" in Path("page.html").read_text(encoding="utf-8")
    # The fix of the error message works.
    file = tmp_path / "run" / "recipe.yaml"
    file.write_text(file.read_text().replace("data.npz", "moved.npz"))
    for command in (["evaluate", "run"], ["train", "--resume", "run"], ["report", "run"]):
        assert hardneg(capsys, *command)[0] == 0


COMPARE = ["compare", "digits-simclr", "trainer.epochs=2", "trainer.knn_every=0", "--seeds", "2",
           "--over", "objective.preset=simclr,hcl", "--run", "runs/grid", "--json"]  # fmt: skip


@pytest.mark.slow
def test_an_interrupted_comparison_resumes_without_repeating_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stopped = process(*COMPARE, cwd=tmp_path)
    first = tmp_path / "runs" / "grid" / "objective.preset=simclr" / "seed-0"
    second = tmp_path / "runs" / "grid" / "objective.preset=hcl" / "seed-0"
    deadline = time.monotonic() + 120
    while not (second / "metrics.jsonl").exists() and stopped.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    stopped.kill()
    stopped.communicate(timeout=60)
    before = {file: file.stat().st_mtime_ns for file in first.iterdir()}
    assert (first / "evaluation.json").exists()

    code, out, err = hardneg(capsys, *COMPARE)
    assert code == 0, err
    assert {file: file.stat().st_mtime_ns for file in first.iterdir()} == before
    table = json.loads(out)
    assert table["baseline"] == "simclr"
    row = table["rows"]["hcl"]["few_5"]
    assert row["runs"] == 2
    figures = [
        [json.loads((tmp_path / "runs/grid" / cell / seed / "evaluation.json").read_text())["few_5"]
         for seed in ("seed-0", "seed-1")]
        for cell in ("objective.preset=simclr", "objective.preset=hcl")
    ]  # fmt: skip
    assert row["mean"] == pytest.approx(np.mean(figures[1]))
    assert row["std"] == pytest.approx(np.std(figures[1], ddof=1))
    assert row["difference"] == pytest.approx(np.mean(figures[1]) - np.mean(figures[0]))
    error = np.sqrt(sum(np.var(side, ddof=1) / 2 for side in figures))
    assert row["standard_error"] == pytest.approx(error)

    # With another seed only the new runs are trained; another recipe in the same folder is refused.
    code, out, err = hardneg(capsys, *COMPARE[:5], "3", *COMPARE[6:])
    assert code == 0, err
    assert json.loads(out)["rows"]["simclr"]["few_5"]["runs"] == 3
    assert {file: file.stat().st_mtime_ns for file in first.iterdir()} == before
    code, _, err = hardneg(capsys, *COMPARE, "optimizer.lr=0.5")
    assert code == 2
    assert "holds a run of another recipe" in err


@pytest.mark.slow
def test_the_demo_prints_every_row_and_writes_the_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = hardneg(capsys, "demo", "--seeds", "2", "--epochs", "1")
    assert code == 0, err
    for row in ("raw pixels", "untrained", "SimCLR", "debiased", "HCL", "SCL (labels)", "H-SCL (labels)"):
        assert row in out
    page = tmp_path / "runs" / "demo" / "report.html"
    assert f"report: {page.relative_to(tmp_path)}" in out
    assert "H-SCL (labels)" in page.read_text()
    code, out, err = hardneg(capsys, "demo", "--seeds", "2", "--epochs", "1")
    assert "10 of 10 runs are already in runs/demo" in err
    check_in_browser(page)


def check_in_browser(file: Path) -> None:
    """Open a report in a browser: images load, nothing is fetched, there are no console messages."""
    browser = shutil.which("chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="checking the report needs playwright")
    if browser is None:
        pytest.skip("checking the report needs chromium on the path")
    messages: list[str] = []
    with playwright.sync_playwright() as driver:
        page = driver.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"]).new_page()
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: request.url[:5] in ("file:", "data:") or messages.append(request.url))
        page.goto(file.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
        widths = page.evaluate("Promise.all([...document.images].map((i) => i.decode().then(() => i.naturalWidth)))")
        assert len(page.screenshot(full_page=True)) > 50_000
    assert len(widths) > 50
    assert min(widths) > 0
    assert messages == []


def test_the_name_alone_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = hardneg(capsys)
    assert code == 0
    assert "Usage" in out
    assert err == ""


def photos(folder: Path, number: int = 12) -> None:
    """Two classes of images."""
    generator = np.random.default_rng(0)
    for index in range(number):
        (folder / f"class{index % 2}").mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"class{index % 2}" / f"{index}.png")


def test_a_misspelt_source_is_compared_with_the_folders_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    photos(Path("shapes"))
    code, _, err = hardneg(capsys, "train", "my-images", "data.source=shape")
    assert code == 2
    assert f"does not exist: did you mean {str(Path('shapes').absolute())!r}?" in err


def test_broken_images_are_named_without_addresses_and_by_the_users_folder(capsys: pytest.CaptureFixture[str]) -> None:
    photos(Path("mixed"))
    Path("mixed/class0/0.png").write_bytes(b"no image")
    code, _, err = hardneg(capsys, "train", "my-images", "data.source=mixed")
    assert code == 2
    assert "stopped: 1 of 12 images of mixed cannot be read: " in err
    assert "0x" not in err


def test_results_say_how_many_images_trained_and_tested_the_probes(
    capsys: pytest.CaptureFixture[str], finished: Path
) -> None:
    photos(Path("new"), 40)
    _, out, _ = hardneg(capsys, "evaluate", str(finished))
    assert "probes trained on 1,297 images, tested on 500 others" in out  # of the 1,797 digits
    code, out, err = hardneg(capsys, "evaluate", str(finished), "--data", "new")
    assert code == 0, err
    assert "probes trained on 32 images, tested on 8 others" in out


def test_a_run_in_the_way_is_named_with_the_command_that_resumes_it(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("my run"))
    code, _, err = hardneg(capsys, "train", "digits-simclr", "--run", "my run")
    assert code == 2
    assert "resume it with hardneg train --resume 'my run'," in err

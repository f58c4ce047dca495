"""Failed runs: a folder without a checkpoint does not block a retry, and a checkpoint is never removed."""

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image
from test_cli import hardneg, tree

import hardneg as hn
from hardneg.training import compare, engine, recipe, run, run_folder
from hardneg.training.callbacks import diagnostics

SHORT = ["trainer.epochs=3", "trainer.knn_every=0"]  # five steps each
QUICK = ["train", "digits-simclr", *SHORT, "--no-evaluate", "--run", "here/run"]


pytestmark = pytest.mark.usefixtures("empty_folder")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """The line of the error of a command that ends with this exit code; a run that failed has printed its plan."""
    found, out, err = hardneg(capsys, *arguments)
    *plan, error = err.strip().splitlines()
    assert (found, out, len(plan)) == (code, "", 2 if code == 1 else 0), err
    assert error.startswith("error: ")
    return error


class Act(L.Callback):
    """After ``step`` steps raises Ctrl-C, or sets a weight to NaN."""

    def __init__(self, step: int, error: bool = False) -> None:
        self.step, self.error = step, error

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *rest: object) -> None:
        if trainer.global_step != self.step:
            return
        if self.error:
            raise KeyboardInterrupt
        with torch.no_grad():
            next(pl_module.parameters()).fill_(torch.nan)  # as a learning rate that is too high does


def settings() -> recipe.Recipe:
    return recipe.load(recipe.find("digits-simclr"), SHORT)


FAULTS = {
    "five channels": (["data.source=five.npz", "trainer.batch_size=32"], "C = 1 or 3", 2),
    "a diverging rate": (["optimizer.lr=1e30"], "training diverged at step 2, in epoch 1", 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_that_fails_before_its_first_checkpoint_is_removed_and_the_retry_succeeds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, fault: str
) -> None:
    images = np.random.default_rng(0).integers(0, 255, (100, 8, 8, 5)).astype(np.uint8)
    np.savez(tmp_path / "five.npz", images=images)
    overrides, message, code = FAULTS[fault]
    assert message in refused(capsys, *QUICK, *overrides, code=code)
    assert [file.name for file in tmp_path.iterdir()] == ["five.npz"]
    assert refused(capsys, "train", "digits-simclr", *overrides, "--no-evaluate", code=code)  # in a default folder
    assert [file.name for file in tmp_path.iterdir()] == ["five.npz"]
    code, _, err = hardneg(capsys, *QUICK)
    assert code == 0, err


def test_an_existing_folder_is_kept_when_a_run_in_it_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "here" / "run").mkdir(parents=True)
    refused(capsys, *QUICK, "optimizer.lr=1e30", code=1)
    assert list((tmp_path / "here" / "run").iterdir()) == []


def test_a_run_that_was_stopped_before_its_first_checkpoint_does_not_block(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run.train(settings(), tmp_path / "here" / "run", callbacks=[Act(3, error=True)])
    assert (tmp_path / "here" / "run" / "recipe.yaml").exists()  # it can be resumed, too
    code, _, err = hardneg(capsys, *QUICK, "seed=5")
    assert code == 0, err
    assert "seed: 5" in (tmp_path / "here" / "run" / "recipe.yaml").read_text()


def test_a_comparison_uses_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    cells = compare.grid(["digits-simclr"], ["trainer.epochs=1", "trainer.knn_every=0"])
    place = cells[0].folder(tmp_path, 0)
    with pytest.raises(KeyboardInterrupt):
        run.train(settings(), place, callbacks=[Act(3, error=True)])  # with another recipe
    (planned,) = compare.plan(cells, tmp_path, [0])
    ((_, error),) = compare.carry_out([planned])
    assert error is None
    assert recipe.load(place / "recipe.yaml").trainer.epochs == 1


def test_a_run_in_its_first_epoch_in_another_process_is_not_touched(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = tmp_path / "here" / "run"
    with pytest.raises(KeyboardInterrupt):
        run.train(settings(), place, callbacks=[Act(3, error=True)])
    fork = multiprocessing.get_context("fork")
    held = fork.Event()

    def hold() -> None:
        with run_folder.lock_run(place):
            held.set()
            time.sleep(60)

    other = fork.Process(target=hold)
    other.start()
    assert held.wait(60)
    before = tree(tmp_path)
    assert "in use by another process" in refused(capsys, *QUICK)
    assert tree(tmp_path) == before
    other.kill()
    other.join(60)


def test_a_folder_with_other_files_is_refused_and_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    place = tmp_path / "here" / "run"
    with pytest.raises(KeyboardInterrupt):
        run.train(settings(), place, callbacks=[Act(3, error=True)])
    (place / "notes.txt").write_text("mine")
    before = tree(tmp_path)
    assert "choose another folder" in refused(capsys, *QUICK)
    assert tree(tmp_path) == before


def test_a_recipe_of_the_user_is_neither_overwritten_nor_removed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "here" / "run").mkdir(parents=True)
    (tmp_path / "here" / "run" / "recipe.yaml").write_text("data: {source: digits}\n")
    before = tree(tmp_path)
    assert "choose another folder" in refused(capsys, "train", "here/run/recipe.yaml", "--run", "here/run")
    assert tree(tmp_path) == before


RUN_ID = "0" * 32
OF_THE_USER = {
    "notes.new": "precious",
    f"notes.{RUN_ID}.new": "precious",
    "environment.json": '{"my": "env"}',
    "split.json": "mine",
    "next.ckpt": "mine",
    "run.lock": "mine",
}


@pytest.mark.parametrize("name", OF_THE_USER)
def test_files_of_the_user_with_names_like_those_of_a_run_are_refused_and_kept(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    (tmp_path / "here" / "run").mkdir(parents=True)
    (tmp_path / "here" / "run" / name).write_text(OF_THE_USER[name])
    before = tree(tmp_path)
    assert "choose another folder" in refused(capsys, *QUICK, "optimizer.lr=1e30")
    assert tree(tmp_path) == before


def test_a_failed_run_removes_only_what_it_wrote(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    left = tmp_path / "here" / "run" / f"recipe.yaml.{RUN_ID}.new"  # of a process that was killed
    left.parent.mkdir(parents=True)
    left.write_text("half")
    refused(capsys, *QUICK, "optimizer.lr=1e30", code=1)
    assert list(left.parent.iterdir()) == [left]


@pytest.mark.parametrize("step", [7, 10])
def test_a_run_that_diverges_later_keeps_its_last_good_checkpoint_and_says_what_to_do(
    tmp_path: Path, step: int
) -> None:
    # At step 10 the weights become NaN just before the checkpoint of the second epoch.
    with pytest.raises(ValueError, match="diverged") as failure:
        run.train(settings(), tmp_path / "run", callbacks=[Act(step)])
    message = str(failure.value)
    assert "lower optimizer.lr" in message
    assert f"{tmp_path / 'run'} keeps the checkpoint of step 5" in message
    assert "choose another folder" in message
    assert f"hardneg train --resume {tmp_path / 'run'}" in message
    saved = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 5
    assert all(weight.isfinite().all() for weight in saved["state_dict"].values())
    lines = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1]
    with pytest.raises(ValueError, match="holds a run already"):
        run.train(settings(), tmp_path / "run")


def test_a_run_that_diverges_within_its_first_epoch_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"diverged.*lower optimizer\.lr"):
        run.train(settings(), tmp_path / "run", callbacks=[Act(5)])
    assert list(tmp_path.iterdir()) == []


class Limit(L.Callback):
    """After ``step`` steps no file may grow beyond 1,000 bytes, as on a full disk."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *rest: object) -> None:
        if trainer.global_step == self.step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_a_run_that_fills_the_disk_keeps_its_checkpoint_and_resumes_exactly(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(engine.RunError) as failure:
            run.train(settings(), tmp_path / "a run", callbacks=[Limit(7)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    message = str(failure.value)
    assert "training stopped at step 10, in epoch 2 ([Errno 27] File too large): make room on the disk" in message
    assert f"keeps the checkpoint of step 5; resume with: hardneg train --resume '{tmp_path / 'a run'}'" in message
    run.train(None, tmp_path / "a run", resume=True)
    run.train(settings(), tmp_path / "whole")
    one, other = ((tmp_path / name / "encoder.safetensors").read_bytes() for name in ("a run", "whole"))
    assert one == other


class Fail(L.Callback):
    """Raises an error after 7 steps."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def on_train_batch_end(self, trainer: L.Trainer, *rest: object) -> None:
        if trainer.global_step == 7:
            raise self.error


def test_every_other_error_names_the_command_that_resumes_the_run(tmp_path: Path) -> None:
    again = f"keeps the checkpoint of step 5; resume with: hardneg train --resume {tmp_path}/"
    with pytest.raises(engine.RunError, match=r"at step 7, in epoch 2 \(CUDA out of memory\): free memory") as failure:
        run.train(settings(), tmp_path / "1", callbacks=[Fail(torch.OutOfMemoryError("CUDA out of memory. Tried"))])
    assert f"{again}1" in str(failure.value)
    with pytest.raises(KeyError) as unexpected:
        run.train(settings(), tmp_path / "2", callbacks=[Fail(KeyError("a user's mistake"))])
    assert f"{again}2" in unexpected.value.__notes__[-1]


SIZES = ["100000", "8193", "1" + "0" * 30]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("source", ["digits", "images", "arrays.npz"])
def test_an_absurd_size_of_images_is_refused_before_memory_is_taken(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, source: str, size: str
) -> None:
    (tmp_path / "images").mkdir()
    for number in range(4):
        Image.new("RGB", (9, 8), (number, 0, 0)).save(tmp_path / "images" / f"{number}.png")
    np.savez(tmp_path / "arrays.npz", images=np.zeros((4, 9, 8), np.uint8))
    before, peak = tree(tmp_path), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    err = refused(capsys, "train", "digits-simclr", f"data.source={source}", f"data.size={size}")
    assert f"size={size}" in err.replace(",", "")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < peak + 200_000  # KiB
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.size=4000"], "data.size"),  # 1,297 images of 16 MB
        (["views.options={size: 1000000}"], "trainer.batch_size"),
        (["encoder.hidden=100000000000"], "memory"),
        (["method=moco", "objective.preset=moco", "memory.queue=100000000000000"], "memory"),
    ],
)
def test_settings_that_need_more_memory_than_there_is_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, overrides: list[str], message: str
) -> None:
    assert message in refused(capsys, "train", "digits-simclr", *overrides)
    assert list(tmp_path.iterdir()) == []


START = {"module": ["-m", "hardneg"], "script": ["-c", "from hardneg.__main__ import main; main()"]}


@pytest.mark.parametrize(("way", "moment"), [
    ("module", "typer"), ("module", "torch._C"), ("module", "lightning"), ("script", "torch.nn"),
])  # fmt: skip
def test_ctrl_c_while_modules_are_imported_ends_quietly(tmp_path: Path, way: str, moment: str) -> None:
    command = [sys.executable, "-v", *START[way], "train", "digits-simclr", "trainer.epochs=100000"]
    started = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert started.stderr is not None
    for line in started.stderr:  # with -v, a line for every module that was imported
        if line.startswith(f"import '{moment}"):
            started.send_signal(signal.SIGINT)
            break
    written = [line for line in started.stderr if not line.startswith(("#", "import ", "cleanup", "destroy"))]
    # A shell shows 130 for both: Python ends by the signal itself if it came while a string was executed.
    assert started.wait(60) in (130, -signal.SIGINT), written
    assert not any("Traceback" in line or "Error" in line for line in written), written
    assert not (tmp_path / "runs").exists()


def test_a_run_whose_embeddings_collapse_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    hard = ["objective.preset=hcl", "objective.beta=50", "optimizer.lr=0.05", "trainer.epochs=1"]
    code, _, err = hardneg(capsys, "train", "digits-simclr", "--no-evaluate", "--run", "collapsed", *hard)
    line = json.loads(Path("collapsed/metrics.jsonl").read_text(encoding="utf-8"))
    assert code == 0
    assert line["batches"]["mean_cosine"] > 0.95
    assert (
        f"collapsed: the mean cosine of two samples of the last batch is {line['batches']['mean_cosine']:.3f}\n" in err
    )
    code, _, err = hardneg(capsys, "train", "digits-simclr", "--no-evaluate", "--run", "here", "trainer.epochs=1")
    assert code == 0
    assert "collapsed" not in err


@pytest.mark.parametrize(
    ("hardening", "ring"),
    [
        (hn.Exponential(1.0), False),
        ((hn.Ring(0.9, 0.99), hn.Exponential(1.0)), True),
        ({"given": hn.Ring(0.9, 0.99)}, True),
    ],
)
def test_the_advice_after_a_collapse_names_the_ring(
    hardening: Any, ring: bool, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnostics, "Method", SimpleNamespace)
    callback = diagnostics.Diagnostics(Any, Any)  # type: ignore[arg-type]
    module = SimpleNamespace(objective=hn.JSD() if hardening is None else hn.InfoNCE(hardening=hardening))
    for cosine in (0.94, 0.96):
        callback.epoch_metrics = {"batches": {"mean_cosine": cosine}}
        callback.on_train_end(SimpleNamespace(is_global_zero=True), module)  # type: ignore[arg-type]
    assert ["objective.upper=1" in str(warning.message) for warning in recwarn] == [ring]

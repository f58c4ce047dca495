"""Runs that diverge: the step is named, the last good checkpoint is kept, and a comparison continues."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import hardneg
from torch import Tensor, nn

from hardneg import checks, demo
from hardneg.training import recipe, run
from hardneg.training.callbacks import loss_watch
from hardneg.training.callbacks.loss_watch import DivergedError, LossWatch

SHORT = ["trainer.epochs=3", "trainer.knn_every=0"]  # five steps each


pytestmark = pytest.mark.usefixtures("empty_folder")


class Spoiled(nn.Module):
    """A linear encoder whose features are multiplied by ``factor`` in the training step ``step``, once."""

    def __init__(self, step: int, factor: float) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 16)
        self.step, self.factor, self.calls = step, factor, 0

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.linear(x.flatten(1))
        if self.training:
            self.calls += 1
            if self.calls == self.step:
                features = features * self.factor
        return features


def train(folder: Path, encoder: nn.Module | None = None, resume: bool = False, **options: Any) -> run.Result:
    settings = recipe.load(recipe.find("digits-simclr"), [*SHORT, "encoder.norm=false"])
    return run.train(settings, folder, resume, encoder=encoder, **options)


@pytest.mark.parametrize("factor", [torch.nan, torch.inf])
def test_a_run_with_nan_embeddings_stops_and_resumes_from_its_last_good_checkpoint(
    tmp_path: Path, factor: float
) -> None:
    torch.manual_seed(0)
    with pytest.raises(DivergedError, match=r"diverged at step 8, in epoch 2 \(.*\): lower optimizer\.lr") as failure:
        train(tmp_path / "run", Spoiled(8, factor))
    assert "keeps the checkpoint of step 5" in str(failure.value)
    assert "\n" not in str(failure.value)
    torch.manual_seed(0)
    resumed = train(tmp_path / "run", Spoiled(-1, 1.0), resume=True)
    torch.manual_seed(0)
    whole = train(tmp_path / "whole", Spoiled(-1, 1.0))
    assert resumed.metrics["loss"] == whole.metrics["loss"]
    lines = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]


@pytest.mark.parametrize("window", [3, 32])
def test_on_an_accelerator_the_loss_is_read_later_and_the_step_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(checks, "on_accelerator", lambda device: True)
    monkeypatch.setattr(loss_watch, "WINDOW", window)
    with pytest.raises(DivergedError, match=r"training diverged at step 7, in epoch 2 \(the loss is nan\)") as failure:
        train(tmp_path / "run", Spoiled(7, torch.nan))
    assert "keeps the checkpoint of step 5" in str(failure.value)


class _Trainer:
    """The state that `LossWatch` reads."""

    global_step = current_epoch = 0
    is_last_batch = False


def feed(watch: LossWatch, losses: list[float]) -> int:
    """The number of losses that a watch takes before it raises."""
    trainer: Any = _Trainer()
    for number, loss in enumerate(losses):
        trainer.global_step = number
        watch.on_train_batch_start(trainer, None, None, number)  # type: ignore[arg-type]
        try:
            watch.on_train_batch_end(trainer, None, {"loss": torch.tensor(loss)}, None, number)  # type: ignore[arg-type]
        except DivergedError:
            return number + 1
    return len(losses) + 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_loss_is_found_at_once_on_a_cpu_and_within_two_windows_elsewhere(
    bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = [1.0] * 6 + [bad] + [2.0] * 100
    watch = LossWatch()
    assert feed(watch, losses) == 7
    assert watch.position == (7, 1)
    monkeypatch.setattr(checks, "on_accelerator", lambda device: True)
    monkeypatch.setattr(loss_watch, "WINDOW", 5)
    watch = LossWatch()
    assert feed(watch, losses) == 15  # in the window of steps 6 to 10, read with the next one
    assert watch.position == (7, 1)
    assert feed(LossWatch(), [1.0] * 23) == 24


def test_the_cause_of_a_later_error_is_the_first_bad_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "on_accelerator", lambda device: True)
    monkeypatch.setattr(loss_watch, "WINDOW", 3)
    error = checks.NonFiniteError("rows holds NaN")
    watch = LossWatch()
    feed(watch, [1.0, 2.0, 3.0, 4.0])
    assert watch.cause(error) is error
    assert watch.position == (4, 1)
    watch = LossWatch()
    feed(watch, [1.0, torch.nan, 2.0, torch.inf])
    assert str(watch.cause(error)) == "the loss is nan"
    assert watch.position == (2, 1)


def test_a_comparison_marks_diverged_runs_in_table_json_and_report(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rates = ["--over", "optimizer.lr=1e-3,1e30", "--seeds", "1", "--run", "here"]
    grid = ["compare", "digits-simclr", "trainer.epochs=1", *rates]
    code, out, err = hardneg(capsys, *grid)
    assert code == 1, err
    assert "failed: lr 1e+30, seed 0: training diverged at step 2, in epoch 1" in err
    lines = out.splitlines()
    (row,) = [number for number, line in enumerate(lines) if line.strip().startswith("lr 1e+30")]
    assert "1 failed run" in lines[row + 1]
    assert not (tmp_path / "here" / "optimizer.lr=1e30").exists()

    code, out, _ = hardneg(capsys, *grid, "--json")
    assert code == 1
    table = json.loads(out)
    assert table["failed"]["lr 1e+30, seed 0"].startswith("training diverged at step 2")
    assert list(table["rows"]) == ["lr 0.001"]

    code, _, err = hardneg(capsys, "report", "here")
    assert code == 0, err
    page = (tmp_path / "here" / "report.html").read_text(encoding="utf-8")
    note = page.partition('<p class="note">Failed: ')[2].partition("</p>")[0]
    assert "lr 1e+30, seed 0" in note
    assert "training diverged at step 2" in note

    grid[grid.index("optimizer.lr=1e-3,1e30")] = "optimizer.lr=1e-3"
    code, out, err = hardneg(capsys, *grid)
    assert code == 0, err
    assert "failed" not in out
    assert not (tmp_path / "here" / "failed.json").exists()


def test_a_demo_reports_the_runs_that_did_not_diverge(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "ROWS", {"SimCLR": [], "too fast": ["optimizer.lr=1e30"]})
    code, out, err = hardneg(capsys, "demo", "--epochs", "1", "--seeds", "1", "--run", "here", "--json")
    assert code == 1, err
    found = json.loads(out)
    assert list(found["failed"]) == ["too fast, seed 0"]
    assert "SimCLR" in found["rows"]
    assert "Failed: " in Path(found["report"]).read_text(encoding="utf-8")
    monkeypatch.setattr(demo, "ROWS", {"too fast": ["optimizer.lr=1e30"]})
    code, out, err = hardneg(capsys, "demo", "--epochs", "1", "--seeds", "1", "--run", "other")
    assert (code, out) == (1, "")
    assert "failed: too fast, seed 0: training diverged" in err
    assert not (tmp_path / "other").exists()

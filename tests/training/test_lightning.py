"""Callbacks and loggers of users in a run: Lightning's own work as in any training."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from safetensors.torch import load_file

from hardneg.training import loggers, recipe, run

SHORT = ["trainer.epochs=3", "trainer.knn_every=2"]  # five steps each


def settings(*overrides: str, name: str = "digits-simclr") -> recipe.Recipe:
    return recipe.load(recipe.find(name), [*SHORT, *overrides])


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


def files(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


class Epochs(L.Callback):
    """Records the epoch hooks, and the metrics that they see."""

    def __init__(self) -> None:
        self.hooks: list[tuple[str, int]] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.hooks.append(("start", trainer.current_epoch))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.hooks.append(("end", trainer.current_epoch))
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def test_epoch_hooks_see_every_epoch_and_its_metrics(tmp_path: Path) -> None:
    seen = Epochs()
    run.train(settings(), tmp_path / "run", callbacks=[seen])
    assert seen.hooks == [("start", 0), ("end", 0), ("start", 1), ("end", 1), ("start", 2), ("end", 2)]
    for found, line in zip(seen.metrics, lines(tmp_path / "run"), strict=True):
        assert found["loss"] == pytest.approx(line["loss"])
        assert found["batches/mean_cosine"] == pytest.approx(line["batches"]["mean_cosine"])
        if "knn" in line:
            assert found["knn"] == pytest.approx(line["knn"])
    assert ["knn" in found for found in seen.metrics] == [False, True, True]


def test_early_stopping_ends_a_run_which_continues_when_it_is_resumed_without(tmp_path: Path) -> None:
    stopping = EarlyStopping("loss", patience=1, min_delta=1e9)  # no epoch improves by that much
    result = run.train(settings("trainer.epochs=4"), tmp_path / "run", callbacks=[stopping])
    assert (result.metrics["epoch"], len(lines(tmp_path / "run"))) == (2, 2)
    assert (tmp_path / "run" / "encoder.safetensors").exists()
    run.train(settings("trainer.epochs=4"), tmp_path / "whole")
    run.train(recipe.load({}), tmp_path / "run", resume=True)
    one, other = (load_file(tmp_path / name / "encoder.safetensors") for name in ("run", "whole"))
    assert all(torch.equal(one[name], other[name]) for name in other)


class Stop(L.Callback):
    """Asks the trainer to stop after some steps, as `lightning.pytorch.callbacks.Timer` does."""

    def on_train_batch_end(self, trainer: L.Trainer, *rest: object) -> None:
        trainer.should_stop = trainer.global_step >= 7


@pytest.mark.parametrize("name", ["digits-simclr", "digits-moco"])
def test_a_run_that_a_callback_stops_in_mid_epoch_resumes_there_bit_by_bit(tmp_path: Path, name: str) -> None:
    run.train(settings(name=name), tmp_path / "whole")
    run.train(settings(name=name), tmp_path / "part", callbacks=[Stop()])
    assert torch.load(tmp_path / "part" / "last.ckpt", weights_only=True)["global_step"] == 7
    assert len(lines(tmp_path / "part")) == 1
    run.train(recipe.load({}), tmp_path / "part", resume=True)
    one, other = (load_file(tmp_path / part / "encoder.safetensors") for part in ("whole", "part"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    curves = [[(line["step"], line["loss"]) for line in lines(tmp_path / part)] for part in ("whole", "part")]
    assert curves[0] == curves[1]


def test_a_model_checkpoint_writes_into_the_run_and_holds_what_a_resume_needs(tmp_path: Path) -> None:
    every_epoch = ModelCheckpoint(every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    in_between = ModelCheckpoint(every_n_train_steps=7, save_top_k=-1, filename="{step}")
    run.train(settings(name="digits-moco"), tmp_path / "run", callbacks=[every_epoch, in_between])
    written = {name for name in files(tmp_path / "run") if name.startswith("checkpoints/")}
    assert {"checkpoints/epoch=0.ckpt", "checkpoints/epoch=1.ckpt", "checkpoints/epoch=2.ckpt"} <= written
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (tmp_path / "copy" / "encoder.safetensors").unlink()
    shutil.copy(tmp_path / "copy" / "checkpoints" / "step=7.ckpt", tmp_path / "copy" / "last.ckpt")
    run.train(recipe.load({}), tmp_path / "copy", resume=True)
    one, other = (load_file(tmp_path / name / "encoder.safetensors") for name in ("run", "copy"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def test_the_logger_of_a_recipe_gets_the_metrics_and_writes_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run.train(settings("trainer.logger=csv"), tmp_path / "run", callbacks=[LearningRateMonitor("step"), Stop()])
    run.train(recipe.load({}), tmp_path / "run", resume=True)
    assert files(tmp_path / "here") == set()
    versions = [tmp_path / "run" / "logs" / f"version_{number}" for number in range(2)]
    assert all((version / "hparams.yaml").exists() for version in versions)
    logged = [row for version in versions for row in rows(version / "metrics.csv") if row["loss"]]
    assert [(int(row["epoch"]), int(row["step"])) for row in logged] == [(0, 5), (1, 10), (2, 15)]
    for row, line in zip(logged, lines(tmp_path / "run"), strict=True):
        assert float(row["loss"]) == pytest.approx(line["loss"])
        assert float(row["objective/support"]) == pytest.approx(line["objective"]["support"])
    assert any(row["lr-Adam"] for row in rows(versions[0] / "metrics.csv"))


def test_a_logger_object_gets_the_metrics_where_its_user_put_it(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "elsewhere", name="mine")
    run.train(settings("trainer.epochs=1"), tmp_path / "run", loggers=[logger])
    (row,) = [row for row in rows(tmp_path / "elsewhere" / "mine" / "version_0" / "metrics.csv") if row["knn"]]
    assert float(row["knn"]) == pytest.approx(lines(tmp_path / "run")[0]["knn"])
    assert not (tmp_path / "run" / "logs").exists()


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_logger_whose_package_is_missing_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(loggers, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match=rf"trainer\.logger={name} .*pip install {name}"):
        run.train(settings(f"trainer.logger={name}"), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_logger_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"trainer\.logger.*did you mean tensorboard"):
        settings("trainer.logger=tensorbord")


def test_a_run_that_fails_before_its_first_checkpoint_leaves_no_logs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="diverged"):
        run.train(settings("trainer.logger=csv", "optimizer.lr=1e30"), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_logs_of_a_run_without_a_checkpoint_do_not_block_a_new_one(tmp_path: Path) -> None:
    class Interrupt(L.Callback):
        def on_train_batch_end(self, *rest: object) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.train(settings("trainer.logger=csv"), tmp_path / "run", callbacks=[Interrupt()])
    assert (tmp_path / "run" / "logs").is_dir()
    run.train(settings("trainer.epochs=1"), tmp_path / "run")
    (tmp_path / "mine" / "logs").mkdir(parents=True)  # of the user
    with pytest.raises(ValueError, match="choose another folder"):
        run.train(settings("trainer.epochs=1"), tmp_path / "mine")


@pytest.mark.parametrize("place", ["logs", "logs/version_0"])
def test_logs_are_not_written_through_a_link(tmp_path: Path, place: str) -> None:
    run.train(settings("trainer.logger=csv"), tmp_path / "run", callbacks=[Stop()])
    link = tmp_path / "run" / place
    shutil.rmtree(link)
    (tmp_path / "elsewhere").mkdir()
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a link"):
        run.train(recipe.load({}), tmp_path / "run", resume=True)
    assert files(tmp_path / "elsewhere") == set()

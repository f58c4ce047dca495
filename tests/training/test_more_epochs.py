"""More epochs than planned: a run continues to a new number of epochs, finished or not."""

import json
import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from training.test_lightning import Stop

from hardneg.training import recipe, run

COSINE = ["optimizer.schedule=cosine", "trainer.knn_every=0"]


def settings(epochs: int, *overrides: str) -> recipe.Recipe:
    return recipe.load(recipe.find("digits-simclr"), [f"trainer.epochs={epochs}", "trainer.knn_every=0", *overrides])


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


def equal(one: Path, other: Path) -> bool:
    weights, reference = (load_file(folder / "encoder.safetensors") for folder in (one, other))
    return all(torch.equal(weights[name], reference[name]) for name in reference)


class Rates(L.Callback):
    """Records the learning rate of every step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, *rest: object) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize("stopped", [False, True], ids=["finished", "unfinished"])
def test_a_run_continues_to_the_weights_of_a_longer_one(tmp_path: Path, stopped: bool) -> None:
    run.train(settings(4), tmp_path / "long")
    run.train(settings(2), tmp_path / "run", callbacks=[Stop()] if stopped else [])
    result = run.train(None, tmp_path / "run", resume=True, epochs=4)
    assert result.metrics["epoch"] == 4
    assert [line["epoch"] for line in lines(tmp_path / "run")] == [1, 2, 3, 4]
    assert equal(tmp_path / "run", tmp_path / "long")
    assert recipe.load(tmp_path / "run" / "recipe.yaml").trainer.epochs == 4
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert [entry["epochs"] for entry in environment["resumed"]] == [4]


def test_the_learning_rate_follows_the_new_length_from_the_first_step(tmp_path: Path) -> None:
    run.train(settings(2, *COSINE), tmp_path / "run")
    assert lines(tmp_path / "run")[-1]["lr"] == pytest.approx(0, abs=1e-12)
    seen = Rates()
    run.train(None, tmp_path / "run", resume=True, epochs=4, callbacks=[seen])
    assert seen.rates == pytest.approx([0.0005 * (1 + math.cos(math.pi * step / 20)) for step in range(10, 20)])


class Interrupt(L.Callback):
    """Ctrl-C before the 13th batch."""

    def on_train_batch_start(self, trainer: L.Trainer, *rest: object) -> None:
        if trainer.global_step == 12:
            raise KeyboardInterrupt


def test_a_continued_run_that_is_stopped_before_a_checkpoint_keeps_its_new_length(tmp_path: Path) -> None:
    run.train(settings(4), tmp_path / "long")
    run.train(settings(2), tmp_path / "run")
    (tmp_path / "run" / "evaluation.json").write_text("{}")
    with pytest.raises(KeyboardInterrupt):
        run.train(None, tmp_path / "run", resume=True, epochs=4, callbacks=[Interrupt()])
    # Those of two epochs would pass for those of four.
    assert not (tmp_path / "run" / "evaluation.json").exists()
    assert not (tmp_path / "run" / "encoder.safetensors").exists()
    run.train(None, tmp_path / "run", resume=True)
    assert equal(tmp_path / "run", tmp_path / "long")


def test_fewer_epochs_than_done_are_refused_and_change_nothing(tmp_path: Path) -> None:
    run.train(settings(2), tmp_path / "run")
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    with pytest.raises(ValueError, match=r"epochs=1 is less than the 2 epochs that .* has done"):
        run.train(None, tmp_path / "run", resume=True, epochs=1)
    with pytest.raises(ValueError, match=r"epochs must be .* got 0"):
        run.train(None, tmp_path / "run", resume=True, epochs=0)
    run.train(None, tmp_path / "run", resume=True, epochs=2)  # nothing to do
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()} == before


def test_epochs_are_for_resuming_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"epochs=3 extends a run: pass resume=True"):
        run.train(settings(2), tmp_path / "run", epochs=3)
    with pytest.raises(ValueError, match=r"pass a recipe, or resume=True"):
        run.train(None, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []

"""Diagnostics of losses and embeddings during training: at the chosen epochs, exact, and without any effect on it."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

import hardneg as hn
from hardneg.images.modality import Images
from hardneg.insight import alignment, class_means, gradient_shares, hubs, loss_ordering, uniformity
from hardneg.training import recipe, run
from hardneg.training.callbacks.checkpoints import Checkpoints

SHORT = ["trainer.epochs=4", "trainer.knn_every=0", "trainer.save_every=2"]  # five steps each


def settings(*overrides: str) -> recipe.Recipe:
    return recipe.load(recipe.find("digits-simclr"), [*SHORT, *overrides])


def insight(folder: Path) -> dict[int, dict[str, Any]]:
    """What was measured, by epoch, without the times."""
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        line["epoch"]: {key: value for key, value in line["insight"].items() if not key.endswith("_seconds")}
        for line in lines
        if "insight" in line
    }


def weights(folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]  # type: ignore[no-any-return]


class Capture(L.Callback):
    """Keeps what the last batch of the run was, before its memory is updated."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        (self.index, self.z1), self.z2 = pl_module.noted, pl_module.noted_positives
        self.module, self.labels = pl_module, pl_module.labels


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Capture]:
    folder: Path = tmp_path_factory.mktemp("insight") / "run"
    capture = Capture()
    run.train(settings("trainer.insight_every=2"), folder, callbacks=[capture])
    return folder, capture


def test_the_first_the_chosen_and_the_last_epochs_are_measured(whole: tuple[Path, Capture], tmp_path: Path) -> None:
    assert list(insight(whole[0])) == [1, 2, 4]
    run.train(settings(), tmp_path / "default")
    assert list(insight(tmp_path / "default")) == [1, 4]


def test_training_does_not_depend_on_the_measurements(whole: tuple[Path, Capture], tmp_path: Path) -> None:
    run.train(settings("trainer.insight_every=0"), tmp_path / "without")
    assert insight(tmp_path / "without") == {}
    for name, weight in weights(whole[0]).items():
        assert torch.equal(weight, weights(tmp_path / "without")[name]), name


def test_the_values_are_those_of_the_functions_on_the_last_batch(whole: tuple[Path, Capture]) -> None:
    (_, last), found = whole, insight(whole[0])[4]
    assert last.z2 is not None
    labels = last.labels[last.index]
    ordering = loss_ordering(last.z1, last.z2, labels, temperature=0.5, hardening=hn.Exponential(1.0))
    assert ordering is not None
    assert ordering.assumption_1 is not None
    for name in ("ucl", "h_ucl", "scl", "h_scl"):
        assert found[name] == pytest.approx(getattr(ordering, name).value)
    assert found["assumption_1"] == pytest.approx(ordering.assumption_1.value)
    assert found["assumption_1_interval"] == pytest.approx(list(ordering.assumption_1[1:]))
    assert found["ucl"] == pytest.approx(float(hn.simclr()(last.z1, last.z2)), rel=1e-5)  # the loss of the run
    assert found["alignment"] == pytest.approx(alignment(last.z1, last.z2))
    assert found["uniformity"] == pytest.approx(uniformity(last.z1))
    assert found["head_deviation"] == pytest.approx(class_means(last.z1, labels).deviation)
    shares = gradient_shares(hn.simclr(), last.z1, last.z2, torch.arange(256))
    same = (labels[:, None] == labels).repeat(1, 2)
    everyone = shares.of(same)
    assert everyone is not None
    low, high = found["gradient_false_interval"]  # of 64 anchors
    assert low - 0.02 < everyone.value < high + 0.02


def test_geometry_and_hubs_are_of_the_encoder_on_the_training_set(whole: tuple[Path, Capture]) -> None:
    (_, last), found = whole, insight(whole[0])[4]
    kind = settings().kind
    train_set = kind.load(settings().data)
    assert found["samples"] == len(train_set) == 1297
    features = kind.embed(last.module.encoder, train_set, last.module.views)
    assert found["hub_skewness"] == pytest.approx(hubs(features, 10).skewness, rel=1e-3)
    geometry = class_means(features, train_set.labels, centered=True)
    assert found["class_spread"] == pytest.approx(geometry.spread.value, rel=1e-4)
    assert found["class_deviation"] == pytest.approx(geometry.deviation, rel=1e-4)


class StopError(Exception):
    pass


def test_a_resumed_run_has_the_same_measurements_and_weights(
    whole: tuple[Path, Capture], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Checkpoints.on_train_batch_end

    def stopped(self: Checkpoints, trainer: Any, *rest: Any) -> None:
        step(self, trainer, *rest)
        if trainer.global_step == 8:
            raise StopError

    monkeypatch.setattr(Checkpoints, "on_train_batch_end", stopped)
    with pytest.raises(StopError):
        run.train(settings("trainer.insight_every=2"), tmp_path / "part")
    monkeypatch.setattr(Checkpoints, "on_train_batch_end", step)
    run.train(None, tmp_path / "part", resume=True)
    assert insight(tmp_path / "part") == insight(whole[0])
    for name, weight in weights(whole[0]).items():
        assert torch.equal(weight, weights(tmp_path / "part")[name]), name


def test_labels_of_the_test_set_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the test set was loaded")

    monkeypatch.setattr(Images, "load_test", refuse)
    run.train(settings("trainer.epochs=1"), tmp_path / "run")
    assert "assumption_1" in insight(tmp_path / "run")[1]


@pytest.mark.parametrize(
    ("name", "present", "absent"),
    [
        ("digits-moco", {"alignment", "gradient_largest", "ucl", "hub_skewness"}, {"gradient_false"}),
        ("digits-ir", {"uniformity", "gradient_largest", "class_spread"}, {"alignment", "ucl"}),
        ("digits-la", {"uniformity", "class_spread"}, {"ucl"}),
    ],
)
def test_other_methods_have_what_their_loss_defines(
    name: str, present: set[str], absent: set[str], tmp_path: Path
) -> None:
    run.train(recipe.load(recipe.find(name), ["trainer.epochs=1", "trainer.knn_every=0"]), tmp_path / "run")
    found = insight(tmp_path / "run")[1].keys()
    assert present <= found
    assert not absent & found


def test_a_queue_as_large_as_the_batch_is_not_taken_for_the_second_view(tmp_path: Path) -> None:
    overrides = ["objective.in_batch=other", "memory.queue=64", "trainer.batch_size=64", "trainer.epochs=1"]
    run.train(recipe.load(recipe.find("digits-moco"), [*overrides, "trainer.knn_every=0"]), tmp_path / "run")
    found = insight(tmp_path / "run")[1]
    assert "gradient_largest" in found
    assert "gradient_false" not in found


def test_data_without_labels_have_what_needs_none(tmp_path: Path) -> None:
    images = torch.randint(0, 255, (64, 1, 8, 8), dtype=torch.uint8)
    made = recipe.load(recipe.find("digits-simclr"), ["trainer.epochs=1", "trainer.batch_size=16"])
    run.train(made, tmp_path / "run", data=images)
    found = insight(tmp_path / "run")[1]
    assert {"alignment", "uniformity", "gradient_largest", "hub_skewness"} <= found.keys()
    assert not {"ucl", "assumption_1", "class_spread", "gradient_false"} & found.keys()

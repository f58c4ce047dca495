"""What training adapts to comes from a validation part of the training set, never from the test set."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hardneg.images import ImageSet, StreamedImages, load_images
from hardneg.training import build, recipe, run, validation_split
from hardneg.training.recipe import Recipe

RING = ["objective={preset: ring_nce, temperature: 0.2, lower: 0.5, upper: 0.9, anneal: accuracy}"]
ADAPTIVE = [*RING, "trainer.epochs=6", "trainer.knn_every=1"]


def digits(file: Path, shuffle_test_labels: bool = False) -> str:
    """The digits as an .npz with both splits; returns the setting that trains on it."""
    arrays = {}
    for split in ("train", "test"):
        part = load_images("digits", split, labels=True)
        assert isinstance(part, ImageSet)
        assert part.labels is not None
        arrays |= {f"{split}_images": part.images[:, 0].numpy(), f"{split}_labels": part.labels.numpy()}
    if shuffle_test_labels:
        arrays["test_labels"] = np.random.default_rng(0).permutation(arrays["test_labels"])
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return f"data.source={file}"


def state(folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]  # type: ignore[no-any-return]


def divided(settings: Recipe, train_set: Any) -> tuple[Any, Any]:
    return validation_split.divide(train_set, validation_split.held_out_rows(settings, train_set))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


def test_labels_of_the_test_set_change_no_weight_of_a_run_that_adapts(tmp_path: Path) -> None:
    for name in ("true", "shuffled"):
        source = digits(tmp_path / f"{name}.npz", shuffle_test_labels=name == "shuffled")
        with pytest.warns(UserWarning, match=r"on 130 of the 1297 training samples \(seed 3\)"):
            run.train(recipe.load(recipe.find("digits-ir"), [*ADAPTIVE, source, "seed=3"]), tmp_path / name)
    true, shuffled = state(tmp_path / "true"), state(tmp_path / "shuffled")
    assert true.keys() == shuffled.keys()
    for name, weight in true.items():
        assert torch.equal(weight, shuffled[name]), name
    # The test labels were read, and only into the metrics.
    assert lines(tmp_path / "true")[-1]["knn"] > 0.5 > lines(tmp_path / "shuffled")[-1]["knn"]
    # The schedule moved, and the loss with it: the share of closest candidates began at 1.
    _, _, share, *readings = true["objective._extra_state"].tolist()
    assert share < 0.95
    supports = [line["objective"]["support"] for line in lines(tmp_path / "true")]
    assert supports[-1] < supports[0]
    assert readings == [line["validation_knn"] for line in lines(tmp_path / "true")][-5:]
    assert true["memory.bank.rows"].shape[0] == 1297 - 130
    stated = json.loads((tmp_path / "true" / "environment.json").read_text())["validation"]
    assert stated == {"samples": 130, "of": 1297, "seed": 3}


def test_a_run_that_adapts_to_nothing_keeps_the_full_training_set(tmp_path: Path) -> None:
    settings = recipe.load(recipe.find("digits-ir"), ["trainer.epochs=1"])
    run.train(settings, tmp_path / "run")
    assert state(tmp_path / "run")["memory.bank.rows"].shape[0] == 1297
    assert "validation" not in json.loads((tmp_path / "run" / "environment.json").read_text())


def test_the_validation_part_is_a_tenth_of_every_class_and_follows_the_seed() -> None:
    settings = recipe.load(recipe.find("digits-ir"), ADAPTIVE)
    train_set = build.data(settings)
    assert isinstance(train_set, ImageSet)
    assert train_set.labels is not None
    rest, held = divided(settings, train_set)
    assert held is not None
    assert len(rest) + len(held) == len(train_set)
    shares = torch.bincount(held.labels) / torch.bincount(train_set.labels)
    assert (shares - 0.1).abs().max() < 0.005  # rounded to whole samples of about 130 a class
    # Every sample is in one of the two, with its label.
    found = sorted(
        (int(label), image.numpy().tobytes())
        for part in (rest, held)
        for label, image in zip(part.labels, part.images, strict=True)
    )
    assert found == sorted(
        (int(label), image.numpy().tobytes()) for label, image in zip(train_set.labels, train_set.images, strict=True)
    )
    again = divided(settings, train_set)[1]
    other = divided(settings.model_copy(update={"seed": 1}), train_set)[1]
    assert again is not None
    assert other is not None
    assert torch.equal(again.images, held.images)
    assert not torch.equal(other.images, held.images)


def test_a_streamed_training_set_is_divided_as_one_in_memory(tmp_path: Path) -> None:
    from PIL import Image

    for number in range(40):
        folder = tmp_path / "images" / "train" / str(number % 2)
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number).save(folder / f"{number}.png")
    settings = recipe.load(recipe.find("digits-ir"), ADAPTIVE)
    source = tmp_path / "images"
    streamed, resident = (load_images(source, "train", labels=True, in_memory=most) for most in (0, 2**30))
    assert isinstance(streamed, StreamedImages)
    for stream, images in zip(divided(settings, streamed), divided(settings, resident), strict=True):
        assert isinstance(stream, StreamedImages)
        assert isinstance(images, ImageSet)
        assert torch.equal(torch.stack([stream[index][1] for index in range(len(stream))]), images.images)
        assert torch.equal(stream.labels, images.labels)  # type: ignore[arg-type]


TOO_FEW_READINGS = {
    "no online kNN": (["trainer.knn_every=0"], "trainer.knn_every=0"),
    "a single reading": (["trainer.knn_every=5"], "trainer.knn_every=5"),
    "readings after the last step": (["trainer.knn_every=3"], "trainer.knn_every=3"),
    "one epoch": (["trainer.epochs=1"], "trainer.epochs=1"),
}


@pytest.mark.parametrize("case", TOO_FEW_READINGS)
def test_a_schedule_without_two_readings_is_refused_before_training(tmp_path: Path, case: str) -> None:
    overrides, message = TOO_FEW_READINGS[case]
    settings = recipe.load(recipe.find("digits-ir"), [*ADAPTIVE, *overrides])
    with pytest.raises(ValueError, match=message) as refusal:
        run.train(settings, tmp_path / "run")
    assert "set trainer.knn_every=1" in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_two_readings_before_the_last_epoch_are_enough(tmp_path: Path) -> None:
    # Readings after epochs 2 and 4 move it for epoch 5; the one after epoch 5 comes too late.
    settings = recipe.load(recipe.find("digits-ir"), [*ADAPTIVE, "trainer.epochs=5", "trainer.knn_every=2"])
    with pytest.warns(UserWarning, match="can move 1x"):
        run.train(settings, tmp_path / "run")
    assert len([line for line in lines(tmp_path / "run") if "validation_knn" in line]) == 3
    assert float(state(tmp_path / "run")["objective._extra_state"][2]) != 1.0


@pytest.mark.parametrize("labels", ["none", "one class", "one of each"])
def test_data_without_two_labelled_classes_are_refused_before_training(tmp_path: Path, labels: str) -> None:
    images = np.random.default_rng(0).integers(0, 255, (40, 8, 8)).astype(np.uint8)
    given = {"one class": np.zeros(40, np.int64), "one of each": np.arange(40)}
    arrays = {"train_images": images} | ({"train_labels": given[labels]} if labels in given else {})
    np.savez(tmp_path / "data.npz", **arrays)  # type: ignore[arg-type]
    overrides = [*ADAPTIVE, "trainer.batch_size=16", f"data.source={tmp_path / 'data.npz'}"]
    with pytest.raises(ValueError, match="anneal=accuracy needs"):
        run.train(recipe.load(recipe.find("digits-ir"), overrides), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_annealing_by_the_loss_needs_neither_kNN_nor_validation(tmp_path: Path) -> None:
    overrides = [*ADAPTIVE, "objective.anneal=loss", "trainer.knn_every=0", "trainer.epochs=3"]
    run.train(recipe.load(recipe.find("digits-ir"), overrides), tmp_path / "run")
    assert state(tmp_path / "run")["memory.bank.rows"].shape[0] == 1297
    assert float(state(tmp_path / "run")["objective._extra_state"][2]) < 1.0

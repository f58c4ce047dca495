"""What to train on and what to test on, also where the source does not say."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hardneg.data import load_images, load_split


def pictures(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint8).repeat(64).reshape(count, 8, 8)


def test_a_fifth_of_an_undivided_set_is_kept_for_testing_and_never_trained_on(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", images=pictures(50), labels=np.arange(50) % 3)
    parts = [load_split(str(tmp_path / "all.npz"), split) for split in ("train", "test", "train")]
    train, test, again = ([int(image[0, 0, 0]) for image in part.images] for part in parts)  # type: ignore[union-attr]
    assert (len(train), len(test)) == (40, 10)
    assert sorted(train + test) == list(range(50))
    assert train == again
    assert [int(label) for label in parts[1].labels] == [number % 3 for number in test]  # type: ignore[union-attr]


def test_without_labels_training_gets_all_and_a_test_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", images=pictures(50))
    assert len(load_split(str(tmp_path / "all.npz"), "train")) == 50
    with pytest.raises(ValueError, match="has no labels"):
        load_split(str(tmp_path / "all.npz"), "test")


@pytest.mark.parametrize("name", ["test", "val", "validation"])
def test_a_divided_set_keeps_its_parts(tmp_path: Path, name: str) -> None:
    parts = {"train_images": pictures(6), "train_labels": np.zeros(6, int)}
    parts |= {f"{name}_images": pictures(3), f"{name}_labels": np.zeros(3, int)}
    np.savez(tmp_path / "two.npz", **parts)
    source = str(tmp_path / "two.npz")
    assert len(load_split(source, "train")) == 6
    assert torch.equal(load_split(source, "test").images, load_images(source, name).images)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["test.npz", "my-test-val.npz", "train.npz"])
def test_a_file_named_after_a_split_is_still_divided(tmp_path: Path, name: str) -> None:
    np.savez(tmp_path / name, images=pictures(50), labels=np.arange(50) % 3)
    assert [len(load_split(str(tmp_path / name), split)) for split in ("train", "test")] == [40, 10]


def test_a_set_with_a_training_part_only_is_divided(tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", train_images=pictures(20), train_labels=np.zeros(20, int))
    assert [len(load_split(str(tmp_path / "one.npz"), split)) for split in ("train", "test")] == [16, 4]


def test_only_labelled_pictures_are_kept_for_testing(tmp_path: Path) -> None:
    labels = np.where(np.arange(60) < 10, np.arange(60) % 2, -1)
    np.savez(tmp_path / "few.npz", images=pictures(60), labels=labels)
    train, test = (load_split(str(tmp_path / "few.npz"), split) for split in ("train", "test"))
    assert (len(train), len(test)) == (58, 2)
    assert bool((test.labels >= 0).all())  # type: ignore[operator]
    np.savez(tmp_path / "none.npz", images=pictures(60), labels=np.full(60, -1))
    assert len(load_split(str(tmp_path / "none.npz"), "train")) == 60
    np.savez(tmp_path / "one.npz", images=pictures(1), labels=np.zeros(1, int))
    assert len(load_split(str(tmp_path / "one.npz"), "train")) == 1
    with pytest.raises(ValueError, match="too small to be divided"):
        load_split(str(tmp_path / "one.npz"), "test")


def test_pictures_are_brought_to_colour_or_grey(tmp_path: Path) -> None:
    from PIL import Image

    colours = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "rgb.npz", train_images=colours, train_labels=np.arange(5), test_images=colours,
             test_labels=np.arange(5))  # fmt: skip
    grey = load_split(str(tmp_path / "rgb.npz"), "test", channels=1)
    for mine, picture in zip(grey.images, colours, strict=True):  # type: ignore[union-attr]
        theirs = np.asarray(Image.fromarray(picture).convert("L"), dtype=int)
        assert abs(mine[0].numpy().astype(int) - theirs).max() <= 1
    again = load_split("digits", "test", channels=3)
    assert torch.equal(again.images[:, 2], load_split("digits", "test").images[:, 0])  # type: ignore[union-attr]


def test_a_split_that_is_neither_is_refused() -> None:
    with pytest.raises(ValueError, match="split must be 'train' or 'test'"):
        load_split("digits", "val")

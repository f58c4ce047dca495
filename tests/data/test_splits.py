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


def test_a_set_without_a_part_to_test_on_says_so(tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", train_images=pictures(6), train_labels=np.zeros(6, int))
    assert len(load_split(str(tmp_path / "one.npz"), "train")) == 6
    with pytest.raises(ValueError, match="split='test' is not in"):
        load_split(str(tmp_path / "one.npz"), "test")
    with pytest.raises(ValueError, match="split must be 'train' or 'test'"):
        load_split("digits", "val")

"""STL-10's files store images column by column, and labels from 1."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from hardneg.images import stl10

SIZES = {"train": 3, "test": 2, "unlabeled": 4}


def written(folder: Path) -> dict[str, npt.NDArray[np.uint8]]:
    """The files of a small set; returns the images (N, 96, 96, 3)."""
    draws = np.random.default_rng(0)
    folder.mkdir()
    images = {name: draws.integers(0, 256, (count, 96, 96, 3), dtype=np.uint8) for name, count in SIZES.items()}
    for name, stored in images.items():
        content = bytearray()
        for image in stored:
            for channel in range(3):
                for column in range(96):
                    content += image[:, column, channel].tobytes()
        (folder / f"{name}_X.bin").write_bytes(content)
    (folder / "train_y.bin").write_bytes(bytes([1, 3, 2]))
    (folder / "test_y.bin").write_bytes(bytes([3, 1]))
    (folder / "class_names.txt").write_text("airplane\nbird\ncar\n")
    return images


@pytest.mark.parametrize("unlabeled", [False, True])
def test_images_are_upright_and_unlabeled_ones_have_an_unknown_label(unlabeled: bool, tmp_path: Path) -> None:
    images = written(tmp_path / "stl10_binary")
    found = stl10.read(tmp_path / "stl10_binary", unlabeled)
    train = np.concatenate([images["train"], images["unlabeled"]]) if unlabeled else images["train"]
    np.testing.assert_array_equal(found["train_images"].transpose(0, 2, 3, 1), train)
    np.testing.assert_array_equal(found["test_images"].transpose(0, 2, 3, 1), images["test"])
    assert found["train_labels"].tolist() == [0, 2, 1] + [-1] * 4 * unlabeled
    assert found["test_labels"].tolist() == [2, 0]
    assert found["classes"].tolist() == ["airplane", "bird", "car"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train_X.bin", b"abc", "train_X.bin has 3 bytes, no multiple of 27,648"),
        ("test_X.bin", b"", "test_X.bin has 0 bytes"),
        ("train_y.bin", b"\x01", "train_y.bin must have 3 labels from 1 to 3"),
        ("train_y.bin", b"\x01\x00\x02", "train_y.bin must have 3 labels from 1 to 3"),
        ("test_y.bin", b"\x01\x04", "test_y.bin must have 2 labels from 1 to 3"),
        ("unlabeled_X.bin", None, "stl10_binary lacks unlabeled_X.bin"),
    ],
)
def test_malformed_files_are_named(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "stl10_binary"
    written(folder)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{message}.*: download"):
        stl10.read(folder, unlabeled=True)

"""STL-10 from its published binary files."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hardneg.images.archive_files import contents

_SHAPE = (3, 96, 96)
_LARGEST = 4 * 2**30  # bytes; the unlabeled images have 2.8 GB


def read(path: Path, unlabeled: bool) -> dict[str, npt.NDArray[Any]]:
    """The images (N, 3, 96, 96) and labels (N,) of both splits, from the archive or the folder it was unpacked to.

    unlabeled: append the unlabeled images to the training split, with label −1
    """
    wanted = ["train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin", "class_names.txt"]
    wanted += ["unlabeled_X.bin"] * unlabeled
    found = contents(path, wanted, _LARGEST)
    if missing := [name for name in wanted if name not in found]:
        raise ValueError(f"{path} lacks {', '.join(missing)}: download the archive again")
    classes = found["class_names.txt"].decode("utf-8", "replace").split()
    arrays: dict[str, npt.NDArray[Any]] = {"classes": np.array(classes)}
    for split in ("train", "test"):
        parts = [_images(found.pop(f"{split}_X.bin"), path / f"{split}_X.bin")]
        labels = np.frombuffer(found[f"{split}_y.bin"], np.uint8).astype(np.int64) - 1  # they count from 1
        if len(labels) != len(parts[0]) or labels.min() < 0 or labels.max() >= len(classes):
            raise ValueError(
                f"{path / split}_y.bin must have {len(parts[0])} labels from 1 to {len(classes)}: download it again"
            )
        if unlabeled and split == "train":
            parts.append(_images(found.pop("unlabeled_X.bin"), path / "unlabeled_X.bin"))
            labels = np.concatenate([labels, np.full(len(parts[1]), -1)])
        arrays |= {f"{split}_images": np.concatenate(parts), f"{split}_labels": labels}
    return arrays


def _images(data: bytes, place: Path) -> npt.NDArray[np.uint8]:
    """Images (N, 3, 96, 96); the file stores each channel column by column."""
    size = int(np.prod(_SHAPE))
    if len(data) == 0 or len(data) % size:
        raise ValueError(f"{place} has {len(data):,} bytes, no multiple of {size:,}: download it again")
    return np.frombuffer(data, np.uint8).reshape(-1, *_SHAPE).transpose(0, 1, 3, 2)

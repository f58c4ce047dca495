"""Unpack the packed image sets of $HARDNEG_DATA into plain .npz files: ``python scripts/unpack_data.py SOURCE TARGET``.

A packed set has .npz parts, each with image files of many images stacked vertically. An unpacked one is
``TARGET/<name>.npz`` with ``train_images``, ``train_labels``, ``test_images``, ``test_labels`` and ``classes``, which
``load_images`` reads. A set that exists is not unpacked again.
"""

import argparse
import io
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hardneg.extras import required
from hardneg.images.data import load_images
from hardneg.images.image_set import ImageSet
from hardneg.images.published import save
from hardneg.progress import progress

Pixels = npt.NDArray[np.uint8]  # (N, H, W, C)
Labels = npt.NDArray[np.int64]  # (N,)

PACKED: dict[str, dict[str, tuple[str, ...]]] = {
    "cifar10": {"train": ("train_1", "train_2"), "test": ("test",)},
    "tinyimagenet100_32": {"train": ("train",), "test": ("val",)},
}


def read_packed(path: Path) -> tuple[Pixels, Labels, tuple[str, ...]]:
    """The images (N, H, W, C), labels (N,) and class names of one packed part."""
    image_module = required("PIL.Image", "train")
    with np.load(path, allow_pickle=False) as packed:
        if missing := {"blob", "offsets", "labels", "shape", "classes"} - set(packed.files):
            raise ValueError(f"{path} lacks {', '.join(sorted(missing))}: it is not a packed image set")
        blob, offsets, shape = packed["blob"].tobytes(), packed["offsets"], tuple(map(int, packed["shape"]))
        labels, classes = packed["labels"].astype(np.int64), tuple(str(name) for name in packed["classes"])
    count, height, width, channels = shape
    pixels = np.empty(shape, dtype=np.uint8)  # (N, H, W, C)
    done = 0
    for part in progress(range(len(offsets) - 1), f"unpacking {path.parent.name}/{path.name}"):
        with image_module.open(io.BytesIO(blob[offsets[part] : offsets[part + 1]])) as image:
            # Many images stacked vertically: (n · H, W, 3).
            strip = np.asarray(image.convert("RGB")).reshape(-1, height, width, 3)[..., :channels]
        pixels[done : done + len(strip)] = strip[: count - done]
        done += len(strip)
    if done != count or len(labels) != count:
        raise ValueError(
            f"{path} holds {done} pictures and {len(labels)} labels where {count} are announced: copy it anew"
        )
    return pixels, labels, classes


def unpack(source: Path, target: Path) -> dict[str, Path]:
    """Unpack the sets in ``source``, and scikit-learn's digits, into ``target``: the file of each set by its name."""
    present = [name for name in PACKED if (source / name).is_dir()]
    if not present:
        known = ", ".join(f"{name}/" for name in PACKED)
        raise FileNotFoundError(f"source={str(source)!r} has none of {known}: give the folder that HARDNEG_DATA names")
    target.mkdir(parents=True, exist_ok=True)
    written = {}
    for name in [*present, "digits"]:
        written[name] = target / f"{name}.npz"
        if not written[name].exists():
            save(written[name], _digits() if name == "digits" else _joined(source / name, PACKED[name]))
    return written


def _joined(folder: Path, parts: dict[str, tuple[str, ...]]) -> dict[str, npt.NDArray[Any]]:
    arrays: dict[str, npt.NDArray[Any]] = {}
    named: set[tuple[str, ...]] = set()
    for split, names in parts.items():
        pixels, labels, classes = zip(*(read_packed(folder / f"{name}.npz") for name in names), strict=True)
        arrays |= {f"{split}_images": np.concatenate(pixels), f"{split}_labels": np.concatenate(labels)}
        named.update(classes)
    if len(named) != 1:
        raise ValueError(f"the parts of {folder} name different classes: copy them anew")
    return arrays | {"classes": np.array(named.pop())}


def _digits() -> dict[str, npt.NDArray[Any]]:
    arrays: dict[str, npt.NDArray[Any]] = {}
    for split in ("train", "test"):
        digits = load_images("digits", split, labels=True)
        assert isinstance(digits, ImageSet)
        assert digits.labels is not None
        arrays[f"{split}_images"] = digits.images.permute(0, 2, 3, 1).numpy()  # (N, 8, 8, 1)
        arrays[f"{split}_labels"] = digits.labels.numpy()  # (N,)
        arrays["classes"] = np.array(digits.classes)
    return arrays


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, unpack, and print the paths."""
    parser = argparse.ArgumentParser(prog="python scripts/unpack_data.py", description=__doc__)
    parser.add_argument("source", type=Path, help="the folder of packed sets, such as $HARDNEG_DATA")
    parser.add_argument("target", type=Path, help="where <name>.npz files go, such as data/")
    given = parser.parse_args(arguments)
    try:
        written = unpack(given.source, given.target)
    except (OSError, ValueError, ImportError, zipfile.BadZipFile) as error:
        sys.exit(f"error: {error}")
    for name in [*PACKED, "digits"]:
        if name not in written:
            print(f"{name}: not in {given.source}, left out")
            continue
        with np.load(written[name], allow_pickle=False) as arrays:
            counts = f"{len(arrays['train_labels']):,} train, {len(arrays['test_labels']):,} test"
            print(f"{name}: {counts}, {len(arrays['classes'])} classes in {written[name]}")


if __name__ == "__main__":
    main()

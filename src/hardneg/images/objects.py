"""Images that are passed as Python objects: sets, arrays, ``datasets`` objects, or functions of the split."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hardneg import checks
from hardneg.images.arrays import channels_first
from hardneg.images.image_set import ImageSet, StreamedImages
from hardneg.images.split_names import Found, called_name, number_names, unknown_split, warn_if_whole
from hardneg.images.tables import from_dataset

KINDS = (
    "an ImageSet, a datasets.Dataset, an array of images or (images, labels), a mapping from split to one of these, "
    "or a function of the split that returns one of these"
)


def from_object(source: Any, split: str) -> ImageSet | StreamedImages | Found:
    """The images of one split of an object; see ``KINDS``."""
    if isinstance(source, Mapping):
        name = called_name(split, source, Path("the mapping"))
        if name is None:
            raise unknown_split("the mapping", split, list(source))
        part = source[name]
        if _is_dataset(part):
            return from_dataset(part, Path("dataset"), split, [_anywhere()], source.values)
        return _set(part, split)
    if callable(source) and not isinstance(source, ImageSet | StreamedImages | Tensor | np.ndarray):
        made = source(split)
        if made is None:
            raise unknown_split(getattr(source, "__name__", "the function"), split, ["train"])
        return _set(made, split)
    warn_if_whole(Path(getattr(source, "name", None) or "the data"), split)
    return _set(source, split)


def _set(given: Any, split: str) -> ImageSet | StreamedImages | Found:
    if isinstance(given, ImageSet | StreamedImages):
        return given
    if _is_dataset(given):
        return from_dataset(given, Path("dataset"), split, [_anywhere()])
    if isinstance(given, tuple) and len(given) == 2:
        images, labels = given
        numbers = checks.integers("labels", checks.as_tensor("labels", labels), (len(images),), "one per image")
        return ImageSet(_pixels(images), numbers, number_names(int(numbers.max())), f"images-{split}")
    if isinstance(given, Tensor | np.ndarray):
        return ImageSet(_pixels(given), name=f"images-{split}")
    raise ValueError(f"data of type {type(given).__name__} cannot be read as images: give {KINDS}")


def _pixels(images: Any) -> Tensor:
    array = images.cpu().numpy() if isinstance(images, Tensor) else np.asarray(images)
    return channels_first(array, "the array")


def _is_dataset(given: Any) -> bool:
    """Whether this is a datasets.Dataset, without importing the library."""
    return type(given).__module__.partition(".")[0] == "datasets" and hasattr(given, "features")


def _anywhere() -> Path:
    """The root of the file system: rows of an object in memory may name any file, because the user created it."""
    return Path(Path.cwd().anchor)

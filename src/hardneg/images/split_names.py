"""Shared by all readers of images: the type they return, the names of splits and the names of classes."""

import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hardneg.images.image_set import EncodedImages

SPLITS = ("train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing")
_MOST_CLASSES = 1 << 20  # maximum number of classes without names


class Found(NamedTuple):
    """Images as they are stored, with their labels, the name of their set, and the column ``id`` of a table."""

    encoded: EncodedImages
    labels: Tensor | None  # (N,) int64
    classes: tuple[str, ...]
    name: str
    sample_ids: Sequence[Any] | None = None  # (N,)


class UndividedWarning(UserWarning):
    """A split was requested from a source that is not divided into splits."""


def warn_if_whole(path: Path, split: str) -> None:
    """Warn that a source without splits is read whole, unless it is read for training or named after the split."""
    if split != "train" and split not in re.split(r"[-_.]", path.name.lower()):
        warnings.warn(
            f"{path} is not divided into splits, so split={split!r} is all of it: "
            "if you also train on it, results on it are not a test",
            UndividedWarning,
            stacklevel=4,
        )


class UnknownSplitError(ValueError):
    """The source is divided into splits, and the requested one is not among them."""


def unknown_split(path: Path | str, split: str, splits: Sequence[str]) -> UnknownSplitError:
    """The error for a split that is not among those of the source."""
    return UnknownSplitError(
        f"split={split!r} is not in {str(path)!r}: it has {', '.join(map(repr, splits))}; pass one of them"
    )


def is_split(name: str) -> bool:
    """True if this is one of the usual names of a split, in upper or lower case."""
    return name.lower() in SPLITS


def called_name(split: str, names: Iterable[str], path: Path) -> str | None:
    """The source's own name for a split, or None; the case of the usual names is ignored."""
    fitting = [name for name in names if name == split or (is_split(split) and name.lower() == split.lower())]
    if len(fitting) > 1:
        raise ValueError(
            f"{str(path)!r} has {' and '.join(map(repr, fitting))}, which name the same split: keep one of them"
        )
    return fitting[0] if fitting else None


def number_names(highest: int) -> tuple[str, ...]:
    """Names for classes that have only numbers, from 0 to the highest."""
    if highest >= _MOST_CLASSES:
        raise ValueError(f"labels go up to {highest}: number the classes from 0, or store their names as labels")
    return tuple(str(number) for number in range(highest + 1))


def described(source: object) -> str:
    """A source in an error message: its name in quotes, or the kind of an object."""
    return repr(str(source)) if isinstance(source, str | Path) else f"the {type(source).__name__} that was given"

"""What to train on and what to test on, also where the source does not say."""

import warnings

import torch

from hardneg.data.files import UndividedWarning, load_images
from hardneg.data.images import ImageSet, StreamedImages
from hardneg.randomness import generator

HELD_OUT = 0.2  # of an undivided source with labels


def load_split(source: str, split: str, size: int | None = None, labels: bool = False) -> ImageSet | StreamedImages:
    """The ``"train"`` or ``"test"`` part of a source; for the arguments see `load_images`.

    Of a source with labels that is not divided, a fifth is kept for testing, always the same pictures, and training
    never sees them. Without labels there is nothing to test, and training gets all of it. A source that calls its test
    part ``val`` or ``validation`` is understood.

    Examples:
        >>> len(load_split("digits", "train")), len(load_split("digits", "test"))
        (1297, 500)
    """
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UndividedWarning)
        if split == "train":
            whole = load_images(source, "train", size, labels)
            return whole if whole.labels is None or _divided(source, size) else _part(whole, "train")
        first: ValueError | None = None
        for name in ("test", "val", "validation"):
            try:
                return load_images(source, name, size, labels=True)
            except UndividedWarning:
                return _part(load_images(source, "train", size, labels=True), "test")
            except ValueError as error:  # no such split, or no labels in it
                first = first or error
    assert first is not None
    raise first


def _divided(source: str, size: int | None) -> bool:
    try:
        load_images(source, "test", size, in_memory=0)  # looks at the first headers, and decodes nothing
    except UndividedWarning:
        return False
    except ValueError:
        pass  # it has other splits, or is an .npz, which does not stream
    return True


def _part(images: ImageSet | StreamedImages, split: str) -> ImageSet:
    if not isinstance(images, ImageSet):
        raise ValueError(f"{images.name} is too large to be divided in memory: put it into folders train/ and test/")
    order = torch.randperm(len(images), generator=generator("cpu", 0))
    cut = max(1, round(HELD_OUT * len(images)))
    return images.subset((order[cut:] if split == "train" else order[:cut]).sort().values)

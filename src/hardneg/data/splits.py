"""What to train on and what to test on, also where the source does not say."""

import warnings
from dataclasses import replace

import torch

from hardneg.data.files import UndividedWarning, UnknownSplitError, load_images
from hardneg.data.images import ImageSet, StreamedImages
from hardneg.randomness import generator

HELD_OUT = 0.2  # of the labelled pictures of a source that has no test part
TEST_PARTS = ("test", "val", "validation")
_NOBODYS = "?"  # a split that no source has


def load_split(
    source: str, split: str, size: int | None = None, labels: bool = False, channels: int | None = None
) -> ImageSet | StreamedImages:
    """The ``"train"`` or ``"test"`` part of a source; for the other arguments see `load_images`.

    A source may call its test part ``val`` or ``validation``. Of a source without one, a fifth of the labelled pictures
    is kept for testing, always the same, and training never sees them. Without labels there is nothing to test, and
    training gets all of it. channels: to bring the pictures to, 1 or 3

    Examples:
        >>> len(load_split("digits", "train")), load_split("digits", "test", channels=3).shape
        (1297, (3, 8, 8))
    """
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    part = _test_part(source, size)
    if part is not None:
        wanted = "train" if split == "train" else part
        return _with_channels(load_images(source, wanted, size, labels or split == "test"), channels)
    whole = load_images(source, "train", size, labels or split == "test")
    known = _labelled(whole)
    if len(known) < 2 or not isinstance(whole, ImageSet):
        if split == "test":
            raise ValueError(
                f"{source} has no part to test on, and is too "
                f"{'small' if len(known) < 2 else 'large'} to be divided: put pictures into folders train/ and test/"
            )
        return _with_channels(whole, channels)
    order = torch.randperm(len(known), generator=generator("cpu", 0))
    kept = torch.zeros(len(whole), dtype=torch.bool)
    kept[known[order[: max(1, round(HELD_OUT * len(known)))]]] = True
    return _with_channels(whole.subset((kept if split == "test" else ~kept).nonzero()[:, 0]), channels)


def _test_part(source: str, size: int | None) -> str | None:
    """What the source calls its test part; None if it has none. Looks at names and first headers only."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UndividedWarning)
        for name in (_NOBODYS, *TEST_PARTS):
            try:
                load_images(source, name, size, in_memory=0)
                return name
            except UndividedWarning:  # also where the file is named after a split: it may be all there is
                return None
            except UnknownSplitError:
                continue
            except ValueError as error:
                # An .npz is there but does not stream; scikit-learn's digits and the hub know no other split.
                if name != _NOBODYS and "nknown split" not in str(error):
                    return name
    return None


def _labelled(images: ImageSet | StreamedImages) -> torch.Tensor:
    labels = images.labels
    return torch.empty(0, dtype=torch.int64) if labels is None else (labels >= 0).nonzero()[:, 0]


def _with_channels(images: ImageSet | StreamedImages, channels: int | None) -> ImageSet | StreamedImages:
    """The same pictures in colour or in grey."""
    if channels in (None, images.shape[0]):
        return images
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 or 3, got {channels}")
    if isinstance(images, StreamedImages):
        shape = (channels, *images.shape[1:])
        return StreamedImages(
            images.encoded, shape, images.size, images.labels, images.classes, images.name, images.broken
        )
    if channels == 3:
        return replace(images, images=images.images.expand(-1, 3, -1, -1).contiguous())
    weights = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)  # ITU-R 601, as Pillow does it
    grey = torch.cat(
        [(part * weights).sum(dim=1, keepdim=True).round().byte() for part in torch.split(images.images, 1024)]
    )
    return replace(images, images=grey)

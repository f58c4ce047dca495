"""Training and test parts of a source, also of one that is not divided."""

import copy
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hardneg.division import TEST_PARTS, Division, difference, fingerprint
from hardneg.images.data import find, load_images
from hardneg.images.image_set import ImageSet, StreamedImages
from hardneg.images.split_names import UndividedWarning, UnknownSplitError, described

HELD_OUT = 0.2  # of each class of a source that has no labeled test part
_NO_SPLIT = "?"  # a split that no source has


def load_split(
    source: Any,
    split: str,
    size: int | None = None,
    labels: bool = False,
    channels: int | None = None,
    division: Division | None = None,
) -> ImageSet | StreamedImages:
    """The ``"train"`` or ``"test"`` part of a source; for the other arguments see `load_images`.

    The test part is the first of ``TEST_PARTS`` that has labels. If a source has none, a fifth of each class is held
    out: the images with the lowest hashes of their content, so that the choice hardly depends on the other images. They
    and their copies are never trained on. Without labels nothing is held out, and all images are trained on.

    channels: to convert the images to, 1 or 3 · division: as a run recorded it. Its test part or held-out images are
    then the test part, even if images were added or removed since, with a warning if the source has changed.

    Examples:
        >>> len(load_split("digits", "train")), load_split("digits", "test", channels=3).shape
        (1297, (3, 8, 8))
    """
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    wants_labels = labels or split == "test"
    name = source if isinstance(source, str) else described(source)
    recorded = division if division is not None and division.test != Division.UNKNOWN else None
    part = _test_part(source) if recorded is None else recorded.test
    images: ImageSet | StreamedImages
    made: Division | None = None
    if part in (Division.HELD_OUT, Division.NO_TEST):
        whole = load_images(source, "train", size, wants_labels)
        held_out = _held_out(whole) if recorded is None else torch.tensor(recorded.held_out, dtype=torch.int64)
        if division is not None and recorded is None and len(held_out):
            raise ValueError(f"the run does not record which images of {name} it held out: train it again")
        if recorded is not None and split == "test" and len(held_out) == 0:
            _check_different(whole, name)
            raise ValueError(f"the run was trained on all images of {name}, and none is left to test on: train again")
        images, made = _divided(whole, held_out, split, name)
    else:
        images = load_images(source, "train" if split == "train" else part, size, wants_labels)
        if split == "train":
            made = _division(part, images)
    if recorded is not None and made is not None and (change := difference(recorded, made)):
        warnings.warn(f"{name} {change}", stacklevel=2)
    images = _with_channels(images, channels)
    if isinstance(images, ImageSet):
        return replace(images, division=made)
    images = copy.copy(images)  # the user's own, if an object was passed
    images.division = made
    return images


def _divided(
    whole: ImageSet | StreamedImages, held_out: Tensor, split: str, name: str
) -> tuple[ImageSet | StreamedImages, Division]:
    """One part of a source whose images of these ids are held out, and the division."""
    if len(held_out) == 0:
        if split == "test":
            _check_different(whole, name)
            large = isinstance(whole, StreamedImages)
            raise ValueError(
                f"{name} has no part to test on, and is too {'large' if large else 'small'} to be divided: "
                "put images into folders train/ and test/"
            )
        return whole, _division(Division.NO_TEST, whole)
    if not isinstance(whole, ImageSet) or whole.ids is None:
        raise ValueError(f"{name} has become too large to find the images that the run held out: restore it")
    kept = torch.isin(whole.ids, held_out)  # (N,)
    left = int(torch.isin(held_out, whole.ids).sum())
    if left == 0:
        raise ValueError(
            f"none of the {len(held_out)} images that the run held out is in {name}: restore them, or train again"
        )
    if left < len(held_out) and split == "test":
        warnings.warn(f"{name}: {left} of the {len(held_out)} images that were held out are left", stacklevel=3)
    train, test = (whole.subset(rows.nonzero()[:, 0]) for rows in (~kept, kept))
    return train if split == "train" else test, _division(Division.HELD_OUT, train, held_out)


def _check_different(images: ImageSet | StreamedImages, name: str) -> None:
    """Raise if all images are the same: a test image and its copies are never trained on."""
    if isinstance(images, ImageSet) and images.ids is not None and len(torch.unique(images.ids)) == 1 < len(images):
        raise ValueError(
            f"all {len(images)} images of {name} are copies of one, and an evaluation tests on images that were not "
            "trained on: give different images"
        )


def comparable(train: ImageSet | StreamedImages, test: ImageSet | StreamedImages) -> ImageSet | StreamedImages:
    """The test set with its labels numbered as in the train set, by the names of the classes.

    Fewer than two classes in the train set are an error, and so is a class of the test set that the train set lacks. A
    class that the test set lacks, and images that are in both sets, give a warning.
    """
    if train.labels is None or test.labels is None:
        return test
    names = [
        {images.classes[label] for label in torch.unique(images.labels).tolist() if label >= 0}
        for images in (train, test)
        if images.labels is not None
    ]
    if len(names[0]) < 2:
        content = f"images of one class, {next(iter(names[0]))}" if names[0] else "no labeled images"
        raise ValueError(f"{train.name} has {content}: an evaluation needs at least two, such as one folder per class")
    if missing := sorted(names[1] - names[0]):
        raise ValueError(
            f"{test.name} has images of {_few(missing)}, but {train.name} has none: leave them out, or train on some"
        )
    if absent := sorted(names[0] - names[1]):
        warnings.warn(f"{test.name} has no images of {_few(absent)}, which {train.name} has", stacklevel=2)
    if isinstance(train, ImageSet) and isinstance(test, ImageSet) and train.ids is not None and test.ids is not None:
        both = int(torch.isin(test.ids, train.ids).sum())
        if both:
            warnings.warn(f"{both} of the {len(test)} images of {test.name} are also in {train.name}", stacklevel=2)
    if train.classes == test.classes:
        return test
    for images in (train, test):
        if len(set(images.classes)) < len(images.classes):
            raise ValueError(f"{images.name} has two classes of the same name: rename one of them")
    number = {name: label for label, name in enumerate(train.classes)}
    numbers = torch.tensor([*(number.get(name, -1) for name in test.classes), -1])  # the last for unknown labels
    labels = numbers.to(test.labels.device)[test.labels]
    if isinstance(test, ImageSet):
        return replace(test, labels=labels, classes=train.classes)
    renumbered = copy.copy(test)
    renumbered.labels, renumbered.classes = labels, train.classes
    return renumbered


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + f" and {len(names) - 5} more classes" * (len(names) > 5)


def _test_part(source: Any) -> str:
    """The name of the source's first test part with labels, or ``Division.HELD_OUT`` if it has none."""
    if isinstance(source, str) and source == "digits":
        return "test"
    by_hub = isinstance(source, str) and source.startswith("hf:")
    names = TEST_PARTS if by_hub or callable(source) else (_NO_SPLIT, *TEST_PARTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are issued when the part is loaded
        warnings.simplefilter("error", UndividedWarning)
        for name in names:
            try:
                labels = find(source, name).labels
            except UndividedWarning:  # also if the file is named after a split: it may be the only one
                return Division.HELD_OUT
            except UnknownSplitError:
                continue
            if labels is not None and bool((labels >= 0).any()):
                return name
    return Division.HELD_OUT


def _held_out(images: ImageSet | StreamedImages) -> Tensor:
    """The ids of the images to hold out, ascending: the lowest fifth of each class that has at least two."""
    if images.labels is None or not isinstance(images, ImageSet) or images.ids is None:
        return torch.empty(0, dtype=torch.int64)
    chosen = [torch.empty(0, dtype=torch.int64)]
    for label in torch.unique(images.labels).tolist():
        ids = torch.unique(images.ids[images.labels == label])  # ascending
        if label >= 0 and len(ids) > 1:
            chosen.append(ids[: max(1, int(HELD_OUT * len(ids) + 0.5))])
    found: Tensor = torch.unique(torch.cat(chosen))
    return found


def _division(test: str, train: ImageSet | StreamedImages, held_out: Tensor | None = None) -> Division:
    if isinstance(train, ImageSet):
        tensors, names = (train.ids, train.labels), ""
    else:  # hashing all images would read every file
        tensors, names = (None, train.labels), "\n".join(getattr(train.encoded, "paths", ()))
    found = fingerprint(*tensors, names=names)
    return Division(test, len(train), found, () if held_out is None else tuple(held_out.tolist()))


def _with_channels(images: ImageSet | StreamedImages, channels: int | None) -> ImageSet | StreamedImages:
    """The same images in color or in gray."""
    if channels in (None, images.shape[0]):
        return images
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 or 3, got {channels}")
    if isinstance(images, StreamedImages):
        shape = (channels, *images.shape[1:])
        converted = StreamedImages(
            images.encoded, shape, images.size, images.labels, images.classes, images.name, images.broken
        )
        converted.sample_ids = images.sample_ids
        return converted
    if channels == 3:
        return replace(images, images=images.images.expand(-1, 3, -1, -1).contiguous())
    weights = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)  # ITU-R 601, as Pillow does it
    gray = torch.cat(
        [(part * weights).sum(dim=1, keepdim=True).round().byte() for part in torch.split(images.images, 1024)]
    )
    return replace(images, images=gray)

"""Published sets of images, written as the .npz files that the recipes read."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hardneg import checks
from hardneg.division import Division
from hardneg.downloads import download
from hardneg.images import cifar, stl10, tinyimagenet
from hardneg.images.data import load_images
from hardneg.images.image_set import ImageSet
from hardneg.images.splits import load_split

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class PublishedSet:
    """A set, and where it comes from.

    about: what it contains · url, md5: of its archive · folders: other names under which its files are found · read:
    makes the arrays from an archive or folder · unlabeled: whether the training split has unlabeled images
    """

    about: str
    url: str
    md5: str
    folders: tuple[str, ...]
    read: Callable[[Path], Arrays]
    unlabeled: bool = False

    @property
    def archive(self) -> str:
        """The name of the published archive."""
        return self.url.rpartition("/")[2]


_STL10 = ("http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz", "91f7769df0f17e558f3565bffb0c7dfb",
          ("stl10_binary",))  # fmt: skip
SETS = {
    "cifar10": PublishedSet(
        "50,000 training and 10,000 test images of 32 pixels, 10 classes",
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        "c58f30108f718f92721af3b95e74349a",
        ("cifar-10-binary.tar.gz", "cifar-10-batches-py", "cifar-10-batches-bin"),
        partial(cifar.read, versions=cifar.CIFAR10),
    ),
    "cifar100": PublishedSet(
        "50,000 training and 10,000 test images of 32 pixels, 100 classes",
        "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        "eb9058c3a382ffc7106e4002c42a8d85",
        ("cifar-100-binary.tar.gz", "cifar-100-python", "cifar-100-binary"),
        partial(cifar.read, versions=cifar.CIFAR100),
    ),
    "stl10": PublishedSet(
        "5,000 labeled and 100,000 unlabeled training images, 8,000 test images of 96 pixels, 10 classes",
        *_STL10,
        partial(stl10.read, unlabeled=True),
        unlabeled=True,
    ),
    "stl10-labelled": PublishedSet(
        "the 5,000 labeled training images and the test images of STL-10",
        *_STL10,
        partial(stl10.read, unlabeled=False),
    ),
    "tinyimagenet": PublishedSet(
        "100,000 training and 10,000 test images of 64 pixels, 200 classes",
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        "90528d7ca1a48142e341f4ef8d21d0de",
        ("tiny-imagenet-200",),
        tinyimagenet.read,
    ),
}


def prepare(name: str, target: Path, source: str | None = None, fetch: bool = False) -> None:
    """Write a published set to an .npz file; on any error nothing is written.

    name: one of ``SETS`` · target: the file · source: its archive, the folder it was unpacked to, a folder that holds
    one of these, or any source of `load_images` with the splits train and test, such as ``"hf:NAME"``; by default the
    folder of the target, then ``$HARDNEG_DATA`` · fetch: download the archive to the folder of the target if it is not
    there
    """
    checks.choice("name", name, tuple(SETS))
    chosen = SETS[name]
    found = _find(chosen, target.parent, source)
    if found is None and source is not None:
        return save(target, _from_source(source, chosen.unlabeled))
    if found is None and fetch:
        found = download(chosen.url, target.parent / chosen.archive, chosen.md5)
    if found is None:
        searched = " or ".join(map(str, _searched(target.parent)))
        raise FileNotFoundError(
            f"no {chosen.archive} in {searched}: put it there (from {chosen.url}), name another place with --from, or "
            f"download it with hardneg data {name} --download"
        )
    save(target, chosen.read(found))


def save(target: Path, arrays: Arrays) -> None:
    """Write arrays to an .npz file, which appears when it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        part.replace(target)  # atomic
    finally:
        part.unlink(missing_ok=True)


def _searched(folder: Path) -> list[Path]:
    shared = os.environ.get("HARDNEG_DATA")
    return [folder, *([Path(shared).expanduser()] if shared else [])]


def _find(chosen: PublishedSet, folder: Path, source: str | None) -> Path | None:
    """The archive or unpacked folder of a set; None if a source is something else."""
    names = (chosen.archive, *chosen.folders)
    if source is None:
        places = _searched(folder)
    else:
        path = Path(source).expanduser()
        if path.name in names or path.name.endswith((".tar.gz", ".tgz", ".tar", ".zip")):
            if not path.exists():
                raise FileNotFoundError(f"{path} does not exist: give the archive, or the folder it was unpacked to")
            return path
        places = [path]
    return next((place / name for place in places for name in names if (place / name).exists()), None)


def _from_source(source: str, unlabeled: bool) -> Arrays:
    """The arrays of any source that has a training and a test split."""
    arrays: Arrays = {}
    for split in ("train", "test"):
        images = load_split(source, split, labels=True)
        if images.division is not None and images.division.test == Division.HELD_OUT:
            raise ValueError(f"{source} has no test split with labels: give a source that has train and test")
        arrays |= _arrays(images, split)
        arrays["classes"] = np.array(images.classes)
    if unlabeled:
        more = _arrays(load_images(source, "unlabeled"), "train")
        more["train_labels"] = np.full(len(more["train_images"]), -1)
        arrays |= {key: np.concatenate([arrays[key], more[key]]) for key in more}
    return arrays


def _arrays(images: object, split: str) -> Arrays:
    if not isinstance(images, ImageSet):
        raise ValueError("the images are too large for an .npz file: name the source as data.source= instead")
    labels = np.full(len(images), -1) if images.labels is None else images.labels.numpy()
    return {f"{split}_images": images.images.numpy(), f"{split}_labels": labels}

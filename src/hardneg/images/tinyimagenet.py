"""TinyImageNet from its published zip: 200 classes of 64-pixel JPEG files."""

from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from hardneg import checks
from hardneg.images.archive_files import ZipImages, zip_names
from hardneg.images.folders import FolderImages
from hardneg.images.image_set import Broken, EncodedImages, decode_all

_SHAPE = (3, 64, 64)
_ANNOTATIONS = "val/val_annotations.txt"


class _Files:
    """The files of the set, by their path below ``train`` and ``val``."""

    def __init__(self, path: Path) -> None:
        self.path, self.zipped = path, not path.is_dir()
        listed = zip_names(path) if self.zipped else [file.relative_to(path).as_posix() for file in path.rglob("*.*")]
        # All names in the zip begin with a folder, which the path of an unpacked set may contain already.
        self.names = {name.removeprefix("tiny-imagenet-200/"): name for name in listed}

    def images(self, names: list[str], split: str) -> npt.NDArray[np.uint8]:
        """Images (N, 3, 64, 64)."""
        chosen = [self.names[name] for name in names]
        encoded: EncodedImages = ZipImages(self.path, chosen) if self.zipped else FolderImages(self.path, chosen)
        broken = Broken(len(names), f"{self.path.name}, {split}")
        images, _, _ = decode_all(encoded, _SHAPE, None, broken)
        if len(broken):
            raise ValueError(f"{broken}: download the archive again")
        found: npt.NDArray[np.uint8] = images.numpy()
        return found

    def text(self, name: str) -> str:
        """The text of a file; empty if it is not there."""
        if name not in self.names:
            return ""
        if not self.zipped:
            return checks.regular_file(self.path / self.names[name]).read_text(encoding="utf-8", errors="replace")
        with ZipImages(self.path, [self.names[name]]).open(0) as file:
            return file.read().decode("utf-8", "replace")


def read(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The images (N, 3, 64, 64) and labels (N,) of both splits, from the zip or the folder it was unpacked to.

    The validation images are the test split: the published test images have no labels.
    """
    files = _Files(path)
    paths = {name: PurePosixPath(name).parts for name in sorted(files.names) if name.endswith(".JPEG")}
    train = {name: parts[1] for name, parts in paths.items() if len(parts) == 4 and parts[0] == "train"}
    lines = [line.split("\t") for line in files.text(_ANNOTATIONS).splitlines() if "\t" in line]
    test = {f"val/images/{fields[0]}": fields[1] for fields in lines}
    ids = sorted(set(train.values()))  # of WordNet
    for lacking, what in ((not train, "train/CLASS/images/*.JPEG"), (not test, _ANNOTATIONS)):
        if lacking:
            raise ValueError(f"{path} lacks {what}: download the archive again")
    if missing := [name for name, label in test.items() if name not in files.names or label not in ids]:
        raise ValueError(f"{path} lacks {missing[0]}, or training images of its class: download the archive again")
    arrays: dict[str, npt.NDArray[Any]] = {"classes": np.array(_class_names(ids, files.text("words.txt")))}
    for split, labels in (("train", train), ("test", test)):
        arrays[f"{split}_images"] = files.images(list(labels), split)
        arrays[f"{split}_labels"] = np.array([ids.index(label) for label in labels.values()])
    return arrays


def _class_names(ids: list[str], text: str) -> list[str]:
    """The first word for each WordNet id; the ids themselves if two classes have the same word."""
    words = dict(line.split("\t", 1) for line in text.splitlines() if "\t" in line)
    names = [words.get(each, each).partition(",")[0].strip() for each in ids]
    return names if len(set(names)) == len(ids) else ids

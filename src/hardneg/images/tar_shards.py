"""Images in tar shards, in the layout of webdataset: the files of a sample follow each other and share their stem.

The members of an uncompressed tar are listed once by their position, and each is then read on its own. Samples are
thus drawn in any order, by any sampler, and a run resumes exactly; a shard is never unpacked.
"""

import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hardneg import checks
from hardneg.images.folders import SUFFIXES
from hardneg.images.split_names import Found, number_names
from hardneg.images.tables import LABEL_COLUMNS
from hardneg.progress import progress

_LONGEST_LABEL = 2**16  # bytes of a .cls or .json file


class TarImages:
    """Images by their shard, first byte and number of bytes."""

    def __init__(self, shards: Sequence[Path], positions: Sequence[tuple[int, int, int]], paths: list[str]) -> None:
        self.shards, self.paths = shards, paths
        self.positions = np.array(positions, dtype=np.int64).reshape(-1, 3)  # (N, 3): shard, offset, size

    def __len__(self) -> int:
        return len(self.positions)

    def open(self, index: int) -> BinaryIO:
        shard, offset, size = self.positions[index].tolist()
        # Opened anew each time: processes of a loader would share the position of an open file.
        with self.shards[shard].open("rb") as file:
            file.seek(offset)
            return io.BytesIO(file.read(size))

    def place(self, index: int) -> str:
        return str(self.shards[self.positions[index, 0]].parent / self.paths[index])


class _Member(NamedTuple):
    """A file in a shard: its name in two parts, at the first dot of the last folder's entry; label: if it is one."""

    stem: str
    suffix: str
    offset: int
    size: int
    label: str | None


def from_shards(path: Path, shards: Sequence[Path], split: str, of_all_splits: Sequence[Path]) -> Found:
    """The samples of some shards; of_all_splits: the shards whose class names are numbered together."""
    encoded, texts = _listed(_stamped(shards))
    name = f"{path.stem}-{split}"
    if len(encoded) == 0:
        raise ValueError(f"{path} has no images: name them KEY.jpg in the shards, and their labels KEY.cls")
    if not any(texts):
        return Found(encoded, None, (), name)
    if all(_is_number(text) for text in texts if text):
        labels = torch.tensor([int(text) if text else -1 for text in texts])  # (N,)
        if int(labels.min()) < -1:
            raise ValueError(f"{path} has the label {int(labels.min())}: number the classes from 0, −1 means unknown")
        return Found(encoded, labels, number_names(int(labels.max())), name)
    every = {*texts, *(_listed(_stamped(of_all_splits))[1] if len(of_all_splits) > len(shards) else ())}
    classes = tuple(sorted(every - {""}))
    return Found(encoded, _numbered(texts, classes), classes, name)


def _numbered(texts: Sequence[str], classes: Sequence[str]) -> Tensor:
    number = {name: label for label, name in enumerate(classes)}
    return torch.tensor([number.get(text, -1) for text in texts])  # (N,)


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and text.isascii() and len(text) < 10


def _stamped(shards: Sequence[Path]) -> tuple[tuple[Path, int, int], ...]:
    """The shards with size and time of change, so that one that was replaced is listed anew."""
    return tuple((file, (found := file.stat()).st_size, found.st_mtime_ns) for file in shards)


@lru_cache(maxsize=2)  # the training and the test split are asked for more than once
def _listed(stamped: tuple[tuple[Path, int, int], ...]) -> tuple[TarImages, list[str]]:
    """The images of the shards, and the label of each as text, empty if there is none."""
    shards = [checks.regular_file(file) for file, _, _ in stamped]
    positions: list[tuple[int, int, int]] = []
    paths: list[str] = []
    labels: list[str] = []
    for number in progress(range(len(shards)), f"listing {len(shards)} shards"):
        for stem, sample in groupby(_members(shards[number]), key=lambda member: member.stem):
            members = list(sample)
            image = next((member for member in members if f".{member.suffix}" in SUFFIXES), None)
            if image is not None:
                positions.append((number, image.offset, image.size))
                paths.append(f"{shards[number].name}/{stem}.{image.suffix}")
                labels.append(next((member.label for member in members if member.label), ""))
    return TarImages(shards, positions, paths), labels


def _members(shard: Path) -> Iterator[_Member]:
    """The plain files of a shard, in its order; links, folders and hidden files are left out."""
    try:
        with tarfile.open(shard, "r:") as archive:
            for entry in archive:
                folder, _, name = entry.name.rpartition("/")
                stem, _, suffix = name.partition(".")
                if not stem or not entry.isreg() or entry.issparse():
                    continue
                suffix = suffix.lower()
                label = _label(archive.extractfile(entry), suffix) if suffix in ("cls", "json") else None
                yield _Member(f"{folder}/{stem}" if folder else stem, suffix, entry.offset_data, entry.size, label)
    except tarfile.TarError as error:
        raise ValueError(
            f"{shard} cannot be read ({error}): write it again as a plain tar; a compressed one cannot be read out of "
            "order"
        ) from error


def _label(file: Any, suffix: str) -> str:
    """The label in a .cls file, or in one of the usual fields of a .json file; empty if there is none."""
    text = file.read(_LONGEST_LABEL).decode("utf-8", "replace").strip()
    if suffix == "cls":
        return str(text)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    found = [fields[key] for key in LABEL_COLUMNS if key in fields] if isinstance(fields, dict) else []
    return next((str(label) for label in found if isinstance(label, int | str) and not isinstance(label, bool)), "")

"""Folders of image files: one folder per class, optionally inside one folder per split."""

import heapq
import itertools
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from hardneg import checks
from hardneg.images.split_names import Found, called_name, is_split, unknown_split, warn_if_whole

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")

_SEARCHED = 1000  # entries of a folder that are looked at to tell whether it has images


class FolderImages:
    """Image files by their path under ``root``."""

    def __init__(self, root: Path, paths: Sequence[str]) -> None:
        self.root, self.paths = root, paths

    def __len__(self) -> int:
        return len(self.paths)

    def open(self, index: int) -> BinaryIO:
        return checks.regular_file(self.root / self.paths[index]).open("rb")

    def place(self, index: int) -> str:
        return str(self.root / self.paths[index])


def from_folder(path: Path, split: str) -> Found:
    """The image files of one split, with the classes of all splits."""
    subfolders = _subfolders(path)
    splits = [name for name in subfolders if is_split(name)]
    called = called_name(split, subfolders, path)
    folder = path if called is None else path / called
    if folder == path:
        if splits:
            raise unknown_split(path, split, splits)
        warn_if_whole(path, split)
    paths = _image_paths(folder)
    if not paths:
        raise ValueError(
            f"{folder} has no images: put {', '.join(SUFFIXES)} files there, in one folder per class or flat"
        )
    # All splits are read, so that a class has the same number in each.
    everywhere = [paths, *(_image_paths(path / name) for name in splits if folder not in (path, path / name))]
    classes = tuple(sorted({Path(name).parts[0] for part in everywhere for name in part if len(Path(name).parts) > 1}))
    if len(classes) == 1:
        deeper = sorted({parts[1] for name in paths if len(parts := Path(name).parts) > 2})
        if len(deeper) > 1 and not any(len(Path(name).parts) == 2 for name in paths):
            few = ", ".join(deeper[:3]) + ", …" * (len(deeper) > 3)
            warnings.warn(
                f"{folder} has one class, {classes[0]!r}, whose folder contains {few}: if these are the classes, give "
                f"{folder / classes[0]}",
                stacklevel=4,
            )
    number = {name: label for label, name in enumerate(classes)}
    # A file next to the class folders has no class.
    classes_of = [number[parts[0]] if len(parts := Path(name).parts) > 1 else -1 for name in paths]
    labels = torch.tensor(classes_of) if any(label >= 0 for label in classes_of) else None  # (N,)
    return Found(FolderImages(folder, paths), labels, () if labels is None else classes, f"{path.name}-{split}")


def holds_images(path: Path) -> bool:
    """Whether a folder has an image file in it or up to two folders deeper; each is searched up to 1,000 entries."""
    level = [path]
    for _ in range(3):
        below: list[Path] = []
        for folder in level[:_SEARCHED]:
            try:
                with os.scandir(folder) as entries:
                    for entry in itertools.islice(entries, _SEARCHED):
                        if entry.name.lower().endswith(SUFFIXES):
                            return True
                        if entry.is_dir():
                            below.append(Path(entry.path))
            except OSError:  # not a folder, or not readable: reading the source reports it
                continue
        level = below
    return False


def _subfolders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _image_paths(folder: Path) -> list[str]:
    """The images under a folder, sorted, each real file once: first those in the folder, then the targets of links.

    A link to something already read, or to a folder that contains this one, is not followed, with a warning.
    """
    root = os.path.realpath(folder)
    seen: set[str] = set(map(str, Path(root).parents))  # real paths of folders and files
    found: list[str] = []
    links: list[tuple[int, str]] = []  # a heap by depth and path: the order must not depend on the disk
    refused: list[str] = []
    pending = [(str(folder), root)]
    while pending or links:
        if not pending:
            _, link = heapq.heappop(links)
            real = os.path.realpath(link)
            if real in seen:
                refused.append(os.path.relpath(link, folder))
            elif os.path.isdir(real):
                pending.append((link, real))
            elif link.lower().endswith(SUFFIXES):
                seen.add(real)
                found.append(os.path.relpath(link, folder))
            continue
        here, real_here = pending.pop()
        seen.add(real_here)
        with os.scandir(here) as entries:
            for entry in entries:
                real = os.path.join(real_here, entry.name)
                if entry.name.startswith(".") or real in seen:
                    continue
                if entry.is_symlink() or (entry.is_dir() and os.path.realpath(entry.path) != real):
                    heapq.heappush(links, (entry.path.count(os.sep), entry.path))
                elif entry.is_dir():
                    pending.append((entry.path, real))
                elif entry.name.lower().endswith(SUFFIXES):
                    seen.add(real)
                    found.append(os.path.relpath(entry.path, folder))
    if refused:
        few = ", ".join(refused[:3]) + ", …" * (len(refused) > 3)
        warnings.warn(f"{folder}: links not followed, because their targets are already included: {few}", stacklevel=5)
    return sorted(found)


def each_once(files: Sequence[Path]) -> list[Path]:
    """The files, sorted; links to other files of the list are left out."""
    real = {Path(os.path.realpath(file)): file for file in sorted(files, reverse=True)}
    real |= {file: file for file in files if file in real}
    return sorted(real.values())

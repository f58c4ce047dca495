"""Sets of images: one uint8 tensor if memory allows, else decoded on demand."""

import hashlib
import io
import os
import re
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from hardneg import checks
from hardneg.division import Division
from hardneg.extras import required
from hardneg.progress import progress

_CHUNK = 64  # images opened at a time: well below the limit on open files
_GRAY = ("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N", "F")
_ORIENTATION = 0x0112  # the EXIF tag


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images in memory, on any device; rows number the images.

    Args:
        images: (N, C, H, W) uint8, contiguous.
        labels: (N,) int64 on the same device, −1 where unknown; None if there are none.
        classes: the name of each label; empty without labels.
        name: of the set, in reports.
        ids: (N,) int64 on the CPU, a hash of each image as it is stored, before any resizing; None if not read from a
            source.
        division: of the source, if `load_split` returned this set.
        sample_ids: (N,) the column ``id`` of a table, by which files of pairs name an image; None for row numbers.

    Examples:
        >>> images = ImageSet(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 1, -1]), ("cat", "dog"))
        >>> len(images), images.shape, images.subset([1, 3]).labels.tolist()
        (4, (3, 8, 8), [1, -1])
    """

    images: Tensor
    labels: Tensor | None = None
    classes: tuple[str, ...] = ()
    name: str = "images"
    ids: Tensor | None = None
    division: Division | None = None
    sample_ids: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        if self.images.dim() != 4 or self.images.dtype != torch.uint8 or not self.images.is_contiguous():
            given = f"{self.images.dtype} of shape {tuple(self.images.shape)}"
            raise ValueError(f"images must be contiguous uint8 of shape (N, C, H, W), got {given}: use .contiguous()")
        _check_labels(self.labels, len(self.images), self.classes)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def to(self, device: torch.device | str) -> "ImageSet":
        """The same set on another device."""
        labels = None if self.labels is None else self.labels.to(device)
        return replace(self, images=self.images.to(device), labels=labels)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        """The index and the image (C, H, W) of a row, as in `StreamedImages`."""
        row = range(len(self))[index]
        return row, self.images[row]

    def batch(self, index: Tensor) -> Tensor:
        """The images (B, C, H, W) of these rows."""
        return self.images[index]

    def subset(self, indices: Tensor | Sequence[int]) -> "ImageSet":
        """The images of these rows, in this order, renumbered from 0."""
        rows = torch.as_tensor(indices, dtype=torch.int64, device=self.images.device)  # (n,)
        checks.require_in_range("indices", rows, len(self))
        labels = None if self.labels is None else self.labels[rows]
        ids = None if self.ids is None else self.ids[rows.cpu()]
        named = None if self.sample_ids is None else [self.sample_ids[row] for row in rows.tolist()]
        return replace(self, images=self.images[rows], labels=labels, ids=ids, sample_ids=named)


class EncodedImages(Protocol):
    """Image files: ``open`` one to decode it, ``place`` names its location."""

    def __len__(self) -> int: ...
    def open(self, index: int) -> BinaryIO: ...
    def place(self, index: int) -> str: ...


class Broken:
    """The images that cannot be read: counted, reported, and an error if they are more than 1 %.

    Args:
        total: number of images in the set.
        name: of the set, in reports.

    Examples:
        >>> broken = Broken(total=200, name="photos")
        >>> broken.add(7, "photos/7.jpg", OSError("image file is truncated"))
        >>> print(broken)
        skipped 1 of 200 images of photos that cannot be read: photos/7.jpg (image file is truncated)
    """

    def __init__(self, total: int, name: str) -> None:
        self.name = name
        # In shared memory, so that the workers of a loader count together.
        self.flags: Tensor = torch.zeros(total, dtype=torch.bool).share_memory_()  # type: ignore[no-untyped-call]  # (N,)
        self.first: list[str] = []

    def __len__(self) -> int:
        return int(self.flags.sum())

    def __str__(self) -> str:
        return f"skipped {len(self)} of {len(self.flags)} images of {self.name} that cannot be read: {self._places}"

    @property
    def _places(self) -> str:
        return ", ".join(self.first) + (", …" if len(self) > len(self.first) else "")

    def add(self, index: int, place: str, error: Exception) -> None:
        """Record that the image cannot be read; raise if more than 1 % are now broken."""
        if self.flags[index]:
            return
        self.flags[index] = True
        if len(self.first) < 3:
            # Pillow names an object in memory by its address.
            reason = re.sub(r" <[^<>]* at 0x[0-9a-fA-F]+>", "", str(error))
            self.first.append(f"{place} ({reason})")
        if len(self) > 0.01 * len(self.flags):
            raise ValueError(
                f"stopped: {len(self)} of {len(self.flags)} images of {self.name} cannot be read: {self._places}. More "
                "than 1 % are broken: repair or remove them, or check the source"
            ) from error


class _EncodedSubset:
    """Some of the image files of a set."""

    def __init__(self, encoded: EncodedImages, rows: list[int]) -> None:
        self.encoded, self.rows = encoded, rows

    def __len__(self) -> int:
        return len(self.rows)

    def open(self, index: int) -> BinaryIO:
        return self.encoded.open(self.rows[index])

    def place(self, index: int) -> str:
        return self.encoded.place(self.rows[index])


class StreamedImages(Dataset[tuple[int, Tensor]]):
    """Images that do not fit in memory: item i is (i, image) with a uint8 image (C, H, W), decoded on demand.

    An image that cannot be read is replaced by the next readable one, with the index of the latter: look up labels by
    the index of an item. ``division`` and ``sample_ids`` are as in `ImageSet`.

    Args:
        encoded: the image files.
        shape: (C, H, W) of every item.
        size: the shorter side is resized to this length, then the center is cropped; None does not change images.
        labels: (N,) int64, −1 where unknown; None if there are none.
        classes: the name of each label; empty without labels.
        name: of the set, in reports.
        broken: images known to be unreadable.

    Examples:
        >>> import io; from PIL import Image
        >>> class Plain:
        ...     def __len__(self): return 2
        ...     def place(self, index): return f"plain {index}"
        ...     def open(self, index):
        ...         Image.new("RGB", (40, 30), (index, 0, 0)).save(file := io.BytesIO(), "PNG")
        ...         return file
        >>> images = StreamedImages(Plain(), shape=(3, 16, 16), size=16)
        >>> index, image = images[1]
        >>> index, tuple(image.shape), int(image[0, 0, 0])
        (1, (3, 16, 16), 1)
    """

    def __init__(
        self,
        encoded: EncodedImages,
        shape: tuple[int, int, int],
        size: int | None = None,
        labels: Tensor | None = None,
        classes: tuple[str, ...] = (),
        name: str = "images",
        broken: Broken | None = None,
    ) -> None:
        required("PIL.Image", "train")  # here: while decoding, its absence would look like a broken image
        _check_labels(labels, len(encoded), classes)
        self.encoded, self.shape, self.size = encoded, shape, size
        self.labels, self.classes, self.name = labels, classes, name
        self.broken = Broken(len(encoded), name) if broken is None else broken
        self.division: Division | None = None
        self.sample_ids: Sequence[Any] | None = None

    def __len__(self) -> int:
        return len(self.broken.flags)

    def subset(self, indices: Tensor | Sequence[int]) -> "StreamedImages":
        """The images of these rows, in this order, renumbered from 0."""
        rows = torch.as_tensor(indices, dtype=torch.int64)  # (n,)
        checks.require_in_range("indices", rows, len(self))
        labels = None if self.labels is None else self.labels[rows]
        encoded = _EncodedSubset(self.encoded, rows.tolist())
        part = StreamedImages(encoded, self.shape, self.size, labels, self.classes, self.name)
        part.broken.flags |= self.broken.flags[rows]
        part.division = self.division
        if self.sample_ids is not None:
            part.sample_ids = [self.sample_ids[row] for row in rows.tolist()]
        return part

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        index = range(len(self))[index]
        for sound in chain(range(index, len(self)), range(index)):
            if self.broken.flags[sound]:
                continue
            try:
                return sound, decode(self.encoded.open(sound), self.shape, self.size)
            # Decoders raise OSError, SyntaxError, ValueError, struct.error and more for bad bytes.
            except Exception as error:
                self.broken.add(sound, self.encoded.place(sound), error)
                if len(self.broken).bit_count() == 1:  # at 1, 2, 4, 8, …, not thousands of times
                    warnings.warn(str(self.broken), stacklevel=2)
        raise ValueError(f"no image of {self.name} can be read: check the source")


def survey(encoded: EncodedImages, size: int | None, broken: Broken) -> tuple[int, int, int]:
    """The (C, H, W) of all decoded images, from their headers; C is 1 only if all images are gray."""
    image_module = required("PIL.Image", "train")
    first: tuple[int, int, int] | None = None
    gray = True
    for index in range(len(encoded)):
        try:
            with encoded.open(index) as file, image_module.open(file) as image:
                width, height = image.size if _orientation(image) < 5 else image.size[::-1]
                gray = gray and image.mode in _GRAY
        except Exception as error:
            broken.add(index, encoded.place(index), error)
            continue
        first = first or (index, height, width)
        if size is not None and not gray:
            break
        if size is None and (height, width) != first[1:]:
            raise ValueError(
                f"images of {broken.name} differ in size, so size=None is not possible: {encoded.place(first[0])} is "
                f"{first[1]}x{first[2]}, {encoded.place(index)} is {height}x{width} (HxW); pass size=224, for example"
            )
    if first is None:
        raise ValueError(f"no image of {broken.name} can be read: check the source")
    height, width = first[1:] if size is None else (size, size)
    return 1 if gray else 3, height, width


def decode_all(
    encoded: EncodedImages, shape: tuple[int, int, int], size: int | None, broken: Broken
) -> tuple[Tensor, Tensor, Tensor]:
    """All readable images (n, C, H, W), their indices (n,) and their ids (n,); the others are added to ``broken``."""
    required("PIL.Image", "train")
    images = torch.empty(len(encoded), *shape, dtype=torch.uint8)  # (N, C, H, W)
    sound: list[int] = []
    ids: list[int] = []
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for start in progress(range(0, len(encoded), _CHUNK), f"decoding {broken.name}"):
            futures: dict[int, Future[tuple[Tensor, int]]] = {}
            for index in range(start, min(start + _CHUNK, len(encoded))):
                try:
                    futures[index] = pool.submit(_decode_with_id, encoded.open(index), shape, size)
                except Exception as error:
                    broken.add(index, encoded.place(index), error)
            for index, future in futures.items():
                try:
                    images[len(sound)], content = future.result()
                    sound.append(index)
                    ids.append(content)
                except Exception as error:
                    broken.add(index, encoded.place(index), error)
    return images[: len(sound)], torch.tensor(sound, dtype=torch.int64), torch.tensor(ids, dtype=torch.int64)


def _decode_with_id(file: BinaryIO, shape: tuple[int, int, int], size: int | None) -> tuple[Tensor, int]:
    with file:
        data = file.read()
    return decode(io.BytesIO(data), shape, size), content_id(data)


def content_id(data: Any) -> int:
    """A 64-bit hash of bytes, or of a contiguous array, as a signed number: the same on every machine.

    Examples:
        >>> content_id(b"image") == content_id(np.frombuffer(b"image", np.uint8)) != content_id(b"other")
        True
    """
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def decode(file: BinaryIO, shape: tuple[int, int, int], size: int | None) -> Tensor:
    """The image (C, H, W) in uint8, upright, gray if C is 1 and RGB otherwise; raises if it is broken."""
    with file, required("PIL.Image", "train").open(file) as image:
        if size is not None:
            # JPEG decoding is much faster at a half, quarter or eighth of the size; twice the target keeps it sharp.
            image.draft(None, (2 * size, 2 * size))
        pixels = pixels_of(image, shape[0])
    pixels = pixels if size is None else fit(pixels[None], size)[0]
    if tuple(pixels.shape) != shape:
        raise ValueError(f"decodes to {tuple(pixels.shape)}, but its header says {shape}")
    return pixels.contiguous()


def pixels_of(image: Any, channels: int) -> Tensor:
    """The pixels (C, H, W) in uint8 of a PIL image, upright, gray if C is 1 and RGB otherwise."""
    upright = required("PIL.ImageOps", "train").exif_transpose(image) if _orientation(image) != 1 else image
    if upright.mode.startswith("I"):  # 16 bits: Pillow's own conversion clips at 255
        upright = required("PIL.Image", "train").fromarray((np.asarray(upright) >> 8).clip(0, 255).astype(np.uint8))
    elif upright.mode == "P" and "transparency" in upright.info:
        upright = upright.convert("RGBA")
    pixels = torch.from_numpy(np.array(upright.convert("L" if channels == 1 else "RGB")))  # (H, W) or (H, W, 3)
    return pixels[None] if channels == 1 else pixels.permute(2, 0, 1)


def fit(images: Tensor, size: int) -> Tensor:
    """Resize the shorter side to ``size`` and crop the center: (N, C, H, W) uint8 to (N, C, size, size).

    Examples:
        >>> fit(torch.zeros(1, 3, 30, 40, dtype=torch.uint8), 16).shape
        torch.Size([1, 3, 16, 16])
    """
    shorter = min(images.shape[2:])
    # Pixels further out do not contribute to the center, and enlarging a 1 x 10,000 strip would fill the memory.
    images = _center(images, min(images.shape[2], 2 * shorter), min(images.shape[3], 2 * shorter))
    if shorter != size:
        sides = [max(size, round(side * size / shorter)) for side in images.shape[2:]]
        images = interpolate(images, sides, mode="bilinear", antialias=True)
    return _center(images, size, size).contiguous()


def _check_labels(labels: Tensor | None, count: int, classes: tuple[str, ...]) -> None:
    if labels is None:
        return
    checks.integers("labels", labels, (count,), "one per image")
    if labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64, got {labels.dtype}: convert them with .long()")
    if labels.device.type != "cpu":  # reading values would make the host wait; sets are made on the CPU
        return
    if len(labels) and not -1 <= int(labels.min()) <= int(labels.max()) < len(classes):
        given = f"values from {int(labels.min())} to {int(labels.max())}"
        raise ValueError(f"labels must be −1 (unknown) or number one of the {len(classes)} classes, got {given}")


def _orientation(image: Any) -> int:
    # A PNG would be decoded completely to look for EXIF, and Pillow itself rotates TIFF.
    return int(image.getexif().get(_ORIENTATION, 1)) if image.format in ("JPEG", "MPO", "WEBP") else 1


def _center(images: Tensor, height: int, width: int) -> Tensor:
    top, left = (images.shape[2] - height) // 2, (images.shape[3] - width) // 2
    return images[:, :, top : top + height, left : left + width]

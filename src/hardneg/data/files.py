"""Reading images: scikit-learn's digits, .npz files, image folders, parquet, arrow, and the Hugging Face hub."""

import io
import json
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hardneg import checks
from hardneg.data.images import Broken, EncodedImages, ImageSet, StreamedImages, decode_all, fit, required, survey

_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_SPLITS = ("train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing")
_LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "target")
_IMAGE_COLUMNS = ("image", "img", "images", "picture")
_KINDS = (
    "'digits', 'hf:NAME', an .npz, .parquet or .arrow file, an image folder, a folder of parquet or a saved dataset"
)
_MOST_PIXELS = 8192  # of a side
_IN_MEMORY = 4 * 2**30  # bytes of a set
_PYARROW = 'pip install "hardneg[mine]"'
_DATASETS = "pip install datasets"


def load_images(
    source: str | Path,
    split: str = "train",
    size: int | None = None,
    labels: bool = False,
    in_memory: int = _IN_MEMORY,
) -> ImageSet | StreamedImages:
    """Images from wherever they are, always in the same order.

    Args:
        source: one of

            - ``"digits"``: scikit-learn's 1,797 digits of 1x8x8, pixels 0..16 times 15; 500 are ``test``;
            - an ``.npz`` file with ``{split}_images``, ``{split}_labels`` and ``classes``, or with ``images`` and
              ``labels``: uint8 (N, H, W), (N, H, W, C) or (N, C, H, W), C being the shorter of second and last axis;
            - a folder of images, or of one folder per class, or of one such folder per split;
            - a ``.parquet`` or ``.arrow`` file, a folder of parquet files, or what ``datasets`` saved to disk;
            - ``"hf:NAME"`` or ``"hf:NAME:CONFIG"``: a dataset of the Hugging Face hub.
        split: which part; a source without parts is read whole, with a warning unless this is ``"train"``.
        size: bring the shorter side to this length and cut out the centre; needed where images differ in size.
        labels: whether labels are needed: if none is known, this is an error.
        in_memory: largest size in bytes of a set that is decoded into memory; a larger one is streamed.

    Examples:
        >>> digits = load_images("digits", split="test", labels=True)
        >>> len(digits), digits.shape, digits.labels[:5].tolist()
        (500, (1, 8, 8), [0, 4, 0, 4, 1])
    """
    if size is not None and (not isinstance(size, int) or size < 1):
        raise ValueError(f"size must be an integer ≥ 1 or None, got {size!r}")
    if size is not None and size > _MOST_PIXELS:
        raise ValueError(f"size={size} is more than {_MOST_PIXELS} pixels a side: lower it (data.size in a recipe)")
    checks.number("in_memory", in_memory, at_least=0)
    images = _load(source, split, size, in_memory)
    if labels and (images.labels is None or not bool((images.labels >= 0).any())):
        raise ValueError(
            f"labels=True, but {str(source)!r} has no labels for split={split!r}: use one folder per class, "
            "an array 'labels' in an .npz, or an integer column 'label' in parquet; or choose a method without labels"
        )
    return images


def _load(source: str | Path, split: str, size: int | None, in_memory: int) -> ImageSet | StreamedImages:
    if source == "digits":
        return _resized(_digits(split), size)
    if isinstance(source, str) and source.startswith("hf:"):
        name, _, config = source.removeprefix("hf:").partition(":")
        rows = required("datasets", _DATASETS).load_dataset(name, config or None, split=split)
        return _decoded(_from_dataset(rows, Path(name), split), size, in_memory)
    path = Path(source).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"source={str(source)!r} does not exist: give {_KINDS}")
    if path.is_dir():
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            found = _from_dataset(_saved(path, split), path, split)
        elif parquet := sorted([*path.glob("*.parquet"), *path.glob("*/*.parquet")]):
            found = _from_parquet(path, _files_of_split(path, parquet, split), split)
        else:
            found = _from_folder(path, split)
        return _decoded(found, size, in_memory)
    match path.suffix.lower():
        case ".npz":
            return _resized(_from_npz(path, split, in_memory), size)
        case ".parquet":
            _warn_if_whole(path, split)
            return _decoded(_from_parquet(path, [path], split), size, in_memory)
        case ".arrow":
            _warn_if_whole(path, split)
            rows = required("datasets", _DATASETS).Dataset.from_file(str(path))
            return _decoded(_from_dataset(rows, path, split), size, in_memory)
    raise ValueError(
        f"source={str(source)!r} is a {path.suffix or 'suffixless'} file, which is not known: give {_KINDS}"
    )


# --- what the readers of files find, and what becomes of it ---


class _Found(NamedTuple):
    encoded: EncodedImages
    labels: Tensor | None  # (N,) int64
    classes: tuple[str, ...]
    name: str


def _decoded(found: _Found, size: int | None, in_memory: int) -> ImageSet | StreamedImages:
    encoded, labels, classes, name = found
    if len(encoded) == 0:
        raise ValueError(f"{name} has no rows: check the source")
    broken = Broken(len(encoded), name)
    shape = survey(encoded, size, broken)
    if len(encoded) * int(np.prod(shape)) > in_memory:
        encoded = encoded.with_random_access() if isinstance(encoded, ParquetImages) else encoded
        images: ImageSet | StreamedImages = StreamedImages(encoded, shape, size, labels, classes, name, broken)
    else:
        pixels, sound = decode_all(encoded, shape, size, broken)  # (n, C, H, W), (n,)
        images = ImageSet(pixels, None if labels is None else labels[sound], classes, name)
    if len(broken):
        warnings.warn(str(broken), stacklevel=4)
    return images


def _resized(images: ImageSet, size: int | None) -> ImageSet:
    if size is None or images.shape[1:] == (size, size):
        return images
    needed = len(images) * images.shape[0] * size * size
    if needed > _IN_MEMORY:
        raise ValueError(
            f"size={size} makes {len(images):,} images of {images.name} {needed / 1e9:,.1f} GB, more than the "
            f"{_IN_MEMORY / 1e9:,.1f} GB that are held in memory: lower it (data.size in a recipe)"
        )
    pixels = torch.cat([fit(chunk, size) for chunk in torch.split(images.images, 1024)])  # (N, C, size, size)
    return ImageSet(pixels, images.labels, images.classes, images.name)


class UndividedWarning(UserWarning):
    """A split was asked of a source that is not divided into splits."""


def _warn_if_whole(path: Path, split: str) -> None:
    if split != "train" and split not in re.split(r"[-_.]", path.name):
        warnings.warn(
            f"{path} is not divided into splits, so split={split!r} is all of it: "
            "if you train on it too, results on it are no test",
            UndividedWarning,
            stacklevel=4,
        )


class UnknownSplitError(ValueError):
    """The source is divided into splits, and the one asked for is not among them."""


def _unknown_split(path: Path | str, split: str, splits: Sequence[str]) -> UnknownSplitError:
    return UnknownSplitError(
        f"split={split!r} is not in {str(path)!r}: it has {', '.join(map(repr, splits))}; pass one of them"
    )


def _number_names(highest: int) -> tuple[str, ...]:
    return tuple(str(number) for number in range(highest + 1))


# --- arrays ---


def _digits(split: str) -> ImageSet:
    checks.choice("split", split, ("train", "test"))
    data = required("sklearn.datasets", 'pip install "hardneg[train]"').load_digits()
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(0))
    rows = (order[:500] if split == "test" else order[500:]).sort().values
    images = torch.from_numpy((15 * data.images).astype(np.uint8))[rows, None]  # (n, 1, 8, 8)
    labels = torch.from_numpy(data.target.astype(np.int64))[rows]  # (n,)
    return ImageSet(images.contiguous(), labels, tuple(str(digit) for digit in range(10)), f"digits-{split}")


def _from_npz(path: Path, split: str, in_memory: int) -> ImageSet:
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not an .npz file, or only a part of one: write it with numpy.savez")
    with np.load(path, allow_pickle=False) as arrays:
        splits = [key.removesuffix("_images") for key in arrays.files if key.endswith("_images")]
        if splits and split not in splits:
            raise _unknown_split(path, split, splits)
        prefix = f"{split}_" if splits else ""
        if f"{prefix}images" not in arrays.files:
            packed = ": it is packed, unpack it with python -m hardneg.data.unpack" if "blob" in arrays.files else ""
            raise ValueError(f"{path} needs 'images' or '{split}_images', got {', '.join(arrays.files)}{packed}")
        if not splits:
            _warn_if_whole(path, split)
        size_in_bytes = arrays.zip.getinfo(f"{prefix}images.npy").file_size
        if size_in_bytes > in_memory:
            raise ValueError(
                f"{path} holds {size_in_bytes:,} bytes of images, above in_memory={in_memory:,}, and .npz cannot be "
                "streamed: raise in_memory or store the images as a folder or as parquet"
            )
        # The labels of all splits, so that they agree on the classes.
        wanted = [f"{prefix}images", "classes", *(f"{name}_labels" for name in splits), "labels"]
        try:
            read = {key: arrays[key] for key in wanted if key in arrays.files}
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read ({error}): write plain arrays with numpy.savez") from error

    images = _channels_first(read[f"{prefix}images"], path)  # (N, C, H, W)
    name = f"{path.stem}-{split}"
    if f"{prefix}labels" not in read:
        return ImageSet(images, name=name)
    labels = read[f"{prefix}labels"]
    if labels.dtype.kind not in "iu" or labels.shape not in ((len(images),), (len(images), 1)):
        given = f"{labels.dtype} of shape {labels.shape}"
        raise ValueError(f"labels of {path} must be {len(images)} integers, got {given}: names belong in 'classes'")
    numbered = [part for key, part in read.items() if key.endswith("labels") and part.dtype.kind in "iu" and part.size]
    highest = max(int(part.max()) for part in numbered)
    classes = tuple(str(name) for name in read["classes"]) if "classes" in read else _number_names(highest)
    return ImageSet(images, torch.from_numpy(labels.astype(np.int64).reshape(-1)), classes, name)


def _channels_first(pixels: npt.NDArray[Any], path: Path) -> Tensor:
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4) or pixels.size == 0:
        given = f"{pixels.dtype} of shape {pixels.shape}"
        raise ValueError(
            f"images of {path} must be uint8 of shape (N, H, W), (N, H, W, C) or (N, C, H, W) and not empty, got "
            f"{given}: convert pixels in 0..1 with (255 * images).round().astype(numpy.uint8)"
        )
    images = torch.from_numpy(pixels)
    if images.dim() == 3:
        return images[:, None]  # (N, 1, H, W)
    if images.shape[3] <= images.shape[1]:
        images = images.permute(0, 3, 1, 2)  # (N, C, H, W)
    return images.contiguous()


# --- folders ---


class FolderImages:
    """Image files by their path under ``root``."""

    def __init__(self, root: Path, paths: Sequence[str]) -> None:
        self.root, self.paths = root, paths

    def __len__(self) -> int:
        return len(self.paths)

    def open(self, index: int) -> BinaryIO:
        return (self.root / self.paths[index]).open("rb")

    def place(self, index: int) -> str:
        return str(self.root / self.paths[index])


def _from_folder(path: Path, split: str) -> _Found:
    splits = [name for name in _subfolders(path) if name in _SPLITS]
    folder = path / split if (path / split).is_dir() else path
    if folder == path:
        if splits:
            raise _unknown_split(path, split, splits)
        _warn_if_whole(path, split)
    paths = sorted(_image_paths(folder))
    if not paths:
        raise ValueError(
            f"{folder} has no images: put {', '.join(_SUFFIXES)} files there, in one folder per class or flat"
        )
    # Every split is asked, so that a class has the same number where another split lacks it.
    asked = {folder, *(path / name for name in splits)} if folder != path else {folder}
    classes = tuple(sorted({name for part in asked for name in _subfolders(part)}))
    number = {name: label for label, name in enumerate(classes)}
    # A file beside the class folders has no class.
    known = [number[parts[0]] if len(parts := Path(name).parts) > 1 else -1 for name in paths]
    labels = torch.tensor(known) if any(label >= 0 for label in known) else None  # (N,)
    return _Found(FolderImages(folder, paths), labels, () if labels is None else classes, f"{path.name}-{split}")


def _subfolders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _image_paths(folder: Path) -> Iterator[str]:
    for here, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.lower().endswith(_SUFFIXES) and not name.startswith("."):
                yield os.path.relpath(os.path.join(here, name), folder)


# --- parquet, and what the datasets library reads: arrow, saved datasets, the hub ---


class ParquetImages:
    """Images in a column of parquet files, read from first to last: a step back begins anew."""

    def __init__(self, files: Sequence[Path], column: str, base: Path) -> None:
        self.files, self.column, self.base = files, column, base
        self.count: int = sum(_parquet().read_metadata(file).num_rows for file in files)
        self._start = 0
        self._cells: Sequence[Any] = ()  # the batch of rows that begins at _start
        self._batches = self._read()

    def __len__(self) -> int:
        return self.count

    def open(self, index: int) -> BinaryIO:
        if index < self._start:
            self._start, self._cells, self._batches = 0, (), self._read()
        while index >= self._start + len(self._cells):
            self._start += len(self._cells)
            self._cells = next(self._batches).column(0)
        return _open_cell(self._cells[index - self._start].as_py(), self.base)

    def place(self, index: int) -> str:
        return f"{self.base} row {index}"

    def with_random_access(self) -> "DatasetImages":
        """The same images through ``datasets``, which copies them to arrow: parquet is slow to read out of order."""
        files = [str(file) for file in self.files]
        rows = required("datasets", _DATASETS).load_dataset("parquet", data_files=files, split="train")
        if len(rows) != self.count:  # labels were read apart: they must not slip
            raise ValueError(
                f"datasets read {len(rows)} of the {self.count} rows of {self.base}: rename odd file names"
            )
        return DatasetImages(rows, self.column, self.base)

    def _read(self) -> Iterator[Any]:
        for file in self.files:
            yield from _parquet().ParquetFile(file).iter_batches(batch_size=64, columns=[self.column])


class DatasetImages:
    """Images in a column of a ``datasets.Dataset``: mapped into memory, any row at once."""

    def __init__(self, rows: Any, column: str, base: Path) -> None:
        plain = required("datasets", _DATASETS).Image(decode=False)
        self.rows, self.column, self.base = rows.select_columns([column]).cast_column(column, plain), column, base

    def __len__(self) -> int:
        return len(self.rows)

    def open(self, index: int) -> BinaryIO:
        return _open_cell(self.rows[index][self.column], self.base)

    def place(self, index: int) -> str:
        return f"{self.base} row {index}"


def _from_parquet(path: Path, files: Sequence[Path], split: str) -> _Found:
    try:
        schema = _parquet().read_schema(files[0])
        column, label_column, classes = _columns(schema, path)
        encoded = ParquetImages(files, column, files[0].parent)
        cells = None if label_column is None else _parquet().read_table(files, columns=[label_column]).column(0)
    except required("pyarrow", _PYARROW).ArrowInvalid as error:
        raise ValueError(f"{path} cannot be read as parquet ({error}): download or write it again") from error
    return _Found(encoded, *_cell_labels(cells, classes), f"{path.stem}-{split}")


def _from_dataset(rows: Any, path: Path, split: str) -> _Found:
    column, label_column, classes = _columns(rows.features.arrow_schema, path)
    cells = None if label_column is None else rows.select_columns([label_column]).with_format("arrow")[:].column(0)
    return _Found(DatasetImages(rows, column, path), *_cell_labels(cells, classes), f"{path.stem}-{split}")


def _saved(path: Path, split: str) -> Any:
    rows = required("datasets", _DATASETS).load_from_disk(str(path))
    if not isinstance(rows, dict):
        _warn_if_whole(path, split)
        return rows
    if split not in rows:
        raise _unknown_split(path, split, list(rows))
    return rows[split]


def _files_of_split(root: Path, files: Sequence[Path], split: str) -> list[Path]:
    """The files whose folder or name begins with the split; all if no file names one."""
    told: dict[str, list[Path]] = {}
    for file in files:
        words = [*file.relative_to(root).parent.parts, re.split(r"[-_.]", file.name)[0]]
        for word in words:
            if word == split or word in _SPLITS:
                told.setdefault(word, []).append(file)
                break
    if told and split not in told:
        raise _unknown_split(root, split, sorted(told))
    if not told:
        _warn_if_whole(root, split)
    return told.get(split, list(files))


def _columns(schema: Any, path: Path) -> tuple[str, str | None, tuple[str, ...]]:
    """The column of images, that of labels if any, and the names of the classes."""
    types = required("pyarrow.types", _PYARROW)
    notes = json.loads((schema.metadata or {}).get(b"huggingface", "{}")).get("info", {}).get("features", {})
    images = [
        field.name
        for field in schema
        if (types.is_struct(field.type) and "bytes" in [part.name for part in field.type])
        or (types.is_binary(field.type) or types.is_large_binary(field.type))
    ]
    told = [name for name, note in notes.items() if isinstance(note, dict) and note.get("_type") == "Image"]
    named = [name for name in (*told, *_IMAGE_COLUMNS) if name in images] or images
    if not named:
        raise ValueError(
            f"{path} has no column of images, only {', '.join(schema.names)}: "
            "store encoded images as bytes, or as {'bytes', 'path'} as the datasets library does, in a column 'image'"
        )
    numbers = [field.name for field in schema if types.is_integer(field.type)]
    classed = [name for name, note in notes.items() if isinstance(note, dict) and note.get("_type") == "ClassLabel"]
    label = next((name for name in (*_LABEL_COLUMNS, *classed) if name in numbers), None)
    names = notes.get(label, {}).get("names") or ()
    return named[0], label, tuple(names)


def _cell_labels(cells: Any, classes: tuple[str, ...]) -> tuple[Tensor | None, tuple[str, ...]]:
    if cells is None or len(cells) == 0:
        return None, ()
    labels = torch.from_numpy(cells.cast("int64").fill_null(-1).to_numpy().copy())  # (N,)
    return labels, classes or _number_names(int(labels.max()))


def _open_cell(cell: Any, base: Path) -> BinaryIO:
    data = cell["bytes"] if isinstance(cell, dict) else cell
    if data is not None:
        return io.BytesIO(data)
    if cell is None or not cell.get("path"):
        raise ValueError("the row holds no image")
    return (base / str(cell["path"])).open("rb")


def _parquet() -> Any:
    return required("pyarrow.parquet", _PYARROW)

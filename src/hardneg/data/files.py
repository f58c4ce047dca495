"""Reading images: scikit-learn's digits, .npz files, image folders, parquet, arrow, and the Hugging Face hub."""

import bisect
import heapq
import io
import json
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hardneg import checks
from hardneg.data.images import (
    Broken,
    EncodedImages,
    ImageSet,
    StreamedImages,
    content_id,
    decode_all,
    fit,
    regular,
    required,
    survey,
)

_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_SPLITS = ("train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing")
_LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "target")
_IMAGE_COLUMNS = ("image", "img", "images", "picture")
_KINDS = (
    "'digits', 'hf:NAME', an .npz, .parquet or .arrow file, an image folder, a folder of parquet or a saved dataset"
)
_MOST_PIXELS = 8192  # of a side
_PYARROW = 'pip install "hardneg[mine]"'
_DATASETS = "pip install datasets"
IN_MEMORY = 4 * 2**30  # bytes of decoded images
_MOST_CLASSES = 1 << 20  # that may go by numbers alone


def load_images(
    source: str | Path,
    split: str = "train",
    size: int | None = None,
    labels: bool = False,
    in_memory: int = IN_MEMORY,
) -> ImageSet | StreamedImages:
    """Images from wherever they are, always in the same order.

    Args:
        source: one of

            - ``"digits"``: scikit-learn's 1,797 digits of 1x8x8, pixels 0..16 times 15; 500 are ``test``;
            - an ``.npz`` file with ``{split}_images``, ``{split}_labels`` and ``classes``, or with ``images`` and
              ``labels``: uint8 (N, H, W), (N, H, W, C) or (N, C, H, W), C being the shorter of second and last axis;
            - a folder of images, or of one folder per class, or of one such folder per split; links to files and
              folders elsewhere are followed, links back into the folder are not, and each file is read once;
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
            "an array 'labels' in an .npz, or a column 'label' of numbers or names in parquet; "
            "or choose a method without labels"
        )
    return images


def _load(source: str | Path, split: str, size: int | None, in_memory: int) -> ImageSet | StreamedImages:
    found = find(source, split, in_memory)
    if isinstance(found, Found):
        return _decoded(found, size, in_memory)
    ids = torch.tensor([content_id(image) for image in found.images.numpy()])  # (N,)
    return _resized(replace(found, ids=ids), size)


def find(source: str | Path, split: str, in_memory: int = IN_MEMORY) -> "ImageSet | Found":
    """What a source holds of a split: arrays, or images still to be decoded; arguments as for `load_images`."""
    if source == "digits":
        return _digits(split)
    if isinstance(source, str) and source.startswith("hf:"):
        return _from_hub(source, split)
    path = Path(source).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"source={str(source)!r} does not exist: give {_KINDS}")
    if path.is_dir():
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return _from_saved(path, split)
        shards = [file for file in (*path.glob("*.parquet"), *path.glob("*/*.parquet")) if not file.is_dir()]
        if parquet := _each_once([regular(file) for file in shards]):
            return _from_parquet(path, _files_of_split(path, parquet, split), split, parquet)
        return _from_folder(path, split)
    match regular(path).suffix.lower():
        case ".npz":
            return _from_npz(path, split, in_memory)
        case ".parquet":
            _warn_if_whole(path, split)
            return _from_parquet(path, [path], split, [path])
        case ".arrow":
            _warn_if_whole(path, split)
            rows = required("datasets", _DATASETS).Dataset.from_file(str(path))
            return _from_dataset(rows, path, split, [path.parent])
    raise ValueError(
        f"source={str(source)!r} is a {path.suffix or 'suffixless'} file, which is not known: give {_KINDS}"
    )


# --- what the readers of files find, and what becomes of it ---


class Found(NamedTuple):
    """Images as they are stored, with their labels and the name of their set."""

    encoded: EncodedImages
    labels: Tensor | None  # (N,) int64
    classes: tuple[str, ...]
    name: str


def _decoded(found: Found, size: int | None, in_memory: int) -> ImageSet | StreamedImages:
    encoded, labels, classes, name = found
    if len(encoded) == 0:
        raise ValueError(f"{name} has no rows: check the source")
    broken = Broken(len(encoded), name)
    shape = survey(encoded, size, broken)
    if len(encoded) * int(np.prod(shape)) > in_memory:
        encoded = encoded.with_random_access() if isinstance(encoded, ParquetImages) else encoded
        images: ImageSet | StreamedImages = StreamedImages(encoded, shape, size, labels, classes, name, broken)
    else:
        pixels, sound, ids = decode_all(encoded, shape, size, broken)  # (n, C, H, W), (n,), (n,)
        images = ImageSet(pixels, None if labels is None else labels[sound], classes, name, ids)
    if len(broken):
        warnings.warn(str(broken), stacklevel=4)
    return images


def _resized(images: ImageSet, size: int | None) -> ImageSet:
    if size is None or images.shape[1:] == (size, size):
        return images
    needed = len(images) * images.shape[0] * size * size
    if needed > IN_MEMORY:
        raise ValueError(
            f"size={size} makes {len(images):,} images of {images.name} {needed / 1e9:,.1f} GB, more than the "
            f"{IN_MEMORY / 1e9:,.1f} GB that are held in memory: lower it (data.size in a recipe)"
        )
    pixels = torch.cat([fit(chunk, size) for chunk in torch.split(images.images, 1024)])  # (N, C, size, size)
    return replace(images, images=pixels)


class UndividedWarning(UserWarning):
    """A split was asked of a source that is not divided into splits."""


def _warn_if_whole(path: Path, split: str) -> None:
    if split != "train" and split not in re.split(r"[-_.]", path.name.lower()):
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


def _is_split(name: str) -> bool:
    return name.lower() in _SPLITS


def _called(split: str, names: Iterable[str], path: Path) -> str | None:
    """What a source calls a split, if it has it: the usual names may be written in any case."""
    fitting = [name for name in names if name == split or (_is_split(split) and name.lower() == split.lower())]
    if len(fitting) > 1:
        raise ValueError(
            f"{str(path)!r} has {' and '.join(map(repr, fitting))}, which is one split twice: keep one of them"
        )
    return fitting[0] if fitting else None


def _number_names(highest: int) -> tuple[str, ...]:
    if highest >= _MOST_CLASSES:
        raise ValueError(f"labels go up to {highest}: number the classes from 0, or store their names as labels")
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
        called = _called(split, splits, path)
        if splits and called is None:
            raise _unknown_split(path, split, splits)
        prefix = f"{called}_" if splits else ""
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
        wanted = [f"{prefix}images", "classes", *(key for key in arrays.files if key.endswith("labels"))]
        try:
            read = {key: arrays[key] for key in wanted if key in arrays.files}
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read ({error}): write plain arrays with numpy.savez") from error

    images = _channels_first(read[f"{prefix}images"], path)  # (N, C, H, W)
    name = f"{path.stem}-{split}"
    if f"{prefix}labels" not in read:
        for key in read.keys() - {f"{name}_labels" for name in splits}:
            if key.endswith("labels"):
                raise ValueError(f"{key!r} of {path} are no labels for {split=}: call them '{prefix}labels'")
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
        return regular(self.root / self.paths[index]).open("rb")

    def place(self, index: int) -> str:
        return str(self.root / self.paths[index])


def _from_folder(path: Path, split: str) -> Found:
    subfolders = _subfolders(path)
    splits = [name for name in subfolders if _is_split(name)]
    called = _called(split, subfolders, path)
    folder = path if called is None else path / called
    if folder == path:
        if splits:
            raise _unknown_split(path, split, splits)
        _warn_if_whole(path, split)
    paths = _image_paths(folder)
    if not paths:
        raise ValueError(
            f"{folder} has no images: put {', '.join(_SUFFIXES)} files there, in one folder per class or flat"
        )
    # Every split is asked, so that a class has the same number where another split lacks it.
    everywhere = [paths, *(_image_paths(path / name) for name in splits if folder not in (path, path / name))]
    classes = tuple(sorted({Path(name).parts[0] for part in everywhere for name in part if len(Path(name).parts) > 1}))
    if len(classes) == 1:
        deeper = sorted({parts[1] for name in paths if len(parts := Path(name).parts) > 2})
        if len(deeper) > 1 and not any(len(Path(name).parts) == 2 for name in paths):
            few = ", ".join(deeper[:3]) + ", …" * (len(deeper) > 3)
            warnings.warn(
                f"{folder} has one class, {classes[0]!r}, in whose folder are {few}: if these are the classes, give "
                f"{folder / classes[0]}",
                stacklevel=4,
            )
    number = {name: label for label, name in enumerate(classes)}
    # A file beside the class folders has no class.
    known = [number[parts[0]] if len(parts := Path(name).parts) > 1 else -1 for name in paths]
    labels = torch.tensor(known) if any(label >= 0 for label in known) else None  # (N,)
    return Found(FolderImages(folder, paths), labels, () if labels is None else classes, f"{path.name}-{split}")


def _subfolders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _image_paths(folder: Path) -> list[str]:
    """The images under a folder, sorted, each real file once: first what lies there, then what links lead to.

    A link to what was read already, or to a folder that holds this one, is not followed, which a warning says.
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
            elif link.lower().endswith(_SUFFIXES):
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
                elif entry.name.lower().endswith(_SUFFIXES):
                    seen.add(real)
                    found.append(os.path.relpath(entry.path, folder))
    if refused:
        few = ", ".join(refused[:3]) + ", …" * (len(refused) > 3)
        warnings.warn(f"{folder}: not followed, as what they lead to is there already: {few}", stacklevel=5)
    return sorted(found)


def _each_once(files: Sequence[Path]) -> list[Path]:
    """The files, sorted, without links to others of them."""
    real = {Path(os.path.realpath(file)): file for file in sorted(files, reverse=True)}
    real |= {file: file for file in files if file in real}
    return sorted(real.values())


# --- parquet, and what the datasets library reads: arrow, saved datasets, the hub ---


class ParquetImages:
    """Images in a column of parquet files, read from first to last: a step back begins anew."""

    def __init__(self, files: Sequence[Path], column: str, roots: Sequence[Path]) -> None:
        self.files, self.column, self.roots = files, column, roots
        ends = np.cumsum([_parquet().read_metadata(file).num_rows for file in files]).tolist()
        self.folders = [(end, file.parent) for end, file in zip(ends, files, strict=True)]
        self.count: int = ends[-1]
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
        return _open_cell(self._cells[index - self._start].as_py(), _folder_of(index, self.folders), self.roots)

    def place(self, index: int) -> str:
        return f"{self.roots[0]} row {index}"

    def with_random_access(self) -> "DatasetImages":
        """The same images through ``datasets``, which copies them to arrow: parquet is slow to read out of order."""
        starts = [0, *(end for end, _ in self.folders)]
        # datasets cannot read a file without rows.
        files = [str(file) for file, start, end in zip(self.files, starts[:-1], starts[1:], strict=True) if end > start]
        rows = required("datasets", _DATASETS).load_dataset("parquet", data_files=files, split="train")
        if len(rows) != self.count:  # labels were read apart: they must not slip
            raise ValueError(
                f"datasets read {len(rows)} of the {self.count} rows of {self.roots[0]}: rename odd file names"
            )
        return DatasetImages(rows, self.column, self.roots, self.folders)

    def _read(self) -> Iterator[Any]:
        for file in self.files:
            yield from _parquet().ParquetFile(file).iter_batches(batch_size=64, columns=[self.column])


class DatasetImages:
    """Images in a column of a ``datasets.Dataset``: mapped into memory, any row at once.

    folders: as for `_folder_of`; by default all paths are relative to the first root
    """

    def __init__(self, rows: Any, column: str, roots: Sequence[Path], folders: Sequence[tuple[int, Path]] = ()) -> None:
        plain = required("datasets", _DATASETS).Image(decode=False)
        self.rows = rows.select_columns([column]).cast_column(column, plain)
        self.column, self.roots, self.folders = column, roots, folders or [(len(rows), roots[0])]

    def __len__(self) -> int:
        return len(self.rows)

    def open(self, index: int) -> BinaryIO:
        return _open_cell(self.rows[index][self.column], _folder_of(index, self.folders), self.roots)

    def place(self, index: int) -> str:
        return f"{self.roots[0]} row {index}"


def _folder_of(index: int, folders: Sequence[tuple[int, Path]]) -> Path:
    """The folder of the file that holds a row; folders: the first row after each file, and the file's folder."""
    return folders[bisect.bisect_right(folders, index, key=itemgetter(0))][1]


def _from_parquet(path: Path, files: Sequence[Path], split: str, of_all_splits: Sequence[Path]) -> Found:
    try:
        column, label_column, classes = _columns(_parquet().read_schema(files[0]), path)
        for file in files[1:]:
            if (others := _columns(_parquet().read_schema(file), path)) != (column, label_column, classes):
                raise ValueError(
                    f"the columns of {file} (images {others[0]!r}, labels {others[1]!r}) or their classes differ from "
                    f"those of {files[0]} ({column!r}, {label_column!r}): write them alike"
                )
        encoded = ParquetImages(files, column, [path if path.is_dir() else path.parent])
        if label_column is None:
            return Found(encoded, None, (), f"{path.stem}-{split}")

        def column_of(some: Sequence[Path]) -> Any:
            return _parquet().read_table(list(some), columns=[label_column]).column(0)

        def everywhere() -> Iterable[Any]:
            named = (file for file in of_all_splits if label_column in _parquet().read_schema(file).names)
            return (column_of([file]) for file in named)

        labels = _cell_labels(column_of(files), classes, everywhere, f"column {label_column!r} of {path}")
    except required("pyarrow", _PYARROW).ArrowException as error:
        raise ValueError(f"{path} cannot be read as parquet ({error}): download or write it again") from error
    return Found(encoded, *labels, f"{path.stem}-{split}")


def _from_dataset(
    rows: Any, path: Path, split: str, roots: Sequence[Path], of_all_splits: Callable[[], Iterable[Any]] = tuple
) -> Found:
    column, label_column, classes = _columns(rows.features.arrow_schema, path)
    encoded = DatasetImages(rows, column, roots)
    if label_column is None:
        return Found(encoded, None, (), f"{path.stem}-{split}")

    def column_of(some: Any) -> Any:
        return some.select_columns([label_column]).with_format("arrow")[:].column(0)

    def everywhere() -> Iterable[Any]:
        return (column_of(part) for part in of_all_splits() if label_column in part.column_names)

    labels = _cell_labels(column_of(rows), classes, everywhere, f"column {label_column!r} of {path}")
    return Found(encoded, *labels, f"{path.stem}-{split}")


def _from_saved(path: Path, split: str) -> Found:
    for file in path.rglob("*"):
        if file.exists() and not file.is_dir():
            regular(file)
    rows = required("datasets", _DATASETS).load_from_disk(str(path))
    if not isinstance(rows, dict):
        _warn_if_whole(path, split)
        return _from_dataset(rows, path, split, [path])
    if (called := _called(split, rows, path)) is None:
        raise _unknown_split(path, split, list(rows))
    return _from_dataset(rows[called], path, split, [path], rows.values)


def _from_hub(source: str, split: str) -> Found:
    name, _, config = source.removeprefix("hf:").partition(":")
    datasets = required("datasets", _DATASETS)
    # Before version 4, datasets would run a script that a set brings along.
    plain = {"trust_remote_code": False} if int(datasets.__version__.partition(".")[0]) < 4 else {}

    def load(part: str | None) -> Any:
        try:
            return datasets.load_dataset(name, config or None, split=part, **plain)
        except OSError:
            raise
        except (ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            if "nknown split" in str(error):
                raise UnknownSplitError(f"{source}: {error}") from error
            told = str(error).partition("\n")[0]
            raise ValueError(
                f"{source} cannot be loaded by datasets ({told}): give a set of data files, without a script"
            ) from error

    rows = load(split)
    # What the library downloads lies in its own folders, and in those of the hub's library.
    caches = [datasets.config.HF_DATASETS_CACHE, required("huggingface_hub", _DATASETS).constants.HF_HUB_CACHE]
    return _from_dataset(rows, Path(name), split, [Path(name), *map(Path, caches)], lambda: load(None).values())


def _files_of_split(root: Path, files: Sequence[Path], split: str) -> list[Path]:
    """The files whose folder or name begins with the split; all if no file names one."""
    split = split.lower() if _is_split(split) else split
    told: dict[str, list[Path]] = {}
    for file in files:
        words = [*file.relative_to(root).parent.parts, re.split(r"[-_.]", file.name)[0]]
        for word in words:
            if word == split or _is_split(word):
                told.setdefault(word.lower() if _is_split(word) else word, []).append(file)
                break
    if told and split not in told:
        raise _unknown_split(root, split, sorted(told))
    if not told:
        _warn_if_whole(root, split)
    return told.get(split, list(files))


def _columns(schema: Any, path: Path) -> tuple[str, str | None, tuple[str, ...]]:
    """The column of images, that of labels if any, and the names of the classes."""
    types = required("pyarrow.types", _PYARROW)
    notes = _notes(schema)
    images = [
        field.name
        for field in schema
        if (types.is_struct(field.type) and "bytes" in [part.name for part in field.type])
        or (types.is_binary(field.type) or types.is_large_binary(field.type))
    ]
    told = [name for name, note in notes.items() if note.get("_type") == "Image"]
    named = [name for name in (*told, *_IMAGE_COLUMNS) if name in images] or images
    if not named:
        raise ValueError(
            f"{path} has no column of images, only {', '.join(schema.names)}: "
            "store encoded images as bytes, or as {'bytes', 'path'} as the datasets library does, in a column 'image'"
        )
    classed = [name for name, note in notes.items() if note.get("_type") == "ClassLabel"]
    labels = [name for name in (*_LABEL_COLUMNS, *classed) if name in schema.names and name != named[0]]
    kinds = (types.is_integer, types.is_floating, types.is_boolean, types.is_string, types.is_large_string,
             types.is_dictionary)  # fmt: skip
    fitting = [name for name in labels if any(fits(schema.field(name).type) for fits in kinds)]
    label = next(iter((*fitting, *labels)), None)
    names = notes.get(label or "", {}).get("names")
    return named[0], label, tuple(map(str, names)) if isinstance(names, list) else ()


def _notes(schema: Any) -> dict[str, dict[str, Any]]:
    """What the datasets library noted in the file about each column; whatever else is written there is passed over."""
    try:
        notes = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return {name: note for name, note in notes.items() if isinstance(note, dict)} if isinstance(notes, dict) else {}


def _cell_labels(
    cells: Any, classes: tuple[str, ...], everywhere: Callable[[], Iterable[Any]], place: str
) -> tuple[Tensor | None, tuple[str, ...]]:
    """The number of each row's class and the names of the classes; names are numbered in the order of the alphabet.

    cells: column of labels · classes: names of whole numbers, if known · everywhere: the columns of all splits
    """
    types = required("pyarrow.types", _PYARROW)
    cells, kind = _values(cells), str(cells.type)
    if types.is_boolean(cells.type):
        cells, classes = cells.cast("int8"), ("false", "true")
    elif types.is_floating(cells.type):  # what pandas makes of whole numbers with gaps
        numbers = cells.to_numpy().astype(np.float64)
        known = ~np.isnan(numbers)
        if not bool((numbers[known] % 1 == 0).all()):
            cells = None
        else:
            cells = required("pyarrow", _PYARROW).array(np.where(known, numbers, -1).astype(np.int64))
    elif types.is_string(cells.type) or types.is_large_string(cells.type):
        parts = [cells, *map(_values, everywhere())]
        for part in parts:
            if not any(fits(part.type) for fits in (types.is_string, types.is_large_string, types.is_null)):
                raise ValueError(f"{place} holds {kind} in one split and {part.type} in another: write them alike")
        classes = tuple(sorted({name for part in parts for name in part.unique().to_pylist() if name}))
        number = {name: label for label, name in enumerate(classes)}
        labels = torch.tensor([number.get(name, -1) for name in cells.to_pylist()], dtype=torch.int64)  # (N,)
        return (labels, classes) if classes else (None, ())
    if cells is None or not types.is_integer(cells.type):
        warnings.warn(f"{place} holds {kind}, which names no classes: the images have no labels", stacklevel=5)
        return None, ()
    if len(cells) == 0:
        return None, ()
    labels = torch.from_numpy(cells.cast("int64").fill_null(-1).to_numpy().copy())  # (N,)
    return labels, classes or _number_names(int(labels.max()))


def _values(cells: Any) -> Any:
    """A column without its dictionary."""
    encoded = required("pyarrow.types", _PYARROW).is_dictionary(cells.type)
    return cells.cast(cells.type.value_type) if encoded else cells


def _open_cell(cell: Any, base: Path, roots: Sequence[Path]) -> BinaryIO:
    """The image of a row: its bytes, or the file it names, which must lie below one of the roots.

    base: what the path is relative to; a file that is not there is looked for in the first root
    """
    data = cell["bytes"] if isinstance(cell, dict) else cell
    if data is not None:
        return io.BytesIO(data)
    if cell is None or not cell.get("path"):
        raise ValueError("the row holds no image")
    for folder in (base, roots[0]):
        path = (folder / str(cell["path"])).resolve()
        if not any(path.is_relative_to(root.resolve()) for root in roots):
            raise ValueError(
                f"the row names {cell['path']!r}, outside {roots[0]}: store the bytes of the image, or move it below "
                "that folder"
            )
        if path.exists():
            return regular(path).open("rb")
    raise FileNotFoundError(f"the row names {cell['path']!r}, which is no file")


def _parquet() -> Any:
    return required("pyarrow.parquet", _PYARROW)

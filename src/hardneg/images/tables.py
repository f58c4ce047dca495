"""Images in tables: parquet, and what the datasets library reads (arrow files, saved datasets, the hub)."""

import bisect
import io
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from hardneg import checks
from hardneg.extras import required
from hardneg.images.arrays import channels_first
from hardneg.images.image_set import ImageSet
from hardneg.images.split_names import (
    Found,
    UnknownSplitError,
    called_name,
    is_split,
    number_names,
    unknown_split,
    warn_if_whole,
)

LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "target")
ID_COLUMN = "id"
_IMAGE_COLUMNS = ("image", "img", "images", "picture")


class ParquetImages:
    """Images in a column of parquet files, read sequentially: access to an earlier row starts from the first again."""

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
        rows = required("datasets", "data").load_dataset("parquet", data_files=files, split="train")
        if len(rows) != self.count:  # labels were read separately and must belong to the same rows
            raise ValueError(
                f"datasets read {len(rows)} of the {self.count} rows of {self.roots[0]}: rename unusual file names"
            )
        return DatasetImages(rows, self.column, self.roots, self.folders)

    def _read(self) -> Iterator[Any]:
        for file in self.files:
            yield from _parquet().ParquetFile(file).iter_batches(batch_size=64, columns=[self.column])


class DatasetImages:
    """Images in a column of a ``datasets.Dataset``, which is memory-mapped: fast access to any row.

    folders: as for `_folder_of`; by default all paths are relative to the first root
    """

    def __init__(self, rows: Any, column: str, roots: Sequence[Path], folders: Sequence[tuple[int, Path]] = ()) -> None:
        plain = required("datasets", "data").Image(decode=False)
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


def from_parquet(path: Path, files: Sequence[Path], split: str, of_all_splits: Sequence[Path]) -> Found | ImageSet:
    """The rows of some parquet files; of_all_splits: the files whose labels are numbered together."""
    try:
        schema = _parquet().read_schema(files[0])
        if any(note.get("_type") == "Array3D" for note in _notes(schema).values()):
            parts = [_loaded(some) for some in (files, of_all_splits)]
            return from_dataset(parts[0], path, split, [path], lambda: parts[1:])
        column, label_column, classes = _columns(schema, path)
        for file in files[1:]:
            if (others := _columns(_parquet().read_schema(file), path)) != (column, label_column, classes):
                raise ValueError(
                    f"the columns of {file} (images {others[0]!r}, labels {others[1]!r}) or their classes differ from "
                    f"those of {files[0]} ({column!r}, {label_column!r}): write all files with the same columns"
                )
        encoded = ParquetImages(files, column, [path if path.is_dir() else path.parent])
        ids = None
        if _names_samples(schema, column, label_column):
            ids = _parquet().read_table(list(files), columns=[ID_COLUMN]).column(0).to_pylist()
        if label_column is None:
            return Found(encoded, None, (), f"{path.stem}-{split}", ids)

        def column_of(some: Sequence[Path]) -> Any:
            return _parquet().read_table(list(some), columns=[label_column]).column(0)

        def everywhere() -> Iterable[Any]:
            named = (file for file in of_all_splits if label_column in _parquet().read_schema(file).names)
            return (column_of([file]) for file in named)

        labels = _cell_labels(column_of(files), classes, everywhere, f"column {label_column!r} of {path}")
    except required("pyarrow", "data").ArrowException as error:
        raise ValueError(f"{path} cannot be read as parquet ({error}): download or write it again") from error
    return Found(encoded, *labels, f"{path.stem}-{split}", ids)


def _loaded(files: Sequence[Path]) -> Any:
    """Parquet files as one ``datasets.Dataset``."""
    return required("datasets", "data").load_dataset("parquet", data_files=[*map(str, files)], split="train")


def from_dataset(
    rows: Any, path: Path, split: str, roots: Sequence[Path], of_all_splits: Callable[[], Iterable[Any]] = tuple
) -> Found | ImageSet:
    """The rows of a ``datasets.Dataset``: encoded images, or an Array3D column of pixels.

    roots: folders below which a row may name a file · of_all_splits: gives the sets whose labels are numbered together
    """
    array_column = _array_column(rows.features)
    column, label_column, classes = _columns(rows.features.arrow_schema, path, array_column)
    name = f"{path.stem}-{split}"
    labels: tuple[Tensor | None, tuple[str, ...]] = (None, ())

    def column_of(some: Any) -> Any:
        return some.select_columns([label_column]).with_format("arrow")[:].column(0)

    def everywhere() -> Iterable[Any]:
        return (column_of(part) for part in of_all_splits() if label_column in part.column_names)

    if label_column is not None:
        labels = _cell_labels(column_of(rows), classes, everywhere, f"column {label_column!r} of {path}")
    ids = None
    if _names_samples(rows.features.arrow_schema, column, label_column):
        ids = rows.select_columns([ID_COLUMN]).with_format("arrow")[:].column(0).to_pylist()
    if array_column is None:
        return Found(DatasetImages(rows, column, roots), *labels, name, ids)
    kind = np.dtype(rows.features[column].dtype)  # numpy's default would be int64
    pixels = rows.select_columns([column]).with_format("numpy", dtype=kind)[:][column]
    return ImageSet(channels_first(np.asarray(pixels), path), *labels, name, sample_ids=ids)


def _array_column(features: Any) -> str | None:
    """The column of pixels as Array3D, if there is no column of encoded images."""
    kinds = {name: type(feature).__name__ for name, feature in features.items()}
    arrays = [name for name, kind in kinds.items() if kind == "Array3D"]
    return arrays[0] if arrays and "Image" not in kinds.values() else None


def from_arrow(path: Path, split: str) -> Found | ImageSet:
    """The images of one arrow file."""
    warn_if_whole(path, split)
    return from_dataset(required("datasets", "data").Dataset.from_file(str(path)), path, split, [path.parent])


def from_saved(path: Path, split: str) -> Found | ImageSet:
    """A folder that ``datasets`` has written with ``save_to_disk``."""
    for file in path.rglob("*"):
        if file.exists() and not file.is_dir():
            checks.regular_file(file)
    rows = required("datasets", "data").load_from_disk(str(path))
    if not isinstance(rows, dict):
        warn_if_whole(path, split)
        return from_dataset(rows, path, split, [path])
    if (called := called_name(split, rows, path)) is None:
        raise unknown_split(path, split, list(rows))
    return from_dataset(rows[called], path, split, [path], rows.values)


def from_hub(source: str, split: str) -> Found | ImageSet:
    """A dataset of the Hugging Face hub; a script that comes with it is never run."""
    name, _, config = source.removeprefix("hf:").partition(":")
    datasets = required("datasets", "data")
    # Before version 4, datasets would run a script that is part of a set.
    plain = {"trust_remote_code": False} if int(datasets.__version__.partition(".")[0]) < 4 else {}

    def load(part: str | None) -> Any:
        try:
            return datasets.load_dataset(name, config or None, split=part, **plain)
        except OSError:
            raise
        except (ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            if "nknown split" in str(error):
                raise UnknownSplitError(f"{source}: {error}") from error
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"{source} cannot be loaded by datasets ({reason}): give a set of data files, without a script"
            ) from error

    rows = load(split)
    # The library downloads to its own folders and to those of the hub's library.
    caches = [datasets.config.HF_DATASETS_CACHE, required("huggingface_hub", "data").constants.HF_HUB_CACHE]
    return from_dataset(rows, Path(name), split, [Path(name), *map(Path, caches)], lambda: load(None).values())


def files_of_split(root: Path, files: Sequence[Path], split: str) -> list[Path]:
    """The files whose folder or name begins with the split; all if no file names one."""
    split = split.lower() if is_split(split) else split
    by_split: dict[str, list[Path]] = {}
    for file in files:
        words = [*file.relative_to(root).parent.parts, re.split(r"[-_.]", file.name)[0]]
        for word in words:
            if word == split or is_split(word):
                by_split.setdefault(word.lower() if is_split(word) else word, []).append(file)
                break
    if by_split and split not in by_split:
        raise unknown_split(root, split, sorted(by_split))
    if not by_split:
        warn_if_whole(root, split)
    return by_split.get(split, list(files))


def _columns(schema: Any, path: Path, images_in: str | None = None) -> tuple[str, str | None, tuple[str, ...]]:
    """The column of images (``images_in``, if known), that of labels if any, and the names of the classes."""
    types = required("pyarrow.types", "data")
    notes = _notes(schema)
    images = [
        field.name
        for field in schema
        if (types.is_struct(field.type) and "bytes" in [part.name for part in field.type])
        or (types.is_binary(field.type) or types.is_large_binary(field.type))
    ]
    marked = [name for name, note in notes.items() if note.get("_type") == "Image"]
    named = [name for name in (*marked, *_IMAGE_COLUMNS) if name in images] or images
    named = named if images_in is None else [images_in]
    if not named:
        raise ValueError(
            f"{path} has no column of images, only {', '.join(schema.names)}: "
            "store encoded images as bytes, or as {'bytes', 'path'} as the datasets library does, in a column 'image'"
        )
    classed = [name for name, note in notes.items() if note.get("_type") == "ClassLabel"]
    labels = [name for name in (*LABEL_COLUMNS, *classed) if name in schema.names and name != named[0]]
    kinds = (types.is_integer, types.is_floating, types.is_boolean, types.is_string, types.is_large_string,
             types.is_dictionary)  # fmt: skip
    fitting = [name for name in labels if any(fits(schema.field(name).type) for fits in kinds)]
    label = next(iter((*fitting, *labels)), None)
    names = notes.get(label or "", {}).get("names")
    return named[0], label, tuple(map(str, names)) if isinstance(names, list) else ()


def _names_samples(schema: Any, *others: str | None) -> bool:
    """Whether a table has a column of numbers or texts that names its rows, besides others that are used."""
    if schema.names.count(ID_COLUMN) != 1 or ID_COLUMN in others:
        return False
    types, kind = required("pyarrow.types", "data"), schema.field(ID_COLUMN).type
    return any(fits(kind) for fits in (types.is_integer, types.is_string, types.is_large_string))


def _notes(schema: Any) -> dict[str, dict[str, Any]]:
    """The features that the datasets library recorded for each column; other metadata are ignored."""
    try:
        notes = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return {name: note for name, note in notes.items() if isinstance(note, dict)} if isinstance(notes, dict) else {}


def _cell_labels(
    cells: Any, classes: tuple[str, ...], everywhere: Callable[[], Iterable[Any]], place: str
) -> tuple[Tensor | None, tuple[str, ...]]:
    """The number of each row's class and the names of the classes; names are numbered in alphabetical order.

    cells: column of labels · classes: names of whole numbers, if known · everywhere: the columns of all splits
    """
    types = required("pyarrow.types", "data")
    cells, kind = _values(cells), str(cells.type)
    if types.is_boolean(cells.type):
        cells, classes = cells.cast("int8"), ("false", "true")
    elif types.is_floating(cells.type):  # pandas converts integers with missing values to floats
        numbers = cells.to_numpy().astype(np.float64)
        present = ~np.isnan(numbers)
        if not bool((numbers[present] % 1 == 0).all()):
            cells = None
        else:
            cells = required("pyarrow", "data").array(np.where(present, numbers, -1).astype(np.int64))
    elif types.is_string(cells.type) or types.is_large_string(cells.type):
        parts = [cells, *map(_values, everywhere())]
        for part in parts:
            if not any(fits(part.type) for fits in (types.is_string, types.is_large_string, types.is_null)):
                raise ValueError(f"{place} holds {kind} in one split and {part.type} in another: use one type")
        classes = tuple(sorted({name for part in parts for name in part.unique().to_pylist() if name}))
        number = {name: label for label, name in enumerate(classes)}
        labels = torch.tensor([number.get(name, -1) for name in cells.to_pylist()], dtype=torch.int64)  # (N,)
        return (labels, classes) if classes else (None, ())
    if cells is None or not types.is_integer(cells.type):
        warnings.warn(f"{place} holds {kind}, which cannot name classes: the images have no labels", stacklevel=5)
        return None, ()
    if len(cells) == 0:
        return None, ()
    labels = torch.from_numpy(cells.cast("int64").fill_null(-1).to_numpy().copy())  # (N,)
    return labels, classes or number_names(int(labels.max()))


def _values(cells: Any) -> Any:
    """A column without its dictionary."""
    encoded = required("pyarrow.types", "data").is_dictionary(cells.type)
    return cells.cast(cells.type.value_type) if encoded else cells


def _open_cell(cell: Any, base: Path, roots: Sequence[Path]) -> BinaryIO:
    """The image of a row: its bytes, or the file it names, which must be below one of the roots.

    base: the folder that the path is relative to; if the file is not there, the first root is used
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
            return checks.regular_file(path).open("rb")
    raise FileNotFoundError(f"the row names {cell['path']!r}, which is not a file")


def _parquet() -> Any:
    return required("pyarrow.parquet", "data")

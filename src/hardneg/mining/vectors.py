"""Embeddings (N, d) that are read in parts: tensors, arrays, .npy files, parquet files, and folders of such files."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardneg import checks
from hardneg.extras import required
from hardneg.losses.inputs import normalized
from hardneg.matmul import row_blocks
from hardneg.mining.memory import pieces

SUFFIXES = (".npy", ".parquet")
_COLUMNS = ("embedding", "embeddings", "vector")
_BATCH = 1 << 18  # numbers of a parquet file that are decoded at a time
_PAGE = 1 << 20  # bytes of it that are read at a time
_SHORT, _LONG = 1e-15, 1e18  # lengths whose squares neither vanish nor overflow


class Vectors:
    """Rows of a tensor or an array in memory; the base class of rows in files.

    name: in error messages
    """

    def __init__(self, name: str, rows: Tensor | NDArray[Any]) -> None:
        self.name, self._rows = name, rows
        self.shape = _checked_shape(name, tuple(rows.shape))

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, start: int, stop: int) -> Tensor:
        """The rows from ``start`` up to ``stop``."""
        return checks.as_tensor(self.name, self._rows[start:stop])

    def take(self, rows: NDArray[np.int64]) -> Tensor:
        """The rows with these numbers, in this order."""
        if isinstance(self._rows, Tensor):
            return self._rows[torch.from_numpy(rows).to(self._rows.device)]
        return checks.as_tensor(self.name, self._rows[rows])

    def unit(self, start: int, stop: int, device: torch.device | str = "cpu") -> Tensor:
        """The rows from ``start`` up to ``stop`` as float32 unit vectors; a zero vector stays zero."""
        return _unit(self.name, self.read(start, stop), range(start, stop), device)

    def take_unit(self, rows: NDArray[np.int64]) -> Tensor:
        """As `unit`, of the rows with these numbers, on the CPU."""
        return _unit(self.name, self.take(rows), rows, "cpu")


class NpyFile(Vectors):
    """Rows of a .npy file. It is read, not mapped: a file that is cut off meanwhile is an error, not a crash."""

    def __init__(self, path: Path) -> None:
        # Absolute, because a worker of a cluster may run in another folder.
        self.name, self.path = str(path), checks.regular_file(path).absolute()
        try:
            with path.open("rb") as file:
                version = np.lib.format.read_magic(file)
                header = (
                    np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                )
                shape, fortran, self._dtype = header(file)
                self._offset = file.tell()
        except ValueError as error:
            raise ValueError(f"{path} is not a readable .npy file ({error}): write it again with numpy.save") from error
        if self._dtype.hasobject or self._dtype.kind != "f":
            raise ValueError(f"{path} must hold floating-point numbers, got {self._dtype}: save them as float32")
        if fortran:
            raise ValueError(f"{path} is in Fortran order: save numpy.ascontiguousarray(array)")
        self.shape = _checked_shape(self.name, shape)
        needed = self._offset + shape[0] * shape[1] * self._dtype.itemsize
        if (found := os.path.getsize(path)) < needed:
            raise ValueError(f"{path} is cut off: {found} of {needed} bytes: copy or write it again")

    def read(self, start: int, stop: int) -> Tensor:
        dim, start, stop = self.shape[1], min(start, len(self)), min(stop, len(self))
        offset = self._offset + start * dim * self._dtype.itemsize
        found = np.fromfile(self.path, self._dtype, (stop - start) * dim, offset=offset)
        if len(found) < (stop - start) * dim:
            raise ValueError(f"{self.path} was cut off while it was read: restore it, and start again")
        return checks.as_tensor(self.name, found.reshape(-1, dim))

    def take(self, rows: NDArray[np.int64]) -> Tensor:
        parts = [self.read(row, row + 1) for row in rows.tolist()]
        return torch.cat(parts) if parts else torch.empty(0, self.shape[1])


class ParquetFile(Vectors):
    """Rows of a list column of a parquet file. Reads go on where the last one ended: parquet finds no single rows."""

    def __init__(self, path: Path) -> None:
        self.name, self.path = str(path), checks.regular_file(path).absolute()
        with _readable(path):
            file = self._open()
            names = file.schema_arrow.names
            named = [name for name in _COLUMNS if name in names]
            if not named:
                raise ValueError(f"{path} has no column {' or '.join(map(repr, _COLUMNS))}: its columns are {names}")
            self.column = named[0]
            if not _is_list(file.schema_arrow.field(self.column).type):
                raise ValueError(
                    f"column {self.column!r} of {path} must hold lists of floating-point numbers, "
                    f"got {file.schema_arrow.field(self.column).type}"
                )
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            self._starts = np.cumsum([0, *sizes]).tolist()
            first = next(file.iter_batches(1, columns=[self.column]), None)
        width = len(first.column(0)[0].as_py() or ()) if first is not None and len(first) else 0
        self.shape = _checked_shape(self.name, (self._starts[-1], width))
        self._opened: _RowGroup | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_opened": None}  # an open file stays in its process

    def read(self, start: int, stop: int) -> Tensor:
        start, parts = max(start, 0), []
        stop = min(stop, len(self))
        while start < stop:
            group = int(np.searchsorted(self._starts, start, side="right")) - 1
            end = min(stop, self._starts[group + 1])
            if self._opened is None or not self._opened.first <= start < self._opened.end:
                self._opened = _RowGroup(self._batches(group), self._starts[group], self._starts[group + 1])
            parts.append(checks.as_tensor(self.name, self._opened.read(start, end)))
            if end == self._opened.end:
                self._opened = None  # closes the file
            start = end
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, self.shape[1])

    def _open(self) -> Any:
        # Without pre_buffer a part of the file is read when it is needed, not a whole row group.
        return required("pyarrow.parquet", "mine").ParquetFile(self.path, pre_buffer=False, buffer_size=_PAGE)

    def _batches(self, group: int) -> Iterator[NDArray[Any]]:
        """The rows of a row group, which may be larger than the memory, in batches."""
        with _readable(self.path):
            size = max(1, _BATCH // self.shape[1])
            for batch in self._open().iter_batches(size, row_groups=[group], columns=[self.column]):
                yield self._matrix(batch.column(0))

    def _matrix(self, column: Any) -> NDArray[Any]:
        """A list column as rows of equal length."""
        values = column.flatten().to_numpy(zero_copy_only=False)
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        if column.null_count or values.dtype.kind != "f" or (lengths != self.shape[1]).any():
            raise ValueError(
                f"column {self.column!r} of {self.path} must hold {self.shape[1]} floating-point numbers in every row"
            )
        return values.reshape(len(column), self.shape[1])  # type: ignore[no-any-return]

    def take(self, rows: NDArray[np.int64]) -> Tensor:
        found = torch.empty(len(rows), self.shape[1])
        size = max(1, _BATCH // self.shape[1])
        part = rows // size
        unfinished, self._opened = self._opened, None  # the place of a read in the order of the rows
        for number in np.unique(part):
            inside = np.flatnonzero(part == number)
            first = int(number) * size
            chosen = self.read(first, first + size)[torch.from_numpy(rows[inside] - first)]
            found[torch.from_numpy(inside)] = chosen.float()
        self._opened = unfinished
        return found


class _RowGroup:
    """Rows ``first`` to ``end`` of a file, of which only the last batch read and those after it can be read."""

    def __init__(self, batches: Iterator[NDArray[Any]], first: int, end: int) -> None:
        self._batches, self.first, self.end = batches, first, end
        self._rows: NDArray[Any] = np.empty((0, 0))  # from row ``first``

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """The rows from ``start`` up to ``stop``."""
        parts = []
        while True:
            if len(part := self._rows[max(start - self.first, 0) : stop - self.first]):
                parts.append(part)
            if self.first + len(self._rows) >= stop:
                return parts[0] if len(parts) == 1 else np.concatenate(parts)
            self.first += len(self._rows)
            self._rows = next(self._batches)


class Shards(Vectors):
    """The rows of several files, in the order of the files."""

    def __init__(self, name: str, files: Sequence[Vectors]) -> None:
        self.name, self.files = name, files
        for file in files[1:]:
            if file.shape[1] != files[0].shape[1]:
                raise ValueError(
                    f"{file.name} has d = {file.shape[1]}, but {files[0].name} {files[0].shape[1]}: "
                    "take all files from one encoder"
                )
        self._starts = np.cumsum([0, *map(len, files)]).tolist()
        self.shape = _checked_shape(name, (self._starts[-1], files[0].shape[1]))

    def read(self, start: int, stop: int) -> Tensor:
        parts = [
            file.read(max(start - first, 0), min(stop - first, len(file)))
            for file, first in zip(self.files, self._starts[:-1], strict=True)
            if first < stop and first + len(file) > start
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, self.shape[1])

    def take(self, rows: NDArray[np.int64]) -> Tensor:
        number = np.searchsorted(self._starts, rows, side="right") - 1
        found = torch.empty(len(rows), self.shape[1])
        for which in np.unique(number):
            inside = np.flatnonzero(number == which)
            part = self.files[which].take(rows[inside] - self._starts[which])
            found[torch.from_numpy(inside)] = part.float()
        return found


def open_vectors(name: str, given: object) -> Vectors:
    """Embeddings (N, d) as `Vectors`: a tensor, an array, a column of a dataset, a file, or a folder of files by name.

    Examples:
        >>> open_vectors("corpus", np.eye(3)).unit(1, 2)
        tensor([[0., 1., 0.]])
    """
    if isinstance(given, str | Path):
        return _open_path(name, Path(given))
    if isinstance(given, Vectors):
        return given
    if isinstance(given, Sequence):
        given = given[:]  # of a column of a dataset, what its format gives
    if not isinstance(given, Tensor | np.ndarray):
        given = checks.as_tensor(name, given)
    if not (given.is_floating_point() if isinstance(given, Tensor) else given.dtype.kind == "f"):
        raise ValueError(f"{name} must hold floating-point numbers, got {given.dtype}: convert it to float32")
    return Vectors(name, given.detach() if isinstance(given, Tensor) else given)


def _open_path(name: str, path: Path) -> Vectors:
    if not path.exists():
        raise ValueError(f"{name}={str(path)!r} does not exist: give a .npy or .parquet file, or a folder of them")
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        if not files or len({file.suffix for file in files}) > 1:
            kinds = "both .npy and .parquet" if files else "no .npy or .parquet"
            raise ValueError(f"{name}={str(path)!r} holds {kinds} files: give a folder of one kind")
        return Shards(name, [_open_path(name, file) for file in files])
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{name}={str(path)!r} is not a .npy or .parquet file: convert it with numpy.save")
    return NpyFile(path) if path.suffix == ".npy" else ParquetFile(path)


def _checked_shape(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"{name} must have shape (N, d) with N, d ≥ 1, got {tuple(shape)}")
    return shape[0], shape[1]


def _unit(name: str, rows: Tensor, numbers: range | NDArray[np.int64], device: torch.device | str) -> Tensor:
    """float32 unit vectors on the device, block by block; raises on NaN or inf. numbers: of the rows"""
    unit = torch.empty(rows.shape, device=device)
    blocks = pieces(*rows.shape) if unit.device.type == "cpu" else row_blocks(*rows.shape)
    for block in blocks:
        # float64 numbers may exceed the range of float32.
        part = rows[block].to(device, torch.promote_types(rows.dtype, torch.float32))
        lengths = torch.linalg.vector_norm(part, dim=1, keepdim=True)
        low, high = torch.stack(torch.aminmax(lengths)).tolist()
        if low > _SHORT and high < _LONG:  # as of all encoders: four passes over the rows less
            unit[block] = part / lengths
            continue
        finite = part.isfinite().all(dim=1)
        if not bool(finite.all()):
            row = numbers[block.start + int(finite.int().argmin())]
            raise checks.NonFiniteError(
                f"{name} holds NaN or inf in row {row}: look for a diverged encoder, or leave it out"
            )
        unit[block] = normalized(part)
    return unit


def _is_list(kind: Any) -> bool:
    types = required("pyarrow.types", "mine")
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn the errors of pyarrow into a ValueError that names the file."""
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except (required("pyarrow", "mine").ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read as parquet ({reason}): copy or write it again") from error

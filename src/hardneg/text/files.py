"""Reading files of texts: plain lines, JSON lines, CSV and tables of ``pyarrow`` or ``datasets``."""

import bz2
import csv
import gzip
import io
import json
import lzma
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np
import torch
from torch import Tensor

from hardneg import checks
from hardneg.extras import required

IN_MEMORY = 1 << 30  # bytes of a file that is read into memory; texts of larger ones are read on access
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
_MOST_FIELD = 1 << 24  # characters of a field of a CSV file


class StreamedTexts(Sequence[str]):
    """Texts that are read on access: item i is ``read(i)``; slices are lists.

    Examples:
        >>> StreamedTexts(3, lambda row: "abc"[row])[1:]
        ['b', 'c']
    """

    def __init__(self, size: int, read: Callable[[int], Any]) -> None:
        self.size, self.read = size, read

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        rows = range(self.size)[index]
        return self.read(rows) if isinstance(rows, int) else [self.read(row) for row in rows]


def suffix_of(path: Path) -> str:
    """The suffix that names the format of a file, without that of its compression.

    Examples:
        >>> suffix_of(Path("books.txt.xz"))
        '.txt'
    """
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    return next((suffix for suffix in reversed(suffixes) if suffix not in OPENERS), "")


def opened(path: Path) -> BinaryIO:
    """The bytes of a file, decompressed."""
    checks.regular_file(path)
    file: BinaryIO = OPENERS.get(path.suffix.lower(), io.open)(path, "rb")
    return file


def decoded(path: Path, encoding: str) -> Iterator[str]:
    """The lines of a file without their ends; bytes in another encoding are an error that names the line."""
    try:
        with opened(path) as file:
            for number, line in enumerate(file, start=1):
                yield decoded_line(line, path, number, encoding)
    except (OSError, EOFError, lzma.LZMAError, UnicodeError) as error:
        if isinstance(error, UnicodeError):
            raise
        raise ValueError(f"{path} cannot be read ({error}): copy or download it again") from error


def decoded_line(line: bytes, path: Path, number: int, encoding: str) -> str:
    """One line of a file as text, without its end; number: of the line, from 1."""
    try:
        text = line.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}, line {number} is not {encoding}: set data.encoding, such as data.encoding=cp1252, or save the "
            "file as UTF-8"
        ) from error
    return text.removeprefix("\ufeff" if number == 1 else "").rstrip("\r\n")


def read_lines(path: Path, encoding: str) -> tuple[Sequence[str], Tensor]:
    """The lines of a file that are not blank, and the first line of each document; blank lines separate documents."""
    if path.suffix.lower() not in OPENERS and path.stat().st_size > IN_MEMORY:
        return _mapped_lines(path, encoding, lambda text, number: text)
    texts: list[str] = []
    starts = [0]
    for line in decoded(path, encoding):
        if line.strip():
            texts.append(line.strip())
        elif starts[-1] != len(texts):
            starts.append(len(texts))
    return texts, torch.tensor(starts if starts[-1] < len(texts) else starts[:-1])


def _mapped_lines(path: Path, encoding: str, read: Callable[[str, int], Any]) -> tuple[StreamedTexts, Tensor]:
    """The lines of a file that stays on disk: 16 bytes of memory per line. read: of a line and its number."""
    checks.regular_file(path)
    places: list[np.ndarray[Any, Any]] = []
    found: list[tuple[int, int, int]] = []
    starts, count, place = [0], 0, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                found.append((place, place + len(line), number))
                count += 1
            elif starts[-1] != count:
                starts.append(count)
            place += len(line)
            if len(found) == 1 << 16:
                places.append(np.array(found))
                found = []
        places.append(np.array(found, dtype=np.int64).reshape(-1, 3))
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    spans = np.concatenate(places)  # (N, 3)

    def text(row: int) -> Any:
        begin, end, number = spans[row].tolist()
        return read(decoded_line(content[begin:end], path, number, encoding).strip(), number)

    return StreamedTexts(count, text), torch.tensor(starts if starts[-1] < count else starts[:-1])


def read_json_lines(path: Path, encoding: str, column: str | None) -> Mapping[str, Sequence[Any]]:
    """The columns of a file of JSON objects, one per line."""
    if path.suffix.lower() not in OPENERS and path.stat().st_size > IN_MEMORY:
        rows, _ = _mapped_lines(path, encoding, lambda text, number: _json_object(text, path, number))
        first = rows.read(0) if len(rows) else {}
        name = text_column([*first], column, path)
        found = {name: _checked_texts(len(rows), lambda row: rows.read(row).get(name), name, path)}
        if ID_COLUMN in first and name != ID_COLUMN:
            found[ID_COLUMN] = StreamedTexts(len(rows), lambda row: rows.read(row).get(ID_COLUMN))
        return found
    return json_columns(path, encoding)


def json_columns(path: Path, encoding: str) -> dict[str, list[Any]]:
    """The columns of a file of JSON objects, in memory; None where an object lacks a key."""
    lines = enumerate(decoded(path, encoding), start=1)
    rows = [_json_object(line, path, number) for number, line in lines if line.strip()]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _json_object(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, line {number} is not JSON ({error}): write one JSON object per line") from error
    if not isinstance(found, dict):
        raise ValueError(f'{path}, line {number} is a JSON {type(found).__name__}: write objects such as {{"text": …}}')
    return found


def read_csv(path: Path, encoding: str) -> Mapping[str, Sequence[Any]]:
    """The columns of a CSV file with a header; in a .tsv, fields are separated by tabs and quotes are text."""
    if path.stat().st_size > IN_MEMORY:
        raise ValueError(f"{path} has more than {IN_MEMORY >> 30} GiB: convert it to parquet or JSON lines")
    tabs = suffix_of(path) == ".tsv"
    csv.field_size_limit(_MOST_FIELD)
    style: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {}
    rows = csv.reader((f"{line}\n" for line in decoded(path, encoding)), strict=True, **style)
    try:
        header = next(rows, [])
        if not header or len(set(header)) < len(header):
            raise ValueError(f"{path} must begin with the names of its columns, each once, got {header}")
        cells = []
        for row in rows:
            if row and len(row) != len(header):
                raise ValueError(
                    f"{path}, line {rows.line_num} has {len(row)} fields, and the header {len(header)}: quote texts "
                    "with commas, or use JSON lines"
                )
            if row:
                cells.append(row)
    except csv.Error as error:
        raise ValueError(f"{path}, line {rows.line_num} cannot be read ({error}): write it again") from error
    return {name: [row[place] for row in cells] for place, name in enumerate(header)}


def read_parquet(path: Path, files: Sequence[Path], column: str | None) -> Mapping[str, Sequence[Any]]:
    """The columns of parquet files; texts of large files are read on access, through ``datasets``."""
    parquet = required("pyarrow.parquet", "data")
    if sum(file.stat().st_size for file in files) > IN_MEMORY:
        load = required("datasets", "data").load_dataset
        return dataset_columns(load("parquet", data_files=[*map(str, files)], split="train"), path, column)
    try:
        names = used_columns(parquet.read_schema(files[0]).names, path, column)
        table = parquet.read_table([checks.regular_file(file) for file in files], columns=names)
    except required("pyarrow", "data").ArrowException as error:
        raise ValueError(f"{path} cannot be read as parquet ({error}): download or write it again") from error
    return {name: table.column(name).to_pylist() for name in table.column_names}


def read_arrow(path: Path, column: str | None) -> Mapping[str, Sequence[Any]]:
    """The columns of a file that ``datasets`` wrote, in the streaming format of arrow."""
    load = required("datasets", "data").Dataset.from_file
    try:
        rows = load(str(checks.regular_file(path)))
    except required("pyarrow", "data").ArrowException as error:
        raise ValueError(
            f"{path} cannot be read as a stream of arrow ({error}): write it again by datasets, or as parquet"
        ) from error
    return dataset_columns(rows, path, column)


def _checked_texts(size: int, read: Callable[[int], Any], column: str, path: Path | str) -> StreamedTexts:
    """The texts of a column that are read on access, empty where there is none; read: the cell of a row."""

    def text(row: int) -> str:
        cell = read(row)
        if cell is not None and not isinstance(cell, str):
            raise ValueError(f"row {row} of column {column!r} of {path} is {type(cell).__name__}, not text")
        return cell or ""

    return StreamedTexts(size, text)


def dataset_columns(rows: Any, path: Path | str, column: str | None) -> Mapping[str, Sequence[Any]]:
    """The columns of texts, labels and ids of a ``datasets.Dataset``."""
    names = used_columns(rows.column_names, path, column)
    found: dict[str, Sequence[Any]] = {
        name: rows.select_columns([name]).with_format(None)[:][name] for name in names[1:]
    }
    if rows.num_rows and (rows.data.nbytes or 0) > IN_MEMORY:
        found[names[0]] = _checked_texts(len(rows), lambda row: rows[row][names[0]], names[0], path)
    else:
        found[names[0]] = list(rows.select_columns([names[0]]).with_format(None)[:][names[0]])
    for name in names[1:]:
        if (classes := getattr(rows.features[name], "names", None)) is not None:
            found[name] = [None if number is None or number < 0 else classes[number] for number in found[name]]
    return found


TEXT_COLUMNS = ("text", "sentence", "texts", "sentences", "content", "document")
LABEL_COLUMNS = ("label", "labels", "class", "target")
ID_COLUMN = "id"


def text_column(names: Sequence[str], column: str | None, path: Path | str) -> str:
    """The column of texts: the one asked for, one of the usual names, or the only one."""
    if column is not None:
        if column not in names:
            raise ValueError(f"data.column={column!r} is not a column of {path}: it has {', '.join(map(repr, names))}")
        return column
    usual = [name for name in TEXT_COLUMNS if name in names]
    if usual or len(names) == 1:
        return usual[0] if usual else names[0]
    raise ValueError(f"{path} has the columns {', '.join(map(repr, names))}: set data.column to the one with the texts")


def text_and_label(names: Sequence[str], path: Path | str, column: str | None) -> list[str]:
    """The column of texts, and that of labels if there is one."""
    text = text_column(names, column, path)
    return [text, *[name for name in LABEL_COLUMNS if name in names and name != text][:1]]


def used_columns(names: Sequence[str], path: Path | str, column: str | None) -> list[str]:
    """The columns of texts, of labels and of ids, as far as they exist; the texts first."""
    found = text_and_label(names, path, column)
    return found + [ID_COLUMN] * (ID_COLUMN in names and ID_COLUMN not in found)

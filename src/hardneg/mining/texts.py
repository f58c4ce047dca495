"""Texts for mining: lists, columns of datasets, and files."""

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hardneg import checks
from hardneg.extras import required

SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet", ".txt")


def is_texts(given: object) -> bool:
    """Whether an argument holds texts: a list of them, or a column of a dataset."""
    if isinstance(given, str | Path) or not isinstance(given, Sequence) or not len(given):
        return False
    return isinstance(given[0], str)


def checked_texts(name: str, given: Sequence[Any]) -> list[str]:
    """Raise unless all are texts that are not empty; return them."""
    texts = list(given)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"{name}[{number}] must be a text, got {type(text).__name__}")
        if not text.strip():
            raise ValueError(f"{name}[{number}] is empty: leave it out")
    return texts


def places(texts: Sequence[str]) -> dict[str, list[int]]:
    """The indices of each text."""
    found: dict[str, list[int]] = {}
    for index, text in enumerate(texts):
        found.setdefault(text, []).append(index)
    return found


def read_columns(path: Path, names: Sequence[Sequence[str]]) -> list[list[Any]]:
    """Columns of a file or a saved dataset. names: of each column, the first that exists; else columns by position."""
    if not path.exists():
        raise ValueError(f"there is no file {str(path)!r}: give a {', '.join(SUFFIXES)} file or a saved dataset")
    if path.is_dir():
        return _dataset_columns(path, names)
    checks.choice(f"the ending of {path.name}", path.suffix, SUFFIXES)
    checks.regular_file(path)
    try:
        if path.suffix == ".parquet":
            table = required("pyarrow.parquet", "mine").read_table(path)
            if not len(table):
                raise ValueError("it has no rows")
            return [table.column(name).to_pylist() for name in _chosen(path, table.column_names, names)]
        rows = list(_rows(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}): convert it") from error
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise ValueError(f"{path} cannot be read ({error}): write it again") from error
    if not rows:
        raise ValueError(f"{path} is empty: give a file with rows")
    chosen = _chosen(path, [*rows[0]], names)
    for number, row in enumerate(rows, 1):
        if missing := [name for name in chosen if row.get(name) is None]:
            raise ValueError(f"row {number} of {path} has no {missing[0]!r}: add it, or leave the row out")
    return [[row[name] for row in rows] for name in chosen]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets begin a file with a byte order mark
        if path.suffix in (".csv", ".tsv"):
            yield from csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
        elif path.suffix == ".txt":
            yield from ({"text": line.rstrip("\r\n")} for line in file)
        else:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError(f"line {number} is not a JSON object")
                    yield row


def _dataset_columns(path: Path, names: Sequence[Sequence[str]]) -> list[list[Any]]:
    """Columns of a folder written by ``Dataset.save_to_disk``."""
    try:
        rows = required("datasets", "data").load_from_disk(str(path))
    except FileNotFoundError as error:
        raise ValueError(f"{path} is a folder, but not a saved dataset: give a file, or use save_to_disk") from error
    if isinstance(rows, dict):
        raise ValueError(f"{path} holds several splits ({', '.join(rows)}): give the folder of one of them")
    return [list(rows[name]) for name in _chosen(path, rows.column_names, names)]


def _chosen(path: Path, found: Sequence[str], names: Sequence[Sequence[str]]) -> list[str]:
    """The column for each list of names: the first that exists; without any, the columns in their order."""
    if len(found) < len(names):
        raise ValueError(f"{path} has the columns {list(found)}, but {len(names)} are needed: {[n[0] for n in names]}")
    by_name = [next((name for name in some if name in found), None) for some in names]
    if not any(by_name):
        return list(found[: len(names)])
    others = [name for name in found if name not in by_name]
    if (unknown := by_name.count(None)) and unknown != len(others):
        missing = next(some for some, name in zip(names, by_name, strict=True) if name is None)
        raise ValueError(f"{path} has the columns {list(found)}, of which none is {' or '.join(missing)}: rename one")
    return [name or others.pop(0) for name in by_name]

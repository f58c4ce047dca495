"""Reading pairs of samples that are not negatives of each other: JSON lines or parquet, columns ``a`` and ``b``."""

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardneg import checks
from hardneg.extras import required

COLUMNS = ("a", "b")
DATA = "data"  # a further column: the fingerprint of the data whose row numbers a and b are
JSON_LINES = (".jsonl", ".ndjson", ".json")
MOST_LINE = 1 << 20  # bytes of a line
MOST_PAIRS = 100_000_000  # 1.6 GB of numbers
_LARGEST = 1 << 63  # ids are int64
_SHOWN = 60  # characters of a value in a message

Resolve = Callable[[Any], int]
Row = tuple[str, tuple[Any, Any], Any]  # the place of a pair, its values, and the fingerprint of their data, if any


def read_not_negatives(path: str | Path, ids: Sequence[Any] | Tensor | None = None, data: str = "") -> Tensor:
    r"""The pairs of a file whose two samples are not negatives of each other, as losses take them.

    Reading runs no code of the file. The two of a pair may be in any order; pairs that occur twice count once.

    Args:
        path: a file of JSON lines ``{"a": …, "b": …}`` (``.jsonl``), or a ``.parquet`` file with these columns; others
            are ignored, except ``data``. A value is a whole number or a text.
        ids: (N,) of your samples, in their order: the pairs are then row numbers of these. By default the values of
            the file are returned, which must be whole numbers ≥ 0.
        data: the fingerprint of your samples; pairs with another one in the column ``data``, which the explorer writes
            if it names samples by their row numbers, are an error.

    Returns:
        (P, 2) int64, each pair once, the smaller number first.

    Examples:
        >>> import hardneg as hn, tempfile
        >>> file = Path(tempfile.mkdtemp()) / "pairs.jsonl"
        >>> _ = file.write_text('{"a": "cat-2", "b": "cat-1"}\n')
        >>> pairs = read_not_negatives(file, ids=["dog-7", "cat-1", "cat-2"])
        >>> pairs
        tensor([[1, 2]])
        >>> z1, z2, rows = torch.randn(3, 8), torch.randn(3, 8), torch.arange(3)
        >>> hn.simclr()(z1, z2, ids=rows, not_negatives=pairs).shape
        torch.Size([])
    """
    path = Path(path).expanduser()
    numbers = array("q")
    resolve = _resolver(ids)
    for place, values in read_pairs(path, data):
        try:
            a, b = (resolve(value) for value in values)
        except ValueError as error:
            raise ValueError(f"{path}, {place}: {error}") from None
        if a == b:
            raise ValueError(f"{path}, {place}: a and b are the same id, {shown(values[0])}: a pair needs two")
        numbers.extend((a, b) if a < b else (b, a))
    pairs = np.frombuffer(numbers, np.int64).reshape(-1, 2)  # (P, 2) with repetitions
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    first = np.concatenate([[True], (pairs[1:] != pairs[:-1]).any(axis=1)])
    return torch.from_numpy(pairs[first])


def read_pairs(path: Path, data: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Where each pair of a file is, and its values ``a`` and ``b``; a file without pairs is an error.

    data: a fingerprint; pairs of other data are an error
    """
    if not path.exists():
        raise FileNotFoundError(f"not_negatives={str(path)!r} does not exist: give a .jsonl or .parquet file")
    if path.is_dir() or path.suffix.lower() not in (*JSON_LINES, ".parquet"):
        raise ValueError(f"not_negatives={str(path)!r} must be a .jsonl or .parquet file with the columns a and b")
    checks.regular_file(path)
    number = 0
    for place, values, of in (_parquet_rows if path.suffix.lower() == ".parquet" else _json_lines)(path):
        if data and of is not None and of != data:
            raise ValueError(
                f"{path}, {place}: the pair is of other samples, or of these in another order ({DATA} {shown(of)}, not "
                f"{data!r}): mark the pairs in the explorer of a run on these data"
            )
        number += 1
        if number > MOST_PAIRS:
            raise ValueError(f"{path} has more than {MOST_PAIRS:,} pairs: keep those that were decided by hand")
        yield place, values
    if number == 0:
        raise ValueError(f"{path} holds no pairs: write at least one, or leave not_negatives out")


def shown(value: object) -> str:
    """A value of a file in a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MOST_LINE + 1):
            number += 1
            place = f"line {number}"
            if len(line) > MOST_LINE:
                raise ValueError(f'{path}, {place} is longer than {MOST_LINE:,} bytes: write one {{"a": …, "b": …}}')
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError:
                raise ValueError(f"{path}, {place} is not UTF-8: save the file as UTF-8") from None
            if not text:
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
                raise ValueError(f"{path}, {place} is not JSON ({reason}): write one object per line") from None
            missing = [name for name in COLUMNS if name not in row] if isinstance(row, dict) else None
            if missing is None:
                raise ValueError(f'{path}, {place} is not a JSON object: write {{"a": …, "b": …}}')
            if missing:
                raise ValueError(f"{path}, {place} has no {missing[0]!r}: write the ids of both samples")
            yield place, (row["a"], row["b"]), row.get(DATA)


def _parquet_rows(path: Path) -> Iterator[Row]:
    parquet, failures = required("pyarrow.parquet", "data"), required("pyarrow", "data").ArrowException
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            for name in COLUMNS:
                if names.count(name) != 1:
                    raise _NoColumnError(
                        f"{path} has no column {name!r}, only {shown(names)}: name the ids of a pair a and b"
                    )
            first = 1
            read = [*COLUMNS, *([DATA] if names.count(DATA) == 1 else [])]
            for batch in file.iter_batches(batch_size=1 << 16, columns=read):
                rows = zip(*(batch.column(name).to_pylist() for name in read), strict=True)
                for number, (a, b, *of) in enumerate(rows, first):
                    yield f"row {number}", (a, b), of[0] if of else None
                first += len(batch)
    except _NoColumnError:
        raise
    except (failures, OSError, UnicodeDecodeError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} cannot be read as parquet ({reason}): write it again") from error


class _NoColumnError(ValueError):
    """A column is missing; pyarrow's own errors are ValueErrors, too."""


def _resolver(ids: Sequence[Any] | Tensor | None) -> Resolve:
    """The function that turns a value of the file into a number; it raises a ValueError that says why it cannot."""
    if ids is None:
        return _number_of
    if isinstance(ids, range):
        return _row_of(len(ids))
    # Texts, because CSV files know no numbers: 7 and "7" are the same id.
    rows: dict[str, int] = {}
    for row, name in enumerate(ids.tolist() if isinstance(ids, Tensor) else ids):
        if name is not None:
            rows[str(name)] = row if str(name) not in rows else -1

    def row_of(value: Any) -> int:
        row = rows.get(str(checked(value)))
        if row is None:
            raise ValueError(f"{shown(value)} is not an id of the {len(ids):,} samples: see their column id")
        if row < 0:
            raise ValueError(f"the id {shown(value)} belongs to several samples: give each its own id")
        return row

    return row_of


def _number_of(value: Any) -> int:
    return whole_number(value, "pass ids= of the samples")


def _row_of(count: int) -> Resolve:
    def row_of(value: Any) -> int:
        row = whole_number(value, "the samples have no column id")
        if row >= count:
            raise ValueError(f"there is no sample {row}: they are numbered from 0 to {count - 1}")
        return row

    return row_of


def checked(value: Any) -> int | str:
    """The value if it can be an id."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"an id must be a whole number or a text, got {shown(value)}")
    return value


def whole_number(value: Any, remark: str) -> int:
    """A value as a number, also one that is written as a text. remark: of the message for other texts"""
    number = checked(value)
    if isinstance(number, str):
        if not (number.isascii() and number.isdigit() and len(number) < 20):
            raise ValueError(f"{shown(value)} is not a row number: {remark}")
        number = int(number)
    if not 0 <= number < _LARGEST:
        raise ValueError(f"a row number must be from 0 to 2⁶³ − 1, got {shown(value)}")
    return number

"""Mined negatives as rows of a training set, in the four formats of sentence-transformers, and the files they go to."""

import csv
import io
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hardneg import checks
from hardneg.extras import required
from hardneg.mining.files import replaced

if TYPE_CHECKING:
    from hardneg.mining.result import Mined

Row = dict[str, Any]
_BATCH = 4096  # rows that are written at a time


def triplets(mined: "Mined", scores: bool) -> Iterator[Row]:
    """One row for each query, positive and negative."""
    for query, positives, negatives in mined.queries_with_scores():
        for positive, positive_score in positives:
            for negative, score in negatives:
                row = _named(mined, query, positive) | {"negative": mined.document(negative)}
                yield row | ({"scores": [positive_score, score]} if scores else {})


def tuples(mined: "Mined", scores: bool) -> Iterator[Row]:
    """One row for each query and positive with all its negatives; queries with too few negatives are left out."""
    for query, positives, negatives in mined.queries_with_scores():
        for positive, positive_score in positives if len(negatives) == mined.indices.shape[1] else ():
            row = _named(mined, query, positive)
            row |= {f"negative_{n}": mined.document(negative) for n, (negative, _) in enumerate(negatives, 1)}
            yield row | ({"scores": [positive_score, *(score for _, score in negatives)]} if scores else {})


def pairs(mined: "Mined", scores: bool) -> Iterator[Row]:
    """One row for each query and positive, label 1, and for each query and negative, label 0."""
    for query, positives, negatives in mined.queries_with_scores():
        for label, some in ((1, positives), (0, negatives)):
            for document, score in some:
                yield _named(mined, query, document) | ({"score": score} if scores else {"label": label})


def lists(mined: "Mined", scores: bool) -> Iterator[Row]:
    """One row for each query and positive, with a list of the positive and the negatives."""
    for query, positives, negatives in mined.queries_with_scores():
        for positive, positive_score in positives if negatives else ():
            row = _named(mined, query, positive)
            row["positive"] = [row["positive"], *(mined.document(negative) for negative, _ in negatives)]
            listed = [positive_score, *(score for _, score in negatives)]
            yield row | ({"scores": listed} if scores else {"labels": [1, *[0] * len(negatives)]})


FORMATS: dict[str, Callable[["Mined", bool], Iterator[Row]]] = {
    "triplet": triplets,
    "n-tuple": tuples,
    "labeled-pair": pairs,
    "labeled-list": lists,
}


def _named(mined: "Mined", query: int, positive: int) -> Row:
    return {"anchor": mined.query(query), "positive": mined.document(positive)}


def write_rows(rows: Iterator[Row], path: Path) -> int:
    """Write rows to a .jsonl, .parquet or .csv file that appears when it is complete; returns their number."""
    check_target(path)
    with replaced(path) as file:
        return _WRITERS[path.suffix](rows, file)


def has_lists(format: str, scores: bool) -> bool:
    """Whether a column of the rows holds lists."""
    return format == "labeled-list" or (scores and format != "labeled-pair")


def check_target(path: Path, listed: bool = False) -> None:
    """Raise unless rows can be written to this path. listed: whether a column holds lists"""
    checks.choice("the ending of the file", path.suffix, [*_WRITERS])
    if listed and path.suffix == ".csv":
        raise ValueError(f"rows with lists cannot be written to {path}: name a .jsonl or .parquet file")
    check_place(path)


def check_place(path: Path) -> None:
    """Raise unless a file can be created at this path."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {str(path.parent)!r}: create it first")


def _write_json(rows: Iterator[Row], file: IO[bytes]) -> int:
    written = 0
    for row in rows:
        file.write(json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
        written += 1
    return written


def _write_csv(rows: Iterator[Row], file: IO[bytes]) -> int:
    text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="")
    writer: csv.DictWriter[str] | None = None
    written = 0
    for row in rows:
        if listed := next((name for name, cell in row.items() if isinstance(cell, list)), None):
            raise ValueError(f"column {listed!r} holds lists, which .csv has not: write a .jsonl or .parquet file")
        if writer is None:
            writer = csv.DictWriter(text, [*row])
            writer.writeheader()
        writer.writerow(row)
        written += 1
    text.flush()
    text.detach()
    return written


def _write_parquet(rows: Iterator[Row], file: IO[bytes]) -> int:
    arrow, parquet = required("pyarrow", "mine"), required("pyarrow.parquet", "mine")
    writer, written = None, 0
    for batch in iter(lambda: list(islice(rows, _BATCH)), []):
        table = arrow.Table.from_pylist(batch)
        writer = writer or parquet.ParquetWriter(file, table.schema)
        writer.write_table(table)
        written += len(batch)
    (writer or parquet.ParquetWriter(file, arrow.schema([]))).close()
    return written


_WRITERS = {".jsonl": _write_json, ".parquet": _write_parquet, ".csv": _write_csv}

"""Sources that an encoder is evaluated on: pairs with scores, and queries with a corpus and judgements."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hardneg.text import files

QUERIES, CORPUS = ("queries.jsonl", "corpus.jsonl")  # of a folder for retrieval, in the layout of BEIR
JUDGEMENTS = "qrels/test.tsv"  # columns query-id, corpus-id, score
FIRST, SECOND = ("sentence1", "s1", "text1"), ("sentence2", "s2", "text2")
SCORES = ("score", "similarity")


def find(source: str) -> dict[str, Any]:
    """The arguments of `evaluate_texts` for a source with pairs or for retrieval; empty for any other source."""
    path = Path(source).expanduser()
    if path.is_dir() and (path / QUERIES).exists():
        return {"retrieval": read_retrieval(path)}
    if path.is_file() and files.suffix_of(path) in (".csv", ".tsv", ".jsonl"):
        columns = _columns(path)
        first, second, score = ([name for name in names if name in columns] for names in (FIRST, SECOND, SCORES))
        if first and second and score:
            scores = torch.tensor(_numbers(columns[score[0]], path), dtype=torch.float64)
            return {"pairs": (_texts(columns[first[0]], path), _texts(columns[second[0]], path), scores)}
    return {}


def read_retrieval(folder: Path) -> tuple[list[str], list[str], Tensor]:
    """Queries, corpus and judgements (J, 3) of a folder: rows of the query and of the text, and the relevance."""
    rows: dict[str, dict[str, int]] = {}
    texts: dict[str, list[str]] = {}
    for name in (QUERIES, CORPUS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has {QUERIES}, but no {name}: add it")
        columns = _columns(folder / name)
        for column in ("_id", "text"):
            if column not in columns:
                raise ValueError(f"{folder / name} has no column {column!r}: write objects with _id and text")
        titles = columns.get("title", [""] * len(columns["text"]))
        texts[name] = [
            f"{title or ''} {text}".strip()
            for title, text in zip(titles, _texts(columns["text"], folder / name), strict=True)
        ]
        rows[name] = {str(key): row for row, key in enumerate(columns["_id"])}
    file = folder / JUDGEMENTS
    if not file.is_file():
        raise ValueError(f"{folder} has no {JUDGEMENTS}: write the columns query-id, corpus-id and score")
    columns = files.read_csv(file, "utf-8")
    if missing := [name for name in ("query-id", "corpus-id", "score") if name not in columns]:
        raise ValueError(f"{file} has no column {missing[0]!r}: write the columns query-id, corpus-id and score")
    found = []
    for query, text, score in zip(
        columns["query-id"], columns["corpus-id"], _numbers(columns["score"], file), strict=True
    ):
        if query not in rows[QUERIES] or text not in rows[CORPUS]:
            unknown = query if query not in rows[QUERIES] else text
            raise ValueError(f"{file} names {unknown!r}, which is not in {QUERIES} or {CORPUS}: leave it out")
        found.append([rows[QUERIES][query], rows[CORPUS][text], int(score)])
    return texts[QUERIES], texts[CORPUS], torch.tensor(found, dtype=torch.int64).reshape(-1, 3)


def _columns(path: Path) -> Any:
    return files.read_csv(path, "utf-8") if files.suffix_of(path) != ".jsonl" else files.json_columns(path, "utf-8")


def _texts(cells: Any, path: Path) -> list[str]:
    for row, cell in enumerate(cells):
        if not isinstance(cell, str):
            raise ValueError(f"{path}, row {row} has {cell!r} instead of a text")
    return list(cells)


def _numbers(cells: Any, path: Path) -> list[float]:
    try:
        found = [float(cell) for cell in cells]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} has a score that is not a number ({error})") from error
    for row, number in enumerate(found):
        if not math.isfinite(number):
            raise ValueError(
                f"{path}, row {row} has the score {number}, which is not a finite number: leave the row out"
            )
    return found

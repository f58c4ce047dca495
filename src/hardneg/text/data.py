"""Reading texts from files, tables, the Hugging Face hub or Python objects."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hardneg import checks
from hardneg.extras import required
from hardneg.text import files
from hardneg.text.python_docs import python_docs
from hardneg.text.text_set import TextSet

PYTHON_DOCS = "python-docs"
SUFFIXES = (".txt", ".jsonl", ".csv", ".tsv")
_KINDS = (
    "a .txt, .jsonl, .csv, .tsv, .parquet or .arrow file, a folder of parquet or a saved dataset, hf:NAME, python-docs"
)
_OBJECTS = "a list of texts, (texts, labels), a TextSet, a datasets.Dataset, a mapping from split to one of these"


def load_texts(
    source: Any,
    split: str = "train",
    column: str | None = None,
    encoding: str = "utf-8",
    max_length: int | None = None,
) -> TextSet:
    """The texts of a source, always in the same order.

    Args:
        source: one of

            - a ``.txt`` file: a text per line; blank lines separate documents;
            - a ``.jsonl`` file of objects, or a ``.csv`` or ``.tsv`` file with a header; these and ``.txt`` may be
              compressed (``.gz``, ``.xz``, ``.bz2``);
            - a ``.parquet`` or ``.arrow`` file, a folder of parquet files, or what ``datasets`` saved to disk;
            - ``"hf:NAME"`` or ``"hf:NAME:CONFIG"``: a dataset of the Hugging Face hub;
            - ``"python-docs"``: sentences of Python's documentation;
            - an object: a list of texts, (texts, labels), a `TextSet`, a ``datasets.Dataset``, a mapping from split to
              one of these, or a function of the split that returns one of these.
        split: of a source that has splits.
        column: of the texts in a table; by default ``text``, ``sentence`` or the only column. Labels are in ``label``.
        encoding: of text files.
        max_length: tokens of a text that are used; None for as many as the encoder takes.

    Files of more than 1 GiB are read on access. Empty texts are left out, with a warning, but not of those; and the
    labels of JSON lines are not read then.

    Examples:
        >>> load_texts(["A sentence.", "Another one."]).texts
        ['A sentence.', 'Another one.']
    """
    if max_length is not None:
        checks.whole("max_length", max_length)
    try:
        newline = b"\n".decode(encoding)
    except UnicodeError:
        newline = ""
    except LookupError as error:
        raise ValueError(f"encoding={encoding!r} is not known: use one such as utf-8 or cp1252") from error
    if newline != "\n":
        raise ValueError(f"encoding={encoding!r} has other ends of lines than ASCII: save the file as UTF-8")
    found = _from_source(source, split, column, encoding)
    return found if max_length is None else replace(found, max_length=max_length, _tokens={})


def _from_source(source: Any, split: str, column: str | None, encoding: str) -> TextSet:
    if not isinstance(source, str | Path):
        return _from_object(source, split, column)
    if str(source) == PYTHON_DOCS:
        return python_docs()
    if str(source).startswith("hf:"):
        return _from_hub(str(source), split, column)
    path = Path(source).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"source={str(source)!r} does not exist: give {_KINDS}")
    if path.is_dir():
        return _from_folder(path, split, column)
    suffix = files.suffix_of(path)
    if suffix == ".txt":
        texts, starts = files.read_lines(path, encoding)
        if len(texts) == 0:
            raise _without_texts(path)
        return TextSet(texts, name=path.name, starts=starts)
    if suffix == ".jsonl":
        return _from_columns(files.read_json_lines(path, encoding, column), path.name, column)
    if suffix in (".csv", ".tsv"):
        return _from_columns(files.read_csv(path, encoding), path.name, column)
    if suffix == ".parquet":
        return _from_columns(files.read_parquet(path, [path], column), path.name, column)
    if suffix == ".arrow":
        return _from_columns(files.read_arrow(path, column), path.name, column)
    raise ValueError(f"source={str(source)!r} is not a file of texts by its name: give {_KINDS}")


def _from_folder(path: Path, split: str, column: str | None) -> TextSet:
    """A dataset that ``datasets`` saved, or the parquet files of a folder."""
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        for file in path.rglob("*"):
            if file.exists() and not file.is_dir():
                checks.regular_file(file)
        return _from_object(required("datasets", "data").load_from_disk(str(path)), split, column, path.name)
    parquet = sorted(path.rglob("*.parquet"))
    of_split = [file for file in parquet if file.name.startswith(split) or split in file.relative_to(path).parts[:-1]]
    if not parquet:
        raise ValueError(f"{path} is a folder without parquet files or a saved dataset: give {_KINDS}")
    return _from_columns(files.read_parquet(path, of_split or parquet, column), path.name, column)


def _from_hub(source: str, split: str, column: str | None) -> TextSet:
    name, _, config = source.removeprefix("hf:").partition(":")
    if not name:
        raise ValueError(f"source={source!r} names no dataset: write hf:NAME or hf:NAME:CONFIG")
    try:
        rows = required("datasets", "data").load_dataset(name, config or None, split=split)
    except (ValueError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"source={source!r} cannot be loaded from the hub ({reason}): check name and network"
        ) from error
    return _from_columns(files.dataset_columns(rows, source, column), name, column)


def _from_object(source: Any, split: str, column: str | None, name: str = "texts") -> TextSet:
    """The texts of an object; see ``_OBJECTS``."""
    if isinstance(source, Mapping):
        if split not in source:
            raise ValueError(f"split={split!r} is not in the mapping: it has {', '.join(map(repr, source))}")
        return _from_object(source[split], split, column, name)
    if isinstance(source, TextSet):
        return source
    if type(source).__module__.partition(".")[0] == "datasets" and hasattr(source, "num_rows"):
        return _from_columns(files.dataset_columns(source, name, column), name, column)
    if callable(source):
        return _from_object(source(split), split, column, name)
    if isinstance(source, tuple) and len(source) == 2 and not isinstance(source[0], str):
        texts, labels = source
        if len(texts) != len(labels):
            raise ValueError(f"texts and labels must be equally many, got {len(texts)} and {len(labels)}")
        given = labels.tolist() if hasattr(labels, "tolist") else list(labels)
        return _from_columns({"text": list(texts), "label": given}, name, "text")
    if isinstance(source, Sequence) and not isinstance(source, str | bytes):
        return _from_columns({"text": list(source)}, name, "text")
    raise ValueError(f"data of type {type(source).__name__} cannot be read as texts: give {_OBJECTS}")


def _from_columns(columns: Mapping[str, Sequence[Any]], name: str, column: str | None) -> TextSet:
    """The set of a table; texts that are empty are left out."""
    if not columns:
        raise _without_texts(name)
    text, *label = files.text_and_label([*columns], name, column)
    texts, cells = columns[text], columns[label[0]] if label else None
    ids = columns.get(files.ID_COLUMN) if text != files.ID_COLUMN else None
    if isinstance(texts, files.StreamedTexts):
        return TextSet(texts, *_labels(cells, name), name, sample_ids=ids)
    for row, each in enumerate(texts):
        if each is not None and not isinstance(each, str):
            raise ValueError(
                f"row {row} of column {text!r} of {name} is {type(each).__name__}, not text: set data.column"
            )
    kept = [row for row, each in enumerate(texts) if each is not None and each.strip()]
    if not kept:
        raise _without_texts(name)
    if len(kept) < len(texts):
        warnings.warn(f"left out {len(texts) - len(kept)} empty texts of {name}", stacklevel=4)
    labels = _labels(cells and [cells[row] for row in kept], name)
    ids = None if ids is None else [ids[row] for row in kept]
    return TextSet([texts[row] for row in kept], *labels, name, sample_ids=ids)


def _labels(cells: Sequence[Any] | None, name: str) -> tuple[Tensor | None, tuple[str, ...]]:
    """The number of each row's class, −1 where it is missing, and the names of the classes."""
    if cells is None:
        return None, ()
    missing = (None, "", -1)
    present = [cell for cell in cells if cell not in missing]
    if not present:
        return None, ()
    if any(isinstance(cell, float) or not isinstance(cell, str | int) for cell in present):
        warnings.warn(f"the labels of {name} are neither names nor whole numbers: it is read without", stacklevel=5)
        return None, ()
    ordered = sorted(set(present), key=lambda cell: (isinstance(cell, str), cell))
    number = {cell: place for place, cell in enumerate(ordered)}
    labels = torch.tensor([-1 if cell in missing else number[cell] for cell in cells])
    return labels, tuple(map(str, ordered))


def _without_texts(source: Any) -> ValueError:
    return ValueError(f"{source} holds no texts: give a file with at least one")

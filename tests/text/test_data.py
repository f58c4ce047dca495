"""Reading texts: every format gives the same texts and labels, and bad files one clear line."""

import csv
import gzip
import json
import lzma
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from hardneg.text import files, load_texts
from hardneg.text.files import StreamedTexts

ROWS = [("A sentence, with a comma.", "news"), ('She said "no".', "talk"), ("Ünïcode — naïve.", "news")]
TEXTS = [text for text, _ in ROWS]


def written(folder: Path, kind: str) -> Path:
    """The rows as a file of this kind."""
    path = folder / f"rows{kind}"
    plain = "\n".join(TEXTS) + "\n"
    objects = "".join(
        json.dumps({"id": n, "text": text, "label": label}) + "\n" for n, (text, label) in enumerate(ROWS)
    )
    if kind == ".txt":
        path.write_text("\ufeff" + plain.replace("\n", "\r\n"), encoding="utf-8", newline="")
    elif kind == ".txt.xz":
        path.write_bytes(lzma.compress(plain.encode()))
    elif kind == ".jsonl":
        path.write_text(objects, encoding="utf-8")
    elif kind == ".jsonl.gz":
        path.write_bytes(gzip.compress(objects.encode()))
    elif kind == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label"), *ROWS])
    elif kind == ".tsv":
        path.write_text("sentence\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in ROWS), encoding="utf-8")
    else:
        datasets = pytest.importorskip("datasets")
        rows = datasets.Dataset.from_dict({"text": TEXTS, "label": [label for _, label in ROWS]})
        if kind == ".parquet":
            rows.to_parquet(path)
        elif kind == "-saved":
            datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(path)
        else:  # a folder of parquet
            path.mkdir()
            rows.to_parquet(path / "train-0.parquet")
            rows.select([0]).to_parquet(path / "test-0.parquet")
    return path


KINDS = (".txt", ".txt.xz", ".jsonl", ".jsonl.gz", ".csv", ".tsv", ".parquet", "-saved", "-folder")


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_texts_and_labels(tmp_path: Path, kind: str) -> None:
    found = load_texts(written(tmp_path, kind))
    assert list(found.texts) == TEXTS
    if not kind.startswith(".txt"):
        assert found.labels is not None
        assert [found.classes[label] for label in found.labels] == [label for _, label in ROWS]


@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".parquet", "-saved"])
def test_large_files_are_read_on_access_and_give_the_same_texts(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, kind)
    monkeypatch.setattr(files, "IN_MEMORY", 10)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    found = load_texts(path)
    assert isinstance(found.texts, StreamedTexts)
    assert found.texts[:] == TEXTS
    assert found.texts[1] == TEXTS[1]
    assert found.duplicates is None


def test_objects_give_the_same_texts(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    labels = [0, 1, 0]
    rows = datasets.Dataset.from_dict({"text": TEXTS, "label": labels})
    for source in (TEXTS, (TEXTS, labels), rows, {"train": TEXTS, "test": ["x"]}, lambda split: (TEXTS, labels)):
        assert load_texts(source).texts == TEXTS
    named = rows.cast_column("label", datasets.ClassLabel(names=["news", "talk"]))
    assert load_texts(named).classes == ("news", "talk")


def test_blank_lines_separate_documents(tmp_path: Path) -> None:
    path = tmp_path / "books.txt"
    path.write_text("\n\na\nb\n  \n\nc\n\n")
    found = load_texts(path)
    assert found.texts == ["a", "b", "c"]
    assert found.starts is not None
    assert found.starts.tolist() == [0, 2]


def test_streamed_documents_begin_at_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "books.txt"
    path.write_text("a\nb\n\n\nc\n\nd\ne\n")
    held = load_texts(path)
    monkeypatch.setattr(files, "IN_MEMORY", 1)
    streamed = load_texts(path)
    assert streamed.texts[:] == held.texts
    assert streamed.starts.tolist() == held.starts.tolist() == [0, 2, 3]  # type: ignore[union-attr]


def test_empty_texts_are_left_out_with_their_labels(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="left out 2 empty texts"):
        found = load_texts((["a", " ", "b", ""], ["x", "y", "z", "x"]))
    assert found.texts == ["a", "b"]
    assert found.classes == ("x", "z")
    assert found.labels.tolist() == [0, 1]  # type: ignore[union-attr]


def test_labels_that_name_no_class_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a", "label": [1]}\n{"text": "b", "label": {"c": 2}}\n')
    with pytest.warns(UserWarning, match=r"rows\.jsonl are neither names nor whole numbers: it is read without"):
        assert load_texts(path).labels is None


def test_json_lines_are_checked_on_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"text": "a"}\n{"text": null}\n{"other": "b"}\n{"text": 4}\n')
    monkeypatch.setattr(files, "IN_MEMORY", 10)
    texts = load_texts(path).texts
    assert texts[:3] == ["a", "", ""]
    with pytest.raises(ValueError, match=r"row 3 of column 'text' of .*rows\.jsonl is int, not text"):
        texts[3]


def test_the_column_of_the_texts_can_be_chosen(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("id,question,answer\n1,who?,me\n")
    with pytest.raises(ValueError, match=r"'id', 'question', 'answer': set data\.column"):
        load_texts(path)
    assert load_texts(path, column="answer").texts == ["me"]
    with pytest.raises(ValueError, match="column='reply' is not a column"):
        load_texts(path, column="reply")


def test_another_encoding_is_named_with_its_line_and_can_be_set(tmp_path: Path) -> None:
    path = tmp_path / "old.txt"
    path.write_bytes("plain\ncafé\n".encode("cp1252"))
    with pytest.raises(ValueError, match=r"old\.txt, line 2 is not utf-8: set data\.encoding"):
        load_texts(path)
    assert load_texts(path, encoding="cp1252").texts == ["plain", "café"]
    with pytest.raises(ValueError, match="encoding='utf-9' is not known"):
        load_texts(path, encoding="utf-9")
    with pytest.raises(ValueError, match="encoding='utf-16' has other ends of lines than ASCII: save"):
        load_texts(path, encoding="utf-16")
    path.write_bytes("one\ntwo\n".encode("utf-8-sig"))
    assert load_texts(path, encoding="utf-8-sig").texts == ["one", "two"]


BAD: list[tuple[str, Any, str]] = [
    ("empty.txt", "", "holds no texts"),
    ("blank.txt", "\n \n", "holds no texts"),
    ("empty.csv", "", "must begin with the names of its columns"),
    ("header.csv", "text\n", "holds no texts"),
    ("wide.csv", "text,label\na,b,c\n", r"line 2 has 3 fields, and the header 2"),
    ("quote.csv", 'text\n"a\n', "cannot be read"),
    ("twice.csv", "text,text\na,b\n", "each once"),
    ("broken.jsonl", '{"text": "a"}\n{"text"\n', "line 2 is not JSON"),
    ("list.jsonl", "[1]\n", "line 1 is a JSON list"),
    ("deep.jsonl", "[" * 100_000 + "\n", "line 1 is not JSON"),
    ("number.jsonl", '{"text": 3}\n', "row 0 of column 'text' .* is int, not text"),
    ("cut.txt.xz", lzma.compress(b"a\n" * 9999)[:-40], "cannot be read"),
    ("no.txt.gz", b"plain", "cannot be read"),
    ("no.parquet", b"PAR1nothing", "cannot be read as parquet"),
    ("no.arrow", b"xx", r"no\.arrow cannot be read as a stream of arrow"),
    ("photo.png", b"x", "not a file of texts by its name"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD, ids=[name for name, _, _ in BAD])
def test_bad_files_are_refused_with_one_line(tmp_path: Path, name: str, content: Any, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as caught:
        load_texts(path)
    assert "\n" not in str(caught.value)


def test_a_pipe_is_refused_instead_of_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(ValueError, match="not a regular file"):
        load_texts(tmp_path / "pipe.txt")


@pytest.mark.parametrize("given", [3, "missing.txt", [3], ("a", "b"), {"test": ["a"]}])
def test_other_objects_are_refused(given: Any) -> None:
    if given == ("a", "b"):
        assert load_texts(given).texts == ["a", "b"]  # a tuple of texts
        return
    with pytest.raises((ValueError, FileNotFoundError)):
        load_texts(given)


def test_datasets_without_a_length_or_a_name_are_refused() -> None:
    rows = pytest.importorskip("datasets").Dataset.from_dict({"text": TEXTS})
    with pytest.raises(ValueError, match="data of type IterableDataset cannot be read as texts: give a list"):
        load_texts(rows.to_iterable_dataset())
    with pytest.raises(ValueError, match="source='hf:' names no dataset: write hf:NAME"):
        load_texts("hf:")


def test_hostile_strings_stay_texts() -> None:
    texts = ["\x1b[31mred", "<script>alert(1)</script>", "\u202egnp.exe", "\ud800", "nul\x00"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = load_texts(texts)
    assert found.texts == texts
    assert found.division.samples == 5

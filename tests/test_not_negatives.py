"""Files of pairs that are not negatives: read strictly, each mistake with the file and the line, and never a hang."""

import json
import os
import random
import string
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hardneg as hn
from hardneg import not_negatives


def written(folder: Path, rows: list[dict[str, Any]], form: str = ".jsonl") -> Path:
    file = folder / f"pairs{form}"
    if form == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("form", [".jsonl", ".parquet"])
def test_pairs_are_read_once_each_in_either_order_with_other_columns_ignored(tmp_path: Path, form: str) -> None:
    rows = [{"a": 9, "b": 2, "why": "same"}, {"a": 2, "b": 9, "why": ""}, {"a": 0, "b": 7, "why": "x"}]
    assert hn.read_not_negatives(written(tmp_path, rows, form)).tolist() == [[0, 7], [2, 9]]


@pytest.mark.parametrize("form", [".jsonl", ".parquet"])
def test_ids_become_the_rows_of_the_samples(tmp_path: Path, form: str) -> None:
    file = written(tmp_path, [{"a": "x", "b": "30"}, {"a": "10", "b": "x"}], form)
    assert hn.read_not_negatives(file, ids=["10", "x", None, 30]).tolist() == [[0, 1], [1, 3]]
    numbers = written(tmp_path, [{"a": 30, "b": 10}], form)
    assert hn.read_not_negatives(numbers, ids=torch.tensor([30, 20, 10])).tolist() == [[0, 2]]


def test_a_file_of_an_editor_on_windows_is_read(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1, "b": 0}\r\n\r\n  {"b": 2, "a": 1}')
    assert hn.read_not_negatives(file).tolist() == [[0, 1], [1, 2]]


GOOD = b'{"a": 0, "b": 1}\n'
BAD_LINES = {
    "not JSON": (b'{"a": 0,\n', "line 2 is not JSON"),
    "not an object": (b"[0, 1]\n", "line 2 is not a JSON object"),
    "no b": (b'{"a": 0}\n', "line 2 has no 'b'"),
    "not UTF-8": (b'{"a": "\xe4", "b": 1}\n', "line 2 is not UTF-8"),
    "deeply nested": (b"[" * 200_000 + b"\n", "line 2 is not JSON"),
    "a number of many digits": (b'{"a": ' + b"9" * 5000 + b', "b": 1}\n', "line 2 is not JSON"),
    "too large a number": (b'{"a": 9223372036854775808, "b": 1}\n', "line 2: a row number must be from 0"),
    "negative": (b'{"a": -1, "b": 1}\n', "line 2: a row number must be from 0"),
    "a fraction": (b'{"a": 1.0, "b": 1}\n', "line 2: an id must be a whole number or a text, got 1.0"),
    "a truth value": (b'{"a": true, "b": 2}\n', "line 2: an id must be a whole number or a text, got True"),
    "null": (b'{"a": null, "b": 2}\n', "line 2: an id must be a whole number or a text, got None"),
    "a list": (b'{"a": [1], "b": 2}\n', "line 2: an id must be a whole number or a text"),
    "a text": (b'{"a": "cat", "b": 2}\n', "line 2: 'cat' is not a row number: pass ids="),
    "the same twice": (b'{"a": 3, "b": 3}\n', "line 2: a and b are the same id, 3"),
    "the same as text": (b'{"a": 3, "b": "3"}\n', "line 2: a and b are the same id, 3"),
    "no end of line": (b" " * (not_negatives.MOST_LINE + 9), "line 2 is longer than"),
}


@pytest.mark.parametrize("mistake", BAD_LINES)
def test_a_bad_line_is_one_error_that_names_file_and_line(tmp_path: Path, mistake: str) -> None:
    content, message = BAD_LINES[mistake]
    file = tmp_path / "pairs.jsonl"
    file.write_bytes(GOOD + content + GOOD)
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        hn.read_not_negatives(file)
    assert str(error.value).startswith(f"{file}, line 2")
    assert message in str(error.value)
    assert len(str(error.value)) < 400 + len(str(file))


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_file_without_pairs_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="holds no pairs"):
        hn.read_not_negatives(file)


def test_unknown_and_ambiguous_ids_name_the_line(tmp_path: Path) -> None:
    file = written(tmp_path, [{"a": "x", "b": "y"}, {"a": "x", "b": "z"}])
    with pytest.raises(ValueError, match=r"pairs.jsonl, line 2: 'z' is not an id of the 2 samples"):
        hn.read_not_negatives(file, ids=["x", "y"])
    with pytest.raises(ValueError, match=r"line 1: the id 'y' belongs to several samples"):
        hn.read_not_negatives(file, ids=["x", "y", "y", "z"])
    rows = written(tmp_path, [{"a": 1, "b": 5}])
    with pytest.raises(ValueError, match=r"line 1: there is no sample 5: they are numbered from 0 to 4"):
        hn.read_not_negatives(rows, ids=range(5))


def test_files_of_other_kinds_are_refused_without_reading_them(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        hn.read_not_negatives(tmp_path / "none.jsonl")
    (tmp_path / "pairs.csv").write_text("a,b\n0,1\n")
    for name in (tmp_path / "pairs.csv", tmp_path):
        with pytest.raises(ValueError, match=r"must be a \.jsonl or \.parquet file"):
            hn.read_not_negatives(name)
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ValueError, match="not a regular file"):
        hn.read_not_negatives(tmp_path / "pipe.jsonl")


def test_bad_parquet_files_are_one_error(tmp_path: Path) -> None:
    file = written(tmp_path, [{"a": number, "b": number + 1} for number in range(5000)], ".parquet")
    whole = file.read_bytes()
    for damaged in (whole[:-10], whole[: len(whole) // 2], b"PAR1", b"", whole[:200] + b"\x00" * 900 + whole[1100:]):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
            hn.read_not_negatives(file)
        assert str(file) in str(error.value)
    with pytest.raises(ValueError, match=r"has no column 'b', only \['a', 'c'\]"):
        hn.read_not_negatives(written(tmp_path, [{"a": 1, "c": 2}], ".parquet"))
    with pytest.raises(ValueError, match=r"row 2: an id must be a whole number or a text, got None"):
        hn.read_not_negatives(written(tmp_path, [{"a": 1, "b": 2}, {"a": 1, "b": None}], ".parquet"))
    pq.write_table(pa.table({"a": pa.array([], pa.int64()), "b": pa.array([], pa.int64())}), file)
    with pytest.raises(ValueError, match="holds no pairs"):
        hn.read_not_negatives(file)


def test_more_pairs_than_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(not_negatives, "MOST_PAIRS", 3)
    file = written(tmp_path, [{"a": 0, "b": 1}] * 4)
    with pytest.raises(ValueError, match="has more than 3 pairs"):
        hn.read_not_negatives(file)


NAMES = [*range(13), *string.ascii_lowercase[:6], "é\n", "", "14"]


def test_random_files_are_read_as_a_plain_loop_reads_them(tmp_path: Path) -> None:
    reached: Counter[str] = Counter()
    for seed in range(60):
        draw = random.Random(seed)
        ids: list[Any] = draw.sample(NAMES, draw.randint(3, 15))
        some = ids + NAMES[:1] * draw.randint(0, 1)
        pairs = [tuple(draw.sample(some, 2)) for _ in range(draw.randint(1, 5))]
        pairs += draw.choices(pairs, k=draw.randint(0, 1)) + [(b, a) for a, b in pairs[: draw.randint(0, 1)]]
        ids += ids[:1] * (draw.random() < 0.2)  # sometimes one twice
        file = written(tmp_path, [{"a": a, "b": b} for a, b in pairs])
        texts = [str(name) for name in ids]
        bad = [
            number
            for number, (a, b) in enumerate(pairs, 1)
            if texts.count(str(a)) != 1 or texts.count(str(b)) != 1 or str(a) == str(b)
        ]
        if bad:
            reached["refused"] += 1
            with pytest.raises(ValueError, match=f"line {bad[0]}: "):
                hn.read_not_negatives(file, ids=ids)
            continue
        expected = {tuple(sorted(texts.index(str(name)) for name in pair)) for pair in pairs}
        reached["read"] += 1
        reached["repeated"] += len(expected) < len(pairs)
        assert [tuple(pair) for pair in hn.read_not_negatives(file, ids=ids).tolist()] == sorted(expected)
    assert min(reached[case] for case in ("refused", "read", "repeated")) >= 5, reached


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=80), st.integers(0, 40))
def test_any_bytes_are_pairs_or_one_error(tmp_path: Path, noise: bytes, place: int) -> None:
    content = GOOD * 3
    file = tmp_path / "pairs.jsonl"
    file.write_bytes(content[:place] + noise + content[place:])
    message = ""
    try:
        found = hn.read_not_negatives(file)
    except ValueError as error:
        message = str(error)
    assert found.shape[1] == 2 if not message else str(file) in message and "\n" not in message


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_pairs_of_other_data_are_refused_where_the_file_names_its_data(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"pairs.{ending}"
    rows = [{"a": 0, "b": 1, "data": None}, {"a": 1, "b": 2, "data": "of these"}]
    if ending == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), file)
    for data in ("", "of these"):
        assert hn.read_not_negatives(file, range(3), data).tolist() == [[0, 1], [1, 2]]
    with pytest.raises(ValueError, match=r"(line|row) 2: the pair is of other samples.*'of these', not 'of others'"):
        hn.read_not_negatives(file, range(3), "of others")

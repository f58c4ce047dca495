"""Texts from files: the columns chosen, and what cannot be read."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hardneg.mining.texts import read_columns

ROWS = [{"id": 1, "query": "a, b", "positive": 'c "d"'}, {"id": 2, "query": "ä", "positive": "e\u2028f"}]
NAMES = (("anchor", "query"), ("positive", "answer"))
EXPECTED = [["a, b", "ä"], ['c "d"', "e\u2028f"]]


def test_columns_are_found_by_name_in_every_format(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n", encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    datasets.Dataset.from_list(ROWS).to_csv(str(tmp_path / "a.csv"))
    datasets.Dataset.from_list(ROWS).to_csv(str(tmp_path / "a.tsv"), sep="\t")
    for name in ("a.jsonl", "a.parquet", "saved", "a.csv", "a.tsv"):
        assert read_columns(tmp_path / name, NAMES) == EXPECTED, name


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.txt"])
def test_a_byte_order_mark_is_no_part_of_the_first_column(name: str, tmp_path: Path) -> None:
    content = {"a.csv": "query,id,positive\nx,1,y\n", "a.jsonl": '{"query": "x", "positive": "y"}\n', "a.txt": "x\n"}
    (tmp_path / name).write_text(content[name], encoding="utf-8-sig")
    if name == "a.txt":
        assert read_columns(tmp_path / name, (("text",),)) == [["x"]]
    else:
        assert read_columns(tmp_path / name, NAMES) == [["x"], ["y"]]


@pytest.mark.parametrize("header", ["query,left", "left,query"])
def test_one_column_without_a_known_name_is_the_other_one(header: str, tmp_path: Path) -> None:
    row = {"query": "x", "left": "y"}
    (tmp_path / "a.csv").write_text(f"{header}\n{','.join(row[name] for name in header.split(','))}\n")
    assert read_columns(tmp_path / "a.csv", NAMES) == [["x"], ["y"]]


def test_columns_without_known_names_are_taken_by_position(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("left,right\nx,y\n")
    assert read_columns(tmp_path / "a.csv", NAMES) == [["x"], ["y"]]
    (tmp_path / "a.txt").write_text("x\ny\n")
    assert read_columns(tmp_path / "a.txt", (("text",),)) == [["x", "y"]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"query": "a"}\n', "2 are needed"),
        ("a.jsonl", b'{"query": "a", "positive": "b"}\n{"query": "c"}\n', "row 2 of .* has no 'positive'"),
        ("a.jsonl", b"[1]\n", "line 1 is not a JSON object"),
        ("a.jsonl", b"[" * 200_000, "cannot be read"),
        ("a.csv", b"id,query,left\n1,x,y\n", "of which none is positive or answer"),
        ("a.jsonl", b"", "is empty"),
        ("a.csv", b'query,positive\n"a,b\n', "cannot be read"),
        ("a.csv", b"query,positive\n\xff,b\n", "is not UTF-8"),
        ("a.parquet", b"PAR1", "cannot be read"),
        ("a.xml", b"<a/>", "the ending of a.xml"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        read_columns(tmp_path / name, NAMES)
    assert name in str(raised.value)


def test_a_parquet_file_without_rows_is_named(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"query": pa.array([], pa.string()), "positive": pa.array([], pa.string())}), tmp_path / "a.parquet"
    )
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read \(it has no rows\)"):
        read_columns(tmp_path / "a.parquet", NAMES)


def test_a_folder_that_is_no_dataset_is_named(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(ValueError, match="not a saved dataset"):
        read_columns(tmp_path, NAMES)

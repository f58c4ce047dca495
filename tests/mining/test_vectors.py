"""Embeddings in memory and in files: the same rows, and one clear line for files that cannot be read."""

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import hardneg as hn
from hardneg.mining.vectors import open_vectors

ROWS = np.random.default_rng(0).standard_normal((23, 6)).astype(np.float32)


def npy(folder: Path) -> Path:
    np.save(folder / "rows.npy", ROWS)
    return folder / "rows.npy"


def npy_shards(folder: Path) -> Path:
    (folder / "shards").mkdir()
    for number, part in enumerate(np.array_split(ROWS, 4)):
        np.save(folder / "shards" / f"{number}.npy", part.astype(np.float16 if number == 2 else np.float32))
    return folder / "shards"


def parquet(folder: Path) -> Path:
    table = pa.table({"id": range(23), "embedding": ROWS.tolist()})
    pq.write_table(table, folder / "rows.parquet", row_group_size=5)
    return folder / "rows.parquet"


def parquet_shards(folder: Path) -> Path:
    (folder / "shards").mkdir()
    for number, part in enumerate(np.array_split(ROWS, 3)):
        column = pa.FixedSizeListArray.from_arrays(pa.array(part.reshape(-1)), 6)
        pq.write_table(pa.table({"embedding": column}), folder / "shards" / f"{number}.parquet", row_group_size=3)
    return folder / "shards"


def memory_mapped(folder: Path) -> np.ndarray:
    return np.load(npy(folder), mmap_mode="r")


def column(form: str | None) -> Callable[[Path], object]:
    """A column of a Hugging Face dataset."""

    def make(_: Path) -> object:
        return pytest.importorskip("datasets").Dataset.from_dict({"e": ROWS.tolist()}).with_format(form)["e"]

    return make


SOURCES: list[Callable[[Path], object]] = [
    npy, npy_shards, parquet, parquet_shards, memory_mapped,
    lambda _: torch.from_numpy(ROWS), lambda _: ROWS[::-1][::-1], lambda _: ROWS.tolist(),
    column(None), column("numpy"), column("torch"),
]  # fmt: skip


@pytest.mark.parametrize("make", SOURCES)
def test_rows_are_the_same_from_every_source(make: Callable[[Path], object], tmp_path: Path) -> None:
    vectors = open_vectors("corpus", make(tmp_path))
    expected = ROWS / np.linalg.norm(ROWS.astype(np.float64), axis=1, keepdims=True)
    tolerance = 1e-3 if make is npy_shards else 1e-6
    assert vectors.shape == (23, 6)
    for start, stop in [(0, 23), (4, 11), (22, 23), (20, 40), (5, 5)]:
        np.testing.assert_allclose(vectors.unit(start, stop), expected[start:stop], atol=tolerance)
    chosen = np.array([22, 0, 7, 7, 13])
    np.testing.assert_allclose(vectors.take_unit(chosen), expected[chosen], atol=tolerance)


def test_a_parquet_file_is_read_at_any_place_and_by_other_processes(tmp_path: Path) -> None:
    """Row groups of different sizes, one of them empty, and reads that go forward and back."""
    rows = np.random.default_rng(1).standard_normal((2000, 300)).astype(np.float32)
    table = pa.table({"embedding": rows.tolist()})
    path = tmp_path / "rows.parquet"
    with pq.ParquetWriter(path, table.schema) as writer:
        for start, stop in [(0, 1500), (1500, 1500), (1500, 1501), (1501, 2000)]:
            writer.write_table(table.slice(start, stop - start), row_group_size=2000)
    vectors = open_vectors("corpus", path)
    draw = np.random.default_rng(0)
    for start in [0, 700, 1400, 1499, 1500, 3, *draw.integers(2000, size=20).tolist()]:
        for size in (1, 700, 2000):
            np.testing.assert_array_equal(vectors.read(start, start + size), rows[start : start + size])
    vectors.read(5, 10)
    chosen = draw.integers(2000, size=50)
    np.testing.assert_array_equal(vectors.take(chosen), rows[chosen])
    vectors.read(5, 10)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(vectors)).read(10, 20), rows[10:20])


@pytest.mark.parametrize("make", [npy, parquet])
def test_a_relative_path_is_that_of_the_folder_where_it_was_opened(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    vectors = open_vectors("corpus", make(tmp_path).name)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    np.testing.assert_array_equal(vectors.read(3, 5), ROWS[3:5])


def test_mining_from_files_is_mining_from_memory(tmp_path: Path) -> None:
    expected = hn.mine(ROWS[:5], ROWS, range(5), num_negatives=3)
    for make in (npy, parquet):
        found = hn.mine(make(tmp_path), make(tmp_path), range(23), num_negatives=3, memory=20_000)
        assert torch.equal(found.indices[:5], expected.indices)


def cut_off(folder: Path) -> Path:
    path = npy(folder)
    path.write_bytes(path.read_bytes()[:-8])
    return path


def pickled(folder: Path) -> Path:
    np.save(folder / "a.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return folder / "a.npy"


def fortran(folder: Path) -> Path:
    np.save(folder / "a.npy", np.asfortranarray(ROWS))
    return folder / "a.npy"


def broken_parquet(folder: Path) -> Path:
    path = parquet(folder)
    path.write_bytes(path.read_bytes()[:200])
    return path


def ragged(folder: Path) -> Path:
    pq.write_table(pa.table({"embedding": [[1.0, 2.0], [1.0]]}), folder / "a.parquet")
    return folder / "a.parquet"


def ragged_with_the_right_sum(folder: Path) -> Path:
    pq.write_table(pa.table({"embedding": [[1.0, 2.0], [1.0], [1.0, 2.0, 3.0]]}), folder / "a.parquet")
    return folder / "a.parquet"


def numbers(folder: Path) -> Path:
    pq.write_table(pa.table({"embedding": [1.0, 2.0]}), folder / "a.parquet")
    return folder / "a.parquet"


def overwritten_in_the_middle(folder: Path) -> Path:
    path = parquet(folder)
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * 400 + content[404:])
    return path


def without_column(folder: Path) -> Path:
    pq.write_table(pa.table({"text": ["a"]}), folder / "a.parquet")
    return folder / "a.parquet"


def garbage(folder: Path) -> Path:
    (folder / "a.npy").write_bytes(b"no numbers here")
    return folder / "a.npy"


def empty_folder(folder: Path) -> Path:
    return folder


def text_file(folder: Path) -> Path:
    (folder / "a.bin").write_bytes(b"a")
    return folder / "a.bin"


def different_widths(folder: Path) -> Path:
    np.save(folder / "a.npy", ROWS)
    np.save(folder / "b.npy", ROWS[:, :3])
    return folder


MISTAKES = [
    (cut_off, "is cut off"), (pickled, "must hold floating-point numbers"), (fortran, "is in Fortran order"),
    (broken_parquet, "cannot be read as parquet"), (ragged, "must hold 2 floating-point numbers in every row"),
    (ragged_with_the_right_sum, "must hold 2 floating-point numbers in every row"),
    (numbers, "must hold lists of floating-point numbers, got double"),
    (overwritten_in_the_middle, "cannot be read as parquet"),
    (without_column, "has no column 'embedding'"), (garbage, "is not a readable .npy file"),
    (empty_folder, "holds no .npy or .parquet files"), (text_file, "is not a .npy or .parquet file"),
    (different_widths, "has d = 3, but"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), MISTAKES)
def test_a_file_that_cannot_be_read_is_named(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        open_vectors("corpus", make(tmp_path)).unit(0, 5)
    assert str(tmp_path) in str(raised.value)


def test_a_shard_that_vanishes_or_shrinks_is_an_error(tmp_path: Path) -> None:
    vectors = open_vectors("corpus", npy_shards(tmp_path))
    shard = tmp_path / "shards" / "1.npy"
    shard.write_bytes(shard.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"1\.npy was cut off while it was read"):
        vectors.unit(0, 23)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=r"1\.npy"):
        vectors.unit(0, 23)

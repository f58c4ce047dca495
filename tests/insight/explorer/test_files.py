"""Embeddings and images of files, in every format; nothing is unpickled."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file

from hardneg.insight.explorer.files import read_embeddings, read_images

ROWS = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)


def write(path: Path) -> None:
    named: dict[str, Any] = {"embeddings": ROWS, "labels": np.arange(6), "positives": ROWS + 1}
    if path.suffix == ".npy":
        np.save(path, ROWS)
    elif path.suffix == ".npz":
        np.savez(path, **named, texts=np.array(list("abcdef")), other=np.zeros(3))
    elif path.suffix == ".safetensors":
        save_file(named, path)
    else:
        table = {"id": [f"x{row}" for row in range(6)], "embedding": ROWS.tolist(), "label": [*"aabbc", None]}
        pq.write_table(pa.table({**table, "text": list("abcdef"), "ignored": [{"a": 1}] * 6}), path)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors", ".parquet"])
def test_every_format_gives_the_same_features_and_what_else_it_holds(suffix: str, tmp_path: Path) -> None:
    write(tmp_path / f"file{suffix}")
    features, rest = read_embeddings(tmp_path / f"file{suffix}")
    np.testing.assert_array_equal(features.float().numpy(), ROWS)
    keys = {".npy": set(), ".npz": {"labels", "texts", "positives"}, ".safetensors": {"labels", "positives"}}
    assert set(rest) == keys.get(suffix, {"ids", "labels", "texts"})
    if suffix == ".parquet":
        assert rest["ids"][:2] == ["x0", "x1"]
        assert rest["labels"] == [*"aabbc", None]


def test_a_file_with_a_single_array_of_any_name_is_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", z=ROWS.astype(np.float16))
    assert read_embeddings(tmp_path / "x.npz").features.dtype == torch.float16


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("evil"),))


def test_pickles_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", np.array([Evil()], dtype=object), allow_pickle=True)
    np.savez("b.npz", embeddings=np.array([Evil()], dtype=object))
    Path("c.npy").write_bytes(pickle.dumps(Evil()))
    for name in ("a.npy", "b.npz", "c.npy"):
        with pytest.raises(ValueError, match=name):
            read_embeddings(Path(name))
    assert not Path("evil").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "missing.npy", "there is no file"),
        (lambda path: path, "is a folder without recipe.yaml"),
        (lambda path: _text(path / "x.csv"), "the ending of x.csv"),
        (lambda path: _text(path / "x.npz"), "not a readable .npz"),
        (lambda path: _text(path / "x.safetensors"), "cannot be read as safetensors"),
        (lambda path: _text(path / "x.parquet"), "cannot be read as parquet"),
        (lambda path: _saved(path, np.zeros((2, 2, 2))), r"must have shape \(N, d\)"),
        (lambda path: _saved(path, np.zeros((0, 2))), r"must have shape \(N, d\)"),
        (lambda path: _saved(path, np.array(["a"])), "must hold numbers"),
        (lambda path: _table(path, {"embedding": [[1.0], [1.0, 2.0]]}), "equally many numbers"),
        (lambda path: _table(path, {"embedding": [[1.0], None]}), "equally many numbers"),
        (lambda path: _table(path, {"other": [1.0, 2.0]}), "has no column 'embedding'"),
        (lambda path: _table(path, {"embedding": [1.0, 2.0]}), "must hold rows of numbers"),
    ],
)
def test_a_broken_file_is_one_clear_error(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read_embeddings(make(tmp_path))
    assert "\n" not in str(error.value)


def _text(path: Path) -> Path:
    path.write_text("not this format")
    return path


def _saved(path: Path, array: np.ndarray) -> Path:
    np.save(path / "x.npy", array)
    return path / "x.npy"


def _table(path: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(pa.table(columns), path / "x.parquet")
    return path / "x.parquet"


def test_a_folder_of_images_is_read_in_the_order_of_paths(tmp_path: Path) -> None:
    for number, name in enumerate(["b/2.png", "a/1.jpg", "c.PNG"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (200, 100), (50 * number, 0, 0)).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    found = read_images(tmp_path)
    assert [round(float(found[row][0, 0, 0]), -1) for row in range(3)] == [50, 0, 100]
    assert found[1].shape == (3, 56, 112)
    (tmp_path / "d.png").write_text("broken")
    with pytest.raises(ValueError, match=r"d\.png cannot be read as an image"):
        read_images(tmp_path)[3]
    with pytest.raises(ValueError, match="holds no images"):
        read_images(_empty(tmp_path))


def _empty(path: Path) -> Path:
    (path / "empty").mkdir()
    return path / "empty"

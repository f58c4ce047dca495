"""The published CIFAR files are read as pickle and numpy read them, but nothing in them is run."""

import io
import os
import pickle
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from images import python2_pickles

from hardneg.images import cifar

DRAWS = np.random.default_rng(0)
NAMES = [b"airplane", b"automobile", b"bird"]


def batch(count: int) -> tuple[npt.NDArray[np.uint8], list[int]]:
    pixels = DRAWS.integers(0, 256, (count, 3072), dtype=np.uint8)
    return pixels, DRAWS.integers(0, len(NAMES), count).tolist()


def python_files(kind: str) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The files of the Python version, and what they hold."""
    key, names_key = (b"labels", b"label_names") if kind == "cifar10" else (b"fine_labels", b"fine_label_names")
    train = [f"data_batch_{number}" for number in range(1, 6)] if kind == "cifar10" else ["train"]
    test = "test_batch" if kind == "cifar10" else "test"
    files, held = {}, {}
    for name in (*train, test):
        pixels, labels = batch(7)
        content = {b"batch_label": b"x" * 300, key: labels, b"data": pixels, b"filenames": [b"a.png"] * 7}
        files[name], held[name] = python2_pickles.dumps(content), (pixels, labels)
    meta = {names_key: NAMES, b"num_cases_per_batch": 7}
    files["batches.meta" if kind == "cifar10" else "meta"] = python2_pickles.dumps(meta)
    return files, {"train": [held[name] for name in train], "test": [held[test]]}


def binary_files(kind: str) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The files of the binary version, and what they hold."""
    train = [f"data_batch_{number}.bin" for number in range(1, 6)] if kind == "cifar10" else ["train.bin"]
    test = "test_batch.bin" if kind == "cifar10" else "test.bin"
    files, held = {}, {}
    for name in (*train, test):
        pixels, labels = batch(7)
        coarse = b"" if kind == "cifar10" else b"\x07"
        records = [coarse + bytes([label]) + row.tobytes() for row, label in zip(pixels, labels, strict=True)]
        files[name], held[name] = b"".join(records), (pixels, labels)
    files["batches.meta.txt" if kind == "cifar10" else "fine_label_names.txt"] = b"\n".join(NAMES) + b"\n\n"
    return files, {"train": [held[name] for name in train], "test": [held[test]]}


def written(files: dict[str, bytes], path: Path) -> Path:
    """A folder of the files, or a tar of them in a folder."""
    if path.suffix == ".gz":
        with tarfile.open(path, "w:gz") as archive:
            for name, content in files.items():
                entry = tarfile.TarInfo(f"cifar/{name}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    else:
        path.mkdir()
        for name, content in files.items():
            (path / name).write_bytes(content)
    return path


VERSIONS = {"cifar10": cifar.CIFAR10, "cifar100": cifar.CIFAR100}


@pytest.mark.parametrize("place", ["folder", "archive.tar.gz"])
@pytest.mark.parametrize("make", [python_files, binary_files])
@pytest.mark.parametrize("kind", VERSIONS)
def test_both_versions_give_their_images_in_order(kind: str, make: Any, place: str, tmp_path: Path) -> None:
    files, held = make(kind)
    found = cifar.read(written(files, tmp_path / place), VERSIONS[kind])
    for split, parts in held.items():
        images = [row.reshape(3, 32, 32) for pixels, _ in parts for row in pixels]
        np.testing.assert_array_equal(found[f"{split}_images"], np.stack(images))
        assert found[f"{split}_labels"].tolist() == [label for _, labels in parts for label in labels]
    assert found["classes"].tolist() == ["airplane", "automobile", "bird"]


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_batches_are_read_as_pickle_reads_them(protocol: int) -> None:
    pixels, labels = batch(5)
    content = {b"data": pixels, b"labels": labels}
    data = python2_pickles.dumps(content) if protocol < 3 else pickle.dumps(content, protocol)
    theirs = pickle.loads(data, encoding="bytes")
    images, numbers = cifar._batch(data, cifar.CIFAR10[0], Path("batch"))
    np.testing.assert_array_equal(images.reshape(5, -1), theirs[b"data"])
    assert numbers.tolist() == theirs[b"labels"]


VALID = python2_pickles.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [3], b"filenames": [b"a.png"]})


class Call:
    """Its pickle calls a function when it is loaded."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def hostile(marker: Path) -> dict[str, bytes]:
    """Batches that run code, or take much memory, where they are unpickled."""
    pixels = np.zeros((1, 3072), np.uint8)
    memo = b"\x80\x02}r\xff\xff\xff\x7f."  # an entry 2^31 of the memo
    tuples = b")" + b"".join(b"q%ch%c\x86" % (depth, depth) for depth in range(60))  # 2^60 steps to hash
    nested, several = b"\x80\x02}" + tuples + b"Ns.", b"\x80\x02}(" + tuples + b"Nu."
    in_set = b"\x80\x04\x8f(" + tuples + b"\x90."
    huge = b"\x80\x02cnumpy\nndarray\n(I1000000000000\ntR."  # ndarray(10^12)
    return {
        "touch": pickle.dumps({b"data": Call(Path.touch, marker), b"labels": [0]}),
        "mkdir": pickle.dumps({b"data": pixels, b"labels": Call(os.mkdir, str(marker))}),
        "eval": pickle.dumps(Call(eval, f"__import__('os').mkdir({str(marker)!r})")),
        "numpy": pickle.dumps(Call(np.savetxt, str(marker), [1])),
        "old": f"cos\nmkdir\n(S'{marker}'\ntR.".encode(),
        "memo": memo,
        "huge": huge,
        "nested": nested,
        "several": several,
        "set": in_set,
    }


@pytest.mark.parametrize("name", hostile(Path("x")))
def test_a_batch_of_a_stranger_runs_nothing(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    data = hostile(marker)[name]
    with pytest.raises(ValueError, match=r"batch (is not the published file|holds a|has no array).*: download"):
        cifar._batch(data, cifar.CIFAR10[0], Path("batch"))
    assert not marker.exists()
    if name not in ("memo", "huge", "nested", "several", "set"):  # the pickle does run code where it is loaded
        pickle.loads(data)
        assert marker.exists()


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 3400), changed=st.integers(0, 255), cut=st.integers(0, 3500))
def test_damaged_batches_are_refused_or_read(place: int, changed: int, cut: int) -> None:
    data = bytearray(VALID)
    data[place % len(data)] = changed
    with suppress(ValueError):  # any other error fails the test
        images, labels = cifar._batch(bytes(data[: cut if cut < 1000 else None]), cifar.CIFAR10[0], Path("batch"))
        assert (images.shape, images.dtype, len(labels)) == ((1, 3, 32, 32), np.uint8, 1)


STATES = {
    "another dtype": np.zeros((2, 3072), np.int8),
    "another width": np.zeros((2, 3000), np.uint8),
    "no images": np.zeros((0, 3072), np.uint8),
    "one axis": np.zeros(3072, np.uint8),
    "columns first": np.asfortranarray(np.zeros((2, 3072), np.uint8)),
    "objects": np.full((2, 3072), None),
    "a list": [[0] * 3072] * 2,
}


@pytest.mark.parametrize("case", STATES)
def test_arrays_of_another_form_are_refused(case: str) -> None:
    data = python2_pickles.dumps({b"data": STATES[case], b"labels": [0, 1]})
    with pytest.raises(ValueError, match=r"batch has no array 'data' of uint8 pixels \(N, 3072\)"):
        cifar._batch(data, cifar.CIFAR10[0], Path("batch"))


def test_labels_that_are_none_are_refused(tmp_path: Path) -> None:
    pixels, _ = batch(2)
    for labels in ([0], [0, 300], [0, -1], [0, 0.5], [0, True], b"\x00\x01", None):
        data = python2_pickles.dumps({b"data": pixels, b"labels": labels})
        with pytest.raises(ValueError, match=r"batch (has (no list of|2 images and 1) labels|is not the)"):
            cifar._batch(data, cifar.CIFAR10[0], Path("batch"))
    files, _ = binary_files("cifar10")
    files["batches.meta.txt"] = b"airplane\n"
    with pytest.raises(ValueError, match="has labels up to 2, but names 1 classes"):
        cifar.read(written(files, tmp_path / "folder"), cifar.CIFAR10)


@pytest.mark.parametrize("make", [python_files, binary_files])
def test_an_incomplete_set_names_what_is_missing(make: Any, tmp_path: Path) -> None:
    files, _ = make("cifar10")
    del files[next(name for name in files if name.startswith("data_batch_3"))]
    with pytest.raises(ValueError, match=r"folder lacks data_batch_3\S*: download"):
        cifar.read(written(files, tmp_path / "folder"), cifar.CIFAR10)
    files["data_batch_3"] = files["data_batch_3.bin"] = b"abc"
    with pytest.raises(ValueError, match=r"data_batch_3\S* (is not the published file|has 3 bytes, no multiple of)"):
        cifar.read(written(files, tmp_path / "again"), cifar.CIFAR10)


@pytest.mark.parametrize("kept", [0, 50, 3000, 60_000])
def test_a_broken_archive_is_refused(kept: int, tmp_path: Path) -> None:
    whole = written(binary_files("cifar10")[0], tmp_path / "whole.tar.gz").read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(whole[:kept])
    with pytest.raises(ValueError, match=r"cut.tar.gz (cannot be read|lacks) .*: download"):
        cifar.read(tmp_path / "cut.tar.gz", cifar.CIFAR10)


def test_links_in_an_archive_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"\x00" * 3073)
    with tarfile.open(tmp_path / "links.tar", "w") as archive:
        for name in (*cifar.CIFAR10[1].splits["train"], "test_batch.bin"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, str(tmp_path / "secret")
            archive.addfile(entry)
    with pytest.raises(ValueError, match="lacks data_batch_1"):
        cifar.read(tmp_path / "links.tar", cifar.CIFAR10)

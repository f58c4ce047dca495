"""Tar shards give the samples that the datasets library reads from them, in any order."""

import gzip
import io
import json
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from hardneg.images import load_images
from hardneg.images.image_set import ImageSet, StreamedImages

PIXELS = np.random.default_rng(0).integers(0, 256, (9, 6, 5, 3), dtype=np.uint8)
LABELS = [0, 1, 2, 0, 1, 2, 0, 1, 2]


def encoded(image: Any, kind: str = "PNG") -> bytes:
    Image.fromarray(image).save(file := io.BytesIO(), kind)
    return file.getvalue()


def write(path: Path, files: dict[str, bytes], form: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def samples(rows: range, label: str = "cls") -> dict[str, bytes]:
    files = {}
    for row in rows:
        files[f"{row:06}.png"] = encoded(PIXELS[row])
        text = str(LABELS[row]) if label == "cls" else json.dumps({"caption": "x", "label": LABELS[row]})
        files[f"{row:06}.{label}"] = text.encode()
    return files


def shards(folder: Path) -> Path:
    write(folder / "train-000000.tar", samples(range(5)))
    write(folder / "train-000001.tar", samples(range(5, 9)))
    write(folder / "test-000000.tar", samples(range(2)))
    return folder


def check(images: ImageSet | StreamedImages, rows: range = range(9)) -> None:
    assert len(images) == len(rows)
    assert images.labels is not None
    assert images.labels.tolist() == [LABELS[row] for row in rows]
    for place in reversed(range(len(rows))):
        np.testing.assert_array_equal(images[place][1].permute(1, 2, 0).numpy(), PIXELS[rows[place]])


@pytest.mark.parametrize("limit", [0, 2**30])
def test_shards_are_read_by_split_in_memory_and_on_demand(limit: int, tmp_path: Path) -> None:
    source = shards(tmp_path / "set")
    images = load_images(source, "train", labels=True, in_memory=limit)
    assert isinstance(images, ImageSet if limit else StreamedImages)
    check(images)
    assert images.classes == ("0", "1", "2")
    check(load_images(source, "test", in_memory=limit), range(2))


def test_datasets_reads_the_same_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    files = [str(file) for file in sorted(shards(tmp_path / "set").glob("train*.tar"))]
    theirs = datasets.load_dataset("webdataset", data_files=files, split="train", streaming=True)
    ours = load_images(tmp_path / "set", in_memory=0)
    assert ours.labels is not None
    for (index, image), row in zip((ours[place] for place in range(9)), theirs, strict=True):
        np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), np.asarray(row["png"]))
        assert int(ours.labels[index]) == int(row["cls"])


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_and_labels_in_every_tar_format(form: int, tmp_path: Path) -> None:
    folder = "a" * 90 + "/" + "b" * 60  # longer than the name field of a header
    files = {f"{folder}/{name}": content for name, content in samples(range(9), "json").items()}
    check(load_images(write(tmp_path / "one.tar", files, form), in_memory=0))


def test_a_streamed_shard_is_read_by_the_processes_of_a_loader(tmp_path: Path) -> None:
    images = load_images(shards(tmp_path / "set"), in_memory=0)
    assert isinstance(images, StreamedImages)
    check(pickle.loads(pickle.dumps(images)))
    loader = DataLoader(images, batch_size=4, num_workers=2, shuffle=True, generator=torch.Generator().manual_seed(0))
    for index, batch in loader:
        for row, image in zip(index.tolist(), batch, strict=True):
            np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), PIXELS[row])


def test_class_names_are_numbered_together_and_labels_may_be_absent(tmp_path: Path) -> None:
    write(tmp_path / "train.tar", {"0.png": encoded(PIXELS[0]), "0.cls": b"dog\n", "1.png": encoded(PIXELS[1])})
    write(tmp_path / "test.tar", {"0.png": encoded(PIXELS[0]), "0.cls": b"cat"})
    train, test = (load_images(tmp_path, split) for split in ("train", "test"))
    assert train.classes == test.classes == ("cat", "dog")
    assert [images.labels.tolist() for images in (train, test) if images.labels is not None] == [[1, -1], [0]]
    write(tmp_path / "plain" / "a.tar", {"0.png": encoded(PIXELS[0]), "0.txt": b"a caption", "1.json": b"[1"})
    assert load_images(tmp_path / "plain").labels is None


def test_only_plain_files_of_images_are_samples(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(encoded(PIXELS[8]))
    path = write(tmp_path / "one.tar", {"._0.png": b"hidden", "0.seg.png": b"a mask", "0.png": encoded(PIXELS[0]),
                                        "0.cls": b"0", "1.JPG": encoded(PIXELS[1]), "notes.txt": b""})  # fmt: skip
    with tarfile.open(path, "a") as archive:
        for name, kind in (("2.png", tarfile.SYMTYPE), ("3.png", tarfile.LNKTYPE), ("4.png", tarfile.FIFOTYPE)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, str(tmp_path / "secret.png")
            archive.addfile(entry)
    images = load_images(path)
    assert len(images) == 2
    np.testing.assert_array_equal(images[1][1].permute(1, 2, 0).numpy(), PIXELS[1])


def test_an_archive_next_to_image_folders_is_not_a_shard(tmp_path: Path) -> None:
    write(tmp_path / "train.tar", samples(range(9)))
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "train" / "cat" / "0.png").write_bytes(encoded(PIXELS[0]))
    assert load_images(tmp_path).classes == ("cat",)


def test_a_replaced_shard_is_listed_anew(tmp_path: Path) -> None:
    assert len(load_images(write(tmp_path / "one.tar", samples(range(5))))) == 5
    check(load_images(write(tmp_path / "one.tar", samples(range(9)))))


@pytest.mark.parametrize("damage", ["gzip", "cut", "empty", "no images", "a label below −1", "a label of 9 digits"])
def test_shards_that_cannot_be_read_are_refused(damage: str, tmp_path: Path) -> None:
    path = write(tmp_path / "one.tar", samples(range(3)))
    content = path.read_bytes()
    message = r"one.tar cannot be read \(.*\): write it again as a plain tar"
    match damage:
        case "gzip":
            path.write_bytes(gzip.compress(content))
        case "cut":
            path.write_bytes(content[:700])
        case "empty":
            path.write_bytes(b"")
        case "no images":
            write(path, {"0.txt": b"x"})
            message = r"one.tar has no images: name them KEY.jpg"
        case "a label below −1":
            write(path, {**samples(range(3)), "000002.cls": b"-3"})
            message = "one.tar has the label -3"
        case _:
            write(path, {**samples(range(3)), "000002.cls": b"999999999"})
            message = "labels go up to 999999999"
    with pytest.raises(ValueError, match=message):
        load_images(path)

"""``hardneg data`` puts sets where recipes find them, and downloads only on request."""

import io
import json
import os
import pickle
import tarfile
import zipfile
from dataclasses import replace
from hashlib import md5
from pathlib import Path

import commands
import local_site
import numpy as np
import pytest

from hardneg.images import load_images
from hardneg.images.published import SETS

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
LABELS = np.arange(12) % 3


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HARDNEG_DATA", raising=False)


def archive() -> bytes:
    """A small cifar-10-binary.tar.gz: two images in each batch."""
    with tarfile.open(fileobj=(content := io.BytesIO()), mode="w:gz") as made:
        names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
        files = {"batches.meta.txt": b"ant\nbee\ncat\n"}
        for start, name in zip(range(0, 12, 2), names, strict=True):
            rows = range(start, start + 2)
            files[name] = b"".join(bytes([LABELS[row]]) + PIXELS[row].transpose(2, 0, 1).tobytes() for row in rows)
        for name, data in files.items():
            entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            entry.size = len(data)
            made.addfile(entry, io.BytesIO(data))
    return content.getvalue()


def check(file: Path = Path("data/cifar10.npz")) -> None:
    """The file is what recipes read."""
    train, test = (load_images(file, split, labels=True) for split in ("train", "test"))
    assert (len(train), len(test), train.classes) == (10, 2, ("ant", "bee", "cat"))
    assert train.labels is not None
    assert train.labels.tolist() == LABELS[:10].tolist()
    np.testing.assert_array_equal(train[3][1].permute(1, 2, 0).numpy(), PIXELS[3])
    np.testing.assert_array_equal(test[1][1].permute(1, 2, 0).numpy(), PIXELS[11])


@pytest.mark.parametrize("place", ["the folder", "the shared folder", "a file", "another folder", "unpacked"])
def test_an_archive_is_found_where_it_is(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = {"the folder": "data", "another folder": "downloads"}.get(place, "shared")
    (tmp_path / folder).mkdir()
    file = tmp_path / folder / "cifar-10-binary.tar.gz"
    file.write_bytes(archive())
    given: list[str] = []
    match place:
        case "the shared folder":
            monkeypatch.setenv("HARDNEG_DATA", str(tmp_path / "shared"))
        case "a file":
            renamed = file.rename(file.with_name("mine.tgz"))
            given = ["--from", str(renamed)]
        case "another folder":
            given = ["--from", "downloads"]
        case "unpacked":
            with tarfile.open(file) as opened:
                opened.extractall(tmp_path / "shared", filter="data")
            file.unlink()
            given = ["--from", "shared/cifar-10-batches-bin"]
    code, out, err = commands.hardneg(capsys, "data", "cifar10", *given)
    assert (code, err) == (0, "")
    assert out.split() == ["data/cifar10.npz:", "10", "train", "and", "2", "test", "images,", "3", "classes"]
    check()
    written = os.listdir("data")
    assert "cifar10.npz" in written
    assert not any("part" in name for name in written)


def test_a_download_happens_only_on_request_and_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = archive()
    with local_site.serve({"/cifar-10-binary.tar.gz": content}) as (site, asked):
        here = replace(SETS["cifar10"], url=f"{site}/cifar-10-binary.tar.gz", md5=md5(content).hexdigest())
        monkeypatch.setitem(SETS, "cifar10", here)
        code, _, err = commands.hardneg(capsys, "data", "cifar10")
        assert (code, asked, list(tmp_path.iterdir())) == (2, [], [])
        assert "no cifar-10-binary.tar.gz in data: put it there (from http" in " ".join(err.split())
        monkeypatch.setitem(SETS, "cifar10", replace(here, md5="0" * 32))
        code, _, err = commands.hardneg(capsys, "data", "cifar10", "--download")
        assert (code, "its MD5 is" in " ".join(err.split())) == (2, True)
        assert list(tmp_path.glob("data/*")) == []
        monkeypatch.setitem(SETS, "cifar10", here)
        for _ in range(2):
            assert commands.hardneg(capsys, "data", "cifar10", "--download")[0] == 0
    check()
    assert asked == ["/cifar-10-binary.tar.gz"] * 2  # that which failed, and one


def test_other_sources_with_both_splits_are_written_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"img": datasets.Array3D((32, 32, 3), "uint8"), "label": datasets.ClassLabel(names=["ant", "bee", "cat"])}
    )
    parts = {"train": slice(10), "test": slice(10, 12)}
    made = {
        split: datasets.Dataset.from_dict({"img": PIXELS[rows], "label": LABELS[rows]}, features=features)
        for split, rows in parts.items()
    }
    datasets.DatasetDict(made).save_to_disk(tmp_path / "saved")
    assert commands.hardneg(capsys, "data", "cifar10", "--from", "saved")[0] == 0
    check()
    made["train"].save_to_disk(tmp_path / "train-only")
    code, _, err = commands.hardneg(capsys, "data", "cifar100", "--from", "train-only")
    assert (code, "has no test split with labels" in " ".join(err.split())) == (2, True)
    made["unlabeled"] = made["test"].remove_columns("label")
    datasets.DatasetDict(made).save_to_disk(tmp_path / "three")
    assert commands.hardneg(capsys, "data", "stl10", "--from", "three")[0] == 0
    labels = load_images("data/stl10.npz", "train").labels
    assert labels is not None
    assert labels.tolist() == [*LABELS[:10].tolist(), -1, -1]


def test_sets_are_listed_and_a_present_one_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cifar-10-binary.tar.gz").write_bytes(archive())
    assert commands.hardneg(capsys, "data", "cifar10")[0] == 0
    before = (tmp_path / "data" / "cifar10.npz").stat().st_mtime_ns
    assert commands.hardneg(capsys, "data", "cifar10")[0] == 0
    assert (tmp_path / "data" / "cifar10.npz").stat().st_mtime_ns == before
    code, _, err = commands.hardneg(capsys, "data", "cifar10", "--from", "data")
    assert (code, "exists already: remove it" in " ".join(err.split())) == (2, True)
    listed = json.loads(commands.hardneg(capsys, "data", "--json")[1])
    assert {entry["name"]: entry["present"] for entry in listed} == {name: name == "cifar10" for name in SETS}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cifr10"], "name='cifr10' is not known: did you mean 'cifar10'?"),
        (["cifar10", "--from", "nothing.tar.gz"], "nothing.tar.gz does not exist: give the archive"),
        (["cifar10", "--from", "nothing"], "source='nothing' does not exist"),
        (["tu:MUTAG"], "tu:MUTAG is not in data/tu, which has no sets: put MUTAG.zip"),
        (["tu:MUTAG", "--from", "x"], "x does not exist: give MUTAG.zip, or a folder that holds it"),
        (["tu:../x", "--download"], "tu:../x is not the name of a set of the TU collection"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = commands.hardneg(capsys, "data", *arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
    assert list(tmp_path.iterdir()) == []


def test_a_set_of_graphs_is_downloaded_and_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    geometric = pytest.importorskip("torch_geometric.datasets")
    with zipfile.ZipFile(content := io.BytesIO(), "w") as made:
        for part, text in {"A": "1, 2\n2, 1\n", "graph_indicator": "1\n1\n2\n", "graph_labels": "4\n7\n"}.items():
            made.writestr(f"TOY/TOY_{part}.txt", text)
    with local_site.serve({"/TOY.zip": content.getvalue(), "/BAD.zip": b"no zip"}) as (site, asked):
        monkeypatch.setattr(geometric.TUDataset, "url", site)
        for _ in range(2):
            code, out, _ = commands.hardneg(capsys, "data", "tu:TOY", "--download")
            assert (code, out.strip()) == (0, "tu:TOY: 2 graphs, 2 classes, 2 features of a node, in data/tu")
        assert asked == ["/TOY.zip"]
        code, _, err = commands.hardneg(capsys, "data", "tu:BAD", "--download")
        assert (code, "BAD.zip is not a zip file: check the name" in " ".join(err.split())) == (2, True)
    assert [file.name for file in (tmp_path / "data" / "tu").iterdir()] == ["TOY.zip"]


def test_an_archive_of_a_stranger_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    (tmp_path / "cifar-10-batches-py").mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"):
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(pickle.dumps({b"data": Hostile(), b"label_names": []}))
    code, _, err = commands.hardneg(capsys, "data", "cifar10", "--from", "cifar-10-batches-py")
    assert code == 2
    assert "it asks for posix.mkdir, which the published file does not" in " ".join(err.split())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["cifar-10-batches-py"]

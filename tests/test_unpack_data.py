"""Unpacking: what was packed comes out again, on made-up sets and, where they are, on the real ones."""

import io
import os
import sys
from pathlib import Path

import children
import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason='packed images need pip install "hardneg[train]"')
pytest.importorskip("sklearn", reason="digits come with scikit-learn")
from PIL import Image
from unpack_data import main, read_packed, unpack

from hardneg.images import ImageSet, load_images

SCRIPT = str(Path(__file__).parents[1] / "scripts" / "unpack_data.py")
REAL = os.environ.get("HARDNEG_DATA", "")
RANDOM = np.random.default_rng(0)


def pack(path: Path, pixels: np.ndarray, labels: np.ndarray, classes: tuple[str, ...] = ("a", "b")) -> None:
    """The format of shared/data: PNG strips of 5 pictures here, one under the other."""
    strips = []
    for start in range(0, len(pixels), 5):
        strip = np.concatenate([*pixels[start : start + 5]])
        Image.fromarray(strip).save(file := io.BytesIO(), "PNG")
        strips.append(file.getvalue())
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path,
        blob=np.frombuffer(b"".join(strips), np.uint8),
        offsets=np.cumsum([0] + [len(strip) for strip in strips]),
        labels=labels.astype(np.uint8),
        shape=np.array(pixels.shape),
        classes=np.array(classes),
    )


def made_up(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """A small CIFAR-10 in two train parts of 12 and 7 pictures and a test part of 3."""
    pixels, labels = RANDOM.integers(0, 256, (22, 4, 6, 3), dtype=np.uint8), RANDOM.integers(0, 2, 22)
    for name, part in (("train_1", slice(0, 12)), ("train_2", slice(12, 19)), ("test", slice(19, 22))):
        pack(folder / "cifar10" / f"{name}.npz", pixels[part], labels[part])
    return pixels, labels


def test_what_was_packed_comes_out_in_its_order(tmp_path: Path) -> None:
    pixels, labels = made_up(tmp_path)
    written = unpack(tmp_path, tmp_path / "data")
    assert list(written) == ["cifar10", "digits"]
    with np.load(written["cifar10"]) as arrays:
        np.testing.assert_array_equal(arrays["train_images"], pixels[:19])
        np.testing.assert_array_equal(arrays["test_images"], pixels[19:])
        np.testing.assert_array_equal(arrays["train_labels"], labels[:19])
        np.testing.assert_array_equal(arrays["test_labels"], labels[19:])
        assert (arrays["train_images"].dtype, arrays["train_labels"].dtype) == (np.uint8, np.int64)
        assert arrays["classes"].tolist() == ["a", "b"]


def test_unpacked_digits_are_the_digits(tmp_path: Path) -> None:
    made_up(tmp_path)
    path = unpack(tmp_path, tmp_path / "data")["digits"]
    for split in ("train", "test"):
        unpacked, direct = load_images(path, split), load_images("digits", split)
        assert isinstance(unpacked, ImageSet)
        assert isinstance(direct, ImageSet)
        assert torch.equal(unpacked.images, direct.images)
        assert unpacked.classes == direct.classes


def test_the_command_reports_and_leaves_alone_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_up(tmp_path)
    command = [sys.executable, SCRIPT, str(tmp_path), str(tmp_path / "data")]
    output = children.run(command, check=True)
    assert "cifar10: 19 train, 3 test, 2 classes" in output.stdout
    assert "tinyimagenet100_32: not in" in output.stdout
    assert "digits: 1,297 train, 500 test, 10 classes" in output.stdout
    assert output.stderr == ""
    before = (tmp_path / "data" / "cifar10.npz").stat().st_mtime_ns
    main([str(tmp_path), str(tmp_path / "data")])
    assert capsys.readouterr().out == output.stdout
    assert (tmp_path / "data" / "cifar10.npz").stat().st_mtime_ns == before
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["cifar10.npz", "digits.npz"]


def test_a_source_without_sets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"has none of cifar10/, tinyimagenet100_32/: give the folder that HARDNEG"
    ):
        unpack(tmp_path, tmp_path / "data")
    with pytest.raises(SystemExit, match="error: source="):
        main([str(tmp_path), str(tmp_path / "data")])
    assert not (tmp_path / "data").exists()


def test_a_part_that_lacks_pictures_or_arrays_is_refused(tmp_path: Path) -> None:
    pixels = RANDOM.integers(0, 256, (10, 4, 4, 3), dtype=np.uint8)
    pack(tmp_path / "x" / "part.npz", pixels, np.zeros(9))
    with pytest.raises(ValueError, match="holds 10 pictures and 9 labels where 10 are announced"):
        read_packed(tmp_path / "x" / "part.npz")
    np.savez(tmp_path / "plain.npz", images=pixels)
    with pytest.raises(ValueError, match="lacks blob, classes, labels, offsets, shape"):
        read_packed(tmp_path / "plain.npz")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    if not REAL:
        pytest.skip("HARDNEG_DATA is not set: it names the folder of the packed real sets")
    return unpack(Path(REAL), tmp_path_factory.mktemp("data"))


def test_cifar10_has_its_published_counts_and_means(real: dict[str, Path]) -> None:
    train, test = (load_images(real["cifar10"], split, labels=True) for split in ("train", "test"))
    assert isinstance(train, ImageSet)
    assert train.labels is not None
    assert test.labels is not None
    assert (len(train), len(test), train.shape) == (50_000, 10_000, (3, 32, 32))
    assert torch.bincount(train.labels).tolist() == [5_000] * 10
    assert torch.bincount(test.labels).tolist() == [1_000] * 10
    assert train.classes[:3] == ("airplane", "automobile", "bird")
    means = train.images.sum(dim=(0, 2, 3), dtype=torch.int64).double() / (50_000 * 32 * 32 * 255)
    assert [round(mean, 4) for mean in means.tolist()] == [0.4914, 0.4822, 0.4465]


def test_tinyimagenet_is_interleaved_by_class(real: dict[str, Path]) -> None:
    train, test = (load_images(real["tinyimagenet100_32"], split, labels=True) for split in ("train", "test"))
    assert train.labels is not None
    assert test.labels is not None
    assert (len(train), len(test), train.shape, len(train.classes)) == (50_000, 5_000, (3, 32, 32), 100)
    assert torch.equal(train.labels, torch.arange(50_000) % 100)
    assert torch.bincount(test.labels).tolist() == [50] * 100

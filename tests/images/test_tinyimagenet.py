"""TinyImageNet is read from the zip and from the folder alike, as Pillow decodes it."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hardneg.images import tinyimagenet

CLASSES = {"n02": "bee", "n01": "ant, emmet"}


def encoded(seed: int, mode: str = "RGB", side: int = 64) -> bytes:
    draws = np.random.default_rng(seed)
    pixels = draws.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((side, side)).convert(mode).save(file := io.BytesIO(), "JPEG")
    return file.getvalue()


def files() -> dict[str, bytes]:
    made = {}
    for place, each in enumerate(CLASSES):
        for number in range(3):
            made[f"train/{each}/images/{each}_{number}.JPEG"] = encoded(10 * place + number, "L" if number else "RGB")
        made[f"train/{each}/{each}_boxes.txt"] = b"a\t0\t0\t1\t1\n"
    for number in range(4):
        made[f"val/images/val_{number}.JPEG"] = encoded(100 + number)
    lines = [f"val_{number}.JPEG\t{'n01' if number else 'n02'}\t0\t0\t1\t1" for number in range(4)]
    made["val/val_annotations.txt"] = "\n".join(lines).encode() + b"\n"
    made["test/images/test_0.JPEG"] = encoded(7)
    made["words.txt"] = "".join(f"{key}\t{word}\n" for key, word in CLASSES.items()).encode()
    return made


def zipped(content: dict[str, bytes], path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(f"tiny-imagenet-200/{name}", data)
    return path


def test_the_zip_and_its_folder_give_the_decoded_images(tmp_path: Path) -> None:
    content = files()
    source = zipped(content, tmp_path / "tiny-imagenet-200.zip")
    zipfile.ZipFile(source).extractall(tmp_path)
    expected = [Image.open(io.BytesIO(content[name])).convert("RGB") for name in sorted(content) if "train/" in name
                and name.endswith("JPEG")]  # fmt: skip
    for place in (source, tmp_path / "tiny-imagenet-200", tmp_path):
        found = tinyimagenet.read(place)
        np.testing.assert_array_equal(found["train_images"].transpose(0, 2, 3, 1), np.stack([*map(np.array, expected)]))
        assert found["train_labels"].tolist() == [0, 0, 0, 1, 1, 1]
        assert found["classes"].tolist() == ["ant", "bee"]
        assert found["test_labels"].tolist() == [1, 0, 0, 0]
        first = np.array(Image.open(io.BytesIO(content["val/images/val_0.JPEG"])))
        np.testing.assert_array_equal(found["test_images"][0].transpose(1, 2, 0), first)


def test_classes_of_the_same_word_keep_their_ids(tmp_path: Path) -> None:
    content = files() | {"words.txt": b"n01\tcrane\nn02\tcrane, bird\n"}
    assert tinyimagenet.read(zipped(content, tmp_path / "x.zip"))["classes"].tolist() == ["n01", "n02"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"val/val_annotations.txt": None}, "lacks val/val_annotations.txt"),
        ({"val/val_annotations.txt": b"val_0.JPEG n01\n"}, "lacks val/val_annotations.txt"),
        ({"val/images/val_2.JPEG": None}, "lacks val/images/val_2.JPEG"),
        ({"val/val_annotations.txt": b"val_0.JPEG\tn07\n"}, "lacks val/images/val_0.JPEG, or training images of its"),
        ({name: None for name in files() if "train" in name}, "lacks train/CLASS/images"),
        ({"val/images/val_1.JPEG": b"no image"}, "more than 1 % are broken|More than 1 % are broken"),
        ({"val/images/val_1.JPEG": encoded(0, side=32)}, "More than 1 % are broken"),
    ],
)
def test_an_incomplete_archive_is_refused(changed: dict[str, bytes | None], message: str, tmp_path: Path) -> None:
    content = {name: data for name, data in {**files(), **changed}.items() if data is not None}
    with pytest.raises(ValueError, match=message):
        tinyimagenet.read(zipped(content, tmp_path / "tiny.zip"))


def test_a_broken_zip_is_refused(tmp_path: Path) -> None:
    whole = zipped(files(), tmp_path / "whole.zip").read_bytes()
    (tmp_path / "cut.zip").write_bytes(whole[:5000])
    with pytest.raises(ValueError, match=r"cut.zip cannot be read \(.*\): download it again"):
        tinyimagenet.read(tmp_path / "cut.zip")

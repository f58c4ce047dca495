"""Reading images: every kind of source gives the same pixels, labels and order, or an error that says what to do."""

import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("PIL", reason='decoding images needs pip install "hardneg[train]"')
from PIL import Image

from hardneg.images import ImageSet, StreamedImages, load_images

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 10, 8, 3), dtype=np.uint8)  # N, H, W, C
LABELS = np.array([0, 0, 0, 1, 1, 1])
CLASSES = ("cat", "dog")


def write_folder(root: Path, pixels: np.ndarray = PIXELS, labels: np.ndarray = LABELS) -> Path:
    for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        path = root / CLASSES[label] / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return root


def write_npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def png(image: np.ndarray) -> bytes:
    Image.fromarray(image).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def write_parquet(path: Path, pixels: np.ndarray = PIXELS, labels: Any = LABELS, named: bool = True) -> Path:
    """As the Hugging Face hub stores images."""
    arrow = pytest.importorskip("pyarrow", reason='parquet needs pip install "hardneg[mine]"')
    import pyarrow.parquet

    rows = [{"bytes": png(image), "path": None} for image in pixels]
    image_type = arrow.struct({"bytes": arrow.binary(), "path": arrow.string()})
    table = arrow.table({"image": arrow.array(rows, image_type), "label": arrow.array(labels, arrow.int64())})
    if named:
        features = {"image": {"_type": "Image"}, "label": {"names": list(CLASSES), "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(table, path, row_group_size=4)
    return path


def saved_dataset(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets", reason="saved datasets need pip install datasets")
    return datasets.Dataset.from_parquet(str(write_parquet(folder / "made.parquet")), cache_dir=str(folder / "cache"))


def in_memory(source: str | Path, **options: Any) -> ImageSet:
    images = load_images(source, **options)
    assert isinstance(images, ImageSet)
    return images


def on_demand(source: str | Path, **options: Any) -> StreamedImages:
    images = load_images(source, in_memory=0, **options)
    assert isinstance(images, StreamedImages)
    return images


def write_saved(folder: Path) -> Path:
    saved_dataset(folder).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def write_saved_with_splits(folder: Path) -> Path:
    rows = saved_dataset(folder)
    import datasets

    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def write_arrow(folder: Path) -> Path:
    return next(write_saved(folder).glob("*.arrow"))


def write_shards(folder: Path) -> Path:
    write_parquet(folder / "set" / "data" / "train-00000-of-00002.parquet", PIXELS[:5], LABELS[:5])
    write_parquet(folder / "set" / "data" / "train-00001-of-00002.parquet", PIXELS[5:], LABELS[5:])
    write_parquet(folder / "set" / "data" / "test-00000-of-00001.parquet", PIXELS[:1], LABELS[:1])
    return folder / "set"


def write_hub(folder: Path) -> str:
    pytest.importorskip("datasets", reason="the hub needs pip install datasets")
    return f"hf:{write_shards(folder)}"  # the hub's own layout in a local folder: the same code without the network


ENCODED: dict[str, Callable[[Path], Path | str]] = {
    "folder": lambda folder: write_folder(folder / "animals"),
    "folder of splits": lambda folder: write_folder(folder / "animals" / "train").parent,
    "parquet": lambda folder: write_parquet(folder / "animals.parquet"),
    "shards of parquet": write_shards,
    "saved dataset": write_saved,
    "saved splits": write_saved_with_splits,
    "arrow": write_arrow,
    "hub": write_hub,
}


@pytest.fixture(autouse=True)
def _datasets_stays_offline_and_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("datasets") is not None:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path.with_name(f"{tmp_path.name}-cache")))
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


# --- every source of encoded images ---


@pytest.mark.parametrize("kind", ENCODED)
def test_a_source_gives_its_pixels_labels_and_classes(kind: str, tmp_path: Path) -> None:
    images = in_memory(ENCODED[kind](tmp_path), labels=True)
    assert_close(images.images, torch.from_numpy(PIXELS).permute(0, 3, 1, 2))
    assert images.labels is not None
    assert images.labels.tolist() == LABELS.tolist()
    assert images.classes == CLASSES
    assert images.images.is_contiguous()
    assert images.name.endswith("-train")


@pytest.mark.parametrize("kind", ENCODED)
def test_a_source_streams_what_it_would_hold_in_memory(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="streaming parquet needs pip install datasets")
    source = ENCODED[kind](tmp_path)
    images = pickle.loads(pickle.dumps(on_demand(source, size=7, labels=True)))
    expected = in_memory(source, size=7)
    assert images.labels.tolist() == LABELS.tolist()
    assert (len(images), images.shape, images.classes, images.name) == (6, (3, 7, 7), CLASSES, expected.name)
    for index in (5, 0, 3, 3, 1):
        assert images[index][0] == index
        assert_close(images[index][1], expected.images[index])


def test_the_limit_of_memory_is_in_bytes_of_decoded_images(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "animals")
    assert isinstance(load_images(source, in_memory=PIXELS.size), ImageSet)
    assert isinstance(load_images(source, in_memory=PIXELS.size - 1), StreamedImages)
    assert isinstance(load_images(source, in_memory=PIXELS.size - 1, size=4), ImageSet)


# --- folders ---


def test_a_flat_folder_has_no_labels_and_a_sorted_order(tmp_path: Path) -> None:
    for number in (3, 1, 0, 2):
        Image.fromarray(PIXELS[number]).save(tmp_path / f"{number}.png")
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / "._0.png").write_bytes(b"what macOS leaves behind")
    images = in_memory(tmp_path)
    assert_close(images.images, torch.from_numpy(PIXELS[:4]).permute(0, 3, 1, 2))
    assert images.labels is None
    assert images.classes == ()
    with pytest.raises(
        ValueError, match=r"labels=True, but .* has no labels for split='train': use one folder per class"
    ):
        load_images(tmp_path, labels=True)


def test_a_class_has_the_same_number_in_a_split_that_lacks_another(tmp_path: Path) -> None:
    write_folder(tmp_path / "train")
    write_folder(tmp_path / "test", PIXELS[3:], LABELS[3:])  # dogs only
    images = in_memory(tmp_path, split="test")
    assert images.labels is not None
    assert (images.labels.tolist(), images.classes) == ([1, 1, 1], CLASSES)


def test_files_beside_the_class_folders_have_no_class(tmp_path: Path) -> None:
    write_folder(tmp_path)
    Image.fromarray(PIXELS[0]).save(tmp_path / "loose.png")
    images = in_memory(tmp_path, labels=True)
    assert images.labels is not None
    assert images.labels.tolist() == [0, 0, 0, 1, 1, 1, -1]


def test_folders_within_a_class_folder_belong_to_the_class(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "dog" / "more").mkdir()
    Image.fromarray(PIXELS[0]).save(tmp_path / "dog" / "more" / "a.JPG")
    images = in_memory(tmp_path)
    assert images.labels is not None
    assert images.labels.tolist() == [0, 0, 0, 1, 1, 1, 1]


def test_a_level_of_folders_above_the_classes_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path / "set" / "photos")
    with pytest.warns(UserWarning, match=r"has one class, 'photos', whose folder contains cat, dog: .*set.photos"):
        assert load_images(tmp_path / "set").classes == ("photos",)


def test_grey_images_stay_grey_only_among_themselves(tmp_path: Path) -> None:
    for number in range(3):
        Image.fromarray(PIXELS[number, :, :, 0]).save(tmp_path / f"{number}.png")
    assert_close(in_memory(tmp_path).images, torch.from_numpy(PIXELS[:3, :, :, 0])[:, None])
    Image.fromarray(PIXELS[3]).save(tmp_path / "3.png")
    mixed = in_memory(tmp_path).images
    assert mixed.shape == (4, 3, 10, 8)
    assert_close(mixed[:3], torch.from_numpy(PIXELS[:3, :, :, 0])[:, None].expand(3, 3, 10, 8))


def test_images_of_different_sizes_need_a_size(tmp_path: Path) -> None:
    write_folder(tmp_path)
    Image.new("RGB", (30, 20)).save(tmp_path / "dog" / "large.png")
    with pytest.raises(ValueError, match=r"differ in size.*0000.png is 10x8, .*large.png is 20x30 \(HxW\); pass size="):
        load_images(tmp_path)
    assert in_memory(tmp_path, size=8).images.shape == (7, 3, 8, 8)


def linked(link: Path, target: Path | str) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    try:
        link.symlink_to(target)
    except OSError:
        pytest.skip("links cannot be made here")


@pytest.mark.parametrize(
    ("link", "target"),
    [("self", "."), ("self", "../animals"), ("up", ".."), ("dog/more", "../cat"), ("dog/again", "../../animals"),
     ("cats", "cat"), ("dog/copy.png", "../cat/0000.png")],
)  # fmt: skip
def test_a_link_back_into_the_folder_is_not_followed(link: str, target: str, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "animals")
    Image.fromarray(PIXELS[0]).save(tmp_path / "beside.png")
    linked(source / link, target)
    with pytest.warns(UserWarning, match=rf"animals: links not followed, .* already included: .*{Path(link).name}"):
        images = in_memory(source)
    assert_close(images.images, torch.from_numpy(PIXELS).permute(0, 3, 1, 2))
    assert images.labels is not None
    assert (images.labels.tolist(), images.classes) == (LABELS.tolist(), CLASSES)


def test_links_to_folders_and_files_elsewhere_are_followed(tmp_path: Path) -> None:
    elsewhere = write_folder(tmp_path / "elsewhere")
    source = tmp_path / "animals"
    linked(source / "cat", elsewhere / "cat")
    for number in (3, 4, 5):  # as git-annex keeps files: in a hidden folder
        path = source / ".store" / f"{number:04}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes((elsewhere / "dog" / f"{number:04}.png").read_bytes())
        linked(source / "dog" / f"{number:04}.png", f"../.store/{number:04}")
    images = in_memory(source)
    assert_close(images.images, torch.from_numpy(PIXELS).permute(0, 3, 1, 2))
    assert images.labels is not None
    assert (images.labels.tolist(), images.classes) == (LABELS.tolist(), CLASSES)
    linked(tmp_path / "link", source)
    assert len(load_images(tmp_path / "link")) == 6


def test_a_file_that_two_links_lead_to_is_read_once(tmp_path: Path) -> None:
    elsewhere = write_folder(tmp_path / "elsewhere")
    linked(elsewhere / "cat" / "loop", elsewhere)  # a loop that begins outside
    linked(tmp_path / "animals" / "cat", elsewhere / "cat")
    linked(tmp_path / "animals" / "dog", elsewhere / "dog")
    linked(tmp_path / "animals" / "zoo", elsewhere / "dog")
    with pytest.warns(UserWarning, match=r"not followed.*zoo"):
        images = in_memory(tmp_path / "animals")
    assert_close(images.images, torch.from_numpy(PIXELS).permute(0, 3, 1, 2))
    assert images.classes == CLASSES


def test_a_link_in_a_folder_of_parquet_does_not_double_its_files(tmp_path: Path) -> None:
    write_parquet(tmp_path / "set" / "a.parquet")
    linked(tmp_path / "set" / "0", ".")
    linked(tmp_path / "set" / "0.parquet", "a.parquet")
    assert len(load_images(tmp_path / "set")) == 6


def hundreds(folder: Path, broken: int) -> Path:
    """300 JPEGs, the first few of them cut short."""
    for number in range(300):
        path = folder / f"{number:03}.jpg"
        Image.new("RGB", (8, 8), (number % 256, 0, 0)).save(path)
        if number < broken:
            path.write_bytes(path.read_bytes()[:-40])
    return folder


@pytest.mark.parametrize("size", [None, 8])
def test_a_few_broken_images_are_skipped_counted_and_named(size: int | None, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"skipped 3 of 300 images of .*000.jpg \(.*001.jpg \(") as told:
        images = load_images(hundreds(tmp_path, broken=3), size=size)
    assert len(images) == 297
    assert len(told) == 1


@pytest.mark.parametrize("size", [None, 8])
def test_many_broken_images_stop(size: int | None, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"stopped: 4 of 300 images of .*More than 1 % are broken: repair or remove"):
        load_images(hundreds(tmp_path, broken=4), size=size)


def test_labels_stay_with_their_images_when_one_is_broken(tmp_path: Path) -> None:
    write_folder(tmp_path, np.tile(PIXELS, (40, 1, 1, 1)), np.repeat([0, 1], 120))
    (tmp_path / "cat" / "0007.png").write_bytes(b"broken")
    with pytest.warns(UserWarning, match="skipped 1 of 240"):
        images = in_memory(tmp_path)
    assert images.labels is not None
    assert torch.bincount(images.labels).tolist() == [119, 120]


# --- arrays ---


@pytest.mark.parametrize(
    ("stored", "shape"),
    [
        (PIXELS, (3, 10, 8)),
        (PIXELS.transpose(0, 3, 1, 2), (3, 10, 8)),
        (PIXELS[..., 0], (1, 10, 8)),
        (PIXELS[..., :1], (1, 10, 8)),
        (PIXELS[..., :2], (2, 10, 8)),
    ],
)
def test_npz_keeps_its_channels_in_either_layout(
    stored: np.ndarray, shape: tuple[int, int, int], tmp_path: Path
) -> None:
    images = in_memory(write_npz(tmp_path / "set.npz", images=stored, labels=LABELS.astype(np.uint8)), labels=True)
    assert images.shape == shape
    assert_close(images.images, torch.from_numpy(PIXELS[..., : shape[0]]).permute(0, 3, 1, 2).contiguous())
    assert images.labels is not None
    assert images.labels.dtype == torch.int64
    assert (images.labels.tolist(), images.classes) == (LABELS.tolist(), ("0", "1"))


def test_npz_splits_agree_on_the_classes(tmp_path: Path) -> None:
    arrays = {
        "train_images": PIXELS,
        "train_labels": LABELS,
        "test_images": PIXELS[:1],
        "test_labels": LABELS[:1, None],
    }
    unnamed, named = write_npz(tmp_path / "a.npz", **arrays), write_npz(tmp_path / "b.npz", **arrays, classes=CLASSES)
    assert in_memory(unnamed, split="test").classes == ("0", "1")
    assert in_memory(named, split="test").classes == CLASSES
    assert (len(load_images(named)), len(load_images(named, split="test"))) == (6, 1)


def test_npz_is_resized_on_request(tmp_path: Path) -> None:
    images = in_memory(write_npz(tmp_path / "set.npz", images=PIXELS), size=4)
    assert images.images.shape == (6, 3, 4, 4)
    assert_close(images.images, in_memory(write_folder(tmp_path / "folder"), size=4).images)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"images": PIXELS / 255}, {}, r"must be uint8.*got float64 of shape \(6, 10, 8, 3\): convert pixels in 0..1"),
        ({"images": PIXELS[0, 0]}, {}, r"got uint8 of shape \(8, 3\)"),
        ({"images": PIXELS[:0]}, {}, r"not empty, got uint8 of shape \(0, 10, 8, 3\)"),
        ({"images": PIXELS, "labels": LABELS[:5]}, {}, r"must be 6 integers, got int64 of shape \(5,\)"),
        ({"images": PIXELS, "labels": np.array(["cat"] * 6)}, {}, r"must be 6 integers, got <U3.*belong in 'classes'"),
        (
            {"images": PIXELS, "labels": LABELS, "classes": ["cat"]},
            {},
            r"number one of the 1 classes, got values from 0",
        ),
        ({"images": PIXELS, "labels": LABELS.astype(object)}, {}, r"cannot be read \(Object arrays.*plain arrays"),
        ({"images": PIXELS}, {"labels": True}, r"labels=True, but .* has no labels.*an array 'labels'"),
        ({"train_images": PIXELS, "labels": LABELS}, {}, r"'labels' .* for split='train': name them 'train_labels'"),
        ({"images": PIXELS, "train_labels": LABELS}, {}, r"'train_labels' .* for split='train': name them 'labels'"),
        ({"images": PIXELS}, {"in_memory": 100}, r"above in_memory=100, and .npz cannot be streamed: raise in_memory"),
        ({"train_images": PIXELS}, {"split": "val"}, r"split='val' is not in .*: it has 'train'; pass one of them"),
        ({"x": PIXELS}, {}, r"needs 'images' or 'train_images', got x"),
        ({"blob": PIXELS}, {}, r"needs 'images' or 'train_images', got blob"),
    ],
)
def test_a_malformed_npz_is_refused(arrays: Any, options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load_images(write_npz(tmp_path / "set.npz", **arrays), **options)


def test_half_an_npz_is_refused(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "set.npz", images=PIXELS)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"is not an .npz file, or only a part of one"):
        load_images(path)


def test_digits_are_divided_once_and_for_all() -> None:
    sklearn = pytest.importorskip("sklearn.datasets", reason="digits come with scikit-learn")
    train, test = in_memory("digits"), in_memory("digits", split="test", labels=True)
    assert (len(train), len(test), train.shape) == (1297, 500, (1, 8, 8))
    assert train.labels is not None
    assert test.labels is not None
    # Together they are scikit-learn's digits, each once, pixels 0..16 times 15.
    ours = torch.cat([train.images, test.images]).flatten(1).double() / 15
    ours = torch.cat([ours, torch.cat([train.labels, test.labels])[:, None].double()], dim=1)
    data = sklearn.load_digits()
    theirs = torch.from_numpy(np.concatenate([data.data, data.target[:, None]], axis=1))
    assert_close(ours.unique(dim=0, return_counts=True), theirs.unique(dim=0, return_counts=True))
    with pytest.raises(ValueError, match="split='tets' is not known: did you mean 'test'"):
        load_images("digits", split="tets")


# --- parquet ---


def test_parquet_without_notes_is_understood(tmp_path: Path) -> None:
    images = in_memory(write_parquet(tmp_path / "set.parquet", named=False), labels=True)
    assert_close(images.images, torch.from_numpy(PIXELS).permute(0, 3, 1, 2))
    assert images.classes == ("0", "1")


def test_a_missing_label_is_unknown(tmp_path: Path) -> None:
    images = in_memory(write_parquet(tmp_path / "set.parquet", labels=[0, None, 1, 1, -1, 0]))
    assert images.labels is not None
    assert images.labels.tolist() == [0, -1, 1, 1, -1, 0]


def stringly(path: Path, labels: Any, column: str = "label", metadata: Any = None) -> Path:
    """Parquet with this array of labels and as many images."""
    arrow = pytest.importorskip("pyarrow", reason='parquet needs pip install "hardneg[mine]"')
    import pyarrow.parquet

    pixels = [png(PIXELS[number % 6]) for number in range(len(labels))]
    path.parent.mkdir(parents=True, exist_ok=True)
    table = arrow.table({"image": arrow.array(pixels, arrow.binary()), column: labels})
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), path)
    return path


NAMES = ["dog", "cat", None, "dog", "", "ant"]


@pytest.mark.parametrize(
    ("labels", "numbers", "classes"),
    [
        (lambda pa: pa.array(NAMES), [2, 1, -1, 2, -1, 0], ("ant", "cat", "dog")),
        (lambda pa: pa.array(NAMES, pa.large_string()), [2, 1, -1, 2, -1, 0], ("ant", "cat", "dog")),
        (lambda pa: pa.array(NAMES).dictionary_encode(), [2, 1, -1, 2, -1, 0], ("ant", "cat", "dog")),
        (lambda pa: pa.array([True, False, None]), [1, 0, -1], ("false", "true")),
        # What pandas makes of integers with gaps.
        (lambda pa: pa.array([2.0, float("nan"), None, 0.0]), [2, -1, -1, 0], ("0", "1", "2")),
        (lambda pa: pa.array([3, 0], pa.uint8()), [3, 0], ("0", "1", "2", "3")),
    ],
)
def test_labels_of_every_kind_become_classes(labels: Any, numbers: list[int], classes: Any, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason='parquet needs pip install "hardneg[mine]"')
    images = in_memory(stringly(tmp_path / "set.parquet", labels(arrow)), labels=True)
    assert images.labels is not None
    assert (images.labels.tolist(), images.classes) == (numbers, classes)


@pytest.mark.parametrize("kind", ["parquet", "saved", "hub"])
def test_named_labels_have_one_number_in_all_splits(kind: str, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason='parquet needs pip install "hardneg[mine]"')
    source: Path | str = tmp_path / "set"
    files = {"train": str(stringly(tmp_path / "set" / "train.parquet", arrow.array(["cat", "ant"])))}
    files["test"] = str(stringly(tmp_path / "set" / "test.parquet", arrow.array(["dog", "cat"])))
    if kind != "parquet":
        datasets = pytest.importorskip("datasets", reason="saved datasets need pip install datasets")
    if kind == "hub":
        source = f"hf:{source}"
    if kind == "saved":
        splits = {name: datasets.Dataset.from_parquet(file) for name, file in files.items()}
        source = tmp_path / "saved"
        datasets.DatasetDict(splits).save_to_disk(str(source))
    train, test = (in_memory(source, split=split) for split in ("train", "test"))
    assert train.classes == test.classes == ("ant", "cat", "dog")
    assert train.labels is not None
    assert test.labels is not None
    assert (train.labels.tolist(), test.labels.tolist()) == ([1, 0], [2, 1])


def test_labels_that_name_no_classes_are_reported(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason='parquet needs pip install "hardneg[mine]"')
    for labels in (arrow.array([0.5, 1.0]), arrow.array([[1], [2]])):
        with pytest.warns(UserWarning, match=r"column 'label' of .*set.parquet holds (double|list.*), which cannot"):
            images = in_memory(stringly(tmp_path / "set.parquet", labels))
        assert images.labels is None


def test_shards_that_disagree_on_the_labels_are_refused(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason='parquet needs pip install "hardneg[mine]"')
    stringly(tmp_path / "set" / "0.parquet", arrow.array(["a"]), column="caption")
    stringly(tmp_path / "set" / "1.parquet", arrow.array([1]))
    with pytest.raises(ValueError, match=r"1.parquet .*label.* differ from those of .*0.parquet"):
        load_images(tmp_path / "set")


@pytest.mark.parametrize("names", [("train", "test"), ("train-0", "train-1")])
def test_numbers_and_names_in_one_column_of_labels_are_refused(names: tuple[str, str], tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason='parquet needs pip install "hardneg[mine]"')
    stringly(tmp_path / "set" / f"{names[0]}.parquet", arrow.array([0, 1]))
    stringly(tmp_path / "set" / f"{names[1]}.parquet", arrow.array(["cat", "dog"]))
    with pytest.raises(ValueError, match=r"(?s)set.*: (use one type|write all files.*|download or write it again)$"):
        load_images(tmp_path / "set", split=names[1].partition("-")[0])


@pytest.mark.parametrize("notes", ["[]", "{", '{"info": {"features": [1]}}', '{"info": {"features": {"label": 3}}}'])
def test_malformed_notes_in_a_file_are_passed_over(notes: str, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason='parquet needs pip install "hardneg[mine]"')
    path = stringly(tmp_path / "set.parquet", arrow.array([0, 1]), metadata={"huggingface": notes})
    assert in_memory(path).classes == ("0", "1")


def test_many_shards_keep_their_order_when_streamed(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="streaming parquet needs pip install datasets")
    for shard in range(12):
        write_parquet(tmp_path / "set" / f"{shard}.parquet", np.full((2, 4, 4, 3), shard, np.uint8), [shard % 2] * 2)
    images, expected = on_demand(tmp_path / "set"), in_memory(tmp_path / "set")
    assert images.labels is not None
    for index in range(24):
        assert_close(images[index][1], expected.images[index])
        assert int(images.labels[index]) == int(images[index][1][0, 0, 0]) % 2


def test_a_broken_row_is_skipped_and_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "set.parquet", np.tile(PIXELS, (20, 1, 1, 1)), np.tile(LABELS, 20))
    import pyarrow as arrow
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    rows = table.column("image").to_pylist()
    rows[3] = {"bytes": None, "path": None}
    table = table.set_column(0, "image", arrow.array(rows, table.column("image").type))
    pyarrow.parquet.write_table(table, path)
    with pytest.warns(UserWarning, match=r"skipped 1 of 120 .* row 3 \(the row holds no image\)"):
        images = in_memory(path)
    assert images.labels is not None
    assert images.labels.tolist() == np.delete(np.tile(LABELS, 20), 3).tolist()


def test_parquet_may_name_image_files_beside_it(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason='parquet needs pip install "hardneg[mine]"')
    import pyarrow.parquet

    write_folder(tmp_path)
    rows = [{"bytes": None, "path": f"{CLASSES[label]}/{n:04}.png"} for n, label in enumerate(LABELS)]
    kind = arrow.struct({"bytes": arrow.binary(), "path": arrow.string()})
    pyarrow.parquet.write_table(arrow.table({"image": arrow.array(rows, kind)}), tmp_path / "set.parquet")
    assert_close(in_memory(tmp_path / "set.parquet").images, torch.from_numpy(PIXELS).permute(0, 3, 1, 2))


@pytest.mark.parametrize("load", [in_memory, on_demand])
def test_each_row_names_a_file_beside_its_own_shard_or_below_the_root(load: Any, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason='parquet needs pip install "hardneg[mine]"')
    if load is on_demand:
        pytest.importorskip("datasets", reason="streaming parquet needs pip install datasets")
    import pyarrow.parquet

    kind = arrow.struct({"bytes": arrow.binary(), "path": arrow.string()})
    names = {"p1": ["a.png", "a.png"], "p2": [], "p3": ["a.png", "p1/a.png", "../b.png"]}
    for number, (folder, paths) in enumerate(names.items()):
        (tmp_path / "set" / folder).mkdir(parents=True)
        Image.fromarray(PIXELS[number]).save(tmp_path / "set" / folder / "a.png")
        rows = arrow.array([{"bytes": None, "path": path} for path in paths], kind)
        pyarrow.parquet.write_table(arrow.table({"image": rows}), tmp_path / "set" / folder / "x.parquet")
    Image.fromarray(PIXELS[3]).save(tmp_path / "set" / "b.png")
    images = load(tmp_path / "set")
    read = images.images if load is in_memory else torch.stack([images[row][1] for row in range(5)])
    assert_close(read, torch.from_numpy(PIXELS[[0, 0, 2, 0, 3]]).permute(0, 3, 1, 2))


@pytest.mark.parametrize("way", ["absolute", "dots", "link"])
@pytest.mark.parametrize("kind", ["parquet", "arrow", "saved", "hub"])
def test_a_row_opens_no_file_outside_the_folder_of_the_data(kind: str, way: str, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason='parquet needs pip install "hardneg[mine]"')
    import pyarrow.parquet

    secret = tmp_path / "secret.png"
    Image.fromarray(PIXELS[0]).save(secret)
    folder = tmp_path / "set"
    folder.mkdir()
    path = {"absolute": str(secret), "dots": "../secret.png", "link": "inside.png"}[way]
    struct = arrow.struct({"bytes": arrow.binary(), "path": arrow.string()})
    rows = arrow.array([{"bytes": None, "path": path}] * 2, struct)
    pyarrow.parquet.write_table(arrow.table({"image": rows}), folder / "train.parquet")
    source: Path | str = folder / "train.parquet"
    if kind != "parquet":
        datasets = pytest.importorskip("datasets", reason="arrow needs pip install datasets")
    if kind == "hub":
        source = f"hf:{folder}"
    if kind in ("arrow", "saved"):
        source = folder / "saved"
        made = datasets.Dataset(arrow.table({"image": rows}))
        with pytest.MonkeyPatch.context() as patch:  # an honest library would put the file's bytes in
            patch.setattr("datasets.arrow_dataset.embed_table_storage", lambda table, **options: table)
            made.save_to_disk(str(source))
        source = next(source.glob("*.arrow")) if kind == "arrow" else source
    if way == "link":
        linked((source if kind == "saved" else Path(str(source).removeprefix("hf:")).parent
                if kind != "hub" else folder) / "inside.png", secret)  # type: ignore[operator]  # fmt: skip
    with pytest.raises(ValueError, match=r"outside .*: store the bytes of the image, or move it below that folder"):
        load_images(source)


def test_parquet_without_images_or_in_pieces_is_refused(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason='parquet needs pip install "hardneg[mine]"')
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.table({"text": ["a"], "label": [0]}), tmp_path / "text.parquet")
    with pytest.raises(ValueError, match="has no column of images, only text, label: store encoded images as bytes"):
        load_images(tmp_path / "text.parquet")
    (tmp_path / "half.parquet").write_bytes((tmp_path / "text.parquet").read_bytes()[:50])
    with pytest.raises(ValueError, match=r"half.parquet cannot be read as parquet .*: download or write it again"):
        load_images(tmp_path / "half.parquet")


# --- splits and paths ---


@pytest.mark.parametrize("kind", ["folder of splits", "shards of parquet", "saved splits", "hub"])
def test_an_unknown_split_lists_the_known_ones(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?i)split.*'?valid'?.*train"):
        load_images(ENCODED[kind](tmp_path), split="valid")


@pytest.mark.parametrize("kind", ["folder", "parquet", "shards", "npz", "saved"])
def test_names_of_splits_are_known_in_any_case(kind: str, tmp_path: Path) -> None:
    source = tmp_path / ("set.npz" if kind == "npz" else "set")
    for name, count in (("Train", 4), ("TEST", 2)):
        match kind:
            case "folder":
                write_folder(source / name, PIXELS[-count:], LABELS[-count:])
            case "parquet" | "shards":
                file = source / name / "x.parquet" if kind == "parquet" else source / f"{name}-0.parquet"
                write_parquet(file, PIXELS[-count:], LABELS[-count:])
    if kind == "npz":
        np.savez(source, Train_images=PIXELS[-4:], Train_labels=LABELS[-4:], TEST_images=PIXELS[-2:],
                 TEST_labels=LABELS[-2:], classes=np.array(CLASSES))  # fmt: skip
    if kind == "saved":
        rows = saved_dataset(tmp_path)
        import datasets

        datasets.DatasetDict({"Train": rows.select(range(2, 6)), "TEST": rows.select([4, 5])}).save_to_disk(source)
    train, test = (in_memory(source, split=split, labels=True) for split in ("train", "test"))
    assert train.labels is not None
    assert test.labels is not None
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 1, 1, 1], [1, 1])
    assert train.classes == test.classes == CLASSES


def test_one_split_under_two_names_is_refused(tmp_path: Path) -> None:
    for name in ("Train", "train"):
        write_folder(tmp_path / "set" / name)
    if len(list((tmp_path / "set").iterdir())) < 2:
        pytest.skip("the names of files do not differ in case here")
    with pytest.raises(ValueError, match=r"set' has 'Train' and 'train', which name the same split: keep one"):
        load_images(tmp_path / "set")


IRREGULAR = ("set/cat/x.png", "x.npz", "x.parquet", "x.arrow", "set/x.parquet", "set/state.json", "set/row.png")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX")
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_only_regular_files_are_read(kind: str, tmp_path: Path) -> None:
    """In a process of its own, with a limit on its memory and its time: the open of a FIFO cannot be interrupted."""
    arrow = pytest.importorskip("pyarrow", reason='parquet needs pip install "hardneg[mine]"')
    import pyarrow.parquet

    sources = []
    for number, name in enumerate(IRREGULAR):
        folder = tmp_path / str(number)
        sources.append(str(folder / name.partition("/")[0]))
        write_folder(folder / "set")
        if name == "set/row.png":
            struct = arrow.struct({"bytes": arrow.binary(), "path": arrow.string()})
            rows = arrow.array([{"bytes": None, "path": "row.png"}], struct)
            pyarrow.parquet.write_table(arrow.table({"image": rows}), folder / "set" / "x.parquet")
        if kind == "fifo":
            os.mkfifo(folder / name)
        else:
            (folder / name).symlink_to("/dev/zero")
    code = f"""
import resource, signal
resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
signal.alarm(60)
from hardneg.images import load_images
for source in {sources!r}:
    try:
        load_images(source)
        print(source, "was read")
    except (ValueError, OSError) as error:
        print(error, flush=True)
"""
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert made.returncode == 0, made.stdout + made.stderr[-500:]
    lines = made.stdout.splitlines()
    assert len(lines) == len(IRREGULAR)
    assert all("not a regular file" in line or "outside" in line for line in lines), made.stdout


def test_a_hub_set_with_a_script_is_refused_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="the hub needs pip install datasets")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "set.py").write_text("raise SystemExit('the script ran')")
    with pytest.raises(ValueError, match=r"hf:.*set cannot be loaded by datasets \(.*\): ") as caught:
        load_images(f"hf:{tmp_path / 'set'}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["folder", "parquet", "saved dataset", "arrow"])
def test_a_source_without_splits_is_no_test_set_in_silence(kind: str, tmp_path: Path) -> None:
    source = ENCODED[kind](tmp_path)
    with pytest.warns(UserWarning, match="is not divided into splits, so split='test' is all of it"):
        assert len(load_images(source, split="test")) == 6


def test_a_missing_path_says_what_may_be_given(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"source=.*nowhere' does not exist: give 'digits', 'hf:NAME', an .npz"):
        load_images(tmp_path / "nowhere")


def test_an_empty_folder_and_an_unknown_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"empty has no images: put .bmp, .*.webp files there"):
        load_images(tmp_path / "empty")
    (tmp_path / "set.rar").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is a .rar file, which cannot be read: give 'digits'"):
        load_images(tmp_path / "set.rar")


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_a_size_that_is_none_is_refused(size: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"size must be an integer ≥ 1 or None, got {size}"):
        load_images(tmp_path, size=size)


@pytest.mark.parametrize(
    ("module", "kind", "remedy"),
    [
        ("PIL", "folder", r'PIL is required.*pip install "hardneg\[train\]"'),
        ("pyarrow", "parquet", r'pyarrow is required.*pip install "hardneg\[data\]"'),
        ("datasets", "saved dataset", r'datasets is required.*pip install "hardneg\[data\]"'),
        ("sklearn", "digits", r'sklearn is required.*pip install "hardneg\[train\]"'),
    ],
)
def test_a_missing_library_is_named_with_its_remedy(
    module: str, kind: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "digits" if kind == "digits" else ENCODED[kind](tmp_path)
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=remedy):
        load_images(source)

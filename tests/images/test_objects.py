"""Images passed as Python objects: every kind gives the same pixels, labels and classes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from hardneg.division import Division
from hardneg.images import ImageSet, StreamedImages, load_images, load_split
from hardneg.images.split_names import UndividedWarning, UnknownSplitError

TRAIN = np.random.default_rng(0).integers(0, 256, (20, 6, 5), dtype=np.uint8)  # gray
TEST = np.random.default_rng(1).integers(0, 256, (8, 6, 5), dtype=np.uint8)
TRAIN_LABELS, TEST_LABELS = np.arange(20) % 2, np.arange(8) % 2


def image_set(pixels: np.ndarray, labels: np.ndarray) -> ImageSet:
    return ImageSet(torch.from_numpy(pixels)[:, None], torch.from_numpy(labels), ("0", "1"))


def by_function(split: str) -> tuple[np.ndarray, np.ndarray] | None:
    return {"train": (TRAIN, TRAIN_LABELS), "test": (TEST, TEST_LABELS)}.get(split)


DIVIDED: dict[str, Callable[[], Any]] = {
    "mapping to sets": lambda: {"train": image_set(TRAIN, TRAIN_LABELS), "test": image_set(TEST, TEST_LABELS)},
    "mapping to arrays and labels": lambda: {"train": (TRAIN, TRAIN_LABELS), "test": (TEST, TEST_LABELS)},
    "mapping to tensors, in capitals": lambda: {
        "Train": (torch.from_numpy(TRAIN), torch.from_numpy(TRAIN_LABELS)),
        "TEST": (torch.from_numpy(TEST), TEST_LABELS.tolist()),
    },
    "function of the split": lambda: by_function,
}


@pytest.mark.parametrize("kind", DIVIDED)
def test_both_splits_of_an_object_are_loaded(kind: str) -> None:
    for split, pixels, labels in (("train", TRAIN, TRAIN_LABELS), ("test", TEST, TEST_LABELS)):
        images = load_images(DIVIDED[kind](), split, labels=True)
        assert isinstance(images, ImageSet)
        assert_close(images.images, torch.from_numpy(pixels)[:, None])
        assert_close(images.labels, torch.from_numpy(labels))
        assert images.classes == ("0", "1")
        divided = load_split(DIVIDED[kind](), split, labels=True)
        assert isinstance(divided, ImageSet)
        assert_close(divided.images, images.images)
        assert split == "test" or (divided.division is not None and divided.division.test == "test")


UNDIVIDED: dict[str, Callable[[], Any]] = {
    "set": lambda: image_set(TRAIN, TRAIN_LABELS),
    "array and labels": lambda: (TRAIN, TRAIN_LABELS),
    "mapping without a test part": lambda: {"train": (TRAIN, TRAIN_LABELS)},
    "function without a test part": lambda: lambda split: (TRAIN, TRAIN_LABELS) if split == "train" else None,
}


@pytest.mark.parametrize("kind", UNDIVIDED)
def test_a_fifth_of_each_class_is_held_out_of_an_object_without_test_part(kind: str) -> None:
    train, test = (load_split(UNDIVIDED[kind](), split, labels=True) for split in ("train", "test"))
    assert isinstance(train, ImageSet)
    assert isinstance(test, ImageSet)
    assert (len(train), len(test)) == (16, 4)
    assert test.labels is not None
    assert test.labels.bincount().tolist() == [2, 2]
    assert train.division is not None
    assert train.division.test == Division.HELD_OUT
    rows = sorted(image.numpy().tobytes() for part in (train, test) for image in part.images)
    assert rows == sorted(image.tobytes() for image in TRAIN)


def test_arrays_may_be_gray_channels_first_or_channels_last_and_need_no_labels() -> None:
    color = np.random.default_rng(0).integers(0, 256, (4, 6, 5, 3), dtype=np.uint8)
    expected = torch.from_numpy(color).permute(0, 3, 1, 2)
    read_only = color.copy()
    read_only.flags.writeable = False
    for array in (color, np.moveaxis(color, 3, 1), torch.from_numpy(color), read_only, color[::-1].copy()[::-1]):
        images = load_images(array)
        assert isinstance(images, ImageSet)
        assert images.labels is None
        assert_close(images.images, expected)
    gray = load_images(TRAIN)
    assert isinstance(gray, ImageSet)
    assert gray.shape == (1, 6, 5)


def test_images_of_an_object_are_resized() -> None:
    assert load_images(TRAIN, size=4).shape == (1, 4, 4)


class Files:
    """Four gray images in memory."""

    def __len__(self) -> int:
        return 4

    def place(self, index: int) -> str:
        return f"image {index}"

    def open(self, index: int) -> Any:
        import io

        from PIL import Image

        Image.fromarray(TRAIN[index]).save(file := io.BytesIO(), "PNG")
        return file


def test_a_streamed_set_stays_streamed() -> None:
    streamed = StreamedImages(Files(), (1, 6, 5), labels=torch.tensor([0, 1, 0, 1]), classes=("0", "1"))
    assert load_images(streamed) is streamed
    assert load_images({"train": streamed}) is streamed
    assert isinstance(load_split({"train": streamed, "test": streamed}, "train"), StreamedImages)
    assert streamed.division is None  # the object is not changed


def test_an_item_of_a_set_is_its_index_and_its_image() -> None:
    images = image_set(TRAIN, TRAIN_LABELS)
    index, image = images[3]
    assert index == 3
    assert_close(image, torch.from_numpy(TRAIN[3])[None])
    assert images[-1][0] == 19
    with pytest.raises(IndexError):
        images[20]
    assert_close(images.batch(torch.tensor([3, 0]))[1, 0], torch.from_numpy(TRAIN[0]))
    # A DataLoader reads it as it reads a streamed set.
    indices, pixels = next(iter(torch.utils.data.DataLoader(images, batch_size=4)))  # type: ignore[arg-type]
    assert indices.tolist() == [0, 1, 2, 3]
    assert pixels.shape == (4, 1, 6, 5)


def test_a_whole_object_is_read_for_another_split_with_a_warning() -> None:
    with pytest.warns(UndividedWarning, match="is not divided into splits"):
        assert len(load_images((TRAIN, TRAIN_LABELS), "test")) == 20


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (3, "data of type int cannot be read as images: give an ImageSet"),
        ([TRAIN], "data of type list cannot be read as images"),
        ({"train": "digits"}, "data of type str cannot be read as images"),
        (TRAIN.astype(np.float32), "the array"),
        ((TRAIN, TRAIN_LABELS[:5]), r"labels must have shape \(20,\)"),
        ((TRAIN, TRAIN_LABELS + 0.5), "labels must have an integer dtype, got torch.float64"),
        ((TRAIN, ["cat"] * 20), "labels cannot be converted to a tensor"),
        ((TRAIN, TRAIN_LABELS - 2), "labels must be −1 .unknown. or number one of the"),
    ],
)
def test_an_object_that_holds_no_images_or_labels_is_refused(source: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_images(source)


def test_a_missing_split_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnknownSplitError, match="split='validation' is not in 'the mapping': it has 'train', 'test'"):
        load_images({"train": TRAIN, "test": TEST}, "validation")
    with pytest.raises(UnknownSplitError, match="split='validation' is not in 'by_function'"):
        load_images(by_function, "validation")
    with pytest.raises(ValueError, match="labels=True, but the ndarray that was given has no labels"):
        load_images(TRAIN, labels=True)


def dataset(column: str, pixels: np.ndarray, labels: np.ndarray) -> Any:
    """A datasets.Dataset with an Image or an Array3D column."""
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    pillow = pytest.importorskip("PIL.Image", reason="needs pillow")
    kind = datasets.Image() if column == "Image" else datasets.Array3D((6, 5, 1), "uint8")
    rows = [pillow.fromarray(image) for image in pixels] if column == "Image" else list(pixels[..., None])
    features = datasets.Features({"image": kind, "label": datasets.ClassLabel(names=["cat", "dog"])})
    return datasets.Dataset.from_dict({"image": rows, "label": labels.tolist()}, features=features)


def as_mapping(column: str) -> Any:
    import datasets

    return datasets.DatasetDict(
        {"train": dataset(column, TRAIN, TRAIN_LABELS), "test": dataset(column, TEST, TEST_LABELS)}
    )


def saved(column: str, folder: Path) -> Path:
    as_mapping(column).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def as_parquet(column: str, folder: Path) -> Path:
    for split, part in as_mapping(column).items():
        part.to_parquet(str(folder / f"{split}.parquet"))
    return folder


SOURCES: dict[str, Callable[[str, Path], Any]] = {
    "DatasetDict": lambda column, folder: as_mapping(column),
    "function": lambda column, folder: lambda split: as_mapping(column).get(split),
    "saved to disk": saved,
    "parquet": as_parquet,
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("column", ["Image", "Array3D"])
def test_datasets_with_images_or_arrays_are_loaded(tmp_path: Path, column: str, kind: str) -> None:
    pytest.importorskip("datasets", reason="needs datasets")
    source = SOURCES[kind](column, tmp_path)
    for split, pixels, labels in (("train", TRAIN, TRAIN_LABELS), ("test", TEST, TEST_LABELS)):
        images = load_split(source if callable(source) or kind == "DatasetDict" else str(source), split, labels=True)
        assert isinstance(images, ImageSet)
        assert_close(images.images, torch.from_numpy(pixels)[:, None])
        assert_close(images.labels, torch.from_numpy(labels))
        assert images.classes == ("cat", "dog")


@pytest.mark.parametrize("column", ["Image", "Array3D"])
def test_one_dataset_is_divided_as_other_undivided_sources(column: str) -> None:
    rows = dataset(column, TRAIN, TRAIN_LABELS)
    train, test = (load_split(rows, split, labels=True) for split in ("train", "test"))
    assert (len(train), len(test)) == (16, 4)

"""What to train on and what to test on, also where the source does not say."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hardneg.images import ImageSet, StreamedImages, load_images, load_split
from hardneg.images.splits import Division, comparable


def random_images(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint8).repeat(64).reshape(count, 8, 8)


def tones(source: Path | str, split: str, **options: Any) -> list[int]:
    """The images of a part by their first pixel."""
    images = load_split(str(source), split, **options)
    assert isinstance(images, ImageSet)
    return [int(image[0, 0, 0]) for image in images.images]


def photos(folder: Path, classes: dict[str, range]) -> Path:
    """A folder per class with images of these tones."""
    for name, values in classes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for tone in values:
            pixels = np.full((8, 8, 3), (tone % 256, tone // 256, 0), np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{tone:04}.png")
    return folder


def test_a_fifth_of_an_undivided_set_is_held_out_of_training(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", images=random_images(50), labels=np.arange(50) % 3)
    source = tmp_path / "all.npz"
    train, test, again = (tones(source, split) for split in ("train", "test", "train"))
    assert (len(train), len(test)) == (41, 9)  # a fifth of 17, 17 and 16
    assert sorted(train + test) == list(range(50))
    assert train == again
    labels = load_split(str(source), "test").labels
    assert labels is not None
    assert labels.tolist() == [number % 3 for number in test]


def test_a_fifth_of_every_class_is_held_out(tmp_path: Path) -> None:
    counts = {"a": 100, "b": 100, "c": 33, "d": 7, "e": 2, "f": 1}
    labels = np.repeat(np.arange(6), list(counts.values()))
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "all.npz", images=images, labels=labels, classes=[*counts])
    test = load_split(str(tmp_path / "all.npz"), "test")
    assert test.labels is not None
    assert test.labels.bincount(minlength=6).tolist() == [20, 20, 7, 1, 1, 0]


@pytest.mark.parametrize("kind", ["folder", "npz"])
def test_held_out_images_stay_when_images_are_added_or_removed(kind: str, tmp_path: Path) -> None:
    def parts(tones_: list[int]) -> tuple[set[int], set[int]]:
        if kind == "npz":
            source = tmp_path / "all.npz"
            images = np.array(tones_, np.uint8).repeat(64).reshape(-1, 8, 8)
            np.savez(source, images=images, labels=np.zeros(len(tones_), int))
        else:
            source = photos(tmp_path / f"all-{len(tones_)}-{tones_[0]}", {"a": tones_})  # type: ignore[dict-item]
        return set(tones(source, "train")), set(tones(source, "test"))

    train, test = parts([*range(100)])
    assert len(test) == 20
    for others in ([*range(100), 200, 201, 202], [*range(1, 100)], [*range(99, -1, -1)], [200, *range(3, 100)]):
        later_train, later_test = parts(others)
        assert len(later_test & train) + len(later_train & test) <= 2
    assert parts([*range(99, -1, -1)]) == (train, test)  # order does not matter


def test_held_out_images_do_not_depend_on_the_size_of_images(tmp_path: Path) -> None:
    source = photos(tmp_path / "all", {"a": range(40), "b": range(40, 80)})
    assert tones(source, "test", size=4) == tones(source, "test") == tones(source, "test", channels=3)


def test_copies_of_an_image_are_in_one_part(tmp_path: Path) -> None:
    images = np.concatenate([random_images(40)] * 3)
    np.savez(tmp_path / "all.npz", images=images, labels=np.concatenate([np.zeros(80, int), np.ones(40, int)]))
    train, test = (tones(tmp_path / "all.npz", split) for split in ("train", "test"))
    assert not set(train) & set(test)
    assert set(Counter(test).values()) == {3}


def test_without_labels_all_images_are_trained_on_and_a_test_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", images=random_images(50))
    assert len(load_split(str(tmp_path / "all.npz"), "train")) == 50
    with pytest.raises(ValueError, match="has no labels"):
        load_split(str(tmp_path / "all.npz"), "test")


def test_copies_of_one_image_cannot_be_divided(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", images=np.repeat(random_images(1), 40, axis=0), labels=np.arange(40) % 2)
    trained = load_split(str(tmp_path / "all.npz"), "train")
    for division in (None, trained.division):
        with pytest.raises(ValueError, match=r"all 40 images of .* are copies of one"):
            load_split(str(tmp_path / "all.npz"), "test", division=division)


@pytest.mark.parametrize("name", ["test", "testing", "val", "valid", "validation", "dev", "eval"])
def test_a_divided_set_keeps_its_parts(tmp_path: Path, name: str) -> None:
    parts = {"train_images": random_images(6), "train_labels": np.zeros(6, int)}
    parts |= {f"{name}_images": random_images(9)[6:], f"{name}_labels": np.zeros(3, int)}
    np.savez(tmp_path / "two.npz", **parts)
    source = str(tmp_path / "two.npz")
    assert len(load_split(source, "train")) == 6
    assert torch.equal(load_split(source, "test").images, load_images(source, name).images)  # type: ignore[union-attr]


@pytest.mark.parametrize("unlabelled", ["none", "minus one", "flat folder"])
def test_a_labelled_validation_part_comes_before_an_unlabelled_test_part(unlabelled: str, tmp_path: Path) -> None:
    if unlabelled == "flat folder":
        source = tmp_path / "photos"
        photos(source / "train", {"a": range(6), "b": range(6, 12)})
        photos(source / "val", {"a": range(20, 22), "b": range(22, 24)})
        photos(source, {"test": range(30, 33)})
    else:
        source = tmp_path / "three.npz"
        parts = {"train_images": random_images(12), "train_labels": np.arange(12) % 2}
        parts |= {
            "val_images": random_images(24)[20:],
            "val_labels": np.arange(4) % 2,
            "test_images": random_images(33)[30:],
        }
        if unlabelled == "minus one":  # as public test sets of the hub
            parts["test_labels"] = np.full(3, -1)
        np.savez(source, **parts)
    assert tones(source, "test") == [20, 21, 22, 23]
    assert len(tones(source, "train")) == 12


def test_without_a_labelled_test_part_a_fifth_is_held_out(tmp_path: Path) -> None:
    parts = {
        "train_images": random_images(20),
        "train_labels": np.arange(20) % 2,
        "test_images": random_images(33)[30:],
    }
    np.savez(tmp_path / "two.npz", **parts)
    train, test = (tones(tmp_path / "two.npz", split) for split in ("train", "test"))
    assert (len(train), len(test)) == (16, 4)
    assert sorted(train + test) == list(range(20))


@pytest.mark.parametrize("name", ["test.npz", "my-test-val.npz", "train.npz"])
def test_a_file_named_after_a_split_is_still_divided(tmp_path: Path, name: str) -> None:
    np.savez(tmp_path / name, images=random_images(50), labels=np.arange(50) % 2)
    assert [len(load_split(str(tmp_path / name), split)) for split in ("train", "test")] == [40, 10]


def test_a_set_with_a_training_part_only_is_divided(tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", train_images=random_images(20), train_labels=np.zeros(20, int))
    assert [len(load_split(str(tmp_path / "one.npz"), split)) for split in ("train", "test")] == [16, 4]


def test_only_labelled_images_are_held_out(tmp_path: Path) -> None:
    labels = np.where(np.arange(60) < 10, np.arange(60) % 2, -1)
    np.savez(tmp_path / "few.npz", images=random_images(60), labels=labels)
    train, test = (load_split(str(tmp_path / "few.npz"), split) for split in ("train", "test"))
    assert (len(train), len(test)) == (58, 2)
    assert bool((test.labels >= 0).all())  # type: ignore[operator]
    np.savez(tmp_path / "none.npz", images=random_images(60), labels=np.full(60, -1))
    assert len(load_split(str(tmp_path / "none.npz"), "train")) == 60
    np.savez(tmp_path / "one.npz", images=random_images(1), labels=np.zeros(1, int))
    assert len(load_split(str(tmp_path / "one.npz"), "train")) == 1
    with pytest.raises(ValueError, match="too small to be divided"):
        load_split(str(tmp_path / "one.npz"), "test")


# --- the record of a division ---


def division(source: Path) -> Division:
    found = load_split(str(source), "train").division
    assert found is not None
    return Division(**asdict(found))


def test_a_recorded_division_is_kept_when_images_are_added_or_removed(tmp_path: Path) -> None:
    source = photos(tmp_path / "all", {"a": range(50), "b": range(50, 100)})
    train, test = set(tones(source, "train")), set(tones(source, "test"))
    recorded = division(source)
    assert (recorded.test, recorded.samples, len(recorded.held_out)) == ("held out", 80, 20)
    gone = {min(test), min(train)}
    for tone in gone:
        next(source.glob(f"*/{tone:04}.png")).unlink()
    photos(source, {"a": range(150, 160), "c": range(160, 170)})
    with pytest.warns(
        UserWarning, match=r"all has changed since the run was trained \(80 training samples then, 99 now"
    ):
        later_train = set(tones(source, "train", division=recorded))
    with pytest.warns(UserWarning, match=r"19 of the 20 images that were held out are left"):
        later_test = set(tones(source, "test", division=recorded))
    assert later_test == test - gone
    assert later_train == train - gone | set(range(150, 170))


def test_a_division_is_followed_though_a_test_part_was_added(tmp_path: Path) -> None:
    source = photos(tmp_path / "all" / "train", {"a": range(50), "b": range(50, 100)}).parent
    test, recorded = tones(source, "test"), division(source)
    photos(source / "test", {"a": range(120, 124), "b": range(124, 128)})
    assert tones(source, "test") == [*range(120, 128)]
    assert tones(source, "test", division=recorded) == test


def test_the_part_that_a_run_was_tested_on_stays(tmp_path: Path) -> None:
    source = tmp_path / "all"
    photos(source / "train", {"a": range(50), "b": range(50, 100)})
    photos(source / "val", {"a": range(100, 105), "b": range(105, 110)})
    recorded = division(source)
    photos(source / "test", {"a": range(120, 124), "b": range(124, 128)})
    assert tones(source, "test", division=recorded) == [*range(100, 110)]


def test_a_source_without_what_was_held_out_is_refused(tmp_path: Path) -> None:
    recorded = division(photos(tmp_path / "all", {"a": range(50)}))
    with pytest.raises(ValueError, match=r"none of the 10 images that the run held out is in .*other"):
        load_split(str(photos(tmp_path / "other", {"a": range(60, 90)})), "test", division=recorded)


def test_a_set_that_was_trained_on_as_a_whole_is_not_tested_on(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", images=random_images(50))
    recorded = division(tmp_path / "all.npz")
    assert recorded.test == "none"
    np.savez(tmp_path / "all.npz", images=random_images(50), labels=np.zeros(50, int))
    with pytest.raises(ValueError, match=r"the run was trained on all images of .*all.npz, and none is left"):
        load_split(str(tmp_path / "all.npz"), "test", division=recorded)


def test_an_unknown_division_is_refused_where_a_fifth_was_held_out(tmp_path: Path) -> None:
    source = photos(tmp_path / "all", {"a": range(50)})
    with pytest.raises(ValueError, match=r"does not record which images .* held out.*train it again"):
        load_split(str(source), "test", division=Division())
    assert len(load_split("digits", "test", division=Division())) == 500


# --- classes of train and test ---


def labelled(classes: tuple[str, ...], labels: list[int], name: str = "set", start: int = 0) -> ImageSet:
    images = torch.arange(start, start + len(labels), dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 2)
    ids = torch.arange(start, start + len(labels))
    return ImageSet(images.contiguous(), torch.tensor(labels), classes, name, ids)


def test_labels_of_the_test_set_are_numbered_by_the_names_of_the_train_set() -> None:
    train = labelled(("ant", "bee", "cat"), [0, 1, 2, 2])
    test = comparable(train, labelled(("bee", "cat", "ant"), [0, 1, 2, -1], start=50))
    assert test.labels is not None
    assert (test.labels.tolist(), test.classes) == ([1, 2, 0, -1], train.classes)


def test_a_streamed_test_set_is_numbered_too(tmp_path: Path) -> None:
    photos(tmp_path / "train", {"bee": range(3), "ant": range(3, 6)})
    train = load_images(tmp_path / "train")
    test = load_images(photos(tmp_path / "other", {"bee": range(10, 12)}), in_memory=0)
    assert isinstance(test, StreamedImages)
    with pytest.warns(UserWarning, match="no images of ant"):
        matched = comparable(train, test)
    assert matched.labels is not None
    assert test.labels is not None
    assert (matched.labels.tolist(), test.labels.tolist()) == ([1, 1], [0, 0])


@pytest.mark.parametrize("classes", [("ant", "bee", "dog"), ("ant", "bee", "cat", "dog")])
def test_classes_that_training_lacks_are_named(classes: tuple[str, ...]) -> None:
    train = labelled(classes[:3] if len(classes) == 4 else ("ant", "bee"), [0, 1], "birds-train")
    test = labelled(classes, [0, 1, len(classes) - 1], "birds-test", 50)
    with pytest.raises(ValueError, match="birds-test has images of dog, but birds-train has none: "):
        comparable(train, test)
    both = labelled(classes, [0, 1], "birds-train")  # where all parts share the names of classes
    with pytest.raises(ValueError, match="birds-test has images of dog, but birds-train has none: "):
        comparable(both, test)


def test_images_that_are_in_both_sets_are_counted() -> None:
    train, test = labelled(("ant", "bee"), [0, 1] * 5, "train"), labelled(("ant", "bee"), [0, 1] * 3, "test", 7)
    with pytest.warns(UserWarning, match="3 of the 6 images of test are also in train"):
        comparable(train, test)


def test_a_single_class_cannot_be_evaluated() -> None:
    train, test = labelled(("ant", "bee"), [0, 0, -1], "ants"), labelled(("ant", "bee"), [0], "test", 7)
    with pytest.raises(ValueError, match=r"ants has images of one class, ant: .* needs at least two"):
        comparable(train, test)


# --- channels ---


def test_images_are_converted_to_color_or_gray(tmp_path: Path) -> None:
    color = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "rgb.npz", train_images=color, train_labels=np.arange(5), test_images=color,
             test_labels=np.arange(5))  # fmt: skip
    gray = load_split(str(tmp_path / "rgb.npz"), "test", channels=1)
    for mine, image in zip(gray.images, color, strict=True):  # type: ignore[union-attr]
        theirs = np.asarray(Image.fromarray(image).convert("L"), dtype=int)
        assert abs(mine[0].numpy().astype(int) - theirs).max() <= 1
    again = load_split("digits", "test", channels=3)
    assert torch.equal(again.images[:, 2], load_split("digits", "test").images[:, 0])  # type: ignore[union-attr]


def test_a_split_that_is_neither_is_refused() -> None:
    with pytest.raises(ValueError, match="split must be 'train' or 'test'"):
        load_split("digits", "val")

"""A run records what it held out: no image that it was trained on becomes a test image when the data change."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from hardneg.images.modality import Images
from hardneg.insight.samples import load_test_samples
from hardneg.training import compare, evaluate, recipe, run

BRIEF = ["encoder.name=tiny", "encoder.hidden=16", "encoder.outputs=8", "trainer.epochs=1", "trainer.batch_size=16",
         "trainer.accelerator=cpu", "trainer.knn_every=1", "trainer.channels_last=false"]  # fmt: skip


def add(folder: Path, label: str, numbers: range) -> None:
    (folder / label).mkdir(parents=True, exist_ok=True)
    for number in numbers:
        Image.fromarray(image(number)).save(folder / label / f"{number:03}.png")


def image(number: int) -> np.ndarray:
    pixels: np.ndarray = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return pixels


def numbers(images: Tensor) -> set[int]:
    """Which images these are, by their pixels."""
    known = {image(number).tobytes(): number for number in range(300)}
    return {known[pixels.permute(1, 2, 0).contiguous().numpy().tobytes()] for pixels in images.cpu()}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for label in range(5):
        add(tmp_path / "photos", f"class{label}", range(20 * label, 20 * label + 20))
    return tmp_path / "photos"


def trained(photos: Path, folder: Path) -> set[int]:
    """Train a run; returns the images that it was trained on."""
    settings = recipe.load({}, [f"data.source={photos}", *BRIEF])
    module = {}

    class Watch(run.L.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            module["images"] = pl_module.samples.images

    run.train(settings, folder, callbacks=[Watch()])
    return numbers(module["images"])


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The sets of images that evaluations embed, in turn: the training set, then the test set."""
    seen: list[set[int]] = []
    embed, evaluate_encoder = Images.embed, Images.evaluate

    def record(self: Images, network: Any, samples: Any, *options: Any) -> Any:
        seen.append(numbers(samples.images))
        return embed(self, network, samples, *options)

    def evaluate_and_record(self: Images, *arguments: Any) -> Any:
        with monkeypatch.context() as patch:  # online evaluations in training are not recorded
            patch.setattr(Images, "embed", record)
            return evaluate_encoder(self, *arguments)

    monkeypatch.setattr(Images, "evaluate", evaluate_and_record)
    return seen


def test_a_changed_folder_does_not_move_trained_images_into_the_test(
    photos: Path, tmp_path: Path, evaluated: list[set[int]]
) -> None:
    learnt = trained(photos, tmp_path / "run")
    held_out = set(range(100)) - learnt
    assert len(held_out) == 20
    assert all(len(held_out & set(range(20 * label, 20 * label + 20))) == 4 for label in range(5))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        evaluate.evaluate(tmp_path / "run", metrics=["nearest"])
    assert evaluated == [learnt, held_out]
    add(photos, "class0", range(200, 203))
    next(photos.glob(f"*/{min(held_out):03}.png")).unlink()
    with pytest.warns(
        UserWarning, match=r"photos has changed since the run was trained \(80 training samples then, 83"
    ):
        evaluate.evaluate(tmp_path / "run", metrics=["nearest"])
    assert evaluated[2:] == [learnt | {200, 201, 202}, held_out - {min(held_out)}]
    # Also where the source is named anew, and in the report.
    with pytest.warns(UserWarning, match="has changed"):
        evaluate.evaluate(tmp_path / "run", str(photos.parent / "." / "photos"), metrics=["nearest"])
    assert evaluated[5] == held_out - {min(held_out)}
    with pytest.warns(UserWarning, match="has changed"):
        shown = load_test_samples(tmp_path / "run")
    assert numbers(torch.stack([shown.images[row] for row in range(19)])) == held_out - {min(held_out)}


@pytest.mark.parametrize("layout", ["undivided", "train and test"])
def test_a_copy_of_the_data_elsewhere_is_divided_as_the_run_was(
    photos: Path, tmp_path: Path, evaluated: list[set[int]], layout: str
) -> None:
    learnt = trained(photos, tmp_path / "run")
    held_out = set(range(100)) - learnt
    copy = tmp_path / "copy"
    shutil.copytree(photos, copy / "train" if layout == "train and test" else copy)
    for label in range(5):  # other images have the lowest hashes now
        new = range(100 + 30 * label, 130 + 30 * label)
        add(copy / "train" if layout == "train and test" else copy, f"class{label}", new)
    if layout == "train and test":
        add(copy / "test", "class0", range(5))
        add(copy / "test", "class1", range(20, 25))
    with pytest.warns(UserWarning, match=r"copy has changed since the run was trained \(80 training samples then, 230"):
        evaluate.evaluate(tmp_path / "run", str(copy), metrics=["nearest"])
    assert evaluated == [(set(range(250)) - held_out), held_out]
    assert not (tmp_path / "run" / "evaluation.json").exists()


def test_test_images_that_the_run_did_not_hold_out_are_noted(
    photos: Path, tmp_path: Path, evaluated: list[set[int]]
) -> None:
    held_out = set(range(100)) - trained(photos, tmp_path / "run")
    copy = tmp_path / "copy"
    for number in range(100):
        add(copy / ("test" if number in held_out else "train"), f"class{number // 20}", range(number, number + 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        evaluate.evaluate(tmp_path / "run", str(copy), metrics=["nearest"])
    add(copy / "test", "class0", range(200, 202))
    with pytest.warns(UserWarning, match="2 of the 22 images of copy-test were not held out by the run"):
        evaluate.evaluate(tmp_path / "run", str(copy), metrics=["nearest"])


@pytest.mark.parametrize("change", ["added", "removed", "no record"])
def test_runs_on_different_data_are_not_compared(photos: Path, tmp_path: Path, change: str) -> None:
    cells = [compare.Cell("one", recipe.load({}, [f"data.source={photos}", *BRIEF]))]
    (first,) = compare.plan(cells, tmp_path / "all", [0])
    assert [error for _, error in compare.carry_out([first])] == [None]
    both = compare.plan(cells, tmp_path / "all", [0, 1])
    compare.check_data(both)
    message = r"photos has changed since the run was trained .*: restore it, or choose another folder"
    if change == "added":
        add(photos, "class0", range(200, 203))
    elif change == "removed":
        next(iter(photos.glob("class3/*.png"))).unlink()
    else:
        (first.folder / "split.json").unlink()
        message = "does not record which images"
    with pytest.raises(ValueError, match=message) as failure:
        compare.check_data(both)
    assert "\n" not in str(failure.value)
    assert str(first.folder) in str(failure.value)


def test_a_run_is_not_resumed_on_other_data(photos: Path, tmp_path: Path) -> None:
    trained(photos, tmp_path / "run")
    settings = recipe.load({})
    run.train(settings, tmp_path / "run", resume=True)  # nothing has changed
    gone = next(iter(photos.glob("class3/*.png")))
    content = gone.read_bytes()
    gone.unlink()
    with pytest.raises(
        ValueError, match=r"photos has changed since the run was trained .*: restore it, or begin a new"
    ):
        run.train(settings, tmp_path / "run", resume=True)
    gone.write_bytes(content)
    run.train(settings, tmp_path / "run", resume=True)


def test_a_run_without_a_record_is_not_evaluated_on_an_undivided_source(photos: Path, tmp_path: Path) -> None:
    trained(photos, tmp_path / "run")
    record = tmp_path / "run" / "split.json"
    found = json.loads(record.read_text(encoding="utf-8"))
    assert (found["test"], found["samples"], len(found["held_out"])) == ("held out", 80, 20)
    for text in ("{", "[]", '{"held_out": [1e400]}', json.dumps({**found, "test": "../.."})):
        record.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"split.json cannot be read .*: restore it, or train again"):
            evaluate.evaluate(tmp_path / "run")
    record.unlink()
    with pytest.raises(ValueError, match="does not record which images"):
        evaluate.evaluate(tmp_path / "run")
    with pytest.raises(ValueError, match="does not record which images"):
        run.train(recipe.load({}), tmp_path / "run", resume=True)


def test_classes_that_only_the_test_set_has_stop_an_evaluation(tmp_path: Path) -> None:
    source = tmp_path / "photos"
    for number, label in enumerate(("ant", "bee")):
        add(source / "train", label, range(20 * number, 20 * number + 20))
        add(source / "test", label, range(100 + 5 * number, 105 + 5 * number))
    trained(source, tmp_path / "run")
    assert evaluate.evaluate(tmp_path / "run", metrics=["nearest"])
    add(source / "test", "cow", range(120, 125))
    with pytest.raises(ValueError, match="photos-test has images of cow, but photos-train has none"):
        evaluate.evaluate(tmp_path / "run")
    runs = compare.plan([compare.Cell("one", recipe.load({}, [f"data.source={source}"]))], tmp_path, [0])
    with pytest.raises(ValueError, match="photos-test has images of cow"):
        compare.check_data(runs)


def test_an_image_moved_from_the_train_part_to_the_test_part_is_noticed(tmp_path: Path) -> None:
    source = tmp_path / "photos"
    for number, label in enumerate(("ant", "bee")):
        add(source / "train", label, range(20 * number, 20 * number + 20))
        add(source / "test", label, range(100 + 5 * number, 105 + 5 * number))
    trained(source, tmp_path / "run")
    (source / "train" / "ant" / "003.png").rename(source / "test" / "ant" / "003.png")
    with pytest.warns(UserWarning, match="has changed since the run was trained"):
        evaluate.evaluate(tmp_path / "run", metrics=["nearest"])
    Image.fromarray(image(3)).save(source / "train" / "ant" / "003.png")
    with pytest.warns(UserWarning, match="1 of the 11 images of photos-test are also in photos-train"):
        evaluate.evaluate(tmp_path / "run", metrics=["nearest"])

"""`hardneg train`: errors in the words of the command line, the plan before training, and lines in a log."""

import os
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from commands import hardneg
from PIL import Image

import hardneg as package
from hardneg.training import recipe
from hardneg.training.callbacks import progress_lines


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of 40 images of different sizes in two classes."""
    rng = np.random.default_rng(0)
    for number in range(40):
        folder = tmp_path / "photos" / ("cat" if number % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (20 + number % 3, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "photos"


MISTAKES = {
    "sizes": (["data.source=photos"], "pass data.size=224"),
    "large size": (["data.source=photos", "data.size=9999"], "data.size=9999 is more than"),
    "no source": (["data.source=nowhere"], "data.source='"),
    "argument of another preset": (["objective.beta=1"], "it belongs to hcl, hscl; add objective.preset=hcl"),
    "small size": (["data.source=photos", "data.size=1"], "data.size must be an integer ≥ 2"),
    "a setting with dashes": (["--data.source=photos"], "write data.source=photos"),
    "a misspelled preset": (["objective.prest=hcl"], "did you mean objective.preset?"),
    "a key like none": (["trainer.foo=1"], "trainer.foo is not a key of the recipe: choose one of trainer."),
    "argument of no preset": (["objective.temperatur=1"], "did you mean objective.temperature?"),
    "prior": (["objective.preset=hcl", "objective.tau_plus=2"], "objective.tau_plus must be ≥ 0 and < 1, got 2"),
    "renamed prior": (
        ["objective.preset=debiased", "objective.class_prior=0.1"],
        "objective.class_prior is called tau_plus in debiased: pass objective.tau_plus=0.1",
    ),
    "temperature": (["objective.temperature=-1"], "objective.temperature must be > 0"),
    "threshold": (["objective.preset=hscl_threshold", "objective.start=4"], "objective.start must be ≥ -1 and ≤ 1"),
    "images for a method of graphs": (
        ["method=infograph"],
        "data.source=digits holds images, and method=infograph trains on graphs: give such a source, as tu:MUTAG",
    ),
    "a folder of images for a method of graphs": (
        ["data.source=photos", "method=graphcl"],
        "data.source=photos holds images, and method=graphcl trains on graphs",
    ),
    "graphs for a method of images": (["data.source=tu:MUTAG"], "data.source=tu:MUTAG holds graphs"),
    "size of views": (["views.options.size=1"], "views.options.size must be an integer ≥ 2"),
    "candidates": (["batches={sampler: proximity, candidates: 0}"], "batches.candidates must be a whole number"),
    "encoder": (["encoder.name=resnet17"], "encoder.name='resnet17' is not known"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_error_names_the_key_as_the_command_line_does(
    capsys: pytest.CaptureFixture[str], photos: Path, mistake: str
) -> None:
    arguments, message = MISTAKES[mistake]
    code, out, err = hardneg(capsys, "train", "digits-simclr", *arguments)
    assert (code, out, len(err.strip().splitlines())) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize("exported", [None, "of-the-user"])
def test_a_command_leaves_the_environment_as_it_was(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, exported: str | None
) -> None:
    # The processes of a later torchrun would take the folder of this run for theirs.
    if exported is not None:
        monkeypatch.setenv("HARDNEG_RUN", exported)
    shown = warnings.showwarning
    start = ["train", "digits-simclr", "trainer.epochs=1", "trainer.knn_every=0", "--no-evaluate", "--run", "run"]
    assert hardneg(capsys, *start)[0] == 0
    assert hardneg(capsys, *start)[0] == 2  # it holds a run already
    assert os.environ.get("HARDNEG_RUN") == exported
    assert warnings.showwarning is shown


def test_fewer_epochs_than_done_are_refused_by_the_name_of_the_setting(capsys: pytest.CaptureFixture[str]) -> None:
    start = ["train", "digits-simclr", "trainer.epochs=2", "trainer.knn_every=0", "--no-evaluate", "--run", "run"]
    assert hardneg(capsys, *start)[0] == 0
    for epochs, message in ((1, "trainer.epochs=1 is less than the 2 epochs"), (0, "trainer.epochs must be a whole")):
        code, _, err = hardneg(capsys, "train", "--resume", "run", f"trainer.epochs={epochs}")
        assert (code, message in err) == (2, True), err


def test_my_images_trains_on_a_folder_and_says_its_steps_before_training(
    capsys: pytest.CaptureFixture[str], photos: Path, tmp_path: Path
) -> None:
    quick = ["data.source=photos", "data.size=8", "trainer.epochs=1", "trainer.accelerator=cpu"]
    code, out, err = hardneg(capsys, "train", "my-images", *quick)
    assert code == 0, err
    # Of 20 images in each of two classes, a fifth is held out.
    assert err.splitlines() == [
        "32 images, batch size 8: 4 steps per epoch",
        "encoder resnet18 on cpu, precision 32-true, 1 epoch",
    ]
    assert "trained in runs/my-images-1" in out
    assert "kNN" in out
    made = recipe.load(tmp_path / "runs" / "my-images-1" / "recipe.yaml")
    assert (made.trainer.batch_size, made.trainer.precision) == (8, "32-true")
    code, out, err = hardneg(capsys, "train", "--resume", "runs/my-images-1", "trainer.epochs=2")
    assert code == 0, err
    assert "2 epochs, resumed in epoch 2" in err
    assert "after epoch 2" in out
    encoder = package.load_encoder("runs/my-images-1")
    assert encoder([*photos.glob("cat/*.png")]).shape == (20, 512)
    (tmp_path / "broken.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"samples\[1\]: broken\.png cannot be read as an image") as error:
        encoder([next(photos.glob("cat/*.png")), Path("broken.png")])
    assert error.value.__suppress_context__


def test_few_images_give_a_note(capsys: pytest.CaptureFixture[str], photos: Path) -> None:
    for image in sorted(photos.glob("cat/*.png"))[3:]:
        image.unlink()
    quick = ["data.source=photos/cat", "data.size=8", "trainer.epochs=1", "encoder.name=tiny", "--no-evaluate"]
    code, _, err = hardneg(capsys, "train", "my-images", *quick)
    assert code == 0, err
    assert "note: 3 images are too few to train an encoder" in err
    assert "note: encoder.name=tiny: encoder.options.stem=imagenet of the recipe is left out" in err


def test_an_unreadable_image_is_noted_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(120):
        folder = tmp_path / "many" / ("cat" if number % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    (tmp_path / "many" / "cat" / "broken.png").write_bytes(b"no image")
    quick = ["data.source=many", "trainer.epochs=1", "trainer.batch_size=32", "evaluation.metrics=[knn]"]
    code, _, err = hardneg(capsys, "train", "digits-simclr", *quick)  # reads the images to train and to evaluate
    assert code == 0, err
    assert err.count("skipped 1 of 121 images") == 1


def test_my_images_needs_a_source_and_no_labels(capsys: pytest.CaptureFixture[str], photos: Path) -> None:
    code, _, err = hardneg(capsys, "train", "my-images")
    assert code == 2
    assert "add data.source=FOLDER with your folder" in err
    quick = ["data.source=photos/cat", "data.size=8", "trainer.epochs=1", "encoder={name: tiny}"]
    code, out, err = hardneg(capsys, "train", "my-images", *quick)
    assert code == 0, err
    assert "20 images, batch size 4: 5 steps per epoch" in err
    assert "has no labels, and an evaluation needs them: use one folder per class" in err
    assert "trained in" in out


def test_my_graphs_trains_on_fewer_graphs_than_the_batches_of_papers(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch_geometric", reason="graphs need torch_geometric")
    rings = np.arange(40 * 5).reshape(40, 5)
    edges = np.stack([rings.flatten(), np.roll(rings, 1, axis=1).flatten()])
    both = np.concatenate([edges, edges[::-1]], axis=1)
    np.savez("mine.npz", edge_index=both, batch=np.arange(40).repeat(5), y=np.arange(40) % 2)
    code, out, err = hardneg(capsys, "train", "my-graphs", "data.source=mine.npz", "trainer.epochs=1")
    assert code == 0, err
    assert "40 graphs, batch size 8: 5 steps per epoch" in err
    assert "trained in runs/my-graphs-1" in out
    assert "SVM" in out
    code, _, err = hardneg(capsys, "train", "my-graphs")
    assert (code, "FILE does not exist" in err) == (2, True)


def test_a_comparison_with_an_automatic_batch_size_resumes(capsys: pytest.CaptureFixture[str], photos: Path) -> None:
    grid = ["compare", "my-images", "data.source=photos", "data.size=8", "trainer.epochs=1", "encoder={name: tiny}",
            "--over", "objective.preset=simclr,hcl", "--seeds", "1", "--json"]  # fmt: skip
    first = hardneg(capsys, *grid)
    assert first[0] == 0, first[2]
    assert hardneg(capsys, *grid) == first


def test_a_log_gets_lines_of_progress_and_json_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_lines, "FIRST", 0.0)
    monkeypatch.setattr(progress_lines, "EVERY", 0.0)
    quick = ["digits-simclr", "trainer.epochs=3", "trainer.knn_every=2", "--no-evaluate"]
    code, _, err = hardneg(capsys, "train", *quick)
    assert code == 0, err
    lines = [line for line in err.splitlines() if line.startswith("epoch")]
    assert len(lines) == 15
    assert re.fullmatch(r"epoch 1/3 · step 1/15 · loss \d\.\d{3} · 0:\d\d:\d\d left", lines[0])
    pattern = r"epoch 3/3 · step 15/15 · loss \d\.\d{3} · kNN \d\d\.\d % · [\d,]+ samples/s · 0:00:00 left"
    assert re.fullmatch(pattern, lines[-1])
    code, _, err = hardneg(capsys, "train", *quick, "--json")
    assert (code, err) == (0, "")


def test_the_last_accuracy_is_shown_although_it_was_measured_between_two_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        """A clock on which every step takes a second."""

        now = 0.0

        @classmethod
        def monotonic(cls) -> float:
            cls.now += 1
            return cls.now

    monkeypatch.setattr(progress_lines, "time", Clock)
    monkeypatch.setattr(progress_lines, "FIRST", 14.0)  # in the third epoch, of which each has five steps
    code, _, err = hardneg(capsys, "train", "digits-simclr", "trainer.epochs=3", "trainer.knn_every=1", "--no-evaluate")
    assert code == 0, err
    (line,) = [line for line in err.splitlines() if line.startswith("epoch")]
    assert line.startswith("epoch 3/3 · step 14/15 · loss")
    assert "· kNN " in line
    assert line.endswith("0:00:01 left")  # one step of 15

"""`hardneg export`: where it writes, and what it says of an unfinished run."""

from pathlib import Path

import pytest
from commands import hardneg

from hardneg.training import recipe, run


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["trainer.epochs=1", "trainer.knn_every=0"]
    run.train(recipe.load(recipe.find("digits-simclr"), short), tmp_path / "run")


def test_export_creates_no_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = hardneg(capsys, "export", "run", "--to", "models/encoder.safetensors")
    assert (code, out, len(err.strip().splitlines())) == (2, "", 1)
    assert "there is no folder 'models' for encoder.safetensors: create it, or choose another with --to" in err
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


def test_an_evaluation_names_data_as_they_were_given(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = hardneg(capsys, "evaluate", "run", "--data", "nope")
    assert (code, out, len(err.strip().splitlines())) == (2, "", 1)
    assert "--data='nope' does not exist" in err


def test_resuming_a_finished_run_says_that_nothing_is_left(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = hardneg(capsys, "train", "--resume", "run", "--no-evaluate")
    assert code == 0, err
    assert "already finished" in out
    assert "add trainer.epochs=N to train longer" in out
    assert "trained in" not in out
    code, _, err = hardneg(capsys, "train", "--resume", ".")
    assert code == 2
    assert "give one of the 1 runs in it, such as run" in err


def test_export_says_that_a_run_is_unfinished(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = hardneg(capsys, "export", "run", "--to", "finished")
    assert (code, err) == (0, "")
    (tmp_path / "run" / "encoder.safetensors").unlink()
    code, out, err = hardneg(capsys, "export", "run", "--to", "unfinished")
    assert code == 0
    assert "note: run is unfinished: this is the encoder of its last checkpoint" in err
    assert "unfinished.safetensors" in out

"""`hardneg export`: where it writes, and what it says of an unfinished run."""

from pathlib import Path

import pytest
from commands import hardneg

from hardneg import cli
from hardneg.training import recipe, run


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HARDNEG_RUN", raising=False)
    monkeypatch.setattr(cli.warnings, "showwarning", cli.warnings.showwarning)
    short = ["trainer.epochs=1", "trainer.knn_every=0"]
    run.train(recipe.load(recipe.find("digits-simclr"), short), tmp_path / "run")


def test_export_creates_no_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = hardneg(capsys, "export", "run", "--to", "models/encoder.safetensors")
    assert (code, out, len(err.strip().splitlines())) == (2, "", 1)
    assert "there is no folder 'models' for encoder.safetensors: create it, or choose another with --to" in err
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


def test_export_says_that_a_run_is_unfinished(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = hardneg(capsys, "export", "run", "--to", "finished")
    assert (code, err) == (0, "")
    (tmp_path / "run" / "encoder.safetensors").unlink()
    code, out, err = hardneg(capsys, "export", "run", "--to", "unfinished")
    assert code == 0
    assert "note: run is unfinished: this is the encoder of its last checkpoint" in err
    assert "unfinished.safetensors" in out

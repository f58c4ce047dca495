"""Samples of a run for the explorer are of its training split, with its encoder, and a report shows them."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import hardneg
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hardneg as hn
from hardneg.images import load_images
from hardneg.insight.explorer import run_samples
from hardneg.insight.explorer.run_samples import load_training_samples
from hardneg.insight.report import write_report
from hardneg.training import build, recipe, run, saved_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("runs") / "run"
    brief = ["trainer.epochs=1", "trainer.accelerator=cpu", "trainer.knn_every=0", "objective.preset=hcl"]
    run.train(recipe.load({"data": {"source": "digits"}}, brief), folder)
    return folder


def test_ids_are_row_numbers_of_the_training_split(trained: Path) -> None:
    found = load_training_samples(trained, 100)
    samples, loaded = found.samples, saved_run.load_run(trained)
    train: Any = build.data(loaded.settings)
    assert (len(samples), samples.total) == (100, len(train))
    rows = torch.tensor([int(each) for each in samples.ids])
    assert rows.tolist() == sorted({*rows.tolist()})
    assert samples.labels is not None
    assert torch.equal(samples.labels, train.labels[rows])
    assert samples.images is not None
    assert all(torch.equal(samples.images[n], train.images[row]) for n, row in enumerate(rows.tolist()))  # type: ignore[arg-type]
    expected = loaded.settings.kind.embed(loaded.encoder, train, loaded.views)[rows]
    torch.testing.assert_close(samples.features, expected)
    assert samples.positives is not None
    cosine = torch.nn.functional.cosine_similarity(samples.features, samples.positives)
    assert float(cosine.mean()) > 0.5
    assert float(cosine.median()) < 0.99  # another view
    assert found.loss is not None
    assert load_training_samples(trained, 100).samples.ids == samples.ids


def page_data(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8")
    block = re.search(r'<script type="application/json">(\{"count".*?)</script>', text, re.DOTALL)
    assert block is not None
    found: dict[str, Any] = json.loads(block[1])
    return found


def test_the_report_explores_the_training_split_by_each_group(trained: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    brief = ["trainer.epochs=1", "trainer.accelerator=cpu", "trainer.knn_every=0", "objective.preset=simclr"]
    run.train(recipe.load({"data": {"source": "digits"}}, brief), other)
    page = write_report([trained, other], tmp_path / "report.html", names=["hard", "plain"])
    data = page_data(page)
    assert page.stat().st_size < 5_000_000
    assert data["count"] == 1000
    assert [each["name"] for each in data["checkpoints"]] == ["hard", "plain"]
    assert all(len(each["positives"]) == 1000 for each in data["checkpoints"])
    assert data["setting"]["beta"] == 1.0
    assert "training split" in data["usable"]
    assert max(int(each) for each in data["ids"]) < len(load_images("digits", "train"))


def test_the_command_explores_a_run(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "explore.html"
    code, out, err = hardneg(capsys, "explore", str(trained), "--to", str(page), "--samples", "50", "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["samples"], told["of"]) == (50, 1297)
    assert any("50 are shown, drawn at random" in note for note in told["notes"])
    assert page_data(page)["count"] == 50
    code, out, err = hardneg(capsys, "explore", str(trained), "--labels", "x.npy", "--to", str(tmp_path / "no.html"))
    assert (code, out) == (2, "")
    assert "--labels is for files of embeddings" in err
    assert not (tmp_path / "no.html").exists()


def test_options_change_the_setting_of_the_run_and_keep_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, page = tmp_path / "run", tmp_path / "explore.html"
    brief = ["trainer.epochs=1", "trainer.accelerator=cpu", "trainer.knn_every=0", "objective.preset=hcl",
             "objective.temperature=0.2", "objective.num_negatives=40", "objective.tau_plus=0.03"]  # fmt: skip
    run.train(recipe.load({"data": {"source": "digits"}}, brief), folder)
    for options, name in (([], "setting A"), (["--beta", "3"], "the run")):
        code, out, err = hardneg(
            capsys, "explore", str(folder), "--to", str(page), "--samples", "9", "--json", *options
        )
        assert (code, err) == (0, "")
        expected = {"temperature": 0.2, "beta": 3.0 if options else 1.0, "prior": 0.03, "labels": False}
        assert page_data(page)["setting"] == pytest.approx(expected)
        (note,) = [note for note in json.loads(out)["notes"] if "Not shown" in note]
        assert name in note
        assert "num_negatives=40" in note
    code, out, err = hardneg(capsys, "explore", str(folder), "--to", str(tmp_path / "no.html"), "--temperature", "0")
    assert (code, out) == (2, "")
    assert "temperature" in err
    assert not (tmp_path / "no.html").exists()


@pytest.mark.parametrize(
    ("loss", "method", "by_pairs", "expected"),
    [
        (hn.simclr(), "simclr", True, []),
        (hn.simclr(temperature=hn.Learnable(0.1)), "simclr", True, ["learned its temperature"]),
        (hn.JSD(), "infograph", False, ["the run's loss, JSD", "method, infograph, does not compare"]),
        (hn.instance_discrimination(), "local_aggregation", False, ["method, local_aggregation, does not compare"]),
    ],
)
def test_what_no_setting_can_tell_of_a_run_is_a_note(
    loss: Any, method: str, by_pairs: bool, expected: list[str]
) -> None:
    notes = run_samples._loss_notes(loss, method, by_pairs)
    assert len(notes) == len(expected)
    assert all(part in note for part, note in zip(expected, notes, strict=True))


def test_a_diverged_run_is_an_error_in_one_line(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    file = folder / "encoder.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    weights = {name: each * torch.nan if each.is_floating_point() else each for name, each in load_file(file).items()}
    save_file(weights, file, metadata)
    code, out, err = hardneg(capsys, "explore", str(folder), "--to", str(tmp_path / "no.html"))
    assert (code, out) == (2, "")
    assert "NaN" in err
    assert not (tmp_path / "no.html").exists()

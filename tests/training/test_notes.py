"""A value whose solver has not converged has a note wherever it is shown."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from insight.folders import digits_samples, make_run

from hardneg import cli, demo
from hardneg.evaluation import EvaluationResult, evaluate_features, linear_probe, svm
from hardneg.evaluation.linear import convergence_note
from hardneg.evaluation.results import is_minor
from hardneg.evaluation.svm import svm_accuracy
from hardneg.insight.report import write_report

NOTE = "not converged after 3 iterations"


@pytest.fixture
def _three_steps(monkeypatch: pytest.MonkeyPatch, empty_folder: Path) -> None:
    from hardneg.evaluation import metrics

    monkeypatch.setattr(metrics, "linear_probe", partial(linear_probe, steps=3))


def hardneg(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["hardneg", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    printed = capsys.readouterr()
    assert not stop.value.code, printed.err
    return printed.out


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    features, labels = load_digits(return_X_y=True)
    return torch.tensor(features[:400], dtype=torch.float32), torch.tensor(labels[:400])


@pytest.mark.usefixtures("_three_steps")
def test_an_unconverged_probe_is_noted_in_files_tables_and_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = partial(hardneg, monkeypatch, capsys)
    settings = ["trainer.epochs=1", "trainer.knn_every=0"]
    assert f"({NOTE})" in command("train", "digits-simclr", *settings, "--run", "one")
    saved = json.loads((tmp_path / "one" / "evaluation.json").read_text(encoding="utf-8"))
    assert saved["notes"] == {"linear": NOTE}

    table = command("evaluate", "one")
    assert f"{100 * saved['linear']:.1f} %*" in table
    assert f"* linear probe: {NOTE}" in table
    assert json.loads(command("evaluate", "one", "--json")) == saved
    command("evaluate", "one", "--data", "digits", "--json")
    carried = json.loads((tmp_path / "one" / "transfer.json").read_text(encoding="utf-8"))
    assert carried["digits"]["notes"] == {"linear": NOTE}

    compare = ["compare", "digits-simclr", *settings, "--over", "objective.preset=simclr,hcl", "--seeds", "2"]
    table = command(*compare)
    row = next(line for line in table.splitlines() if line.startswith("simclr "))
    assert row.count("*") == 1
    assert f"* linear probe of hcl: {NOTE} (seeds 0, 1)" in table
    rows = json.loads(command(*compare, "--json"))["rows"]
    assert rows["hcl"]["linear"]["notes"] == [f"{NOTE} (seeds 0, 1)"]
    assert rows["hcl"]["knn"]["notes"] == []

    command("report", "runs/compare")
    page = (tmp_path / "runs" / "compare" / "report.html").read_text(encoding="utf-8")
    assert f'<abbr title="{NOTE} (seeds 0, 1)">*</abbr>' in page
    assert f"<bdi>linear probe</bdi> of <em><bdi>simclr</bdi></em>: <bdi>{NOTE} (seeds 0, 1)</bdi>." in page


@pytest.mark.usefixtures("_three_steps")
def test_rows_without_training_have_notes(tmp_path: Path) -> None:
    rows, notes = demo.untrained_rows([0, 1])
    assert notes == {"raw pixels": {"linear": [NOTE]}, "untrained": {"linear": [f"{NOTE} (seeds 0, 1)"]}}
    run = make_run(tmp_path / "run")
    given = {"extra_rows": rows, "extra_notes": notes, "load_samples": digits_samples()}
    page = write_report([run], tmp_path / "page.html", **given).read_text(encoding="utf-8")  # type: ignore[arg-type]
    assert f"<bdi>linear probe</bdi> of <em><bdi>raw pixels</bdi></em>: <bdi>{NOTE}</bdi>." in page


def test_a_converged_evaluation_has_no_notes(tmp_path: Path) -> None:
    features = torch.eye(2).repeat(20, 1) + 0.1 * torch.randn(40, 2)
    labels = torch.tensor([0, 1]).repeat(20)
    found = evaluate_features(features, labels, features, labels)
    assert "linear" in found
    assert found.to_json() == found


def test_the_note_of_a_probe_separates_the_final_fit_from_candidate_penalties() -> None:
    features, labels = digits()
    sets = features, labels, features, labels
    assert linear_probe(*sets, penalties=[1e-3], steps=3).note == NOTE
    # A strong penalty converges within a few iterations, a weak one does not.
    one = linear_probe(*sets, penalties=[1.0, 1e-6], steps=30)
    assert not one.converged
    assert one.penalty == 1e-6
    assert one.note == "not converged after 30 iterations"
    shuffled = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(4))]  # random labels
    other = linear_probe(features, shuffled, features, shuffled, penalties=[100.0, 1e-6], steps=30)
    assert not other.converged
    assert other.penalty == 100.0
    assert other.note == (
        "not converged after 30 iterations for 1 of 2 candidate penalties; the final fit has converged"
    )
    assert linear_probe(*sets, penalties=[1.0, 10.0]).note == ""


def test_result_lines_leave_out_notes_on_penalties_that_were_not_chosen() -> None:
    minor = "not converged after 30 iterations for 1 of 2 candidate penalties; the final fit has converged"
    result = EvaluationResult({"linear": 0.5, "svm": 0.5}, {"linear": minor, "svm": NOTE})
    assert result.main_notes == {"svm": NOTE}
    assert result.to_json()["notes"] == {"linear": minor, "svm": NOTE}
    converged = torch.tensor([True, False])
    assert is_minor(convergence_note(True, converged, 0, torch.tensor([30])))
    assert not is_minor(convergence_note(True, converged, 1, torch.tensor([30])))
    assert not is_minor(convergence_note(False, converged, 0, torch.tensor([30])))


def test_the_note_of_an_svm_separates_the_final_fits_from_candidate_penalties(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = digits()
    assert svm_accuracy(features, labels, penalties=[1.0], folds=3).note == ""
    monkeypatch.setattr(svm, "STEPS", 3)
    result = svm_accuracy(features, labels, penalties=[1.0], folds=3)
    assert result.note == f"{NOTE} in 3 of 3 folds"
    assert str(result).endswith(f", {NOTE} in 3 of 3 folds")
    # With outliers a high penalty is slow and inaccurate; the low one is chosen, and its fits converge.
    monkeypatch.setattr(svm, "STEPS", 200)
    generator = torch.Generator().manual_seed(0)
    sides = torch.arange(120) % 2
    blobs = torch.randn(120, 2, generator=generator) + 3 * sides[:, None]
    sides[:12] = 1 - sides[:12]
    mixed = svm_accuracy(blobs, sides, penalties=[1e-1, 1e5], folds=3, inner_folds=2)
    assert (mixed.penalties == 1e-1).all()
    assert (mixed.unconverged, mixed.unconverged_choices) == (0, 3)
    assert mixed.note == (
        "not converged after 200 iterations for some candidate penalties in 3 of 3 folds; the final fits have converged"
    )

"""A comparison collects values, notes and descriptions of metrics from the files of its finished runs."""

import json
from pathlib import Path

import pytest

from hardneg import terminal
from hardneg.evaluation import MetricFormat
from hardneg.training import recipe, run_folder
from hardneg.training.compare import Cell, Run, formats, notes, results

ERROR = {"title": "calibration error", "better": "lower", "percent": True}


def finished_runs(folder: Path) -> list[Run]:
    """Two cells with three seeds each; the last run is not finished."""
    errors = {"base": (0.30, 0.31, 0.32), "better": (0.10, 0.11, 0.12), "unfinished": (0.0,)}
    runs = []
    for name, values in errors.items():
        cell = Cell(name, recipe.load({}))
        for seed, value in enumerate(values):
            run = Run(cell, seed, cell.folder(folder, seed))
            run.folder.mkdir(parents=True)
            content = {"knn": 0.9, "calibration": value, "metrics": {"calibration": ERROR}}
            if seed == 2:
                content["notes"] = {"calibration": "few samples"}
            (run.folder / run_folder.EVALUATION).write_text(json.dumps(content), encoding="utf-8")
            if name != "unfinished":
                (run.folder / run_folder.ENCODER).touch()
            runs.append(run)
    return runs


def test_values_notes_and_formats_come_from_the_finished_runs(tmp_path: Path) -> None:
    runs = finished_runs(tmp_path)
    assert results(runs) == {
        "base": {"knn": [0.9] * 3, "calibration": [0.30, 0.31, 0.32]},
        "better": {"knn": [0.9] * 3, "calibration": [0.10, 0.11, 0.12]},
    }
    assert notes(runs)["better"] == {"calibration": ["few samples (seed 2)"]}
    assert formats(runs) == {"calibration": MetricFormat("calibration error", "lower", True)}


def test_a_metric_that_is_not_registered_is_shown_as_its_files_describe_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = finished_runs(tmp_path)
    terminal.show_table(results(runs), notes(runs), "base", True, {}, formats(runs))
    printed = json.loads(capsys.readouterr().out)
    assert printed["metrics"]["calibration"] == ERROR
    found = printed["rows"]["better"]["calibration"]
    assert found["difference"] == pytest.approx(-0.2)
    assert found["significant"]
    assert found["best"]  # the lower value


def test_a_broken_evaluation_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    runs = finished_runs(tmp_path)
    (runs[0].folder / run_folder.EVALUATION).write_text('{"knn": 0.5, "notes": 3}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"seed-0/evaluation\.json: notes must map metrics to texts"):
        results(runs)

"""A comparison collects values, notes and descriptions of metrics from the files of its finished runs."""

import json
from pathlib import Path

import pytest

from hardneg import terminal
from hardneg.evaluation import MetricFormat
from hardneg.training import recipe, run_folder
from hardneg.training.compare import Cell, Run, formats, grid, notes, read_rows, results, rows, write_rows

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


def test_rows_are_named_by_what_differs_and_their_folders_by_what_was_typed() -> None:
    cells = grid(["digits-simclr"], ["trainer.epochs=2"], ["objective={preset: simclr},{preset: hcl, beta: 2}"])
    assert [cell.name for cell in cells] == ["simclr", "hcl (beta 2)"]
    assert [cell.folder_name for cell in cells] == ["objective=_preset_simclr_", "objective=_preset_hcl_beta_2_"]
    # The folder of a row does not depend on the other rows, so that a comparison can be extended.
    assert grid(["digits-simclr"], over=["objective.temperature=0.2"])[0].folder_name == "objective.temperature=0.2"
    both = grid(["digits-simclr", "digits-moco"], [], ["trainer.epochs=1,2"])
    assert [cell.name for cell in both] == [
        "digits-simclr, epochs 1", "digits-simclr, epochs 2", "digits-moco, epochs 1", "digits-moco, epochs 2"
    ]  # fmt: skip
    assert [cell.name for cell in grid(["digits-simclr", "digits-moco"])] == ["digits-simclr", "digits-moco"]


def test_a_baseline_is_given_by_its_name_or_as_typed() -> None:
    cells = grid(["digits-simclr"], over=["objective.temperature=0.1,0.2"])
    assert rows(cells).baseline == "temperature 0.1"
    for given in ("temperature 0.2", "objective.temperature=0.2"):
        assert rows(cells, given).baseline == "temperature 0.2"
    with pytest.raises(ValueError, match=r"baseline='0\.2' is not a row of this comparison: choose one of 'temp"):
        rows(cells, "0.2")


def test_the_rows_of_a_comparison_are_stored_for_its_report(tmp_path: Path) -> None:
    cells = grid(["digits-simclr"], over=["objective.preset=simclr,debiased"])
    write_rows(tmp_path, rows(cells, "debiased"))
    runs = [cell.folder(tmp_path, seed) for cell in cells for seed in range(2)]
    found = read_rows(tmp_path, runs)
    assert found == rows(cells, "debiased")
    assert list(found.names.values()) == ["simclr", "debiased"]
    assert read_rows(tmp_path, [*runs, tmp_path / "other" / "seed-0"]) is None
    assert read_rows(tmp_path / "other", runs) is None


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[",
        "[]",
        '{"heading": 1, "baseline": "a", "names": {"a": "a"}}',
        '{"heading": "x", "baseline": "a", "names": 5}',
        '{"heading": "x", "baseline": "a", "names": {"a": ["a"]}}',
        '{"heading": "x", "baseline": "a", "names": {"a": "a", "b": "a"}}',
    ],
)
def test_a_broken_file_of_rows_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    (tmp_path / run_folder.COMPARISON).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"comparison\.json.*remove it"):
        read_rows(tmp_path, [])


def test_a_broken_evaluation_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    runs = finished_runs(tmp_path)
    (runs[0].folder / run_folder.EVALUATION).write_text('{"knn": 0.5, "notes": 3}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"seed-0/evaluation\.json: notes must map metrics to texts"):
        results(runs)

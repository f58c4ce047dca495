"""Run folders are read even if files are missing, and runs that differ only in seed form a group."""

import json
import os
from pathlib import Path

import pytest
from insight.folders import make_run

from hardneg.insight.runs import group_runs, read_run


def names(runs: list[Path], given: list[str] | None = None) -> list[tuple[str, list[int]]]:
    return [(group.name, [run.seed for run in group.runs]) for group in group_runs([*map(read_run, runs)], given)]


def test_runs_that_differ_only_in_seed_form_a_group(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "a", "simclr", seed=1),
        make_run(tmp_path / "b", "hcl", seed=0),
        make_run(tmp_path / "c", "simclr", seed=0),
    ]
    assert names(runs) == [("simclr", [0, 1]), ("hcl", [0])]


def test_a_group_is_named_by_the_settings_that_differ(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "a", "hcl", overrides=["objective.beta=0.5", "optimizer.lr=0.01"]),
        make_run(tmp_path / "b", "hcl", overrides=["objective.beta=2.0", "optimizer.lr=0.01"]),
        make_run(tmp_path / "c", "hcl", overrides=["optimizer.lr=0.01"]),
    ]
    assert [name for name, _ in names(runs)] == ["beta 0.5", "beta 2", "default"]
    assert names(runs[:1]) == [("hcl", [0])]


def test_groups_that_differ_in_many_settings_are_named_by_their_folders(tmp_path: Path) -> None:
    many = [f"optimizer={{name: sgd, lr: {0.1}, weight_decay: 0.1, momentum: 0.5, clip: 1.0}}"]
    row = tmp_path / "row"
    runs = [make_run(tmp_path / "first"), make_run(row / "seed-0", overrides=many)]
    assert [name for name, _ in names(runs)] == ["first", "row"]
    alike = [make_run(tmp_path / "x" / "run"), make_run(tmp_path / "y" / "run", overrides=many)]
    assert len({name for name, _ in names(alike)}) == 2


def test_the_description_of_a_recipe_does_not_separate_groups(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(seed), seed=seed, overrides=[f"about=number {seed}"]) for seed in range(2)]
    assert len(names(runs)) == 1


def test_names_are_one_per_run_or_one_per_group(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"{p}{s}", p, s) for p in ("simclr", "hcl") for s in range(2)]
    expected = [("plain", [0, 1]), ("hard", [0, 1])]
    assert names(runs, ["plain", "hard"]) == names(runs, ["plain", "plain", "hard", "hard"]) == expected
    with pytest.raises(ValueError, match="names has 3 entries for 4 runs of 2 groups"):
        names(runs, ["a", "b", "c"])
    with pytest.raises(ValueError, match="names gives two different recipes the name 'same'"):
        names(runs, ["same", "same"])


def test_the_same_result_twice_is_an_error(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in "ab"]
    with pytest.raises(
        ValueError, match="have the same recipe and seed 0: leave one out, or give them different names"
    ):
        names(runs)
    assert names(runs, ["here", "there"]) == [("here", [0]), ("there", [0])]


def test_every_file_except_the_recipe_may_be_missing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for name in ("metrics.jsonl", "evaluation.json", "environment.json"):
        os.remove(folder / name)
    run = read_run(folder)
    assert (run.metrics, run.evaluation, run.environment, run.epochs) == ([], {}, {}, (0, 60))
    with pytest.raises(ValueError, match=r"holds no run: recipe\.yaml is missing"):
        read_run(tmp_path)


def test_online_knn_replaces_a_missing_evaluation(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", evaluation={})
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    assert read_run(folder).evaluation == {"knn": lines[-1]["knn"]}
    (folder / "evaluation.json").write_text('{"knn": 0.5, "linear": null, "note": "x", "few_1": NaN}')
    assert read_run(folder).evaluation == {"knn": 0.5}


def test_an_incomplete_last_line_of_metrics_is_ignored(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", epochs=3)
    file = folder / "metrics.jsonl"
    file.write_text(file.read_text()[:-20])
    run = read_run(folder)
    assert len(run.metrics) == 2
    assert run.epochs == (2, 3)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("recipe.yaml", "a: [", "recipe.yaml is not readable YAML"),
        ("recipe.yaml", "seed: [1]", "recipe.yaml: seed must be a whole number, got '\\[1\\]'"),
        ("recipe.yaml", "- a", "recipe.yaml must hold keys and values, got list"),
        ("evaluation.json", "{", "evaluation.json is not readable JSON .*: restore it, or remove it"),
        ("environment.json", "[]", "environment.json must hold an object, got list"),
    ],
)
def test_errors_name_the_broken_file(tmp_path: Path, name: str, text: str, message: str) -> None:
    folder = make_run(tmp_path / "run", epochs=1)
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_run(folder)

"""The queue of runs behind the measured tables."""

import hashlib
import importlib
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from hardneg.evaluation import knn_accuracy
from hardneg.images import load_split
from hardneg.images.features import extract_set
from hardneg.training import build

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("evidence")


def queue(evidence: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["evidence.py", "smoke", "--out", str(out), *arguments])
    evidence.main()


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "smoke.jsonl").read_text().splitlines()]


CURVE = ("name", "seed", "knn", "loss", "false_negatives", "mean_cosine", "seen", "linear")


def test_a_run_stopped_in_time_goes_on_as_if_it_had_not_been(
    evidence: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table = evidence.load_table("smoke")
    cell = table.cells[1]
    assert "batches.sampler=proximity" in cell.overrides
    whole = evidence.run_cell(cell, "digits", tmp_path / "whole", math.inf)
    check = evidence.Watch._check_time

    def over_after_two_epochs(watch: Any) -> None:
        if len(watch.epochs) == 2:
            watch.deadline = 0.0
        check(watch)

    monkeypatch.setattr(evidence.Watch, "_check_time", over_after_two_epochs)
    with pytest.raises(evidence.OutOfTimeError):
        evidence.run_cell(cell, "digits", tmp_path / "parts", math.inf)
    monkeypatch.setattr(evidence.Watch, "_check_time", check)
    resumed = evidence.run_cell(cell, "digits", tmp_path / "parts", math.inf)
    assert (whole["resumed"], resumed["resumed"]) == (False, True)
    assert {name: resumed.get(name) for name in CURVE} == {name: whole.get(name) for name in CURVE}
    assert set(whole["knn"]) == {"1", "2", "4"}
    assert whole["seen"][4] < 0.9 < 0.95 < whole["seen"][1] + whole["seen"][2]
    assert not (tmp_path / "parts").exists()


def test_an_unfinished_run_of_other_source_starts_anew(
    evidence: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cell = evidence.load_table("smoke").cells[0]
    stale = {"source": "another", "knn": {"1": 0.0}, "epochs": [], "spent": 0.0}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "evidence.json").write_text(json.dumps(stale))
    found = evidence.run_cell(cell, "digits", tmp_path / "run", math.inf)
    assert found["resumed"] is False
    assert found["knn"]["1"] > 0.5


@pytest.mark.slow
def test_the_queue_runs_what_is_missing_once_and_tells_it(
    evidence: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queue(evidence, monkeypatch, tmp_path, "--minutes", "0")
    assert not (tmp_path / "smoke.jsonl").exists()
    queue(evidence, monkeypatch, tmp_path, "--minutes", "30")
    first = records(tmp_path)
    assert [(line["name"], line["seed"]) for line in first] == [
        ("uniform", 0), ("proximity", 0), ("proximity, raw inner products", 0), ("uniform", 1),
    ]  # fmt: skip
    for name in ("command", "commit", "machine", "versions", "recipe", "overrides", "linear_converged"):
        assert first[0][name] is not None
    parts = first[1]["seconds_per_epoch"]
    assert 0 < parts["encode"] + parts["graph"] + parts["training"] < 1.05 * parts["all"]
    kept = [line for line in first if line["name"] != "proximity"]
    (tmp_path / "smoke.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept) + '{"key": "cut o')
    queue(evidence, monkeypatch, tmp_path, "--minutes", "30")
    again = [line for text in (tmp_path / "smoke.jsonl").read_text().splitlines() if "cut o" not in text
             for line in [json.loads(text)]]  # fmt: skip
    assert len(again) == 4
    assert {name: again[-1][name] for name in CURVE} == {name: first[1][name] for name in CURVE}
    capsys.readouterr()
    queue(evidence, monkeypatch, tmp_path, "--table")
    shown = capsys.readouterr().out
    mean = 50 * (first[0]["knn"]["4"] + first[3]["knn"]["4"])
    row = next(line for line in shown.splitlines() if line.startswith("| uniform | 2 |"))
    assert f" {mean:.1f} ± " in row


def test_a_run_that_another_process_has_is_left_to_it(
    evidence: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[str] = []

    def run_cell(cell: Any, source: str, folder: Path, *rest: Any) -> dict[str, Any]:
        with evidence.claimed(folder) as free:
            assert not free  # while it runs
        ran.append(cell.key)
        return {"seconds_per_epoch": {"all": 1.0}}

    monkeypatch.setattr(evidence, "run_cell", run_cell)
    cells = evidence.load_table("smoke").cells
    folder = tmp_path / "runs" / hashlib.sha256(cells[1].key.encode()).hexdigest()[:12]
    with evidence.claimed(folder) as free:
        assert free
        queue(evidence, monkeypatch, tmp_path, "--workers", "2")
    assert ran == [cell.key for cell in cells if cell is not cells[1]]
    assert {line["workers"] for line in records(tmp_path)} == {2}
    queue(evidence, monkeypatch, tmp_path)
    assert ran[3:] == [cells[1].key]
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.slow
def test_two_processes_share_the_runs_of_a_table(tmp_path: Path) -> None:
    file = tmp_path / "few.yaml"
    head = "about: A test.\ndata: digits\nrecipe: digits-simclr\nepochs: 1\npace: 1\nmetrics: [knn]\n"
    file.write_text(head + "cells: [{name: plain, seeds: [0, 1, 2, 3, 4]}]\n")
    script = [sys.executable, str(BENCHMARKS / "evidence_workers.py"), "2", str(file), "--out", str(tmp_path / "out")]
    done = subprocess.run(script, capture_output=True, text=True, encoding="utf-8", check=True)
    lines = [json.loads(line) for line in (tmp_path / "out" / "few.jsonl").read_text().splitlines()]
    assert sorted(line["seed"] for line in lines) == [0, 1, 2, 3, 4]
    assert {line["workers"] for line in lines} == {2}
    assert done.stdout.count("runs finished") == 2
    wrong = subprocess.run([*script[:2], "few"], capture_output=True, text=True, encoding="utf-8", check=False)
    assert wrong.returncode == 1
    assert "number of processes" in wrong.stderr


def test_images_are_chosen_on_a_tenth_of_each_class_of_the_training_set(evidence: ModuleType, tmp_path: Path) -> None:
    labels = np.repeat(np.arange(3), [40, 30, 20])
    images = np.arange(90, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 2, 1), np.uint8)
    arrays = {"train_images": images, "train_labels": labels, "classes": np.array(["a", "b", "c"])}
    np.savez(tmp_path / "small.npz", **arrays, test_images=200 + images[:2], test_labels=labels[:2])
    with np.load(evidence.hold_out(tmp_path / "small.npz")) as found:
        kept, held = found["train_images"][:, 0, 0, 0], found["test_images"][:, 0, 0, 0]
        assert sorted([*kept, *held]) == list(range(90))  # nothing of the test set
        assert np.bincount(found["test_labels"]).tolist() == [4, 3, 2]
        assert (labels[held] == found["test_labels"]).all()
        assert (labels[kept] == found["train_labels"]).all()


@pytest.mark.slow
def test_a_table_of_texts_records_the_metrics_of_its_recipe(evidence: ModuleType, tmp_path: Path) -> None:
    cell = evidence.load_table("quickthoughts").cells[2]
    small = ("encoder={name: gru, options: {width: 16, word_dim: 8, words: 100}}", "trainer.accelerator=cpu")
    changed = replace(cell, overrides=(*cell.overrides, *small), epochs=1, metrics=("uniformity",))
    found = evidence.run_cell(changed, "python-docs", tmp_path / "run", math.inf)
    assert found["metrics"]["uniformity"] < 0
    assert found["knn"] == {}
    assert 0.8 < found["seen"][1] <= 1  # whole batches of 400 of 2,300 sentences


def test_a_row_with_details_records_cosines_of_pairs_and_the_losses_of_h_scl(
    evidence: ModuleType, tmp_path: Path
) -> None:
    cell = next(cell for cell in evidence.load_table("digits").cells if cell.name == "H-SCL(τ)")
    assert cell.details
    found = evidence.run_cell(replace(cell, epochs=2, knn_at=()), "digits", tmp_path / "run", math.inf)
    assert 0 < found["pairs"]["overlap"] < 1
    assert found["pairs"]["different"] < found["pairs"]["same"] <= 1
    assert set(found["orderings"]) == {"1", "2"}
    insight = found["insight"][2]  # of the same batch, by the run's own callback
    for name in ("ucl", "h_ucl", "scl", "h_scl", "assumption_1"):
        assert found["orderings"]["2"]["β = 1"][name] == pytest.approx(insight[name], abs=1e-4)
    hardenings = found["orderings"]["2"].values()
    assert len({each["h_ucl"] for each in hardenings}) == 4  # each hardening has its own
    assert len({each["ucl"] for each in hardenings}) == 1  # which a loss without hardening does not have


def test_an_untrained_row_is_the_encoder_of_a_run_before_its_first_step(evidence: ModuleType) -> None:
    cell = next(cell for cell in evidence.load_table("digits").cells if cell.variant == "untrained")
    found, other = (evidence.untrained_cell(replace(cell, seed=seed), "digits") for seed in (0, 1))
    settings = cell.settings("digits")
    torch.manual_seed(5)  # of no influence: the weights are those of the recipe's seed
    encoder = build.method(settings, build.data(settings)).encoder
    train, test = (extract_set(encoder, load_split("digits", part, labels=True)) for part in ("train", "test"))
    assert found["knn"] == {"30": pytest.approx(knn_accuracy(*train, *test))}
    assert found["linear"] > 0.9
    assert found["knn"] != other["knn"]


def test_rows_of_a_table_may_have_graphs_of_their_own(
    evidence: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "tu" / "RINGS"
    folder.mkdir(parents=True)
    pairs = [(4 * graph + node, 4 * graph + (node + 1) % 4) for graph in range(30) for node in range(3 + graph % 2)]
    both = [*pairs, *((second, first) for first, second in pairs)]
    texts = {
        "A": [f"{first + 1}, {second + 1}" for first, second in both],
        "graph_indicator": [node // 4 + 1 for node in range(120)],
        "graph_labels": [graph % 2 for graph in range(30)],
    }
    for name, rows in texts.items():
        (folder / f"RINGS_{name}.txt").write_text("".join(f"{row}\n" for row in rows))
    monkeypatch.setenv("HARDNEG_DATA", str(tmp_path))
    table = evidence.load_table("graphs")
    assert evidence.data_source(table, None) == "tu:MUTAG"
    assert len({cell.data for cell in table.cells}) > 2
    small = ("trainer.batch_size=16",)
    cell = replace(table.cells[-1], data="tu:RINGS", epochs=2, overrides=(*table.cells[-1].overrides, *small))
    assert cell.key != replace(cell, data="").key
    found = evidence.run_cell(cell, "tu:MUTAG", tmp_path / "run", math.inf)
    assert found["metrics"]["svm"] > 0.9  # rings against paths
    assert found["seen"] == {2: 1.0}


def test_a_difference_in_a_table_is_that_of_welchs_test(evidence: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "compared.yaml"
    cells = "cells: [{name: plain}, {name: hard, overrides: [objective.preset=hcl], against: plain}]\n"
    head = "about: A test.\ndata: digits\nrecipe: digits-simclr\nepochs: 2\nknn_at: [1, 2]\npace: 1\nlinear: true\n"
    file.write_text(head + "rounds: [[0, 1], [2]]\n" + cells)
    table = evidence.load_table(str(file))
    assert [(cell.name, cell.seed) for cell in table.cells] == [
        ("plain", 0), ("plain", 1), ("hard", 0), ("hard", 1), ("plain", 2), ("hard", 2),
    ]  # fmt: skip
    accuracy = {"plain": [0.90, 0.91, 0.92], "hard": [0.95, 0.951, 0.94]}
    probe = {"plain": [0.97, 0.98, 0.96], "hard": [0.96, 0.97, 0.965]}
    with (tmp_path / "compared.jsonl").open("w") as out:
        for cell in table.cells:
            knn = {"1": 0.5, "2": accuracy[cell.name][cell.seed]}
            line = {"key": cell.key, "name": cell.name, "knn": knn, "linear": probe[cell.name][cell.seed]}
            about = {"machine": "m", "versions": {"torch": "t"}, "commit": "c", "seconds_per_epoch": {}}
            out.write(json.dumps({**line, **about}) + "\n")
    shown = evidence.markdown(table, tmp_path)
    row = next(line for line in shown.splitlines() if line.startswith("| hard | 3 |")).split(" | ")
    tests = [stats.ttest_ind(part["hard"], part["plain"], equal_var=False) for part in (accuracy, probe)]
    assert tests[0].pvalue < 0.05 < tests[1].pvalue
    errors = [math.sqrt(sum(np.var(part[name], ddof=1) / 3 for name in part)) for part in (accuracy, probe)]
    assert row[5] == "plain"
    assert row[6] == f"+3.7 ± {100 * errors[0]:.1f} \\*"
    assert row[7].removesuffix(" |") == f"−0.5 ± {100 * errors[1]:.1f}"
    file.write_text(head + cells.replace("against: plain", "against: simple, seeds: [0]"))
    with pytest.raises(ValueError, match="simple"):
        evidence.load_table(str(file))


def test_every_table_is_sound(evidence: ModuleType) -> None:
    tables = [evidence.load_table(file.stem) for file in sorted(evidence.TABLES.glob("*.yaml"))]
    assert {table.name for table in tables} >= {"images", "proximity", "quickthoughts", "simcse", "smoke"}


def test_the_list_of_tables_tells_what_is_missing_and_how_long_it_takes(
    evidence: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = tmp_path / "tables"
    tables.mkdir()
    head = "about: A test.\ndata: digits\nrecipe: digits-simclr\nepochs: 3\npace: 60\nmachine: a GPU\n"
    (tables / "few.yaml").write_text(
        head + "cells: [{name: hcl, overrides: [objective.preset=hcl], seeds: [0, 1]}, {name: plain, seeds: [0, 1]}]\n"
    )
    (tables / "none.yaml").write_text(head + "cells: [{name: plain, seeds: [0, 1]}]\n")
    monkeypatch.setattr(sys.modules["evidence_tables"], "TABLES", tables)
    hcl, other, plain, _ = evidence.load_table("few").cells
    runs = [(hcl, 100.0), (other, 200.0), (plain, 600.0)]
    lines = [{"key": cell.key, "name": cell.name, "seconds": spent, "machine": "mine"} for cell, spent in runs]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(sys, "argv", ["evidence.py", "--list", "--out", str(tmp_path)])
    evidence.main()
    # The missing run of few is "plain", which took ten minutes; none has two runs of three epochs of a minute.
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| few | digits | 3 | 1 | mine | 10 |", "| none | digits | 0 | 2 | a GPU (estimated) | 6 |"
    ]  # fmt: skip


def test_a_call_goes_on_with_the_next_table(
    evidence: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[str] = []

    def run_cell(cell: Any, *rest: Any) -> dict[str, Any]:
        ran.append(cell.name)
        return {"seconds_per_epoch": {"all": 1.0}}

    monkeypatch.setattr(evidence, "run_cell", run_cell)
    head = "about: A test.\ndata: digits\nrecipe: digits-simclr\nepochs: 1\npace: 1\n"
    files = [tmp_path / "first.yaml", tmp_path / "second.yaml"]
    for file in files:
        file.write_text(head + f"cells: [{{name: {file.stem}, seeds: [0, 1]}}]\n")
    monkeypatch.setattr(sys, "argv", ["evidence.py", *map(str, files), "--out", str(tmp_path / "out")])
    evidence.main()
    assert ran == ["first", "first", "second", "second"]
    monkeypatch.setattr(sys, "argv", ["evidence.py"])
    with pytest.raises(SystemExit):
        evidence.main()


def test_plots_of_recorded_runs_are_written(
    evidence: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["evidence.py", "images-cpu", "--table", "--plots", str(tmp_path / "plots")])
    evidence.main()
    for name in ("results-images-cpu.svg", "results-images-cpu-epochs.svg"):
        recorded = BENCHMARKS.parent / "docs" / name
        assert (tmp_path / "plots" / name).read_text(encoding="utf-8") == recorded.read_text(encoding="utf-8")


def test_a_commit_is_dirty_if_files_other_than_results_differ(
    evidence: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = evidence.record

    def git(*command: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        done = subprocess.run(["git", "-C", str(tmp_path), *identity, *command], capture_output=True, check=True)
        return done.stdout.decode().strip()

    monkeypatch.setattr(record, "__file__", str(tmp_path / "benchmarks" / "record.py"))
    assert record.commit() == "unknown"
    for folder in ("benchmarks", "results"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_text("one")
    git("init")
    git("add", ".")
    git("commit", "-m", "One")
    head = git("rev-parse", "HEAD")
    assert record.commit() == head
    (tmp_path / "results" / "file").write_text("two")
    assert record.commit() == head
    (tmp_path / "benchmarks" / "file").write_text("two")
    assert record.commit() == f"{head}-dirty"

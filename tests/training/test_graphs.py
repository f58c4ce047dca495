"""Graphs through the engine and the command line: trained, resumed exactly, compared and judged."""

import json
import math
import os
from pathlib import Path

import pytest
import torch

from hardneg.evaluation import svm
from hardneg.graphs.features import extract_graphs
from hardneg.training import build, compare, evaluate, recipe, run, saved_run

pytest.importorskip("torch_geometric", reason="graphs need torch_geometric")


@pytest.fixture(autouse=True)
def _collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set in the TU format beside us: rings against stars of 5 to 9 nodes."""
    monkeypatch.chdir(tmp_path)
    raw = tmp_path / "data" / "tu" / "SHAPES" / "raw"
    raw.mkdir(parents=True)
    edges, owners, labels, first = [], [], [], 1
    for number in range(60):
        size, star = 5 + number % 5, number % 2
        nodes = range(first, first + size)
        pairs = [(first, other) for other in nodes[1:]] if star else list(zip(nodes, [*nodes[1:], first], strict=True))
        edges += [f"{a}, {b}" for pair in pairs for a, b in (pair, pair[::-1])]
        owners += [str(number + 1)] * size
        labels.append(str(star))
        first += size
    for name, lines in (("A", edges), ("graph_indicator", owners), ("graph_labels", labels)):
        (raw / f"SHAPES_{name}.txt").write_text("\n".join(lines) + "\n")


QUICK = ["data.source=tu:SHAPES", "trainer.epochs=3", "trainer.batch_size=16", "trainer.save_every=3"]
WAYS = {
    "infograph": ("mutag-infograph", ["objective.beta=1"]),
    "graphcl": ("imdb-binary-graphcl", ["data.features=degree", "objective.preset=hcl", "objective.in_batch=other"]),
    "proximity": ("imdb-binary-graphcl", ["data.features=degree", "batches.sampler=proximity", "batches.candidates=20",
                                          "batches.neighbors=5", "batches.refresh_every=3"]),
}  # fmt: skip


def test_graphs_beside_us_are_found_from_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HARDNEG_DATA", raising=False)
    made = recipe.load(recipe.find("mutag-infograph"), [*QUICK, "trainer.epochs=1"])
    run.train(made, tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert evaluate.evaluate(tmp_path / "run").keys() == {"svm"}
    run.train(made, tmp_path / "run", resume=True)
    (tmp_path / "data").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"data\.source='tu:.*SHAPES' is not there"):
        evaluate.evaluate(tmp_path / "run")


def settings(way: str) -> recipe.Recipe:
    name, more = WAYS[way]
    return recipe.load(recipe.find(name), [*QUICK, *more])


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_run_is_trained_judged_and_resumed_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    whole = run.train(settings(way), tmp_path / "whole")
    assert math.isfinite(whole.metrics["loss"])
    assert whole.metrics["step"] == 12  # the last, smaller batch of an epoch is kept

    class Stop(Exception):
        pass

    from hardneg.training.callbacks.checkpoints import Checkpoints

    step = Checkpoints.on_train_batch_end

    def stopped(self: Checkpoints, trainer: object, *rest: object) -> None:
        step(self, trainer, *rest)  # type: ignore[arg-type]
        if trainer.global_step == 7:  # type: ignore[attr-defined]
            raise Stop

    monkeypatch.setattr(Checkpoints, "on_train_batch_end", stopped)
    with pytest.raises(Stop):
        run.train(settings(way), tmp_path / "part")
    monkeypatch.setattr(Checkpoints, "on_train_batch_end", step)
    run.train(settings(way), tmp_path / "part", resume=True)
    files = [(tmp_path / name / "encoder.safetensors").read_bytes() for name in ("whole", "part")]
    assert files[0] == files[1]

    figures = evaluate.evaluate(tmp_path / "whole")
    assert figures == json.loads((tmp_path / "whole" / "evaluation.json").read_text())
    assert figures["svm"] > 0.9  # a star has a node of high degree
    loaded = saved_run.load_run(tmp_path / "whole")
    assert torch.equal(extract_graphs(loaded.encoder, build.data(loaded.settings)),  # type: ignore[arg-type]
                       extract_graphs(whole.encoder, build.data(loaded.settings)))  # type: ignore[arg-type]  # fmt: skip


def test_graphs_are_compared_over_hardness(tmp_path: Path) -> None:
    cells = compare.grid(["mutag-infograph"], QUICK, ["objective.beta=0,2"])
    runs = compare.plan(cells, tmp_path / "grid", [0])
    compare.check_data(runs)
    assert [error for _, error in compare.carry_out(runs)] == [None, None]
    assert set(compare.results(runs)) == {"objective.beta=0", "objective.beta=2"}


def test_an_unconverged_machine_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = compare.plan(compare.grid(["mutag-infograph"], QUICK, []), tmp_path / "grid", [3])
    monkeypatch.setattr(svm, "STEPS", 1)
    assert [error for _, error in compare.carry_out(runs)] == [None]
    note = json.loads((runs[0].folder / "evaluation.json").read_text(encoding="utf-8"))["notes"]["svm"]
    assert note == "not converged after 1 iterations in 10 of 10 folds"
    assert compare.notes(runs) == {"mutag-infograph": {"svm": [f"{note} (seed 3)"]}}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method=simclr"], "method for graphs='simclr' is not known"),
        (["method=graphcl"], "method=graphcl compares graphs"),
        (["encoder.name=resnet18"], "encoder for graphs='resnet18' is not known"),
        (["encoder.options={width: 8, depth: 2}"], "options of encoder='gin'"),
        (["data.source=tu:NOTHING"], "'NOTHING' is not in"),
        (["data.source=digits"], "method"),
        (["trainer.devices=2"], "graphs are trained on one device"),
    ],
)
def test_what_does_not_fit_graphs_is_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    made = recipe.load(recipe.find("mutag-infograph"), [*QUICK, *overrides])
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run.train(made, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("HARDNEG_DATA"), reason="needs HARDNEG_DATA")
def test_mutag_is_learnt_from_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "data" / "tu").rename(tmp_path / "elsewhere")
    run.train(recipe.load(recipe.find("mutag-infograph"), ["trainer.epochs=20"]), tmp_path / "run")
    assert evaluate.evaluate(tmp_path / "run")["svm"] > 0.8

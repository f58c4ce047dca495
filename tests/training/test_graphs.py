"""Runs on graphs: trained, resumed exactly, compared and evaluated."""

import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hardneg.evaluation import svm
from hardneg.graphs.features import extract_graphs
from hardneg.graphs.files import read_graphs
from hardneg.training import build, compare, evaluate, recipe, run, saved_run

pytest.importorskip("torch_geometric", reason="graphs need torch_geometric")


@pytest.fixture(autouse=True)
def _collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set in the TU format in the working directory: rings and stars of 5 to 9 nodes."""
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
    "bank": ("imdb-binary-graphcl", ["data.features=degree", "batches.sampler=proximity", "batches.candidates=20",
                                     "batches.neighbors=5", "batches.refresh_every=3", "batches.embeddings=bank"]),
}  # fmt: skip


def test_graphs_of_the_working_directory_are_found_from_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HARDNEG_DATA", raising=False)
    made = recipe.load(recipe.find("mutag-infograph"), [*QUICK, "trainer.epochs=1"])
    run.train(made, tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert evaluate.evaluate(tmp_path / "run").keys() == {"svm"}
    run.train(made, tmp_path / "run", resume=True)
    (tmp_path / "data").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"data\.source='tu:.*SHAPES' does not exist"):
        evaluate.evaluate(tmp_path / "run")


@pytest.mark.parametrize("kind", ["npz", "safetensors", "folder"])
def test_own_files_of_graphs_give_the_run_of_the_same_graphs_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    raw = tmp_path / "data" / "tu" / "SHAPES" / "raw"
    source = "mine" if kind == "folder" else f"mine.{kind}"
    if kind == "folder":
        shutil.copytree(raw, tmp_path / "mine")
    else:
        graphs = read_graphs(raw)
        owner = torch.repeat_interleave(torch.arange(len(graphs)), graphs.ptr.diff())
        arrays = {"x": graphs.x, "edge_index": graphs.edge_index, "batch": owner, "y": graphs.labels}
        if kind == "npz":
            np.savez(tmp_path / source, **{name: tensor.numpy() for name, tensor in arrays.items()})
        else:
            save_file(arrays, tmp_path / source)
    run.train(settings("infograph", "trainer.epochs=1"), tmp_path / "by-name")
    run.train(settings("infograph", "trainer.epochs=1", f"data.source={source}"), tmp_path / "run")
    files = [(tmp_path / name / "encoder.safetensors").read_bytes() for name in ("run", "by-name")]
    assert files[0] == files[1]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert evaluate.evaluate(tmp_path / "run")["svm"] > 0.9


def settings(way: str, *further: str) -> recipe.Recipe:
    name, more = WAYS[way]
    return recipe.load(recipe.find(name), [*QUICK, *more, *further])


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_run_is_trained_evaluated_and_resumed_bitwise(
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
    assert torch.equal(extract_graphs(loaded.encoder, build.data(loaded.settings)),
                       extract_graphs(whole.encoder, build.data(loaded.settings)))  # fmt: skip


def test_graphs_are_compared_over_hardness(tmp_path: Path) -> None:
    cells = compare.grid(["mutag-infograph"], QUICK, ["objective.beta=0,2"])
    runs = compare.plan(cells, tmp_path / "grid", [0])
    compare.check_data(runs)
    assert [error for _, error in compare.carry_out(runs)] == [None, None]
    assert list(compare.results(runs)) == ["beta 0", "beta 2"]


def test_an_unconverged_svm_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = compare.plan(compare.grid(["mutag-infograph"], QUICK, []), tmp_path / "grid", [3])
    monkeypatch.setattr(svm, "STEPS", 1)
    assert [error for _, error in compare.carry_out(runs)] == [None]
    note = json.loads((runs[0].folder / "evaluation.json").read_text(encoding="utf-8"))["notes"]["svm"]
    assert note == "not converged after 1 iterations in 10 of 10 folds"
    assert compare.notes(runs) == {"mutag-infograph": {"svm": [f"{note} (seed 3)"]}}


REFUSED = {
    "a method for images": (
        "infograph",
        "method=simclr",
        "holds graphs, and method=simclr trains on images",
    ),
    "a typed setting of another loss": ("infograph", "method=graphcl", "objective.beta is not an argument of graphcl"),
    "images": (
        "infograph",
        "data.source=digits",
        "data.source=digits holds images, and method=infograph trains on graphs",
    ),
    "a set that is not there": ("infograph", "data.source=tu:NOTHING", "tu:NOTHING is not in data/tu"),
    "an image encoder": ("infograph", "encoder.name=resnet18", "encoder.name='resnet18' is not known: .*'gin'"),
    "an unknown encoder option": ("infograph", "encoder.options={width: 8, depth: 2}", "encoder.options: .*'depth'"),
    "a projection head": ("graphcl", "encoder.outputs=7", "encoder.outputs is not used by method=graphcl on graphs"),
    "views of a method without views": ("infograph", "views.preset=graphcl", "views.preset is not used by .*graphcl"),
    "an unknown preset": ("graphcl", "views.preset=nonsense", "views.preset='nonsense' is not known: .*'graphcl'"),
    "an unknown option of views": ("graphcl", "views.options.foo=1", "views.options: .*'foo'"),
    "a memory": ("graphcl", "memory.queue=3", "memory.queue is not used by method=graphcl on graphs: leave it out"),
    "compilation": ("graphcl", "trainer.compile=default", "trainer.compile is not used by method=graphcl on graphs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_do_not_fit_graphs_are_refused_before_anything_is_written(tmp_path: Path, case: str) -> None:
    way, override, message = REFUSED[case]
    name, more = WAYS[way]
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run.train(recipe.load(recipe.find(name), [*QUICK, *more, override]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("HARDNEG_DATA"), reason="needs HARDNEG_DATA")
def test_the_mutag_recipe_learns(tmp_path: Path) -> None:
    (tmp_path / "data" / "tu").rename(tmp_path / "elsewhere")
    run.train(recipe.load(recipe.find("mutag-infograph"), ["trainer.epochs=20"]), tmp_path / "run")
    assert evaluate.evaluate(tmp_path / "run")["svm"] > 0.8

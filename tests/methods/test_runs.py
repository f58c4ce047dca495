"""Methods with a memory learn in real runs, resume exactly, and train to the same weights in two processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from methods.gradients import Gradients
from torch import Tensor

from hardneg.evaluation import extract, few_label_accuracy
from hardneg.images import ImageSet, load_split
from hardneg.training import build, recipe, run, saved_run

PATHS = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(run.__file__).parents[2])])  # tests and package
SHORT = ["trainer.epochs=3", "trainer.save_every=2", "trainer.knn_every=0"]
RING = "objective={preset: ring_nce, temperature: 0.2, lower: 0.5, upper: 0.9}"
LEARNERS = {
    "IR": ("ir", []),
    "IRing": ("ir", [RING]),
    "IRCave": ("ir", ["memory={clusters: 5, close: negatives, cluster_after: 10, cluster_every: 5}"]),
    "IRing(+C)": ("ir", [RING, "memory={clusters: 30, close: positives, cluster_after: 10, cluster_every: 5}"]),
    "MoCo": ("moco", []),
    "MoCoRing": ("moco", [RING]),
    "hard MoCo": ("moco", ["objective={preset: hcl, beta: 0.5, tau_plus: 0.0, temperature: 0.2}"]),
    "MoCo v3": ("mocov3", []),
    "CMC": ("cmc", []),
    "LA": ("la", []),
}


def states(folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]  # type: ignore[no-any-return]


def child(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    folders = Path(__file__).parents[1], Path(run.__file__).parents[2]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "PATH": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


VARIANTS = ("IRing", "IRCave", "IRing(+C)", "MoCoRing", "hard MoCo")


@pytest.mark.parametrize(
    "learner", [pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS else name for name in LEARNERS]
)
def test_training_improves_on_the_untrained_encoder(learner: str, tmp_path: Path) -> None:
    name, overrides = LEARNERS[learner]
    settings = recipe.load(recipe.find(f"digits-{name}"), [*overrides, "trainer.epochs=25", "trainer.knn_every=0"])
    train_set, test_set = (load_split("digits", part, labels=True) for part in ("train", "test"))
    assert isinstance(train_set, ImageSet)
    assert isinstance(test_set, ImageSet)

    def accuracy(encoder: torch.nn.Module) -> float:
        prepare = settings.kind.views(settings.views, (1, 8, 8)).plain
        features = [extract(encoder, part.images, prepare=prepare) for part in (train_set, test_set)]
        assert train_set.labels is not None
        assert test_set.labels is not None
        return few_label_accuracy(features[0], train_set.labels, features[1], test_set.labels, per_class=5)[0]

    untrained = accuracy(build.method(settings, train_set).encoder)
    trained = accuracy(run.train(settings, tmp_path / "run").encoder)
    assert trained > untrained + 0.015


KILLED = """
import os, signal, sys
from hardneg.training import recipe, run
from hardneg.training.callbacks.checkpoints import Checkpoints
folder, moment, name, *overrides = sys.argv[1:]
step = Checkpoints.on_train_batch_end
def then_kill(self, trainer, *rest):
    step(self, trainer, *rest)
    if trainer.global_step == int(moment):
        os.kill(os.getpid(), signal.SIGKILL)
Checkpoints.on_train_batch_end = then_kill
run.train(recipe.load(recipe.find(name), overrides), folder)
"""
RESUMED = {
    "queue and annealing": ("moco", [RING]),
    "queue and adaptive annealing": ("moco", ["objective={preset: ring_nce, temperature: 0.2, anneal: loss}"]),
    "momentum": ("mocov3", []),
    "bank, clusters and draws": ("ir", [RING, "objective.num_negatives=50",
                                 "memory={clusters: 9, repeats: 2, close: positives, cluster_after: 1}"]),
    "two banks and clusters": ("cmc", ["memory={clusters: 9, close: negatives, cluster_after: 1, cluster_every: 2}"]),
    "aggregation": ("la", ["memory={clusters: 30, cluster_after: 1, cluster_every: 2, background: 100}"]),
}  # fmt: skip


FURTHER = ("queue and adaptive annealing", "momentum", "two banks and clusters")


@pytest.mark.parametrize(
    "memory", [pytest.param(name, marks=pytest.mark.slow) if name in FURTHER else name for name in RESUMED]
)
def test_a_run_killed_in_mid_epoch_resumes_bitwise(memory: str, tmp_path: Path) -> None:
    name, overrides = RESUMED[memory]
    overrides = [*overrides, *SHORT]
    run.train(recipe.load(recipe.find(f"digits-{name}"), overrides), tmp_path / "whole")
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    # Five steps in an epoch: step 8 was saved, step 9 is lost; clusters were fitted before both.
    killed = child(str(script), str(tmp_path / "killed"), "9", f"digits-{name}", *overrides)
    assert killed.returncode == -9, killed.stderr
    run.train(recipe.load({}), tmp_path / "killed", resume=True)
    whole, resumed = states(tmp_path / "whole"), states(tmp_path / "killed")
    assert whole.keys() == resumed.keys()
    for key, tensor in whole.items():
        assert torch.equal(tensor, resumed[key]), key
    curves = [
        [(line["step"], line["loss"]) for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]
        for folder in (tmp_path / "whole", tmp_path / "killed")
    ]
    assert curves[0] == curves[1]


TWO = """
import sys
from methods.gradients import Gradients
from hardneg.training import recipe, run
folder, name, *overrides = sys.argv[1:]
run.train(recipe.load(recipe.find(name), overrides), folder, callbacks=[Gradients(folder)])
"""
PLAIN = ["encoder.name=processes:plain_encoder", "encoder.norm=false", "trainer.epochs=2", "trainer.knn_every=0",
         "trainer.batch_size=240", "optimizer={name: sgd, lr: 0.03}"]  # fmt: skip
# No ring, and the whole bank as background: rounding would decide whether a row at the edge belongs to it.
SHARED = {
    "moco": ["memory={queue: 1000, momentum: 0.9, split: 1}"],
    "mocov3": [],
    "ir": ["objective.num_negatives=50", "memory={clusters: 9, close: positives, cluster_after: 1}"],
    "la": ["memory={clusters: 9, cluster_after: 1, background: 2000}"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moco", "ir", "mocov3", "la"])
def test_two_processes_have_the_memory_gradients_and_weights_of_one(name: str, tmp_path: Path) -> None:
    changes = [*SHARED[name], *PLAIN]
    if name in ("moco", "mocov3"):  # each process finds the pairs of its own anchors
        listed = [{"a": a, "b": (7 * a + b) % 1297} for a in range(1297) for b in (1, 2, 3) if (7 * a + b) % 1297 != a]
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in listed))
        changes.append(f"data.not_negatives={tmp_path / 'pairs.jsonl'}")
    one = Gradients(str(tmp_path / "1"))
    run.train(recipe.load(recipe.find(f"digits-{name}"), changes), tmp_path / "1", callbacks=[one])
    script = tmp_path / "two.py"
    script.write_text(TWO)
    done = child(str(script), str(tmp_path / "2"), f"digits-{name}", *changes, "trainer.devices=2")
    assert done.returncode == 0, done.stderr

    (alone, first, second) = (torch.load(tmp_path / part, weights_only=True) for part in ("1.0", "2.0", "2.1"))
    for key, tensor in alone["state"].items():
        assert torch.equal(first["state"][key], second["state"][key]), key
        torch.testing.assert_close(first["state"][key], tensor, rtol=1e-6, atol=1e-6)
    assert len(alone["gradients"]) == len(first["gradients"]) == 10
    for ours, theirs in zip(alone["gradients"], first["gradients"], strict=True):
        assert ours.keys() == theirs.keys()
        for key, gradient in ours.items():
            torch.testing.assert_close(theirs[key], gradient, rtol=1e-6, atol=1e-6)


def test_a_run_of_two_views_is_loaded_like_any_other(tmp_path: Path) -> None:
    trained = run.train(recipe.load(recipe.find("digits-cmc"), SHORT), tmp_path / "run").encoder.eval()
    loaded = saved_run.load_run(tmp_path / "run")
    images = loaded.prepare(torch.randint(0, 256, (5, 1, 8, 8), dtype=torch.uint8))
    assert torch.equal(loaded.encoder(images), trained(images))


def test_a_run_with_split_norms_is_loaded_as_a_plain_encoder(tmp_path: Path) -> None:
    run.train(recipe.load(recipe.find("digits-moco"), SHORT), tmp_path / "run")
    assert any(type(layer) is torch.nn.BatchNorm1d for layer in saved_run.load_run(tmp_path / "run").encoder.modules())

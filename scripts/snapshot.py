"""Losses, gradients and trained weights of many settings, stored once and compared after a change.

    python scripts/snapshot.py write before.npz
    python scripts/snapshot.py compare before.npz
    python scripts/snapshot.py compare before.npz losses    # without the runs
    python scripts/snapshot.py compare before.npz graphs    # with the runs on graphs, which need the TU sets

Only the public API and the command line are used, so that the script runs with two versions of the package. Losses,
gradients and diagnostics are compared with a tolerance of 2e-5 in float32 and 1e-9 in float64, relative and absolute,
because kernels may sum in another order; weights of runs are compared bitwise. Everything runs on the CPU. A file that
was written with ``graphs`` must be compared with ``graphs``: other runs are reported as missing.
"""

import itertools
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hardneg as hn

RUNS = {
    "simclr": ("digits-simclr", ()),
    "hcl": ("digits-simclr", ("objective.preset=hcl",)),
    "hscl": ("digits-simclr", ("objective.preset=hscl",)),
    "supcon": ("digits-simclr", ("objective.preset=supcon",)),
    "proximity": ("digits-simclr", ("batches.sampler=proximity", "batches.refresh_every=3")),
    "proximity-bank": (
        "digits-simclr",
        ("batches.sampler=proximity", "batches.refresh_every=3", "batches.embeddings=bank"),
    ),
    "knn": ("digits-simclr", ("batches.sampler=knn", "batches.refresh_every=3")),
    "moco": ("digits-moco", ()),
    "moco-ring": ("digits-moco", ("objective.preset=ring_nce",)),
    "mocov3": ("digits-mocov3", ()),
    "ir": ("digits-ir", ()),
    "cmc": ("digits-cmc", ()),
    "la": ("digits-la", ("memory.cluster_after=1",)),
    "ir-adaptive": (
        "digits-ir",
        ("objective.preset=ring_nce", "objective.anneal=accuracy", "trainer.knn_every=1", "trainer.epochs=4"),
    ),
}
GRAPH_RUNS = {
    "graphcl": ("imdb-binary-graphcl", ()),
    "infograph": ("mutag-infograph", ()),
    "infograph-hard": ("mutag-infograph", ("objective.beta=1", "objective.tau_plus=0.1")),
}


def settings() -> dict[str, tuple[dict[str, Any], str]]:
    """Arguments of `InfoNCE` by name, and the kind of call."""
    hardenings: dict[str, Any] = {
        "uniform": hn.Uniform(),
        "tilt": hn.Exponential(1.5),
        "ring": hn.Ring(0.3, 0.9),
        "ring+tilt": (hn.Ring(0.3, 0.9), hn.Exponential(0.7)),
        "threshold": hn.Threshold(0.9),
        "below": hn.BelowPositive(0.1),
        "custom": hn.Custom(lambda s: s.sigmoid()),
    }
    found: dict[str, tuple[dict[str, Any], str]] = {}
    for (name, hardening), call, prior in itertools.product(
        hardenings.items(), ("pair", "labels", "queue", "many"), (0.0, 0.1)
    ):
        options: dict[str, Any] = {"hardening": hardening, "class_prior": prior}
        if call == "labels":
            options["supervision"] = "full"
        if call == "queue":
            options["in_batch"] = None
        found[f"{name} {call} {prior}"] = (options, call)
    more: dict[str, list[dict[str, Any]]] = {
        "pair": [
            {"temperature": 0.1},
            {"temperature": hn.Learnable(0.2)},
            {"in_batch": "other"},
            {"in_batch": "other", "symmetric": True},
            {"positive_in_denominator": False},
            {"negative_count": "batch"},
            {"negative_count": 7.0},
            {"reduction": "sum"},
            {"reduction": "none"},
            {"normalize": False, "temperature": 2.0},
            {"normalize": False, "temperature": 2.0, "weight_range": 2.0, "hardening": hn.Exponential(1.0)},
            {"grad_through_weights": False, "hardening": hn.Exponential(1.0)},
            {"debias": "exact", "class_prior": 0.2, "hardening": hn.Exponential(1.0)},
            {"num_negatives": 5, "generator": 3},
            {"num_negatives": 5, "generator": 3, "hardening": hn.Ring(0.2, 0.8)},
        ],
        "labels": [
            {"supervision": supervision, "combine_positives": combine, "average": average}
            for supervision, combine, average in itertools.product(
                ("positives", "negatives", "full"),
                ("mean_of_logs", "log_of_mean", "in_denominator"),
                ("anchors", "pairs"),
            )
        ],
        "queue": [{"in_batch": "both"}, {"in_batch": "other"}, {"in_batch": None, "negative_count": "batch"}],
        "many": [{"combine_positives": c} for c in ("mean_of_logs", "log_of_mean", "in_denominator")],
        "one": [{"supervision": "full"}, {"supervision": "positives"}],
        "per_anchor": [{"in_batch": None}, {"in_batch": "both", "hardening": hn.Exponential(1.0)}],
    }
    for call, options_list in more.items():
        for number, options in enumerate(options_list):
            found[f"more {call} {number}"] = (options, call)
    every = dict(found)
    for name, (options, call) in found.items():  # and by the other kernel
        if "custom" not in name:
            every[f"{name} reference"] = ({**options, "backend": "reference"}, call)
    return every


def inputs(call: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The tensors of one kind of call: those with a gradient, and the others."""
    chance = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=chance, dtype=torch.float64).to(dtype).requires_grad_()

    z1, z2 = random(24, 10), random(24, 10)
    labels = torch.arange(24) % 5 - 1
    if call == "labels":
        return [z1, z2], {"labels": labels}
    if call == "one":
        return [z1], {"labels": labels}
    if call == "many":
        return [z1, random(24, 3, 10)], {}
    if call == "queue":
        exclude = torch.arange(24)[:, None] + torch.arange(2)
        return [z1, z2], {"negatives": random(40, 10), "exclude": exclude}
    if call == "per_anchor":
        mask = torch.rand(24, 12, generator=chance) < 0.8
        return [z1, z2], {"negatives": random(24, 12, 10), "negative_mask": mask}
    return [z1, z2], {}


def losses() -> dict[str, np.ndarray[Any, Any]]:
    """Loss, gradients and diagnostics of every setting in float32 and float64."""
    found = {}
    for name, (given, call) in settings().items():
        for dtype in (torch.float32, torch.float64):
            options = dict(given)
            if "generator" in options:
                options["generator"] = torch.Generator().manual_seed(options["generator"])
            loss = hn.InfoNCE(**options)
            views, more = inputs(call, dtype)
            value = loss(*views, **more)
            value.sum().backward()
            key = f"{name} {str(dtype)[6:]}"
            found[f"{key} loss"] = value.detach().numpy()
            for number, view in enumerate([*views, *(t for t in more.values() if t.requires_grad)]):
                assert view.grad is not None
                found[f"{key} gradient {number}"] = view.grad.numpy()
            found[f"{key} diagnostics"] = np.array([v for _, v in sorted(loss.diagnostics().items())])
    return found


def runs(graphs: bool) -> dict[str, np.ndarray[Any, Any]]:
    """The weights of the encoder after one short run per method."""
    from safetensors.numpy import load_file

    found: dict[str, np.ndarray[Any, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (recipe, overrides) in {**RUNS, **(GRAPH_RUNS if graphs else {})}.items():
            given = ["trainer.epochs=2", *overrides]
            if any(text.startswith("trainer.epochs") for text in overrides):
                given = list(overrides)
            run = Path(folder, name)
            command = [sys.executable, "-m", "hardneg", "train", recipe, *given, "--run", str(run), "--no-evaluate"]
            subprocess.run(command, check=True, capture_output=True)
            for key, weights in load_file(run / "encoder.safetensors").items():
                found[f"run {name} {key}"] = weights
            print(name, flush=True)
    return found


def main() -> None:
    """Write or compare."""
    action, file = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    found = losses()
    if "losses" not in sys.argv[3:]:
        found |= runs(graphs="graphs" in sys.argv[3:])
    if action == "write":
        np.savez_compressed(file, **found)  # type: ignore[arg-type]
        print(f"{len(found)} arrays written")
        return
    wrong = 0
    with np.load(file) as before:
        names = [name for name in before.files if name in found or "losses" not in sys.argv[3:]]
        for name in names:
            if name not in found:
                print(f"missing: {name}")
                wrong += 1
                continue
            one, other = before[name], found[name]
            exact = name.startswith("run ")
            limit = 0 if exact else 2e-5 if "float32" in name else 1e-9
            same = one.shape == other.shape and (
                np.array_equal(one, other) if exact else np.allclose(one, other, limit, limit, equal_nan=True)
            )
            if not same:
                wrong += 1
                print(f"differs: {name}" + (f" by {np.abs(one - other).max():.2e}" if one.shape == other.shape else ""))
    print(f"{len(names)} arrays compared, {wrong} differ")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()

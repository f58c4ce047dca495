"""Run folders as training writes them, with synthetic metrics and features of digits."""

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hardneg.images import load_images
from hardneg.insight.samples import EncodedSamples, LoadSamples
from hardneg.training import recipe

PRESETS = ("simclr", "debiased", "hcl", "scl", "hscl", "supcon", "decoupled")


def make_run(
    folder: Path,
    preset: str = "simclr",
    seed: int = 0,
    epochs: int = 60,
    accuracy: float = 0.95,
    overrides: Sequence[str] = (),
    evaluation: dict[str, Any] | None = None,
) -> Path:
    """A finished run with plausible metrics."""
    folder.mkdir(parents=True)
    settings = recipe.load({"seed": seed}, [f"objective.preset={preset}", f"trainer.epochs={epochs}", *overrides])
    (folder / "recipe.yaml").write_text(recipe.dump(settings), encoding="utf-8")
    command = ["hardneg", "train", "digits-simclr", f"objective.preset={preset}", f"seed={seed}"]
    environment = {"command": command, "python": "3.11.2", "torch": "2.13.0", "device": "cpu", "processes": 1}
    (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    generator = torch.Generator().manual_seed(1000 * len(preset) + seed)
    noise = torch.randn(epochs + 1, 4, generator=generator).tolist()
    kind = PRESETS.index(preset) if preset in PRESETS else 0
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for epoch in range(1, epochs + 1):
            fall, (one, two, three, four) = math.exp(-epoch / 15), noise[epoch]
            line: dict[str, Any] = {
                "epoch": epoch,
                "step": 5 * epoch,
                "loss": 4.2 + 0.15 * kind + (1.6 + 0.2 * kind) * fall + 0.02 * one,
                "lr": 1e-3,
                "objective": {
                    "anchors": 512,
                    "without_candidates": 0,
                    "without_positives": 0,
                    "floored": max(0, round(kind * 3 * (1 - fall) + two)) if kind else 0,
                    "support": 510.0 if kind < 3 else 459.0 + two,
                    "effective_negatives": 510 - 45 * kind * (1 - fall) + 4 * three,
                    "positive_score": 1.7 - 0.6 * fall + 0.02 * four,
                    "negative_score": 0.25 + 0.9 * fall + 0.02 * one,
                },
                "seconds": {"data": 0.004, "augmentation": 0.05 + 0.004 * abs(two), "network": 0.12 + 0.002 * kind},
                "samples_per_second": round(7000 + 100 * three, 1),
            }
            line["batches"] = {"sampling_seconds": 0.001, "false_negatives": 0.1 + 0.002 * one}
            if epoch == 1 or epoch % 10 == 0:
                line["insight"] = _insight(fall, kind)
            if epoch % 20 == 0:
                line["knn"] = accuracy - 0.1 * fall + 0.004 * four
            file.write(json.dumps(line) + "\n")
    if evaluation is None:
        base, (one, two, three, four) = accuracy, noise[0]
        evaluation = {
            "knn": base + 0.003 * one,
            "nearest": min(1.0, base + 0.01 + 0.003 * two),
            "linear": base + 0.005 + 0.003 * three,
            "few_1": base - 0.25 + 0.01 * four,
            "few_5": base - 0.1 + 0.008 * one,
        }
    (folder / "evaluation.json").write_text(json.dumps(evaluation), encoding="utf-8")
    return folder


def _insight(fall: float, kind: int) -> dict[str, Any]:
    """Measurements as `EmbeddingDiagnostics` writes them."""
    return {
        "alignment": 0.4 + 0.5 * fall,
        "uniformity": -3.0 + 0.1 * kind + fall,
        "ucl": 5.0 + 0.5 * fall,
        "h_ucl": 5.6 + 0.5 * fall,
        "scl": 4.8 + 0.6 * fall,
        "h_scl": 5.3 + 0.6 * fall,
        "assumption_1": 0.97 - 0.1 * fall,
        "assumption_1_interval": [0.9, 0.99],
        "gradient_false": 0.2 + 0.01 * kind,
        "gradient_largest": 0.1 + 0.02 * kind,
        "class_spread": 0.3 + 0.1 * fall,
        "head_spread": 0.4 + 0.1 * fall,
        "head_deviation": 0.2 + 0.1 * fall,
        "hub_skewness": 0.5,
    }


@cache
def digits() -> tuple[Tensor, Tensor, tuple[str, ...]]:
    images = load_images("digits", "test", labels=True)
    assert images.labels is not None
    return images.images, images.labels, images.classes  # type: ignore[union-attr]


def digits_samples(samples: int = 300) -> LoadSamples:
    """Samples of digits with features that separate the classes, to a degree that depends on the folder."""

    def load(folder: Path) -> EncodedSamples:
        images, labels, classes = (part[:samples] for part in digits())
        strength = 0.3 * (1 + sum(map(ord, folder.parent.name)) % 4)
        pixels = images.flatten(1).float() / 255
        classes_of = torch.nn.functional.one_hot(labels, 10).float()
        return EncodedSamples(
            images, labels, classes, torch.cat([pixels - pixels.mean(dim=0), strength * classes_of], dim=1)
        )

    return load


def make_comparison(folder: Path, presets: Sequence[str] = PRESETS, seeds: int = 3, epochs: int = 60) -> list[Path]:
    """A folder per preset and seed, as ``hcl/seed-0``."""
    return [
        make_run(folder / preset / f"seed-{seed}", preset, seed, epochs, 0.93 + 0.006 * PRESETS.index(preset))
        for preset in presets
        for seed in range(seeds)
    ]

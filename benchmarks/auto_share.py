"""Choose the share of `hn.auto`, and the grid point it is compared with, on a part of the training set of digits.

    python benchmarks/auto_share.py

A fifth of scikit-learn's digits for training (drawn by a fixed seed) is held out, and each setting is trained on the
rest with seeds 10, 11 and 12 and evaluated on the held-out part by kNN. The test set is not read. Writes
results/auto_share.json.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch

from hardneg import randomness
from hardneg.images import load_split
from hardneg.images.image_set import ImageSet
from hardneg.training import evaluate, recipe, run

TEMPERATURES = (0.1, 0.5)
SHARES = (0.4, 0.6, 0.8)
BETAS, PRIORS = (0.5, 1.0, 2.0), (0.0, 0.1)
SEEDS = (10, 11, 12)
HELD_OUT = 0.2
DRAW = 7  # seed of the division


def settings() -> dict[str, list[str]]:
    """Overrides of the recipe by the name of a setting."""
    found = {"simclr": ["objective.preset=simclr"]}
    for share in SHARES:
        found[f"share {share:g}"] = [
            "objective.preset=hcl", "objective.tau_plus=0", f"objective.beta=effective_share:{share}"
        ]  # fmt: skip
    for beta in BETAS:
        for prior in PRIORS:
            overrides = ["objective.preset=hcl", f"objective.beta={beta}", f"objective.tau_plus={prior}"]
            found[f"beta {beta:g}, prior {prior:g}"] = overrides
    return found


def divided(folder: Path) -> Path:
    """A file with the training set of digits, of which the held-out part is called the test set."""
    train = load_split("digits", "train", labels=True)
    assert isinstance(train, ImageSet)
    order = torch.randperm(len(train), generator=randomness.generator("cpu", DRAW))
    held = round(HELD_OUT * len(train))
    file = folder / "digits_validation.npz"
    images, labels = np.asarray(train.images), np.asarray(train.labels)
    rest, taken = order[held:].numpy(), order[:held].numpy()
    np.savez(
        file, train_images=images[rest], train_labels=labels[rest], test_images=images[taken],
        test_labels=labels[taken], classes=np.array([str(digit) for digit in range(10)]),
    )  # fmt: skip
    return file


def accuracy(overrides: list[str], temperature: float, seed: int, epochs: int, folder: Path, source: Path) -> float:
    """kNN accuracy of a run on the held-out part."""
    given = [f"data.source={source}", f"seed={seed}", f"trainer.epochs={epochs}", "trainer.knn_every=0"]
    chosen = recipe.load(recipe.find("digits-simclr"), [*overrides, f"objective.temperature={temperature}", *given])
    with tempfile.TemporaryDirectory(dir=folder) as place:
        result = run.train(chosen, Path(place) / "run")
        return float(evaluate.evaluate(result.folder, metrics=["knn"])["knn"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for temporary files")
    options = parser.parse_args()
    source, began = divided(options.folder), time.perf_counter()
    rows: list[dict[str, Any]] = []
    for temperature in TEMPERATURES:
        for name, overrides in settings().items():
            found = [
                round(accuracy(overrides, temperature, seed, options.epochs, options.folder, source), 5)
                for seed in SEEDS
            ]
            rows.append({"temperature": temperature, "name": name, "overrides": overrides, "knn": found})
            print(f"t = {temperature}: {name}: {100 * statistics.fmean(found):.2f} {found}", flush=True)
    shares = {
        f"share {share:g}": statistics.fmean(k for row in rows if row["name"] == f"share {share:g}" for k in row["knn"])
        for share in SHARES
    }
    grid = {
        str(temperature): max(
            (row for row in rows if row["temperature"] == temperature and row["name"].startswith("beta")),
            key=lambda row: statistics.fmean(row["knn"]),
        )["name"]
        for temperature in TEMPERATURES
    }
    print(json.dumps({"mean over temperatures": shares, "best of the grid": grid}, indent=1))
    written = {
        "command": f"python benchmarks/auto_share.py --epochs {options.epochs}",
        "about": "kNN on a fifth of the training set of digits, which is not trained on; recipe digits-simclr",
        "machine": record.processor(),
        "torch": torch.__version__,
        "seeds": list(SEEDS),
        "seconds": round(time.perf_counter() - began),
        "shares": shares,
        "grid": grid,
        "rows": rows,
    }
    record.write(Path(__file__).parents[1] / "results" / "auto_share.json", written)


if __name__ == "__main__":
    main()

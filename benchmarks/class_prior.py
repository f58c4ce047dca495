"""Can the class prior τ⁺ be estimated from the scores of a contrastive encoder? Four labeled sets, five estimators.

    python benchmarks/class_prior.py --data $HARDNEG_DATA

A SimCLR encoder is trained without labels by the recipes: digits and MUTAG (GraphCL) in full; CIFAR-10 and
tinyimagenet100_32 with a small convolutional network on 2,560 images for twelve epochs, on a CPU. The cosines of
positive pairs and of pairs of different samples in the last 20 batches go to each estimator. If U is the distribution
of the latter, U = τ⁺·S + (1 − τ⁺)·D with S of the same class and D of different classes; the positives P stand for S.
Labels are used for the true share only. Writes results/class_prior.json.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import numpy.typing as npt
import record
import torch
from torch import Tensor, nn

from hardneg.images import load_split
from hardneg.training import recipe, run

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from unpack_data import read_packed

Scores = npt.NDArray[np.float64]
SEEDS = (0, 1, 2)
BATCHES = 20  # at the end of training, whose scores are used
IMAGES = 2560  # of the two larger sets
NEEDED = 3  # sets on which an estimator must be within a factor of 2


def ratio(positive: Scores, other: Scores, delta: float = 0.1) -> float:
    """inf_c (U(s > c) + ε_U) / (P(s > c) − ε_P), the bound of Blanchard, Lee and Scott (2010), with DKW's ε."""
    above_positive, above_other = _tails(positive, other)
    noise = [math.sqrt(math.log(2 / delta) / (2 * len(sample))) for sample in (positive, other)]
    usable = above_positive > noise[0]
    found = (above_other[usable] + noise[1]) / (above_positive[usable] - noise[0])
    return float(min(found.min(), 1.0))


def best_bin(positive: Scores, other: Scores, delta: float = 0.1, gamma: float = 0.01) -> float:
    """Best bin estimation (Garg et al. 2021, algorithm 1): the ratio at the threshold with the lowest upper bound."""
    above_positive, above_other = _tails(positive, other)
    noise = [math.sqrt(math.log(4 / delta) / (2 * len(sample))) for sample in (positive, other)]
    usable = above_positive > 0
    found = above_other[usable] / above_positive[usable]
    bound = found + (noise[1] + (1 + gamma) * noise[0]) / above_positive[usable]
    return float(min(found[bound.argmin()], 1.0))


def at_median(positive: Scores, other: Scores) -> float:
    """U(s > c) / P(s > c) at the median c of the positives: no search for a threshold."""
    return float(min(2 * (other > np.median(positive)).mean(), 1.0))


def gaussian_mixture(positive: Scores, other: Scores, steps: int = 200) -> float:
    """The weight of the upper of two Gaussian components of U, fitted by EM; it starts at the positives' mean."""
    means = np.array([other.mean(), positive.mean()])
    deviations = np.array([other.std(), positive.std()]).clip(1e-3)
    weights = np.array([0.9, 0.1])
    for _ in range(steps):
        log = np.log(weights) - np.log(deviations) - 0.5 * ((other[:, None] - means) / deviations) ** 2
        shares = np.exp(log - log.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)  # (N, 2)
        total = shares.sum(axis=0).clip(1e-9)
        weights = total / total.sum()
        means = (shares * other[:, None]).sum(axis=0) / total
        deviations = np.sqrt((shares * (other[:, None] - means) ** 2).sum(axis=0) / total).clip(1e-3)
    return float(weights[means.argmax()])


def elkan_noto(positive: Scores, other: Scores, bins: int = 100) -> float:
    """Elkan and Noto (2008, section 3) with a histogram as the classifier of positives against other pairs.

    g(s): share of positives in the bin of s · c: mean of g over positives · the prior is E_U[g/(1 − g)]·(1 − c)/c
    """
    edges = np.quantile(np.concatenate([positive, other]), np.linspace(0, 1, bins + 1)[1:-1])
    of_positive = np.bincount(np.searchsorted(edges, positive), minlength=bins)
    of_other = np.bincount(np.searchsorted(edges, other), minlength=bins)
    labeled = of_positive / (of_positive + of_other).clip(1)  # (bins,)
    c = (labeled * of_positive).sum() / len(positive)
    odds = (labeled / (1 - labeled).clip(1e-9) * of_other).sum() / len(other)
    return float(min(odds * (1 - c) / c, 1.0))


ESTIMATORS: dict[str, Callable[[Scores, Scores], float]] = {
    "ratio bound": ratio,
    "best bin": best_bin,
    "ratio at the median": at_median,
    "Gaussian mixture": gaussian_mixture,
    "Elkan-Noto": elkan_noto,
}


def _tails(positive: Scores, other: Scores) -> tuple[Scores, Scores]:
    """The shares of both samples at or above each score of a positive."""
    thresholds = np.sort(positive)
    count = len(other) - np.searchsorted(np.sort(other), thresholds)
    return 1 - np.arange(len(positive)) / len(positive), count / len(other)


class Small(nn.Module):
    """Three convolutions for images of 32 pixels."""

    features = 128

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 24), (24, 48), (48, 128)):
            layers += [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.layers(images)
        return found


class Capture(L.Callback):
    """Keeps the embeddings of both views in the last batches."""

    def __init__(self) -> None:
        self.pairs: deque[tuple[Tensor, Tensor]] = deque(maxlen=BATCHES)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self.pairs.append((inputs[0].detach(), inputs[1].detach()))

        pl_module.objective.register_forward_hook(hook)  # type: ignore[union-attr]

    def scores(self) -> tuple[Scores, Scores]:
        """Cosines of positive pairs, and of views of different samples; at most 200,000 of the latter."""
        positive, other = [], []
        for z1, z2 in self.pairs:
            cosines = nn.functional.normalize(z1, dim=1) @ nn.functional.normalize(z2, dim=1).T  # (B, B)
            own = torch.eye(len(z1), dtype=torch.bool)
            positive.append(cosines[own])
            other.append(cosines[~own])
        joined = torch.cat(other)
        joined = joined[:: max(1, len(joined) // 200_000)]
        return torch.cat(positive).double().numpy(), joined.double().numpy()


def true_share(labels: Tensor) -> float:
    """The probability that two different samples have the same label."""
    counts = torch.bincount(labels).double()
    return float((counts * (counts - 1)).sum() / (counts.sum() * (counts.sum() - 1)))


def subset(name: str, part: str, data: Path, folder: Path) -> Path:
    """The first file of a packed set with some of its images, drawn by a fixed seed."""
    pixels, labels, classes = read_packed(data / name / f"{part}.npz")
    rows = np.random.default_rng(0).permutation(len(labels))[: IMAGES + 256]
    file = folder / f"{name}_part.npz"
    train, test = rows[:IMAGES], rows[IMAGES:]
    np.savez(
        file, train_images=pixels[train], train_labels=labels[train], test_images=pixels[test],
        test_labels=labels[test], classes=np.array(classes),
    )  # fmt: skip
    return file


def scored(name: str, seed: int, data: Path, folder: Path, epochs: int | None) -> tuple[Scores, Scores, float]:
    """Scores of positives and of other pairs after training, and the true share."""
    given: dict[str, Any] = {}
    if name == "digits":
        base, overrides = "digits-simclr", ["trainer.epochs=60"]
    elif name == "MUTAG":
        base = "imdb-binary-graphcl"
        overrides = ["data.source=tu:MUTAG", "data.features=auto", "trainer.batch_size=128", "trainer.epochs=40"]
        overrides += ["optimizer.lr=0.001", "batches={drop_last: false}"]
    else:
        part = {"cifar10": "train_1", "tinyimagenet100_32": "train"}[name]
        file = folder / f"{name}_part.npz"
        file = file if file.exists() else subset(name, part, data, folder)
        torch.manual_seed(seed)
        base, given = "cifar10-simclr", {"encoder": Small()}
        overrides = [f"data.source={file}", "trainer.precision=32-true", "trainer.accelerator=cpu"]
        overrides += ["trainer.epochs=12", "trainer.channels_last=false"]
    overrides += [] if epochs is None else [f"trainer.epochs={epochs}"]
    settings = recipe.load(recipe.find(base), [*overrides, f"seed={seed}", "trainer.knn_every=0"])
    capture = Capture()
    with tempfile.TemporaryDirectory(dir=folder) as place:
        run.train(settings, Path(place) / "run", callbacks=[capture], **given)
        if name == "MUTAG":
            from hardneg.graphs.data import load_graphs

            labels: Tensor | None = load_graphs("MUTAG").labels
        else:
            labels = load_split(settings.data.source, "train", labels=True).labels
    assert labels is not None
    return *capture.scores(), true_share(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of packed sets")
    parser.add_argument("--sets", nargs="*", default=["digits", "MUTAG", "cifar10", "tinyimagenet100_32"])
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--epochs", type=int, help="instead of those of each set, for a test")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for temporary files")
    options = parser.parse_args()
    began, rows = time.perf_counter(), []
    for name in options.sets:
        found: dict[str, list[float]] = {estimator: [] for estimator in ESTIMATORS}
        for seed in options.seeds:
            positive, other, truth = scored(name, seed, options.data, options.folder, options.epochs)
            for estimator, estimate in ESTIMATORS.items():
                found[estimator].append(round(estimate(positive, other), 5))
            print(f"{name}, seed {seed}: { ({key: numbers[-1] for key, numbers in found.items()}) }", flush=True)
        rows.append({"set": name, "true_share": round(truth, 5), "estimates": found})
        print(f"\n{name}: true share {truth:.4f}")
        for estimator, numbers in found.items():
            print(f"  {estimator:20} {numbers}", flush=True)
    within = {estimator: sum(_is_close(row, estimator) for row in rows) for estimator in ESTIMATORS}
    print(f"\nsets within a factor of 2 (median of seeds), of {len(rows)}: {within}")
    print("an estimator passes" if max(within.values()) >= NEEDED else "no estimator passes")
    record.write(
        Path(__file__).parents[1] / "results" / "class_prior.json",
        {
            "command": "python benchmarks/class_prior.py --data $HARDNEG_DATA",
            "about": "Estimates of the share of same-class pairs from the scores of an encoder trained without labels",
            "machine": record.processor(),
            "torch": torch.__version__,
            "seeds": options.seeds,
            "seconds": round(time.perf_counter() - began),
            "within_a_factor_of_2": within,
            "rows": rows,
        },
    )


def _is_close(row: dict[str, Any], estimator: str) -> bool:
    middle = statistics.median(row["estimates"][estimator])
    return bool(row["true_share"] / 2 <= middle <= 2 * row["true_share"])


if __name__ == "__main__":
    main()

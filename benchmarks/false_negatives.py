"""How much accuracy do decisions about suspected false negatives bring back?

    python benchmarks/false_negatives.py [--tasks "wrong labels" "no labels" copies] [--seeds 3] [--steps 300]

Data: 200 training images of scikit-learn's digits, drawn by the seed; the 500 test images are untouched. Three
trainings treat images that belong together as negatives of each other:

- "wrong labels": 40 % of the labels are replaced by another one, drawn by the seed. The labels exclude negatives
  (``supervision="negatives"``), so two images of one class with different labels repel each other.
- "no labels": HCL without labels, in which all images of one class repel each other.
- "copies": HCL without labels on 100 images and a copy of each with noise; the 100 pairs of copies are the false
  negatives that are decided, those of one class are not.

Decisions: `suspected_false_negatives` ranks the pairs by features of the encoder that was trained on these data. The
true labels decide, in place of a person, about the first n pairs: those of one class are written to a file, and
training begins again with `hn.read_not_negatives(file)`. "and what follows" adds the pairs that follow from decisions:
if a and b are of one class, and b and c, then so are a and c. "at random" decides about random pairs instead. "all" are
all false negatives: what can be won at most.

Accuracies are those of the encoder's features on the test images, by kNN (k = 10) and by a linear probe, both with the
true labels of the 200 training images. Gain is the difference in kNN accuracy from "none" with the same seed. The
recovered share is the mean gain divided by that of "all".
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import record
import torch
from torch import Tensor, nn

import hardneg as hn
from hardneg import heads
from hardneg.images import ImageSet, load_split
from hardneg.images.encoders import build, feature_size
from hardneg.images.features import extract_all
from hardneg.images.views import simclr_views
from hardneg.insight.suspects import suspected_false_negatives
from hardneg.randomness import generator

RESULTS = Path(__file__).parents[1] / "results"
SAMPLES, WRONG, NEAREST = 200, 0.4, 10
NOISE = 20.0  # standard deviation of the noise of a copy, of 255
TASKS = ("wrong labels", "no labels", "copies")
VIEWS = simclr_views(size=8, scale=(0.5, 1.0), flip=0.0, jitter=(0.4, 0.4, 0.0, 0.0))
BUDGETS = (100, 300, 1000)
Features = Callable[[ImageSet], Tensor]


def train(images: ImageSet, labels: Tensor | None, pairs: Tensor | None, seed: int, steps: int) -> Features:
    """Train an encoder in batches of all images; returns its function from images to features."""
    torch.manual_seed(seed)
    encoder = build("tiny", channels=1, size=8)
    head = heads.head(feature_size(encoder, (1, 8, 8)), 128, 64, True)
    networks = nn.Sequential(encoder, head).train()
    loss = hn.hcl(beta=1.0, tau_plus=0.0, supervision="none" if labels is None else "negatives")
    arguments: dict[str, Any] = {} if labels is None else {"labels": labels}
    if pairs is not None:
        arguments |= {"ids": torch.arange(len(images)), "not_negatives": pairs}
    optimizer = torch.optim.Adam(networks.parameters(), 1e-3)
    for step in range(steps):
        z1, z2 = networks(VIEWS(images.images, generator("cpu", seed, step), views=2)).chunk(2)
        optimizer.zero_grad()
        loss(z1, z2, **arguments).backward()
        optimizer.step()
    encoder.eval()
    return lambda some: extract_all(encoder, some, prepare=VIEWS.plain)


def accuracies(features: Features, images: ImageSet, test: ImageSet) -> dict[str, float]:
    """Accuracies in % on the test images, with the true labels of the training images."""
    assert images.labels is not None
    assert test.labels is not None
    known, asked = features(images), features(test)
    nearest = hn.knn_accuracy(known, images.labels, asked, test.labels, k=NEAREST)
    linear = hn.linear_probe(known, images.labels, asked, test.labels).accuracy
    return {"knn": 100 * nearest, "linear": 100 * linear}


def decided(pairs: Tensor, truth: Tensor, folder: Path) -> Tensor | None:
    """The pairs of one class, by way of a file as the explorer page writes it; None if there are none."""
    same = pairs[truth[pairs[:, 0]] == truth[pairs[:, 1]]]
    if len(same) == 0:
        return None
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps({"a": a, "b": b}) + "\n" for a, b in same.tolist()), encoding="utf-8")
    return hn.read_not_negatives(file)


def closed(pairs: Tensor | None, count: int) -> Tensor | None:
    """The pairs, and those that follow: all pairs of rows that a chain of pairs connects."""
    if pairs is None:
        return None
    group = torch.arange(count)
    while True:
        lowest = group.scatter_reduce(0, pairs[:, 0], group[pairs[:, 1]], "amin")
        lowest = lowest.scatter_reduce(0, pairs[:, 1], lowest[pairs[:, 0]], "amin")
        if torch.equal(lowest, group):
            break
        group = lowest
    first, second = torch.triu_indices(count, count, 1)
    same = group[first] == group[second]
    return torch.stack([first[same], second[same]], dim=1)


def samples(task: str, whole: ImageSet, seed: int) -> tuple[ImageSet, Tensor]:
    """The training images, and the groups (N,) whose images are no negatives of each other."""
    order = torch.randperm(len(whole), generator=generator("cpu", seed, 1))
    images = whole.subset(order[: SAMPLES // 2 if task == "copies" else SAMPLES])
    assert images.labels is not None
    if task != "copies":
        return images, images.labels
    noise = NOISE * torch.randn(images.images.shape, generator=generator("cpu", seed, 4))
    copies = (images.images + noise).clamp(0, 255).round().byte()
    both = torch.cat([images.images, copies])
    return replace(images, images=both, labels=images.labels.repeat(2), ids=None), torch.arange(len(images)).repeat(2)


def rows_of(task: str, seed: int, steps: int, folder: Path) -> dict[str, dict[str, float]]:
    """The table of one seed: for each row the numbers of decisions and pairs left out, and the accuracies."""
    whole, test = (load_split("digits", split, labels=True) for split in ("train", "test"))
    assert isinstance(whole, ImageSet)
    assert isinstance(test, ImageSet)
    images, truth = samples(task, whole, seed)
    draw = generator("cpu", seed, 2)
    wrong = torch.rand(SAMPLES, generator=draw) < WRONG
    noisy = torch.where(wrong, (truth + torch.randint(1, 10, (SAMPLES,), generator=draw)) % 10, truth)
    labels = noisy if task == "wrong labels" else None
    first, second = torch.triu_indices(SAMPLES, SAMPLES, 1)
    repel = torch.ones(len(first), dtype=torch.bool) if labels is None else labels[first] != labels[second]
    negatives = torch.stack([first[repel], second[repel]], dim=1)  # all pairs treated as negatives

    table: dict[str, dict[str, float]] = {}

    def add(name: str, decisions: int, pairs: Tensor | None, with_labels: Tensor | None = labels) -> Features:
        features = train(images, with_labels, pairs, seed, steps)
        numbers = {"decisions": decisions, "pairs": 0 if pairs is None else len(pairs)}
        table[name] = numbers | accuracies(features, images, test)
        print(f"  {task}, seed {seed}, {name}: {table[name]}", file=sys.stderr, flush=True)
        return features

    before = add("none", 0, None)
    if labels is not None:
        add("true labels", 0, None, truth)
    ranked = suspected_false_negatives(before(images), labels, k=NEAREST, count=len(negatives)).pairs
    for number in BUDGETS:
        chosen = decided(ranked[:number], truth, folder)
        add(f"{number}", min(number, len(ranked)), chosen)
        add(f"{number} and what follows", min(number, len(ranked)), closed(chosen, SAMPLES))
    shuffled = negatives[torch.randperm(len(negatives), generator=generator("cpu", seed, 3))]
    add(f"{BUDGETS[0]} at random", BUDGETS[0], decided(shuffled[: BUDGETS[0]], truth, folder))
    add("all", len(negatives), decided(negatives, truth, folder))
    return table


def summary(tables: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """Mean and standard deviation over seeds of each number of each row, its gain, and the recovered share."""

    def over_seeds(numbers: list[float]) -> dict[str, float]:
        spread = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
        return {"mean": round(statistics.mean(numbers), 2), "std": round(spread, 2)}

    found: dict[str, dict[str, Any]] = {}
    for row in tables[0]:
        found[row] = {key: over_seeds([table[row][key] for table in tables]) for key in tables[0][row]}
        found[row]["gain"] = over_seeds([table[row]["knn"] - table["none"]["knn"] for table in tables])
    most = found["all"]["gain"]["mean"]
    for numbers in found.values():
        numbers["recovered"] = round(numbers["gain"]["mean"] / most, 2) if most > 0 else None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    file = RESULTS / "false_negatives.json"
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for task in chosen.tasks:
        began = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            tables = [rows_of(task, seed, chosen.steps, Path(folder)) for seed in range(chosen.seeds)]
        rows = summary(tables)
        print(f"\n{task}\n{'decisions':>26} {'pairs':>7} {'kNN':>12} {'linear':>12} {'gain':>12} {'recovered':>10}")
        for name, row in rows.items():
            shown = (f"{row[key]['mean']:.1f} ± {row[key]['std']:.1f}" for key in ("knn", "linear", "gain"))
            cells = " ".join(f"{text:>12}" for text in shown)
            print(f"{name:>26} {row['pairs']['mean']:7.0f} {cells} {row['recovered']!s:>10}")
        results[task] = {
            "command": f"python benchmarks/false_negatives.py --tasks '{task}' --seeds {chosen.seeds} "
            f"--steps {chosen.steps}",
            "commit": record.commit(),
            "versions": {"hardneg": hn.__version__, "torch": torch.__version__, "python": platform.python_version()},
            "processor": record.processor(),
            "cpu_seconds": round(time.process_time() - began),
            "summary": rows,
            "seeds": tables,
        }
    record.write(file, results)


if __name__ == "__main__":
    main()

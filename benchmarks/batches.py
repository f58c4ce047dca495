"""Time to build a proximity graph and to draw a batch from it, against the plain ways in the same run.

    python benchmarks/batches.py [--quick] [--threads 1]
    python benchmarks/batches.py --device cuda     graphs only, up to ImageNet's size

Graphs (all keep the K nearest of M candidates; candidates of random unit vectors):
  hardneg              ProximityGraph.build: blocks of rows share dealt candidates, matrix products
  hardneg independent  the same with mode="independent": distinct candidates drawn for each row
  per-row gather       M draws with replacement for each row, gathered, multiplied, topk: the published way
  faiss exact          the exact kNN graph, where faiss is installed: K nearest of all N, another graph at another price
Walks, one batch at a time, generator and all:
  hardneg              the walk of ProximityBatchSampler
  plain Python         the same law with random.random and random.choice on rows of a numpy array

Times are medians over interleaved repetitions, so that a slow moment of the machine hits all peers alike.
"""

import argparse
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
from numpy.typing import NDArray
from torch import Tensor

import hardneg as hn
from hardneg.batches import ProximityBatchSampler, ProximityGraph
from hardneg.batches.terrain import Terrain
from hardneg.batches.walks import walk
from hardneg.randomness import generator

RESULTS = Path(__file__).parents[1] / "results"
DIM = 128
IMAGENET = 1_281_167


def vectors(size: int, device: torch.device) -> Tensor:
    """Unit vectors around 100 centres, so that neighbours share neighbours as in trained embeddings."""
    draws = generator(device, 0, size)
    centres = torch.randn(100, DIM, generator=draws, device=device)
    near = centres[torch.randint(100, (size,), generator=draws, device=device)]
    return torch.nn.functional.normalize(near + torch.randn(size, DIM, generator=draws, device=device))


def gathered(embeddings: Tensor, candidates: int, neighbors: int, rows: int = 512) -> Tensor:
    """The per-row way."""
    found = []
    for start in range(0, len(embeddings), rows):
        anchors = embeddings[start : start + rows]
        offered = torch.randint(len(embeddings), (len(anchors), candidates), device=embeddings.device)
        scores = torch.einsum("rd,rmd->rm", anchors, embeddings[offered])
        found.append(offered.gather(1, scores.topk(neighbors, dim=1).indices))
    return torch.cat(found)


def faiss_exact(neighbors: int) -> Callable[[Tensor], object] | None:
    """The exact graph by faiss, or None where it is not installed."""
    try:
        import faiss  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return None

    def build(embeddings: Tensor) -> object:
        index = faiss.IndexFlatIP(DIM)
        index.add(embeddings.numpy())
        return index.search(embeddings.numpy(), neighbors + 1)

    return build


def plain_walk(rows: NDArray[np.int32], length: int, restart: float, draws: random.Random) -> list[int]:
    """The definition, move by move."""
    start = node = draws.randrange(len(rows))
    met: dict[int, None] = {}
    while len(met) < length:
        met[int(node)] = None
        node = draws.choice(rows[start if draws.random() < restart else node])
    return list(met)


def interleaved(peers: dict[str, Callable[[int], object]], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each peer's repetitions, after one that does not count."""
    found: dict[str, list[float]] = {name: [] for name in peers}
    for repetition in range(-1, repetitions):
        for name, peer in peers.items():
            begin = time.perf_counter()
            peer(repetition + 1)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repetition >= 0:
                found[name].append(time.perf_counter() - begin)
    return found


def report(kind: str, settings: dict[str, Any], measured: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row per peer, printed too."""
    rows = []
    base = statistics.median(measured["hardneg"])
    print(f"{kind}: " + ", ".join(f"{name} = {given}" for name, given in settings.items()))
    for name, found in measured.items():
        median = statistics.median(found)
        quartiles = statistics.quantiles(found, n=4) if len(found) > 1 else [median] * 3
        rows.append(
            {
                "kind": kind,
                **settings,
                "peer": name,
                "ms": 1000 * median,
                "ms_quartiles": [1000 * quartiles[0], 1000 * quartiles[2]],
                "repetitions": len(found),
                "times_hardneg": median / base,
            }
        )
        spread = f"{1000 * quartiles[0]:.3f}–{1000 * quartiles[2]:.3f}"
        print(f"    {name:<22}{1000 * median:>12.3f} ms  {spread:>22} {median / base:>8.2f}×")
    return rows


def graphs(size: int, candidates: int, neighbors: int, device: torch.device, repetitions: int) -> list[dict[str, Any]]:
    """Graph building by every way that takes a bearable time."""
    embeddings = vectors(size, device)
    peers: dict[str, Callable[[int], object]] = {
        "hardneg": lambda seed: ProximityGraph.build(embeddings, candidates, neighbors, seed, memory=1 << 30)
    }
    if size < IMAGENET:
        peers |= {
            "hardneg independent": lambda seed: ProximityGraph.build(
                embeddings, candidates, neighbors, seed, mode="independent"
            ),
            "per-row gather": lambda seed: gathered(embeddings, candidates, neighbors),
        }
        exact = faiss_exact(neighbors) if device.type == "cpu" else None
        if exact is not None:
            peers["faiss exact"] = lambda seed: exact(embeddings)
    settings = {"N": size, "M": candidates, "K": neighbors, "d": DIM, "device": device.type}
    return report("graph", settings, interleaved(peers, repetitions))


def walked(size: int, neighbors: Tensor, length: int, restart: float, repetitions: int) -> list[dict[str, Any]]:
    """Walks on one graph."""
    terrain, rows, draws = Terrain(neighbors), neighbors.numpy(), random.Random(0)
    peers: dict[str, Callable[[int], object]] = {
        "hardneg": lambda step: walk(terrain, length, generator("cpu", 0, 0, step), "restart", restart),
        "plain Python": lambda step: plain_walk(rows, length, restart, draws),
    }
    settings = {"N": size, "K": neighbors.shape[1], "B": length, "restart": restart}
    return report("walk", settings, interleaved(peers, repetitions))


def epoch(size: int, embeddings: Tensor, coverage: str) -> list[dict[str, Any]]:
    """The sampler itself over an epoch: mean time of a batch of 256."""
    sampler = ProximityBatchSampler(size, 256, candidates=500, neighbors=100, coverage=coverage)
    sampler.refresh(embeddings)
    begin = time.perf_counter()
    for _ in sampler:
        pass
    mean = (time.perf_counter() - begin) / len(sampler)
    return report("epoch", {"N": size, "B": 256, "M": 500, "K": 100, "coverage": coverage}, {"hardneg": [mean]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller graph and few repetitions, nothing written")
    parser.add_argument("--device", default="cpu", help="where graphs are built (default: cpu)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of the processor")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(options.threads)
    load = os.getloadavg()
    small = 5_000 if options.quick else 50_000
    rows = graphs(small, 500, 100, device, 1 if options.quick else 3)
    if device.type == "cuda":
        rows += graphs(IMAGENET, 1000, 500, device, 5)
    else:
        linked = ProximityGraph.build(vectors(small, device), 500, 100).neighbors
        sizes = {small: linked}
        if not options.quick:
            sizes[IMAGENET] = torch.randint(IMAGENET, (IMAGENET, 100), generator=generator("cpu", 1)).int()
        for size, neighbors in sizes.items():
            for length, repetitions in ((256, 300), (2048, 60)):
                for restart in (0.0, 0.05, 0.1, 0.2, 0.7):
                    rows += walked(size, neighbors, length, restart, 20 if options.quick else repetitions)
        for coverage in ("walk", "once"):
            rows += epoch(small, vectors(small, device), coverage)
    if options.quick:
        return
    found = {
        "command": "python " + " ".join(["benchmarks/batches.py", *sys.argv[1:]]),
        "machine": {
            "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else record.processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load_average_before": load,
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "hardneg": hn.__version__,
        },
        "note": "N = 1,281,167: links drawn at random, which no cache can help; smaller N: the graph built above",
        "rows": rows,
    }
    path = RESULTS / ("batches.json" if device.type == "cpu" else f"batches_{device.type}.json")
    record.write(path, found)


if __name__ == "__main__":
    main()

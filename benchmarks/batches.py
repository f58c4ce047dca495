"""Time to build a proximity graph and to draw a batch from it, compared with plain implementations in the same run.

    python benchmarks/batches.py [--quick] [--threads 1]
    python benchmarks/batches.py --device cuda     graphs on a GPU up to ImageNet's size, and more

Graphs (all keep the K nearest of M candidates; candidates of random unit vectors):
  hardneg              ProximityGraph.build: rows of a block share their candidates, matrix products
  hardneg independent  the same with mode="independent": distinct candidates drawn for each row
  per-row gather       M draws with replacement for each row, gathered, multiplied, topk: the published implementation
  faiss exact          the exact kNN graph, where faiss is installed: K nearest of all N, which is another graph
Walks, one batch at a time, including the generator:
  hardneg              the walk of ProximityBatchSampler
  plain Python         the same distribution with random.random and random.choice on rows of a numpy array

On a GPU also, in the same run:
  keep                 the K largest of M + 1 scores in each row, by sort (what hardneg does there) and by topk
  step                 a step of SimCLR on CIFAR-10's shapes (ResNet-18, B = 256, bfloat16, channels last, fused Adam),
                       in total and on the device alone, compared with the cost of ProximityBatchSampler: drawing a
                       batch, and its share of a refresh every 100 steps (M = 500, K = 100, graph copied to the host)

Times are medians over interleaved repetitions, so that a slow phase of the machine affects all peers.
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import record
import simclr_step
import torch
from numpy.typing import NDArray
from stopwatch import Stopwatch
from torch import Tensor

import hardneg as hn
from hardneg.randomness import generator
from hardneg.samplers import ProximityBatchSampler, ProximityGraph
from hardneg.samplers.walk_graph import WalkGraph
from hardneg.samplers.walks import walk

RESULTS = Path(__file__).parents[1] / "results"
DIM = 128
IMAGENET = 1_281_167


def vectors(size: int, device: torch.device) -> Tensor:
    """Unit vectors around 100 centers, so that neighbors share neighbors as in trained embeddings."""
    draws = generator(device, 0, size)
    centres = torch.randn(100, DIM, generator=draws, device=device)
    near = centres[torch.randint(100, (size,), generator=draws, device=device)]
    return torch.nn.functional.normalize(near + torch.randn(size, DIM, generator=draws, device=device))


def gathered(embeddings: Tensor, candidates: int, neighbors: int, rows: int = 512) -> Tensor:
    """Candidates gathered for each row."""
    found = []
    for start in range(0, len(embeddings), rows):
        anchors = embeddings[start : start + rows]
        offered = torch.randint(len(embeddings), (len(anchors), candidates), device=embeddings.device)
        scores = torch.einsum("rd,rmd->rm", anchors, embeddings[offered])
        found.append(offered.gather(1, scores.topk(neighbors, dim=1).indices))
    return torch.cat(found)


def faiss_exact(neighbors: int) -> Callable[[Tensor], object] | None:
    """The exact graph by faiss, or None if it is not installed."""
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
    """The definition of a walk, one move at a time."""
    start = node = draws.randrange(len(rows))
    met: dict[int, None] = {}
    while len(met) < length:
        met[int(node)] = None
        node = draws.choice(rows[start if draws.random() < restart else node])
    return list(met)


def interleaved(peers: dict[str, Callable[[int], object]], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each peer's repetitions, after a warm-up."""
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
    """One row per peer, which is also printed."""
    rows = []
    base = statistics.median(measured["hardneg"])
    print(f"{kind}: " + ", ".join(f"{name} = {given}" for name, given in settings.items()), flush=True)
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
        print(f"    {name:<22}{1000 * median:>12.3f} ms  {spread:>22} {median / base:>8.2f}×", flush=True)
    return rows


def graphs(size: int, candidates: int, neighbors: int, device: torch.device, repetitions: int) -> list[dict[str, Any]]:
    """Graph building by every implementation that is fast enough for the size."""
    embeddings = vectors(size, device)
    peers: dict[str, Callable[[int], object]] = {
        "hardneg": lambda seed: ProximityGraph.build(embeddings, candidates, neighbors, seed, memory=1 << 30)
    }
    if device.type == "cuda":
        peers["hardneg in 256 MiB"] = lambda seed: ProximityGraph.build(embeddings, candidates, neighbors, seed)
    if size < IMAGENET:
        peers["per-row gather"] = lambda seed: gathered(embeddings, candidates, neighbors)
        if device.type == "cpu":
            peers["hardneg independent"] = lambda seed: ProximityGraph.build(
                embeddings, candidates, neighbors, seed, mode="independent"
            )
        exact = faiss_exact(neighbors) if device.type == "cpu" else None
        if exact is not None:
            peers["faiss exact"] = lambda seed: exact(embeddings)
    settings = {"N": size, "M": candidates, "K": neighbors, "d": DIM, "device": device.type}
    rows = report("graph", settings, interleaved(peers, repetitions))
    if device.type == "cuda":
        for row, memory in zip(rows, (1 << 30, 1 << 28), strict=False):
            row |= room_taken(embeddings, candidates, neighbors, memory)
            if size == IMAGENET:
                print(f"    {row['peer']} within 1 s: {'met' if row['ms'] <= 1000 else 'NOT MET'}", flush=True)
    return rows


def room_taken(embeddings: Tensor, candidates: int, neighbors: int, memory: int) -> dict[str, float]:
    """MiB of GPU memory for building, without embeddings and graph, and the budget."""
    watch = Stopwatch(embeddings.device)
    before = watch.used_bytes()
    graph = ProximityGraph.build(embeddings, candidates, neighbors, memory=memory)
    peak = watch.peak_bytes() or 0
    found = {"temporaries_mib": (peak - before - graph.neighbors.nbytes) / 2**20, "budget_mib": memory / 2**20}
    print(f"    temporaries {found['temporaries_mib']:.0f} MiB of {found['budget_mib']:.0f}", flush=True)
    return found


def keep(device: torch.device) -> list[dict[str, Any]]:
    """The K largest of each row by sort and by topk."""
    scores = torch.randn(40_000, 1001, generator=generator(device, 3), device=device)
    peers: dict[str, Callable[[int], object]] = {
        "hardneg": lambda turn: scores.sort(dim=1, descending=True),
        "topk": lambda turn: scores.topk(500, dim=1),
    }
    return report("keep", {"rows": 40_000, "M": 1000, "K": 500, "device": device.type}, interleaved(peers, 5))


def training(size: int, device: torch.device, batch: int) -> list[dict[str, Any]]:
    """A step of SimCLR, and the cost of the sampler."""
    every, settings = 100, {"N": size, "B": batch, "M": 500, "K": 100, "device": device.type}
    sampler = ProximityBatchSampler(size, batch, candidates=500, neighbors=100, restart=0.2)
    measured = simclr_step.seconds(sampler, vectors(size, device), batch)
    median = {name: statistics.median(taken) for name, taken in measured.items()}
    bare = median["sampling"] + median["refresh"] / every  # the sampler alone, embeddings given
    added = bare + median["encoding"] / every  # the whole cost of the sampler
    rows = report("step", settings | {"t": every}, {"hardneg": [added], "without encoding": [bare], **measured})
    for row in rows:
        if row["peer"].startswith("step"):
            row["share_of_sampler"] = 1000 * added / row["ms"]
            row["share_without_encoding"] = 1000 * bare / row["ms"]
            verdict = "met" if row["share_without_encoding"] < 0.05 else "NOT MET"
            print(
                f"    sampling and graph/t below 5 % of {row['peer']}: {verdict} ({row['share_without_encoding']:.3f})"
            )
            print(f"    with encoding/t: {row['share_of_sampler']:.3f} of {row['peer']}")
    return rows


def walked(size: int, neighbors: Tensor, length: int, restart: float, repetitions: int) -> list[dict[str, Any]]:
    """Walks on one graph."""
    graph, rows, draws = WalkGraph(neighbors), neighbors.numpy(), random.Random(0)
    peers: dict[str, Callable[[int], object]] = {
        "hardneg": lambda step: walk(graph, length, generator("cpu", 0, 0, step), "restart", restart),
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


def parts(quick: bool, device: torch.device) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """The parts of the benchmark in order."""
    gpu, small = device.type == "cuda", 5_000 if quick else 50_000
    yield lambda: graphs(small, 500, 100, device, 1 if quick else 3)
    if gpu:
        yield lambda: graphs(IMAGENET, 1000, 500, device, 5)
        yield lambda: keep(device)
    if gpu or quick:
        yield lambda: training(small, device, 8 if quick else 256)
    sizes = {small: ProximityGraph.build(vectors(small, device), 500, 100).neighbors.cpu()}
    if not quick:
        sizes[IMAGENET] = torch.randint(IMAGENET, (IMAGENET, 100), generator=generator("cpu", 1)).int()
    for size, neighbors in sizes.items():
        for length, repetitions in ((256, 100), (2048, 30)) if gpu else ((256, 300), (2048, 60)):
            for restart in (0.0, 0.05, 0.1, 0.2, 0.7):
                yield partial(walked, size, neighbors, length, restart, 20 if quick else repetitions)
    for coverage in ("walk", "once"):
        yield partial(epoch, small, vectors(small, device), coverage)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller graph and few repetitions, nothing written")
    parser.add_argument("--device", default="cpu", help="where graphs are built (default: cpu)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of the processor")
    parser.add_argument("--out", type=Path, help="default: results/batches.json, of a GPU results/batches_gpu.json")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    found = {
        "command": "python " + " ".join(["benchmarks/batches.py", *sys.argv[1:]]),
        "machine": {
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "processor": record.processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load_average_before": os.getloadavg(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "hardneg": hn.__version__,
        },
        "note": "walks at N = 1,281,167: links drawn at random, which no cache can help; else the graph built above",
        "rows": rows,
    }
    path = options.out or RESULTS / ("batches.json" if device.type == "cpu" else "batches_gpu.json")
    for part in parts(options.quick, device):
        try:
            rows += part()
        except Exception as error:  # measure the other parts
            rows.append({"error": f"{type(error).__name__}: {error}"})
            print(rows[-1]["error"], flush=True)
        if not options.quick:  # after each part, so that an interruption loses nothing
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print("" if options.quick else f"written to {path}")


if __name__ == "__main__":
    main()

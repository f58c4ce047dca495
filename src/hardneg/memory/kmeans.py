"""Spherical k-means: rows and centroids are unit vectors, and a row belongs to the centroid of largest cosine.

Both backends start from the same centroids. Faiss is faster on a CPU. The other backend runs on any device, holds one
tile of cosines at a time, and gives the same clusters for every tile size, because centroids are summed in integers.
"""

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hardneg.losses.inputs import normalized
from hardneg.matmul import row_blocks
from hardneg.randomness import generator

# Rounds in which the initial centroids are drawn, each by the distance to those of previous rounds. Up to this number
# of clusters it is greedy k-means++, at the cost of a few iterations. With more, a round draws several centroids,
# without trials: the inertia of 400 overlapping clusters is within 2% of scikit-learn's, that of 400 distant ones with
# 5 rows each within 25%.
ROUNDS = 256


def cluster(rows: Tensor, k: int, iterations: int, counters: tuple[int, ...], backend: str) -> Tensor:
    """The cluster of each row, (N,) from 0 to k − 1, after at most ``iterations`` updates of the centroids.

    rows: (N, d) from `unit_rows`, N ≥ k · counters: of the random generator · backend: ``"faiss"`` or ``"torch"``
    """
    centroids = initial_centroids(rows, k, counters)
    run = by_faiss if backend == "faiss" else by_torch
    return run(rows, centroids, iterations)


def unit_rows(rows: Tensor) -> Tensor:
    """The rows at unit length, in float32 or more, (N, d)."""
    units = torch.empty_like(rows, dtype=torch.promote_types(torch.float32, rows.dtype))
    for block in row_blocks(*rows.shape):
        units[block] = normalized(rows[block].to(units.dtype))
    return units


def initial_centroids(rows: Tensor, k: int, counters: tuple[int, ...]) -> Tensor:
    """k distinct rows, drawn with probability ∝ 1 − the largest cosine with the rows drawn before, (k, d)."""
    best = rows.new_full((len(rows),), -1.0, dtype=torch.float64)  # largest cosine with a row drawn so far
    undrawn = torch.ones_like(best, dtype=torch.bool)
    drawn: list[Tensor] = []
    rounds = min(k, ROUNDS)
    for turn in range(rounds):
        count = k * (turn + 1) // rounds - k * turn // rounds
        trials = min(2 + k.bit_length(), int(undrawn.sum())) if count == 1 else 1
        # The largest weight / exponential is a draw ∝ weight. Drawn on the host, so that every device gets the same.
        noise = torch.empty(len(rows), dtype=torch.float64).exponential_(generator=generator("cpu", *counters, turn))
        keys = (1 - best).clamp_(min=1e-12).div_(noise.to(rows.device)).masked_fill_(~undrawn, -1.0)
        chosen = keys.topk(max(count, trials)).indices
        if trials > 1:
            chosen = chosen[_best_trial(rows, best, chosen)]
        new = rows[chosen]
        for block, cosines in _cosines(rows, new):
            best[block] = torch.maximum(best[block], cosines.amax(dim=1).double())
        undrawn[chosen] = False
        drawn.append(new)
    return torch.cat(drawn)


def _best_trial(rows: Tensor, best: Tensor, candidates: Tensor) -> Tensor:
    """The position of the candidate (T,) that increases the sum of the largest cosines most, (1,)."""
    gain = best.new_zeros(len(candidates))
    for block, cosines in _cosines(rows, rows[candidates]):
        gain += (cosines.double() - best[block, None]).clamp_(min=0).sum(dim=0)
    return gain.argmax(dim=0, keepdim=True)


def by_torch(rows: Tensor, centroids: Tensor, iterations: int) -> Tensor:
    """Lloyd's iterations, tile by tile, on the device of the rows; an empty cluster restarts at a row of small cosine.

    rows: (N, d) · centroids: (k, d), all unit vectors · returns (N,)
    """
    before: Tensor | None = None
    for _ in range(iterations):
        assigned, cosines, sums = _assign(rows, centroids)
        if before is not None and torch.equal(assigned, before):
            return assigned
        before = assigned
        centroids = normalized(sums).to(centroids)
        empty = (assigned.bincount(minlength=len(centroids)) == 0).nonzero()[:, 0]
        if len(empty):
            worst = cosines.sort(stable=True).indices[: len(empty)]
            centroids[empty] = rows[worst]
    return _assign(rows, centroids)[0]


def by_faiss(rows: Tensor, centroids: Tensor, iterations: int) -> Tensor:
    """Lloyd's iterations by faiss, on the CPU; it fills an empty cluster by splitting a large one."""
    faiss = importlib.import_module("faiss")
    table = rows.float().cpu().numpy()
    size, dim = rows.shape
    kmeans: Any = faiss.Kmeans(
        dim,
        len(centroids),
        niter=iterations,
        spherical=True,
        # Use all rows, and do not warn of few rows per cluster.
        min_points_per_centroid=1,
        max_points_per_centroid=size,
    )
    kmeans.train(table, init_centroids=centroids.float().cpu().numpy())
    _, nearest = kmeans.index.search(table, 1)
    return torch.from_numpy(nearest[:, 0]).to(rows.device)


def faiss_is_installed() -> bool:
    """True if faiss is installed, without importing it."""
    return importlib.util.find_spec("faiss") is not None


def _assign(rows: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The nearest centroid of each row (N,), its cosine (N,), and the sums of the rows of each centroid (k, d)."""
    assigned = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    cosines = torch.empty(len(rows), dtype=centroids.dtype, device=rows.device)
    # Integer sums do not depend on the order in which an accelerator adds; 62 bits hold N of them.
    one = 2.0 ** min(40, 62 - len(rows).bit_length())
    sums = torch.zeros(centroids.shape, dtype=torch.int64, device=rows.device)
    for block, scores in _cosines(rows, centroids):
        cosines[block], assigned[block] = scores.max(dim=1)  # the first of equals
        sums.index_add_(0, assigned[block], (rows[block].double() * one).round_().long())
    return assigned, cosines, sums.double() / one


def _cosines(rows: Tensor, others: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of the rows (N, d), and their cosines with other unit vectors (M, d), (R, M)."""
    for block in row_blocks(len(rows), max(others.shape)):
        yield block, rows[block] @ others.T

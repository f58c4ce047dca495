"""Spherical k-means: rows and centroids are unit vectors, and a row belongs to the centroid of largest cosine.

Both versions start from the same seeds. Faiss is the faster one on a CPU. The other runs wherever torch does, holds one
tile of cosines at a time, and gives the same clusters however it is tiled, because centroids are summed in integers.
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

# Seeds are drawn in this many rounds, each from what the rounds before serve badly. Up to as many clusters this is
# greedy k-means++, at the cost of a few iterations; with more, a round draws several seeds, and one trial must do: 400
# clusters that overlap come out within 2% of scikit-learn's inertia, 400 far apart with 5 rows each within 25%.
ROUNDS = 256


def cluster(rows: Tensor, k: int, iterations: int, counters: tuple[int, ...], backend: str) -> Tensor:
    """The cluster of each row, (N,) from 0 to k − 1, after at most ``iterations`` moves of the centroids.

    rows: (N, d) as `units` gives them, N ≥ k · counters: seed and place of the draw · backend: ``"faiss"`` or
    ``"torch"``
    """
    centroids = seeds(rows, k, counters)
    run = by_faiss if backend == "faiss" else by_torch
    return run(rows, centroids, iterations)


def units(rows: Tensor) -> Tensor:
    """The rows at unit length, in float32 or more, (N, d): made once, as every pass needs them."""
    made = torch.empty_like(rows, dtype=torch.promote_types(torch.float32, rows.dtype))
    for block in row_blocks(*rows.shape):
        made[block] = normalized(rows[block].to(made.dtype))
    return made


def seeds(rows: Tensor, k: int, counters: tuple[int, ...]) -> Tensor:
    """k different rows, each likely in proportion to 1 − its largest cosine with those drawn before, (k, d)."""
    served = rows.new_full((len(rows),), -1.0, dtype=torch.float64)  # largest cosine with a row drawn
    fresh = torch.ones_like(served, dtype=torch.bool)
    drawn: list[Tensor] = []
    rounds = min(k, ROUNDS)
    for turn in range(rounds):
        count = k * (turn + 1) // rounds - k * turn // rounds
        trials = min(2 + k.bit_length(), int(fresh.sum())) if count == 1 else 1
        # The first of a race in which a row's speed is its weight; drawn on the host, the same for any device.
        clock = torch.empty(len(rows), dtype=torch.float64).exponential_(generator=generator("cpu", *counters, turn))
        race = (1 - served).clamp_(min=1e-12).div_(clock.to(rows.device)).masked_fill_(~fresh, -1.0)
        chosen = race.topk(max(count, trials)).indices
        if trials > 1:
            chosen = chosen[_best_trial(rows, served, chosen)]
        new = rows[chosen]
        for block, cosines in _cosines(rows, new):
            served[block] = torch.maximum(served[block], cosines.amax(dim=1).double())
        fresh[chosen] = False
        drawn.append(new)
    return torch.cat(drawn)


def _best_trial(rows: Tensor, served: Tensor, tried: Tensor) -> Tensor:
    """Which of the rows tried (T,) would leave the others best served, (1,)."""
    gain = served.new_zeros(len(tried))
    for block, cosines in _cosines(rows, rows[tried]):
        gain += (cosines.double() - served[block, None]).clamp_(min=0).sum(dim=0)
    return gain.argmax(dim=0, keepdim=True)


def by_torch(rows: Tensor, centroids: Tensor, iterations: int) -> Tensor:
    """Lloyd's iterations, tile by tile, on the device of the rows; an empty cluster starts again at a row served badly.

    rows: (N, d) · centroids: (k, d), all unit vectors · returns (N,)
    """
    before: Tensor | None = None
    for _ in range(iterations):
        assigned, cosines, sums = _sweep(rows, centroids)
        if before is not None and torch.equal(assigned, before):
            return assigned
        before = assigned
        centroids = normalized(sums).to(centroids)
        empty = (assigned.bincount(minlength=len(centroids)) == 0).nonzero()[:, 0]
        if len(empty):
            worst = cosines.sort(stable=True).indices[: len(empty)]
            centroids[empty] = rows[worst]
    return _sweep(rows, centroids)[0]


def by_faiss(rows: Tensor, centroids: Tensor, iterations: int) -> Tensor:
    """The same by faiss, on the CPU; it fills an empty cluster by splitting a large one."""
    faiss = importlib.import_module("faiss")
    table = rows.float().cpu().numpy()
    size, dim = rows.shape
    kmeans: Any = faiss.Kmeans(
        dim,
        len(centroids),
        niter=iterations,
        spherical=True,
        # All rows take part, and few rows per cluster are no mistake here.
        min_points_per_centroid=1,
        max_points_per_centroid=size,
    )
    kmeans.train(table, init_centroids=centroids.float().cpu().numpy())
    _, nearest = kmeans.index.search(table, 1)
    return torch.from_numpy(nearest[:, 0]).to(rows.device)


def faiss_is_installed() -> bool:
    """Whether faiss can be imported; it is not imported to find out."""
    return importlib.util.find_spec("faiss") is not None


def _sweep(rows: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The nearest centroid of each row (N,), its cosine (N,), and the sums of the rows of each centroid (k, d)."""
    assigned = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    cosines = torch.empty(len(rows), dtype=centroids.dtype, device=rows.device)
    # Sums of whole numbers do not depend on the order in which an accelerator adds them; 62 bits hold N of them.
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

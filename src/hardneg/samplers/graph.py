"""The proximity graph: each sample is linked to the most similar of its random candidates (ProSampler, Algorithm 2)."""

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, islice
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from hardneg import checks, distributed
from hardneg.checks import TensorLike, as_tensor, whole
from hardneg.extras import required
from hardneg.matmul import exact_products
from hardneg.randomness import generator
from hardneg.samplers.random_candidates import balanced_lists, independent_lists

# Rows that share candidates: enough for matrix products, few enough that a node is a candidate of several blocks.
_BLOCK = 256
# Bytes of a tile that fits into a processor's cache; accelerators use the whole budget.
_CPU_TILE = 1 << 23
# Up to this width CUDA sorts a row within one thread block, in fewer passes than topk takes to select from it.
_SORT_WIDTH = 1024
# Tiles whose candidates are drawn ahead of an accelerator. One permutation serves several tiles, and drawing the next
# one takes as long as scoring them.
_PREFETCH = 16
# Largest tensor, in bytes, that is copied from a GPU to pinned memory, which is a limited resource.
_PINNED = 1 << 28


@dataclass(frozen=True)
class ProximityGraph:
    """The neighbors of every sample, in descending order of inner product, and optionally these inner products.

    neighbors: (N, K) int32, no row holds itself or a repeat · weights: (N, K) inner products, or None

    Examples:
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
        >>> ProximityGraph.build(embeddings, candidates=3, neighbors=1).neighbors.flatten().tolist()
        [1, 0, 3, 2]
    """

    neighbors: Tensor
    weights: Tensor | None = None

    @classmethod
    def build(
        cls,
        embeddings: TensorLike,
        candidates: int,
        neighbors: int,
        seed: int = 0,
        device: torch.device | str | None = None,
        mode: str = "shared",
        memory: int = 1 << 28,
        weights: bool = False,
        gather: bool = False,
    ) -> "ProximityGraph":
        """Link every row to the ``neighbors`` of largest inner product among ``candidates`` random other rows.

        Args:
            embeddings: (N, d); at unit length the inner product is the cosine
            candidates: M, candidates of each row, uniform and without repeats; N − 1 or more means all, which gives the
                exact kNN graph
            neighbors: K ≤ M, candidates that each row is linked to (all N − 1 if there are no more)
            seed: of the candidates, which are the same on every device
            device: of the computation and of the graph (default: that of the embeddings)
            mode: "shared": random blocks of rows share their candidates, so that scores are matrix products; candidates
                are cut from permutations, so that all nodes are candidates of the same number of blocks, or one more.
                "independent": every row draws its own candidates. A row's candidates are uniform in both modes
            memory: bytes for temporaries, in addition to the embeddings, the graph and a few numbers per sample
            weights: store the inner products too, for weighted walks
            gather: compute a share of the rows in each process of the process group, and gather them; all processes
                must call it with the same arguments, and get the graph of a single process

        The graph is a function of embeddings, M, K, seed and mode. The order of equal inner products is unspecified.
        """
        embeddings = checked_embeddings(embeddings)
        embeddings = embeddings if device is None else embeddings.to(device)
        candidates, neighbors = checked_degrees(candidates, neighbors)
        memory = whole("memory", memory)
        checks.choice("mode", mode, ("shared", "independent"))
        size, dim = embeddings.shape
        candidates, neighbors = min(candidates, size - 1), min(neighbors, size - 1)
        budget = _MemoryBudget(size, dim, candidates, neighbors, embeddings, memory)
        linked = torch.zeros(size, neighbors, dtype=torch.int32, device=embeddings.device)
        products = torch.zeros_like(linked, dtype=embeddings.dtype) if weights else None
        processes = distributed.world_size() if gather else 1
        share = slice(distributed.rank() if gather else 0, None, processes)  # of the tiles
        with exact_products(embeddings.device):
            if candidates == size - 1:
                tiles = _score_all(embeddings, budget, share)
            elif mode == "shared":
                tiles = _score_shared(embeddings, budget, share, seed)
            else:
                tiles = _score_independent(embeddings, budget, share, seed)
            for rows, nodes, scores in tiles:  # (G, R), (G, 1 or R, W), (G, R, W)
                best, columns = _largest(scores, neighbors)  # (G, R, K)
                chosen = nodes.int().expand(scores.shape).gather(2, columns)
                linked.index_copy_(0, rows.flatten(), chosen.flatten(0, 1))
                if products is not None:
                    products.index_copy_(0, rows.flatten(), best.flatten(0, 1))
                del scores, best, columns, chosen  # before the next tile is computed: the budget is for one
        if processes > 1:
            # Each row is zero in all processes but one. As integers, so that the sum keeps every bit, also of −0.0.
            linked = distributed.total(linked)
            if products is not None:
                bits = torch.int64 if products.element_size() == 8 else torch.int32
                products = distributed.total(products.view(bits)).view(products.dtype)
        return cls(linked, products)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a safetensors file."""
        _safetensors().save_file({name: part.contiguous() for name, part in self._parts().items()}, path)

    @classmethod
    def load(cls, path: str | PathLike[str], device: torch.device | str = "cpu") -> "ProximityGraph":
        """Read a file that `save` wrote."""
        parts = _safetensors().load_file(path, device=str(device))
        if "neighbors" not in parts:
            raise ValueError(f"{path} holds no proximity graph, but {', '.join(parts) or 'nothing'}")
        return cls(parts["neighbors"], parts.get("weights"))

    def to(self, device: torch.device | str) -> "ProximityGraph":
        """The graph on another device."""
        return ProximityGraph(**{name: _moved(part, torch.device(device)) for name, part in self._parts().items()})

    def _parts(self) -> dict[str, Tensor]:
        parts = {"neighbors": self.neighbors, "weights": self.weights}
        return {name: part for name, part in parts.items() if part is not None}


def _moved(part: Tensor, device: torch.device) -> Tensor:
    """A tensor on another device."""
    if part.is_cuda and device.type == "cpu" and part.numel() * part.element_size() <= _PINNED:
        # Pinned memory takes direct copies, and its pages are reused by the next refresh.
        return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part)
    return part.to(device)


class _MemoryBudget:
    """The number of blocks, or of rows of one block, whose temporaries fit into ``memory`` bytes.

    The rows of a block share candidates, and the size of a block depends on N and M alone, so that the graph does not
    depend on the budget.
    """

    def __init__(self, size: int, dim: int, candidates: int, neighbors: int, embeddings: Tensor, memory: int) -> None:
        self.size, self.candidates, self.memory = size, candidates, memory
        self.block = min(max(candidates // 4, 1), _BLOCK, size)
        item, width = embeddings.element_size(), candidates + 1
        # topk returns values and int64 columns, looking up the nodes copies them, and sorting takes as much again.
        selection = 3 * neighbors * (item + 8)
        if _by_sorting(embeddings, width):
            selection = max(selection, width * (item + 8) + 2 * neighbors * (item + 8))
        elif embeddings.is_cuda:
            # topk counts the digits of each row in 256 numbers of 4 bytes, and of each 16,384 scores in 2 bytes each.
            selection = max(selection, neighbors * (item + 8) + 1088 + 512 * math.ceil(width / 16384))
        self.row_bytes = width * item + selection + dim * item
        self.list_bytes = width * (dim * item + 6 * 8)  # candidates of a block, and their embeddings

    def rows(self, shared: int, each: int) -> int:
        """Number of rows at a time, if each needs ``each`` bytes and all together need ``shared`` bytes more."""
        if shared + each > self.memory:
            raise ValueError(f"memory={self.memory} is too little for one row: give at least {shared + each} bytes")
        return (self.memory - shared) // each

    def blocks(self, tile: int) -> int:
        """Blocks at a time in a tile of ``tile`` bytes; 0 if not even one fits."""
        return min(tile, self.memory) // (self.block * self.row_bytes + self.list_bytes)


_Tiles = Iterator[tuple[Tensor, Tensor, Tensor]]  # rows (G, R), their candidates (G, 1 or R, W), scores (G, R, W)


def _score_all(embeddings: Tensor, budget: _MemoryBudget, share: slice) -> _Tiles:
    """Scores of every row with all other rows: M = N − 1."""
    nodes = torch.arange(budget.size, device=embeddings.device)
    for rows in torch.split(nodes, budget.rows(0, budget.row_bytes))[share]:
        yield rows[None], nodes[None, None], _scores_without_own(embeddings, rows)[None]


def _scores_without_own(embeddings: Tensor, rows: Tensor) -> Tensor:
    """Inner products of some rows (R,) with all, −inf with itself, (R, N).

    A function, because a variable of the generator would keep the tile while the next one is computed.
    """
    scores = embeddings[rows] @ embeddings.T
    return scores.index_put_((torch.arange(len(rows), device=rows.device), rows), scores.new_tensor(-torch.inf))


def _score_shared(embeddings: Tensor, budget: _MemoryBudget, share: slice, seed: int) -> _Tiles:
    """Scores of random blocks of rows with a list of M + 1 candidates for each block.

    A row that is in the list of its block has M other candidates there. For any other row the last candidate is
    dropped. Both are uniform draws of M.
    """
    device, width = embeddings.device, budget.candidates + 1
    draws = generator("cpu", seed)
    order = torch.randperm(budget.size, generator=draws)
    full_blocks, rest = divmod(budget.size, budget.block)
    together = budget.blocks(_CPU_TILE if device.type == "cpu" else budget.memory) or 1
    counts = [min(together, full_blocks - start) for start in range(0, full_blocks, together)] + [1] * (rest > 0)
    # The position of each node as a row, to find the candidates that are rows of their own block.
    position = torch.empty_like(order)
    position[order] = torch.arange(budget.size)
    position, order = position.to(device), order.to(device)
    begins = [0, *accumulate(count * budget.block for count in counts)][:-1]
    lists: Iterator[Tensor] = islice(balanced_lists(budget.size, width, counts, draws), share.start, None, share.step)
    if device.type != "cpu":
        lists = _prefetched(lists, device)
    for begin, candidates in zip(begins[share], lists, strict=True):  # candidates: (G, M + 1)
        rows = order[begin : begin + len(candidates) * budget.block].view(len(candidates), -1)  # (G, R)
        vectors = _select(embeddings, candidates).transpose(1, 2)  # (G, d, M + 1)
        blocks = torch.arange(len(candidates), device=device)[:, None]
        row_in_block = position[candidates] - begin - blocks * budget.block  # (G, M + 1)
        step = rows.shape[1] if budget.blocks(budget.memory) else budget.rows(budget.list_bytes, budget.row_bytes)
        for first in range(0, rows.shape[1], step):
            part = rows[:, first : first + step]  # (G, R)
            yield part, candidates[:, None], _masked_scores(_select(embeddings, part), vectors, row_in_block - first)


def _masked_scores(anchors: Tensor, vectors: Tensor, row_in_block: Tensor) -> Tensor:
    """Inner products of anchors (G, R, d) with candidates (G, d, W), −inf where a row must not be linked, (G, R, W).

    row_in_block: (G, W) index of each candidate among the rows of its block; outside of 0 … R − 1 if it is not one
    """
    (groups, height), width = anchors.shape[:2], row_in_block.shape[1]
    rows, device = groups * height, anchors.device
    # One extra entry to write to for candidates that are not rows: filtering them would synchronize with the device.
    flat = anchors.new_empty(rows * width + 1)
    scores = torch.bmm(anchors, vectors, out=flat[:-1].view(groups, height, width))
    is_row = (row_in_block >= 0) & (row_in_block < height)  # (G, W)
    row = torch.where(is_row, row_in_block + torch.arange(0, rows, height, device=device)[:, None], rows)
    column = torch.arange(width, device=device) * is_row
    flat.index_fill_(0, (row * width + column).flatten(), -torch.inf)
    absent = torch.ones(rows + 1, dtype=torch.bool, device=device).index_fill_(0, row.flatten(), False)
    scores[:, :, -1].masked_fill_(absent[:-1].view(groups, height), -torch.inf)
    return scores


def _score_independent(embeddings: Tensor, budget: _MemoryBudget, share: slice, seed: int) -> _Tiles:
    """Scores of every row with its own candidates, gathered one by one: slow, but the plain definition of the graph."""
    device = embeddings.device
    at_most = budget.rows(0, budget.row_bytes + budget.list_bytes)
    nodes = torch.arange(budget.size)
    # Groups of a fixed size, each with its own generator, so that the graph does not depend on the budget.
    groups = list(enumerate(torch.split(nodes, min(max((1 << 20) // budget.size, 1), 64))))
    for group, rows in groups[share]:
        drawn = independent_lists(budget.size, budget.candidates, rows, generator("cpu", seed, group))
        for part, own in zip(*(torch.split(both.to(device), at_most) for both in (rows, drawn)), strict=True):
            scores = torch.bmm(_select(embeddings, own), embeddings[part][:, :, None])  # (R, M, 1)
            yield part[None], own[None], scores[None, :, :, 0]


def _prefetched(lists: Iterator[Tensor], device: torch.device) -> Iterator[Tensor]:
    """The lists on the device; the next ones are drawn by another thread in the meantime."""
    with ThreadPoolExecutor(1) as executor:
        pending = deque(executor.submit(next, lists, None) for _ in range(_PREFETCH))
        while (candidates := pending.popleft().result()) is not None:
            pending.append(executor.submit(next, lists, None))
            on_cuda = device.type == "cuda"
            yield candidates.pin_memory().to(device, non_blocking=True) if on_cuda else candidates.to(device)


def _by_sorting(scores: Tensor, width: int) -> bool:
    """True if the largest entries of rows of this width are found by sorting."""
    return scores.device.type == "cuda" and width <= _SORT_WIDTH


def _largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest entries of each row of (…, W) and their columns, in descending order."""
    if not _by_sorting(scores, scores.shape[-1]):
        values, columns = scores.topk(count)
        return values, columns
    values, columns = scores.sort(descending=True)
    return values[..., :count], columns[..., :count]


def _select(embeddings: Tensor, rows: Tensor) -> Tensor:
    """The embeddings (…, d) of rows (…)."""
    return embeddings.index_select(0, rows.flatten()).view(*rows.shape, -1)  # several times faster than indexing


def checked_degrees(candidates: int, neighbors: int) -> tuple[int, int]:
    """The numbers of candidates and neighbors of a row; raise unless 1 ≤ neighbors ≤ candidates."""
    candidates, neighbors = whole("candidates", candidates), whole("neighbors", neighbors)
    if neighbors > candidates:
        raise ValueError(f"neighbors={neighbors} must be ≤ candidates={candidates}: lower it, or raise candidates")
    return candidates, neighbors


def checked_embeddings(embeddings: TensorLike) -> Tensor:
    """Embeddings (N, d) without gradient, in at least float32, whose inner products are finite; else a ValueError."""
    embeddings = checks.floating("embeddings", as_tensor("embeddings", embeddings))
    if embeddings.dim() != 2 or len(embeddings) < 2 or embeddings.shape[1] < 1:
        raise ValueError(f"embeddings must have shape (N, d) with N ≥ 2 and d ≥ 1, got {tuple(embeddings.shape)}")
    embeddings = embeddings.detach()
    # Building a graph synchronizes with the device anyway, so values are checked here on every device.
    largest = float(torch.stack(torch.aminmax(embeddings)).abs().amax())
    if not math.isfinite(largest):
        raise checks.NonFiniteError("embeddings hold NaN or inf: look for a diverged model before building the graph")
    embeddings = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
    if largest**2 * embeddings.shape[1] > torch.finfo(embeddings.dtype).max:
        raise ValueError(f"embeddings hold {largest:g}, whose inner products overflow: scale them to unit length first")
    return embeddings


def _safetensors() -> Any:
    return required("safetensors.torch", "train")

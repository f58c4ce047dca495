"""The proximity graph: each sample points at the most similar of a few random candidates (ProSampler, Algorithm 2)."""

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from hardneg import checks
from hardneg.checks import whole
from hardneg.matmul import exact_products
from hardneg.randomness import generator
from hardneg.samplers.random_candidates import deal, draw_rows

# Rows that share candidates: enough to make matrix products, few enough that a node is dealt to several blocks.
_BLOCK = 256
# A tile that a processor's cache can hold; accelerators take as much as the budget allows.
_CPU_TILE = 1 << 23
# Up to here an accelerator sorts a row within one block of threads, in fewer passes than topk takes to select from it.
_SORTED = 1024
# Turns dealt ahead of an accelerator: a permutation lasts for several, and drawing the next one takes as long.
_AHEAD = 16

# Up to so many bytes a graph that leaves a GPU goes to pinned memory, of which a machine has only so much to give.
_PINNED = 1 << 28


@dataclass(frozen=True)
class ProximityGraph:
    """Neighbours of every sample, nearest first, and on request how near they are.

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
        embeddings: Tensor,
        candidates: int,
        neighbors: int,
        seed: int = 0,
        device: torch.device | str | None = None,
        mode: str = "shared",
        memory: int = 1 << 28,
        weights: bool = False,
    ) -> "ProximityGraph":
        """Offer every row ``candidates`` others, uniform and without repeats; it keeps those of largest inner product.

        Args:
            embeddings: (N, d); at unit length the inner product is the cosine
            candidates: M, how many others each row is offered; N − 1 or more means all, which gives the exact kNN graph
            neighbors: K ≤ M, how many each row keeps (all N − 1 where there are no more)
            seed: of the candidates; the offers are the same on every device
            device: where to compute and where the graph will be (default: where the embeddings are)
            mode: "shared": random blocks of rows share candidates dealt from permutations, which turns the work into
                matrix products and deals every node to equally many blocks, give or take one; each row's candidates
                are as uniform as in "independent", where every row draws its own and gathers them
            memory: bytes for temporaries, beside the embeddings, the graph and a few numbers per sample
            weights: keep the inner products too, for walks that prefer near neighbours

        The graph is a function of embeddings, M, K, seed and mode; of equal inner products, which ones count is open.
        """
        embeddings = checked_embeddings(embeddings).to(device) if device is not None else checked_embeddings(embeddings)
        whole("candidates", candidates)
        whole("neighbors", neighbors)
        whole("memory", memory)
        checks.choice("mode", mode, ("shared", "independent"))
        if neighbors > candidates:
            raise ValueError(f"neighbors={neighbors} must be ≤ candidates={candidates}: lower it, or offer more")
        size, dim = embeddings.shape
        candidates, neighbors = min(candidates, size - 1), min(neighbors, size - 1)
        room = _Room(size, dim, candidates, neighbors, embeddings, memory)
        found = torch.empty(size, neighbors, dtype=torch.int32, device=embeddings.device)
        near = torch.empty_like(found, dtype=embeddings.dtype) if weights else None
        with exact_products(embeddings.device):
            if candidates == size - 1:
                tiles = _against_all(embeddings, room)
            elif mode == "shared":
                tiles = _against_shared(embeddings, room, seed)
            else:
                tiles = _against_own(embeddings, room, seed)
            for rows, offered, scores in tiles:  # (G, R), (G, 1 or R, W), (G, R, W)
                best, columns = _largest(scores, neighbors)  # (G, R, K)
                kept = offered.int().expand(scores.shape).gather(2, columns)
                found.index_copy_(0, rows.flatten(), kept.flatten(0, 1))
                if near is not None:
                    near.index_copy_(0, rows.flatten(), best.flatten(0, 1))
                del scores, best, columns, kept  # before the next tile is made: the budget is for one
        return cls(found, near)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a safetensors file."""
        _safetensors().save_file({name: part.contiguous() for name, part in self._parts().items()}, path)

    @classmethod
    def load(cls, path: str | PathLike[str], device: torch.device | str = "cpu") -> "ProximityGraph":
        """Read what `save` wrote."""
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
        # Which a GPU writes to by itself; the next refresh finds the same pages again.
        return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part)
    return part.to(device)


class _Room:
    """How much fits into the budget at once: ``blocks`` whole blocks, or ``rows`` rows of one.

    A block's rows share candidates, and their number depends on N and M alone: a smaller budget gives the same graph.
    """

    def __init__(self, size: int, dim: int, candidates: int, neighbors: int, embeddings: Tensor, memory: int) -> None:
        self.size, self.candidates, self.memory = size, candidates, memory
        self.block = min(max(candidates // 4, 1), _BLOCK, size)
        item, width = embeddings.element_size(), candidates + 1
        # topk returns values and int64 columns, looking the columns up copies them, and sorting takes as much again.
        keeping = 3 * neighbors * (item + 8)
        if _sorts(embeddings, width):
            keeping = max(keeping, width * (item + 8) + 2 * neighbors * (item + 8))
        self.row = width * item + keeping + dim * item
        self.hand = width * (dim * item + 6 * 8)

    def rows(self, shared: int, own: int) -> int:
        """Rows at a time, when each takes ``own`` bytes beside the ``shared`` ones."""
        if shared + own > self.memory:
            raise ValueError(f"memory={self.memory} is too little for one row: give at least {shared + own} bytes")
        return (self.memory - shared) // own

    def blocks(self, tile: int) -> int:
        """Whole blocks at a time in a tile of so many bytes; 0 when not even one fits."""
        return min(tile, self.memory) // (self.block * self.row + self.hand)


_Tiles = Iterator[tuple[Tensor, Tensor, Tensor]]  # rows (G, R), the candidates offered to them, scores (G, R, W)


def _against_all(embeddings: Tensor, room: _Room) -> _Tiles:
    """Every row against all others: the candidates of M = N − 1."""
    everyone = torch.arange(room.size, device=embeddings.device)
    for rows in torch.split(everyone, room.rows(0, room.row)):
        scores = embeddings[rows] @ embeddings.T  # (R, N)
        scores[torch.arange(len(rows), device=rows.device), rows] = -torch.inf
        yield rows[None], everyone[None, None], scores[None]


def _against_shared(embeddings: Tensor, room: _Room, seed: int) -> _Tiles:
    """Random blocks of rows, each against the hand of M + 1 nodes it was dealt.

    A row that finds itself in the hand has M others there; any other row leaves out the last card. Both are uniform.
    """
    device, width = embeddings.device, room.candidates + 1
    draws = generator("cpu", seed)
    order = torch.randperm(room.size, generator=draws)
    whole_blocks, rest = divmod(room.size, room.block)
    together = room.blocks(_CPU_TILE if device.type == "cpu" else room.memory) or 1
    turns = [min(together, whole_blocks - start) for start in range(0, whole_blocks, together)] + [1] * (rest > 0)
    # Where each node stands as a row, to find the cards that meet themselves.
    place = torch.empty_like(order)
    place[order] = torch.arange(room.size)
    place, order = place.to(device), order.to(device)
    begin = 0
    dealt = deal(room.size, width, turns, draws)
    for hands in dealt if device.type == "cpu" else _ahead(dealt, device):
        rows = order[begin : begin + len(hands) * room.block].view(len(hands), -1)  # (G, R)
        offered = _take(embeddings, hands).transpose(1, 2)  # (G, d, M + 1)
        slots = place[hands] - begin - torch.arange(len(hands), device=device)[:, None] * room.block  # (G, M + 1)
        step = rows.shape[1] if room.blocks(room.memory) else room.rows(room.hand, room.row)
        for first in range(0, rows.shape[1], step):
            part = rows[:, first : first + step]  # (G, R)
            yield part, hands[:, None], _scores(_take(embeddings, part), offered, slots - first)
        begin += rows.numel()


def _scores(anchors: Tensor, offered: Tensor, slots: Tensor) -> Tensor:
    """Inner products of anchors (G, R, d) with cards (G, d, W), −inf where a row must not be linked, (G, R, W).

    slots: (G, W) which row of its block a card is; outside of 0 … R − 1 none of them
    """
    (groups, height), width = anchors.shape[:2], slots.shape[1]
    rows, device = groups * height, anchors.device
    # One place too many, for the cards that meet nobody: to pick out the others, the host would wait for the device.
    flat = anchors.new_empty(rows * width + 1)
    scores = torch.bmm(anchors, offered, out=flat[:-1].view(groups, height, width))
    meets = (slots >= 0) & (slots < height)  # (G, W)
    row = torch.where(meets, slots + torch.arange(0, rows, height, device=device)[:, None], rows)
    card = torch.arange(width, device=device) * meets
    flat.index_fill_(0, (row * width + card).flatten(), -torch.inf)
    absent = torch.ones(rows + 1, dtype=torch.bool, device=device).index_fill_(0, row.flatten(), False)
    scores[:, :, -1].masked_fill_(absent[:-1].view(groups, height), -torch.inf)
    return scores


def _against_own(embeddings: Tensor, room: _Room, seed: int) -> _Tiles:
    """Every row against candidates drawn for it alone, gathered one by one: the definition, and slow."""
    device = embeddings.device
    at_most = room.rows(0, room.row + room.hand)
    everyone = torch.arange(room.size)
    # Drawn by fixed groups, each with its own numbers, so that the graph does not depend on the budget.
    for group, rows in enumerate(torch.split(everyone, min(max((1 << 20) // room.size, 1), 64))):
        drawn = draw_rows(room.size, room.candidates, rows, generator("cpu", seed, group))
        for part, own in zip(*(torch.split(both.to(device), at_most) for both in (rows, drawn)), strict=True):
            scores = torch.bmm(_take(embeddings, own), embeddings[part][:, :, None])  # (R, M, 1)
            yield part[None], own[None], scores[None, :, :, 0]


def _ahead(dealt: Iterator[Tensor], device: torch.device) -> Iterator[Tensor]:
    """What is dealt, on the device; the next turns are dealt by another thread meanwhile."""
    with ThreadPoolExecutor(1) as dealer:
        turns = deque(dealer.submit(next, dealt, None) for _ in range(_AHEAD))
        while (hands := turns.popleft().result()) is not None:
            turns.append(dealer.submit(next, dealt, None))
            yield hands.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else hands.to(device)


def _sorts(scores: Tensor, width: int) -> bool:
    """Whether the largest of rows of this width are found by sorting."""
    return scores.device.type == "cuda" and width <= _SORTED


def _largest(scores: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The ``number`` largest of each row of (…, W) and where they stand, the largest first."""
    if not _sorts(scores, scores.shape[-1]):
        values, columns = scores.topk(number)
        return values, columns
    values, columns = scores.sort(descending=True)
    return values[..., :number], columns[..., :number]


def _take(embeddings: Tensor, rows: Tensor) -> Tensor:
    """The embeddings (…, d) of rows (…)."""
    return embeddings.index_select(0, rows.flatten()).view(*rows.shape, -1)  # several times faster than indexing


def checked_embeddings(embeddings: Tensor) -> Tensor:
    """Embeddings without gradient, in at least float32, whose inner products are finite."""
    checks.floating("embeddings", embeddings)
    if embeddings.dim() != 2 or len(embeddings) < 2 or embeddings.shape[1] < 1:
        raise ValueError(f"embeddings must have shape (N, d) with N ≥ 2 and d ≥ 1, got {tuple(embeddings.shape)}")
    embeddings = embeddings.detach()
    # A graph waits for the device anyway: bad values raise here, on every device.
    largest = float(torch.stack(torch.aminmax(embeddings)).abs().amax())
    if not math.isfinite(largest):
        raise ValueError("embeddings hold NaN or inf: look for a diverged model before building the graph")
    embeddings = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
    if largest**2 * embeddings.shape[1] > torch.finfo(embeddings.dtype).max:
        raise ValueError(f"embeddings hold {largest:g}, whose inner products overflow: scale them to unit length first")
    return embeddings


def _safetensors() -> Any:
    try:
        from safetensors import torch as safetensors
    except ImportError as error:
        raise ImportError('saving a graph needs safetensors: pip install "hardneg[train]"') from error
    return safetensors

"""Exact search: the documents with the highest cosines to each query, tile by tile over a corpus of any size."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hardneg.losses.kernels import runs_fused
from hardneg.matmul import exact_products, largest_columns, multiply
from hardneg.mining import memory as budget
from hardneg.mining.keys import EMPTY, packed
from hardneg.mining.memory import pieces
from hardneg.mining.vectors import Vectors

_HEAP_DEPTH = 1024  # above, heaps are slower than topk


@dataclass(frozen=True)
class Hidden:
    """Pairs of a query and a document that a search leaves out. queries, documents: (P,) each, ordered by documents"""

    queries: Tensor
    documents: Tensor

    @staticmethod
    def of(queries: Tensor, documents: Tensor) -> "Hidden":
        """The pairs in the order of their documents."""
        order = documents.argsort()
        return Hidden(queries[order], documents[order])

    def of_queries(self, rows: Tensor, queries: int) -> "Hidden":
        """The pairs of some of the queries, which are numbered by their order in ``rows``."""
        number = torch.full((queries,), -1)
        number[rows] = torch.arange(len(rows))
        kept = number[self.queries] >= 0
        return Hidden(number[self.queries[kept]], self.documents[kept])

    def of_tile(self, first: int, size: int) -> "HiddenInTile":
        """The pairs of the documents of a tile."""
        pairs = slice(*torch.searchsorted(self.documents, torch.tensor([first, first + size])).tolist())
        order = self.queries[pairs].argsort()
        return HiddenInTile(self.queries[pairs][order], self.documents[pairs][order] - first)


@dataclass(frozen=True)
class HiddenInTile:
    """The hidden pairs of one tile. queries, columns: (P,) each, ordered by queries"""

    queries: Tensor
    columns: Tensor

    def hide(self, scores: Tensor, first: int) -> None:
        """Set the scores (R, T) of the pairs of R queries to −inf."""
        pairs = slice(*torch.searchsorted(self.queries, torch.tensor([first, first + len(scores)])).tolist())
        rows, columns = (each[pairs].to(scores.device) for each in (self.queries, self.columns))
        scores[rows - first, columns] = -torch.inf


@dataclass(frozen=True)
class Searcher:
    """Searches a corpus in tiles. tile: documents per tile · rows: queries per tile of scores · device: of these

    keeps: whether the documents stay on the device for further searches
    """

    corpus: Vectors
    tile: int
    rows: int
    device: str
    keeps: bool = False
    _kept: dict[int, Tensor] = field(default_factory=dict, repr=False)

    @staticmethod
    def within(corpus: Vectors, memory: int, device: str) -> "Searcher":
        """A searcher with tiles that fit into the memory budget, or into the memory of a GPU."""
        dim = corpus.shape[1]
        if device == "cpu":
            tile = budget.tile_size(memory, dim)
            return Searcher(corpus, tile, budget.score_rows(memory, tile), device)
        whole = torch.cuda.get_device_properties(device).total_memory  # not the free part, which changes the tiles
        return Searcher(corpus, *budget.on_gpu(whole, dim), device, keeps=4 * len(corpus) * dim <= whole // 4)

    def best(self, queries: Tensor, depth: int) -> Tensor:
        """Keys (B, depth) of the best documents of each query (B, d), the best first."""
        if not (runs_fused(torch.device(self.device)) and torch.version.hip is None):
            return self._search(queries, depth, None, None)[0]
        from hardneg.mining import half_precision

        if not half_precision.suits(min(self.tile, len(self.corpus)), depth):
            return self._search(queries, depth, None, None)[0]
        queries = queries.to(self.device)
        found, unproven = half_precision.best(queries, self._tiles(), depth)
        keys = found.to("cpu", non_blocking=True)  # into pinned memory, five times faster
        rows = unproven.nonzero()[:, 0]  # waits for both
        if len(rows):
            keys[rows.cpu()] = self._search(queries[rows], depth, None, None)[0]
        return keys

    def best_below(self, queries: Tensor, depth: int, hidden: Hidden, limits: Tensor) -> tuple[Tensor, Tensor]:
        """As `best`, without the hidden pairs and without scores above the lowest limit of each query.

        limits: (B, L), descending in each row · returns also the number of scores above each limit, (B, L)
        """
        return self._search(queries, depth, hidden, limits)

    def _search(
        self, queries: Tensor, depth: int, hidden: Hidden | None, limits: Tensor | None, *, in_heaps: bool = True
    ) -> tuple[Tensor, Tensor]:
        queries = queries.to(self.device)
        limits = limits if limits is None else limits.to(self.device)
        faiss = _faiss() if in_heaps and self.device == "cpu" and depth <= _HEAP_DEPTH else None
        best = _Heaps(faiss, len(queries), depth, len(self.corpus)) if faiss else _Keys(queries, depth)
        above = torch.zeros(len(queries), 0 if limits is None else limits.shape[1], dtype=torch.int64)
        products = queries.new_empty(min(self.rows, len(queries)) * min(self.tile, len(self.corpus)))
        with exact_products(torch.device(self.device)):
            for start, documents in self._tiles():
                left_out = None if hidden is None else hidden.of_tile(start, len(documents))
                for first in range(0, len(queries), self.rows):
                    block = slice(first, first + self.rows)
                    shape = len(queries[block]), len(documents)
                    scores = products[: shape[0] * shape[1]].view(shape)  # (R, T)
                    multiply(queries[block], documents, scores, any_size=True)
                    if left_out is not None and limits is not None:
                        left_out.hide(scores, first)
                        above[block] += _cut(scores, limits[block]).cpu()
                    best.add(scores, first, start)
        keys, tied = best.found()
        if len(tied):
            theirs = None if hidden is None else hidden.of_queries(tied, len(queries))
            at_most = None if limits is None else limits[tied]
            keys[tied] = self._search(queries[tied], depth, theirs, at_most, in_heaps=False)[0]
        return keys, above

    def _tiles(self) -> Iterator[tuple[int, Tensor]]:
        """The first document of each tile, and its documents (T, d)."""
        for start in range(0, len(self.corpus), self.tile):
            documents = self._kept.get(start)
            if documents is None:
                documents = self.corpus.unit(start, start + self.tile, self.device)
                if self.keeps:
                    self._kept[start] = documents
            yield start, documents


class _Keys:
    """The best candidates of each query, from the largest scores of each tile. queries: (B, d)"""

    def __init__(self, queries: Tensor, depth: int) -> None:
        self.keys = torch.full((len(queries), depth), EMPTY, device=queries.device)

    def add(self, scores: Tensor, first_query: int, first_document: int) -> None:
        """Add the scores (R, T) of some queries with some documents."""
        rows = slice(first_query, first_query + len(scores))
        depth = self.keys.shape[1]
        columns = largest_columns(scores, min(depth, scores.shape[1]))
        values = scores.gather(1, columns)
        more = packed(values, columns + first_document).masked_fill(values == -torch.inf, EMPTY)
        self.keys[rows] = torch.cat([self.keys[rows], more], dim=1).topk(depth, dim=1).values

    def found(self) -> tuple[Tensor, Tensor]:
        """Keys (B, depth), the best first, and the queries whose keys are not the right ones: none."""
        return self.keys.cpu(), torch.empty(0, dtype=torch.int64)


class _Heaps:
    """The best candidates of each query, in heaps of faiss: a score below all of them costs one comparison.

    ``faiss.knn`` does the same with a matrix product of its own, much slower than PyTorch's on an Intel Xeon.
    """

    def __init__(self, faiss: Any, queries: int, depth: int, documents: int) -> None:
        self.faiss, self.depth = faiss, depth
        # Of equal scores a heap keeps any. That matters if the last one wanted equals the next, so it is kept, too.
        self.scores = torch.full((queries, min(depth + 1, documents)), -torch.inf)
        self.documents = torch.full(self.scores.shape, -1)
        self.heaps = faiss.float_minheap_array_t()
        self.heaps.nh, self.heaps.k = self.scores.shape
        self.heaps.val = faiss.swig_ptr(self.scores.numpy())
        self.heaps.ids = faiss.swig_ptr(self.documents.numpy())

    def add(self, scores: Tensor, first_query: int, first_document: int) -> None:
        """Add the scores (R, T) of some queries with some documents."""
        rows, columns = scores.shape
        self.heaps.addn(columns, self.faiss.swig_ptr(scores.numpy()), first_document, first_query, rows)

    def found(self) -> tuple[Tensor, Tensor]:
        """Keys (B, depth), the best first, and the queries whose last key may be a wrong one of equal scores."""
        keys, tied = torch.full((len(self.scores), self.depth), EMPTY), []
        for rows in pieces(*self.scores.shape):
            scores = self.scores[rows]
            found = packed(scores, self.documents[rows]).masked_fill(scores == -torch.inf, EMPTY)
            found = found.sort(dim=1, descending=True).values
            keys[rows, : found.shape[1]] = found[:, : self.depth]
            if found.shape[1] > self.depth:
                last, following = found[:, self.depth - 1], found[:, self.depth]
                tied.append(((last >> 32 == following >> 32) & (following != EMPTY)).nonzero()[:, 0] + rows.start)
        return keys, torch.cat(tied) if tied else torch.empty(0, dtype=torch.int64)


def _cut(scores: Tensor, limits: Tensor) -> Tensor:
    """Set scores (R, T) above the last limit of their row to −inf; returns how many are above each limit, (R, L)."""
    if limits.shape[1] == 0:
        return torch.zeros(limits.shape, dtype=torch.int64)
    counts = torch.stack([(scores > limits[:, number, None]).sum(dim=1) for number in range(limits.shape[1])], dim=1)
    scores.masked_fill_(scores > limits[:, -1:], -torch.inf)
    return counts


def _faiss() -> Any:
    """The module, or None if it is not installed: the search then runs in PyTorch."""
    try:
        return import_module("faiss")
    except ImportError:
        return None

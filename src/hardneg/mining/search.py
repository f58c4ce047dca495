"""Exact search: the documents with the highest cosines to each query, tile by tile over a corpus of any size.

A candidate is one int64 key, its score in the upper half and its index in the lower. The largest keys are the highest
scores and, among equal scores, the lowest indices, so that the result does not depend on the tiles.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hardneg.matmul import exact_products, largest_columns
from hardneg.mining import memory as budget
from hardneg.mining.memory import pieces
from hardneg.mining.vectors import Vectors

EMPTY = -(1 << 63)  # the key of no candidate
_LOW = (1 << 32) - 1
_HEAP_DEPTH = 1024  # above, heaps are slower than topk


def packed(scores: Tensor, indices: Tensor) -> Tensor:
    """Keys of float32 scores and of indices below 2³², in the order of the scores, then of descending indices.

    Examples:
        >>> keys = packed(torch.tensor([0.5, -0.25, 0.5]), torch.tensor([7, 1, 2]))
        >>> unpacked(keys.sort(descending=True).values)
        (tensor([ 0.5000,  0.5000, -0.2500]), tensor([2, 7, 1]))
    """
    bits = (scores + 0.0).view(torch.int32).long()  # −0 becomes 0
    return (_ordered(bits) << 32) | (_LOW - indices)


def unpacked(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and indices of keys; −inf and −1 where there is no candidate."""
    scores = _ordered(keys >> 32).int().view(torch.float32)
    empty = keys == EMPTY
    return scores.masked_fill(empty, -torch.inf), (_LOW - (keys & _LOW)).masked_fill(empty, -1)


def _ordered(bits: Tensor) -> Tensor:
    """Bits of float32 as integers in the order of the numbers, and back: those of negative numbers are inverted."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@dataclass(frozen=True)
class Hidden:
    """Pairs of a query and a document that a search leaves out. queries, documents: (P,) each, by document."""

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

    def hide(self, scores: Tensor, first_query: int, first_document: int) -> None:
        """Set the scores (R, T) of the pairs to −inf."""
        ends = torch.tensor([first_document, first_document + scores.shape[1]], device=self.documents.device)
        start, stop = torch.searchsorted(self.documents, ends).tolist()
        rows, columns = self.queries[start:stop] - first_query, self.documents[start:stop] - first_document
        inside = (rows >= 0) & (rows < len(scores))
        scores[rows[inside].to(scores.device), columns[inside].to(scores.device)] = -torch.inf


@dataclass(frozen=True)
class Searcher:
    """Searches a corpus in tiles. tile: documents per tile · rows: queries per tile of scores · device: of these"""

    corpus: Vectors
    tile: int
    rows: int
    device: str

    @staticmethod
    def within(corpus: Vectors, memory: int, device: str) -> "Searcher":
        """A searcher with tiles that fit into the memory budget, or into the memory of a GPU."""
        dim = corpus.shape[1]
        if device == "cpu":
            tile = budget.tile_size(memory, dim)
            return Searcher(corpus, tile, budget.score_rows(memory, tile), device)
        whole = torch.cuda.get_device_properties(device).total_memory  # not the free part, which changes the tiles
        return Searcher(corpus, *budget.on_gpu(whole, dim), device)

    def best(self, queries: Tensor, depth: int) -> Tensor:
        """Keys (B, depth) of the best documents of each query (B, d), the best first."""
        return self._search(queries, depth, None, None)[0]

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
            for start in range(0, len(self.corpus), self.tile):
                documents = self.corpus.unit(start, start + self.tile, self.device)
                for first in range(0, len(queries), self.rows):
                    block = slice(first, first + self.rows)
                    shape = len(queries[block]), len(documents)
                    scores = products[: shape[0] * shape[1]].view(shape)  # (R, T)
                    torch.mm(queries[block], documents.T, out=scores)
                    if hidden is not None and limits is not None:
                        hidden.hide(scores, first, start)
                        above[block] += _cut(scores, limits[block]).cpu()
                    best.add(scores, first, start)
        keys, tied = best.found()
        if len(tied):
            theirs = None if hidden is None else hidden.of_queries(tied, len(queries))
            at_most = None if limits is None else limits[tied]
            keys[tied] = self._search(queries[tied], depth, theirs, at_most, in_heaps=False)[0]
        return keys, above


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

    ``faiss.knn`` does the same with a matrix product of its own, much slower than PyTorch's on some processors.
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

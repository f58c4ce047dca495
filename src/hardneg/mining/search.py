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
# Above, a heap in faiss is slower than topk.
_FAISS_DEPTH = 1024


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
        self, queries: Tensor, depth: int, hidden: Hidden | None, limits: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        queries = queries.to(self.device)
        limits = limits if limits is None else limits.to(self.device)
        faiss = _faiss() if self.device == "cpu" and hidden is None and depth <= _FAISS_DEPTH else None
        best = torch.full((len(queries), depth), EMPTY, device=self.device)
        above = torch.zeros(len(queries), 0 if limits is None else limits.shape[1], dtype=torch.int64)
        with exact_products(torch.device(self.device)):
            for start in range(0, len(self.corpus), self.tile):
                documents = self.corpus.unit(start, start + self.tile, self.device)
                if faiss:
                    _merge_by_faiss(faiss, best, queries, documents, start)
                    continue
                for first in range(0, len(queries), self.rows):
                    block = slice(first, first + self.rows)
                    scores = queries[block] @ documents.T  # (R, T)
                    if hidden is not None and limits is not None:
                        hidden.hide(scores, first, start)
                        above[block] += _cut(scores, limits[block]).cpu()
                    best[block] = _merged(best[block], _keys(scores, min(depth, len(documents)), start))
        return best.cpu(), above


def _cut(scores: Tensor, limits: Tensor) -> Tensor:
    """Set scores (R, T) above the last limit of their row to −inf; returns how many are above each limit, (R, L)."""
    if limits.shape[1] == 0:
        return torch.zeros(limits.shape, dtype=torch.int64)
    counts = torch.stack([(scores > limits[:, number, None]).sum(dim=1) for number in range(limits.shape[1])], dim=1)
    scores.masked_fill_(scores > limits[:, -1:], -torch.inf)
    return counts


def _keys(scores: Tensor, depth: int, start: int) -> Tensor:
    """Keys (R, depth) of the largest scores of each row, in any order. start: index of the first column"""
    columns = largest_columns(scores, depth)
    found = scores.gather(1, columns)
    return packed(found, columns + start).masked_fill(found == -torch.inf, EMPTY)


def _merged(best: Tensor, more: Tensor) -> Tensor:
    """The largest keys of both, sorted."""
    return torch.cat([best, more], dim=1).topk(best.shape[1], dim=1).values


def _merge_by_faiss(faiss: Any, best: Tensor, queries: Tensor, documents: Tensor, start: int) -> None:
    """Replace keys (B, depth) by the largest of them and of the documents' (T, d). start: index of the first"""
    depth = min(best.shape[1], len(documents))
    wanted = min(depth + 1, len(documents))
    found, columns = map(
        torch.from_numpy, faiss.knn(queries.numpy(), documents.numpy(), wanted, faiss.METRIC_INNER_PRODUCT)
    )
    tied = torch.empty(0, dtype=torch.int64)
    if wanted > depth:
        # faiss keeps any of equal scores. It matters if the last one kept equals the next.
        tied = (found[:, depth - 1] == found[:, depth]).nonzero()[:, 0]
        found[tied] = -torch.inf  # searched again below
    for rows in pieces(len(queries), 2 * best.shape[1]):
        keys = packed(found[rows, :depth], columns[rows, :depth] + start)
        best[rows] = _merged(best[rows], keys.masked_fill(found[rows, :depth] == -torch.inf, EMPTY))
    for some in torch.split(tied, 256):
        best[some] = _merged(best[some], _keys(queries[some] @ documents.T, depth, start))


def _faiss() -> Any:
    """The module, or None if it is not installed: the search then runs in PyTorch."""
    try:
        return import_module("faiss")
    except ImportError:
        return None

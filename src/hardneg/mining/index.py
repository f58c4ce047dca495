"""Search by an approximate index of the user: it finds candidates, which are then scored exactly."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardneg import checks
from hardneg.extras import required
from hardneg.matmul import row_blocks
from hardneg.mining import memory as budget
from hardneg.mining.keys import EMPTY, packed, unpacked
from hardneg.mining.search import Hidden, Searcher
from hardneg.mining.vectors import Vectors
from hardneg.randomness import generator

Find = Callable[[NDArray[np.float32], int], NDArray[np.int64]]
_RECALL_QUERIES = 100
_ROUNDING = 1e-6  # of a cosine in float32


@dataclass(frozen=True)
class IndexSearcher:
    """Answers as `Searcher` does, for the documents that an index finds.

    find: of unit vectors (B, d) and k, the documents (B, k), −1 where it finds no more · memory: bytes
    """

    corpus: Vectors
    find: Find
    memory: int

    def best(self, queries: Tensor, depth: int) -> Tensor:
        """Keys (B, depth) of the documents that the index finds, the best first."""
        return self._keys(queries, depth)

    def best_below(self, queries: Tensor, depth: int, hidden: Hidden, limits: Tensor) -> tuple[Tensor, Tensor]:
        """As `Searcher.best_below`. A query with fewer than ``depth`` keys has no more in the index."""
        size, open_rows = len(self.corpus), torch.arange(len(queries))
        out = (hidden.queries * size + hidden.documents).sort().values
        asked = min(size, depth + int(hidden.queries.bincount(minlength=1).amax()))
        best = torch.full((len(queries), depth), EMPTY)
        above = torch.zeros(limits.shape, dtype=torch.int64)
        while len(open_rows):
            unfinished = []
            for piece in row_blocks(len(open_rows), 1, max(1, self.memory // 4 // (budget.CANDIDATE * asked))):
                rows = open_rows[piece]
                keys = self._keys(queries[rows], asked)
                scores, documents = unpacked(keys)
                keys = keys.masked_fill(torch.isin(rows[:, None] * size + documents, out), EMPTY)
                for number in range(limits.shape[1]):
                    too_high = scores > limits[rows, number, None]
                    above[rows, number] = (too_high & (keys != EMPTY)).sum(dim=1)
                if limits.shape[1]:
                    keys = keys.masked_fill(too_high, EMPTY)
                top = keys.topk(min(depth, asked), dim=1).values
                best[rows, : top.shape[1]] = top
                unfinished.append(rows[(best[rows, -1] == EMPTY) & (documents[:, -1] >= 0)])
            if asked == size:
                break
            open_rows, asked = torch.cat(unfinished), min(size, 2 * asked)
        return best, above

    def _keys(self, queries: Tensor, depth: int) -> Tensor:
        """Keys (B, depth) of what the index finds, without repetitions, scored by cosine."""
        keys, dim = torch.full((len(queries), depth), EMPTY), self.corpus.shape[1]
        for rows in row_blocks(len(queries), 1, max(1, self.memory // 4 // (8 * dim * depth))):
            documents = torch.from_numpy(self.find(queries[rows].numpy(), depth))  # (R, depth)
            known, place = np.unique(documents.clamp(min=0).numpy(), return_inverse=True)
            vectors = self.corpus.take_unit(known)[torch.from_numpy(place.reshape(documents.shape))]
            scores = torch.einsum("rd,rkd->rk", queries[rows], vectors)
            found = packed(scores, documents).masked_fill(documents < 0, EMPTY).sort(dim=1, descending=True).values
            again = torch.zeros_like(found, dtype=torch.bool)
            again[:, 1:] = found[:, 1:] == found[:, :-1]
            keys[rows] = found.masked_fill(again, EMPTY).sort(dim=1, descending=True).values
        return keys


def measured_recall(exact: Searcher, index: IndexSearcher, queries: Vectors, depth: int) -> float:
    """The share of the ``depth`` best documents that the index finds, over up to 100 queries drawn at random.

    A document whose cosine equals that of the last one counts, too.
    """
    rows = torch.randperm(len(queries), generator=generator("cpu", 0))[:_RECALL_QUERIES].sort().values
    depth = min(depth, len(exact.corpus))
    some = queries.take_unit(rows.numpy())
    last = unpacked(exact.best(some, depth).cpu())[0][:, -1:]
    found = (unpacked(index.best(some, depth))[0] >= last - _ROUNDING).sum()
    return float(found) / (len(rows) * depth)


def checked_index(given: Any, corpus: Vectors, memory: int) -> IndexSearcher:
    """A searcher from an index of faiss, or from a function of queries (B, d) and k that returns documents (B, k)."""
    search = getattr(given, "search", None)
    if search is None and not callable(given):
        raise ValueError(f"index must be an index of faiss or a function of queries (B, d) and k, got {given!r}")
    for name, wanted in (("ntotal", len(corpus)), ("d", corpus.shape[1])):
        has = getattr(given, name, wanted)
        if search is not None and has != wanted:
            raise ValueError(
                f"index has {name}={has}, but the corpus {wanted}: build it from this corpus, in its order"
            )

    def find(queries: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        documents = np.asarray(search(queries, k)[1] if search is not None else given(queries, k))
        if documents.shape != (len(queries), k) or documents.dtype.kind not in "iu":
            raise ValueError(
                f"index must return integers of shape ({len(queries)}, {k}), got {documents.dtype} {documents.shape}"
            )
        documents = documents.astype(np.int64)
        if documents.min() < -1 or documents.max() >= len(corpus):
            raise ValueError(
                f"index must return numbers from 0 to {len(corpus) - 1}, or −1 for none, got "
                f"{documents.min()} to {documents.max()}"
            )
        return documents

    return IndexSearcher(corpus, find, memory)


def read_index(path: Path) -> Any:
    """An index that faiss has written."""
    faiss = required("faiss", "mine")
    try:
        return faiss.read_index(str(checks.regular_file(path)))
    except RuntimeError as error:
        raise ValueError(f"{path} is not an index that faiss can read: write it with faiss.write_index") from error

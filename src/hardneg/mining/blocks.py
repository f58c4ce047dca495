"""The work of mining, divided into blocks of queries: each is a function of its number alone, in any process."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hardneg.matmul import row_blocks
from hardneg.mining import memory as budget
from hardneg.mining.guide import Guide, lowest, lowest_scores
from hardneg.mining.index import IndexSearcher, measured_recall
from hardneg.mining.keys import EMPTY, unpacked
from hardneg.mining.positives import Lists
from hardneg.mining.rules import Rules
from hardneg.mining.search import Hidden, Searcher
from hardneg.mining.selection import Dropped, Selection
from hardneg.mining.vectors import Vectors

_MOST_HIDDEN = 64  # excluded documents of a query up to which its search ranks them, too


@dataclass(frozen=True)
class Block:
    """The result of a block of queries: (B, k) indices and scores, (P,) scores of its positives, counts by rule."""

    indices: Tensor
    scores: Tensor
    positive_scores: Tensor
    counts: Tensor
    dropped: Dropped


@dataclass(frozen=True)
class Job:
    """Everything that determines the result.

    duplicates: documents of each query that equal a positive · not_negatives: others that the user leaves out ·
    memory: bytes · device: of the search · index: what finds candidates instead of an exact search
    """

    queries: Vectors
    corpus: Vectors
    positives: Lists
    duplicates: Lists
    rules: Rules
    memory: int
    not_negatives: Lists
    guide: Guide | None = None
    device: str = "cpu"
    index: IndexSearcher | None = None

    @property
    def depth(self) -> int:
        """Candidates of each query that are ranked at first."""
        return self.rules.depth(torch.tensor([len(self.corpus)]), self.guide is not None)

    def blocks(self) -> list[slice]:
        """The queries of each block."""
        excluded = self.positives.sizes + self.duplicates.sizes + self.not_negatives.sizes
        ranked_too = min(_MOST_HIDDEN, int(excluded.max()))
        size = budget.block_size(self.memory, self.corpus.shape[1], self.depth + ranked_too)
        return [slice(each.start, min(each.stop, len(self.queries))) for each in row_blocks(len(self.queries), 1, size)]

    @cached_property
    def searcher(self) -> Searcher:
        """Searches the corpus, which stays on a GPU that has room for it from one block to the next."""
        return Searcher.within(self.corpus, self.memory, self.device)

    def recall(self) -> float | None:
        """The share of the best documents that the index finds; None without an index."""
        return None if self.index is None else measured_recall(self.searcher, self.index, self.queries, self.depth)

    def run(self, number: int) -> Block:
        """Mine the queries of one block."""
        block = self.blocks()[number]
        queries = self.queries.unit(block.start, block.stop)  # (B, d)
        positives = self.positives.part(block.start, block.stop)
        left_out = self.not_negatives.part(block.start, block.stop)
        excluded = _joined(positives, self.duplicates.part(block.start, block.stop), left_out)
        positive_scores = self._cosines(queries, positives)
        candidates = len(self.corpus) - torch.from_numpy(excluded.sizes)
        allowed = None
        if self.guide is not None:
            bounds, guide = lowest_scores(self.guide, positives, block.start), self.guide

            def allowed(rows: Tensor, documents: Tensor) -> Tensor:
                return guide.scores(rows + block.start, documents) <= bounds[rows]

        selection = Selection(self.rules, block.start, lowest(positives, positive_scores), candidates, allowed)
        rows, documents = torch.from_numpy(left_out.queries()), torch.from_numpy(left_out.items)
        selection.leave_out(rows, documents, self._cosines(queries, left_out))
        self._select(selection, queries, excluded)
        dropped = Dropped.joined(selection.dropped)
        return Block(selection.indices, selection.scores, positive_scores, selection.counts, dropped)

    def _cosines(self, queries: Tensor, lists: Lists) -> Tensor:
        """Cosines (P,) of each query with the documents of its list."""
        rows, found = torch.from_numpy(lists.queries()), torch.empty(len(lists.items))
        for part in row_blocks(len(rows), self.corpus.shape[1], budget.tile_size(self.memory, self.corpus.shape[1])):
            found[part] = (queries[rows[part]] * self.corpus.take_unit(lists.items[part])).sum(dim=1)
        return found

    def _select(self, selection: Selection, queries: Tensor, excluded: Lists) -> None:
        """Search and select, and search again for the queries that have too few: below their limits, what is new."""
        depth = self.rules.depth(selection.candidates, self.guide is not None)
        searcher = self.searcher if self.index is None else self.index
        sizes = torch.from_numpy(excluded.sizes)
        few = (sizes <= _MOST_HIDDEN).nonzero()[:, 0]
        seen: list[tuple[Tensor, Tensor]] = []
        if len(few):
            keys = searcher.best(queries[few], min(depth + int(sizes[few].amax()), len(self.corpus)))
            seen.append((few, self._add(selection, few, keys, excluded)))
        rest = (sizes > _MOST_HIDDEN).nonzero()[:, 0]
        limits = torch.empty(len(queries), 0)
        counted = torch.zeros(len(queries), dtype=torch.bool)  # whether those above the limits are
        while True:
            if len(rest):
                hidden = _hidden(rest, excluded, seen)
                keys, above = searcher.best_below(queries[rest], min(depth, len(self.corpus)), hidden, limits[rest])
                if limits.shape[1]:
                    selection.skip(rest, above.masked_fill(counted[rest, None], 0))
                    counted[rest] = True
                seen.append((rest, self._add(selection, rest, keys, excluded)))
                if self.index is not None:
                    selection.end_at_last(rest[keys[:, -1] == EMPTY])  # the index finds no more
            rest, limits = selection.open_rows(), selection.limits
            if not len(rest):
                return
            fits = self.memory // 4 // (budget.CANDIDATE * len(rest))
            depth = max(depth, min(2 * depth, fits))

    def _add(self, selection: Selection, rows: Tensor, keys: Tensor, excluded: Lists) -> Tensor:
        """Select from the next candidates of some queries; returns their documents (R, D)."""
        pairs = torch.from_numpy(excluded.queries() * np.int64(len(self.corpus)) + excluded.items).sort().values
        seen = torch.empty_like(keys)
        for piece in budget.pieces(*keys.shape):
            scores, documents = unpacked(keys[piece])
            out = _are_in(pairs, rows[piece, None] * len(self.corpus) + documents)
            scores, documents = _compacted(scores, documents, out | (documents < 0))
            selection.add(rows[piece], scores, documents)
            seen[piece] = documents
        return seen


def _joined(*parts: Lists) -> Lists:
    queries = np.concatenate([part.queries() for part in parts])
    return Lists.of(queries, np.concatenate([part.items for part in parts]), len(parts[0]))


def _are_in(known: Tensor, asked: Tensor) -> Tensor:
    """Whether each number is among the sorted known ones."""
    if not len(known):
        return torch.zeros_like(asked, dtype=torch.bool)
    places = np.searchsorted(known.numpy(), asked.numpy()).clip(max=len(known) - 1)  # in one thread
    return torch.from_numpy(known.numpy()[places]) == asked


def _compacted(scores: Tensor, documents: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Candidates (R, D) in their order without some; −inf and −1 fill the end."""
    order = out.to(torch.uint8).argsort(dim=1, stable=True)
    return scores.masked_fill(out, -torch.inf).gather(1, order), documents.masked_fill(out, -1).gather(1, order)


def _hidden(rows: Tensor, excluded: Lists, seen: list[tuple[Tensor, Tensor]]) -> Hidden:
    """The pairs that a further search of some queries leaves out, with queries numbered as in ``rows``."""
    number = torch.full((len(excluded),), -1)
    number[rows] = torch.arange(len(rows))
    pairs = [(number[torch.from_numpy(excluded.queries())], torch.from_numpy(excluded.items))]
    for those, documents in seen:
        asked = number[those] >= 0
        pairs.append((number[those[asked]].repeat_interleave(documents.shape[1]), documents[asked].flatten()))
    queries, documents = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    wanted = (queries >= 0) & (documents >= 0)
    return Hidden.of(queries[wanted], documents[wanted])

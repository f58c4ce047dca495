"""Candidates that are no negatives because of their ids, in memory linear in anchors, candidates and pairs."""

from dataclasses import dataclass

import torch
from torch import Tensor

UNKNOWN = -1  # this id equals no other, itself included


@dataclass(frozen=True)
class Partners:
    """For each anchor the candidates that form a pair with it.

    first, count: (A,) the range of an anchor's entries in the next two · column_start, column_count: (E,) the range of
    an entry's candidates in ``columns`` (N,), candidates in order of id
    """

    first: Tensor
    count: Tensor
    column_start: Tensor
    column_count: Tensor
    columns: Tensor

    @classmethod
    def of(cls, anchor_ids: Tensor, candidate_ids: Tensor, pairs: Tensor) -> "Partners":
        """anchor_ids: (A,) · candidate_ids: (N,) · pairs: (P, 2) of ids, in any order"""
        ids, columns = candidate_ids.sort()
        entries = torch.cat([pairs, pairs.flip(1)])
        # Of a long list a batch has few: sorting 100,000 pairs would take a hundred times as long as finding these.
        entries = entries[are_in(anchor_ids.sort().values, entries[:, 0])]
        entries = entries[are_in(ids, entries[:, 1])]
        entries = entries[entries[:, 0].argsort()]  # (E, 2) in order of the first id
        column_start, column_count = equal_range(ids, entries[:, 1])
        first, count = equal_range(entries[:, 0].contiguous(), anchor_ids)
        return cls(first, count, column_start, column_count, columns)

    def pairs(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The row, from 0 for the first of ``rows``, and the column of each candidate that forms a pair."""
        row, entry = expand(self.first[rows], self.count[rows])
        number, position = expand(self.column_start[entry], self.column_count[entry])
        return row[number], self.columns[position]


@dataclass(frozen=True)
class Identities:
    """Which candidates have the id of the anchor or of its positive, or form a listed pair with the anchor.

    own: (A, V) ids of the views of the anchor's instance · anchors: (A,) ids · candidates: (N,) or (A, N) ids · pairs:
    (P, 2), or None · partners: of the pairs; None without any, for candidates per anchor, and in a compiled graph,
    where their number is not known. The id −1 equals no other.
    """

    own: Tensor
    anchors: Tensor
    candidates: Tensor
    pairs: Tensor | None
    partners: Partners | None

    @classmethod
    def of(cls, own: Tensor, anchor_ids: Tensor, candidate_ids: Tensor, pairs: Tensor | None) -> "Identities":
        """own: (A, V) · anchor_ids: (A,) · candidate_ids: (N,) or (A, N) · pairs: (P, 2) of ids ≥ 0, in any order"""
        own = own.masked_fill(own == UNKNOWN, UNKNOWN - 1)
        if pairs is None or len(pairs) == 0:
            return cls(own, anchor_ids, candidate_ids, None, None)
        dense = candidate_ids.dim() == 2 or torch.compiler.is_compiling()
        partners = None if dense else Partners.of(anchor_ids, candidate_ids, pairs)
        return cls(own, anchor_ids, candidate_ids, pairs, partners)

    def mask_(self, matrix: Tensor, rows: slice, fill: float) -> None:
        """Overwrite with ``fill`` their entries of ``matrix`` (R, N), whose rows are the anchors ``rows``."""
        candidates = self.candidates if self.candidates.dim() == 1 else self.candidates[rows]
        for ids in self.own[rows].unbind(dim=1):
            matrix.masked_fill_(ids[:, None] == candidates, fill)
        if self.partners is not None:
            matrix[self.partners.pairs(rows)] = fill
        elif self.pairs is not None:
            matrix.masked_fill_(are_pairs(self.anchors[rows], candidates, self.pairs), fill)


def related(own: Tensor, anchor_ids: Tensor, candidate_ids: Tensor, pairs: Tensor | None) -> Tensor:
    """Which candidates per anchor are no negatives, (A, N) bool.

    own: (A, V) · anchor_ids: (A,) · candidate_ids: (A, N) · pairs: (P, 2)
    """
    found = torch.zeros_like(candidate_ids, dtype=torch.bool)
    Identities.of(own, anchor_ids, candidate_ids, pairs).mask_(found, slice(0, len(found)), True)
    return found


def are_pairs(anchor_ids: Tensor, candidate_ids: Tensor, pairs: Tensor) -> Tensor:
    """Which candidates form a pair with the anchor, (A, N) bool, in memory for A·N numbers.

    anchor_ids: (A,) · candidate_ids: (A, N) or (N,) · pairs: (P, 2), P > 0
    """
    # Ids become ranks, so that a pair of them is one integer: id < 2⁶³, but rank² < 2⁶³.
    known = pairs.flatten().sort().values

    def rank(ids: Tensor) -> Tensor:
        return torch.searchsorted(known, ids.contiguous()).clamp(max=len(known) - 1)

    first, second = (rank(ids) for ids in pairs.unbind(dim=1))
    keys = torch.cat([first * len(known) + second, second * len(known) + first]).sort().values
    anchor_rank, candidate_rank = rank(anchor_ids), rank(candidate_ids)
    occurs = (known[anchor_rank] == anchor_ids)[:, None] & (known[candidate_rank] == candidate_ids)
    return occurs & are_in(keys, anchor_rank[:, None] * len(known) + candidate_rank)


def equal_range(ordered: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The first position of each wanted number in ``ordered``, and how often it occurs."""
    wanted = wanted.contiguous()
    first = torch.searchsorted(ordered, wanted)
    return first, torch.searchsorted(ordered, wanted, right=True) - first


def are_in(ordered: Tensor, asked: Tensor) -> Tensor:
    """Whether each number is among the ordered ones."""
    if len(ordered) == 0:
        return torch.zeros_like(asked, dtype=torch.bool)
    asked = asked.contiguous()
    return ordered[torch.searchsorted(ordered, asked).clamp(max=len(ordered) - 1)] == asked


def expand(start: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """For ranges of ``count`` positions from ``start``, one after the other: number of the range, and position."""
    number = torch.repeat_interleave(torch.arange(len(count), device=count.device), count)
    position = torch.arange(len(number), device=count.device) - (count.cumsum(0) - count)[number] + start[number]
    return number, position

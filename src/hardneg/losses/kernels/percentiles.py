"""Percentile bands by rank: the first and the last candidate of each row's band, exact and, on a CPU, without sorting.

A band needs two order statistics of a row, not its order. A sample of the row gives a window of scores that probably
contains each of them; few scores are in the window, and a quickselect among those finds it. If the window does not
contain it, the quickselect runs over the whole row: slower, with the same result.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardneg.losses.kernels.interface import Rule, count_true

# Scores sampled from a row. More of them narrow the window but take longer to sort: twice as many gain little.
SAMPLE = 2048

# Half the window in standard deviations of a sampled rank. By the normal approximation one edge in 400 is outside of
# the window and needs the whole row.
SPREAD = 3.0

# Shorter rows are sorted whole: one call for all rows costs less there than a dozen calls for each.
SHORTEST_ROW = 4096


@dataclass(frozen=True)
class Edges:
    """The first and the last candidate in the band of each row, by score and then by index; (R,) each.

    tied: (T,) the rows where the indices matter because the candidates at an edge are not all on one side of it; None
    if that was not determined
    """

    low: Tensor
    low_index: Tensor
    high: Tensor
    high_index: Tensor
    tied: Tensor | None = None

    def outside(self, scores: Tensor) -> Tensor:
        """Which of the scores (R, N) are outside the band, (R, N) bool; masked ones (−inf) may be either."""
        if self.tied is None:
            return self._outside_by_index(scores, slice(None))
        outside = scores < self.low[:, None]
        outside |= scores > self.high[:, None]
        if len(self.tied) > 0:
            outside[self.tied] = self._outside_by_index(scores[self.tied], self.tied)
        return outside

    def _outside_by_index(self, scores: Tensor, rows: slice | Tensor) -> Tensor:
        low, low_index, high, high_index = (
            edge[rows, None] for edge in (self.low, self.low_index, self.high, self.high_index)
        )
        index = torch.arange(scores.shape[1], device=scores.device)
        under = (scores < low) | ((scores == low) & (index < low_index))
        return under | (scores > high) | ((scores == high) & (index > high_index))


def edges(scores: Tensor, rule: Rule) -> Edges:
    """The band that the rings of ``rule`` cut from each row of ``scores`` (R, N); masked candidates are −inf.

    Examples:
        >>> band = edges(torch.tensor([[0.3, 0.1, 0.2, 0.1]]), Rule(rings=((0.25, 0.75),)))
        >>> band.outside(torch.tensor([[0.3, 0.1, 0.2, 0.1]]))  # ties are ordered by index
        tensor([[ True,  True, False, False]])
    """
    # Compiled graphs and the transforms of torch.func have no numpy arrays.
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    on_cpu = scores.device.type == "cpu" and not traced
    if not on_cpu or scores.dtype not in (torch.float32, torch.float64):
        return sorted_edges(scores, rule)
    return selected(scores, rule) if scores.shape[1] >= SHORTEST_ROW else by_values(scores, rule)


def sorted_edges(scores: Tensor, rule: Rule) -> Edges:
    """As `edges`, by a stable sort: on any device, without synchronizing the host."""
    columns = scores.shape[1]
    eligible = count_true(scores > -torch.inf)  # (R,)
    start, end = rule.ranks(eligible)
    masked = columns - eligible  # they are sorted before the others
    ordered, order = scores.sort(dim=1, stable=True)
    first, last = (masked + start).clamp(max=columns - 1), (masked + end - 1).clamp(min=0)
    every = torch.arange(len(scores), device=scores.device)  # a compiled graph could not keep views, as of a gather
    low, low_index, high, high_index = (table[every, at] for at in (first, last) for table in (ordered, order))
    # Disjoint rings, or no candidates at all, keep nothing: a band that starts above every score and ends below.
    empty = end <= start
    low, high = low.masked_fill(empty, torch.inf), high.masked_fill(empty, -torch.inf)
    return Edges(low, low_index, high, high_index)


def by_values(scores: Tensor, rule: Rule) -> Edges:
    """As `edges`, by sorting the scores without their indices, which are searched in rows with ties only. For a CPU.

    Measured at 256 x 1,297 on one thread: 2.3 ms, against 18 ms for a stable sort that carries the indices.
    """
    table = scores.detach().numpy()  # (R, N)
    rows, columns = table.shape
    ordered = np.sort(table, axis=1)
    masked = np.count_nonzero(ordered == -np.inf, axis=1)  # they come before the others
    start, end = (rank.numpy() for rank in rule.ranks(torch.from_numpy(columns - masked)))
    nonempty, every = end > start, np.arange(rows)
    first, last = np.minimum(masked + start, columns - 1), np.maximum(masked + end - 1, 0)
    low, high = ordered[every, first], ordered[every, last]
    # The index matters where the score on the other side of an edge has the same score.
    low_tied = (first > 0) & (ordered[every, first - 1] == low)
    high_tied = (last < columns - 1) & (ordered[every, np.minimum(last + 1, columns - 1)] == high)
    low_index, high_index = np.zeros(rows, np.int64), np.full(rows, columns - 1, np.int64)
    tied = np.flatnonzero((low_tied | high_tied) & nonempty)
    for i in tied:
        equal = np.flatnonzero(table[i] == low[i])
        low_index[i] = equal[first[i] - np.searchsorted(ordered[i], low[i])]
        equal = np.flatnonzero(table[i] == high[i])
        high_index[i] = equal[last[i] - np.searchsorted(ordered[i], high[i])]
    low, high = np.where(nonempty, low, np.inf), np.where(nonempty, high, -np.inf)
    found = (low.astype(table.dtype), low_index, high.astype(table.dtype), high_index, tied)
    return Edges(*map(torch.from_numpy, found))


def selected(scores: Tensor, rule: Rule) -> Edges:
    """As `edges`, by selection: a few passes over each row while it is in the cache. For a CPU.

    Runs on one thread: two threads were no faster on 2 cores.
    """
    table = scores.detach().numpy()  # (R, N)
    rows, columns = table.shape
    eligible = np.array([np.count_nonzero(row > -np.inf) for row in table], dtype=np.int64)
    start, end = (rank.numpy() for rank in rule.ranks(torch.from_numpy(eligible)))
    low, high = np.full(rows, -np.inf, table.dtype), np.full(rows, np.inf, table.dtype)
    low_index, high_index = np.zeros(rows, np.int64), np.full(rows, columns - 1, np.int64)
    tied = np.zeros(rows, dtype=bool)
    masked = columns - eligible  # they come before the others
    for i, (row, first, last) in enumerate(zip(table, masked + start, masked + end - 1, strict=True)):
        if last < first:
            low[i], high[i] = np.inf, -np.inf
            continue
        sample = np.sort(row[:: max(1, columns // SAMPLE)])
        if first > masked[i]:
            low[i], below, equal = order_statistic(row, sample, int(first))
            if 0 < first - below < equal:
                low_index[i], tied[i] = np.flatnonzero(row == low[i])[first - below], True
        if last < columns - 1:
            high[i], below, equal = order_statistic(row, sample, int(last))
            if 0 <= last - below < equal - 1:
                high_index[i], tied[i] = np.flatnonzero(row == high[i])[last - below], True
    return Edges(*map(torch.from_numpy, (low, low_index, high, high_index, np.flatnonzero(tied))))


def order_statistic(row: NDArray[Any], sample: NDArray[Any], position: int) -> tuple[float, int, int]:
    """The score at ``position`` in ascending order of ``row`` (N,), the number below it, and the number equal to it.

    sample: some of the row's scores in ascending order (Floyd and Rivest 1975, with one window)

    Examples:
        >>> order_statistic(np.array([3.0, 1.0, 2.0, 1.0]), np.array([1.0, 3.0]), 1)
        (1.0, 0, 2)
    """
    share = position / len(row)
    middle, margin = share * len(sample), SPREAD * math.sqrt(len(sample) * share * (1 - share)) + 1
    first, last = math.floor(middle - margin), math.ceil(middle + margin)
    floor = sample[first] if first >= 0 else -np.inf
    ceiling = sample[last] if last < len(sample) else np.inf
    under = row < floor  # (N,)
    below = int(np.count_nonzero(under))
    window = row[under ^ (row <= ceiling)]  # the scores from floor to ceiling
    if not below <= position < below + len(window):
        window, below = row.copy(), 0
    window.partition(position - below)
    score = window[position - below]
    return float(score), below + int(np.count_nonzero(window < score)), int(np.count_nonzero(window == score))

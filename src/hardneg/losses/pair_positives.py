"""Positives found by label as a list of pairs, on a CPU: only their scores are computed, not those of all rows."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hardneg.losses.columns import LabelledRows
from hardneg.losses.execution import is_eager
from hardneg.losses.kernels.identities import equal_range, expand
from hardneg.losses.kernels.interface import EXACT_SOFTPLUS, LogSums, Rule, first_order

# More pairs than this are not listed. A pair takes about 50 bytes in a call, forward and backward.
MOST_PAIRS = 1 << 20


@dataclass(frozen=True)
class PairPositives:
    """Positives with scores (E,), each of the anchor ``anchor`` (E,), of ``size`` anchors.

    For 256 anchors and 8,192 rows of 100 labels the loss and its gradient take 90 ms on one core instead of 290 ms with
    the scores of all rows.
    """

    anchor: Tensor
    scores: Tensor
    size: int

    def count(self) -> Tensor:
        return torch.bincount(self.anchor, minlength=self.size).to(self.scores.dtype)

    def best(self) -> Tensor:
        return self._maximum(self.scores)

    def sums(self, rule: Rule) -> LogSums:
        log_weight = rule.log_weights(self.scores)
        count = self.count()
        max_score, max_weight = (
            self._maximum(values).masked_fill(count == 0, 0) for values in (self.scores, log_weight)
        )
        weight = (log_weight - max_weight[self.anchor]).exp()
        tilted = self._sum(weight * (self.scores - max_score[self.anchor]).exp())
        total = self._sum(weight)
        found = count > 0
        log_total = torch.where(found, total, 1.0).log()
        mean = torch.where(found, tilted, 1.0).log() - log_total + max_score
        return LogSums(
            torch.where(found, mean, -torch.inf), torch.where(found, log_total + max_weight, -torch.inf), count
        )

    def mean(self) -> Tensor:
        return self._sum(self.scores) / self.count().clamp(min=1)

    def mean_softplus(self, offset: Tensor) -> Tensor:
        terms = softplus(offset[self.anchor] - self.scores, threshold=EXACT_SOFTPLUS)
        return self._sum(terms) / self.count().clamp(min=1)

    def _sum(self, values: Tensor) -> Tensor:
        """The sum of each anchor's values, (A,)."""
        return values.new_zeros(self.size).index_add(0, self.anchor, values)

    def _maximum(self, values: Tensor) -> Tensor:
        """The largest of each anchor's values, (A,), without gradient; −inf where there is none."""
        empty = values.new_full((self.size,), -torch.inf)
        return empty.scatter_reduce(0, self.anchor, values.detach(), "amax")


def pair_positives(anchors: Tensor, parts: Sequence[LabelledRows], scale: Tensor) -> PairPositives | None:
    """The pairs of all parts; None if there are too many, or if the device or build has no product of single pairs."""
    if anchors.device.type != "cpu" or not is_eager():
        return None
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return None
    index, scores, most = [], [], MOST_PAIRS
    for part in parts:
        found = _pairs(part, len(anchors), most)
        if found is None:
            return None
        anchor, row = found
        most -= len(anchor)
        index.append(anchor)
        scores.append(_PairScores.apply(anchors, part.rows.flatten(0, -2), scale, anchor, row))  # type: ignore[no-untyped-call]
    return PairPositives(torch.cat(index), torch.cat(scores), len(anchors))


def _pairs(part: LabelledRows, size: int, most: int) -> tuple[Tensor, Tensor] | None:
    """Anchors and rows (E,) of the positives in order of the anchor, then of the row; None if there are too many."""
    eligibility = part.eligibility
    if eligibility.anchor_groups is None or eligibility.candidate_groups is None:  # rows per anchor, in a mask
        assert eligibility.allowed is not None
        if int(eligibility.allowed.sum()) * (size // len(eligibility.allowed)) > most:
            return None
        instance, column = eligibility.allowed.nonzero(as_tuple=True)
        repeats, batch = size // len(eligibility.allowed), len(eligibility.allowed)
        anchor = torch.cat([instance + view * batch for view in range(repeats)])
        return anchor, (instance * eligibility.columns + column).repeat(repeats)
    labels, order = eligibility.candidate_groups.sort(stable=True)
    first, count = equal_range(labels, eligibility.anchor_groups)
    if int(count.sum()) > most:
        return None
    anchor, position = expand(first, count)
    row = order[position]
    kept = torch.ones_like(anchor, dtype=torch.bool)
    if eligibility.excluded is not None:
        kept &= (eligibility.excluded[anchor] != row[:, None]).all(dim=1)
    if eligibility.allowed is not None:
        kept &= eligibility.allowed[anchor % len(eligibility.allowed), row]
    return anchor[kept], row[kept]


class _PairScores(torch.autograd.Function):
    """Scores scale·⟨anchor, row⟩ (E,) of pairs, in order of the anchor."""

    @staticmethod
    def forward(ctx: Any, anchors: Tensor, rows: Tensor, scale: Tensor, anchor: Tensor, row: Tensor) -> Tensor:
        pattern = _sparse(anchor, row, anchors.new_zeros(len(row)), (len(anchors), len(rows)))
        products: Tensor = torch.sparse.sampled_addmm(pattern, anchors, rows.T, beta=0.0).values()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(anchors, rows, scale, anchor, row, products)
        return products * scale

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        anchors, rows, scale, anchor, row, products = ctx.saved_tensors
        d_scale = (grad * products).sum() if ctx.needs_input_grad[2] else None
        with torch.autocast("cpu", enabled=False):
            d_anchors = _sparse(anchor, row, grad * scale, (len(anchors), len(rows))) @ rows
            d_rows = None
            if ctx.needs_input_grad[1]:
                order = row.sort(stable=True).indices
                transposed = _sparse(row[order], anchor[order], (grad * scale)[order], (len(rows), len(anchors)))
                d_rows = transposed @ anchors
        return d_anchors, d_rows, d_scale, None, None


def _sparse(row: Tensor, column: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """A matrix with these entries, which are in order of the row."""
    _warn_never()
    ends = torch.bincount(row, minlength=shape[0]).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends])
    matrix: Tensor = torch.sparse_csr_tensor(starts, column, values, shape, check_invariants=False)
    return matrix


@lru_cache
def _warn_never() -> None:
    """Make the one matrix for which PyTorch warns that their format may change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zero = torch.zeros(1, dtype=torch.long)
        torch.sparse_csr_tensor(torch.tensor([0, 1]), zero, zero.float(), (1, 1))

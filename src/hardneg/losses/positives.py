"""Sums over an anchor's positives, which are given one by one or found by label in the batch."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hardneg.losses.kernels import Eligibility, HalfCopies, Kernel, LogSums, Rule, reference, tiled
from hardneg.losses.kernels.interface import EXACT_SOFTPLUS


class Positives(Protocol):
    """Functions of the scores p of each anchor's positives."""

    def count(self) -> Tensor:
        """Their number, (A,)."""

    def best(self) -> Tensor:
        """The largest p, (A,), without gradient; −inf where there is none."""

    def sums(self, rule: Rule) -> LogSums:
        """Their log-sums under the rule's weights."""

    def mean(self) -> Tensor:
        """The mean of p, (A,); 0 where there is none."""

    def mean_softplus(self, offset: Tensor) -> Tensor:
        """The mean of log(1 + e^{offset − p}), (A,); 0 where there is none."""


@dataclass(frozen=True)
class OwnPositives:
    """Positives given for each anchor, with scores (A, M); where ``mask`` (A, M) is False there is none."""

    scores: Tensor
    mask: Tensor | None = None

    def count(self) -> Tensor:
        if self.mask is not None:
            return self.mask.sum(dim=1, dtype=self.scores.dtype)
        return torch.full_like(self.scores[:, 0], self.scores.shape[1])

    def best(self) -> Tensor:
        scores = self.scores.detach()
        return (scores if self.mask is None else scores.masked_fill(~self.mask, -torch.inf)).amax(dim=1)

    def sums(self, rule: Rule) -> LogSums:
        log_weight = rule.log_weights(self.scores)
        if self.mask is None and self.scores.shape[1] == 1 and rule.log_weight is None:
            positive = self.scores[:, 0]  # Σ e^{(β+1)p} / Σ e^{βp} = e^p; a quarter of the time of a small batch
            return LogSums(positive, log_weight[:, 0], torch.ones_like(positive))
        has_weight = log_weight != -torch.inf  # NaN is kept: the loss becomes NaN
        return reference.sums(self.scores, log_weight, has_weight if self.mask is None else has_weight & self.mask)

    def mean(self) -> Tensor:
        return self._mean(self.scores)

    def mean_softplus(self, offset: Tensor) -> Tensor:
        return self._mean(softplus(offset[:, None] - self.scores, threshold=EXACT_SOFTPLUS))

    def _mean(self, values: Tensor) -> Tensor:
        if self.mask is None:
            return values.mean(dim=1)
        return values.masked_fill(~self.mask, 0).sum(dim=1) / self.count().clamp(min=1)


@dataclass(frozen=True)
class LabelPositives:
    """Positives found in a pool (N, d) by the groups in ``eligibility``, without a matrix of their scores."""

    anchors: Tensor
    pool: Tensor
    scale: Tensor
    eligibility: Eligibility
    kernel: Kernel
    half_copies: HalfCopies

    def count(self) -> Tensor:
        assert self.eligibility.anchor_groups is not None
        assert self.eligibility.candidate_groups is not None
        ordered = self.eligibility.candidate_groups.sort().values
        first = torch.searchsorted(ordered, self.eligibility.anchor_groups)
        last = torch.searchsorted(ordered, self.eligibility.anchor_groups, right=True)
        return (last - first - int(self.eligibility.excluded is not None)).to(self.anchors.dtype)

    def best(self) -> Tensor:
        return tiled.row_maximum(self.anchors.detach(), [self.pool.detach()], self.scale.detach(), self.eligibility)

    def sums(self, rule: Rule) -> LogSums:
        return self.kernel.log_sums(self.anchors, [self.pool], self.scale, self.eligibility, rule)

    def mean(self) -> Tensor:
        return self._means(torch.zeros_like(self.anchors[:, 0]))[1]

    def mean_softplus(self, offset: Tensor) -> Tensor:
        return self._means(offset)[0]

    def _means(self, offset: Tensor) -> tuple[Tensor, Tensor]:
        terms, total = self.kernel.positive_sums(
            self.anchors, self.pool, self.scale, self.eligibility, offset, self.half_copies
        )
        number = self.count().clamp(min=1)
        return terms / number, total / number

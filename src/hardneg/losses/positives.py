"""Sums over an anchor's positives, which are given one by one or found by label in the batch and in given rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hardneg.losses.columns import LabelledRows
from hardneg.losses.kernels import Kernel, reference, tiled
from hardneg.losses.kernels.identities import equal_range
from hardneg.losses.kernels.interface import EXACT_SOFTPLUS, Eligibility, HalfCopies, LogSums, Rule


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
    """Positives found by label among rows of the batch and given rows, without a matrix of their scores.

    parts: the rows of the batch first; each with its eligibility
    """

    anchors: Tensor
    parts: Sequence[LabelledRows]
    scale: Tensor
    kernel: Kernel
    half_copies: HalfCopies

    def count(self) -> Tensor:
        in_batch, *given = (part.eligibility for part in self.parts)
        found = _group_sizes(in_batch) - int(in_batch.excluded is not None)  # the anchor itself is in its group
        for eligibility in given:
            if eligibility.excluded is None and eligibility.allowed is None:
                found = found + _group_sizes(eligibility)
            else:
                found = found + eligibility.counts(len(self.anchors), found.dtype, found.device)
        return found.to(self.anchors.dtype)

    def best(self) -> Tensor:
        anchors, scale = self.anchors.detach(), self.scale.detach()
        found = [tiled.row_maximum(anchors, [part.rows.detach()], scale, part.eligibility) for part in self.parts]
        return found[0] if len(found) == 1 else torch.stack(found).amax(dim=0)

    def sums(self, rule: Rule) -> LogSums:
        return merged(
            [self.kernel.log_sums(self.anchors, [part.rows], self.scale, part.eligibility, rule) for part in self.parts]
        )

    def mean(self) -> Tensor:
        return self._means(torch.zeros_like(self.anchors[:, 0]))[1]

    def mean_softplus(self, offset: Tensor) -> Tensor:
        return self._means(offset)[0]

    def _means(self, offset: Tensor) -> tuple[Tensor, Tensor]:
        found = [
            self.kernel.positive_sums(self.anchors, part.rows, self.scale, part.eligibility, offset, self.half_copies)
            for part in self.parts
        ]
        terms, total = found[0]
        for more_terms, more in found[1:]:
            terms, total = terms + more_terms, total + more
        number = self.count().clamp(min=1)
        return terms / number, total / number


def merged(parts: Sequence[LogSums]) -> LogSums:
    """The log-sums over the candidates of all parts together."""
    if len(parts) == 1:
        return parts[0]
    count = torch.stack([part.count for part in parts]).sum(dim=0)
    weights = torch.stack([part.weight for part in parts])  # (K, A)
    weight = log_sum_exp(weights)
    # The mean of the parts' means, weighted by their shares of the weight: nothing cancels for any tilt.
    shares = weights - torch.where(count > 0, weight, 0.0)
    mean = log_sum_exp(torch.stack([part.mean for part in parts]) + shares)
    return LogSums(mean, weight, count)


def log_sum_exp(terms: Tensor) -> Tensor:
    """log Σ e^{terms} over the first dimension; −inf where all are −inf, with finite derivatives of any order."""
    empty = (terms == -torch.inf).all(dim=0)
    return torch.logsumexp(terms.masked_fill(empty, 0), dim=0).masked_fill(empty, -torch.inf)


def _group_sizes(eligibility: Eligibility) -> Tensor:
    """The number of candidates in each anchor's group, (A,)."""
    assert eligibility.anchor_groups is not None
    assert eligibility.candidate_groups is not None
    return equal_range(eligibility.candidate_groups.sort().values, eligibility.anchor_groups)[1]

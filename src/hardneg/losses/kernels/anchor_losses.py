"""Losses of the anchors of a paired batch from sums over their negatives, with derivatives by hand; O(A) work.

R = A/D with A = Σ e^{(β+1)s} and D = Σ e^{βs}; G is R, or R corrected for the class prior; L = log(1 + Q·G·e^{−p}).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hardneg.losses.kernels.interface import EXACT_SOFTPLUS, LossForm


class Sums(NamedTuple):
    """Sums over the negatives of each anchor, (A,) each.

    tilted, weight: Σ e^{(β+1)s} and Σ e^{βs}, the latter None if β = 0; their logarithms if ``row_max`` is given, with
    scores relative to it · number: |S|, one number if all anchors have the same
    """

    tilted: Tensor
    weight: Tensor | None
    row_max: Tensor | None
    number: Tensor | float

    def log_mean(self) -> Tensor:
        """log R, (A,); not defined for an anchor without negatives."""
        if self.row_max is None:
            return (self.tilted / (self.number if self.weight is None else self.weight)).log()
        weight = _log(self.number) if self.weight is None else self.weight
        return self.tilted - weight + self.row_max

    def log_total(self, form: LossForm) -> Tensor:
        """log(Q·R), (A,), without debiasing; 0 for an anchor without negatives."""
        if form.log_number is None and self.weight is None:  # Q = |S| = D
            total = self.tilted.log() if self.row_max is None else self.tilted + self.row_max
        else:
            total = self.log_mean() + (_log(self.number) if form.log_number is None else form.log_number)
        return torch.where(self.number > 0, total, 0.0) if isinstance(self.number, Tensor) else total

    def plus(self, other: "Sums") -> "Sums":
        """The sums of the same anchors over the candidates of both; their logarithms only if β = 0."""
        weight = None if self.weight is None or other.weight is None else self.weight + other.weight
        number = self.number + other.number if isinstance(self.number, Tensor) else self.number
        if self.row_max is None or other.row_max is None:
            return Sums(self.tilted + other.tilted, weight, None, number)
        tilted = torch.logaddexp(self.tilted + self.row_max, other.tilted + other.row_max)
        return Sums(tilted, weight, torch.zeros_like(tilted), number)

    def nonzero(self) -> "Sums":
        """The same without zeros or their logarithms, the sums of anchors without negatives, to divide by."""
        limits = torch.finfo(self.tilted.dtype)
        least = limits.tiny if self.row_max is None else limits.min
        weight = None if self.weight is None else self.weight.clamp(min=least)
        return self._replace(tilted=self.tilted.clamp(min=least), weight=weight)


class AnchorLosses(NamedTuple):
    """Losses (A,) and their derivatives.

    valid: which anchors have negatives and positives, None if all · by_mean: ∂L/∂log R · by_positive: ∂L/∂p of the only
    positive, or −1/n of n positives by label, a factor of their derivatives · by_exponential: what is added to ∂L/∂p,
    as a factor of e^p, or of e^p / Σ e^p by logarithms · floored: with debiasing · by_floor: ∂L/∂log G if G is floored
    """

    values: Tensor
    by_mean: Tensor
    by_positive: Tensor | None
    valid: Tensor | None
    by_exponential: Tensor | None = None
    floored: Tensor | None = None
    by_floor: Tensor | None = None


class LabelSums(NamedTuple):
    """Sums over the positives p of each anchor that are found by label, (A,) each; None where not needed.

    number: n · log_total: T = log(Q·G) of the negatives, see `Sums.log_total` · total: Σ p · exponentials: Σ e^p, or
    its logarithm if sums of negatives are logarithms · terms, slopes: Σ softplus(T − p) and its derivative in T
    """

    number: Tensor
    log_total: Tensor
    total: Tensor | None = None
    exponentials: Tensor | None = None
    terms: Tensor | None = None
    slopes: Tensor | None = None


def own_positive_losses(sums: Sums, positive: Tensor, scale: float, form: LossForm) -> AnchorLosses:
    """The losses of anchors with one positive each. positive: (A,) its score · scale: 1/temperature."""
    valid = sums.number > 0 if isinstance(sums.number, Tensor) else None
    floored = amplified = None
    if form.prior is None:
        log_total = sums.log_total(form)
    else:
        log_prior, log_rest = form.prior
        mean = sums.log_mean()
        if valid is not None:
            mean = torch.where(valid, mean, 0.0)
        # G = (R − τ⁺P)/(1 − τ⁺) = R·rest/(1 − τ⁺), with rest = 1 − e^share
        share = log_prior + positive - mean
        rest = -torch.expm1(torch.where(share < 0, share, -1.0))
        log_g = mean + rest.log() - log_rest
        floored = (share >= 0) | (log_g <= -scale)
        log_g = log_g.masked_fill(floored, -scale)
        log_total = log_g + (_log(sums.number) if form.log_number is None else form.log_number)
        amplified = rest.masked_fill(floored, 1.0).reciprocal()  # ∂log G/∂log R = 1 − ∂log G/∂p
        if valid is not None:
            log_total, floored = torch.where(valid, log_total, 0.0), floored & valid
    gap = log_total - positive
    slope = torch.ones_like(gap) if form.decoupled else gap.sigmoid()  # ∂L/∂log G
    values = gap if form.decoupled else softplus(gap, threshold=EXACT_SOFTPLUS)
    if valid is not None:
        values, slope = torch.where(valid, values, 0.0), torch.where(valid, slope, 0.0)
    if floored is None or amplified is None:
        return AnchorLosses(values, slope, None, valid)
    by_mean = slope * amplified
    return AnchorLosses(
        values, by_mean.masked_fill(floored, 0.0), -by_mean, valid, None, floored, slope.masked_fill(~floored, 0.0)
    )


def label_losses(sums: Sums, positives: LabelSums) -> AnchorLosses:
    """The losses of anchors whose positives are found by label."""
    valid = positives.number > 0
    if isinstance(sums.number, Tensor):
        valid &= sums.number > 0
    number, log_total, by_exponential = positives.number.clamp(min=1), positives.log_total, None
    if positives.terms is not None and positives.slopes is not None:
        values, by_mean = positives.terms / number, positives.slopes / number
    else:
        assert positives.total is not None
        values, by_mean = log_total - positives.total / number, torch.ones_like(log_total)
    if positives.exponentials is not None:  # log(Σ e^p + Q·G) − mean p
        direct = sums.row_max is None
        gap = (positives.exponentials.log() if direct else positives.exponentials) - log_total
        values = values + softplus(gap, threshold=EXACT_SOFTPLUS)
        by_mean, by_exponential = (-gap).sigmoid(), gap.sigmoid()
        if direct:
            by_exponential = by_exponential / positives.exponentials.masked_fill(positives.number == 0, 1.0)
        by_exponential = torch.where(valid, by_exponential, 0.0)
    values, by_mean = torch.where(valid, values, 0.0), torch.where(valid, by_mean, 0.0)
    return AnchorLosses(values, by_mean, torch.where(valid, -number.reciprocal(), 0.0), valid, by_exponential)


def _log(number: Tensor | float) -> Tensor | float:
    return number.log() if isinstance(number, Tensor) else math.log(number)

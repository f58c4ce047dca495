"""Debiasing: log G, the expected negative of an anchor, corrected for candidates that share its class."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hardneg.losses.kernels.interface import LogSums


@dataclass(frozen=True)
class Prior:
    """The logarithms of a class prior τ⁺ in (0, 1), computed outside of compiled graphs."""

    log: float  # log τ⁺
    log_rest: float  # log(1 − τ⁺)

    @classmethod
    def of(cls, value: float) -> "Prior":
        """The prior with this value."""
        return cls(math.log(value), math.log1p(-value))


def log_expected_negative(
    negatives: LogSums, positives: LogSums, positive_count: Tensor, prior: Prior, form: str, log_floor: Tensor
) -> tuple[Tensor, Tensor]:
    """log G and which anchors are floored, (A,) each, for a class prior τ⁺ > 0.

    form: ``"hcl"``, G = (R − τ⁺P)/(1 − τ⁺) (HCL eq. 4), or ``"exact"``, G = (Z·R − τ⁺Z⁺P)/(Z − τ⁺Z⁺), which
    uses the share of the anchor's class under the tilted distribution · positive_count: (A,), including positives of
    weight 0 · log_floor: (), the smallest log G
    """
    if form == "hcl":
        log_g = log_difference(negatives.mean, prior.log + positives.mean) - prior.log_rest
    else:
        log_n, log_m = negatives.count.log(), positive_count.clamp(min=1).log()
        numerator = log_difference(negatives.tilted - log_n, prior.log + positives.tilted - log_m)
        denominator = log_difference(negatives.weight - log_n, prior.log + positives.weight - log_m)
        log_g = torch.where(denominator > -torch.inf, numerator - denominator, -torch.inf)
    floored = (negatives.count > 0) & ~(log_g > log_floor)
    return torch.where(floored, log_floor, log_g), floored


def log_difference(larger: Tensor, smaller: Tensor) -> Tensor:
    """log(e^larger − e^smaller), −inf where that is not positive; gradients are finite everywhere."""
    gap = smaller - larger
    positive = gap < 0  # False for NaN too, the result of −inf − (−inf)
    inside = torch.where(positive, gap, -1.0)
    return torch.where(positive, larger + (-torch.expm1(inside)).log(), -torch.inf)

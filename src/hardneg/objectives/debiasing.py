"""From log-sums to log G: the expected negative of an anchor, corrected for those that share its class."""

import math

import torch
from torch import Tensor

from hardneg.objectives.kernels import LogSums


def log_expected_negative(
    negatives: LogSums, positives: LogSums, positive_count: Tensor, prior: float, form: str, log_floor: Tensor
) -> tuple[Tensor, Tensor]:
    """log G and which anchors are floored, (A,) each, for a class prior τ⁺ > 0.

    form: ``"hcl"``, G = (R − τ⁺P)/(1 − τ⁺) (HCL eq. 4), or ``"exact"``, G = (Z·R − τ⁺Z⁺P)/(Z − τ⁺Z⁺), which
    takes the share of the anchor's class under the tilted distribution · positive_count: (A,), those without weight
    included · log_floor: (), the least log G
    """
    log_prior = math.log(prior)
    if form == "hcl":
        log_g = log_difference(negatives.log_mean(), log_prior + positives.log_mean()) - math.log1p(-prior)
    else:
        log_n, log_m = negatives.count.log(), positive_count.clamp(min=1).log()
        numerator = log_difference(negatives.tilted - log_n, log_prior + positives.tilted - log_m)
        denominator = log_difference(negatives.weight - log_n, log_prior + positives.weight - log_m)
        log_g = torch.where(denominator > -torch.inf, numerator - denominator, -torch.inf)
    floored = (negatives.count > 0) & ~(log_g > log_floor)
    return torch.where(floored, log_floor, log_g), floored


def log_difference(larger: Tensor, smaller: Tensor) -> Tensor:
    """log(e^larger − e^smaller), −inf where that is not positive; gradients are finite everywhere."""
    gap = smaller - larger
    positive = gap < 0  # False for NaN too, which is −inf less −inf
    inside = torch.where(positive, gap, -1.0)
    return torch.where(positive, larger + (-torch.expm1(inside)).log(), -torch.inf)

"""The short path: the whole loss of pairs by one fused operator.

Small batches are bound by the number of launches. A kernel may therefore compute the loss of a paired batch, or of
pairs against a queue or bank, in one operator. `applies` returns whether a call has that form.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hardneg import checks, distributed
from hardneg.losses.candidates import pair_eligibility
from hardneg.losses.combine import banded_rule, inverse_temperature, plain_loss, weight_rule
from hardneg.losses.hardening import Hardening
from hardneg.losses.inputs import check_negatives, check_views, half_precision
from hardneg.losses.kernels import Eligibility, LossForm, PairLoss, PairRecord
from hardneg.losses.settings import Settings


def applies(
    settings: Settings,
    z1: Tensor,
    z2: Tensor,
    negatives: Tensor | None,
    exclude: Tensor | None,
    negative_labels: Tensor | None,
    negative_mask: Tensor | None,
    positive_mask: Tensor | None,
) -> bool:
    """True for pairs against one or both views of the other instances, or against shared given negatives."""
    if settings.in_batch is not None:
        fits = negatives is None and exclude is None and negative_labels is None and negative_mask is None
        # With symmetric=True one pass has the anchors of both directions, so a band per anchor would need two.
        fits = fits and not (settings.symmetric and any(map(_differs_between_anchors, settings.bands)))
    else:
        fits = isinstance(negatives, Tensor) and negatives.dim() == 2 and len(negatives) > 0
        fits = fits and negatives.dtype != torch.float64  # type: ignore[union-attr]
        # Excluded negatives must not be counted in Q.
        fits = fits and (settings.negative_count != "batch" or (exclude is None and negative_mask is None))
    return (
        fits
        and settings.supervision == "none"
        and settings.normalize
        and isinstance(z1, Tensor)
        and isinstance(z2, Tensor)
        and z2.dim() == 2
        and positive_mask is None
        and z1.dtype != torch.float64 != z2.dtype
        and (settings.prior is None or settings.debias == "hcl")
        and settings.num_negatives is None
        and settings.weight_range is None
        and not settings.needs_positive
        and not distributed.gathers(settings.gather)
    )


def compute_loss(
    settings: Settings,
    pair_loss: PairLoss,
    z1: Tensor,
    z2: Tensor,
    negatives: Tensor | None,
    exclude: Tensor | None,
    negative_mask: Tensor | None,
) -> tuple[Tensor, Callable[[], PairRecord], Tensor]:
    """The loss, a function that returns its record, and 1/temperature, ()."""
    check_views(z1, z2)
    batch, dim = z1.shape
    validity = None
    if negatives is None:
        eligibility = pair_eligibility(batch, settings.in_batch, settings.symmetric, z1.device)
    else:
        exclude, _, validity = check_negatives(batch, dim, negatives, exclude, None, negative_mask)
        eligibility = Eligibility(len(negatives), excluded=exclude, allowed=negative_mask)
    given = (("z2", z2), ("negatives", negatives), ("exclude", exclude), ("negative_mask", negative_mask))
    for name, tensor in given:
        if tensor is not None and tensor.device != z1.device:
            raise ValueError(f"{name} is on {tensor.device}, but z1 on {z1.device}: move all inputs to one device")
    scale = inverse_temperature(settings, z1, torch.float32)
    rule = weight_rule(settings, [], scale, half_precision(z1, z2))
    if settings.bands:
        rule = banded_rule(settings, rule, None, None, scale)
    if isinstance(settings.negative_count, str):  # a batch of one pair has no negatives: log 1 instead of log 0
        log_number = None if settings.negative_count == "support" else math.log(max(eligibility.count_per_anchor, 1))
    else:
        log_number = math.log(settings.negative_count)
    form = LossForm(
        log_number,
        None if settings.prior is None else (settings.prior.log, settings.prior.log_rest),
        not settings.positive_in_denominator,
        settings.reduction,
    )
    loss, record = pair_loss(
        z1,
        z2,
        negatives,
        eligibility,
        scale,
        rule,
        form,
        partial(_plain_loss, settings, exclude, negative_mask),
    )
    return checks.poisoned(loss, validity), record, scale.detach()


def _plain_loss(
    settings: Settings,
    exclude: Tensor | None,
    negative_mask: Tensor | None,
    z1: Tensor,
    z2: Tensor,
    negatives: Tensor | None,
    scale: Tensor,
) -> Tensor:
    """As `combine.plain_loss`, with the differentiable arguments last."""
    return plain_loss(settings, None, scale, z1, z2, None, negatives, exclude, None, negative_mask, None)


def _differs_between_anchors(part: Hardening) -> bool:
    """True if every anchor has its own band."""
    if part.needs_positive or part.percentiles() is not None:
        return True
    return any(isinstance(bound, Tensor) for bound in part.bounds(None))

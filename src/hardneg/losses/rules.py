"""What the settings of a loss say at this moment of training, as kernels are asked: scale, weights, bands and draws."""

from dataclasses import replace

import torch
from torch import Tensor

from hardneg import distributed, randomness
from hardneg.losses.candidates import Meeting
from hardneg.losses.hardening import Bound, tighter
from hardneg.losses.kernels import HalfCopies, Rule, tiled
from hardneg.losses.kernels.interface import constant
from hardneg.losses.settings import Settings
from hardneg.losses.temperature import Learnable


def scale_of(settings: Settings, views: Tensor, dtype: torch.dtype) -> Tensor:
    """1/temperature, ()."""
    if isinstance(settings.temperature, Learnable):
        temperature: Tensor = settings.temperature()
        return 1 / temperature.to(views.device, dtype)
    scale = 1 / settings.temperature
    if torch.compiler.is_compiling():
        return views.new_full((), scale, dtype=dtype)
    return constant(scale, dtype, views.device)


def weights_of(settings: Settings, arranged: list[Meeting], scale: Tensor, precision: torch.dtype | None) -> Rule:
    """The part of the rule that speaks of weights; it holds for positives too."""
    stretch: float | Tensor = 1.0
    if settings.weight_range is not None:
        extents = [
            tiled.largest_magnitude(m.anchors, m.candidates, scale, m.eligibility)
            for m in (meeting.detached() for meeting in arranged)
            if m.candidates
        ]
        largest = torch.stack([torch.zeros_like(scale), *extents]).detach().amax()
        if settings.gather and distributed.world_size() > 1:
            largest = distributed.maximum(largest)
        stretch = torch.where(largest > 0, settings.weight_range / largest.clamp(min=1e-30), 1.0)
    tilt, log_weight = 0.0, None
    for part in settings.hardening:
        tilt += part.tilt()
        if part.has_general_weights:
            log_weight = lambda scores, part=part: part.log_weight(scores * stretch)  # noqa: E731
    return Rule(
        tilt=tilt * stretch if tilt > 0 else 0.0,
        log_weight=log_weight,
        grad_through_weights=settings.grad_through_weights,
        max_abs_score=settings.largest_score,
        half_copies=HalfCopies(precision),
    )


def banded(
    settings: Settings,
    weights: Rule,
    best: Tensor | None,
    meeting: Meeting | None,
    scale: Tensor,
    draws: Tensor | None = None,
) -> Rule:
    """The whole rule: weights, bands and draws.

    best: (A,) score of the best positive, if a band asks for it · draws: (A, k) random integers, if some are drawn
    """
    lower: Bound = None
    upper: Bound = None
    rings = []
    for part in settings.hardening:
        low, high = part.bounds(best)
        lower, upper = tighter(lower, low, max), tighter(upper, high, min)
        percentiles = part.percentiles()
        if percentiles is not None:
            rings.append(percentiles)
    if best is not None:
        # Kernels sum products in another order: a copy of the positive must compare as equal to it.
        reach: float | Tensor = 1.0
        if not settings.normalize and meeting is not None:
            reach = meeting.anchors.detach().norm(dim=1) * meeting.pool.detach().norm(dim=1).amax()
        rounding = 8 * torch.finfo(scale.dtype).eps * reach * scale.detach()
        lower = lower - rounding if isinstance(lower, Tensor) else lower
        upper = upper + rounding if isinstance(upper, Tensor) else upper
    if lower is None and upper is None and not rings and draws is None:
        return weights
    return replace(weights, lower=lower, upper=upper, rings=tuple(rings), draws=draws)


def draws_of(settings: Settings, meeting: Meeting, number: int, key: Tensor | None) -> Tensor | None:
    """(A, k) random integers that pick each anchor's negatives, or None if all are taken.

    number: of the meeting in the call · key: (2,), see `randomness.integers`. An anchor's draws depend on its place
    among the anchors of all processes, not on how many processes there are.
    """
    if settings.num_negatives is None or key is None:
        return None
    anchors = meeting.layout.global_batch * meeting.layout.views
    layout = meeting.layout.global_rows() + number * anchors  # (A,)
    return randomness.integers(key.to(layout.device), layout, settings.num_negatives)

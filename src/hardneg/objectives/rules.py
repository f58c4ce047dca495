"""What the settings of a loss say at this moment of training, as kernels are asked: scale, weights, bands and draws."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hardneg import distributed
from hardneg.hardening import Bound, tighter
from hardneg.objectives.kernels import Lowered, Rule, tiled
from hardneg.objectives.kernels.problem import constant
from hardneg.objectives.meetings import Meeting
from hardneg.schedules import value
from hardneg.temperature import Learnable

if TYPE_CHECKING:
    from hardneg.objectives.infonce import InfoNCE


def scale_of(loss: "InfoNCE", views: Tensor, dtype: torch.dtype) -> Tensor:
    """1/temperature, ()."""
    if isinstance(loss.temperature, Learnable):
        temperature: Tensor = loss.temperature()
        return 1 / temperature.to(views.device, dtype)
    scale = 1 / value(loss.temperature, loss.progress)
    if torch.compiler.is_compiling():
        return views.new_full((), scale, dtype=dtype)
    return constant(scale, dtype, views.device)


def largest_score(loss: "InfoNCE") -> float | None:
    """What no |score| exceeds, if that is known without looking."""
    if not loss.normalize:
        return None
    lowest = (
        loss.temperature.minimum if isinstance(loss.temperature, Learnable) else value(loss.temperature, loss.progress)
    )
    return 1 / lowest


def weights_of(loss: "InfoNCE", arranged: list[Meeting], scale: Tensor, precision: torch.dtype | None) -> Rule:
    """The part of the rule that speaks of weights; it holds for positives too."""
    stretch: float | Tensor = 1.0
    if loss.weight_range is not None:
        extents = [
            tiled.largest_magnitude(m.anchors, m.candidates, scale, m.who)
            for m in (meeting.detached() for meeting in arranged)
            if m.candidates
        ]
        largest = torch.stack([torch.zeros_like(scale), *extents]).detach().amax()
        if loss.gather and distributed.world_size() > 1:
            largest = distributed.maximum(largest)
        stretch = torch.where(largest > 0, loss.weight_range / largest.clamp(min=1e-30), 1.0)
    tilt, log_weight = 0.0, None
    for part in loss._hardening:
        tilt += part.tilt()
        if part.has_general_weights:
            log_weight = lambda scores, part=part: part.log_weight(scores * stretch)  # noqa: E731
    return Rule(
        tilt=tilt * stretch if tilt > 0 else 0.0,
        log_weight=log_weight,
        grad_through_weights=loss.grad_through_weights,
        largest=largest_score(loss),
        lowered=Lowered(precision),
    )


def banded(loss: "InfoNCE", weights: Rule, best: Tensor | None, meeting: Meeting | None, scale: Tensor) -> Rule:
    """The whole rule: weights, bands and draws. best: (A,) score of the best positive, if a band asks for it."""
    lower: Bound = None
    upper: Bound = None
    rings = []
    for part in loss._hardening:
        low, high = part.bounds(best)
        lower, upper = tighter(lower, low, max), tighter(upper, high, min)
        percentiles = part.percentiles()
        if percentiles is not None:
            rings.append(percentiles)
    if best is not None:
        # Kernels sum products in another order: a copy of the positive must compare as equal to it.
        reach: float | Tensor = 1.0
        if not loss.normalize and meeting is not None:
            reach = meeting.anchors.detach().norm(dim=1) * meeting.pool.detach().norm(dim=1).amax()
        rounding = 8 * torch.finfo(scale.dtype).eps * reach * scale.detach()
        lower = lower - rounding if isinstance(lower, Tensor) else lower
        upper = upper + rounding if isinstance(upper, Tensor) else upper
    draws = None
    if lower is None and upper is None and not rings and loss.num_negatives is None:
        return weights
    if loss.num_negatives is not None and meeting is not None:
        # Drawn for the anchors of all processes, so that the draws do not depend on how many there are.
        device = meeting.anchors.device if loss.generator is None else loss.generator.device
        shape = (meeting.places.whole * meeting.places.views, loss.num_negatives)
        everyone = torch.randint(1 << 62, shape, generator=loss.generator, device=device)
        draws = everyone.to(meeting.anchors.device)[meeting.places.order()]
    return replace(weights, lower=lower, upper=upper, rings=tuple(rings), draws=draws)

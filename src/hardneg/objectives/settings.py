"""The settings of the objective: which go together, and which make a call a plain one."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hardneg import checks, distributed
from hardneg.hardening import Hardening
from hardneg.objectives.kernels import BACKENDS
from hardneg.temperature import Learnable

if TYPE_CHECKING:
    from hardneg.objectives.infonce import InfoNCE


def check(loss: "InfoNCE") -> None:
    """Raise unless every setting is known, in its range, and fits the others."""
    if not isinstance(loss.temperature, Learnable):
        checks.number("temperature", loss.temperature, above=0, below=math.inf)
    for part in loss.hardening:
        if not isinstance(part, Hardening):
            raise ValueError(f"hardening must be a Hardening or a tuple of them, got {part!r}")
    if sum(part.weighs for part in loss.hardening) > 1:
        raise ValueError(f"hardening takes at most one tilt (Exponential or Custom), got {loss.hardening!r}")
    checks.number("class_prior", loss.class_prior, at_least=0, below=1)
    checks.choice("debias", loss.debias, ("hcl", "exact"))
    if loss.in_batch is not None:
        checks.choice("in_batch", loss.in_batch, ("both", "other"))
    if loss.symmetric and loss.in_batch != "other":
        raise ValueError(f"symmetric=True needs in_batch='other', got in_batch={loss.in_batch!r}")
    checks.choice("supervision", loss.supervision, ("none", "positives", "negatives", "full"))
    checks.choice("combine_positives", loss.combine_positives, ("mean_of_logs", "log_of_mean", "in_denominator"))
    if loss.combine_positives == "in_denominator" and not loss.positive_in_denominator:
        raise ValueError("combine_positives='in_denominator' contradicts positive_in_denominator=False: change one")
    checks.choice("average", loss.average, ("anchors", "pairs"))
    if isinstance(loss.negative_count, str):
        checks.choice("negative_count", loss.negative_count, ("support", "batch"))
    else:
        checks.number("negative_count", loss.negative_count, above=0, below=math.inf)
    if loss.num_negatives is not None and (not isinstance(loss.num_negatives, int) or loss.num_negatives < 1):
        raise ValueError(f"num_negatives must be an integer ≥ 1 or None, got {loss.num_negatives!r}")
    if loss.weight_range is not None:
        checks.number("weight_range", loss.weight_range, above=0, below=math.inf)
    checks.choice("backend", loss.backend, BACKENDS)
    checks.choice("reduction", loss.reduction, ("mean", "sum", "none"))
    for name, flag in (
        ("symmetric", loss.symmetric),
        ("positive_in_denominator", loss.positive_in_denominator),
        ("grad_through_weights", loss.grad_through_weights),
        ("normalize", loss.normalize),
        ("gather", loss.gather),
    ):
        if not isinstance(flag, bool):
            raise ValueError(f"{name} must be True or False, got {flag!r}")
    if loss.generator is not None and not isinstance(loss.generator, torch.Generator):
        raise ValueError(f"generator must be a torch.Generator or None, got {loss.generator!r}")


def is_plain(
    loss: "InfoNCE",
    z1: Tensor,
    z2: Tensor | None,
    negatives: Tensor | None,
    exclude: Tensor | None,
    negative_labels: Tensor | None,
    negative_mask: Tensor | None,
    positive_mask: Tensor | None,
) -> bool:
    """Is this a plain case: pairs against one or both views of all others, or anchors against a queue or bank?"""
    given = (exclude, negative_labels, negative_mask)
    if loss.in_batch is not None:
        plain = negatives is None and all(part is None for part in given)
        # In both directions all are anchors at once: a band of each anchor's own would have to be one for both.
        plain = plain and not (loss.symmetric and any(_differs_between_anchors(part) for part in loss._hardening))
    else:
        plain = isinstance(negatives, Tensor) and negatives.dim() == 2 and len(negatives) > 0
        plain = plain and negatives.dtype != torch.float64  # type: ignore[union-attr]
        # What is not met must not be counted.
        plain = plain and (loss.negative_count != "batch" or (exclude is None and negative_mask is None))
    return (
        plain
        and loss.supervision == "none"
        and loss.normalize
        and isinstance(z1, Tensor)
        and isinstance(z2, Tensor)
        and z2.dim() == 2
        and positive_mask is None
        and z1.dtype != torch.float64 != z2.dtype
        and (not loss.is_debiased or loss.debias == "hcl")
        and loss.num_negatives is None
        and loss.weight_range is None
        and not any(part.needs_positive for part in loss.hardening)
        and not (loss.gather and distributed.world_size() > 1)
    )


def _differs_between_anchors(part: Hardening) -> bool:
    """Does every anchor have a band of its own?"""
    if part.needs_positive or part.percentiles() is not None:
        return True
    return any(isinstance(bound, Tensor) for bound in part.bounds(None))

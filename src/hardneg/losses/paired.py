"""The short path: the whole loss of a paired batch by one function of the kernel.

Small batches are bound by the number of operations and launches. A kernel may therefore compute the loss of a paired
batch, of a labelled batch, or of pairs against a queue or bank, in one function. `plan` decides whether a call has that
form; the decision is kept for further calls with the same settings and shapes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from hardneg import checks, distributed
from hardneg.losses.combine import banded_rule, inverse_temperature, plain_loss, weight_rule
from hardneg.losses.hardening import Hardening
from hardneg.losses.inputs import check_negatives, check_views, half_precision
from hardneg.losses.kernels import Kernel, PairLoss
from hardneg.losses.kernels.interface import Eligibility, Gathering, LossForm, PairRecord, PairSupport, RowLayout, Rule
from hardneg.losses.settings import Settings

# Settings of compiled graphs by their key, for as long as a loss has them; see `key_of`.
KEYS: WeakValueDictionary[str, Settings] = WeakValueDictionary()


@dataclass(frozen=True)
class Plan:
    """How the loss of calls with these settings and shapes is computed.

    shapes: type, shape, dtype and device of each tensor, None for one that is not given · dtype: of the scores ·
    validity: of the excluded indices; see `checks.values`
    """

    settings: Settings
    shapes: tuple[tuple[type, torch.Size, torch.dtype, torch.device] | None, ...]
    pair_loss: PairLoss
    eligibility: Eligibility
    rule: Rule
    form: LossForm
    dtype: torch.dtype
    validity: Tensor | None

    def fits(self, settings: Settings, *tensors: object) -> bool:
        """True if a call with these settings and tensors, z1, z2, labels and negatives, may use this plan."""
        if settings is not self.settings:
            return False
        for expected, x in zip(self.shapes, tensors, strict=True):
            if x is None:
                if expected is not None:
                    return False
            elif not isinstance(x, Tensor) or expected != (type(x), x.shape, x.dtype, x.device):
                return False
        return True

    def compute_loss(
        self,
        z1: Tensor,
        z2: Tensor | None,
        labels: Tensor | None,
        negatives: Tensor | None,
        exclude: Tensor | None,
        negative_mask: Tensor | None,
    ) -> tuple[Tensor, Callable[[], PairRecord], Tensor] | None:
        """The loss, a function that returns its record, and 1/temperature, (); None for the general path."""
        scale = inverse_temperature(self.settings, z1, self.dtype)
        plain = partial(_plain_loss, self.settings, labels, exclude, negative_mask)
        found = self.pair_loss(
            z1, z2, negatives, self.eligibility, scale, self.rule, self.form, plain,
            labels=None if labels is None else labels.long(), watched=(labels, exclude, negative_mask),
        )  # fmt: skip
        if found is None:
            return None
        loss, record = found
        return checks.poisoned(loss, self.validity), record, scale.detach()


def plan(
    settings: Settings,
    kernel: Kernel,
    z1: Tensor,
    z2: Tensor | None,
    labels: Tensor | None,
    negatives: Tensor | None,
    exclude: Tensor | None,
    negative_mask: Tensor | None,
) -> Plan | None:
    """The plan for a call, or None if the kernel does not serve its form; raises if shapes or devices do not fit."""
    tensors = (z1, z2, labels, negatives)
    if (
        kernel.pair_loss is None
        or not set(map(type, tensors)) <= {torch.Tensor, torch.nn.Parameter, type(None)}
        or not _suits_settings(settings, kernel.pair_support, labels is not None)
        or not _suits_tensors(settings, kernel.pair_support, z1, z2, negatives)
        or (negatives is None and not (exclude is None and negative_mask is None))
        # Excluded negatives must not be counted in Q.
        or (settings.negative_count == "batch" and not (exclude is None and negative_mask is None))
    ):
        return None
    check_views(z1, z2)
    batch, dim = z1.shape
    validity = None
    if labels is not None:
        checks.integers("labels", labels, (batch,), "one per row of z1")
    gathering = None
    if distributed.gathers(settings.gather):
        group = distributed.group_of(settings.gather)
        gathering = Gathering(distributed.batch_sizes(batch, z1.device, group), group)
        layout = RowLayout(batch, 2, sum(gathering.sizes[: distributed.rank(group)]), sum(gathering.sizes), z1.device)
        eligibility = Eligibility(2 * layout.global_batch, own=layout, pool_views=2)
    elif negatives is None:
        eligibility = _eligibility(settings, batch, 1 if z2 is None else 2, z1.device)
    else:
        exclude, _, validity = check_negatives(batch, dim, negatives, exclude, None, negative_mask)
        eligibility = Eligibility(len(negatives), excluded=exclude, allowed=negative_mask)
    given = {"z2": z2, "labels": labels, "negatives": negatives, "exclude": exclude, "negative_mask": negative_mask}
    for name, tensor in given.items():
        if tensor is not None and tensor.device != z1.device:
            raise ValueError(f"{name} is on {tensor.device}, but z1 on {z1.device}: move all inputs to one device")
    shapes = tuple([None if x is None else (type(x), x.shape, x.dtype, x.device) for x in tensors])
    dtype = torch.float64 if torch.float64 in [x.dtype for x in tensors if x is not None] else torch.float32
    with torch.no_grad():  # a call that is repeated by torch.utils.checkpoint has its plan, and saves as many tensors
        scale = inverse_temperature(settings, z1, dtype)
    rule = weight_rule(settings, [], scale, half_precision(z1, z1 if z2 is None else z2))
    if settings.bands:
        rule = banded_rule(settings, rule, None, None, scale, dim)
    pair_loss = kernel.pair_loss if gathering is None else partial(kernel.pair_loss, gathering=gathering)
    return Plan(settings, shapes, pair_loss, eligibility, rule, _form(settings, eligibility), dtype, validity)


def is_constant(settings: Settings) -> bool:
    """True if the hardenings are ours, whose numbers never change; those of users may return others at every call."""
    parts = [*settings.bands, *([] if settings.weighting is None else [settings.weighting])]
    return all(type(part).__module__ == Hardening.__module__ for part in parts)


def key_of(settings: Settings) -> tuple[str, Settings] | None:
    """A key of the settings for a compiled graph, None if their loss is not one operator of the fused kernel.

    The settings are returned as well: the loss must keep them, because `KEYS` does not.
    """
    if not is_constant(settings) or settings.effective_shares:
        return None
    # Processes may be started after the loss was made.
    if settings.gather is not False or not _suits_settings(settings, PairSupport(), settings.supervision != "none"):
        return None
    settings = replace(settings, temperature=1.0)  # the operator takes 1/temperature as a tensor
    key = repr(settings)
    return key, KEYS.setdefault(key, settings)


def suits_call(settings: Settings, z1: Tensor, z2: Tensor | None, negatives: Tensor | None) -> bool:
    """True if a compiled call with these tensors may be one operator."""
    return _suits_tensors(settings, PairSupport(), z1, z2, negatives)


def _suits_settings(settings: Settings, support: PairSupport, labelled: bool) -> bool:
    """True if the kernel computes losses with these settings."""
    per_anchor = any(map(_differs_between_anchors, settings.bands))
    return (
        settings.normalize
        and not settings.needs_general
        and (settings.weighting is None or not settings.weighting.has_general_weights)
        and (settings.prior is None or settings.debias == "hcl")
        and settings.num_negatives is None
        and settings.weight_range is None
        and not settings.needs_positive
        # With symmetric=True one pass has the anchors of both directions, so a band per anchor would need two.
        and not (per_anchor and (settings.symmetric or not support.bands_per_anchor))
        and (not distributed.gathers(settings.gather) or _suits_gathering(settings, support))
        and not (labelled and settings.in_batch != "both")
        and (settings.supervision not in ("positives", "full") or _suits_label_positives(settings, support))
    )


def _suits_gathering(settings: Settings, support: PairSupport) -> bool:
    """True if the kernel gathers the rows of all processes itself."""
    by_rank = any(part.percentiles() is not None for part in settings.bands)
    return support.gather and settings.in_batch == "both" and settings.supervision == "none" and not by_rank


def _suits_label_positives(settings: Settings, support: PairSupport) -> bool:
    """True for the forms of several positives that the kernel computes."""
    combined = settings.combine_positives == "mean_of_logs"
    if settings.combine_positives == "in_denominator":
        combined = support.weighted_denominator or _has_plain_negatives(settings)
    return combined and settings.prior is None and settings.average == "anchors"


def _has_plain_negatives(settings: Settings) -> bool:
    """True if the total of the negatives is the sum of e^s over all rows of other labels."""
    tilt = 0.0 if settings.weighting is None else settings.weighting.tilt()
    untilted = not isinstance(tilt, Tensor) and tilt == 0  # reading a tensor would synchronize with its device
    return untilted and not settings.bands and settings.supervision == "full" and settings.negative_count == "support"


def _suits_tensors(
    settings: Settings, support: PairSupport, z1: Tensor, z2: Tensor | None, negatives: Tensor | None
) -> bool:
    """True for pairs against one or both views of the others, labelled rows, or pairs against shared negatives."""
    if settings.in_batch is None:
        fits = z2 is not None and negatives is not None and negatives.dim() == 2 and len(negatives) > 0
    else:
        fits = negatives is None
    return (
        fits
        and (z2 is None or z2.dim() == 2)
        and (support.device is None or z1.device.type == support.device)
        and (support.float64 or all(x is None or x.dtype != torch.float64 for x in (z1, z2, negatives)))
    )


def _differs_between_anchors(part: Hardening) -> bool:
    """True if every anchor has its own band."""
    if part.needs_positive or part.percentiles() is not None:
        return True
    return any(isinstance(bound, Tensor) for bound in part.bounds(None))


def _eligibility(settings: Settings, batch: int, views: int, device: torch.device) -> Eligibility:
    """The eligibility of a batch without given negatives: rows are the first views, then the second ones."""
    views = views if settings.in_batch == "both" or settings.symmetric else 1
    layout = RowLayout(batch, views, 0, batch, device)
    return Eligibility(views * batch, own=layout, pool_views=views, crossed=settings.symmetric)


def _form(settings: Settings, eligibility: Eligibility) -> LossForm:
    if not isinstance(settings.negative_count, str):
        log_number: float | None = math.log(settings.negative_count)
    elif settings.negative_count == "support":
        log_number = None
    else:  # a batch of one pair has no negatives: log 1 instead of log 0
        log_number = math.log(max(eligibility.count_per_anchor, 1))
    by_label = settings.supervision in ("positives", "full")
    return LossForm(
        log_number,
        None if settings.prior is None else (settings.prior.log, settings.prior.log_rest),
        not settings.positive_in_denominator,
        settings.reduction,
        settings.combine_positives if by_label else "own",
        settings.supervision in ("negatives", "full"),
    )


def _plain_loss(
    settings: Settings,
    labels: Tensor | None,
    exclude: Tensor | None,
    negative_mask: Tensor | None,
    z1: Tensor,
    z2: Tensor | None,
    negatives: Tensor | None,
    scale: Tensor,
) -> Tensor:
    """As `combine.plain_loss`, with the differentiable arguments last."""
    return plain_loss(settings, None, scale, z1, z2, labels, negatives, exclude, None, negative_mask, None)

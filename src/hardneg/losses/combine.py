"""From the inputs of one call to its loss: rule, log-sums of the negatives, debiasing, positives, Q and reduction."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hardneg import checks, distributed, randomness
from hardneg.losses.candidates import CandidateSet, candidate_sets, check_score_range
from hardneg.losses.debiasing import log_expected_negative
from hardneg.losses.diagnostics import CallRecord, joined_record
from hardneg.losses.hardening import Hardening
from hardneg.losses.inputs import Inputs, prepare
from hardneg.losses.kernels import REFERENCE, TILED, Kernel, tiled
from hardneg.losses.kernels.guide import GuideBand, GuideRows
from hardneg.losses.kernels.interface import EXACT_SOFTPLUS, Bound, HalfCopies, LogSums, Rule, constant
from hardneg.losses.pair_positives import pair_positives
from hardneg.losses.positives import LabelPositives, OwnPositives, Positives, log_sum_exp
from hardneg.losses.settings import Settings
from hardneg.losses.sources import GIVEN
from hardneg.losses.temperature import Learnable


def compute_loss(
    settings: Settings, inputs: Inputs, scale: Tensor, kernel: Kernel, key: Tensor | None
) -> tuple[Tensor, list[CallRecord]]:
    """The loss of one call, and its records. scale: (), 1/temperature · key: (2,) of the draws of ``num_negatives``."""
    precision = inputs.precision if kernel.units is not None else None
    return loss_of_sets(settings, candidate_sets(inputs, settings), scale, kernel, key, precision, inputs.validity)


def loss_of_sets(
    settings: Settings,
    directions: Sequence[Sequence[CandidateSet]],
    scale: Tensor,
    kernel: Kernel,
    key: Tensor | None,
    precision: torch.dtype | None = None,
    validity: Tensor | None = None,
) -> tuple[Tensor, list[CallRecord]]:
    """As `compute_loss`, from the candidate sets of each direction.

    precision: of the half-precision copies · validity: of the inputs, see `checks.values`
    """
    sets = [candidates for direction in directions for candidates in direction]
    # One range and one store of copies for all sources.
    weights = weight_rule(settings, sets, scale, precision)
    if not settings.normalize:
        for candidates in sets:
            # Rescaled weights cannot overflow.
            rescaled = settings.weight_range is not None
            tilt = 0.0 if rescaled else _weights_of_source(settings, weights, candidates).tilt
            validity = checks.jointly(validity, check_score_range([candidates], scale, tilt))
    losses, records = [], []
    for number, direction in enumerate(directions):
        draws = None if key is None else _draws(settings, direction[0], number, key)
        found, record = _anchor_losses(settings, direction, scale, weights, kernel, draws)
        losses.append(found)
        records.append(record)
    weights.half_copies.clear()
    return _reduce(settings, losses, records, validity), records


def plain_loss(
    settings: Settings, key: Tensor | None, scale: Tensor, *tensors: Tensor | None, names: Sequence[str] = (GIVEN,)
) -> Tensor:
    """The loss by plain operations, which autograd can differentiate any number of times.

    tensors, names: as `inputs.prepare` takes them · scale, key: as in `compute_loss`
    """
    inputs = prepare(*tensors, names=names, normalize=settings.normalize, kernel=REFERENCE)  # type: ignore[arg-type]
    return compute_loss(settings, inputs, scale.to(inputs.views.dtype), REFERENCE, key)[0]


def inverse_temperature(settings: Settings, views: Tensor, dtype: torch.dtype) -> Tensor:
    """1/temperature on the device of the views, ()."""
    if isinstance(settings.temperature, Learnable):
        temperature: Tensor = settings.temperature()
        inverse = 1 / temperature.to(views.device, dtype)
        if not distributed.gathers(settings.gather):
            return inverse
        # The loss is rarely inside the module that DDP wraps: then nothing else averages the temperature's gradient.
        return distributed.with_averaged_gradient(inverse, distributed.group_of(settings.gather))
    scale = 1 / settings.temperature
    if torch.compiler.is_compiling():
        return views.new_full((), scale, dtype=dtype)
    return constant(scale, dtype, views.device)


def with_scale(
    settings: Settings, scale: float | Tensor | None, views: Tensor
) -> tuple[Settings, Tensor, Tensor | None]:
    """The settings of a call, 1/temperature () on the device of the views, and its validity; see `checks.values`.

    scale: replaces 1/temperature
    """
    if scale is None:
        return settings, inverse_temperature(settings, views, views.dtype), None
    if settings.cosine_bands:
        raise ValueError(
            "scale was given, but Threshold(cosine=…) needs a temperature that is known: use Threshold(score=…), or "
            "leave scale out and set temperature"
        )
    if isinstance(scale, Tensor):
        if scale.dim() != 0 or not scale.is_floating_point():
            raise ValueError(
                f"scale must be a number or a floating tensor without dimensions, got {scale.dtype}, "
                f"{tuple(scale.shape)}: pass scale.squeeze() or scale.float()"
            )
        if scale.device != views.device:
            raise ValueError(f"scale is on {scale.device}, but z1 on {views.device}: move all inputs to one device")
        usable = (scale > 0) & (scale < torch.inf)
        validity = checks.values(usable, "scale must be > 0 and finite: it replaces 1/temperature")
        # Only the device knows a bound of the scores.
        largest = math.inf if settings.normalize else None
        settings = replace(settings, max_abs_score=largest, learned_scale=True)
        return settings, checks.poisoned(scale.to(views.dtype), validity), validity
    number = float(checks.number("scale", scale, above=0, below=math.inf))
    largest = number if settings.normalize else None
    return replace(settings, max_abs_score=largest, learned_scale=False), views.new_full((), number), None


def weight_rule(settings: Settings, sets: list[CandidateSet], scale: Tensor, precision: torch.dtype | None) -> Rule:
    """The rule without bands, whose weights apply to positives too. precision: of the half-precision copies."""
    factor: float | Tensor = 1.0  # by which scores are rescaled inside the weights
    if settings.weight_range is not None:
        magnitudes = [
            tiled.largest_magnitude(s.anchors, s.candidates, scale, s.eligibility)
            for s in (candidates.detached() for candidates in sets)
            if s.candidates
        ]
        largest = torch.stack([torch.zeros_like(scale), *magnitudes]).detach().amax()
        if distributed.gathers(settings.gather):
            largest = distributed.maximum(largest, distributed.group_of(settings.gather))
        factor = torch.where(largest > 0, settings.weight_range / largest.clamp(min=1e-30), 1.0)
    rule = Rule(
        score_factor=factor,
        grad_through_weights=settings.grad_through_weights,
        max_abs_score=settings.max_abs_score,
        learned_scale=settings.learned_scale,
        half_copies=HalfCopies(precision),
    )
    return _weighted(rule, settings.weighting)


def _weighted(rule: Rule, weighting: Hardening | None) -> Rule:
    """The rule with these weights, of scores rescaled by its factor."""
    tilt: float | Tensor = 0.0
    log_weight = None
    if weighting is not None:
        tilt = weighting.tilt()
        if weighting.has_general_weights:
            log_weight = partial(_rescaled_log_weight, weighting, rule.score_factor)
    # A tilt that is a tensor stays one, also where it is 0: reading it would synchronize with the device.
    tilt = tilt * rule.score_factor if isinstance(tilt, Tensor) or tilt > 0 else 0.0
    return replace(rule, tilt=tilt, log_weight=log_weight)


def _weights_of_source(settings: Settings, weights: Rule, candidates: CandidateSet) -> Rule:
    """The rule without bands for the source of these candidates."""
    if settings.by_source is None:
        return weights
    return _weighted(weights, settings.of_source(candidates.source).weighting)


def _rescaled_log_weight(weighting: Hardening, factor: float | Tensor, scores: Tensor) -> Tensor:
    return weighting.log_weight(scores * factor)


class BestPositive(NamedTuple):
    """The score of each anchor's best positive, (A,), and by how much that of a copy of it may differ, (A,) or ()."""

    score: Tensor
    rounding: Tensor


def best_positive(
    settings: Settings, candidates: CandidateSet, positives: Positives, scale: Tensor
) -> BestPositive | None:
    """The best positives of the anchors, None if no band depends on them."""
    if not settings.needs_positive:
        return None
    score, scale, width = positives.best(), scale.detach(), candidates.anchors.shape[1]
    if settings.normalize:
        magnitude = scale
    elif width == 1:  # also the scores of `InfoNCE.from_scores`
        magnitude = score.abs().masked_fill(score == -torch.inf, 0)
    else:  # the positives of this anchor only: a long row elsewhere must not loosen its limit
        lengths: Tensor = torch.linalg.vector_norm(candidates.anchors.detach(), dim=1)
        magnitude = lengths * candidates.longest_positive() * scale
    return BestPositive(score, _reordering(width, scale.dtype) * magnitude)


def banded_rule(
    settings: Settings,
    weights: Rule,
    best: BestPositive | None,
    guide: GuideRows | None,
    scale: Tensor,
    width: int,
    draws: Tensor | None = None,
) -> Rule:
    """The rule with its bands and draws.

    best: if a band depends on it · guide: if a band has a guide · width: of the embeddings · draws: (A, k) random
    integers, if some are drawn
    """
    lower: Bound = None
    upper: Bound = None
    rings, guide_band = [], None
    for part in settings.bands:
        if part.needs_guide:
            assert guide is not None
            guide_band = _guide_band(part, guide, guide_band)
        low, high = part.bounds(None if best is None else best.score)
        lower, upper = _tighter(lower, low, lower=True), _tighter(upper, high, lower=False)
        percentiles = part.percentiles()
        if percentiles is not None:
            rings.append(percentiles)
    rounding = 0.0  # of scores near a number
    if settings.normalize and settings.max_abs_score is not None and not settings.learned_scale:
        rounding = _reordering(width, scale.dtype) * settings.max_abs_score

    def widened(bound: Bound, sign: int) -> Bound:
        """The bound moved outwards: kernels round in other ways, and all of them keep a score that equals it."""
        if isinstance(bound, Tensor):
            return bound if best is None else bound + sign * best.rounding
        return None if bound is None else bound + sign * (4 * torch.finfo(scale.dtype).eps * abs(bound) + rounding)

    lower, upper = widened(lower, -1), widened(upper, 1)
    return replace(weights, lower=lower, upper=upper, rings=tuple(rings), draws=draws, guide=guide_band)


def _guide_band(part: Hardening, rows: GuideRows, other: GuideBand | None) -> GuideBand:
    """The band of a guide's scores, intersected with another one."""
    highest = part.guide_limit(rows.best) + _reordering(rows.anchors.shape[1], rows.best.dtype)
    return GuideBand(rows, highest if other is None else torch.minimum(highest, other.highest))


def _reordering(dim: int, dtype: torch.dtype) -> float:
    """How far the inner products of equal unit vectors may differ if they are summed in other orders.

    Up to 10 eps were seen with MKL, and with oneDNN 28, 31 and 53 eps for vectors of 512, 1,024 and 2,048 numbers.
    """
    return float(torch.finfo(dtype).eps * (8 + 2 * math.sqrt(dim)))


def _tighter(one: Bound, other: Bound, *, lower: bool) -> Bound:
    """The tighter of two bounds: the larger of two lower ones, the smaller of two upper ones."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.maximum(one, other) if lower else torch.minimum(one, other)
    if isinstance(one, Tensor):
        return one.clamp(min=other) if lower else one.clamp(max=other)
    if isinstance(other, Tensor):
        return other.clamp(min=one) if lower else other.clamp(max=one)
    return max(one, other) if lower else min(one, other)


def _draws(settings: Settings, candidates: CandidateSet, number: int, key: Tensor) -> Tensor:
    """(A, k) random integers that select each anchor's negatives.

    number: of the candidate set in the call · key: (2,), see `randomness.integers`. An anchor's draws depend on its
    row among the anchors of all processes, not on the number of processes.
    """
    assert settings.num_negatives is not None
    rows = candidates.layout.global_rows() + number * candidates.layout.global_batch * candidates.layout.views  # (A,)
    return randomness.integers(key.to(rows.device), rows, settings.num_negatives)


def _anchor_losses(
    settings: Settings,
    direction: Sequence[CandidateSet],
    scale: Tensor,
    weights: Rule,
    kernel: Kernel,
    draws: Tensor | None,
) -> tuple[Tensor, CallRecord]:
    """The losses of one direction's anchors, (A,), and the record of them."""
    similarity = direction[0].own_similarity
    positives = positives_of(direction[0], scale, kernel, weights.half_copies)
    count = positives.count()
    best = best_positive(settings, direction[0], positives, scale)
    totals, records, validities = [], [], []
    for part in direction:
        own, rule = settings.of_source(part.source), _weights_of_source(settings, weights, part)
        sums = None if own.prior is None else positives.sums(rule)
        rule, negatives = _negatives(own, part, scale, rule, best, kernel, draws)
        total, floored = _log_total(own, part, negatives, sums, count, scale)
        totals.append(total)
        if rule.log_weight is not None and sums is not None:  # debiasing would hide NaN
            known = ~(negatives.weight.isnan() | sums.weight.isnan())
            validities.append(checks.values(known, "weights must not be NaN"))
        valid = (negatives.count > 0) & (count > 0)
        records.append(_record(part, rule, kernel, valid, floored & valid, negatives.count, count))
    if isinstance(settings.in_batch, tuple) and "doc_to_query" in settings.in_batch:
        assert similarity is not None
        totals.append(similarity[:, 0] * scale)  # GTE's sum over all queries has the positive pair again
    record = records[0] if len(records) == 1 else joined_record(records)
    # Each total is −inf where its source has no negatives: the sources add up.
    log_total = totals[0] if len(totals) == 1 else log_sum_exp(torch.stack(totals))
    log_total = torch.where(record.valid, log_total, 0.0)
    losses = _combine_positives(settings, positives, log_total, weights.half_copies)
    return checks.poisoned(torch.where(record.valid, losses, 0.0), *validities), record


def positives_of(candidates: CandidateSet, scale: Tensor, kernel: Kernel, half_copies: HalfCopies) -> Positives:
    """The positives of a candidate set's anchors."""
    similarity = candidates.own_similarity
    if similarity is not None:
        return OwnPositives(similarity * scale, candidates.positive_mask)
    parts = candidates.labelled_rows
    few = pair_positives(candidates.anchors, parts, scale) if kernel is TILED else None
    return few or LabelPositives(candidates.anchors, parts, scale, kernel, half_copies)


def _negatives(
    settings: Settings,
    candidates: CandidateSet,
    scale: Tensor,
    weights: Rule,
    best: BestPositive | None,
    kernel: Kernel,
    draws: Tensor | None,
) -> tuple[Rule, LogSums]:
    """The rule with its bands, and the log-sums of the negatives it keeps. best: as in `banded_rule`."""
    rule = weights
    if settings.bands or draws is not None:
        rule = banded_rule(settings, weights, best, candidates.guide, scale, candidates.anchors.shape[1], draws)
    if rule.guide is not None and kernel is not REFERENCE:
        kernel = TILED  # the fused kernel has no guide
    if candidates.eligibility.columns > 0:
        sums = kernel.log_sums(candidates.anchors, candidates.candidates, scale, candidates.eligibility, rule)
        return rule, sums if settings.normalize_weights else sums.unnormalized()
    zero = candidates.anchors.new_zeros(len(candidates.anchors))  # an empty queue
    return rule, LogSums(zero - torch.inf, zero - torch.inf, zero)


def _log_total(
    settings: Settings,
    candidates: CandidateSet,
    negatives: LogSums,
    positives: LogSums | None,
    positive_count: Tensor,
    scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """log(Q·G) of each anchor, and which anchors are floored, (A,) each. positives: only with a class prior."""
    if settings.prior is None or positives is None:
        log_g, floored = negatives.mean, torch.zeros_like(negatives.count, dtype=torch.bool)
    else:
        floor = -scale if settings.normalize else scale.new_full((), math.log(torch.finfo(scale.dtype).tiny))
        log_g, floored = log_expected_negative(
            negatives, positives, positive_count, settings.prior, settings.debias, floor
        )
    if settings.negative_count == "support":
        return negatives.count.log() + log_g, floored
    if settings.negative_count == "batch":
        return candidates.count_before_labels().log() + log_g, floored
    return math.log(float(settings.negative_count)) + log_g, floored


def _combine_positives(settings: Settings, positives: Positives, log_total: Tensor, half_copies: HalfCopies) -> Tensor:
    """Each anchor's loss from its positives and log(Q·G), (A,)."""
    if settings.combine_positives == "mean_of_logs":
        if settings.positive_in_denominator:
            return positives.mean_softplus(log_total)
        return log_total - positives.mean()
    plain = positives.sums(Rule(max_abs_score=settings.max_abs_score, half_copies=half_copies))
    log_sum = torch.where(plain.count > 0, plain.tilted, 0.0)  # log Σ e^p
    if settings.combine_positives == "in_denominator":
        # log(e^sum + e^total); the second derivative of torch.logaddexp is NaN where the two are far apart.
        return log_total + softplus(log_sum - log_total, threshold=EXACT_SOFTPLUS) - positives.mean()
    if settings.combine_positives == "log_of_mean":
        log_sum = log_sum - plain.count.clamp(min=1).log()
    gap = log_total - log_sum
    return softplus(gap, threshold=EXACT_SOFTPLUS) if settings.positive_in_denominator else gap


def _record(
    candidates: CandidateSet,
    rule: Rule,
    kernel: Kernel,
    valid: Tensor,
    floored: Tensor,
    support: Tensor,
    positive_count: Tensor,
) -> CallRecord:
    copies = candidates.detached(Tensor.detach if kernel.units is None else rule.half_copies)
    kept = None if torch.compiler.is_compiling() else copies.versions()
    return CallRecord((copies,), (rule,), valid, floored, (support.detach(),), positive_count, (kept,))


def _reduce(settings: Settings, losses: list[Tensor], records: list[CallRecord], validity: Tensor | None) -> Tensor:
    """The losses of all anchors in one tensor, or their mean or sum as the settings say."""
    joined = checks.poisoned(losses[0] if len(losses) == 1 else torch.cat(losses), validity)
    if settings.reduction == "none":
        return joined
    valid = records[0].valid if len(records) == 1 else torch.cat([record.valid for record in records])
    if settings.average == "anchors":  # the loss of an anchor that is not valid is 0
        total, number = joined.sum(), valid.sum()
    else:
        weight = valid * torch.cat([record.positive_count for record in records])
        total, number = (joined * weight).sum(), weight.sum()
    gathers, group = distributed.gathers(settings.gather), distributed.group_of(settings.gather)
    if settings.reduction == "mean":
        number = distributed.total(number, group) if gathers else number
        total = total / number.clamp(min=1)
    return distributed.total_loss(total, group) if gathers else total

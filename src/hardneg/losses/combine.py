"""From the inputs of one call to its loss: log-sums of the negatives, debiasing, positives, Q and the reduction."""

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hardneg import distributed
from hardneg.losses import candidates, rules
from hardneg.losses.candidates import Meeting
from hardneg.losses.debiasing import log_expected_negative
from hardneg.losses.diagnostics import Answer, Diagnostics
from hardneg.losses.inputs import Inputs, read
from hardneg.losses.kernels import PLAIN, HalfCopies, Kernel, LogSums, Losses, Rule
from hardneg.losses.kernels.interface import EXACT_SOFTPLUS, constant
from hardneg.losses.positives import Given, Grouped, Positives
from hardneg.losses.settings import Settings


def loss_of(
    settings: Settings, inputs: Inputs, scale: Tensor, kernel: Kernel, key: Tensor | None
) -> tuple[Tensor, Diagnostics]:
    """The loss of one call, and the record of it. scale: (), 1/temperature · key: of the draws of ``num_negatives``."""
    arranged = candidates.arrange(
        inputs,
        in_batch=settings.in_batch,
        symmetric=settings.symmetric,
        supervision=settings.supervision,
        gather=settings.gather,
    )
    weights = rules.weights_of(settings, arranged, scale, inputs.precision if kernel.units is not None else None)
    if not settings.normalize:
        # Rescaled weights cannot overflow.
        candidates.check_range(arranged, scale, weights.tilt if settings.weight_range is None else 0.0)
    answers = [
        _answer(settings, meeting, scale, weights, kernel, rules.draws_of(settings, meeting, number, key))
        for number, meeting in enumerate(arranged)
    ]
    record = Diagnostics(answers, scale.detach())
    weights.half_copies.clear()
    loss = _reduced(
        settings,
        _joined([answer.losses for answer in answers]),
        _joined([answer.valid for answer in answers]),
        _joined([answer.positive_count for answer in answers]),
    )
    return loss, record


def _answer(
    settings: Settings, meeting: Meeting, scale: Tensor, weights: Rule, kernel: Kernel, draws: Tensor | None
) -> Answer:
    """The losses of one meeting's anchors."""
    if kernel.losses is not None and _is_simple(settings, meeting, scale):
        return _simple_answer(settings, meeting, scale, weights, kernel, kernel.losses, draws)
    positives: Positives
    if meeting.similarity is not None:
        positives = Given(meeting.similarity * scale, meeting.real)
    else:
        positives = Grouped(meeting.anchors, meeting.pool, scale, meeting.friends, kernel, weights.half_copies)
    positive_count = positives.count()
    best = positives.best() if any(part.needs_positive for part in settings.hardening) else None
    rule = rules.banded(settings, weights, best, meeting, scale, draws)
    negatives = _negatives(meeting, scale, rule, kernel)
    if settings.prior is not None:
        least = -scale if settings.normalize else scale.new_full((), math.log(torch.finfo(scale.dtype).tiny))
        log_g, floored = log_expected_negative(
            negatives, positives.sums(weights), positive_count, settings.prior, settings.debias, least
        )
    else:
        log_g, floored = negatives.mean, torch.zeros_like(negatives.count, dtype=torch.bool)

    valid = (negatives.count > 0) & (positive_count > 0)
    log_total = torch.where(valid, _log_number(settings, negatives, meeting) + log_g, 0.0)  # log(Q·G)
    losses = torch.where(valid, _combined(settings, positives, log_total, weights.half_copies), 0.0)
    kept = meeting.detached(rule.half_copies)
    return Answer(kept, rule, losses, valid, floored & valid, negatives.count, positive_count)


def _is_simple(settings: Settings, meeting: Meeting, scale: Tensor) -> bool:
    """Has every anchor one positive, and its loss the form that kernels with a `losses` know?"""
    one = meeting.pairs is not None and meeting.pairs.shape[1] == 1 and meeting.real is None
    known = settings.negative_count != "batch" and (settings.prior is None or settings.debias == "hcl")
    return one and known and scale.dtype == torch.float32


def _simple_answer(
    settings: Settings,
    meeting: Meeting,
    scale: Tensor,
    weights: Rule,
    kernel: Kernel,
    losses: Losses,
    draws: Tensor | None,
) -> Answer:
    """As `_answer`, in few launches: how several positives combine makes no difference if there is but one."""
    assert meeting.pairs is not None
    best = None
    if any(part.needs_positive for part in settings.hardening):
        best = (meeting.pairs[:, 0].detach() * scale.detach()).repeat(meeting.layout.views)
    rule = rules.banded(settings, weights, best, meeting, scale, draws)
    negatives = _negatives(meeting, scale, rule, kernel)
    found, floored = losses(
        negatives,
        meeting.pairs[:, 0],
        scale,
        None if settings.negative_count == "support" else math.log(float(settings.negative_count)),
        None if settings.prior is None else (settings.prior.log, settings.prior.log_rest),
        None if settings.normalize else math.log(torch.finfo(scale.dtype).tiny),
        not settings.positive_in_denominator,
    )
    one = constant(1.0, scale.dtype, scale.device).expand(len(found))
    return Answer(meeting.detached(rule.half_copies), rule, found, negatives.count > 0, floored, negatives.count, one)


def _negatives(meeting: Meeting, scale: Tensor, rule: Rule, kernel: Kernel) -> LogSums:
    if meeting.eligibility.columns > 0:
        return kernel.log_sums(meeting.anchors, meeting.candidates, scale, meeting.eligibility, rule)
    none = meeting.anchors.new_zeros(len(meeting.anchors))  # an empty queue
    return LogSums(none - torch.inf, none - torch.inf, none)


def _combined(settings: Settings, positives: Positives, log_total: Tensor, half_copies: HalfCopies) -> Tensor:
    """Each anchor's loss from its positives and the logarithm of its negatives' total, (A,)."""
    if settings.combine_positives == "mean_of_logs":
        if settings.positive_in_denominator:
            return positives.mean_softplus(log_total)
        return log_total - positives.mean()
    plain = positives.sums(Rule(max_abs_score=settings.largest_score, half_copies=half_copies))
    some = plain.count > 0
    log_sum = torch.where(some, plain.tilted, 0.0)  # log Σ e^p
    if settings.combine_positives == "in_denominator":
        # log(e^sum + e^total); the second derivative of torch.logaddexp is NaN where the two are far apart.
        return log_total + softplus(log_sum - log_total, threshold=EXACT_SOFTPLUS) - positives.mean()
    gap = log_total - (log_sum - plain.count.clamp(min=1).log())
    return softplus(gap, threshold=EXACT_SOFTPLUS) if settings.positive_in_denominator else gap


def _reduced(settings: Settings, losses: Tensor, valid: Tensor, positive_count: Tensor) -> Tensor:
    if settings.reduction == "none":
        return losses
    if settings.average == "anchors":  # what is not valid is 0 already
        total, number = losses.sum(), valid.sum()
    else:
        weight = valid * positive_count
        total, number = (losses * weight).sum(), weight.sum()
    processes = distributed.world_size() if settings.gather else 1
    everything = total if processes == 1 else distributed.total(total)
    if settings.reduction == "mean":
        number = number if processes == 1 else distributed.total(number)
        total, everything = total / number.clamp(min=1), everything / number.clamp(min=1)
    if processes == 1:
        return total
    # The value is the global loss; the gradient is scaled so that DDP's average over processes is exact.
    share = processes * total
    return share + (everything - share).detach()


def _log_number(settings: Settings, negatives: LogSums, meeting: Meeting) -> Tensor:
    """log Q, (A,) or ()."""
    if settings.negative_count == "support":
        return negatives.count.log()
    if settings.negative_count == "batch":
        return meeting.met().log()
    return negatives.count.new_full((), math.log(float(settings.negative_count)))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def plain_loss(settings: Settings, key: Tensor | None, scale: Tensor, *tensors: Tensor | None) -> Tensor:
    """The loss by plain operations, which autograd can differentiate any number of times.

    tensors: as `inputs.read` takes them · scale, key: as `loss_of`
    """
    inputs = read(*tensors, normalize=settings.normalize, kernel=PLAIN)  # type: ignore[arg-type]
    return loss_of(settings, inputs, scale.to(inputs.views.dtype), PLAIN, key)[0]

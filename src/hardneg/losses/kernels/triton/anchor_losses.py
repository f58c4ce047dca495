"""Losses of anchors from their sums, with all derivatives, in one launch: see METHODS.md, section 1."""

# Arguments of Triton kernels have no types that mypy knows.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from hardneg.losses.kernels.interface import LossForm
from hardneg.losses.kernels.triton.forward import Slots, Totals, add_slots, finish
from hardneg.losses.kernels.triton.launch import launch
from hardneg.losses.kernels.triton.problem import Problem
from hardneg.losses.kernels.triton.score_tile import LN2, Numbers, exp, expm1, log, log1p

BLOCK = 1024  # anchors per program


class FormNumbers(NamedTuple):
    """log Q, log τ⁺ and log(1 − τ⁺), where they are used."""

    log_number: float
    log_prior: float
    log_rest: float


# Rows of the memory (11, A), for a gradient of 1. It is one tensor, because the host would take longer to pass eleven.
LOSSES = tl.constexpr(0)
COUNTS = tl.constexpr(1)  # of negatives
FLOORED = tl.constexpr(2)  # 0 or 1
ROW_MAX = tl.constexpr(3)  # in base 2, +inf for an empty support
COEFFICIENTS = tl.constexpr(4)  # of the exponentials, (A, 2)
POSITIVE = tl.constexpr(6)  # gradient of the inner product with the positive; with labels, the number of positives
SCALE = tl.constexpr(7)  # direct gradient of the scale
POSITIVES = tl.constexpr(8)  # coefficients of positives by label, (A, 2)
BOUND = tl.constexpr(10)  # of all |∂L/∂s|
ROWS = 11


def kept_row(memory: Tensor, row: tl.constexpr, weight: Tensor | None = None) -> Tensor:
    """A number of each anchor, (A,), times ``weight`` (A,)."""
    found = memory[row.value]
    return found if weight is None else found * weight


def kept_pairs(memory: Tensor, row: tl.constexpr, weight: Tensor | None = None) -> Tensor:
    """Two numbers of each anchor, (A, 2), times ``weight`` (A,)."""
    found = memory[row.value : row.value + 2].view(-1, 2)  # aligned for any A
    return found if weight is None else found * weight[:, None]


@triton.jit
def pair_losses(mean, count, cosine, scale, form, SUPPORT: tl.constexpr, DEBIASED: tl.constexpr,
                DECOUPLED: tl.constexpr):  # fmt: skip
    """log(1 + Q·G·e^{−p}) of anchors with one positive each, and its derivatives.

    mean, count: of `LogSums` · cosine: with the positive · SUPPORT: Q is the size of the support, not e^log_number ·
    returns the loss, whether it is floored, and its derivatives in ``mean``, in the positive's score and in ``scale``
    """
    valid = count > 0
    mean = tl.where(valid, mean, 0.0)
    positive = cosine * scale
    zero = mean * 0
    log_g, by_mean, by_positive, by_scale, floored = mean, zero + 1, zero, zero, count < 0
    if DEBIASED:
        floor = zero - scale
        gap = form.log_prior + positive - mean
        inner = tl.where(gap < 0, gap, -1.0)
        share, rest = exp(inner), -expm1(inner)
        log_g = mean + log(rest) - form.log_rest
        floored = valid & ((gap >= 0) | (log_g <= floor))
        log_g = tl.where(floored, floor, log_g)
        by_mean = tl.where(floored, 0.0, tl.div_rn(zero + 1, rest))
        by_positive = tl.where(floored, 0.0, tl.div_rn(-share, rest))
        by_scale = tl.where(floored, -1.0, 0.0)
    log_q = log(tl.where(valid, count, 1.0)) if SUPPORT else zero + form.log_number
    x = log_q + log_g - positive
    loss, slope = x, zero + 1
    if not DECOUPLED:
        loss, slope = tl.maximum(x, 0.0) + log1p(exp(-tl.abs(x))), tl.div_rn(zero + 1, 1 + exp(-x))
    slope = tl.where(valid, slope, 0.0)
    by_positive = slope * (by_positive - 1)
    return (
        tl.where(valid | (loss != loss), loss, 0.0),  # NaN stays, also without candidates
        floored,
        slope * by_mean,
        by_positive,
        cosine * by_positive + slope * by_scale,
    )


@triton.jit
def store_results(
    memory, result, numbers_, i, anchors, loss, count, valid, by_mean, tilted_sum, weight_sum, row_max, tilt,
    THROUGH: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Stores the losses of anchors i, what the gradient of their negatives needs, and the sum of a block of losses.

    by_mean: derivative of the loss in the mean of `LogSums` · result: (blocks,) sums of losses, or their mean if there
    is one block (MEAN) · numbers_: (blocks,) of valid anchors
    """
    inside, nonempty = i < anchors, count > 0
    by_mean = tl.where(nonempty, by_mean, 0.0)
    tilted_coef, weight_coef = by_mean, by_mean * 0
    if THROUGH:
        tilted_coef, weight_coef = by_mean * (tilt + 1), -by_mean * tilt
    tl.store(memory + LOSSES * anchors + i, loss, mask=inside)
    tl.store(memory + COUNTS * anchors + i, count, mask=inside)
    # See `forward.finish`.
    tl.store(memory + ROW_MAX * anchors + i, tl.where(nonempty, row_max, float("inf")), mask=inside)
    pair = memory + COEFFICIENTS * anchors + 2 * i
    tl.store(pair, tl.div_rn(tilted_coef, tl.where(nonempty, tilted_sum, 1.0)), mask=inside)
    tl.store(pair + 1, tl.div_rn(weight_coef, tl.where(nonempty, weight_sum, 1.0)), mask=inside)
    tl.store(memory + BOUND * anchors + i, tl.abs(by_mean) * (2 * tilt + 1), mask=inside)
    total = tl.sum(tl.where(inside, loss, 0.0), axis=0)
    number = tl.sum(tl.where(inside & valid, 1.0, 0.0), axis=0)
    tl.store(result + tl.program_id(0), tl.div_rn(total, tl.maximum(number, 1.0)) if MEAN else total)
    tl.store(numbers_ + tl.program_id(0), number)


@triton.jit
def finish_pairs(
    slots, numbers, form, similarity, labels_, memory, result, numbers_, anchors, batch, number, known,
    BLOCK: tl.constexpr, KIND: tl.constexpr, BOUNDED: tl.constexpr, COUNTED: tl.constexpr, SUPPORT: tl.constexpr,
    DEBIASED: tl.constexpr, DECOUPLED: tl.constexpr, LABELLED: tl.constexpr, THROUGH: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Losses of a block of anchors with one positive each, from the sums of all slots.

    labels_: (A,) if LABELLED; for a label < −1 the loss is NaN
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, tilt, scale = i < anchors, tl.load(numbers.tilt), tl.load(numbers.scale)
    tilted_sum, weight_sum, count, row_max = add_slots(
        slots, i, anchors, number, known, tilt, BLOCK, KIND, BOUNDED, COUNTED
    )
    loss, floored, by_mean, by_positive, by_scale = pair_losses(
        log(tl.div_rn(tilted_sum, weight_sum)) + row_max * LN2, tl.where(inside, count, 0.0),
        tl.load(similarity + i % batch, mask=inside, other=0.0), scale, form, SUPPORT, DEBIASED, DECOUPLED,
    )  # fmt: skip
    if LABELLED:
        loss = tl.where(tl.load(labels_ + i, mask=inside, other=0) < -1, float("nan"), loss)
    tl.store(memory + FLOORED * anchors + i, floored.to(tl.float32), mask=inside)
    tl.store(memory + POSITIVE * anchors + i, by_positive * scale, mask=inside)
    tl.store(memory + SCALE * anchors + i, by_scale, mask=inside)
    store_results(
        memory, result, numbers_, i, anchors, loss, count, count > 0, by_mean, tilted_sum, weight_sum, row_max, tilt,
        THROUGH, MEAN,
    )  # fmt: skip


@triton.jit
def finish_labels(
    slots, totals, numbers, similarity, labels_, memory, result, numbers_, anchors, batch, number,
    BLOCK: tl.constexpr, DECOUPLED: tl.constexpr, JOINT: tl.constexpr, THROUGH: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Losses of a block of anchors whose positives are found by label, from the sums over negatives and positives.

    slots: over the positives · totals: over the negatives, with log(Q·G) in ``weight`` · similarity: NaN where an
    embedding is not finite · labels_: (A,), for a label < −1 the loss is NaN · JOINT: the totals are over negatives and
    positives together (SupCon) · DECOUPLED: log(Q·G) − p
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, tilt = i < anchors, tl.load(numbers.tilt)
    soft, total, slope, num_positives = (
        tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32),
        tl.zeros((BLOCK,), tl.float32),
    )  # fmt: skip
    for slot in range(number):
        index = slot * anchors + i
        soft += tl.load(slots.tilted + index, mask=inside, other=0.0)
        total += tl.load(slots.weight + index, mask=inside, other=0.0)
        slope += tl.load(slots.counts + index, mask=inside, other=0.0)
        num_positives += tl.load(slots.maximum + index, mask=inside, other=0.0)
    count = tl.load(totals.counts + i, mask=inside, other=0.0)
    if JOINT:
        count = count - num_positives
    valid = inside & (count > 0) & (num_positives > 0)
    each = tl.where(valid, tl.div_rn(total * 0 + 1, tl.maximum(num_positives, 1.0)), 0.0)
    if DECOUPLED:
        loss = tl.load(totals.weight + i, mask=inside, other=0.0) - total * each
        by_level, slope_coef, plain_coef = each * 0 + 1, each * 0, -each
    else:
        loss, by_level, slope_coef, plain_coef = soft * each, slope * each, each, each * 0
    not_finite = (total + tl.load(similarity + i % batch, mask=inside, other=0.0)) * 0  # 0, or NaN
    not_finite = tl.where(tl.load(labels_ + i, mask=inside, other=0) < -1, float("nan"), not_finite)
    pair = memory + POSITIVES * anchors + 2 * i
    tl.store(pair, slope_coef, mask=inside)
    tl.store(pair + 1, plain_coef, mask=inside)
    tl.store(memory + FLOORED * anchors + i, num_positives * 0, mask=inside)
    tl.store(memory + POSITIVE * anchors + i, num_positives, mask=inside)
    row_max = tl.load(totals.row_max + i, mask=inside, other=0.0)
    store_results(
        memory, result, numbers_, i, anchors, tl.where(valid, loss, 0.0) + not_finite, count, valid,
        tl.where(valid, by_level, 0.0), tl.load(totals.tilted_sum + i, mask=inside, other=1.0),
        tl.load(totals.weight_sum + i, mask=inside, other=1.0), row_max, tilt, THROUGH, MEAN,
    )  # fmt: skip


def slot_arguments(problem: Problem, slots: Slots, numbers: Numbers) -> dict[str, Any]:
    """The arguments of `add_slots` by the names that kernels have for them."""
    return {
        "slots": slots, "numbers": numbers, "number": slots.tilted.shape[0], "KIND": problem.kind,
        "known": float(problem.eligibility.count_per_anchor), "BOUNDED": problem.bounded,
        "COUNTED": problem.counted or problem.counts is not None,
    }  # fmt: skip


def finish_totals(problem: Problem, slots: Slots, numbers: Numbers, level: int = 0, log_number: float = 0.0) -> Totals:
    """The log-sums of each anchor. level, log_number: see `forward.finish`"""
    rows = slots.tilted.shape[1]
    totals = Totals(*slots.tilted.new_empty(len(Totals._fields), rows).unbind())
    arguments = slot_arguments(problem, slots, numbers)
    arguments |= {"totals": totals, "anchors": rows, "log_number": log_number, "BLOCK": 128, "LEVEL": level}
    launch(finish, (math.ceil(rows / 128),), arguments)
    return totals


def finish_by(
    program: Any, memory: Tensor, form: LossForm, problem: Problem, arguments: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Runs one of the two kernels above: the reduced loss, or the losses; and the number of valid anchors, ()."""
    anchors = memory.shape[1]
    blocks, mean = math.ceil(anchors / BLOCK), form.reduction == "mean"
    shape = () if blocks == 1 else (blocks,)
    result, numbers = memory.new_empty(shape), memory.new_empty(shape)
    common = {
        "memory": memory, "result": result, "numbers_": numbers, "anchors": anchors, "BLOCK": BLOCK,
        "THROUGH": problem.rule.grad_through_weights, "MEAN": mean and blocks == 1,
    }  # fmt: skip
    launch(program, (blocks,), arguments | common)
    if blocks > 1:
        numbers = numbers.sum()
        result = result.sum() / numbers.clamp(min=1) if mean else result.sum()
    # A clone: a view could not be changed in place, as in total += other.
    return memory[LOSSES.value].clone() if form.reduction == "none" else result, numbers

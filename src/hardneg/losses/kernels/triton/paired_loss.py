"""The whole loss of a batch in a few launches, because small batches are bound by the host.

It covers the most common cases: NT-Xent, DCL and HCL over both views of the batch, between two towers in one direction
or in both, over a queue or bank, and with labels, with bands, schedules and a learnable temperature. Everything else
goes through `hardneg.losses.candidates` and the separate functions of the kernel.
"""

# Arguments of Triton kernels have no types that mypy knows.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hardneg import distributed
from hardneg.losses.kernels import interface
from hardneg.losses.kernels.interface import Eligibility, Gathering, LossForm, RowLayout, Rule
from hardneg.losses.kernels.triton import forward, normalize, passes, percentile_bands
from hardneg.losses.kernels.triton.backward import Coefficients
from hardneg.losses.kernels.triton.forward import Totals, add_slots
from hardneg.losses.kernels.triton.launch import launch
from hardneg.losses.kernels.triton.passes import BlockPass, Problem
from hardneg.losses.kernels.triton.score_tile import LN2, exp, expm1, log, log1p

BLOCK = 1024  # anchors per program


class FormNumbers(NamedTuple):
    """log Q, log τ⁺ and log(1 − τ⁺), where they are used."""

    log_number: float
    log_prior: float
    log_rest: float


class Kept(NamedTuple):
    """Results of each anchor, (A,) each, and its coefficients for a gradient of 1, (A, 2).

    losses, counts of negatives, floored (0 or 1) · row_max: in base 2, +inf for an empty support · coefficients: of the
    exponentials · positive: gradient of the inner product with the positive; with labels, the number of positives ·
    scale: direct gradient of the scale · bound: of all |∂L/∂s|
    """

    losses: Tensor
    counts: Tensor
    floored: Tensor
    row_max: Tensor
    coefficients: Tensor
    positive: Tensor
    scale: Tensor
    bound: Tensor

    @classmethod
    def of(cls, memory: Tensor) -> "Kept":
        """The parts of (9, A)."""
        losses, counts, floored, row_max, _, _, positive, scale, bound = memory.unbind()
        return cls(losses, counts, floored, row_max, memory[4:6].view(-1, 2), positive, scale, bound)


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
    kept, result, numbers_, i, anchors, loss, count, valid, by_mean, tilted_sum, weight_sum, row_max, tilt,
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
    tl.store(kept.losses + i, loss, mask=inside)
    tl.store(kept.counts + i, count, mask=inside)
    tl.store(kept.row_max + i, tl.where(nonempty, row_max, float("inf")), mask=inside)  # see `forward.finish`
    pair = kept.coefficients + 2 * i
    tl.store(pair, tl.div_rn(tilted_coef, tl.where(nonempty, tilted_sum, 1.0)), mask=inside)
    tl.store(pair + 1, tl.div_rn(weight_coef, tl.where(nonempty, weight_sum, 1.0)), mask=inside)
    tl.store(kept.bound + i, tl.abs(by_mean) * (2 * tilt + 1), mask=inside)
    total = tl.sum(tl.where(inside, loss, 0.0), axis=0)
    number = tl.sum(tl.where(inside & valid, 1.0, 0.0), axis=0)
    tl.store(result + tl.program_id(0), tl.div_rn(total, tl.maximum(number, 1.0)) if MEAN else total)
    tl.store(numbers_ + tl.program_id(0), number)


@triton.jit
def finish_pairs(
    slots, numbers, form, similarity, labels_, kept, result, numbers_, anchors, batch, number, known,
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
    tl.store(kept.floored + i, floored.to(tl.float32), mask=inside)
    tl.store(kept.positive + i, by_positive * scale, mask=inside)
    tl.store(kept.scale + i, by_scale, mask=inside)
    store_results(
        kept, result, numbers_, i, anchors, loss, count, count > 0, by_mean, tilted_sum, weight_sum, row_max, tilt,
        THROUGH, MEAN,
    )  # fmt: skip


@triton.jit
def finish_labels(
    slots, totals, numbers, similarity, labels_, kept, positives, result, numbers_, anchors, batch, number,
    BLOCK: tl.constexpr, DECOUPLED: tl.constexpr, JOINT: tl.constexpr, THROUGH: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Losses of a block of anchors whose positives are found by label, from the sums over negatives and positives.

    slots: over the positives · totals: over the negatives, with log(Q·G) in ``weight`` · similarity: NaN where an
    embedding is not finite · labels_: (A,), for a label < −1 the loss is NaN · positives: (A, 2) output, the
    coefficients of the positives · JOINT: the totals are over negatives and positives together (SupCon) · DECOUPLED:
    log(Q·G) − p
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
    tl.store(positives + 2 * i, slope_coef, mask=inside)
    tl.store(positives + 2 * i + 1, plain_coef, mask=inside)
    tl.store(kept.floored + i, num_positives * 0, mask=inside)
    tl.store(kept.positive + i, num_positives, mask=inside)
    row_max = tl.load(totals.row_max + i, mask=inside, other=0.0)
    store_results(
        kept, result, numbers_, i, anchors, tl.where(valid, loss, 0.0) + not_finite, count, valid,
        tl.where(valid, by_level, 0.0), tl.load(totals.tilted_sum + i, mask=inside, other=1.0),
        tl.load(totals.weight_sum + i, mask=inside, other=1.0), row_max, tilt, THROUGH, MEAN,
    )  # fmt: skip


def finish_by(
    program: Any, kept: Kept, form: LossForm, problem: Problem, arguments: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Runs one of the two kernels above: the reduced loss, or the losses; and the number of valid anchors, ()."""
    anchors = kept.losses.shape[0]
    blocks, mean = math.ceil(anchors / BLOCK), form.reduction == "mean"
    shape = () if blocks == 1 else (blocks,)
    result, numbers = kept.losses.new_empty(shape), kept.losses.new_empty(shape)
    common = {
        "kept": kept, "result": result, "numbers_": numbers, "anchors": anchors, "BLOCK": BLOCK,
        "THROUGH": problem.rule.grad_through_weights, "MEAN": mean and blocks == 1,
    }  # fmt: skip
    launch(program, (blocks,), arguments | common)
    if blocks > 1:
        numbers = numbers.sum()
        result = result.sum() / numbers.clamp(min=1) if mean else result.sum()
    # A clone: a view could not be changed in place, as in total += other.
    return kept.losses.clone() if form.reduction == "none" else result, numbers


class Given(NamedTuple):
    """The tensors of a call: z1, z2: (B, d) · negatives: (N, d) · scale: () · labels: (A,), for positives by label."""

    z1: Tensor
    z2: Tensor | None
    negatives: Tensor | None
    scale: Tensor
    labels: Tensor | None


@dataclass(frozen=True)
class Call:
    """What is computed. smallest: see `normalize.UnitVectors`

    Candidates are both views of all other instances, or only the other view (A = 2B); for anchors z1 alone (A = B) all
    z2 except their own, or negatives.
    """

    eligibility: Eligibility
    rule: Rule
    form: LossForm
    smallest: float
    gathering: Gathering | None = None  # candidates are both views of all processes

    @property
    def precision(self) -> torch.dtype | None:
        return self.rule.half_copies.precision

    def problem(self, given: Given) -> Problem:
        """The sums over the negatives; for SupCon over all rows but the own one."""
        eligibility, own = self.eligibility, self.eligibility.own
        if self.joint(given) and own is not None:
            rows = own.batch * own.views
            eligibility = Eligibility(rows, own=RowLayout(rows, 1, 0, rows, own.device), pool_views=1)
        return Problem(eligibility, self.rule, by_label=True)

    def joint(self, given: Given) -> bool:
        """Whether positives and negatives are summed together."""
        return given.labels is not None and self.form.positives == "in_denominator"

    def positives(self, given: Given, level: Tensor) -> Problem:
        """The sums over the positives, found by label."""
        batch, labels = given.z1.shape[0], given.labels
        rows = batch if given.z2 is None else 2 * batch
        layout = RowLayout(batch, rows // batch, 0, batch, given.z1.device)
        same = Eligibility(rows, own=layout, anchor_groups=labels, candidate_groups=labels, same_group=True)
        return Problem(same, Rule(half_copies=self.rule.half_copies), level=level, by_label=True)

    def towers(self, given: Given) -> bool:
        """Whether anchors z1 are compared with candidates z2."""
        return given.negatives is None and given.z2 is not None and self.eligibility.columns == given.z1.shape[0]

    def split(self, given: Given, rows: Tensor, negatives: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Anchors and candidates, from the unit vectors of views and of negatives; and whether they are the same."""
        batch = given.z1.shape[0]
        if self.gathering is not None:
            return rows, negatives, False
        if given.negatives is not None:
            return rows[:batch], negatives, False
        return (rows[:batch], rows[batch:], False) if self.towers(given) else (rows, rows, True)


class Saved(NamedTuple):
    """The tensors that the backward pass needs; empty where not used.

    units: of the views · negatives: their unit vectors · similarity: of the pairs · valid: number of valid anchors ·
    memory: (9, A), see `Kept` · positives: (A, 2) coefficients · level: (A,) · low, first, high, last: of `Edges`
    """

    units: Tensor
    negatives: Tensor
    similarity: Tensor
    valid: Tensor
    memory: Tensor
    positives: Tensor
    level: Tensor
    low: Tensor
    first: Tensor
    high: Tensor
    last: Tensor


def forward_pass(call: Call, given: Given) -> tuple[Tensor, Saved]:
    """The loss, () or (A,) if not reduced."""
    z1, z2 = normalize.row_contiguous(given.z1), None if given.z2 is None else normalize.row_contiguous(given.z2)
    form, dtype = call.form, call.precision or torch.float32
    if call.gathering is not None and form.reduction == "mean":
        form = replace(form, reduction="sum")
    units, similarity = normalize.normalized(z1, z2, call.smallest, call.precision, dtype, "z1 or z2")
    empty = units.new_empty(0, dtype=torch.float32)
    negatives, not_finite = empty, None
    if given.negatives is not None:
        rows = normalize.row_contiguous(given.negatives)
        negatives, not_finite = normalize.normalized(rows, None, call.smallest, call.precision, dtype, "negatives")
    if call.gathering is not None:
        negatives = call.gathering.candidates(units)
    anchors, candidates, same = call.split(given, units, negatives)
    problem, joint = call.problem(given), call.joint(given)
    block_pass = BlockPass(problem, given.scale, anchors, candidates, self_block=same)
    slots, edges = passes.compute_sums([block_pass])
    memory = units.new_empty(9, anchors.shape[0], dtype=torch.float32)
    positives, level, kept = empty, empty, Kept.of(memory)
    sums = {
        "slots": slots, "numbers": block_pass.numbers, "number": slots.tilted.shape[0], "KIND": problem.kind,
        "known": float(problem.eligibility.count_per_anchor), "BOUNDED": problem.bounded, "COUNTED": problem.counted,
    }  # fmt: skip
    if given.labels is None:
        numbers = FormNumbers(form.log_number or 0.0, *(form.prior or (0.0, 0.0)))
        arguments = sums | {
            "form": numbers, "similarity": similarity, "batch": z1.shape[0], "SUPPORT": form.log_number is None,
            "DEBIASED": form.prior is not None, "DECOUPLED": form.decoupled,
            "labels_": problem.eligibility.anchor_groups, "LABELLED": problem.eligibility.anchor_groups is not None,
        }  # fmt: skip
        result, valid = finish_by(finish_pairs, kept, form, problem, arguments)
    else:
        totals = Totals(*slots.tilted.new_empty(6, anchors.shape[0]).unbind())
        arguments = sums | {
            "totals": totals, "anchors": anchors.shape[0], "log_number": form.log_number or 0.0, "BLOCK": 128,
            "LEVEL": 1 if form.log_number is None else 2,
        }  # fmt: skip
        launch(forward.finish, (math.ceil(anchors.shape[0] / 128),), arguments)
        level, positives = totals.weight, units.new_empty(anchors.shape[0], 2, dtype=torch.float32)
        by_label = BlockPass(call.positives(given, level), given.scale, anchors, anchors, self_block=True)
        found, _ = passes.compute_sums([by_label])
        arguments = {
            "slots": found, "totals": totals, "numbers": block_pass.numbers, "similarity": similarity,
            "labels_": given.labels, "batch": z1.shape[0], "positives": positives,
            "number": found.tilted.shape[0], "DECOUPLED": joint or form.decoupled, "JOINT": joint,
        }  # fmt: skip
        result, valid = finish_by(finish_labels, kept, form, problem, arguments)
    if not_finite is not None:
        result = result + not_finite.sum()
    if call.gathering is not None and form.reduction != "none":
        result, valid = distributed.total(torch.stack([result, valid]), call.gathering.group).unbind()
        result = result / valid.clamp(min=1) if call.form.reduction == "mean" else result.clone()
    found_edges = (empty,) * 4 if edges is None else edges
    return result, Saved(units, negatives, similarity, valid, memory, positives, level, *found_edges)


def backward_pass(
    call: Call, given: Given, saved: Saved, grad: Tensor, needed: Sequence[bool]
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of z1, z2, negatives and scale; those of views always. needed: which of them are wanted."""
    z1, z2 = normalize.row_contiguous(given.z1), None if given.z2 is None else normalize.row_contiguous(given.z2)
    anchors, candidates, same = call.split(given, saved.units, saved.negatives)
    problem, form, kept, scale = call.problem(given), call.form, Kept.of(saved.memory), given.scale
    mean, reduced, towers = form.reduction == "mean", form.reduction != "none", call.towers(given)
    _, for_z2, for_negatives, for_scale = needed
    # All gradients are linear in that of the loss: a single number is multiplied last, without a separate launch.
    gradient_scale = normalize.GradientScale(grad, saved.valid if mean else None) if reduced else None
    by_anchor = 1.0 if reduced else grad
    values = kept.coefficients if reduced else kept.coefficients * grad[:, None]
    factor = None
    if anchors.dtype == torch.float16:  # a sum of two is below float16's limit, 2¹⁶
        factor = 2.0**13 / (kept.bound * by_anchor).abs().amax().clamp(min=1e-30)
    coefficients = Coefficients(values.view(torch.int64), None if problem.bounded else kept.row_max, factor)
    block_pass = BlockPass(problem, scale, anchors, candidates, self_block=same)
    if problem.rule.rings:
        edges = percentile_bands.Edges(saved.low, saved.first, saved.high, saved.last)
        needs_candidates = for_negatives or given.negatives is None
        for_anchors, (for_candidates,) = percentile_bands.gradients(
            [block_pass], edges, coefficients, [needs_candidates]
        )
        d_scale = block_pass.scale_gradient(for_anchors, False) if for_scale else None
        if given.negatives is None:
            for_anchors = torch.cat([for_anchors, for_candidates]) if towers else for_anchors + for_candidates
    else:
        both = (towers and for_z2) or call.gathering is not None
        gradients = block_pass.gradients if both else block_pass.anchors_gradient
        for_anchors, d_scale = gradients(coefficients, for_scale)
        for_candidates = anchors[:0]
        if for_negatives:
            for_candidates = block_pass.gradient(coefficients, outer=False, inner=True)
    for_similarity = None
    if given.labels is None:
        for_similarity = kept.positive if reduced else kept.positive * grad
    else:
        by_label = BlockPass(call.positives(given, saved.level), scale, anchors, anchors, self_block=True)
        values = saved.positives if reduced else saved.positives * grad[:, None]
        part, share = by_label.anchors_gradient(Coefficients(values.view(torch.int64), saved.level, factor), for_scale)
        for_anchors += part
        d_scale = None if share is None or d_scale is None else d_scale + share
    if call.gathering is not None:
        for_anchors, for_similarity, gradient_scale = _gathered_gradient(call, saved, grad, for_anchors, for_similarity)
    back = partial(
        normalize.normalized_backward,
        smallest=call.smallest,
        precision=call.precision,
        gradient_scale=gradient_scale,
    )
    d1, d2 = back(z1, z2, for_anchors, for_similarity)
    d_negatives = None
    if for_negatives and given.negatives is not None:
        d_negatives, _ = back(normalize.row_contiguous(given.negatives), None, for_candidates, None)
    if d_scale is not None:
        if given.labels is None:
            d_scale = d_scale + (kept.scale * by_anchor).sum()
        if reduced:
            d_scale = d_scale * (grad / saved.valid.clamp(min=1) if mean else grad)
            d_scale = d_scale if call.gathering is None else d_scale * distributed.world_size(call.gathering.group)
    return d1, d2, d_negatives, d_scale


def _gathered_gradient(
    call: Call, saved: Saved, grad: Tensor, gradient: Tensor, for_similarity: Tensor | None
) -> tuple[Tensor, Tensor | None, None]:
    """Gradients of this process's unit vectors and inner products, from those of its anchors and of all candidates.

    Those of a reduced loss are scaled so that DDP's average over processes is exact; see `distributed.total_loss`.
    """
    assert call.gathering is not None
    if call.form.reduction != "none":
        factor = grad * distributed.world_size(call.gathering.group)
        factor = factor / saved.valid.clamp(min=1) if call.form.reduction == "mean" else factor
        gradient, for_similarity = gradient * factor, None if for_similarity is None else for_similarity * factor
    rows = saved.units.shape[0]
    return gradient[:rows] + call.gathering.own_gradient(gradient[rows:]), for_similarity, None


class PairedLoss(torch.autograd.Function):
    """Loss of a batch as one autograd function: (), or (A,) if not reduced.

    plain: the same loss of z1, z2, negatives and scale by PyTorch operations, for second derivatives · watched: further
    tensors that must not be overwritten before the backward pass · seen: a list that receives the saved tensors, for
    diagnostics
    """

    @staticmethod
    def forward(
        ctx: Any,
        z1: Tensor,
        z2: Tensor | None,
        negatives: Tensor | None,
        scale: Tensor,
        labels: Tensor | None,
        call: Call,
        plain: Callable[..., Tensor],
        watched: tuple[Tensor | None, ...],
        seen: list[Saved],
    ) -> Tensor:
        given = Given(z1, z2, negatives, scale, labels)
        result, saved = forward_pass(call, given)
        # The original tensors: autograd then raises in the backward pass if one was overwritten.
        ctx.save_for_backward(*interface.saveable(*given), *saved, *interface.saveable(*watched))
        ctx.call, ctx.plain = call, plain
        seen.append(saved)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        given, needed = Given(*tensors[:5]), ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():  # create_graph=True
            return *interface.gradients(ctx.plain, given[:4], needed, grad), None, None, None, None, None
        found = backward_pass(ctx.call, given, Saved(*tensors[5 : 5 + len(Saved._fields)]), grad, needed)
        return *found, None, None, None, None, None

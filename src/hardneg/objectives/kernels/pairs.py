"""The whole loss of pairs, from embeddings to a number, in a few launches: what small batches wait for is the host.

It covers the most common cases, NT-Xent, DCL and HCL over both views of one process's batch (seven launches) or over a
queue or bank, with bands, schedules and a learnable temperature; everything else goes through
`hardneg.objectives.meetings` and the kernels' own functions.
"""

# Arguments of programs have no types that mypy knows.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hardneg.objectives.kernels import programs, rowwise, walks
from hardneg.objectives.kernels.questions import Negatives
from hardneg.objectives.kernels.rowwise import outcome
from hardneg.objectives.kernels.tiles import LN2, log

BLOCK = 1024  # anchors of a program


@dataclass(frozen=True)
class Form:
    """What becomes of the log-sums; see `rowwise.outcome`."""

    log_number: float | None
    prior: tuple[float, float] | None
    decoupled: bool
    mean: bool  # of the anchors, or their sum?


@triton.jit
def conclude(
    heavy_, light_, count_, peak_, tilt_, scale_, similarity,
    number, heavy_sum, light_sum, top_, losses, floored_, d_mean, d_positive, d_scale, totals, result,
    anchors, batch, slots, known, log_number, log_prior, log_rest,
    BLOCK: tl.constexpr, KIND: tl.constexpr, BOUNDED: tl.constexpr, COUNTED: tl.constexpr, SUPPORT: tl.constexpr,
    DEBIASED: tl.constexpr, DECOUPLED: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Losses of a block of anchors from what was summed slot by slot, their derivatives, and their sum.

    totals: (blocks, 2) sum of losses and number of valid anchors · result: the mean or the sum, if there is one block
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < anchors
    heavy, light, count, top = programs.collect(
        heavy_, light_, count_, peak_, i, inside, anchors, slots, known, tl.load(tilt_), BLOCK, KIND, BOUNDED, COUNTED
    )
    loss, floored, by_mean, by_positive, by_scale = outcome(
        log(heavy) - log(light) + top * LN2, tl.where(inside, count, 0.0),
        tl.load(similarity + i % batch, mask=inside, other=0.0),
        tl.load(scale_), log_number, log_prior, log_rest, 0.0, SUPPORT, DEBIASED, True, DECOUPLED,
    )  # fmt: skip
    tl.store(number + i, count, mask=inside)
    tl.store(heavy_sum + i, heavy, mask=inside)
    tl.store(light_sum + i, light, mask=inside)
    if not BOUNDED:
        tl.store(top_ + i, tl.where(count > 0, top, float("inf")), mask=inside)  # see `programs.finish`
    tl.store(losses + i, loss, mask=inside)
    tl.store(floored_ + i, floored.to(tl.int8), mask=inside)
    tl.store(d_mean + i, by_mean, mask=inside)
    tl.store(d_positive + i, by_positive, mask=inside)
    tl.store(d_scale + i, by_scale, mask=inside)
    total = tl.sum(tl.where(inside, loss, 0.0), axis=0)
    valid = tl.sum(tl.where(inside & (count > 0), 1.0, 0.0), axis=0)
    tl.store(totals + 2 * tl.program_id(0), total)
    tl.store(totals + 2 * tl.program_id(0) + 1, valid)
    tl.store(result, total / tl.maximum(valid, 1.0) if MEAN else total)


@triton.jit
def distribute(
    grad_, totals, d_mean, d_positive, scale_, tilt_, number, heavy_sum, light_sum,
    steep_, flat_, for_similarity, largest_, batch, views, step,
    BLOCK: tl.constexpr, THROUGH: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """What each anchor's exponentials are multiplied with, and the gradient of the pairs' inner products.

    views: of an instance that are anchors · step: 0 if ``grad_`` is one number for all anchors, else 1
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < batch
    tilt = tl.load(tilt_)
    share = 1.0
    if MEAN:
        share = 1 / tl.maximum(tl.load(totals + 1), 1.0)
    pull = tl.zeros((BLOCK,), tl.float32)
    for view in range(views):
        place = view * batch + i
        grad = tl.load(grad_ + place * step, mask=inside, other=0.0) * share
        pull += grad * tl.load(d_positive + place, mask=inside, other=0.0)
        some = tl.load(number + place, mask=inside, other=0.0) > 0
        mean = tl.where(some, grad * tl.load(d_mean + place, mask=inside, other=0.0), 0.0)
        heavy = tl.where(some, tl.load(heavy_sum + place, mask=inside, other=1.0), 1.0)
        light = tl.where(some, tl.load(light_sum + place, mask=inside, other=1.0), 1.0)
        steep, flat = mean, mean * 0
        if THROUGH:
            steep, flat = mean * (tilt + 1), -mean * tilt
        tl.store(steep_ + place, steep / heavy, mask=inside)
        tl.store(flat_ + place, flat / light, mask=inside)
        tl.store(largest_ + place, tl.abs(mean) * (2 * tilt + 1), mask=inside)
    tl.store(for_similarity + i, pull * tl.load(scale_), mask=inside)


class Whole(torch.autograd.Function):
    """Loss (), or (A,) if not reduced, of pairs z1, z2 (B, d) against both views of all other pairs, A = 2B, or of
    anchors z1 against negatives (N, d), A = B. Then what diagnostics want, without gradient: unit vectors of anchors
    and candidates, similarity of the pairs, losses, floored and counts of each anchor.
    """

    @staticmethod
    def forward(
        ctx: Any,
        z1: Tensor,
        z2: Tensor,
        negatives: Tensor | None,
        scale: Tensor,
        question: Negatives,
        form: Form,
        smallest: float,
        precision: torch.dtype | None,
        reduced: bool,
    ) -> tuple[Tensor, ...]:
        z1, z2 = rowwise.by_rows(z1), rowwise.by_rows(z2)
        dtype, batch = precision or torch.float32, len(z1)
        low, similarity = rowwise.normalised(z1, z2, smallest, precision, dtype, "z1 or z2")
        block = low
        if negatives is not None:
            low = low[:batch]
            block, _ = rowwise.normalised(rowwise.by_rows(negatives), None, smallest, precision, dtype, "negatives")
        band = walks.band(question, low, [block], scale)
        heavy, light, count, peak, slots = walks.partial_sums(question, scale, low, [block], band)
        anchors = len(low)
        kept = low.new_empty(8, anchors, dtype=torch.float32)
        number, heavy_sum, light_sum, top, losses, d_mean, d_positive, d_scale = kept.unbind()
        floored = low.new_empty(anchors, dtype=torch.int8)
        blocks = triton.cdiv(anchors, BLOCK)
        totals, result = kept.new_empty(blocks, 2), kept.new_empty(())
        conclude[(blocks,)](
            heavy, light, count, peak, walks.tilt(question.rule, low.device), scale, similarity,
            number, heavy_sum, light_sum, top, losses, floored, d_mean, d_positive, d_scale, totals, result,
            anchors, batch, slots, float(question.known_count()),
            form.log_number or 0.0, *(form.prior or (0.0, 0.0)),
            BLOCK=BLOCK, KIND=question.kind, BOUNDED=question.bounded, COUNTED=question.counted,
            SUPPORT=form.log_number is None, DEBIASED=form.prior is not None, DECOUPLED=form.decoupled, MEAN=form.mean,
        )  # fmt: skip
        if blocks > 1:
            totals = totals.sum(dim=0, keepdim=True)
            result = totals[0, 0] / totals[0, 1].clamp(min=1) if form.mean else totals[0, 0].clone()
        # The negatives as they were given: autograd then refuses a backward pass if they were overwritten meanwhile.
        watched = [] if question.who.allowed is None else [question.who.allowed]
        ctx.save_for_backward(z1, z2, negatives, scale, low, block, totals, kept, *watched)
        ctx.question, ctx.form, ctx.smallest, ctx.precision, ctx.reduced = question, form, smallest, precision, reduced
        ctx.band = band
        ctx.mark_non_differentiable(low, block, similarity, losses, floored, number)
        ctx.set_materialize_grads(False)
        # A view could not be changed in place, as in total += other.
        return (result if reduced else losses.clone()), low, block, similarity, losses, floored, number

    @staticmethod
    @rowwise.differentiable_once
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 9
        z1, z2, negatives, scale, low, block, totals, kept, *_watched = ctx.saved_tensors
        question, form = ctx.question, ctx.form
        number, heavy_sum, light_sum, top, _losses, d_mean, d_positive, d_scale = kept.unbind()
        anchors, batch = len(low), len(z1)
        steep, flat, bound = kept.new_empty(3, anchors).unbind()
        for_similarity = kept.new_empty(batch)
        mean = form.mean and ctx.reduced
        grad = grad.contiguous()
        d_negatives: Tensor | None = None
        with torch.autocast(low.device.type, enabled=False):
            distribute[(triton.cdiv(batch, 256),)](
                grad, totals, d_mean, d_positive, scale, walks.tilt(question.rule, low.device),
                number, heavy_sum, light_sum, steep, flat, for_similarity, bound,
                batch, anchors // batch, 0 if ctx.reduced else 1,
                BLOCK=256, THROUGH=question.rule.grad_through_weights, MEAN=mean,
            )  # fmt: skip
            largest = bound.amax() if low.dtype == torch.float16 else None
            pulls = walks.Pulls(steep, flat, None if question.bounded else top, largest)
            walk = walks.Walk(question, scale, low, block, 0, ctx.band, mine=negatives is None)
            for_low, for_scale = walk.anchors_gradient(pulls, ctx.needs_input_grad[3])
            d1, d2 = rowwise.normalised_backward(z1, z2, for_low, for_similarity, ctx.smallest, ctx.precision)
            if negatives is not None and ctx.needs_input_grad[2]:
                for_block = walk.gradient(pulls, outer=False, inner=True)
                rows = rowwise.by_rows(negatives)
                made = rowwise.normalised_backward(rows, None, for_block, None, ctx.smallest, ctx.precision)
                d_negatives = made[0]
            if for_scale is not None:
                share = grad * (1 / totals[0, 1].clamp(min=1) if mean else 1.0)
                for_scale = for_scale + (share * d_scale).sum()
        return d1, d2, d_negatives, for_scale, None, None, None, None, None

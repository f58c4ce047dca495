"""The whole loss of pairs, from embeddings to a number, in a few launches: what small batches wait for is the host.

It covers the most common cases, NT-Xent, DCL and HCL over both views of one process's batch (six launches), between two
towers in one direction or in both, or over a queue or bank, with bands, schedules and a learnable temperature;
everything else goes through `hardneg.losses.candidates` and the kernels' own functions.
"""

# Arguments of programs have no types that mypy knows.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hardneg.losses.kernels import interface
from hardneg.losses.kernels.triton import blocks as walks
from hardneg.losses.kernels.triton import forward, rowwise
from hardneg.losses.kernels.triton.launch import launch
from hardneg.losses.kernels.triton.row_sums import Negatives
from hardneg.losses.kernels.triton.rowwise import outcome
from hardneg.losses.kernels.triton.score_tile import LN2, log

BLOCK = 1024  # anchors of a program


@dataclass(frozen=True)
class Form:
    """What becomes of embeddings and of log-sums; see `rowwise.Units` and `rowwise.outcome`."""

    smallest: float
    precision: torch.dtype | None
    log_number: float | None
    prior: tuple[float, float] | None
    decoupled: bool
    reduced: bool  # to one number?
    mean: bool  # of the anchors, or their sum?


@triton.jit
def conclude(
    heavy_, light_, count_, peak_, tilt_, scale_, similarity, kept, result, numbers,
    anchors, batch, slots, known, log_number, log_prior, log_rest,
    BLOCK: tl.constexpr, KIND: tl.constexpr, BOUNDED: tl.constexpr, COUNTED: tl.constexpr, SUPPORT: tl.constexpr,
    DEBIASED: tl.constexpr, DECOUPLED: tl.constexpr, THROUGH: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Losses of a block of anchors from what was summed slot by slot, their derivatives, and their sum.

    kept: (9, anchors), see `Whole` · result: (blocks,) sums of losses, or their mean if there is one block (MEAN) ·
    numbers: (blocks,) of valid anchors
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, tilt, scale = i < anchors, tl.load(tilt_), tl.load(scale_)
    heavy, light, count, top = forward.collect(
        heavy_, light_, count_, peak_, i, inside, anchors, slots, known, tilt, BLOCK, KIND, BOUNDED, COUNTED
    )
    loss, floored, by_mean, by_positive, by_scale = outcome(
        log(tl.div_rn(heavy, light)) + top * LN2, tl.where(inside, count, 0.0),
        tl.load(similarity + i % batch, mask=inside, other=0.0),
        scale, log_number, log_prior, log_rest, 0.0, SUPPORT, DEBIASED, True, DECOUPLED,
    )  # fmt: skip
    some = count > 0
    by_mean = tl.where(some, by_mean, 0.0)
    steep, flat = by_mean, by_mean * 0
    if THROUGH:
        steep, flat = by_mean * (tilt + 1), -by_mean * tilt
    place = kept + i
    tl.store(place, loss, mask=inside)
    tl.store(place + anchors, count, mask=inside)
    tl.store(place + 2 * anchors, floored.to(tl.float32), mask=inside)
    tl.store(place + 3 * anchors, tl.where(some, top, float("inf")), mask=inside)  # see `programs.finish`
    factors = kept + 4 * anchors + 2 * i
    tl.store(factors, tl.div_rn(steep, tl.where(some, heavy, 1.0)), mask=inside)
    tl.store(factors + 1, tl.div_rn(flat, tl.where(some, light, 1.0)), mask=inside)
    tl.store(place + 6 * anchors, by_positive * scale, mask=inside)
    tl.store(place + 7 * anchors, by_scale, mask=inside)
    tl.store(place + 8 * anchors, tl.abs(by_mean) * (2 * tilt + 1), mask=inside)
    total = tl.sum(tl.where(inside, loss, 0.0), axis=0)
    valid = tl.sum(tl.where(inside & some, 1.0, 0.0), axis=0)
    tl.store(result + tl.program_id(0), tl.div_rn(total, tl.maximum(valid, 1.0)) if MEAN else total)
    tl.store(numbers + tl.program_id(0), valid)


class Whole(torch.autograd.Function):
    """Loss (), or (A,) if not reduced, of pairs z1, z2 (B, d) against both views of all other pairs, or against the
    other view of them, A = 2B; of anchors z1 against all z2 but their own, or against negatives (N, d), A = B.

    plain: the same loss of z1, z2, negatives and scale by plain operations, for second derivatives

    seen: gets what diagnostics want: unit vectors of anchors and candidates, similarity of the pairs, and what was kept
    of each anchor, (9, A): its loss, count, whether it is floored, its largest score, and what a gradient of 1 makes of
    it: the factors of its exponentials, in two rows that hold them anchor by anchor, (A, 2), the gradients of its inner
    product with the positive and of the scale, and a bound of all ∂L/∂s
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
        plain: Callable[..., Tensor],
        seen: list[Tensor],
    ) -> Tensor:
        given = (z1, z2, negatives)
        z1, z2 = rowwise.by_rows(z1), rowwise.by_rows(z2)
        smallest, precision = form.smallest, form.precision
        dtype, batch = precision or torch.float32, z1.shape[0]
        low, similarity = rowwise.normalised(z1, z2, smallest, precision, dtype, "z1 or z2")
        block = low
        if negatives is None and question.eligibility.columns == batch:
            low, block = low[:batch], low[batch:]
        elif negatives is not None:
            low = low[:batch]
            block, _ = rowwise.normalised(rowwise.by_rows(negatives), None, smallest, precision, dtype, "negatives")
        band, (heavy, light, count, peak) = walks.bands_and_sums(question, scale, low, [block])
        anchors = low.shape[0]
        blocks = math.ceil(anchors / BLOCK)
        shape = () if blocks == 1 else (blocks,)
        kept, result, numbers = heavy.new_empty(9, anchors), heavy.new_empty(shape), heavy.new_empty(shape)
        log_prior, log_rest = form.prior or (0.0, 0.0)
        arguments = {
            "heavy_": heavy, "light_": light, "count_": count, "peak_": peak,
            "tilt_": walks.tilt(question.rule, low.device), "scale_": scale, "similarity": similarity,
            "kept": kept, "result": result, "numbers": numbers,
            "anchors": anchors, "batch": batch, "slots": len(heavy), "known": float(question.known_count()),
            "log_number": form.log_number or 0.0, "log_prior": log_prior, "log_rest": log_rest,
            "BLOCK": BLOCK, "KIND": question.kind, "BOUNDED": question.bounded, "COUNTED": question.counted,
            "SUPPORT": form.log_number is None, "DEBIASED": form.prior is not None, "DECOUPLED": form.decoupled,
            "THROUGH": question.rule.grad_through_weights, "MEAN": form.mean and blocks == 1,
        }  # fmt: skip
        launch(conclude, (blocks,), arguments)
        if blocks > 1:
            numbers = numbers.sum()
            result = result.sum() / numbers.clamp(min=1) if form.mean else result.sum()
        # As they were given: autograd then refuses a backward pass if one was overwritten meanwhile.
        watched = interface.saveable(question.eligibility.excluded, question.eligibility.allowed)
        ctx.save_for_backward(*given, scale, low, block, numbers, kept, *watched)
        ctx.question, ctx.form, ctx.band, ctx.plain = question, form, band, plain
        seen += (low, block, similarity, kept)
        # A view could not be changed in place, as in total += other.
        return result if form.reduced else kept[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z1, z2, negatives, scale, low, block, numbers, kept, *_watched = ctx.saved_tensors
        if torch.is_grad_enabled():  # a graph of the gradient is asked for
            inputs = (z1, z2, negatives, scale)
            return *interface.gradients(ctx.plain, inputs, ctx.needs_input_grad[:4], grad), None, None, None, None
        z1, z2 = rowwise.by_rows(z1), rowwise.by_rows(z2)
        question, form = ctx.question, ctx.form
        top, factors, made = kept[3], kept[4:6].view(-1, 2), kept[6:].unbind()
        # Everything is linear in the gradient: if it is one number, multiplying comes last and costs no launch.
        amount = rowwise.Amount(grad, numbers if form.mean else None) if form.reduced else None
        for_similarity, by_scale, bound = made if form.reduced else (part * grad for part in made)
        factors = factors if form.reduced else factors * grad[:, None]
        largest = bound.abs().amax() if low.dtype == torch.float16 else None
        pulls = walks.Pulls(factors, None if question.bounded else top, largest)
        towers = negatives is None and len(block) == len(z1)
        walk = walks.Walk(question, scale, low, block, 0, ctx.band, mine=negatives is None and not towers)
        gradients = walk.gradients if towers and ctx.needs_input_grad[1] else walk.anchors_gradient
        for_low, for_scale = gradients(pulls, ctx.needs_input_grad[3])
        back = partial(rowwise.normalised_backward, smallest=form.smallest, precision=form.precision, amount=amount)
        d1, d2 = back(z1, z2, for_low, for_similarity)
        d_negatives: Tensor | None = None
        if negatives is not None and ctx.needs_input_grad[2]:
            for_block = walk.gradient(pulls, outer=False, inner=True)
            d_negatives, _ = back(rowwise.by_rows(negatives), None, for_block, None)
        if for_scale is not None:
            for_scale = for_scale + by_scale.sum()
            if amount is not None:
                for_scale = for_scale * (grad / numbers.clamp(min=1) if form.mean else grad)
        return d1, d2, d_negatives, for_scale, None, None, None, None

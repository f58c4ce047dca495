"""The whole loss of a paired batch in a few launches, because small batches are bound by the host.

It covers the most common cases: NT-Xent, DCL and HCL over both views of the batch of one process (six launches),
between two towers in one direction or in both, or over a queue or bank, with bands, schedules and a learnable
temperature. Everything else goes through `hardneg.losses.candidates` and the separate functions of the kernel.
"""

# Arguments of Triton kernels have no types that mypy knows.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hardneg.losses.kernels import interface
from hardneg.losses.kernels.interface import LossForm
from hardneg.losses.kernels.triton import blocks, forward, rowwise
from hardneg.losses.kernels.triton.launch import launch
from hardneg.losses.kernels.triton.row_sums import NegativeSums
from hardneg.losses.kernels.triton.rowwise import pair_losses
from hardneg.losses.kernels.triton.score_tile import LN2, log

BLOCK = 1024  # anchors per program


@triton.jit
def finish_loss(
    tilted_sum_, weight_sum_, count_, slot_max_, tilt_, scale_, similarity, kept, result, numbers,
    anchors, batch, slots, known, log_number, log_prior, log_rest,
    BLOCK: tl.constexpr, KIND: tl.constexpr, BOUNDED: tl.constexpr, COUNTED: tl.constexpr, SUPPORT: tl.constexpr,
    DEBIASED: tl.constexpr, DECOUPLED: tl.constexpr, THROUGH: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Losses of a block of anchors from the sums of all slots, their derivatives, and their sum.

    kept: (9, anchors), see `PairedLoss` · result: (blocks,) sums of losses, or their mean if there is one block (MEAN)
    · numbers: (blocks,) of valid anchors
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, tilt, scale = i < anchors, tl.load(tilt_), tl.load(scale_)
    tilted_sum, weight_sum, count, row_max = forward.collect(
        tilted_sum_, weight_sum_, count_, slot_max_, i, inside, anchors, slots, known, tilt,
        BLOCK, KIND, BOUNDED, COUNTED,
    )  # fmt: skip
    loss, floored, by_mean, by_positive, by_scale = pair_losses(
        log(tl.div_rn(tilted_sum, weight_sum)) + row_max * LN2, tl.where(inside, count, 0.0),
        tl.load(similarity + i % batch, mask=inside, other=0.0),
        scale, log_number, log_prior, log_rest, 0.0, SUPPORT, DEBIASED, True, DECOUPLED,
    )  # fmt: skip
    nonempty = count > 0
    by_mean = tl.where(nonempty, by_mean, 0.0)
    tilted_coef, weight_coef = by_mean, by_mean * 0
    if THROUGH:
        tilted_coef, weight_coef = by_mean * (tilt + 1), -by_mean * tilt
    pointer = kept + i
    tl.store(pointer, loss, mask=inside)
    tl.store(pointer + anchors, count, mask=inside)
    tl.store(pointer + 2 * anchors, floored.to(tl.float32), mask=inside)
    tl.store(pointer + 3 * anchors, tl.where(nonempty, row_max, float("inf")), mask=inside)  # see `forward.finish`
    factors = kept + 4 * anchors + 2 * i
    tl.store(factors, tl.div_rn(tilted_coef, tl.where(nonempty, tilted_sum, 1.0)), mask=inside)
    tl.store(factors + 1, tl.div_rn(weight_coef, tl.where(nonempty, weight_sum, 1.0)), mask=inside)
    tl.store(pointer + 6 * anchors, by_positive * scale, mask=inside)
    tl.store(pointer + 7 * anchors, by_scale, mask=inside)
    tl.store(pointer + 8 * anchors, tl.abs(by_mean) * (2 * tilt + 1), mask=inside)
    total = tl.sum(tl.where(inside, loss, 0.0), axis=0)
    valid = tl.sum(tl.where(inside & nonempty, 1.0, 0.0), axis=0)
    tl.store(result + tl.program_id(0), tl.div_rn(total, tl.maximum(valid, 1.0)) if MEAN else total)
    tl.store(numbers + tl.program_id(0), valid)


class PairedLoss(torch.autograd.Function):
    """Loss of a paired batch as one autograd function: (), or (A,) if not reduced.

    z1, z2: (B, d). Candidates are both views of all other pairs, or only the other view (A = 2B); for anchors z1 alone
    (A = B) all z2 except their own, or negatives (N, d).

    plain: the same loss of z1, z2, negatives and scale by PyTorch operations, for second derivatives

    seen: a list that receives the tensors for diagnostics: unit vectors of anchors and candidates, similarity of the
    pairs, and ``kept``, (9, A): loss, count, whether it is floored, row maximum, and for a gradient of 1: the
    coefficients of the exponentials, two rows that hold (A, 2) values, the gradients of the inner product with the
    positive and of the scale, and a bound of all |∂L/∂s|
    """

    @staticmethod
    def forward(
        ctx: Any,
        z1: Tensor,
        z2: Tensor,
        negatives: Tensor | None,
        scale: Tensor,
        spec: NegativeSums,
        smallest: float,
        form: LossForm,
        plain: Callable[..., Tensor],
        seen: list[Tensor],
    ) -> Tensor:
        given = (z1, z2, negatives)
        z1, z2 = rowwise.row_contiguous(z1), rowwise.row_contiguous(z2)
        precision = spec.rule.half_copies.precision
        dtype, batch = precision or torch.float32, z1.shape[0]
        anchors, similarity = rowwise.normalized(z1, z2, smallest, precision, dtype, "z1 or z2")
        candidates = anchors
        if negatives is None and spec.eligibility.columns == batch:
            anchors, candidates = anchors[:batch], anchors[batch:]
        elif negatives is not None:
            anchors = anchors[:batch]
            candidates, _ = rowwise.normalized(
                rowwise.row_contiguous(negatives), None, smallest, precision, dtype, "negatives"
            )
        band, (tilted_sum, weight_sum, count, slot_max) = blocks.bands_and_sums(spec, scale, anchors, [candidates])
        rows = anchors.shape[0]
        num_blocks = math.ceil(rows / BLOCK)
        shape = () if num_blocks == 1 else (num_blocks,)
        kept, result, numbers = tilted_sum.new_empty(9, rows), tilted_sum.new_empty(shape), tilted_sum.new_empty(shape)
        log_prior, log_rest = form.prior or (0.0, 0.0)
        arguments = {
            "tilted_sum_": tilted_sum, "weight_sum_": weight_sum, "count_": count, "slot_max_": slot_max,
            "tilt_": blocks.tilt(spec.rule, anchors.device), "scale_": scale, "similarity": similarity,
            "kept": kept, "result": result, "numbers": numbers,
            "anchors": rows, "batch": batch, "slots": len(tilted_sum), "known": float(spec.known_count()),
            "log_number": form.log_number or 0.0, "log_prior": log_prior, "log_rest": log_rest,
            "BLOCK": BLOCK, "KIND": spec.kind, "BOUNDED": spec.bounded, "COUNTED": spec.counted,
            "SUPPORT": form.log_number is None, "DEBIASED": form.prior is not None,
            "DECOUPLED": form.decoupled,
            "THROUGH": spec.rule.grad_through_weights, "MEAN": form.reduction == "mean" and num_blocks == 1,
        }  # fmt: skip
        launch(finish_loss, (num_blocks,), arguments)
        if num_blocks > 1:
            numbers = numbers.sum()
            result = result.sum() / numbers.clamp(min=1) if form.reduction == "mean" else result.sum()
        # The original tensors: autograd then raises in the backward pass if one was overwritten.
        watched = interface.saveable(spec.eligibility.excluded, spec.eligibility.allowed)
        ctx.save_for_backward(*given, scale, anchors, candidates, numbers, kept, *watched)
        ctx.spec, ctx.smallest, ctx.form, ctx.band, ctx.plain = spec, smallest, form, band, plain
        seen += (anchors, candidates, similarity, kept)
        # A clone: a view could not be changed in place, as in total += other.
        return result if form.reduction != "none" else kept[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z1, z2, negatives, scale, anchors, candidates, numbers, kept, *_watched = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            inputs = (z1, z2, negatives, scale)
            return *interface.gradients(ctx.plain, inputs, ctx.needs_input_grad[:4], grad), None, None, None, None, None
        z1, z2 = rowwise.row_contiguous(z1), rowwise.row_contiguous(z2)
        spec, form = ctx.spec, ctx.form
        mean, reduced = form.reduction == "mean", form.reduction != "none"
        row_max, values, made = kept[3], kept[4:6].view(-1, 2), kept[6:].unbind()
        # All gradients are linear in that of the loss: a single number is multiplied last, without a separate launch.
        gradient_scale = rowwise.GradientScale(grad, numbers if mean else None) if reduced else None
        for_similarity, by_scale, bound = made if reduced else (part * grad for part in made)
        values = values if reduced else values * grad[:, None]
        largest = bound.abs().amax() if anchors.dtype == torch.float16 else None
        coefficients = blocks.Coefficients(values, None if spec.bounded else row_max, largest)
        towers = negatives is None and len(candidates) == len(z1)
        block_pass = blocks.BlockPass(
            spec, scale, anchors, candidates, 0, ctx.band, self_block=negatives is None and not towers
        )
        gradients = block_pass.gradients if towers and ctx.needs_input_grad[1] else block_pass.anchors_gradient
        for_anchors, for_scale = gradients(coefficients, ctx.needs_input_grad[3])
        back = partial(
            rowwise.normalized_backward,
            smallest=ctx.smallest,
            precision=spec.rule.half_copies.precision,
            gradient_scale=gradient_scale,
        )
        d1, d2 = back(z1, z2, for_anchors, for_similarity)
        d_negatives: Tensor | None = None
        if negatives is not None and ctx.needs_input_grad[2]:
            for_candidates = block_pass.gradient(coefficients, outer=False, inner=True)
            d_negatives, _ = back(rowwise.row_contiguous(negatives), None, for_candidates, None)
        if for_scale is not None:
            for_scale = for_scale + by_scale.sum()
            if gradient_scale is not None:
                for_scale = for_scale * (grad / numbers.clamp(min=1) if mean else grad)
        return d1, d2, d_negatives, for_scale, None, None, None, None, None

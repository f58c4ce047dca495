"""The fused kernel for GPUs, in Triton: the same results as the other kernels, without storing the score matrix.

The forward pass stores a few numbers per anchor, the backward pass recomputes the tiles: memory is O(A + N), not
O(A·N), and the cost beyond the products is little more than one exponential per pair. Matrix products are in the
precision of the embeddings (bfloat16 and float16 on tensor cores; float32 exactly, or as tf32 if
``torch.set_float32_matmul_precision`` allows it); everything else is float32. Results are bitwise reproducible.

The tiled kernel computes what this one does not support: float64, candidates per anchor, draws (``num_negatives``),
candidates excluded by their ids.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hardneg.losses.kernels import tiled
from hardneg.losses.kernels.interface import (
    Eligibility,
    Gathering,
    HalfCopies,
    LogSums,
    LossForm,
    PairRecord,
    PairSupport,
    Rule,
    first_order,
    saveable,
)
from hardneg.losses.kernels.triton import backward, normalize, score_tile
from hardneg.losses.kernels.triton.anchor_losses import finish_totals
from hardneg.losses.kernels.triton.backward import Coefficients
from hardneg.losses.kernels.triton.forward import Totals
from hardneg.losses.kernels.triton.launch import SMALL_PROBLEM, launch
from hardneg.losses.kernels.triton.paired_loss import Given, PairedLoss, Saved, make_call, pair_record
from hardneg.losses.kernels.triton.passes import BlockPass, compute_gradients, compute_sums, make_passes
from hardneg.losses.kernels.triton.problem import Problem, number_groups

BLOCK = 128  # anchors per program of the kernels that finish the sums

pair_support = PairSupport(gather=True)


def available(device: torch.device) -> bool:
    """Whether kernels can run on this device; on a CPU only in Triton's interpreter, for tests."""
    return device.type == "cuda" or (device.type == "cpu" and score_tile.INTERPRETED)


def suits(anchors: Tensor, candidates: Sequence[Tensor], eligibility: Eligibility, rule: Rule) -> bool:
    """Whether the kernel supports these tensors, this eligibility and this rule."""
    shared = all(block.dim() == 2 for block in candidates) and eligibility.identities is None
    return shared and anchors.dtype == torch.float32 and rule.draws is None and rule.log_weight is None


def log_sums(
    anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor, eligibility: Eligibility, rule: Rule
) -> LogSums:
    """The same as `reference.log_sums`, for every rule without general weights."""
    if not suits(anchors, candidates, eligibility, rule):
        return tiled.log_sums(anchors, candidates, scale, eligibility, rule)
    return LogSums(*_sums(anchors, candidates, scale, eligibility, rule))


def positive_sums(
    anchors: Tensor, pool: Tensor, scale: Tensor, eligibility: Eligibility, offset: Tensor, half_copies: HalfCopies
) -> tuple[Tensor, Tensor]:
    """The same as `reference.positive_sums`."""
    rule = Rule(half_copies=half_copies)
    if not suits(anchors, [pool], eligibility, rule):
        return tiled.positive_sums(anchors, pool, scale, eligibility, offset, half_copies)
    terms, total, slope = _sums(anchors, [pool], scale, eligibility, rule, level=offset.detach().contiguous())
    # ∂terms/∂offset is the sum of the slopes, so the gradient of the offset needs no separate pass.
    return terms + slope * (offset - offset.detach()), total


def _sums(
    anchors: Tensor,
    candidates: Sequence[Tensor],
    scale: Tensor,
    eligibility: Eligibility,
    rule: Rule,
    level: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of a `Problem`, (A,) each."""
    counts = None
    if anchors.shape[0] * eligibility.columns > SMALL_PROBLEM:
        eligibility, counts = number_groups(eligibility, rule)
    problem = Problem(eligibility, rule, level, counts)
    blocks = [None if block is anchors else block for block in candidates]
    results: tuple[Tensor, Tensor, Tensor] = _Fused.apply(problem, scale, anchors, *blocks)  # type: ignore[no-untyped-call]
    return results


class _Fused(torch.autograd.Function):
    """The sums as an autograd function; tiles are recomputed in the backward pass. A block of None is the anchors."""

    @staticmethod
    def forward(
        ctx: Any, problem: Problem, scale: Tensor, anchors: Tensor, *blocks: Tensor | None
    ) -> tuple[Tensor, ...]:
        half_copies, scale = problem.rule.half_copies, scale.float()
        copies = [None if block is None else half_copies(block) for block in blocks]
        passes = make_passes(problem, scale, half_copies(anchors), copies)
        slots, ctx.edges = compute_sums(passes)
        if problem.level is None:
            totals: tuple[Tensor, ...] = finish_totals(problem, slots, passes[0].numbers)
            results = totals[:3]
        else:
            totals, results = (), tuple(part[0] if len(part) == 1 else part.sum(dim=0) for part in slots[:3])
        ctx.problem = problem
        ctx.save_for_backward(scale, *saveable(passes[0].anchors, *copies), *totals)
        ctx.mark_non_differentiable(results[2])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        for_scale, for_anchors, *for_blocks = ctx.needs_input_grad[1:]
        scale, anchors, *saved = ctx.saved_tensors
        blocks, totals = saved[: len(for_blocks)], saved[len(for_blocks) :]
        with torch.autocast(anchors.device.type, enabled=False):
            passes = make_passes(ctx.problem, scale, anchors, blocks)
            coefficients = _coefficients(passes[0], grads, totals)
            d_anchors, d_blocks, d_scale = compute_gradients(
                passes, ctx.edges, coefficients, for_scale, for_anchors, for_blocks
            )
        return None, d_scale, d_anchors if for_anchors else None, *d_blocks


def _coefficients(block_pass: BlockPass, grads: Sequence[Tensor | None], saved: Sequence[Tensor]) -> Coefficients:
    """Coefficients of ∂L/∂s, given the gradients of the results. saved: `Totals`, unless there is a level"""
    problem, rows = block_pass.problem, block_pass.anchors.shape[0]
    first = block_pass.scale.new_zeros(rows) if grads[0] is None else grads[0].contiguous()
    second = None if grads[1] is None else grads[1].contiguous()
    factor = None
    if block_pass.anchors.dtype == torch.float16:  # the softmax is at most 1; a sum of two is below its limit, 2¹⁶
        beta = problem.rule.tilt
        largest = first.abs().amax() * (2 * beta + 1) + (0.0 if second is None else second.abs().amax() * (beta + 1))
        factor = 2.0**13 / largest.clamp(min=1e-30)
    if problem.level is not None:
        values = torch.stack((first, torch.zeros_like(first) if second is None else second), dim=1)
        return Coefficients(values.view(torch.int64), problem.level, factor)
    totals, values = Totals(*saved), first.new_empty(rows, 2)
    arguments = {
        "for_mean": first, "for_weight": second, "totals": totals, "numbers": block_pass.numbers,
        "coefficients": values, "anchors": rows, "BLOCK": BLOCK, "THROUGH": problem.rule.grad_through_weights,
        "WEIGHED": second is not None,
    }  # fmt: skip
    launch(backward.score_coefficients, (math.ceil(rows / BLOCK),), arguments)
    return Coefficients(values.view(torch.int64), None if problem.bounded else totals.row_max, factor)


def units(
    z1: Tensor, z2: Tensor | None, smallest: float, precision: torch.dtype | None, names: str
) -> tuple[Tensor, Tensor]:
    """Unit vectors of the rows of z1 and z2, and inner products of their pairs; see `normalize.UnitVectors`."""
    found: tuple[Tensor, Tensor] = normalize.UnitVectors.apply(z1, z2, smallest, precision, names)  # type: ignore[no-untyped-call]
    return found


def pair_loss(
    z1: Tensor,
    z2: Tensor | None,
    negatives: Tensor | None,
    eligibility: Eligibility,
    scale: Tensor,
    rule: Rule,
    form: LossForm,
    plain: Callable[..., Tensor],
    labels: Tensor | None = None,
    gathering: Gathering | None = None,
    watched: tuple[Tensor | None, ...] = (),
) -> tuple[Tensor, Callable[[], PairRecord]]:
    """The loss of pairs (B, d) against all others, or of anchors z1 against negatives (N, d), and its record.

    eligibility: which candidates are eligible; 2B candidates are both views, B candidates are z2 with z1 as anchors ·
    form: of the losses · plain: the same loss of z1, z2, negatives and scale by PyTorch operations · labels: (B,) ·
    gathering: candidates are both views of all processes · watched: see `PairedLoss`
    """
    call, given = make_call(eligibility, rule, form, z1, z2, negatives, scale, labels, gathering)
    seen: list[Saved] = []
    loss = PairedLoss.apply(*given, call, plain, watched, seen, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    kept = Given._make(None if x is None else x.detach() for x in given)  # without the graph
    return loss, lambda: pair_record(call, kept, seen[0])

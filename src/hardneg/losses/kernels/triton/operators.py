"""The fused kernel for GPUs, in Triton: the same results as the other kernels, without storing the score matrix.

The forward pass stores a few numbers per anchor, the backward pass recomputes the tiles: memory is O(A + N), not
O(A·N), and the cost beyond the products is little more than one exponential per pair. Matrix products are in the
precision of the embeddings (bfloat16 and float16 on tensor cores; float32 exactly, or as tf32 if
``torch.set_float32_matmul_precision`` allows it); everything else is float32. Atomics add integers only, so results are
bitwise reproducible.

The tiled kernel computes what this one does not support: float64, candidates per anchor, draws (``num_negatives``),
candidates excluded by their ids.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hardneg.losses.kernels import tiled
from hardneg.losses.kernels.interface import (
    Eligibility,
    HalfCopies,
    LogSums,
    LossForm,
    PairRecord,
    RowLayout,
    Rule,
    first_order,
)
from hardneg.losses.kernels.triton import backward, forward, rowwise, score_tile, tile_sizes
from hardneg.losses.kernels.triton.blocks import BlockPass, Coefficients, Sums, bands_and_sums, tilt
from hardneg.losses.kernels.triton.row_sums import NegativeSums, PositiveSums, number_groups

KEPT = 4  # tensors that `_forward` saves for the backward pass


def available(device: torch.device) -> bool:
    """Whether kernels can run on this device; on a CPU only in Triton's interpreter, for tests."""
    return device.type == "cuda" or (device.type == "cpu" and score_tile.INTERPRETED)


def suits(anchors: Tensor, candidates: Sequence[Tensor], eligibility: Eligibility, rule: Rule) -> bool:
    """Whether the kernel supports these tensors, this eligibility and this rule."""
    shared = all(block.dim() == 2 for block in candidates) and eligibility.identities is None
    return shared and anchors.dtype == torch.float32 and rule.draws is None and rule.log_weight is None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def uncompiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function outside of compiled graphs, which cannot contain these kernels."""
    return function(*args, **kwargs)


def log_sums(
    anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor, eligibility: Eligibility, rule: Rule
) -> LogSums:
    """The same as `reference.log_sums`, for every rule without general weights."""
    if not suits(anchors, candidates, eligibility, rule):
        return tiled.log_sums(anchors, candidates, scale, eligibility, rule)
    if rule.rings and len(candidates) > 1:
        candidates = [torch.cat(list(candidates))]  # ranks are over all of them
        # In one block with the batch, given candidates must not be treated as instances of the batch.
        eligibility = replace(eligibility, own=None, excluded=eligibility.excluded_columns(slice(0, len(anchors))))
    eligibility, counts = (
        number_groups(eligibility, rule)
        if len(anchors) * eligibility.columns > tile_sizes.SMALL_PROBLEM
        else (eligibility, None)
    )
    return LogSums(*_run(NegativeSums(eligibility, rule, counts), anchors, candidates, scale))


def positive_sums(
    anchors: Tensor, pool: Tensor, scale: Tensor, eligibility: Eligibility, offset: Tensor, half_copies: HalfCopies
) -> tuple[Tensor, Tensor]:
    """The same as `reference.positive_sums`."""
    if not suits(anchors, [pool], eligibility, Rule()):
        return tiled.positive_sums(anchors, pool, scale, eligibility, offset, half_copies)
    eligibility = (
        number_groups(eligibility, Rule())[0]
        if len(anchors) * eligibility.columns > tile_sizes.SMALL_PROBLEM
        else eligibility
    )
    spec = PositiveSums(eligibility, offset.detach().contiguous(), Rule(half_copies=half_copies))
    terms, total, slope = _run(spec, anchors, [pool], scale)
    # ∂terms/∂offset is the sum of the slopes, so the gradient of the offset needs no separate pass.
    return terms + slope * (offset - offset.detach()), total


def _run(
    spec: NegativeSums | PositiveSums, anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    blocks = [None if block is anchors else block for block in candidates]
    results: tuple[Tensor, Tensor, Tensor] = _Fused.apply(spec, scale, anchors, *blocks)  # type: ignore[no-untyped-call]
    return results


class _Fused(torch.autograd.Function):
    """The sums as an autograd function; tiles are recomputed in the backward pass. A block of None is the anchors."""

    @staticmethod
    def forward(
        ctx: Any, spec: NegativeSums | PositiveSums, scale: Tensor, anchors: Tensor, *blocks: Tensor | None
    ) -> tuple[Tensor, ...]:
        is_self = [block is None for block in blocks]
        half_copies = spec.rule.half_copies
        anchor_copy = half_copies(anchors)
        others = [anchor_copy if block is None else half_copies(block) for block in blocks]
        scale = scale.float()
        edges, sums = bands_and_sums(spec, scale, anchor_copy, others)
        results, kept = _forward(spec, len(anchor_copy), sums)
        ctx.spec, ctx.is_self, ctx.band = spec, is_self, edges
        given = [block for block, own in zip(others, is_self, strict=True) if not own]
        ctx.save_for_backward(scale, anchor_copy, *kept, *given)
        ctx.mark_non_differentiable(results[2])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        spec, is_self = ctx.spec, ctx.is_self
        scale, anchor_copy, *saved = ctx.saved_tensors
        given = iter(saved[KEPT:])
        blocks = [anchor_copy if own else next(given) for own in is_self]
        for_scale, for_anchors, *for_blocks = ctx.needs_input_grad[1:]
        with torch.autocast(anchor_copy.device.type, enabled=False):
            coefficients = _coefficients(spec, grads, saved[:KEPT], anchor_copy.dtype == torch.float16)
            d_anchors: Tensor | None = None
            d_scale: Tensor | None = None
            d_blocks: list[Tensor | None] = []
            column = 0
            for block, own, needed in zip(blocks, is_self, for_blocks, strict=True):
                block_pass = BlockPass(spec, scale, anchor_copy, block, column, ctx.band, own)
                column += len(block)
                d_block: Tensor | None = None
                if for_anchors or for_scale:
                    if needed and not own:
                        part, share = block_pass.gradients(coefficients, for_scale)
                        part, d_block = part[: len(anchor_copy)], part[len(anchor_copy) :]
                    else:
                        part, share = block_pass.anchors_gradient(coefficients, for_scale)
                    d_anchors = part if d_anchors is None else d_anchors.add_(part)
                    d_scale = share if d_scale is None or share is None else d_scale + share
                elif needed and not own:
                    d_block = block_pass.gradient(coefficients, outer=False, inner=True)
                d_blocks.append(d_block)
        return None, d_scale, d_anchors if for_anchors else None, *d_blocks


def _forward(spec: NegativeSums | PositiveSums, rows: int, sums: Sums) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The three results of each anchor, and the tensors that the backward pass needs."""
    tilted_sum, weight_sum, count, slot_max = sums
    slots = len(tilted_sum)
    if isinstance(spec, PositiveSums):
        assert count is not None
        found = tuple(part[0] if slots == 1 else part.sum(dim=0) for part in (tilted_sum, weight_sum, count))
        return found, (found[0],) * KEPT
    block_size = 128
    mean, weight, number, tilted_total, weight_total, row_max = tilted_sum.new_empty(6, rows).unbind()
    forward.finish[(math.ceil(rows / block_size),)](
        tilted_sum, weight_sum, count, slot_max, tilt(spec.rule, tilted_sum.device), mean, weight, number,
        tilted_total, weight_total, row_max,
        rows, slots, float(spec.known_count()),
        BLOCK=block_size, KIND=spec.kind, BOUNDED=spec.bounded,
        COUNTED=spec.counted or spec.counts is not None,
    )  # fmt: skip
    return (mean, weight, number), (tilted_total, weight_total, row_max, number)


def _coefficients(
    spec: NegativeSums | PositiveSums, grads: Sequence[Tensor | None], kept: Sequence[Tensor], narrow: bool
) -> Coefficients:
    """Coefficients of ∂L/∂s, given the gradients of the results. narrow: compute their bound, for float16."""
    tilted_total, weight_total, row_max, number = kept
    first = torch.zeros_like(number) if grads[0] is None else grads[0].contiguous()
    second = None if grads[1] is None else grads[1].contiguous()
    largest = None
    if narrow:  # the softmax is at most 1
        beta = spec.rule.tilt
        largest = first.abs().amax() * (2 * beta + 1) + (0.0 if second is None else second.abs().amax() * (beta + 1))
    if isinstance(spec, PositiveSums):
        second = torch.zeros_like(first) if second is None else second
        return Coefficients(torch.stack((first, second), dim=1), spec.level, largest)
    rows, block_size = len(first), 128
    values = first.new_empty(rows, 2)
    backward.score_coefficients[(math.ceil(rows / block_size),)](
        first, second, tilted_total, weight_total, number, tilt(spec.rule, first.device), values, rows,
        BLOCK=block_size, THROUGH=spec.rule.grad_through_weights, WEIGHED=second is not None,
    )  # fmt: skip
    return Coefficients(values, None if spec.bounded else row_max, largest)


def losses(
    negatives: LogSums,
    similarity: Tensor,
    scale: Tensor,
    log_number: float | None,
    prior: tuple[float, float] | None,
    log_least: float | None,
    decoupled: bool,
) -> tuple[Tensor, Tensor]:
    """Losses of anchors with one positive each, and which are floored, (A,) each; see `rowwise.Losses`."""
    found, floored = rowwise.Losses.apply(  # type: ignore[no-untyped-call]
        negatives.mean, similarity, scale, negatives.count, log_number, prior, log_least, decoupled
    )
    return found, floored.bool()


def units(
    z1: Tensor, z2: Tensor | None, smallest: float, precision: torch.dtype | None, names: str
) -> tuple[Tensor, Tensor]:
    """Unit vectors of the rows of z1 and z2, and inner products of their pairs; see `rowwise.UnitVectors`."""
    found: tuple[Tensor, Tensor] = rowwise.UnitVectors.apply(z1, z2, smallest, precision, names)  # type: ignore[no-untyped-call]
    return found


def pair_loss(
    z1: Tensor,
    z2: Tensor,
    negatives: Tensor | None,
    eligibility: Eligibility,
    scale: Tensor,
    rule: Rule,
    form: LossForm,
    plain: Callable[..., Tensor],
) -> tuple[Tensor, Callable[[], PairRecord]]:
    """The loss of pairs (B, d) against all others, or of anchors z1 against negatives (N, d).

    eligibility: which candidates are eligible; 2B candidates are both views, B candidates are z2 with z1 as anchors ·
    form: of the losses · plain: the same loss of z1, z2, negatives and scale by PyTorch
    operations
    """
    from hardneg.losses.kernels.triton import paired_loss

    tensors = (z1, z2) if negatives is None else (z1, z2, negatives)
    smallest = max(1e-30, *(torch.finfo(tensor.dtype).tiny for tensor in tensors))
    seen: list[Tensor] = []
    sums = NegativeSums(eligibility, rule)
    loss = paired_loss.PairedLoss.apply(z1, z2, negatives, scale, sums, smallest, form, plain, seen)  # type: ignore[no-untyped-call]
    layout = eligibility.own or RowLayout(len(z1), 1, 0, len(z1), z1.device)

    def record() -> PairRecord:
        anchors, candidates, similarity, kept = seen
        losses, count, floored = kept[:3]
        return PairRecord(eligibility, rule, layout, anchors, candidates, similarity, losses, floored, count)

    return loss, record

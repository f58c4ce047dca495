"""The same answers at the speed of the matrix products: tiles of scores that never leave the chip, in Triton.

Forward keeps a few numbers per anchor, backward makes the tiles again: memory grows with A + N, not with A·N, and what
is beside the products costs little more than one exponential per pair. Matrix products are in the precision of the
embeddings given (bfloat16 and float16 on tensor cores; float32 exactly, or as tf32 where
``torch.set_float32_matmul_precision`` allows it); everything else is float32. Atomics add integers only, so the same
input gives the same bits.

What it cannot run it hands to the tiled kernel: float64, candidates per anchor, draws (``num_negatives``).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hardneg.losses.kernels import tiled
from hardneg.losses.kernels.interface import Eligibility, HalfCopies, LogSums, PairRecord, RowLayout, Rule, first_order
from hardneg.losses.kernels.triton import backward, forward, rowwise, score_tile, tile_sizes
from hardneg.losses.kernels.triton.blocks import Pulls, Sums, Walk, bands_and_sums, tilt
from hardneg.losses.kernels.triton.row_sums import Negatives, Positives, numbered

KEPT = 4  # tensors that `_forward` keeps for the backward pass


def available(device: torch.device) -> bool:
    """Can programs run on this device? On a CPU only in Triton's interpreter, for tests."""
    return device.type == "cuda" or (device.type == "cpu" and score_tile.INTERPRETED)


def suits(anchors: Tensor, candidates: Sequence[Tensor], rule: Rule) -> bool:
    """Can it run this?"""
    shared = all(block.dim() == 2 for block in candidates)
    return shared and anchors.dtype == torch.float32 and rule.draws is None and rule.log_weight is None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def uncompiled(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Calls a function outside of compiled graphs, which cannot hold these programs."""
    return function(*given, **named)


def log_sums(
    anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor, eligibility: Eligibility, rule: Rule
) -> LogSums:
    """As `reference.log_sums`, for every rule but general weights."""
    if not suits(anchors, candidates, rule):
        return tiled.log_sums(anchors, candidates, scale, eligibility, rule)
    if rule.rings and len(candidates) > 1:
        candidates = [torch.cat(list(candidates))]  # ranks are among all of them
        # In one block with the pool, what was given must not be taken for instances of the batch.
        eligibility = replace(eligibility, own=None, excluded=eligibility.excluded_columns(slice(0, len(anchors))))
    eligibility, counts = (
        numbered(eligibility, rule) if len(anchors) * eligibility.columns > tile_sizes.SMALL else (eligibility, None)
    )
    return LogSums(*_run(Negatives(eligibility, rule, counts), anchors, candidates, scale))


def positive_sums(
    anchors: Tensor, pool: Tensor, scale: Tensor, eligibility: Eligibility, offset: Tensor, half_copies: HalfCopies
) -> tuple[Tensor, Tensor]:
    """As `reference.positive_sums`."""
    if not suits(anchors, [pool], Rule()):
        return tiled.positive_sums(anchors, pool, scale, eligibility, offset, half_copies)
    eligibility = (
        numbered(eligibility, Rule())[0] if len(anchors) * eligibility.columns > tile_sizes.SMALL else eligibility
    )
    question = Positives(eligibility, offset.detach().contiguous(), Rule(half_copies=half_copies))
    terms, total, slope = _run(question, anchors, [pool], scale)
    # ∂terms/∂offset is the sum of the slopes, so the offset's gradient needs no pass of its own.
    return terms + slope * (offset - offset.detach()), total


def _run(
    question: Negatives | Positives, anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    blocks = [None if block is anchors else block for block in candidates]
    results: tuple[Tensor, Tensor, Tensor] = _Fused.apply(question, scale, anchors, *blocks)  # type: ignore[no-untyped-call]
    return results


class _Fused(torch.autograd.Function):
    """Sums over tiles, made again in backward. A block of None is the anchors."""

    @staticmethod
    def forward(
        ctx: Any, question: Negatives | Positives, scale: Tensor, anchors: Tensor, *blocks: Tensor | None
    ) -> tuple[Tensor, ...]:
        mine = [block is None for block in blocks]
        half_copies = question.rule.half_copies
        low = half_copies(anchors)
        others = [low if block is None else half_copies(block) for block in blocks]
        scale = scale.float()
        edges, sums = bands_and_sums(question, scale, low, others)
        results, kept = _forward(question, len(low), sums)
        ctx.question, ctx.mine, ctx.band = question, mine, edges
        given = [block for block, own in zip(others, mine, strict=True) if not own]
        ctx.save_for_backward(scale, low, *kept, *given)
        ctx.mark_non_differentiable(results[2])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        question, mine = ctx.question, ctx.mine
        scale, low, *saved = ctx.saved_tensors
        given = iter(saved[KEPT:])
        blocks = [low if own else next(given) for own in mine]
        for_scale, for_anchors, *for_blocks = ctx.needs_input_grad[1:]
        with torch.autocast(low.device.type, enabled=False):
            pulls = _pulls(question, grads, saved[:KEPT], low.dtype == torch.float16)
            d_anchors: Tensor | None = None
            d_scale: Tensor | None = None
            d_blocks: list[Tensor | None] = []
            column = 0
            for block, own, needed in zip(blocks, mine, for_blocks, strict=True):
                walk = Walk(question, scale, low, block, column, ctx.band, own)
                column += len(block)
                d_block: Tensor | None = None
                if for_anchors or for_scale:
                    if needed and not own:
                        part, share = walk.gradients(pulls, for_scale)
                        part, d_block = part[: len(low)], part[len(low) :]
                    else:
                        part, share = walk.anchors_gradient(pulls, for_scale)
                    d_anchors = part if d_anchors is None else d_anchors.add_(part)
                    d_scale = share if d_scale is None or share is None else d_scale + share
                elif needed and not own:
                    d_block = walk.gradient(pulls, outer=False, inner=True)
                d_blocks.append(d_block)
        return None, d_scale, d_anchors if for_anchors else None, *d_blocks


def _forward(question: Negatives | Positives, rows: int, sums: Sums) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The three results of each anchor, and what the backward pass needs of them."""
    heavy, light, count, peak = sums
    slots = len(heavy)
    if isinstance(question, Positives):
        assert count is not None
        found = tuple(part[0] if slots == 1 else part.sum(dim=0) for part in (heavy, light, count))
        return found, (found[0],) * KEPT
    block_size = 128
    mean, weight, number, heavy_sum, light_sum, top = heavy.new_empty(6, rows).unbind()
    forward.finish[(math.ceil(rows / block_size),)](
        heavy, light, count, peak, tilt(question.rule, heavy.device), mean, weight, number, heavy_sum, light_sum, top,
        rows, slots, float(question.known_count()),
        BLOCK=block_size, KIND=question.kind, BOUNDED=question.bounded,
        COUNTED=question.counted or question.counts is not None,
    )  # fmt: skip
    return (mean, weight, number), (heavy_sum, light_sum, top, number)


def _pulls(
    question: Negatives | Positives, grads: Sequence[Tensor | None], kept: Sequence[Tensor], narrow: bool
) -> Pulls:
    """How scores pull, given the gradients of the results. narrow: must their range be known, for float16?"""
    heavy_sum, light_sum, top, number = kept
    first = torch.zeros_like(number) if grads[0] is None else grads[0].contiguous()
    second = None if grads[1] is None else grads[1].contiguous()
    largest = None
    if narrow:  # a softmax is at most 1
        beta = question.rule.tilt
        largest = first.abs().amax() * (2 * beta + 1) + (0.0 if second is None else second.abs().amax() * (beta + 1))
    if isinstance(question, Positives):
        second = torch.zeros_like(first) if second is None else second
        return Pulls(torch.stack((first, second), dim=1), question.level, largest)
    rows, block_size = len(first), 128
    factors = first.new_empty(rows, 2)
    backward.slopes[(math.ceil(rows / block_size),)](
        first, second, heavy_sum, light_sum, number, tilt(question.rule, first.device), factors, rows,
        BLOCK=block_size, THROUGH=question.rule.grad_through_weights, WEIGHED=second is not None,
    )  # fmt: skip
    return Pulls(factors, None if question.bounded else top, largest)


def losses(
    negatives: LogSums,
    similarity: Tensor,
    scale: Tensor,
    log_number: float | None,
    prior: tuple[float, float] | None,
    log_least: float | None,
    decoupled: bool,
) -> tuple[Tensor, Tensor]:
    """Losses of anchors that have one positive each, and which are floored, (A,) each; see `rowwise.Losses`."""
    found, floored = rowwise.Losses.apply(  # type: ignore[no-untyped-call]
        negatives.mean, similarity, scale, negatives.count, log_number, prior, log_least, decoupled
    )
    return found, floored.bool()


def units(
    z1: Tensor, z2: Tensor | None, smallest: float, precision: torch.dtype | None, names: str
) -> tuple[Tensor, Tensor]:
    """Unit vectors of the rows of z1 and z2, and inner products of their pairs; see `rowwise.Units`."""
    found: tuple[Tensor, Tensor] = rowwise.Units.apply(z1, z2, smallest, precision, names)  # type: ignore[no-untyped-call]
    return found


def pair_loss(
    z1: Tensor,
    z2: Tensor,
    negatives: Tensor | None,
    eligibility: Eligibility,
    scale: Tensor,
    rule: Rule,
    log_number: float | None,
    prior: tuple[float, float] | None,
    decoupled: bool,
    reduction: str,
    plain: Callable[..., Tensor],
) -> tuple[Tensor, Callable[[], PairRecord]]:
    """The loss of pairs (B, d) against all others, or of anchors z1 against negatives (N, d).

    eligibility: which of them may be met: of 2B candidates all are both views, of B they are z2, and z1 the anchors ·
    log_number, prior, decoupled: see `losses` · plain: the same loss of z1, z2, negatives and scale by plain operations
    """
    from hardneg.losses.kernels.triton import paired_loss

    tensors = (z1, z2) if negatives is None else (z1, z2, negatives)
    smallest = max(1e-30, *(torch.finfo(tensor.dtype).tiny for tensor in tensors))
    form = paired_loss.Form(
        smallest, rule.half_copies.precision, log_number, prior, decoupled, reduction != "none", reduction == "mean"
    )
    seen: list[Tensor] = []
    loss = paired_loss.Whole.apply(z1, z2, negatives, scale, Negatives(eligibility, rule), form, plain, seen)  # type: ignore[no-untyped-call]
    layout = eligibility.own or RowLayout(len(z1), 1, 0, len(z1), z1.device)

    def record() -> PairRecord:
        anchors, candidates, similarity, kept = seen
        losses, count, floored = kept[:3]
        return PairRecord(eligibility, rule, layout, anchors, candidates, similarity, losses, floored, count)

    return loss, record

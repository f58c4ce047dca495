"""The tiled kernel: the reference's results in O(A·d) memory, one strip of rows at a time.

A strip is a block of anchors against all their candidates, so that ranks and sums are local to it. The forward pass
keeps a few numbers per anchor; the backward pass recomputes each strip (or reuses it, if there is only one), turns it
into the coefficients W = ∂L/∂s, and multiplies.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hardneg.losses.kernels import percentiles, reference, tiled_pairs
from hardneg.losses.kernels.interface import (
    EXACT_SOFTPLUS,
    Eligibility,
    HalfCopies,
    LogSums,
    PairSupport,
    Rule,
    count_true,
    draw,
    first_order,
    per_row,
    wrapped,
)
from hardneg.losses.kernels.strips import SAFE_EXPONENT, strip_height
from hardneg.matmul import multiply

units = None  # computed by plain operations
pair_loss = tiled_pairs.pair_loss
pair_support = PairSupport(device="cpu", float64=True, bands_per_anchor=False, weighted_denominator=True)


def log_sums(
    anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor, eligibility: Eligibility, rule: Rule
) -> LogSums:
    """As `reference.log_sums`, for every rule except general weights."""
    mean, weight, count = _reduce(_NegativeSums(eligibility, rule, anchors), anchors, candidates, scale)
    return LogSums(mean, weight, count)


def positive_sums(
    anchors: Tensor,
    pool: Tensor,
    scale: Tensor,
    eligibility: Eligibility,
    offset: Tensor,
    half_copies: HalfCopies | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.positive_sums`."""
    terms, total, derivative = _reduce(_PositiveSums(eligibility, offset.detach()), anchors, [pool], scale)
    # ∂terms/∂offset is known, so the gradient of the offset needs no separate pass.
    return terms + derivative * (offset - offset.detach()), total


def strips(anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows and their scores (R, N), strip by strip; each strip overwrites the previous one."""
    if torch._C._are_functorch_transforms_active():  # they have no products into given memory
        yield slice(0, len(anchors)), reference.score_matrix(anchors, candidates, scale)
        return
    rows, columns, cost, shared = len(anchors), 0, 0, True
    for block in candidates:
        columns += block.shape[-2]
        # A per-anchor block is gathered row by row, which costs d numbers for each score.
        cost += block.shape[-2] * (block.shape[-1] if block.dim() == 3 else 1)
        shared = shared and block.dim() == 2
    height = strip_height(rows, cost, anchors.device, shared)
    # The fused kernel may leave half-precision copies; here they get the precision of the scale.
    anchors, candidates = anchors.to(scale.dtype), [block.to(scale.dtype) for block in candidates]
    buffer = anchors.new_empty(height, columns)
    for start in range(0, rows, height):
        strip = slice(start, min(start + height, rows))
        scores, own = buffer[: strip.stop - start], anchors[strip]
        column = 0
        for block in candidates:
            part = scores[:, column : column + block.shape[-2]]
            if block.dim() == 2:
                multiply(own, block, part)
            else:
                given = block[wrapped(strip, len(block), block.device)]  # (R, N, d)
                part.copy_(torch.bmm(given, own[:, :, None])[:, :, 0])
            column += block.shape[-2]
        yield strip, scores.mul_(scale)  # not the anchors: see `reference.score_matrix`


@torch.no_grad()
def row_maximum(anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor, eligibility: Eligibility) -> Tensor:
    """The largest score of each anchor with its eligible candidates, (A,); −inf where there are none."""
    found = []
    for rows, scores in strips(anchors, candidates, scale):
        eligibility.mask_(scores, rows, -torch.inf)
        found.append(scores.amax(dim=1))
    return found[0] if len(found) == 1 else torch.cat(found)


@torch.no_grad()
def largest_magnitude(anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor, eligibility: Eligibility) -> Tensor:
    """The largest |score| of any anchor with an eligible candidate, ()."""
    found = anchors.new_zeros(())
    for rows, scores in strips(anchors, candidates, scale):
        eligibility.mask_(scores, rows, 0.0)
        found = torch.maximum(found, torch.linalg.vector_norm(scores, ord=torch.inf))
    return found


def _reduce(
    reduction: "_NegativeSums | _PositiveSums", anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    own = anchors.view_as(anchors)  # a compiled graph refuses one tensor as two arguments
    results: tuple[Tensor, Tensor, Tensor] = _Strips.apply(reduction, scale, own, *candidates)  # type: ignore[no-untyped-call]
    return results


class _Strips(torch.autograd.Function):
    """Applies a reduction strip by strip, and recomputes the strips in backward."""

    @staticmethod
    def forward(
        ctx: Any, reduction: "_NegativeSums | _PositiveSums", scale: Tensor, anchors: Tensor, *candidates: Tensor
    ) -> tuple[Tensor, ...]:
        size = len(anchors)
        results = anchors.new_empty(size), anchors.new_empty(size), anchors.new_empty(size)
        for rows, scores in strips(anchors, candidates, scale):
            for result, part in zip(results, reduction.forward(rows, scores), strict=True):
                result[rows] = part
        # A single strip is kept for the backward pass; a compiled graph cannot keep this view of the buffer.
        kept = reduction.keeps_exponentials and len(scores) == size and not torch.compiler.is_compiling()
        ctx.reduction = reduction
        ctx.save_for_backward(scale, anchors, *results, scores if kept else None, *candidates)
        ctx.mark_non_differentiable(results[2])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpointing refuses to unpack twice
        given = [torch.zeros_like(r) if g is None else g for g, r in zip(grads, saved[2:5], strict=True)]
        # A backward pass may run inside an autocast block; this arithmetic keeps its precision.
        with torch.autocast(saved[0].device.type, enabled=False):
            return _Strips._backward(ctx, saved, given)

    @staticmethod
    def _backward(ctx: Any, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        reduction, (scale, anchors, *results, strip), candidates = ctx.reduction, tensors[:6], tensors[6:]
        for_scale, for_anchors, *for_blocks = ctx.needs_input_grad[1:]
        by_rows = torch.zeros_like(anchors)  # Σ_c W·c for each anchor
        by_columns = [
            torch.zeros_like(block) if needed else None for block, needed in zip(candidates, for_blocks, strict=True)
        ]
        recomputed = strip is None
        again = strips(anchors, candidates, scale) if recomputed else [(slice(0, len(anchors)), strip)]
        for rows, scores in again:
            coefficients = reduction.coefficients(rows, scores, results, grads, recomputed)  # (R, N)
            column = 0
            for block, collected in zip(candidates, by_columns, strict=True):
                part = coefficients[:, column : column + block.shape[-2]]
                column += block.shape[-2]
                if block.dim() == 2:
                    multiply(part, block.T, by_rows[rows], add=True)
                    if collected is not None:
                        multiply(part.T, anchors[rows].T, collected, add=True)
                else:
                    block_rows = wrapped(rows, len(block), block.device)
                    by_rows[rows] += torch.bmm(part[:, None, :], block[block_rows])[:, 0]
                    if collected is not None:
                        outer = part[:, :, None] * anchors[rows, None, :]  # (R, N, d)
                        if isinstance(block_rows, slice):
                            collected[block_rows] += outer
                        else:
                            collected.index_add_(0, block_rows, outer)
        # s = scale·⟨a, c⟩, so ∂L/∂scale = Σ W·⟨a, c⟩.
        d_scale = (anchors * by_rows).sum() if for_scale else None
        d_blocks = [None if collected is None else collected.mul_(scale) for collected in by_columns]
        return None, d_scale, by_rows.mul_(scale) if for_anchors else None, *d_blocks


class _NegativeSums:
    """The two log-sums and the count of `LogSums`, strip by strip, and the gradient of a loss in the scores.

    keeps_exponentials: whether `forward` leaves in its strip what `coefficients` can reuse · row_max: maximum of each
    row's scores, or 0 where it need not be subtracted · log_tilted, log_weight: log of the sums of e^{(β+1)s} and
    e^{βs}, with s relative to that maximum
    """

    def __init__(self, eligibility: Eligibility, rule: Rule, anchors: Tensor) -> None:
        self.eligibility, self.rule = eligibility, rule
        self.row_max, self.log_tilted, self.log_weight = (anchors.new_zeros(len(anchors)) for _ in range(3))
        self.bands: dict[int, percentiles.Edges] = {}  # by first row of the strip: the edges of the band
        self.drawn: dict[int, Tensor] = {}  # by first row of the strip: the negatives drawn, (R, k)
        tilt, largest = rule.tilt, rule.max_abs_score
        self.bounded = largest is not None and not isinstance(tilt, Tensor) and (tilt + 1) * largest <= SAFE_EXPONENT
        # With β = 0 or 1 one exponential x = e^s gives both sums and both their derivatives.
        self.keeps_exponentials = self.bounded and rule.draws is None and tilt in (0, 1)

    def forward(self, rows: slice, scores: Tensor) -> tuple[Tensor, ...]:
        """Three numbers per row; may overwrite ``scores``."""
        rule = self.rule
        self._mask(rows, scores)
        if rule.draws is not None:
            self.drawn[rows.start] = draw(scores > -torch.inf, rule.draws[rows])
            scores = scores.gather(1, self.drawn[rows.start])
        if rule.draws is None and self.eligibility.is_plain and not rule.is_banded:
            count = scores.new_full((len(scores),), self.eligibility.count_per_anchor)
        else:
            count = count_true(scores > -torch.inf).to(scores.dtype)
        if self.keeps_exponentials:
            exponentials = scores.exp_()
            total = exponentials.sum(dim=1).log()
            squares = total if rule.tilt == 0 else 2 * torch.linalg.vector_norm(exponentials, dim=1).log()
            self.log_tilted[rows], self.log_weight[rows] = squares, count.log() if rule.tilt == 0 else total
        else:
            if not self.bounded:
                highest = scores.amax(dim=1)  # (R,)
                self.row_max[rows] = highest.masked_fill(highest == -torch.inf, 0)
                scores -= self.row_max[rows, None]
            self.log_tilted[rows] = (scores * (rule.tilt + 1)).exp_().sum(dim=1).log()
            if isinstance(rule.tilt, Tensor) or rule.tilt > 0:  # 0 · −inf is NaN
                self.log_weight[rows] = _tilt_(scores, rule.tilt).exp_().sum(dim=1).log()
            else:
                self.log_weight[rows] = count.log()
        log_tilted, log_weight, row_max = self.log_tilted[rows], self.log_weight[rows], self.row_max[rows]
        mean = torch.where(count > 0, log_tilted - log_weight + row_max, -torch.inf)
        return mean, log_weight + rule.tilt * row_max, count

    def coefficients(
        self,
        rows: slice,
        scores: Tensor,
        results: Sequence[Tensor],
        grads: Sequence[Tensor],
        recomputed: bool,
    ) -> Tensor:
        """∂L/∂s, (R, N). results, grads: of all anchors.

        recomputed: ``scores`` are plain and may be overwritten; otherwise they are what `forward` left, and are kept
        """
        tilt, through = self.rule.tilt, self.rule.grad_through_weights
        empty = results[2] == 0
        # METHODS, gradient: (β+1)·softmax_{β+1} and −β·softmax_β; with detached weights 1 and 0.
        d_tilted = (grads[0] * (tilt + 1 if through else 1)).masked_fill(empty, 0)
        d_weight = ((grads[1] - grads[0]) * (tilt if through else 0)).masked_fill(empty, 0)
        log_tilted, log_weight = self.log_tilted.masked_fill(empty, 0), self.log_weight.masked_fill(empty, 0)
        drawn = self.drawn.get(rows.start)
        if recomputed and drawn is None:
            self._mask(rows, scores)
        if self.keeps_exponentials:
            exponentials = scores.exp_() if recomputed else scores
            derivative = exponentials * (d_tilted * (-log_tilted).exp())[rows, None]
            if tilt == 1:
                derivative.add_((d_weight * (-log_weight).exp())[rows, None]).mul_(exponentials)
            return derivative
        # Drawn candidates need no mask again, except in a row that has no negatives.
        chosen = scores if drawn is None else scores.gather(1, drawn).masked_fill_(empty[rows, None], -torch.inf)
        chosen -= self.row_max[rows, None]
        derivative = (chosen * (tilt + 1)).sub_(log_tilted[rows, None]).exp_().mul_(d_tilted[rows, None])
        if through and (isinstance(tilt, Tensor) or tilt > 0):
            derivative += _tilt_(chosen, tilt).sub_(log_weight[rows, None]).exp_().mul_(d_weight[rows, None])
        if drawn is None:
            return derivative
        return torch.zeros_like(scores).scatter_add_(1, drawn, derivative)

    def _mask(self, rows: slice, scores: Tensor) -> None:
        """Overwrite with −inf the scores of candidates that are ineligible or outside the bands."""
        self.eligibility.mask_(scores, rows, -torch.inf)
        if self.rule.rings:
            if rows.start not in self.bands:
                self.bands[rows.start] = percentiles.edges(scores, self.rule)
            scores.masked_fill_(self.bands[rows.start].outside(scores), -torch.inf)
        if self.rule.lower is not None:
            scores.masked_fill_(scores < per_row(self.rule.lower, rows), -torch.inf)
        if self.rule.upper is not None:
            scores.masked_fill_(scores > per_row(self.rule.upper, rows), -torch.inf)
        if self.rule.guide is not None:
            scores.masked_fill_(self.rule.guide.outside(rows), -torch.inf)


def _tilt_(scores: Tensor, tilt: float | Tensor) -> Tensor:
    """The scores times the tilt, in place; masked ones stay −inf, also if a tilt that is a tensor is 0."""
    if not isinstance(tilt, Tensor):
        return scores.mul_(tilt)
    masked = scores == -torch.inf
    return scores.mul_(tilt).masked_fill_(masked, -torch.inf)


class _PositiveSums:
    """Σ softplus(offset − p), Σ p, and the derivative of the first in the offset, over each anchor's positives.

    Its methods and attributes are those of `_NegativeSums`.
    """

    keeps_exponentials = False

    def __init__(self, eligibility: Eligibility, offset: Tensor) -> None:
        self.eligibility, self.offset = eligibility, offset

    def forward(self, rows: slice, scores: Tensor) -> tuple[Tensor, ...]:
        positive = self._positive(rows, scores)
        gap = (self.offset[rows, None] - scores).masked_fill_(~positive, -torch.inf)  # softplus and sigmoid give 0
        return (
            softplus(gap, threshold=EXACT_SOFTPLUS).sum(dim=1),
            scores.masked_fill_(~positive, 0).sum(dim=1),
            gap.sigmoid_().sum(dim=1),
        )

    def coefficients(
        self,
        rows: slice,
        scores: Tensor,
        results: Sequence[Tensor],
        grads: Sequence[Tensor],
        recomputed: bool,
    ) -> Tensor:
        positive = self._positive(rows, scores)
        derivative = (self.offset[rows, None] - scores).sigmoid_()
        return (grads[1][rows, None] - grads[0][rows, None] * derivative).masked_fill_(~positive, 0)

    def _positive(self, rows: slice, scores: Tensor) -> Tensor:
        positive = torch.ones_like(scores, dtype=torch.bool)
        self.eligibility.mask_(positive, rows, False)
        return positive

"""The same answers in O(A·d) memory: one strip of rows at a time, recomputed in the backward pass.

Each strip is a block of anchors against all their candidates, so that ranks and sums are local to it. Forward keeps a
few numbers per anchor; backward makes the strip again (or, if one strip is all, takes it up again), turns it into the
weights W = ∂L/∂s, and multiplies. Where anchors and candidates are the same rows, one product with W + Wᵀ gives the
whole gradient.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hardneg.losses.kernels import percentiles
from hardneg.losses.kernels.interface import (
    EXACT_SOFTPLUS,
    Eligibility,
    HalfCopies,
    LogSums,
    Rule,
    count_true,
    draw,
    first_order,
    per_row,
    wrapped,
)

# Scores held at a time. On a CPU 4 MiB in float32, the fastest of 2¹⁷ … 2²² at B = 4,096 on 2 cores; on an accelerator
# 128 MiB, because every strip is a round of launches.
STRIP_ELEMENTS = {"cpu": 1 << 20, "accelerator": 1 << 25}

# Each strip reads all shared candidates once more, so a strip of few rows mostly waits for them: where the above makes
# it lower than this on a CPU, it may hold four times as many scores. At N = 65,536 the product takes half the time.
LEAST_ROWS = 64

# Up to here e^{±x} and sums of millions of them are ordinary float32 numbers, so no row needs its maximum taken off.
SAFE_EXPONENT = 40.0

units = losses = pair_loss = None  # plain operations make them


def log_sums(
    anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor, eligibility: Eligibility, rule: Rule
) -> LogSums:
    """As `reference.log_sums`, for every rule but general weights."""
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
    terms, total, slope = _reduce(_PositiveSums(eligibility, offset.detach()), anchors, [pool], scale)
    # ∂terms/∂offset is the sum of the slopes, so the offset's gradient needs no pass of its own.
    return terms + slope * (offset - offset.detach()), total


def strips(anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows and their scores (R, N), strip by strip; each strip overwrites the one before."""
    rows, columns = len(anchors), sum(block.shape[-2] for block in candidates)
    # A per-anchor block is gathered row by row, which costs d numbers for each score.
    cost = sum(block.shape[-2] * (block.shape[-1] if block.dim() == 3 else 1) for block in candidates)
    on_cpu = anchors.device.type == "cpu"
    budget = STRIP_ELEMENTS["cpu" if on_cpu else "accelerator"]
    height = budget // max(cost, 1)
    if on_cpu and height < LEAST_ROWS and all(block.dim() == 2 for block in candidates):
        height = min(LEAST_ROWS, 4 * budget // max(cost, 1))
    height = max(1, min(rows, height))
    # What the fused kernel worked on may be half-precision numbers; here they are as precise as the scale.
    anchors, candidates = anchors.to(scale.dtype), [block.to(scale.dtype) for block in candidates]
    buffer = anchors.new_empty(height, columns)
    for start in range(0, rows, height):
        strip = slice(start, min(start + height, rows))
        scores = buffer[: strip.stop - start]
        scaled = anchors[strip] * scale  # (R, d)
        column = 0
        for block in candidates:
            part = scores[:, column : column + block.shape[-2]]
            if block.dim() == 2:
                torch.mm(scaled, block.T, out=part)
            else:
                own = block[wrapped(strip, len(block), block.device)]  # (R, N, d)
                part.copy_(torch.bmm(own, scaled[:, :, None])[:, :, 0])
            column += block.shape[-2]
        yield strip, scores


@torch.no_grad()
def row_maximum(anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor, eligibility: Eligibility) -> Tensor:
    """The largest score of each anchor with its eligible candidates, (A,); −inf where there are none."""
    found = anchors.new_full((len(anchors),), -torch.inf)
    for rows, scores in strips(anchors, candidates, scale):
        eligibility.mask_(scores, rows, -torch.inf)
        found[rows] = scores.amax(dim=1)
    return found


@torch.no_grad()
def largest_magnitude(anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor, eligibility: Eligibility) -> Tensor:
    """The largest |score| of any anchor with an eligible candidate, ()."""
    found = anchors.new_zeros(())
    for rows, scores in strips(anchors, candidates, scale):
        eligibility.mask_(scores, rows, 0.0)
        found = torch.maximum(found, torch.linalg.vector_norm(scores, ord=torch.inf))
    return found


class _Reduction(Protocol):
    """Numbers per anchor made from its row of scores, and the derivative of a loss of them."""

    eligibility: Eligibility
    shares: bool  # does `forward` leave in its strip what `weights` can use?
    mirrors: bool  # is the derivative of s_ji found in the strip of row i, if scores are symmetric?

    def forward(self, rows: slice, scores: Tensor) -> tuple[Tensor, ...]:
        """Three numbers per row; may overwrite ``scores``."""

    def weights(
        self, rows: slice, scores: Tensor, results: Sequence[Tensor], grads: Sequence[Tensor], fresh: bool, both: bool
    ) -> Tensor:
        """∂L/∂s_ij (R, N), or ∂L/∂s_ij + ∂L/∂s_ji if ``both``, given the whole results and their gradients.

        fresh: ``scores`` are plain and may be overwritten; otherwise they are as `forward` left them, and stay so
        """


def _reduce(
    reduction: _Reduction, anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    blocks = [None if block is anchors else block for block in candidates]
    results: tuple[Tensor, Tensor, Tensor] = _Strips.apply(reduction, scale, anchors, *blocks)  # type: ignore[no-untyped-call]
    return results


class _Strips(torch.autograd.Function):
    """Applies a reduction strip by strip, and recomputes the strips in backward. A block of None is the anchors."""

    @staticmethod
    def forward(
        ctx: Any, reduction: _Reduction, scale: Tensor, anchors: Tensor, *blocks: Tensor | None
    ) -> tuple[Tensor, ...]:
        candidates = [anchors if block is None else block for block in blocks]
        results = tuple(anchors.new_empty(len(anchors)) for _ in range(3))
        for rows, scores in strips(anchors, candidates, scale):
            for result, part in zip(results, reduction.forward(rows, scores), strict=True):
                result[rows] = part
        # What is but one strip need not be made twice.
        ctx.strip = scores if reduction.shares and len(scores) == len(anchors) else None
        ctx.reduction, ctx.mine = reduction, [block is None for block in blocks]
        ctx.save_for_backward(scale, anchors, *results, *(b for b in blocks if b is not None))
        ctx.mark_non_differentiable(results[2])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpointing refuses to unpack twice
        given = [torch.zeros_like(r) if g is None else g for g, r in zip(grads, saved[2:5], strict=True)]
        # A backward pass may be run inside an autocast block; this arithmetic stays as it is.
        with torch.autocast(saved[0].device.type, enabled=False):
            return _Strips._backward(ctx, saved, given)

    @staticmethod
    def _backward(ctx: Any, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        reduction, mine = ctx.reduction, ctx.mine
        scale, anchors, *saved = tensors
        results, given = saved[:3], iter(saved[3:])
        candidates = [anchors if own else next(given) for own in mine]
        for_scale, for_anchors, *for_blocks = ctx.needs_input_grad[1:]

        both = reduction.mirrors and mine == [True]
        by_rows = torch.zeros_like(anchors)  # Σ_c W·c for each anchor
        by_columns = [
            torch.zeros_like(block) if needed or (own and not both) else None
            for block, needed, own in zip(candidates, for_blocks, mine, strict=True)
        ]
        fresh = ctx.strip is None
        again = strips(anchors, candidates, scale) if fresh else [(slice(0, len(anchors)), ctx.strip)]
        for rows, scores in again:
            weights = reduction.weights(rows, scores, results, grads, fresh, both)  # (R, N)
            column = 0
            for block, collected in zip(candidates, by_columns, strict=True):
                part = weights[:, column : column + block.shape[-2]]
                column += block.shape[-2]
                if block.dim() == 2:
                    by_rows[rows].addmm_(part, block)
                    if collected is not None:
                        collected.addmm_(part.T, anchors[rows])
                else:
                    served = wrapped(rows, len(block), block.device)
                    by_rows[rows] += torch.bmm(part[:, None, :], block[served])[:, 0]
                    if collected is not None:
                        outer = part[:, :, None] * anchors[rows, None, :]  # (R, N, d)
                        if isinstance(served, slice):
                            collected[served] += outer
                        else:
                            collected.index_add_(0, served, outer)
        # s = scale·⟨a, c⟩, so ∂L/∂scale = Σ W·⟨a, c⟩; with both halves each pair was counted twice.
        d_scale = (anchors * by_rows).sum() * (0.5 if both else 1.0) if for_scale else None
        d_blocks: list[Tensor | None] = []
        for own, collected in zip(mine, by_columns, strict=True):
            if own and collected is not None:
                by_rows += collected
            d_blocks.append(None if own or collected is None else collected.mul_(scale))
        return None, d_scale, by_rows.mul_(scale) if for_anchors else None, *d_blocks


class _NegativeSums:
    """The two log-sums and the count of `LogSums`."""

    def __init__(self, eligibility: Eligibility, rule: Rule, anchors: Tensor) -> None:
        self.eligibility, self.rule = eligibility, rule
        # Row by row the peak of the scores, and the two log-sums of scores less that peak.
        self.peak, self.heavy, self.light = (anchors.new_zeros(len(anchors)) for _ in range(3))
        self.ring: dict[int, percentiles.Edges] = {}  # by strip: the edges of the band
        self.picked: dict[int, Tensor] = {}  # by strip: the negatives drawn, (R, k)
        tilt, largest = rule.tilt, rule.max_abs_score
        self.bounded = largest is not None and not isinstance(tilt, Tensor) and (tilt + 1) * largest <= SAFE_EXPONENT
        # With β = 0 or 1 one exponential x = e^s serves both sums and both their derivatives.
        self.shares = self.bounded and rule.draws is None and tilt in (0, 1)
        self.mirrors = self.shares and not rule.is_banded and eligibility.allowed is None

    def forward(self, rows: slice, scores: Tensor) -> tuple[Tensor, ...]:
        rule = self.rule
        self._prepare(rows, scores)
        if rule.draws is not None:
            self.picked[rows.start] = draw(scores > -torch.inf, rule.draws[rows])
            scores = scores.gather(1, self.picked[rows.start])
        if self.eligibility.is_plain and not rule.is_banded and rule.draws is None:
            count = self._plain_count(rows, scores)
        elif rule.rings and rule.lower is None and rule.upper is None and rule.draws is None:
            count = self.ring[rows.start].count.to(scores.dtype)
        else:
            count = count_true(scores > -torch.inf).to(scores.dtype)
        if self.shares:
            plain = scores.exp_()
            total = plain.sum(dim=1).log()
            squares = total if rule.tilt == 0 else 2 * torch.linalg.vector_norm(plain, dim=1).log()
            self.heavy[rows], self.light[rows] = squares, count.log() if rule.tilt == 0 else total
        else:
            if not self.bounded:
                highest = scores.amax(dim=1)  # (R,)
                self.peak[rows] = highest.masked_fill(highest == -torch.inf, 0)
                scores -= self.peak[rows, None]
            self.heavy[rows] = (scores * (rule.tilt + 1)).exp_().sum(dim=1).log()
            if isinstance(rule.tilt, Tensor) or rule.tilt > 0:  # 0 · −inf is NaN
                self.light[rows] = scores.mul_(rule.tilt).exp_().sum(dim=1).log()
            else:
                self.light[rows] = count.log()
        heavy, light, peak = self.heavy[rows], self.light[rows], self.peak[rows]
        mean = torch.where(count > 0, heavy - light + peak, -torch.inf)
        return mean, light + rule.tilt * peak, count

    def weights(
        self, rows: slice, scores: Tensor, results: Sequence[Tensor], grads: Sequence[Tensor], fresh: bool, both: bool
    ) -> Tensor:
        tilt, through = self.rule.tilt, self.rule.grad_through_weights
        empty = results[2] == 0
        # METHODS, gradient: (β+1)·softmax_{β+1} and −β·softmax_β; with detached weights 1 and 0.
        heavy = (grads[0] * (tilt + 1 if through else 1)).masked_fill(empty, 0)
        light = ((grads[1] - grads[0]) * (tilt if through else 0)).masked_fill(empty, 0)
        heavy_sum, light_sum = self.heavy.masked_fill(empty, 0), self.light.masked_fill(empty, 0)
        picked = self.picked.get(rows.start)
        if fresh and picked is None:
            self._prepare(rows, scores)
        if self.shares:
            plain = scores.exp_() if fresh else scores
            heavy, light = heavy * (-heavy_sum).exp(), light * (-light_sum).exp()
            derivative = plain * (heavy[rows, None] + heavy if both else heavy[rows, None])
            if tilt == 1:
                derivative.add_(light[rows, None] + light if both else light[rows, None]).mul_(plain)
            return derivative
        chosen = scores if picked is None else scores.gather(1, picked)
        # What was drawn needs no mask again, except in a row that has no negatives.
        chosen = chosen if picked is None else chosen.masked_fill_(empty[rows, None], -torch.inf)
        chosen -= self.peak[rows, None]
        derivative = (chosen * (tilt + 1)).sub_(heavy_sum[rows, None]).exp_().mul_(heavy[rows, None])
        if through and (isinstance(tilt, Tensor) or tilt > 0):
            derivative += chosen.mul_(tilt).sub_(light_sum[rows, None]).exp_().mul_(light[rows, None])
        if picked is None:
            return derivative
        return torch.zeros_like(scores).scatter_add_(1, picked, derivative)

    def _plain_count(self, rows: slice, scores: Tensor) -> Tensor:
        count = scores.new_full((len(scores),), self.eligibility.columns)
        if (excluded := self.eligibility.excluded_columns(rows)) is not None:
            ordered = excluded.sort(dim=1).values  # (R, E); the same one may be named twice
            count -= (ordered[:, 1:] != ordered[:, :-1]).sum(dim=1) + 1
        return count

    def _prepare(self, rows: slice, scores: Tensor) -> None:
        """Overwrite with −inf what is not eligible or lies outside the bands."""
        self.eligibility.mask_(scores, rows, -torch.inf)
        if self.rule.rings:
            if rows.start not in self.ring:
                self.ring[rows.start] = percentiles.edges(scores, self.rule)
            scores.masked_fill_(self.ring[rows.start].outside(scores), -torch.inf)
        if self.rule.lower is not None:
            scores.masked_fill_(scores < per_row(self.rule.lower, rows), -torch.inf)
        if self.rule.upper is not None:
            scores.masked_fill_(scores > per_row(self.rule.upper, rows), -torch.inf)


class _PositiveSums:
    """Σ softplus(offset − p), Σ p, and the derivative of the first in the offset, over each anchor's positives."""

    shares = mirrors = False

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

    def weights(
        self, rows: slice, scores: Tensor, results: Sequence[Tensor], grads: Sequence[Tensor], fresh: bool, both: bool
    ) -> Tensor:
        positive = self._positive(rows, scores)
        slope = (self.offset[rows, None] - scores).sigmoid_()
        return (grads[1][rows, None] - grads[0][rows, None] * slope).masked_fill_(~positive, 0)

    def _positive(self, rows: slice, scores: Tensor) -> Tensor:
        positive = torch.ones_like(scores, dtype=torch.bool)
        self.eligibility.mask_(positive, rows, False)
        return positive

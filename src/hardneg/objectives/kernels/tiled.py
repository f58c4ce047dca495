"""The same answers in O(A·d) memory: one strip of rows at a time, recomputed in the backward pass.

Each strip is a block of anchors against all their candidates, so that ranks and sums are local to it. Forward keeps a
few numbers per anchor; backward makes the strip again, turns it into the weights W = ∂L/∂s, and multiplies. On a CPU
at 512 rows this is several times faster than autograd through whole matrices: it works in place and shares
exponentials (`benchmarks/loss.py`).
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import softplus

from hardneg.objectives.kernels.problem import EXACT_SOFTPLUS, Eligibility, LogSums, Rule, draw, per_row, wrapped

STRIP_ELEMENTS = 1 << 21  # scores held at a time: 8 MiB in float32, about a core's share of the cache

# Up to here e^{±x} and sums of millions of them are ordinary float32 numbers, so no row needs its maximum taken off.
SAFE_EXPONENT = 40.0


def log_sums(anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor, who: Eligibility, rule: Rule) -> LogSums:
    """As `reference.log_sums`, for every rule but general weights."""
    tilted, weight, count = _reduce(_NegativeSums(who, rule), anchors, candidates, scale)
    return LogSums(tilted, weight, count)


def positive_sums(
    anchors: Tensor, pool: Tensor, scale: Tensor, who: Eligibility, offset: Tensor
) -> tuple[Tensor, Tensor]:
    """As `reference.positive_sums`."""
    terms, total, slope = _reduce(_PositiveSums(who, offset.detach()), anchors, [pool], scale)
    # ∂terms/∂offset is the sum of the slopes, so the offset's gradient needs no pass of its own.
    return terms + slope * (offset - offset.detach()), total


def strips(anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows and their scores (R, N), strip by strip; each strip overwrites the one before."""
    rows, columns = len(anchors), sum(block.shape[-2] for block in candidates)
    # A per-anchor block is gathered row by row, which costs d numbers for each score.
    cost = sum(block.shape[-2] * (block.shape[-1] if block.dim() == 3 else 1) for block in candidates)
    height = max(1, min(rows, STRIP_ELEMENTS // max(cost, 1)))
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
def row_maximum(anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor, who: Eligibility) -> Tensor:
    """The largest score of each anchor with its eligible candidates, (A,); −inf where there are none."""
    found = anchors.new_full((len(anchors),), -torch.inf)
    for rows, scores in strips(anchors, candidates, scale):
        who.hide(scores, rows, -torch.inf)
        found[rows] = scores.amax(dim=1)
    return found


@torch.no_grad()
def largest_magnitude(anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor, who: Eligibility) -> Tensor:
    """The largest |score| of any anchor with an eligible candidate, ()."""
    found = anchors.new_zeros(())
    for rows, scores in strips(anchors, candidates, scale):
        who.hide(scores, rows, 0.0)
        found = torch.maximum(found, torch.linalg.vector_norm(scores, ord=torch.inf))
    return found


class _Reduction(Protocol):
    """Numbers per anchor made from its row of scores, and the derivative of a loss of them."""

    who: Eligibility

    def forward(self, rows: slice, scores: Tensor) -> tuple[Tensor, ...]:
        """Three numbers per row; may overwrite ``scores``."""

    def weights(self, rows: slice, scores: Tensor, results: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
        """∂L/∂s (R, N) given the whole results and the gradients of the first two; may overwrite ``scores``."""


def _reduce(
    reduction: _Reduction, anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    results: tuple[Tensor, Tensor, Tensor] = _Strips.apply(reduction, scale, anchors, *candidates)  # type: ignore[no-untyped-call]
    return results


class _Strips(torch.autograd.Function):
    """Applies a reduction strip by strip, and recomputes the strips in backward."""

    @staticmethod
    def forward(
        ctx: Any, reduction: _Reduction, scale: Tensor, anchors: Tensor, *candidates: Tensor
    ) -> tuple[Tensor, ...]:
        results = tuple(anchors.new_empty(len(anchors)) for _ in range(3))
        for rows, scores in strips(anchors, candidates, scale):
            for result, part in zip(results, reduction.forward(rows, scores), strict=True):
                result[rows] = part
        ctx.reduction = reduction
        # Saved, not merely kept: autograd then refuses a backward pass over keys that were overwritten meanwhile.
        kept = [] if reduction.who.allowed is None else [reduction.who.allowed]
        ctx.save_for_backward(scale, anchors, *candidates, *results, *kept)
        ctx.candidates = len(candidates)
        ctx.mark_non_differentiable(results[2])
        ctx.set_materialize_grads(True)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale, anchors, *saved = ctx.saved_tensors
        candidates, results = saved[: ctx.candidates], saved[ctx.candidates : ctx.candidates + 3]
        for_scale, for_anchors, *for_candidates = ctx.needs_input_grad[1:]
        d_anchors = torch.empty_like(anchors)
        d_candidates = [
            torch.zeros_like(c) if needed else None for c, needed in zip(candidates, for_candidates, strict=True)
        ]
        for rows, scores in strips(anchors, candidates, scale):
            weights = ctx.reduction.weights(rows, scores, results, grads)  # (R, N)
            rows_grad, column = torch.zeros_like(anchors[rows]), 0
            for block, d_block in zip(candidates, d_candidates, strict=True):
                part = weights[:, column : column + block.shape[-2]]
                column += block.shape[-2]
                if block.dim() == 2:
                    if for_anchors or for_scale:
                        rows_grad.addmm_(part, block)
                    if d_block is not None:
                        d_block.addmm_(part.T, anchors[rows] * scale)
                else:
                    served = wrapped(rows, len(block), block.device)
                    rows_grad += torch.bmm(part[:, None, :], block[served])[:, 0]
                    if d_block is not None:
                        outer = part[:, :, None] * (anchors[rows] * scale)[:, None, :]  # (R, N, d)
                        if isinstance(served, slice):
                            d_block[served] += outer
                        else:
                            d_block.index_add_(0, served, outer)
            d_anchors[rows] = rows_grad
        # s = scale·⟨a, c⟩, so ∂L/∂scale = Σ W·⟨a, c⟩ = Σ_a ⟨a, Σ_c W·c⟩.
        d_scale = (anchors * d_anchors).sum() if for_scale else None
        return None, d_scale, d_anchors * scale if for_anchors else None, *d_candidates


class _NegativeSums:
    """The two log-sums and the count of `LogSums`."""

    def __init__(self, who: Eligibility, rule: Rule) -> None:
        self.who, self.rule = who, rule
        self.ring: dict[int, tuple[Tensor, ...]] = {}  # by strip: the edges of the band, (R,) each
        self.picked: dict[int, Tensor] = {}  # by strip: the negatives drawn, (R, k)

    def forward(self, rows: slice, scores: Tensor) -> tuple[Tensor, ...]:
        rule = self.rule
        self.who.hide(scores, rows, -torch.inf)
        if rule.rings:
            self.ring[rows.start] = _ring_edges(scores, rule)
        self._cut(rows, scores)
        if rule.draws is not None:
            kept = scores > -torch.inf
            self.picked[rows.start] = draw(kept, rule.draws[rows])
            scores = scores.gather(1, self.picked[rows.start])
        if self.who.is_plain and not rule.is_banded and rule.draws is None:
            count = self._plain_count(rows, scores)
        else:
            count = (scores > -torch.inf).sum(dim=1)

        if self._is_safe:
            peak = None
        else:
            highest = scores.amax(dim=1)  # (R,)
            peak = highest.masked_fill(highest == -torch.inf, 0)
            scores -= peak[:, None]
        tilted, weight = _exponential_sums(scores, rule.tilt, count)
        if peak is not None:
            tilted += (rule.tilt + 1) * peak
            weight += rule.tilt * peak
        return tilted, weight, count

    def weights(self, rows: slice, scores: Tensor, results: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
        tilt, through = self.rule.tilt, self.rule.grad_through_weights
        empty = results[2][rows] == 0
        tilted, weight = (result[rows].masked_fill(empty, 0)[:, None] for result in results[:2])  # (R, 1)
        # METHODS, gradient: (β+1)·softmax_{β+1} and β·softmax_β; with detached weights 1 and 0.
        heavy = (grads[0][rows] * (tilt + 1 if through else 1)).masked_fill(empty, 0)[:, None]
        light = (grads[1][rows] * (tilt if through else 0)).masked_fill(empty, 0)[:, None]

        self.who.hide(scores, rows, -torch.inf)
        self._cut(rows, scores)
        picked = self.picked.get(rows.start)
        chosen = scores if picked is None else scores.gather(1, picked)
        if tilt == 0 and not isinstance(tilt, Tensor):
            derivative = chosen.sub_(tilted).exp_().mul_(heavy)
        elif tilt == 1 and not isinstance(tilt, Tensor) and self._is_safe:
            plain = chosen.exp_()
            derivative = (plain * (heavy * (-tilted).exp())).add_(light * (-weight).exp()).mul_(plain)
        else:
            derivative = (chosen * (tilt + 1)).sub_(tilted).exp_().mul_(heavy)
            if through:
                derivative += chosen.mul_(tilt).sub_(weight).exp_().mul_(light)
        if picked is None:
            return derivative
        return torch.zeros_like(scores).scatter_add_(1, picked, derivative)

    @property
    def _is_safe(self) -> bool:
        tilt, largest = self.rule.tilt, self.rule.largest
        return largest is not None and not isinstance(tilt, Tensor) and (tilt + 1) * largest <= SAFE_EXPONENT

    def _plain_count(self, rows: slice, scores: Tensor) -> Tensor:
        count = scores.new_full((len(scores),), self.who.columns)
        if self.who.excluded is not None:
            ordered = self.who.excluded[rows].sort(dim=1).values  # (R, E); the same one may be named twice
            count -= (ordered[:, 1:] != ordered[:, :-1]).sum(dim=1) + 1
        return count

    def _cut(self, rows: slice, scores: Tensor) -> None:
        """Overwrite with −inf what lies outside the bands."""
        if self.rule.rings:
            low, low_index, high, high_index = (edge[:, None] for edge in self.ring[rows.start])
            index = torch.arange(scores.shape[1], device=scores.device)
            outside = (scores < low) | ((scores == low) & (index < low_index))
            outside |= (scores > high) | ((scores == high) & (index > high_index))
            scores.masked_fill_(outside, -torch.inf)
        if self.rule.lower is not None:
            scores.masked_fill_(scores < per_row(self.rule.lower, rows), -torch.inf)
        if self.rule.upper is not None:
            scores.masked_fill_(scores > per_row(self.rule.upper, rows), -torch.inf)


def _ring_edges(scores: Tensor, rule: Rule) -> tuple[Tensor, ...]:
    """Score and index of the first and last candidate in the ring of each row (R, N); hidden ones are −inf."""
    eligible = (scores > -torch.inf).sum(dim=1)
    start, end = rule.ranks(eligible)
    hidden = scores.shape[1] - eligible  # they are sorted before the others
    ordered, order = scores.sort(dim=1, stable=True)
    first = (hidden + start).clamp(max=scores.shape[1] - 1)[:, None]
    last = (hidden + end - 1).clamp(min=0)[:, None]
    edges = [table.gather(1, at)[:, 0] for at in (first, last) for table in (ordered, order)]
    # Disjoint rings, or no candidates at all, keep nothing: a band that begins above every score.
    edges[0] = edges[0].masked_fill(end <= start, torch.inf)
    return tuple(edges)


def _exponential_sums(scores: Tensor, tilt: float | Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """log Σ e^{(β+1)s} and log Σ e^{βs} of each row (R, N), overwritten; one exponential where β allows."""
    if not isinstance(tilt, Tensor) and tilt == 0:
        return scores.exp_().sum(dim=1).log(), count.to(scores.dtype).log()
    if not isinstance(tilt, Tensor) and tilt == 1:
        plain = scores.exp_()
        return 2 * torch.linalg.vector_norm(plain, dim=1).log(), plain.sum(dim=1).log()
    heavy = (scores * (tilt + 1)).exp_().sum(dim=1).log()
    return heavy, scores.mul_(tilt).exp_().sum(dim=1).log()


class _PositiveSums:
    """Σ softplus(offset − p), Σ p, and the derivative of the first in the offset, over each anchor's positives."""

    def __init__(self, who: Eligibility, offset: Tensor) -> None:
        self.who, self.offset = who, offset

    def forward(self, rows: slice, scores: Tensor) -> tuple[Tensor, ...]:
        positive = self._positive(rows, scores)
        gap = (self.offset[rows, None] - scores).masked_fill_(~positive, -torch.inf)  # softplus and sigmoid give 0
        return (
            softplus(gap, threshold=EXACT_SOFTPLUS).sum(dim=1),
            scores.masked_fill_(~positive, 0).sum(dim=1),
            gap.sigmoid_().sum(dim=1),
        )

    def weights(self, rows: slice, scores: Tensor, results: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
        positive = self._positive(rows, scores)
        slope = (self.offset[rows, None] - scores).sigmoid_()
        return (grads[1][rows, None] - grads[0][rows, None] * slope).masked_fill_(~positive, 0)

    def _positive(self, rows: slice, scores: Tensor) -> Tensor:
        positive = torch.ones_like(scores, dtype=torch.bool)
        self.who.hide(positive, rows, False)
        return positive

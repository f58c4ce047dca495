"""Walks of anchors over a block of candidates: how the programs of the fused kernel are called, and in what pieces."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hardneg.losses.kernels.interface import RowLayout, Rule, constant
from hardneg.losses.kernels.triton import backward, forward, percentile_bands, score_tile, tile_sizes, wide_rows
from hardneg.losses.kernels.triton.row_sums import ANY, KINDS, Negatives, Positives

# Widest rows whose gradient is summed on the chip; for wider ones the derivatives of scores are written out in strips.
WIDEST = 256


class Pulls(NamedTuple):
    """How scores pull. factors: (A, 2), what anchors multiply exponentials with in ∂L/∂s, see `gradients.slopes` ·
    level: (A,), what scores are compared with first · largest: no |∂L/∂s| exceeds it, ()
    """

    factors: Tensor
    level: Tensor | None
    largest: Tensor | None


class Sums(NamedTuple):
    """What was summed slot by slot, (slots, A) each; number, peak: where they are not known beforehand."""

    heavy: Tensor
    light: Tensor
    number: Tensor | None = None
    peak: Tensor | None = None


@dataclass(frozen=True)
class Band:
    """Bounds of the scores kept, each a number, one per anchor (A,) in base 2, or None; ring: are they a ring's edges?

    first, last: (A,) the indices that break ties at the edges of a ring; 0 and beyond all where nothing ties
    """

    lower: float | Tensor | None = None
    upper: float | Tensor | None = None
    first: Tensor | None = None
    last: Tensor | None = None

    def flags(self) -> dict[str, Any]:
        """As programs take them."""
        return {
            "lower_": self.lower,
            "upper_": self.upper,
            "first_": self.first,
            "last_": self.last,
            "LOWER": _form(self.lower),
            "UPPER": _form(self.upper),
            "RING": self.first is not None,
        }


def _form(bound: float | Tensor | None) -> int:
    return 0 if bound is None else 2 if isinstance(bound, Tensor) else 1


def bands_and_sums(
    question: Negatives | Positives, scale: Tensor, anchors: Tensor, blocks: Sequence[Tensor]
) -> tuple[Band, Sums]:
    """The bands of a question, and what is summed over them."""
    edges, sums = band(question, scale, anchors, blocks)
    return edges, sums or partial_sums(question, scale, anchors, blocks, edges)


def band(
    question: Negatives | Positives, scale: Tensor, anchors: Tensor, blocks: Sequence[Tensor]
) -> tuple[Band, Sums | None]:
    """The bands of a question, and the sums over them where they are found on the way."""
    rule = question.rule
    lower, upper = (
        (bound * score_tile.LOG2E.value).contiguous() if isinstance(bound, Tensor) else bound
        for bound in (rule.lower, rule.upper)
    )
    if not rule.rings:
        return Band(lower, upper), None
    walk = Walk(question, scale, anchors, blocks[0], 0, Band(), False)
    # Not where more is to be done than to add exponentials: in float32, for instance, they are corrected.
    alone = lower is None and upper is None and not question.counted
    summed = alone and question.bounded and anchors.dtype != torch.float32
    found = percentile_bands.edges(walk, rule, summed)
    if found.sums is not None:
        return walk.banded(found).band, Sums(*found.sums)
    low, first, high, last = found.low, found.first, found.high, found.last
    # Where another bound is tighter than the ring's edge, no index matters.
    if lower is not None:
        lower = lower * score_tile.LOG2E.value if isinstance(lower, float) else lower
        first = torch.where(low < lower, 0, first)
        low = torch.maximum(low, torch.as_tensor(lower, device=low.device, dtype=low.dtype))
    if upper is not None:
        upper = upper * score_tile.LOG2E.value if isinstance(upper, float) else upper
        last = torch.where(high > upper, question.eligibility.columns, last)
        high = torch.minimum(high, torch.as_tensor(upper, device=high.device, dtype=high.dtype))
    return Band(low, high, first, last), None


@dataclass(frozen=True)
class Walk:
    """One block of candidates, from this column on, met by the anchors; ``mine``: the block is the anchors."""

    question: Negatives | Positives
    scale: Tensor
    anchors: Tensor
    block: Tensor
    column: int
    band: Band
    mine: bool

    @property
    def whole(self) -> bool:
        """Does a row fit on the chip, with its gradient?"""
        return self.anchors.shape[1] <= WIDEST

    @property
    def crossed(self) -> bool:
        """Do the anchors meet each other, but each half of them only the other?"""
        return self.question.eligibility.crossed

    def stretches(self, outer: bool) -> tuple[int, int]:
        """Into how many stretches the inner rows are cut, and how long each is."""
        rows, others = (self.anchors, self.block) if outer else (self.block, self.anchors)
        return tile_sizes.stretches_of(rows.shape[0], others.shape[0] // (2 if self.crossed else 1), rows.device)

    def eligibility(self) -> dict[str, Any]:
        """Who may be met, as programs take it."""
        eligibility = self.question.eligibility
        # Only the pool, which comes first, holds instances of the anchors.
        own = eligibility.own if self.column == 0 else None
        layout = own or RowLayout(1, 1, 0, 1, self.anchors.device)
        allowed = eligibility.allowed
        groups = eligibility.anchor_groups is not None
        return {
            "excluded": None if eligibility.excluded is None else eligibility.excluded.contiguous(),
            "allowed": None if allowed is None else allowed.contiguous().view(torch.uint8),
            "column": self.column,
            "columns": eligibility.columns,
            "batch": layout.batch,
            "offset": layout.offset,
            "whole": layout.global_batch,
            "named": 0 if eligibility.excluded is None else eligibility.excluded.shape[1],
            "allowed_rows": 1 if allowed is None else allowed.shape[0],
            "allowed_columns": 1 if allowed is None else allowed.shape[1],
            "OWN": own is not None,
            "EXCLUDED": eligibility.excluded is not None,
            "GROUPS": (2 if eligibility.same_group else 1) if groups else 0,
            "ALLOWED": allowed is not None,
        }

    def groups(self) -> tuple[Tensor | None, Tensor | None]:
        """Groups of the anchors and of the candidates of this block."""
        eligibility = self.question.eligibility
        if eligibility.anchor_groups is None or eligibility.candidate_groups is None:
            return None, None
        return eligibility.anchor_groups, eligibility.candidate_groups[self.column : self.column + len(self.block)]

    def common(self) -> dict[str, Any]:
        """What all programs take."""
        question = self.question
        # Where products run beside the tensor cores there is time for exponentials as exact as float32 allows.
        precision = precision_of(self.anchors.dtype)
        exact = self.anchors.dtype == torch.float32 and precision == "ieee"
        return {
            "scale_": self.scale,
            "tilt_": tilt(question.rule, self.scale.device),
            "level_": question.level if isinstance(question, Positives) else None,
            "PRECISION": precision,
            # A power of an exponential multiplies its error: exactly, each is made by itself.
            "KIND": ANY if exact and question.kind in KINDS.values() else question.kind,
            "BOUNDED": question.bounded,
            "EXACT": exact,
            **self.band.flags(),
            **self.eligibility(),
        }

    def banded(self, edges: percentile_bands.Edges) -> "Walk":
        """The same within the edges of a ring."""
        return replace(self, band=Band(edges.low, edges.high, edges.first, edges.last))

    def sums(
        self,
        heavy: Tensor,
        light: Tensor,
        count: Tensor | None,
        peak: Tensor | None,
        slot: int,
        parts: int,
        span: int,
        again: Tensor | None = None,
        strip: range | None = None,
    ) -> None:
        """Fill this block's slots, (slots, A) each.

        again: (A,) of tiles without such an anchor they stay · strip: add what is found where these anchors meet each
        other and those behind them, for both; see `programs.sums`
        """
        rows, width = self.anchors.shape
        anchor_groups, candidate_groups = self.groups()
        arguments = {
            **self.common(),
            "anchors_": self.anchors, "candidates_": self.block,
            "anchor_groups": anchor_groups, "candidate_groups": candidate_groups,
            "heavy_": heavy, "light_": light, "count_": count, "peak_": peak,
            "again_": again, "SOME": again is not None,
            "anchors": rows, "candidates": self.block.shape[0], "width": width,
            "anchor_stride": self.anchors.stride(0), "candidate_stride": self.block.stride(0),
            "base": 0, "skip": 0, "behind": 0, "slot": slot, "span": span,
            "COUNTED": self.question.counted, "MIRRORED": strip is not None,
            "CROSSED": self.crossed and strip is None,
        }  # fmt: skip
        if strip is None:
            name = "sums" if again is None else "again"
            tile_sizes.launch(forward.sums, arguments, rows, parts, width, self.whole, name)
            return
        skip = rows // 2 if self.crossed else strip.start
        arguments |= {"base": strip.start, "skip": skip, "behind": strip.stop}
        sums = "heavy_", "light_", "count_"
        tile_sizes.launch(forward.sums, arguments, len(strip), parts, width, self.whole, "mirrored", added=sums)

    def scores(self) -> Tensor:
        """Scores in base 2 of all anchors with the block, −inf where they may not meet, (A, N)."""
        (rows, width), columns = self.anchors.shape, len(self.block)
        anchor_groups, candidate_groups = self.groups()
        result = self.anchors.new_empty(rows, columns, dtype=torch.float32)
        arguments = {
            **self.eligibility(),
            "anchors_": self.anchors, "candidates_": self.block, "scale_": self.scale,
            "anchor_groups": anchor_groups, "candidate_groups": candidate_groups, "result": result,
            "anchors": rows, "candidates": columns, "width": width,
            "anchor_stride": self.anchors.stride(0), "candidate_stride": self.block.stride(0),
            "result_stride": columns, "span": tile_sizes.UNIT, "PRECISION": precision_of(self.anchors.dtype),
        }  # fmt: skip
        tile_sizes.launch(
            forward.scores, arguments, rows, math.ceil(columns / tile_sizes.UNIT), width, self.whole, "scores"
        )
        return result

    def anchors_gradient(self, pulls: Pulls, for_scale: bool) -> tuple[Tensor, Tensor | None]:
        """The gradient of the anchors, also as candidates if the block is ``mine``; and of the scale if asked for."""
        both = self.mine and self.question.mirrors
        part = self.gradient(pulls, outer=True, inner=both)
        share = self.scale_gradient(part, both) if for_scale else None
        if self.mine and not both:
            part += self.gradient(pulls, outer=False, inner=True)
        return part, share

    def gradients(self, pulls: Pulls, for_scale: bool) -> tuple[Tensor, Tensor | None]:
        """The gradients of the anchors and, behind them, of the block's rows, which are others; of the scale if asked
        for.
        """
        rows, width = self.anchors.shape
        both = self.anchors.new_empty(rows + len(self.block), width, dtype=torch.float32)
        part, other = both[:rows], both[rows:]
        if self.whole:
            self.gradient(pulls, outer=True, inner=False, into=part)
            self.gradient(pulls, outer=False, inner=True, into=other)
        else:  # derivatives of scores that are written out serve both
            self.gradient(pulls, outer=True, inner=False, into=part, other=other)
        return both, self.scale_gradient(part, False) if for_scale else None

    def scale_gradient(self, part: Tensor, both: bool) -> Tensor:
        """The gradient of the scale, given that of the anchors, or of anchors that are candidates, too (both)."""
        # s = scale·⟨a, c⟩; with both halves each pair was counted twice.
        return (self.anchors * part).sum() / self.scale * (0.5 if both else 1.0)

    def gradient(
        self, pulls: Pulls, outer: bool, inner: bool, into: Tensor | None = None, other: Tensor | None = None
    ) -> Tensor:
        """The gradient of the anchors (``outer``: in their role as anchors) or, if not, of the block's rows.

        into: where it is to be written · other: of wide rows, where that of those on the other side is
        """
        mine, others = (self.anchors, self.block) if outer else (self.block, self.anchors)
        anchor_groups, candidate_groups = self.groups()
        rows, width = mine.shape
        parts, span = self.stretches(outer)
        factor = None
        if pulls.largest is not None:
            factor = 2.0**13 / pulls.largest.clamp(min=1e-30)  # float16 ends at 2¹⁶, and two may be added
        arguments = {
            **self.common(),
            "outer": mine, "inner": others, "factor_": factor, "SCALED": factor is not None,
            "pairs": pulls.factors.view(torch.int64), "level_": pulls.level,
            "outer_groups": anchor_groups if outer else candidate_groups,
            "inner_groups": candidate_groups if outer else anchor_groups,
            "outer_rows": rows, "inner_rows": others.shape[0], "width": width,
            "outer_stride": mine.stride(0), "inner_stride": others.stride(0),
            "OUTER": outer, "INNER": inner, "CROSSED": self.crossed and self.whole,
        }  # fmt: skip
        if self.whole:
            into = mine.new_empty(rows, width, dtype=torch.float32) if into is None else into
            result = into if parts == 1 else mine.new_empty(parts, rows, width, dtype=torch.float32)
            arguments |= {"result": result, "base": 0, "skip": 0, "result_stride": width, "span": span}
            tile_sizes.launch(backward.gradient, arguments, rows, parts, width, True, "gradient")
            return into if parts == 1 else torch.sum(result, dim=0, out=into)
        return wide_rows.gradient(self, arguments, inner and outer, into, other)


def partial_sums(
    question: Negatives | Positives, scale: Tensor, anchors: Tensor, blocks: Sequence[Tensor], edges: Band
) -> Sums:
    """The sums over all blocks."""
    if len(blocks) == 1 and blocks[0] is anchors:
        walk = Walk(question, scale, anchors, anchors, 0, edges, True)
        if wide_rows.worth_mirroring(walk):
            return Sums(*wide_rows.mirrored_sums(walk))
    walks, column = [], 0
    for block in blocks:
        walks.append(Walk(question, scale, anchors, block, column, edges, False))
        column += block.shape[0]
    stretches = [walk.stretches(outer=True) for walk in walks]
    slots = sum(count for count, _ in stretches)
    heavy, light, count, peak = anchors.new_empty(4, slots, anchors.shape[0], dtype=torch.float32).unbind()
    if isinstance(question, Negatives) and question.counts is not None:
        count.zero_()[0] = question.counts
    slot = 0
    for walk, (parts, span) in zip(walks, stretches, strict=True):
        walk.sums(heavy, light, count, peak, slot, parts, span)
        slot += parts
    return Sums(heavy, light, count, peak)


def precision_of(dtype: torch.dtype) -> str:
    """How float32 numbers are multiplied: exactly, or as tf32 where PyTorch's own products may be."""
    if dtype != torch.float32:
        return "ieee"
    # Since PyTorch 2.9 the older question is an error where the newer setting was used.
    chosen = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    allowed = torch.get_float32_matmul_precision() != "highest" if chosen is None else chosen == "tf32"
    return "tf32" if allowed else "ieee"


def tilt(rule: Rule, device: torch.device) -> Tensor:
    """The β of a rule as programs read it, ()."""
    return rule.tilt.float() if isinstance(rule.tilt, Tensor) else constant(float(rule.tilt), torch.float32, device)

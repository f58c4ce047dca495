"""Passes of the anchors over blocks of candidates: kernel arguments, launches, and the split of the work into parts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hardneg.losses.kernels.interface import RowLayout, Rule, constant
from hardneg.losses.kernels.triton import backward, forward, percentile_bands, score_tile, tile_sizes, wide_rows
from hardneg.losses.kernels.triton.row_sums import ANY, KINDS, NegativeSums, PositiveSums

# Widest rows whose gradient is accumulated in registers; for wider ones ∂L/∂s is stored in strips.
WIDEST = 256


class Coefficients(NamedTuple):
    """Coefficients of the exponentials in ∂L/∂s.

    values: (A, 2), see `backward.score_coefficients` · level: (A,), subtracted from scores first, if any · largest:
    upper bound of all |∂L/∂s|, ()
    """

    values: Tensor
    level: Tensor | None
    largest: Tensor | None


class Sums(NamedTuple):
    """Sums per slot, (slots, A) each; counts, slot_max: if not known beforehand."""

    tilted_sum: Tensor
    weight_sum: Tensor
    counts: Tensor | None = None
    slot_max: Tensor | None = None


@dataclass(frozen=True)
class Band:
    """Bounds of the scores that are kept: each a number, one per anchor (A,) in base 2, or None.

    first, last: (A,) for the edges of a ring, the indices that break ties at the lower and the upper bound; 0 and
    beyond all candidates if nothing ties
    """

    lower: float | Tensor | None = None
    upper: float | Tensor | None = None
    first: Tensor | None = None
    last: Tensor | None = None

    def flags(self) -> dict[str, Any]:
        """The arguments of a kernel that describe the band."""
        return {
            "lower_": self.lower,
            "upper_": self.upper,
            "first_": self.first,
            "last_": self.last,
            "LOWER": _bound_form(self.lower),
            "UPPER": _bound_form(self.upper),
            "RING": self.first is not None,
        }


def _bound_form(bound: float | Tensor | None) -> int:
    return 0 if bound is None else 2 if isinstance(bound, Tensor) else 1


def bands_and_sums(
    spec: NegativeSums | PositiveSums, scale: Tensor, anchors: Tensor, blocks: Sequence[Tensor]
) -> tuple[Band, Sums]:
    """The bands of all anchors, and the sums over them."""
    edges, sums = band(spec, scale, anchors, blocks)
    return edges, sums or partial_sums(spec, scale, anchors, blocks, edges)


def band(
    spec: NegativeSums | PositiveSums, scale: Tensor, anchors: Tensor, blocks: Sequence[Tensor]
) -> tuple[Band, Sums | None]:
    """The bands of all anchors, and the sums over them if these are computed in the same pass."""
    rule = spec.rule
    lower, upper = (
        (bound * score_tile.LOG2E.value).contiguous() if isinstance(bound, Tensor) else bound
        for bound in (rule.lower, rule.upper)
    )
    if not rule.rings:
        return Band(lower, upper), None
    block_pass = BlockPass(spec, scale, anchors, blocks[0], 0, Band(), False)
    # Not if the sums need more than additions: in float32, for instance, rounding errors are corrected.
    ring_only = lower is None and upper is None and not spec.counted
    summed = ring_only and spec.bounded and anchors.dtype != torch.float32
    found = percentile_bands.edges(block_pass, rule, summed)
    if found.sums is not None:
        return block_pass.banded(found).band, Sums(*found.sums)
    low, first, high, last = found.low, found.first, found.high, found.last
    # If another bound is tighter than the edge of the ring, its index has no effect.
    if lower is not None:
        lower = lower * score_tile.LOG2E.value if isinstance(lower, float) else lower
        first = torch.where(low < lower, 0, first)
        low = torch.maximum(low, torch.as_tensor(lower, device=low.device, dtype=low.dtype))
    if upper is not None:
        upper = upper * score_tile.LOG2E.value if isinstance(upper, float) else upper
        last = torch.where(high > upper, spec.eligibility.columns, last)
        high = torch.minimum(high, torch.as_tensor(upper, device=high.device, dtype=high.dtype))
    return Band(low, high, first, last), None


@dataclass(frozen=True)
class BlockPass:
    """One pass of the anchors over a block of candidates.

    column: index of the first candidate of the block among all candidates · self_block: whether the candidates of the
    block are the anchors themselves
    """

    spec: NegativeSums | PositiveSums
    scale: Tensor
    anchors: Tensor
    block: Tensor
    column: int
    band: Band
    self_block: bool

    @property
    def whole(self) -> bool:
        """Whether a row and its gradient fit in a tile."""
        return self.anchors.shape[1] <= WIDEST

    @property
    def crossed(self) -> bool:
        """Whether anchors and candidates are the same rows, and each half is compared only with the other half."""
        return self.spec.eligibility.crossed

    def splits(self, outer: bool) -> tuple[int, int]:
        """The number of parts that the inner rows are split into, and the length of each."""
        rows, inner_vectors = (self.anchors, self.block) if outer else (self.block, self.anchors)
        return tile_sizes.split_inner_rows(
            rows.shape[0], inner_vectors.shape[0] // (2 if self.crossed else 1), rows.device
        )

    def eligibility(self) -> dict[str, Any]:
        """The arguments of a kernel that describe which candidates are eligible."""
        eligibility = self.spec.eligibility
        # Only the first block, the batch, holds instances of the anchors.
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
            "num_excluded": 0 if eligibility.excluded is None else eligibility.excluded.shape[1],
            "allowed_rows": 1 if allowed is None else allowed.shape[0],
            "allowed_columns": 1 if allowed is None else allowed.shape[1],
            "OWN": own is not None,
            "EXCLUDED": eligibility.excluded is not None,
            "GROUPS": (2 if eligibility.same_group else 1) if groups else 0,
            "ALLOWED": allowed is not None,
        }

    def groups(self) -> tuple[Tensor | None, Tensor | None]:
        """Groups of the anchors and of the candidates of this block."""
        eligibility = self.spec.eligibility
        if eligibility.anchor_groups is None or eligibility.candidate_groups is None:
            return None, None
        return eligibility.anchor_groups, eligibility.candidate_groups[self.column : self.column + len(self.block)]

    def common(self) -> dict[str, Any]:
        """The arguments that all kernels take."""
        spec = self.spec
        # Exact float32 products do not use tensor cores; next to them, fully accurate exponentials take no extra time.
        precision = precision_of(self.anchors.dtype)
        exact = self.anchors.dtype == torch.float32 and precision == "ieee"
        return {
            "scale_": self.scale,
            "tilt_": tilt(spec.rule, self.scale.device),
            "level_": spec.level if isinstance(spec, PositiveSums) else None,
            "PRECISION": precision,
            # A power of an exponential multiplies its error, so in the exact mode each exponential is computed
            # separately.
            "KIND": ANY if exact and spec.kind in KINDS.values() else spec.kind,
            "BOUNDED": spec.bounded,
            "EXACT": exact,
            **self.band.flags(),
            **self.eligibility(),
        }

    def banded(self, edges: percentile_bands.Edges) -> "BlockPass":
        """The same pass, restricted to the edges of a ring."""
        return replace(self, band=Band(edges.low, edges.high, edges.first, edges.last))

    def sums(
        self,
        tilted_sum: Tensor,
        weight_sum: Tensor,
        count: Tensor | None,
        slot_max: Tensor | None,
        slot: int,
        parts: int,
        span: int,
        recompute: Tensor | None = None,
        strip: range | None = None,
    ) -> None:
        """Fills the slots of this block, (slots, A) each.

        recompute: (A,) only tiles with such an anchor are computed, the others stay · strip: add the sums of these
        anchors over themselves and the rows after them, for both sides of each pair; see `forward.sums`
        """
        rows, width = self.anchors.shape
        anchor_groups, candidate_groups = self.groups()
        arguments = {
            **self.common(),
            "anchors_": self.anchors, "candidates_": self.block,
            "anchor_groups": anchor_groups, "candidate_groups": candidate_groups,
            "tilted_sum_": tilted_sum, "weight_sum_": weight_sum, "count_": count, "slot_max_": slot_max,
            "recompute_": recompute, "RECOMPUTE": recompute is not None,
            "anchors": rows, "candidates": self.block.shape[0], "width": width,
            "anchor_stride": self.anchors.stride(0), "candidate_stride": self.block.stride(0),
            "base": 0, "skip": 0, "strip_end": 0, "slot": slot, "span": span,
            "COUNTED": self.spec.counted, "SYMMETRIC": strip is not None,
            "CROSSED": self.crossed and strip is None,
        }  # fmt: skip
        if strip is None:
            name = "sums" if recompute is None else "recompute"
            tile_sizes.launch(forward.sums, arguments, rows, parts, width, self.whole, name)
            return
        skip = rows // 2 if self.crossed else strip.start
        arguments |= {"base": strip.start, "skip": skip, "strip_end": strip.stop}
        sums = "tilted_sum_", "weight_sum_", "count_"
        tile_sizes.launch(forward.sums, arguments, len(strip), parts, width, self.whole, "symmetric", accumulated=sums)

    def scores(self) -> Tensor:
        """Scores in base 2 of all anchors with the block, −inf where a candidate is not eligible, (A, N)."""
        (rows, width), columns = self.anchors.shape, len(self.block)
        anchor_groups, candidate_groups = self.groups()
        result = self.anchors.new_empty(rows, columns, dtype=torch.float32)
        arguments = {
            **self.eligibility(),
            "anchors_": self.anchors, "candidates_": self.block, "scale_": self.scale,
            "anchor_groups": anchor_groups, "candidate_groups": candidate_groups, "result": result,
            "anchors": rows, "candidates": columns, "width": width,
            "anchor_stride": self.anchors.stride(0), "candidate_stride": self.block.stride(0),
            "result_stride": columns, "span": tile_sizes.PART_MULTIPLE, "PRECISION": precision_of(self.anchors.dtype),
        }  # fmt: skip
        tile_sizes.launch(
            forward.scores, arguments, rows, math.ceil(columns / tile_sizes.PART_MULTIPLE), width, self.whole, "scores"
        )
        return result

    def anchors_gradient(self, coefficients: Coefficients, for_scale: bool) -> tuple[Tensor, Tensor | None]:
        """The gradient of the anchors, also as candidates if ``self_block``; and of the scale if ``for_scale``."""
        both = self.self_block and self.spec.symmetric
        part = self.gradient(coefficients, outer=True, inner=both)
        share = self.scale_gradient(part, both) if for_scale else None
        if self.self_block and not both:
            part += self.gradient(coefficients, outer=False, inner=True)
        return part, share

    def gradients(self, coefficients: Coefficients, for_scale: bool) -> tuple[Tensor, Tensor | None]:
        """The gradients of the anchors and of the rows of another block, concatenated; and of the scale."""
        rows, width = self.anchors.shape
        both = self.anchors.new_empty(rows + len(self.block), width, dtype=torch.float32)
        part, other = both[:rows], both[rows:]
        if self.whole:
            self.gradient(coefficients, outer=True, inner=False, into=part)
            self.gradient(coefficients, outer=False, inner=True, into=other)
        else:  # the stored ∂L/∂s is used for both
            self.gradient(coefficients, outer=True, inner=False, into=part, other=other)
        return both, self.scale_gradient(part, False) if for_scale else None

    def scale_gradient(self, part: Tensor, both: bool) -> Tensor:
        """The gradient of the scale, given that of the anchors; both: it includes that of the anchors as candidates."""
        # s = scale·⟨a, c⟩; with both derivatives each pair is counted twice.
        return (self.anchors * part).sum() / self.scale * (0.5 if both else 1.0)

    def gradient(
        self,
        coefficients: Coefficients,
        outer: bool,
        inner: bool,
        into: Tensor | None = None,
        other: Tensor | None = None,
    ) -> Tensor:
        """The gradient of the anchors (``outer``) or of the block's rows (not ``outer``).

        inner: include the derivative of each score as an entry of the row of its inner anchor · into: output · other:
        for wide rows, output of the gradient of the inner rows
        """
        outer_vectors, inner_vectors = (self.anchors, self.block) if outer else (self.block, self.anchors)
        anchor_groups, candidate_groups = self.groups()
        rows, width = outer_vectors.shape
        parts, span = self.splits(outer)
        factor = None
        if coefficients.largest is not None:
            factor = 2.0**13 / coefficients.largest.clamp(min=1e-30)  # a sum of two is below float16's limit, 2¹⁶
        arguments = {
            **self.common(),
            "outer": outer_vectors, "inner": inner_vectors, "factor_": factor, "SCALED": factor is not None,
            "packed": coefficients.values.view(torch.int64), "level_": coefficients.level,
            "outer_groups": anchor_groups if outer else candidate_groups,
            "inner_groups": candidate_groups if outer else anchor_groups,
            "outer_rows": rows, "inner_rows": inner_vectors.shape[0], "width": width,
            "outer_stride": outer_vectors.stride(0), "inner_stride": inner_vectors.stride(0),
            "OUTER": outer, "INNER": inner, "CROSSED": self.crossed and self.whole,
        }  # fmt: skip
        if self.whole:
            into = outer_vectors.new_empty(rows, width, dtype=torch.float32) if into is None else into
            result = into if parts == 1 else outer_vectors.new_empty(parts, rows, width, dtype=torch.float32)
            arguments |= {"result": result, "base": 0, "skip": 0, "result_stride": width, "span": span}
            tile_sizes.launch(backward.gradient, arguments, rows, parts, width, True, "gradient")
            return into if parts == 1 else torch.sum(result, dim=0, out=into)
        return wide_rows.gradient(self, arguments, inner and outer, into, other)


def partial_sums(
    spec: NegativeSums | PositiveSums, scale: Tensor, anchors: Tensor, blocks: Sequence[Tensor], edges: Band
) -> Sums:
    """The sums over all blocks, one slot per part."""
    if len(blocks) == 1 and blocks[0] is anchors:
        block_pass = BlockPass(spec, scale, anchors, anchors, 0, edges, True)
        if wide_rows.uses_symmetry(block_pass):
            return Sums(*wide_rows.symmetric_sums(block_pass))
    passes, column = [], 0
    for block in blocks:
        passes.append(BlockPass(spec, scale, anchors, block, column, edges, False))
        column += block.shape[0]
    splits = [block_pass.splits(outer=True) for block_pass in passes]
    slots = sum(parts for parts, _ in splits)
    tilted_sum, weight_sum, count, slot_max = anchors.new_empty(
        4, slots, anchors.shape[0], dtype=torch.float32
    ).unbind()
    if isinstance(spec, NegativeSums) and spec.counts is not None:
        count.zero_()[0] = spec.counts
    slot = 0
    for block_pass, (parts, span) in zip(passes, splits, strict=True):
        block_pass.sums(tilted_sum, weight_sum, count, slot_max, slot, parts, span)
        slot += parts
    return Sums(tilted_sum, weight_sum, count, slot_max)


def precision_of(dtype: torch.dtype) -> str:
    """The precision of float32 products: exact, or tf32 if PyTorch is allowed to use it."""
    if dtype != torch.float32:
        return "ieee"
    # Since PyTorch 2.9 the older getter raises if the newer setting was used.
    chosen = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    allowed = torch.get_float32_matmul_precision() != "highest" if chosen is None else chosen == "tf32"
    return "tf32" if allowed else "ieee"


def tilt(rule: Rule, device: torch.device) -> Tensor:
    """The β of a rule as a tensor for the kernels, ()."""
    return rule.tilt.float() if isinstance(rule.tilt, Tensor) else constant(float(rule.tilt), torch.float32, device)

"""Passes of anchors over blocks of candidates: launches of the kernels, and their split into parts.

Rows of up to ``WIDEST`` numbers, with their gradient, fit in the registers of a program. For wider ones the backward
pass stores ∂L/∂s in strips, each followed by matrix products. If anchors and candidates are the same rows, a strip of
wide rows begins at the diagonal (or, if the halves are crossed, covers the first half), and each score is used for both
of its anchors: little more than half of the scores are computed. The forward pass does so for many rows of any width.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hardneg.losses.kernels.interface import RowLayout, Rule, constant
from hardneg.losses.kernels.strips import SAFE_EXPONENT
from hardneg.losses.kernels.triton import backward, forward, percentile_bands, score_tile
from hardneg.losses.kernels.triton.backward import Coefficients
from hardneg.losses.kernels.triton.forward import Slots
from hardneg.losses.kernels.triton.launch import PART_MULTIPLE, launch_tiled, num_programs, split_inner_rows
from hardneg.losses.kernels.triton.percentile_bands import add_product
from hardneg.losses.kernels.triton.problem import ANY, KINDS, LEAST_TILT, NONE, Problem
from hardneg.losses.kernels.triton.score_tile import Bounds, Mask, Numbers, Sizes, Traits

WIDEST = 256

# Size of a strip of ∂L/∂s, in addition to seven bytes per element of the rows.
STRIP_BYTES = 48 << 20

# Maximum number of rows of a strip at the diagonal: the entries on the other side of it are computed but not used.
MAX_STRIP_ROWS = 4096

# The minimum number of anchors for which it pays to compute each score once in the forward pass, and how many programs
# share the blocks of anchors then.
MIN_SYMMETRIC_ROWS, SYMMETRIC_BLOCKS = 16384, 33


@dataclass(frozen=True)
class BlockPass:
    """One pass of the anchors over a block of candidates.

    column: index of the first candidate of the block among all candidates · self_block: whether the candidates of the
    block are the anchors themselves
    """

    problem: Problem
    scale: Tensor
    anchors: Tensor
    block: Tensor
    column: int = 0
    self_block: bool = False

    @cached_property
    def numbers(self) -> Numbers:
        beta, row_max = tilt(self.problem.rule, self.scale.device), None
        if self.guarded:
            bounded = (self.scale * (beta + 1) <= SAFE_EXPONENT) & ((beta > LEAST_TILT) | (self.problem.kind == NONE))
            row_max = torch.zeros_like(self.scale).masked_fill_(~bounded, -torch.inf)
        return Numbers(self.scale, beta, row_max)

    @cached_property
    def bounds(self) -> Bounds:
        rule = self.problem.rule
        return Bounds(*(
            (bound * score_tile.LOG2E.value).contiguous() if isinstance(bound, Tensor) else bound
            for bound in (rule.lower, rule.upper)
        ))  # fmt: skip

    @property
    def whole(self) -> bool:
        """Whether a row and its gradient fit in a tile."""
        return self.anchors.shape[1] <= WIDEST

    @property
    def crossed(self) -> bool:
        """Whether anchors and candidates are the same rows, and each half is compared only with the other half."""
        return self.problem.eligibility.crossed

    @cached_property
    def symmetric(self) -> bool:
        """Whether the forward pass computes each score once for both of its anchors: for many rows, if bounded."""
        problem, rows = self.problem, self.block.shape[0]
        if not self.self_block or problem.level is not None or rows < MIN_SYMMETRIC_ROWS:
            return False
        alone = rows == problem.eligibility.columns and problem.eligibility.excluded is None
        return alone and problem.symmetric and (problem.bounded or problem.may_be_bounded)

    @property
    def guarded(self) -> bool:
        """Whether only the device knows if exponentials are bounded: kernels for either case are launched."""
        return self.symmetric and not self.problem.bounded

    def splits(self, outer: bool = True) -> tuple[int, int]:
        """The number of parts that the inner rows are split into, and the length of each."""
        rows, inner = (self.anchors, self.block) if outer else (self.block, self.anchors)
        return split_inner_rows(rows.shape[0], inner.shape[0] // (2 if self.crossed else 1), rows.device)

    def mask(self) -> Mask:
        """Which candidates are eligible, for a kernel."""
        eligibility, (start, end) = self.problem.eligibility, (self.column, self.column + self.block.shape[0])
        layout = self._own or RowLayout(1, 1, 0, 1, self.anchors.device)
        allowed, excluded, groups = eligibility.allowed, eligibility.excluded, eligibility.candidate_groups
        if groups is not None and end - start < groups.shape[0]:
            groups = groups[start:end]
        return Mask(
            column=self.column,
            columns=eligibility.columns,
            batch=layout.batch,
            offset=layout.offset,
            whole=layout.global_batch,
            excluded=None if excluded is None else excluded.contiguous(),
            num_excluded=0 if excluded is None else excluded.shape[1],
            anchor_groups=eligibility.anchor_groups,
            candidate_groups=groups,
            allowed=None if allowed is None else allowed.contiguous().view(torch.uint8),
            allowed_rows=1 if allowed is None else allowed.shape[0],
            allowed_columns=1 if allowed is None else allowed.shape[1],
        )

    @cached_property
    def traits(self) -> Traits:
        """What the kernels are compiled for."""
        problem, eligibility = self.problem, self.problem.eligibility
        # Exact float32 products do not use tensor cores; next to them, fully accurate exponentials take no extra time.
        precision = precision_of(self.anchors.dtype)
        exact = self.anchors.dtype == torch.float32 and precision == "ieee"
        groups = 0
        if eligibility.anchor_groups is not None:
            groups = (2 if eligibility.same_group else 1) + (2 if problem.by_label else 0)
        return Traits(
            # A power of an exponential multiplies its error, so exact exponentials are computed separately.
            kind=ANY if exact and problem.kind in KINDS.values() else problem.kind,
            bounded=problem.bounded,
            guarded=self.guarded,
            exact=exact,
            counted=problem.counted,
            own=self._own is not None and groups != 4,
            excluded=eligibility.excluded is not None,
            groups=groups,
            allowed=eligibility.allowed is not None,
            lower=_bound_form(problem.rule.lower),
            upper=_bound_form(problem.rule.upper),
            precision=precision,
        )

    @property
    def _own(self) -> RowLayout | None:
        """The layout of the batch, which only the first block holds."""
        return self.problem.eligibility.own if self.column == 0 else None

    def _arguments(self, outer: Tensor, inner: Tensor) -> dict[str, Any]:
        sizes = Sizes(outer.shape[0], inner.shape[0], outer.shape[1], outer.stride(0), inner.stride(0))
        return {
            "outer": outer, "inner": inner, "numbers": self.numbers, "sizes": sizes, "mask": self.mask(),
            "bounds": self.bounds, "skip": 0, "T": self.traits,
        }  # fmt: skip

    def sums(self, slots: Slots, slot: int, parts: int, span: int) -> None:
        """Fills the slots of this block."""
        arguments = self._arguments(self.anchors, self.block)
        arguments |= {
            "level_": self.problem.level, "slots": slots, "slot": slot, "base": 0, "span": span,
            "CROSSED": self.crossed,
        }  # fmt: skip
        halves = 2 if self.crossed else 1
        launch_tiled(forward.sums, arguments, self.anchors.shape[0], parts, self.whole, "sums", halves)

    def symmetric_sums(self) -> Slots:
        """The sums, where each score is computed once and added for both of its anchors."""
        problem, rows = self.problem, self.anchors.shape[0]
        half = rows // 2 if self.crossed else 0
        parts = max(1, num_programs(self.anchors.device) // (2 * SYMMETRIC_BLOCKS))
        used = 3 if problem.counted or problem.counts is not None else 2 if problem.kind != NONE else 1
        found = self.anchors.new_zeros(used + self.guarded, SYMMETRIC_BLOCKS + parts, rows, dtype=torch.float32)
        slots = Slots(found[0], found[min(1, used - 1)], found[used - 1], found[-1])  # the maximum only if guarded
        if self.numbers.row_max is not None:
            slots.maximum.fill_(self.numbers.row_max)
        arguments = self._arguments(self.anchors, self.block)
        arguments |= {"slots": slots, "plane": found.stride(0), "skip": half, "outer_end": half or rows}
        arguments["T"] = self.traits._replace(bounded=True)
        name = "symmetric" if problem.eligibility.anchor_groups is None else "labelled"
        launch_tiled(forward.symmetric_sums, arguments, half or rows, parts, self.whole, name, blocks=SYMMETRIC_BLOCKS)
        if problem.counts is not None:
            slots.counts[0] = problem.counts
        return slots

    def gradients(
        self, coefficients: Coefficients, for_scale: bool, for_block: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The gradients of the anchors, also as candidates if ``self_block``; of another block's rows; of the scale."""
        both = self.self_block and self.problem.symmetric
        by_columns = for_block or (self.self_block and not both)
        other = self.block.new_empty(self.block.shape, dtype=torch.float32) if by_columns and not self.whole else None
        part = self.gradient(coefficients, outer=True, inner=both, other=other)
        share = self.scale_gradient(part, both) if for_scale else None
        if by_columns and self.whole:
            other = self.gradient(coefficients, outer=False, inner=True)
        if self.self_block and other is not None:
            part, other = part.add_(other), None
        return part, other, share

    def scale_gradient(self, part: Tensor, both: bool) -> Tensor:
        """The gradient of the scale, given that of the anchors; both: it includes that of the anchors as candidates."""
        # s = scale·⟨a, c⟩; with both derivatives each pair is counted twice.
        return (self.anchors * part).sum() / self.scale * (0.5 if both else 1.0)

    def gradient(self, coefficients: Coefficients, outer: bool, inner: bool, other: Tensor | None = None) -> Tensor:
        """The gradient of the anchors (``outer``) or of the block's rows (not ``outer``).

        inner: include the derivative of each score as an entry of the row of its inner anchor · other: for wide rows,
        output of the gradient of the inner rows
        """
        rows = self.anchors if outer else self.block
        arguments = self._arguments(rows, self.block if outer else self.anchors)
        arguments |= {
            "coefficients": coefficients, "OUTER": outer, "INNER": inner, "SCALED": coefficients.factor is not None,
            "base": 0, "CROSSED": self.crossed and self.whole,
        }  # fmt: skip
        if not self.whole:
            return self._gradient_in_strips(arguments, inner and outer, other)
        parts, span = self.splits(outer)
        result = rows.new_empty(parts, *rows.shape, dtype=torch.float32)
        arguments |= {"result": result, "result_stride": rows.shape[1], "span": span}
        halves = 2 if self.crossed else 1
        self._launch_gradient(arguments, rows.shape[0], parts, "gradient", halves)
        return result[0] if parts == 1 else result.sum(dim=0)

    def _launch_gradient(self, arguments: dict[str, Any], rows: int, parts: int, name: str, halves: int = 1) -> None:
        launch_tiled(backward.gradient, arguments, rows, parts, self.whole, name, halves)
        if self.guarded:
            bounded = self.traits._replace(bounded=True)
            launch_tiled(backward.gradient, arguments | {"T": bounded}, rows, parts, self.whole, name, halves)

    def _gradient_in_strips(self, arguments: dict[str, Any], both: bool, other: Tensor | None) -> Tensor:
        """The same for wide rows. both: use ∂L/∂s for both anchors of a pair"""
        assert both or not self.crossed
        outer, inner, factor = arguments["outer"], arguments["inner"], arguments["coefficients"].factor
        rows, width = outer.shape
        half = rows // 2 if self.crossed else 0  # first inner row, if not at the diagonal
        diagonal = both and not self.crossed
        room = min(STRIP_BYTES + 7 * rows * width, 1 << 31) // outer.element_size()
        strips = list(strips_of(half or rows, inner.shape[0] - half, room, diagonal))
        strip = outer.new_empty(max((end - base) * stride for base, end, stride in strips))
        scale = self.scale if factor is None else self.scale / factor
        result: Tensor = outer.new_zeros(outer.shape, dtype=torch.float32)
        if other is not None:
            other.zero_()
        inner_result = result[half:] if self.crossed else other  # gradient of the inner rows of all strips
        for base, end, stride in strips:
            skip = base if diagonal else half
            parts, span = split_inner_rows(end - base, inner.shape[0] - skip, outer.device)
            arguments |= {
                "result": strip, "base": base, "skip": skip, "result_stride": stride, "span": span,
                "sizes": arguments["sizes"]._replace(outer=end),
            }  # fmt: skip
            self._launch_gradient(arguments, end - base, parts, "strip")
            weights = strip[: (end - base) * stride].view(-1, stride)[:, : inner.shape[0] - skip]  # (R, N − skip)
            with torch.autocast(outer.device.type, enabled=False):
                add_product(result[base:end], weights, inner[skip:])
                if inner_result is not None:
                    add_product(inner_result, weights.T, outer[base:end])
                elif both and end < rows:
                    add_product(result[end:], weights[:, end - base :].T, outer[base:end])
        if other is not None:
            other.mul_(scale)
        return result.mul_(scale)


def make_passes(problem: Problem, scale: Tensor, anchors: Tensor, blocks: Sequence[Tensor | None]) -> list[BlockPass]:
    """The passes over all blocks; a block of None is the anchors."""
    passes, column = [], 0
    for block in blocks:
        candidates = anchors if block is None else block
        passes.append(BlockPass(problem, scale, anchors, candidates, column, block is None))
        column += candidates.shape[0]
    return passes


def compute_sums(passes: Sequence[BlockPass]) -> tuple[Slots, Tensor | None]:
    """The sums of all blocks, one slot per part; and the edges of the bands, if there are rings."""
    first = passes[0]
    rows, problem = first.anchors.shape[0], first.problem

    def new(slots: int) -> Slots:
        return Slots(*first.anchors.new_empty(4, slots, rows, dtype=torch.float32).unbind())

    if problem.rule.rings:
        slots = new(1)
        return slots, percentile_bands.edges_and_sums(passes, slots)
    if first.symmetric and not first.guarded:
        return first.symmetric_sums(), None
    splits = [block_pass.splits() for block_pass in passes]
    slots = first.symmetric_sums() if first.guarded else new(sum(parts for parts, _ in splits))
    if problem.counts is not None:
        slots.counts.zero_()[0] = problem.counts
    slot = 0
    for block_pass, (parts, span) in zip(passes, splits, strict=True):
        block_pass.sums(slots, slot, parts, span)
        slot += parts
    return slots, None


def compute_gradients(
    passes: Sequence[BlockPass],
    edges: Tensor | None,
    coefficients: Coefficients,
    for_scale: bool,
    for_anchors: bool,
    for_blocks: Sequence[bool],
) -> tuple[Tensor | None, list[Tensor | None], Tensor | None]:
    """The gradients of the anchors, of all blocks (None where they are the anchors) and of the scale, if wanted.

    edges: of the bands, if there are rings
    """
    d_anchors: Tensor | None = None
    d_scale: Tensor | None = None
    d_blocks: list[Tensor | None] = []
    if edges is not None:
        wanted = [need or block_pass.self_block for block_pass, need in zip(passes, for_blocks, strict=True)]
        d_anchors, found = percentile_bands.gradients(passes, edges, coefficients, wanted)
        d_scale = passes[0].scale_gradient(d_anchors, False) if for_scale else None
        for block_pass, need, part in zip(passes, for_blocks, found, strict=True):
            d_anchors = d_anchors.add_(part) if block_pass.self_block else d_anchors
            d_blocks.append(part if need and not block_pass.self_block else None)
        return d_anchors, d_blocks, d_scale
    for block_pass, need in zip(passes, for_blocks, strict=True):
        d_block: Tensor | None = None
        for_block = need and not block_pass.self_block
        if for_anchors or for_scale:
            part, d_block, share = block_pass.gradients(coefficients, for_scale, for_block)
            d_anchors = part if d_anchors is None else d_anchors.add_(part)
            d_scale = share if d_scale is None or share is None else d_scale + share
        elif for_block:
            d_block = block_pass.gradient(coefficients, outer=False, inner=True)
        d_blocks.append(d_block)
    return d_anchors, d_blocks, d_scale


def strips_of(rows: int, columns: int, room: int, diagonal: bool) -> Iterator[tuple[int, int, int]]:
    """First row, end and stride of strips of ∂L/∂s, each of at most ``room`` elements or of a single row.

    diagonal: a strip begins at the diagonal, so later ones are narrower and may have more rows

    Examples:
        >>> list(strips_of(1024, 1024, 300_000, diagonal=True))
        [(0, 256, 1024), (256, 512, 768), (512, 1024, 512)]
        >>> list(strips_of(300, 1024, 600_000, diagonal=False))
        [(0, 300, 1024)]
    """
    base = 0
    while base < rows:
        # Rows of a strip are aligned for tensor cores.
        stride = math.ceil((columns - base if diagonal else columns) / 16) * 16
        height = max(1, room // stride)
        height -= height % PART_MULTIPLE if height > PART_MULTIPLE else 0
        height = min(height, MAX_STRIP_ROWS if diagonal else rows)
        yield base, min(base + height, rows), stride
        base += height


def _bound_form(bound: float | Tensor | None) -> int:
    return 0 if bound is None else 2 if isinstance(bound, Tensor) else 1


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

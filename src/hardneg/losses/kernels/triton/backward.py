"""Triton kernels of the backward pass: recompute tiles of scores, turn them into ∂L/∂s, multiply with embeddings.

The gradient in METHODS.md, section 1. If anchors and candidates are the same rows (``OUTER and INNER``), both
derivatives of a pair are computed from one tile.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from hardneg.losses.kernels.triton.score_tile import (
    HALF,
    LOG2E,
    NONE,
    ONE,
    POSITIVES,
    TWO,
    exponentials,
    in_bounds,
    inner_products,
    load_bounds,
    load_rows,
    mask_scores,
    may_need_mask,
    rounding_error,
    row_ranges,
    score_prescale,
)


class Coefficients(NamedTuple):
    """Coefficients of the exponentials of each anchor in ∂L/∂s.

    packed: (A,) int64, two float32 numbers each: of e^{(β+1)s} and e^{βs}; over positives p, −σ(level − p) and 1 ·
    level: (A,), subtracted from scores in base 2 first if they are not bounded; of positives, in base e · factor: (),
    by which ∂L/∂s is multiplied before it is rounded to float16, or None
    """

    packed: Tensor
    level: Tensor | None
    factor: Tensor | None


@triton.jit
def score_coefficients(for_mean, for_weight, totals, numbers, coefficients, anchors, BLOCK: tl.constexpr,
                       THROUGH: tl.constexpr, WEIGHED: tl.constexpr):  # fmt: skip
    """Coefficients of the two exponentials of each anchor in ∂L/∂s, from the gradients of its log-sums.

    (β+1)·softmax_{β+1} and −β·softmax_β; with detached weights (not THROUGH) 1 and 0 · coefficients: (anchors, 2)
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < anchors
    tilt = tl.load(numbers.tilt)
    nonempty = tl.load(totals.counts + i, mask=inside, other=0.0) > 0
    mean = tl.load(for_mean + i, mask=inside, other=0.0)
    weight = tl.zeros((BLOCK,), tl.float32)
    if WEIGHED:
        weight += tl.load(for_weight + i, mask=inside, other=0.0)
    # Empty support: zero gradient.
    tilted_sum = tl.where(nonempty, tl.load(totals.tilted_sum + i, mask=inside, other=1.0), 1.0)
    weight_sum = tl.where(nonempty, tl.load(totals.weight_sum + i, mask=inside, other=1.0), 1.0)
    tilted_coef = tl.where(nonempty, mean, 0.0)
    weight_coef = tl.zeros((BLOCK,), tl.float32)
    if THROUGH:
        tilted_coef = tilted_coef * (tilt + 1)
        weight_coef = tl.where(nonempty, weight - mean, 0.0) * tilt
    tl.store(coefficients + 2 * i, tl.div_rn(tilted_coef, tilted_sum), mask=inside)
    tl.store(coefficients + 2 * i + 1, tl.div_rn(weight_coef, weight_sum), mask=inside)


@triton.jit
def load_coefficients(coefficients, i, inside, factor, T: tl.constexpr):
    """Both coefficients of anchors i, times ``factor``, and the number that is subtracted from their scores.

    One load instead of two, because the values of a tile's inner anchors go through shared memory.
    """
    both = tl.load(coefficients.packed + i, mask=inside, other=0)
    tilted_coef = both.to(tl.int32).to(tl.float32, bitcast=True) * factor
    weight_coef = (both >> 32).to(tl.int32).to(tl.float32, bitcast=True) * factor
    shift = tilted_coef * 0
    if T.kind == POSITIVES:
        shift = tl.load(coefficients.level + i, mask=inside, other=0.0) * LOG2E
    elif not T.bounded:
        shift = tl.load(coefficients.level + i, mask=inside, other=0.0)
    return tilted_coef, weight_coef, shift


@triton.jit
def score_gradient(scores, error, tilted_coef, weight_coef, shift, tilt, T: tl.constexpr):
    """∂L/∂s of a tile of scores, from the coefficients of the anchors along one side of the tile.

    error: if exact, the rounding errors of the scores, in base e
    """
    if T.kind == POSITIVES:
        slope = 1 / (1 + tl.exp2(scores - shift))
        return tl.where(scores != float("-inf"), weight_coef - tilted_coef * slope, 0.0)
    elif T.exact:
        # The shift is subtracted first: the difference is small where the exponential is large.
        tilted_exp, weight_exp = exponentials(scores if T.bounded else scores - shift, tilt, T.kind, T.bounded)
        return tilted_coef * tilted_exp * (1 + error * (tilt + 1)) + weight_coef * weight_exp * (1 + error * tilt)
    elif T.bounded and T.kind == NONE:
        return tilted_coef * tl.exp2(scores)
    elif T.bounded and T.kind == ONE:
        plain = tl.exp2(scores)
        return plain * (tilted_coef * plain + weight_coef)
    elif T.bounded and T.kind == TWO:
        plain = tl.exp2(scores)
        return plain * plain * (tilted_coef * plain + weight_coef)
    elif T.bounded and T.kind == HALF:
        root = tl.exp2(scores)
        return root * (tilted_coef * (root * root) + weight_coef)
    else:
        tilted_exp, weight_exp = exponentials(scores if T.bounded else scores - shift, tilt, T.kind, T.bounded)
        return tilted_coef * tilted_exp if T.kind == NONE else tilted_coef * tilted_exp + weight_coef * weight_exp


@triton.jit
def gradient(
    outer, inner, numbers, sizes, mask, bounds, coefficients, result, result_stride, base, skip, span,
    T: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr, SCALED: tl.constexpr, CROSSED: tl.constexpr,
    OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of outer rows, from one part of ``span`` inner rows.

    OUTER, INNER: the outer rows, the inner rows or both are anchors. If WHOLE, result is (parts, outer rows, width) and
    holds Σ ∂L/∂s·inner·scale. If rows are too wide for that, result is (outer rows − base, inner rows − skip) and holds
    ∂L/∂s·factor itself, for a matrix product that follows; the first ``skip`` inner rows are left out. SCALED: there is
    a factor · CROSSED: see `row_ranges`
    """
    row, row_end, begin, end = row_ranges(numbers, base, skip, sizes, span, T, OUTER_BLOCK, CROSSED)
    i = row + tl.arange(0, OUTER_BLOCK)
    inside = i < row_end
    tilt, factor = tl.load(numbers.tilt), 1.0
    prescale = score_prescale(tilt, T)
    scale = tl.load(numbers.scale) * LOG2E * prescale
    if SCALED:
        factor = tl.load(coefficients.factor)
    BANDED: tl.constexpr = T.lower > 0 or T.upper > 0
    tile = load_rows(outer, row, row_end, sizes.width, sizes.outer_stride, 0, OUTER_BLOCK, WIDTH, DESCRIPTOR)
    low_i, high_i, tilted_i, weight_i, shift_i, group_i = 0.0, 0.0, 0.0, 0.0, 0.0, 0
    if OUTER:
        low_i, high_i = load_bounds(bounds, i, inside, prescale, T)
        low_i = low_i[:, None] if T.lower == 2 else low_i
        high_i = high_i[:, None] if T.upper == 2 else high_i
        tilted_i, weight_i, shift_i = load_coefficients(coefficients, i, inside, factor, T)
        tilted_i, weight_i, shift_i = tilted_i[:, None], weight_i[:, None], shift_i[:, None]
    if T.groups > 0:
        group_i = tl.load((mask.anchor_groups if OUTER else mask.candidate_groups) + i, mask=inside, other=0)[:, None]
    collected = tl.zeros((OUTER_BLOCK, WIDTH), tl.float32)
    for start in range(begin, min(begin + span, end), INNER_BLOCK):
        j = start + tl.arange(0, INNER_BLOCK)
        inside_j = j < end
        found, other = inner_products(
            tile, outer, inner, sizes, row, start, row_end, end, T, OUTER_BLOCK, INNER_BLOCK, WIDTH, WHOLE, DESCRIPTOR
        )
        group_j, lowest, highest = 0, low_i, high_i
        if T.groups > 0:
            groups = mask.candidate_groups if OUTER else mask.anchor_groups
            group_j = tl.load(groups + j, mask=inside_j, other=0)[None, :]
        tilted_j, weight_j, shift_j = 0.0, 0.0, 0.0
        if INNER:
            tilted_j, weight_j, shift_j = load_coefficients(coefficients, j, inside_j, factor, T)
            tilted_j, weight_j, shift_j = tilted_j[None, :], weight_j[None, :], shift_j[None, :]
        error = 0.0
        if T.exact:
            error = rounding_error(found, scale, tl.load(numbers.scale), prescale, tilt)
        if OUTER:
            scores = mask_scores(
                found * scale, mask, i[:, None], j[None, :], row_end, end,
                may_need_mask(mask, row, start, row_end, end, T, OUTER_BLOCK, INNER_BLOCK),
                group_i, group_j, T, tile.dtype != tl.float32,
            )  # fmt: skip
        else:
            scores = mask_scores(
                found * scale, mask, j[None, :], i[:, None], end, row_end,
                may_need_mask(mask, start, row, end, row_end, T, INNER_BLOCK, OUTER_BLOCK),
                group_j, group_i, T, tile.dtype != tl.float32,
            )  # fmt: skip
            lowest, highest = load_bounds(bounds, j, inside_j, prescale, T)
            lowest = lowest[None, :] if T.lower == 2 else lowest
            highest = highest[None, :] if T.upper == 2 else highest
        within = 1.0
        if BANDED:
            within = in_bounds(scores, lowest, highest, T)
            if not T.bounded:
                scores = tl.where(within > 0, scores, float("-inf"))
        if OUTER and INNER and T.bounded and T.kind != POSITIVES:
            # Both anchors share the exponential, so their coefficients are added first.
            weights = score_gradient(scores, error, tilted_i + tilted_j, weight_i + weight_j, 0.0, tilt, T)
        elif OUTER and INNER:
            weights = score_gradient(scores, error, tilted_i, weight_i, shift_i, tilt, T)
            weights += score_gradient(scores, error, tilted_j, weight_j, shift_j, tilt, T)
        elif OUTER:
            weights = score_gradient(scores, error, tilted_i, weight_i, shift_i, tilt, T)
        else:
            weights = score_gradient(scores, error, tilted_j, weight_j, shift_j, tilt, T)
        if BANDED and T.bounded:
            weights = weights * within
        if WHOLE:
            if other.dtype == tl.float32:
                # One product per tile: accumulating in a single chain would lose a digit.
                collected += tl.dot(weights, other, input_precision=T.precision)
            else:
                collected = tl.dot(weights.to(other.dtype), other, collected, input_precision=T.precision)
        else:
            # A strip has fewer than 2³¹ elements.
            pointer = result + ((i - base)[:, None] * result_stride + (j - skip)[None, :])
            tl.store(pointer, weights.to(result.dtype.element_ty), mask=inside[:, None] & inside_j[None, :])
    if WHOLE:
        k = tl.arange(0, WIDTH)
        pointer = result + (tl.program_id(1).to(tl.int64) * sizes.outer + i)[:, None] * result_stride + k[None, :]
        stored = inside[:, None] & (k < sizes.width)[None, :]
        tl.store(pointer, collected * (tl.load(numbers.scale) / factor), mask=stored)

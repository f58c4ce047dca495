"""Triton kernels of the backward pass: recompute tiles of scores, turn them into ∂L/∂s, multiply with embeddings."""

# Arguments of Triton kernels have no types that mypy knows.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from hardneg.losses.kernels.triton.score_tile import (
    HALF,
    LOG2E,
    LOWEST_SCORE,
    NO_INDEX,
    NONE,
    ONE,
    POSITIVES,
    TWO,
    exponentials,
    in_bands,
    inner_products,
    load_rows,
    mask_scores,
    mask_ties,
    rounding_error,
    row_ranges,
    score_prescale,
    tile_needs_mask,
)  # fmt: skip


@triton.jit
def score_coefficients(
    for_mean, for_weight, tilted_total, weight_total, number, tilt_, coefficients, anchors,
    BLOCK: tl.constexpr, THROUGH: tl.constexpr, WEIGHED: tl.constexpr,
):  # fmt: skip
    """Coefficients of the two exponentials of each anchor in ∂L/∂s (the gradient in METHODS.md).

    (β+1)·softmax_{β+1} and −β·softmax_β; with detached weights (not THROUGH) 1 and 0 · coefficients: (anchors, 2)
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < anchors
    tilt = tl.load(tilt_)
    nonempty = tl.load(number + i, mask=inside, other=0.0) > 0
    mean = tl.load(for_mean + i, mask=inside, other=0.0)
    weight = tl.zeros((BLOCK,), tl.float32)
    if WEIGHED:
        weight += tl.load(for_weight + i, mask=inside, other=0.0)
    # Empty support: zero gradient.
    tilted_sum = tl.where(nonempty, tl.load(tilted_total + i, mask=inside, other=1.0), 1.0)
    weight_sum = tl.where(nonempty, tl.load(weight_total + i, mask=inside, other=1.0), 1.0)
    tilted_coef = tl.where(nonempty, mean, 0.0)
    weight_coef = tl.zeros((BLOCK,), tl.float32)
    if THROUGH:
        tilted_coef = tilted_coef * (tilt + 1)
        weight_coef = tl.where(nonempty, weight - mean, 0.0) * tilt
    tl.store(coefficients + 2 * i, tl.div_rn(tilted_coef, tilted_sum), mask=inside)
    tl.store(coefficients + 2 * i + 1, tl.div_rn(weight_coef, weight_sum), mask=inside)


@triton.jit
def load_coefficients(packed, i, rows, factor):
    """Coefficients of anchors i, times ``factor``; packed: two float32 numbers in 64 bits per anchor.

    One load instead of two, because the values of a tile's inner anchors go through shared memory.
    """
    both = tl.load(packed + i, mask=i < rows, other=0)
    tilted_coef, weight_coef = both.to(tl.int32), (both >> 32).to(tl.int32)
    return tilted_coef.to(tl.float32, bitcast=True) * factor, weight_coef.to(tl.float32, bitcast=True) * factor


@triton.jit
def score_gradient(
    scores, error, tilted_coef, weight_coef, shift, tilt,
    KIND: tl.constexpr, BOUNDED: tl.constexpr, PRESCALED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """∂L/∂s of a tile of scores, from the coefficients of the anchors along one side of the tile.

    shift: the level of POSITIVES, else the row maximum of the anchor if not BOUNDED · error: if EXACT, the rounding
    errors of the scores, in base e
    """
    if KIND == POSITIVES:
        slope = 1 / (1 + tl.exp2(scores - shift))
        return tl.where(scores > float("-inf"), weight_coef - tilted_coef * slope, 0.0)
    elif EXACT:
        # The shift is subtracted first: the difference is small where the exponential is large.
        tilted_exp, weight_exp = exponentials(scores if BOUNDED else scores - shift, tilt, KIND, BOUNDED and PRESCALED)
        return tilted_coef * tilted_exp * (1 + error * (tilt + 1)) + weight_coef * weight_exp * (1 + error * tilt)
    elif BOUNDED and KIND == NONE:
        return tilted_coef * tl.exp2(scores)
    elif BOUNDED and KIND == ONE:
        plain = tl.exp2(scores)
        return plain * (tilted_coef * plain + weight_coef)
    elif BOUNDED and KIND == TWO:
        plain = tl.exp2(scores)
        return plain * plain * (tilted_coef * plain + weight_coef)
    elif BOUNDED and KIND == HALF:
        root = tl.exp2(scores if PRESCALED else 0.5 * scores)
        return root * (tilted_coef * (root * root) + weight_coef)
    elif BOUNDED:
        tilted_exp, weight_exp = exponentials(scores, tilt, KIND, PRESCALED)
        return tilted_coef * tilted_exp + weight_coef * weight_exp
    else:
        tilted_exp, weight_exp = exponentials(scores - shift, tilt, KIND, False)
        return tilted_coef * tilted_exp if KIND == NONE else tilted_coef * tilted_exp + weight_coef * weight_exp


@triton.jit
def tile_gradient(
    found, i, j, row, start, outer_rows, inner_rows, natural_scale, scale, prescale, tilt, factor,
    tilted_coef_i, weight_coef_i, shift_i, lowest_i, highest_i, first_i, last_i, tie_end, tie_start, group_i,
    packed, level_, lower_, upper_, first_, last_, inner_groups,
    excluded, allowed, column, columns, batch, offset, whole, num_excluded, allowed_rows, allowed_columns,
    OUTER: tl.constexpr, INNER: tl.constexpr, OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr,
    KIND: tl.constexpr, BOUNDED: tl.constexpr, OWN: tl.constexpr, EXCLUDED: tl.constexpr, GROUPS: tl.constexpr,
    ALLOWED: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr, RING: tl.constexpr,
    EXACT: tl.constexpr, HALF_PRECISION: tl.constexpr,
):  # fmt: skip
    """∂L/∂s of a tile of inner products: as rows of outer anchors (OUTER), of inner anchors (INNER), or the sum."""
    BANDED: tl.constexpr = LOWER > 0 or UPPER > 0
    within = 1.0
    needs_mask = tile_needs_mask(
        row, start, outer_rows, inner_rows, batch, offset, whole, OUTER, OUTER_BLOCK, INNER_BLOCK, OWN
    )
    group_j = 0
    if GROUPS > 0:
        group_j = tl.load(inner_groups + j, mask=j < inner_rows, other=0)[None, :]
    tilted_coef_j, weight_coef_j, shift_j = 0.0, 0.0, 0.0
    if INNER:
        tilted_coef_j, weight_coef_j = load_coefficients(packed, j, inner_rows, factor)
        tilted_coef_j, weight_coef_j = tilted_coef_j[None, :], weight_coef_j[None, :]
        if KIND == POSITIVES:
            shift_j = tl.load(level_ + j, mask=j < inner_rows, other=0.0)[None, :] * LOG2E
        elif not BOUNDED:
            shift_j = tl.load(level_ + j, mask=j < inner_rows, other=0.0)[None, :]
    error = 0.0
    if EXACT:
        error = rounding_error(found, scale, natural_scale, prescale, tilt)
    if OUTER:
        scores = mask_scores(
            found * scale, i[:, None], j[None, :], outer_rows, inner_rows, needs_mask, column, columns, batch, offset,
            whole, excluded, num_excluded, group_i, group_j, allowed, allowed_rows, allowed_columns,
            OWN, EXCLUDED, GROUPS, ALLOWED, HALF_PRECISION,
        )  # fmt: skip
        if RING:
            tied = (start + column < tie_end) | (start + INNER_BLOCK - 1 + column > tie_start)
            scores = mask_ties(scores, j[None, :] + column, tied, lowest_i, highest_i, first_i, last_i, HALF_PRECISION)
        if BANDED:
            within = in_bands(scores, lowest_i, highest_i, LOWER, UPPER)
            if not BOUNDED:
                scores = tl.where(within > 0, scores, float("-inf"))
        if INNER and KIND != POSITIVES and BOUNDED:
            # Both anchors share the exponential, so their coefficients are added first.
            found = score_gradient(
                scores,
                error,
                tilted_coef_i + tilted_coef_j,
                weight_coef_i + weight_coef_j,
                0.0,
                tilt,
                KIND,
                BOUNDED,
                not RING,
                EXACT,
            )
            return found * within if BANDED else found
        found = score_gradient(
            scores, error, tilted_coef_i, weight_coef_i, shift_i, tilt, KIND, BOUNDED, not RING, EXACT
        )
        if INNER:
            found += score_gradient(
                scores, error, tilted_coef_j, weight_coef_j, shift_j, tilt, KIND, BOUNDED, not RING, EXACT
            )
        return found * within if BANDED and BOUNDED else found
    else:
        scores = mask_scores(
            found * scale, j[None, :], i[:, None], inner_rows, outer_rows, needs_mask, column, columns, batch, offset,
            whole, excluded, num_excluded, group_j, group_i, allowed, allowed_rows, allowed_columns,
            OWN, EXCLUDED, GROUPS, ALLOWED, HALF_PRECISION,
        )  # fmt: skip
        lowest, highest, first, last = lowest_i, highest_i, 0, 0
        if LOWER == 2:
            lowest = tl.maximum(tl.load(lower_ + j, mask=j < inner_rows, other=0.0)[None, :] * prescale, LOWEST_SCORE)
        if UPPER == 2:
            highest = tl.load(upper_ + j, mask=j < inner_rows, other=0.0)[None, :] * prescale
        if RING:
            first = tl.load(first_ + j, mask=j < inner_rows, other=0)[None, :]
            last = tl.load(last_ + j, mask=j < inner_rows, other=NO_INDEX)[None, :]
            # For every tile: Triton 3.6 cannot compile the condition that a tile may hold ties.
            scores = mask_ties(scores, i[:, None] + column, True, lowest, highest, first, last, False)
        if BANDED:
            within = in_bands(scores, lowest, highest, LOWER, UPPER)
            if not BOUNDED:
                scores = tl.where(within > 0, scores, float("-inf"))
        found = score_gradient(
            scores, error, tilted_coef_j, weight_coef_j, shift_j, tilt, KIND, BOUNDED, not RING, EXACT
        )
        return found * within if BANDED and BOUNDED else found


@triton.jit
def gradient(
    outer, inner, scale_, tilt_, factor_, lower_, upper_, first_, last_, level_,
    packed, excluded, outer_groups, inner_groups, allowed, result,
    outer_rows, inner_rows, width, outer_stride, inner_stride, column, columns, batch, offset, whole, num_excluded,
    allowed_rows, allowed_columns, base, skip, result_stride, span,
    OUTER: tl.constexpr, INNER: tl.constexpr, OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr, SCALED: tl.constexpr, KIND: tl.constexpr,
    BOUNDED: tl.constexpr, OWN: tl.constexpr, EXCLUDED: tl.constexpr, GROUPS: tl.constexpr, ALLOWED: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, RING: tl.constexpr, EXACT: tl.constexpr, CROSSED: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of outer rows, from one part of ``span`` inner rows.

    If WHOLE, result is (parts, outer_rows, width) and holds Σ ∂L/∂s·inner·scale. If rows are too wide for that, result
    is (outer_rows − base, inner_rows − skip) and holds ∂L/∂s·factor itself, for a matrix product that follows; the
    first ``skip`` inner rows are left out. SCALED: multiply ∂L/∂s with ``factor_`` before it is converted to half
    precision · CROSSED: see `row_ranges`
    """
    row, row_end, begin, end = row_ranges(base, skip, outer_rows, inner_rows, span, OUTER_BLOCK, CROSSED)
    i = row + tl.arange(0, OUTER_BLOCK)
    inside = i < row_end
    tilt, factor = tl.load(tilt_), 1.0
    prescale = score_prescale(tilt, KIND, BOUNDED, RING)
    scale = tl.load(scale_) * LOG2E * prescale
    if SCALED:
        factor = tl.load(factor_)
    tile = load_rows(outer, row, row_end, width, outer_stride, OUTER_BLOCK, WIDTH, 0, DESCRIPTOR)
    lowest, highest, first, last, tie_end, tie_start, group = 0.0, 0.0, 0, 0, 0, 0, 0
    if LOWER == 1:
        lowest = tl.maximum(lower_ * LOG2E * prescale, LOWEST_SCORE)
    if UPPER == 1:
        highest = upper_ * LOG2E * prescale
    tilted_coef, weight_coef, shift = 0.0, 0.0, 0.0
    if OUTER:
        if LOWER == 2:
            lowest = tl.maximum(tl.load(lower_ + i, mask=inside, other=0.0)[:, None] * prescale, LOWEST_SCORE)
        if UPPER == 2:
            highest = tl.load(upper_ + i, mask=inside, other=0.0)[:, None] * prescale
        if RING:
            first = tl.load(first_ + i, mask=inside, other=0)
            last = tl.load(last_ + i, mask=inside, other=NO_INDEX)
            tie_end, tie_start = tl.max(first, axis=0), tl.min(last, axis=0)
            first, last = first[:, None], last[:, None]
        tilted_coef, weight_coef = load_coefficients(packed, i, row_end, factor)
        tilted_coef, weight_coef = tilted_coef[:, None], weight_coef[:, None]
        if KIND == POSITIVES:
            shift = tl.load(level_ + i, mask=inside, other=0.0)[:, None] * LOG2E
        elif not BOUNDED:
            shift = tl.load(level_ + i, mask=inside, other=0.0)[:, None]
    if GROUPS > 0:
        group = tl.load(outer_groups + i, mask=inside, other=0)[:, None]
    collected = tl.zeros((OUTER_BLOCK, WIDTH), tl.float32)
    for start in range(begin, min(begin + span, end), INNER_BLOCK):
        j = start + tl.arange(0, INNER_BLOCK)
        found, other = inner_products(
            tile, outer, inner, row, start, row_end, end, width, outer_stride, inner_stride,
            OUTER_BLOCK, INNER_BLOCK, WIDTH, WHOLE, PRECISION, DESCRIPTOR,
        )  # fmt: skip
        weights = tile_gradient(
            found, i, j, row, start, row_end, end, tl.load(scale_), scale, prescale, tilt, factor,
            tilted_coef, weight_coef, shift, lowest, highest, first, last, tie_end, tie_start, group,
            packed, level_, lower_, upper_, first_, last_, inner_groups,
            excluded, allowed, column, columns, batch, offset, whole, num_excluded, allowed_rows, allowed_columns,
            OUTER, INNER, OUTER_BLOCK, INNER_BLOCK, KIND, BOUNDED, OWN, EXCLUDED, GROUPS, ALLOWED, LOWER, UPPER, RING,
            EXACT, tile.dtype != tl.float32,
        )  # fmt: skip
        if WHOLE:
            if other.dtype == tl.float32:
                # One product per tile: accumulating in a single chain would lose a digit.
                collected += tl.dot(weights, other, input_precision=PRECISION)
            else:
                collected = tl.dot(weights.to(other.dtype), other, collected, input_precision=PRECISION)
        else:
            # A strip has fewer than 2³¹ elements.
            pointer = result + ((i - base)[:, None] * result_stride + (j - skip)[None, :])
            stored = inside[:, None] & (j < end)[None, :]
            tl.store(pointer, weights.to(result.dtype.element_ty), mask=stored)
    if WHOLE:
        k = tl.arange(0, WIDTH)
        pointer = result + (tl.program_id(1).to(tl.int64) * outer_rows + i)[:, None] * result_stride + k[None, :]
        tl.store(pointer, collected * (tl.load(scale_) / factor), mask=inside[:, None] & (k < width)[None, :])

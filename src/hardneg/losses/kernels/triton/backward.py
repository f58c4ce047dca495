"""The Triton programs of the fused kernel's backward pass: tiles made again, turned into derivatives, multiplied."""

# Arguments of programs have no types that mypy knows.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from hardneg.losses.kernels.triton.score_tile import (
    HALF,
    LAST,
    LEAST,
    LOG2E,
    NONE,
    ONE,
    POSITIVES,
    TWO,
    exponentials,
    hidden,
    in_bands,
    near_own,
    placed,
    products,
    rounding,
    rows_of,
    unit,
    untied,
)  # fmt: skip


@triton.jit
def slopes(
    for_mean, for_weight, heavy_sum, light_sum, number, tilt_, factors, anchors,
    BLOCK: tl.constexpr, THROUGH: tl.constexpr, WEIGHED: tl.constexpr,
):  # fmt: skip
    """What each anchor's exponentials are multiplied with in the derivative of a score, METHODS' gradient.

    (β+1)·softmax_{β+1} and −β·softmax_β; with detached weights (not THROUGH) 1 and 0 · factors: (anchors, 2)
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < anchors
    tilt = tl.load(tilt_)
    some = tl.load(number + i, mask=inside, other=0.0) > 0
    mean = tl.load(for_mean + i, mask=inside, other=0.0)
    weight = tl.zeros((BLOCK,), tl.float32)
    if WEIGHED:
        weight += tl.load(for_weight + i, mask=inside, other=0.0)
    # An anchor that met nobody has no softmax, and pulls at nobody.
    heavy = tl.where(some, tl.load(heavy_sum + i, mask=inside, other=1.0), 1.0)
    light = tl.where(some, tl.load(light_sum + i, mask=inside, other=1.0), 1.0)
    steep = tl.where(some, mean, 0.0)
    flat = tl.zeros((BLOCK,), tl.float32)
    if THROUGH:
        steep = steep * (tilt + 1)
        flat = tl.where(some, weight - mean, 0.0) * tilt
    tl.store(factors + 2 * i, tl.div_rn(steep, heavy), mask=inside)
    tl.store(factors + 2 * i + 1, tl.div_rn(flat, light), mask=inside)


@triton.jit
def factors_of(pairs, i, rows, factor):
    """What anchors i multiply their exponentials with, times a factor; pairs: float32 numbers, two in 64 bits.

    In one load, because what a tile needs of its inner anchors goes through shared memory.
    """
    both = tl.load(pairs + i, mask=i < rows, other=0)
    steep, flat = both.to(tl.int32), (both >> 32).to(tl.int32)
    return steep.to(tl.float32, bitcast=True) * factor, flat.to(tl.float32, bitcast=True) * factor


@triton.jit
def pulled(
    scores, lost, steep, flat, top, tilt,
    KIND: tl.constexpr, BOUNDED: tl.constexpr, UNITED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """∂L/∂s of scores s in the role of their anchors, whose numbers lie along one side of the tile.

    top: of POSITIVES the level they are compared with, else the anchor's largest score, if not BOUNDED ·
    lost: if EXACT, what rounding took from the scores, in base e
    """
    if KIND == POSITIVES:
        slope = 1 / (1 + tl.exp2(scores - top))
        return tl.where(scores > float("-inf"), flat - steep * slope, 0.0)
    elif EXACT:
        # The difference first: it is small where the exponential is large.
        high, low = exponentials(scores if BOUNDED else scores - top, tilt, KIND, BOUNDED and UNITED)
        return steep * high * (1 + lost * (tilt + 1)) + flat * low * (1 + lost * tilt)
    elif BOUNDED and KIND == NONE:
        return steep * tl.exp2(scores)
    elif BOUNDED and KIND == ONE:
        plain = tl.exp2(scores)
        return plain * (steep * plain + flat)
    elif BOUNDED and KIND == TWO:
        plain = tl.exp2(scores)
        return plain * plain * (steep * plain + flat)
    elif BOUNDED and KIND == HALF:
        root = tl.exp2(scores if UNITED else 0.5 * scores)
        return root * (steep * (root * root) + flat)
    elif BOUNDED:
        high, low = exponentials(scores, tilt, KIND, UNITED)
        return steep * high + flat * low
    else:
        high, low = exponentials(scores - top, tilt, KIND, False)
        return steep * high if KIND == NONE else steep * high + flat * low


@triton.jit
def weighed(
    found, i, j, row, start, outer_rows, inner_rows, natural, scale, step, tilt, factor,
    steep_i, flat_i, top_i, lowest_i, highest_i, first_i, last_i, until, since, group_i,
    pairs, level_, lower_, upper_, first_, last_, inner_groups,
    excluded, allowed, column, columns, batch, offset, whole, named, allowed_rows, allowed_columns,
    OUTER: tl.constexpr, INNER: tl.constexpr, OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr,
    KIND: tl.constexpr, BOUNDED: tl.constexpr, OWN: tl.constexpr, EXCLUDED: tl.constexpr, GROUPS: tl.constexpr,
    ALLOWED: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr, RING: tl.constexpr,
    EXACT: tl.constexpr, HALF_PRECISION: tl.constexpr,
):  # fmt: skip
    """∂L/∂s of a tile of inner products: as rows of their outer anchors, of their inner anchors, or both added."""
    BANDED: tl.constexpr = LOWER > 0 or UPPER > 0
    within = 1.0
    near = near_own(row, start, outer_rows, inner_rows, batch, offset, whole, OUTER, OUTER_BLOCK, INNER_BLOCK, OWN)
    group_j = 0
    if GROUPS > 0:
        group_j = tl.load(inner_groups + j, mask=j < inner_rows, other=0)[None, :]
    steep_j, flat_j, top_j = 0.0, 0.0, 0.0
    if INNER:
        steep_j, flat_j = factors_of(pairs, j, inner_rows, factor)
        steep_j, flat_j = steep_j[None, :], flat_j[None, :]
        if KIND == POSITIVES:
            top_j = tl.load(level_ + j, mask=j < inner_rows, other=0.0)[None, :] * LOG2E
        elif not BOUNDED:
            top_j = tl.load(level_ + j, mask=j < inner_rows, other=0.0)[None, :]
    lost = 0.0
    if EXACT:
        lost = rounding(found, scale, natural, step, tilt)
    if OUTER:
        scores = hidden(
            found * scale, i[:, None], j[None, :], outer_rows, inner_rows, near, column, columns, batch, offset, whole,
            excluded, named, group_i, group_j, allowed, allowed_rows, allowed_columns,
            OWN, EXCLUDED, GROUPS, ALLOWED, HALF_PRECISION,
        )  # fmt: skip
        if RING:
            tied = (start + column < until) | (start + INNER_BLOCK - 1 + column > since)
            scores = untied(scores, j[None, :] + column, tied, lowest_i, highest_i, first_i, last_i, HALF_PRECISION)
        if BANDED:
            within = in_bands(scores, lowest_i, highest_i, LOWER, UPPER)
            if not BOUNDED:
                scores = tl.where(within > 0, scores, float("-inf"))
        if INNER and KIND != POSITIVES and BOUNDED:
            # One exponential for both: their factors may be added first.
            found = pulled(scores, lost, steep_i + steep_j, flat_i + flat_j, 0.0, tilt, KIND, BOUNDED, not RING, EXACT)
            return found * within if BANDED else found
        found = pulled(scores, lost, steep_i, flat_i, top_i, tilt, KIND, BOUNDED, not RING, EXACT)
        if INNER:
            found += pulled(scores, lost, steep_j, flat_j, top_j, tilt, KIND, BOUNDED, not RING, EXACT)
        return found * within if BANDED and BOUNDED else found
    else:
        scores = hidden(
            found * scale, j[None, :], i[:, None], inner_rows, outer_rows, near, column, columns, batch, offset, whole,
            excluded, named, group_j, group_i, allowed, allowed_rows, allowed_columns,
            OWN, EXCLUDED, GROUPS, ALLOWED, HALF_PRECISION,
        )  # fmt: skip
        lowest, highest, first, last = lowest_i, highest_i, 0, 0
        if LOWER == 2:
            lowest = tl.maximum(tl.load(lower_ + j, mask=j < inner_rows, other=0.0)[None, :] * step, LEAST)
        if UPPER == 2:
            highest = tl.load(upper_ + j, mask=j < inner_rows, other=0.0)[None, :] * step
        if RING:
            first = tl.load(first_ + j, mask=j < inner_rows, other=0)[None, :]
            last = tl.load(last_ + j, mask=j < inner_rows, other=LAST)[None, :]
            # Asked of every tile: Triton 3.6 cannot compile the question whether it may matter.
            scores = untied(scores, i[:, None] + column, True, lowest, highest, first, last, False)
        if BANDED:
            within = in_bands(scores, lowest, highest, LOWER, UPPER)
            if not BOUNDED:
                scores = tl.where(within > 0, scores, float("-inf"))
        found = pulled(scores, lost, steep_j, flat_j, top_j, tilt, KIND, BOUNDED, not RING, EXACT)
        return found * within if BANDED and BOUNDED else found


@triton.jit
def gradient(
    outer, inner, scale_, tilt_, factor_, lower_, upper_, first_, last_, level_,
    pairs, excluded, outer_groups, inner_groups, allowed, result,
    outer_rows, inner_rows, width, outer_stride, inner_stride, column, columns, batch, offset, whole, named,
    allowed_rows, allowed_columns, base, skip, result_stride, span,
    OUTER: tl.constexpr, INNER: tl.constexpr, OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr, SCALED: tl.constexpr, KIND: tl.constexpr,
    BOUNDED: tl.constexpr, OWN: tl.constexpr, EXCLUDED: tl.constexpr, GROUPS: tl.constexpr, ALLOWED: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, RING: tl.constexpr, EXACT: tl.constexpr, CROSSED: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of outer rows, from one stretch of ``span`` inner rows.

    If WHOLE, result is (stretches, outer_rows, width) and holds Σ ∂L/∂s·inner·scale. If rows are too wide to be summed
    on the chip, result is (outer_rows − base, inner_rows − skip) and holds ∂L/∂s·factor itself, for a product to
    follow; ``skip`` inner rows are left out.
    SCALED: multiply ∂L/∂s with ``factor_`` before it becomes a half-precision number · CROSSED: see `placed`
    """
    row, row_end, begin, end = placed(base, skip, outer_rows, inner_rows, span, OUTER_BLOCK, CROSSED)
    i = row + tl.arange(0, OUTER_BLOCK)
    inside = i < row_end
    tilt, factor = tl.load(tilt_), 1.0
    step = unit(tilt, KIND, BOUNDED, RING)
    scale = tl.load(scale_) * LOG2E * step
    if SCALED:
        factor = tl.load(factor_)
    tile = rows_of(outer, row, row_end, width, outer_stride, OUTER_BLOCK, WIDTH, 0, DESCRIBED)
    lowest, highest, first, last, until, since, group = 0.0, 0.0, 0, 0, 0, 0, 0
    if LOWER == 1:
        lowest = tl.maximum(lower_ * LOG2E * step, LEAST)
    if UPPER == 1:
        highest = upper_ * LOG2E * step
    steep, flat, top = 0.0, 0.0, 0.0
    if OUTER:
        if LOWER == 2:
            lowest = tl.maximum(tl.load(lower_ + i, mask=inside, other=0.0)[:, None] * step, LEAST)
        if UPPER == 2:
            highest = tl.load(upper_ + i, mask=inside, other=0.0)[:, None] * step
        if RING:
            first = tl.load(first_ + i, mask=inside, other=0)
            last = tl.load(last_ + i, mask=inside, other=LAST)
            until, since = tl.max(first, axis=0), tl.min(last, axis=0)
            first, last = first[:, None], last[:, None]
        steep, flat = factors_of(pairs, i, row_end, factor)
        steep, flat = steep[:, None], flat[:, None]
        if KIND == POSITIVES:
            top = tl.load(level_ + i, mask=inside, other=0.0)[:, None] * LOG2E
        elif not BOUNDED:
            top = tl.load(level_ + i, mask=inside, other=0.0)[:, None]
    if GROUPS > 0:
        group = tl.load(outer_groups + i, mask=inside, other=0)[:, None]
    collected = tl.zeros((OUTER_BLOCK, WIDTH), tl.float32)
    for start in range(begin, min(begin + span, end), INNER_BLOCK):
        j = start + tl.arange(0, INNER_BLOCK)
        found, other = products(
            tile, outer, inner, row, start, row_end, end, width, outer_stride, inner_stride,
            OUTER_BLOCK, INNER_BLOCK, WIDTH, WHOLE, PRECISION, DESCRIBED,
        )  # fmt: skip
        weights = weighed(
            found, i, j, row, start, row_end, end, tl.load(scale_), scale, step, tilt, factor,
            steep, flat, top, lowest, highest, first, last, until, since, group,
            pairs, level_, lower_, upper_, first_, last_, inner_groups,
            excluded, allowed, column, columns, batch, offset, whole, named, allowed_rows, allowed_columns,
            OUTER, INNER, OUTER_BLOCK, INNER_BLOCK, KIND, BOUNDED, OWN, EXCLUDED, GROUPS, ALLOWED, LOWER, UPPER, RING,
            EXACT, tile.dtype != tl.float32,
        )  # fmt: skip
        if WHOLE:
            if other.dtype == tl.float32:
                # Tile by tile: one long chain of additions would lose a digit.
                collected += tl.dot(weights, other, input_precision=PRECISION)
            else:
                collected = tl.dot(weights.to(other.dtype), other, collected, input_precision=PRECISION)
        else:
            # A strip has fewer than 2³¹ numbers.
            pointer = result + ((i - base)[:, None] * result_stride + (j - skip)[None, :])
            stored = inside[:, None] & (j < end)[None, :]
            tl.store(pointer, weights.to(result.dtype.element_ty), mask=stored)
    if WHOLE:
        k = tl.arange(0, WIDTH)
        pointer = result + (tl.program_id(1).to(tl.int64) * outer_rows + i)[:, None] * result_stride + k[None, :]
        tl.store(pointer, collected * (tl.load(scale_) / factor), mask=inside[:, None] & (k < width)[None, :])

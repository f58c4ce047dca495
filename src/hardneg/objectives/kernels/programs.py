"""The Triton programs of the fused kernel: tiles of scores that never leave the chip.

Every program owns a block of *outer* rows and walks over tiles of *inner* rows. In the forward pass outer rows are
anchors and inner rows candidates; the backward pass runs with the roles either way round, and where anchors and
candidates are the same rows (``OUTER and INNER``) both derivatives of a pair come from one tile. Nothing is added by
atomics: what several programs find for the same rows is kept apart and added in a fixed order.

Inside, scores are in base 2, s·log₂e, because that is the exponential the hardware has; what may not count is −inf,
whose exponential is exactly 0.
"""

# Arguments of programs have no types that mypy knows.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import os

import triton
import triton.language as tl
from triton.language.extra import libdevice

# As Triton itself decides it, when these programs are first read.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

PLAIN = tl.constexpr(INTERPRETED)  # the interpreter has no other functions, and exact ones
LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_REST = tl.constexpr(1.9259629911266175e-08)  # what float32 leaves out of it
LN2 = tl.constexpr(0.6931471805599453)

# Tilts: β = 0, 1, 2 and ½ need one exponential for both sums, any other β two. POSITIVES asks other questions of a row.
NONE, ONE, TWO, HALF, ANY, POSITIVES = (tl.constexpr(kind) for kind in range(6))


@triton.jit
def rows_of(
    source, start, rows, width, stride, BLOCK: tl.constexpr, WIDTH: tl.constexpr, first, DESCRIBED: tl.constexpr = False
):
    """A tile (BLOCK, WIDTH) of a matrix (rows, width) from this row and column on; 0 beyond its edges.

    source: a pointer, or a descriptor of such tiles, which the copy engine reads (DESCRIBED)
    """
    if DESCRIBED:
        return source.load([start, first])
    else:
        i, k = tl.arange(0, BLOCK), first + tl.arange(0, WIDTH)
        inside = (start + i < rows)[:, None] & (k < width)[None, :]
        begin = source + (tl.full((), 0, tl.int64) + start) * stride
        return tl.load(begin + i[:, None] * stride + k[None, :], mask=inside, other=0.0)


@triton.jit
def products(
    tile, outer, inner, row, start, outer_rows, inner_rows, width, outer_stride, inner_stride,
    OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIBED: tl.constexpr = False,
):  # fmt: skip
    """Inner products of a block of outer rows with a block of inner rows, and the inner rows if they fit (WHOLE)."""
    if WHOLE:
        other = rows_of(inner, start, inner_rows, width, inner_stride, INNER_BLOCK, WIDTH, 0, DESCRIBED)
        return tl.dot(tile, tl.trans(other), input_precision=PRECISION), other
    else:
        found = tl.zeros((OUTER_BLOCK, INNER_BLOCK), tl.float32)
        for first in range(0, width, WIDTH):
            mine = rows_of(outer, row, outer_rows, width, outer_stride, OUTER_BLOCK, WIDTH, first, DESCRIBED)
            theirs = rows_of(inner, start, inner_rows, width, inner_stride, INNER_BLOCK, WIDTH, first, DESCRIBED)
            found = tl.dot(mine, tl.trans(theirs), found, input_precision=PRECISION)
        return found, tile


@triton.jit
def hidden(
    scores, anchor, candidate, anchors, candidates, near, column, columns,
    batch, offset, whole, excluded, named, anchor_group, candidate_group, allowed, allowed_rows, allowed_columns,
    OWN: tl.constexpr, EXCLUDED: tl.constexpr, GROUPS: tl.constexpr, ALLOWED: tl.constexpr,
):  # fmt: skip
    """Scores with −inf where an anchor may not meet a candidate.

    anchor, candidate: their indices, one along each side of the tile · near: may the tile hold an anchor's own
    instance, or reach beyond the matrix? · anchor_group, candidate_group: as ``anchor`` and ``candidate``, if GROUPS ·
    the rest: see `hardneg.objectives.kernels.problem.Eligibility`
    """
    if near:
        meets = (anchor < anchors) & (candidate < candidates)
        if OWN:
            meets = meets & (offset + anchor % batch != candidate % whole)
        scores = tl.where(meets, scores, float("-inf"))
    if EXCLUDED:
        for which in range(named):
            named_one = tl.load(excluded + anchor.to(tl.int64) * named + which, mask=anchor < anchors, other=-1)
            scores = tl.where(named_one == candidate + column, float("-inf"), scores)
    if GROUPS == 1:  # only different groups meet
        scores = tl.where(anchor_group == candidate_group, float("-inf"), scores)
    if GROUPS == 2:  # only equal groups meet
        scores = tl.where(anchor_group == candidate_group, scores, float("-inf"))
    if ALLOWED:
        place = candidate + column - (columns - allowed_columns)
        known = (anchor < anchors) & (candidate < candidates) & (place >= 0)
        pointer = allowed + (anchor % allowed_rows).to(tl.int64) * allowed_columns + place
        scores = tl.where(tl.load(pointer, mask=known, other=1) != 0, scores, float("-inf"))
    return scores


@triton.jit
def banded(
    scores, candidate, lowest, highest, first, last, column,
    LOWER: tl.constexpr, UPPER: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Scores with −inf outside the bands; bounds are numbers or lie along the anchors' side of the tile.

    first, last: with RING, the indices that break ties at ``lowest`` and ``highest``
    """
    if RING:
        place = candidate + column
        under = (scores < lowest) | ((scores == lowest) & (place < first))
        over = (scores > highest) | ((scores == highest) & (place > last))
        return tl.where(under | over, float("-inf"), scores)
    if LOWER:
        scores = tl.where(scores < lowest, float("-inf"), scores)
    if UPPER:
        scores = tl.where(scores > highest, float("-inf"), scores)
    return scores


@triton.jit
def unit(tilt, KIND: tl.constexpr, BOUNDED: tl.constexpr, RING: tl.constexpr):
    """What scores are multiplied with beforehand, so that one exponential needs no multiplication of its own."""
    if not BOUNDED or RING:  # a ring's edges are compared with scores as they are
        return 1.0
    elif KIND == HALF:
        return 0.5
    elif KIND == ANY:
        return tilt
    else:
        return 1.0


@triton.jit
def exponentials(scores, tilt, KIND: tl.constexpr, UNITED: tl.constexpr):
    """e^{(β+1)s} and e^{βs}. UNITED: were the scores multiplied with their `unit`?"""
    if KIND == NONE:
        plain = tl.exp2(scores)
        return plain, plain
    elif KIND == ONE:
        plain = tl.exp2(scores)
        return plain * plain, plain
    elif KIND == TWO:
        plain = tl.exp2(scores)
        square = plain * plain
        return square * plain, square
    elif KIND == HALF:
        root = tl.exp2(scores if UNITED else 0.5 * scores)
        return root * root * root, root
    elif UNITED:
        return tl.exp2(scores * (1 + 1 / tilt)), tl.exp2(scores)
    else:
        return tl.exp2(scores * (tilt + 1)), tl.exp2(scores * tilt)


@triton.jit
def rounding(found, scale, natural, step, tilt):
    """What a score loses in float32, in base e and to first order; scale: ``natural``·``step``·log₂e, rounded."""
    factor = natural * step
    rest = tl.fma(factor, LOG2E, -scale) + factor * LOG2E_REST
    lost = (tl.fma(found, scale, -(found * scale)) + found * rest) * (LN2 / step)
    # Scores so large that they lose much are beyond correction, which would turn exponentials negative.
    return tl.where(tl.abs(lost) * (tilt + 1) < 0.01, lost, 0.0)


@triton.jit
def near_own(row, start, outer_rows, inner_rows, batch, offset, whole, OUTER: tl.constexpr,
             OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr, OWN: tl.constexpr):  # fmt: skip
    """May a tile hold pairs of an anchor with its own instance, or pairs beyond the matrix?"""
    near = (start + INNER_BLOCK > inner_rows) | (row + OUTER_BLOCK > outer_rows)
    if OWN:
        if OUTER:
            anchor, candidate = row, start
            anchors: tl.constexpr = OUTER_BLOCK
            candidates: tl.constexpr = INNER_BLOCK
        else:
            anchor, candidate = start, row
            anchors: tl.constexpr = INNER_BLOCK  # type: ignore[no-redef]
            candidates: tl.constexpr = OUTER_BLOCK  # type: ignore[no-redef]
        begin = anchor % batch
        # Instances of the tile's anchors are begin … begin + anchors − 1, unless they begin again in between.
        gap = (candidate - begin - offset) % whole
        gap = tl.where(gap < 0, gap + whole, gap)
        near = near | (begin + anchors > batch) | (gap < anchors) | (gap > whole - candidates)
    return near


@triton.jit
def log(x):
    """The logarithm to the last digit, which that of the hardware does not give."""
    if PLAIN:
        return tl.log(x)
    else:
        return libdevice.log(x)


@triton.jit
def softplus(x):
    """log₂(1 + 2^x)."""
    small = tl.exp2(-tl.abs(x))
    # 1 + small rounds, and its logarithm is wrong in the proportion of what is left (Goldberg 1991, theorem 4).
    more = 1 + small
    left = more - 1
    rest = tl.where(left == 0, small * LOG2E, tl.log2(more) * (small / tl.where(left == 0, 1.0, left)))
    return tl.maximum(x, 0.0) + rest


@triton.jit
def sums(
    anchors_, candidates_, scale_, tilt_, lower_, upper_, first_, last_, level_,
    excluded, anchor_groups, candidate_groups, allowed,
    heavy_, light_, count_, peak_,
    anchors, candidates, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole, named,
    allowed_rows, allowed_columns, slot, span,
    OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, KIND: tl.constexpr, BOUNDED: tl.constexpr, COUNTED: tl.constexpr, OWN: tl.constexpr,
    EXCLUDED: tl.constexpr, GROUPS: tl.constexpr, ALLOWED: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
    RING: tl.constexpr, EXACT: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Sums over one stretch of ``span`` candidates, for each of a block of anchors; slot by slot.

    LOWER, UPPER: 0 none, 1 one bound for all, 2 one per anchor · EXACT: make good what rounding takes from exponents ·
    outputs: (slots, anchors) each
    """
    row, part = tl.program_id(0) * OUTER_BLOCK, tl.program_id(1)
    i = row + tl.arange(0, OUTER_BLOCK)
    tilt = tl.load(tilt_)
    step = unit(tilt, KIND, BOUNDED, RING)
    scale = tl.load(scale_) * LOG2E * step
    tile = rows_of(anchors_, row, anchors, width, anchor_stride, OUTER_BLOCK, WIDTH, 0, DESCRIBED)
    lowest, highest, first, last, level, group = 0.0, 0.0, 0, 0, 0.0, 0
    if LOWER == 1:
        lowest = lower_ * LOG2E * step
    if UPPER == 1:
        highest = upper_ * LOG2E * step
    if LOWER == 2:
        lowest = tl.load(lower_ + i, mask=i < anchors, other=0.0)[:, None] * step
    if UPPER == 2:
        highest = tl.load(upper_ + i, mask=i < anchors, other=0.0)[:, None] * step
    if RING:
        first = tl.load(first_ + i, mask=i < anchors, other=0)[:, None]
        last = tl.load(last_ + i, mask=i < anchors, other=0)[:, None]
    if KIND == POSITIVES:
        level = tl.load(level_ + i, mask=i < anchors, other=0.0)[:, None] * LOG2E
    if GROUPS > 0:
        group = tl.load(anchor_groups + i, mask=i < anchors, other=0)[:, None]
    heavy = tl.zeros((OUTER_BLOCK,), tl.float32)
    light = tl.zeros((OUTER_BLOCK,), tl.float32)
    count = tl.zeros((OUTER_BLOCK,), tl.float32)
    peak = tl.full((OUTER_BLOCK,), float("-inf"), tl.float32)
    for start in range(part * span, min(part * span + span, candidates), INNER_BLOCK):
        j = start + tl.arange(0, INNER_BLOCK)
        found, _ = products(
            tile, anchors_, candidates_, row, start, anchors, candidates, width, anchor_stride, candidate_stride,
            OUTER_BLOCK, INNER_BLOCK, WIDTH, WHOLE, PRECISION, DESCRIBED,
        )  # fmt: skip
        near = near_own(row, start, anchors, candidates, batch, offset, whole, True, OUTER_BLOCK, INNER_BLOCK, OWN)
        other = 0
        if GROUPS > 0:
            other = tl.load(candidate_groups + j, mask=j < candidates, other=0)[None, :]
        scores = hidden(
            found * scale, i[:, None], j[None, :], anchors, candidates, near, column, columns, batch, offset, whole,
            excluded, named, group, other, allowed, allowed_rows, allowed_columns,
            OWN, EXCLUDED, GROUPS, ALLOWED,
        )  # fmt: skip
        scores = banded(scores, j[None, :], lowest, highest, first, last, column, LOWER, UPPER, RING)
        if KIND == POSITIVES:
            met = scores > float("-inf")
            gap = level - scores
            heavy += tl.sum(tl.where(met, softplus(gap), 0.0), axis=1) * LN2
            light += tl.sum(tl.where(met, scores, 0.0), axis=1) * LN2
            count += tl.sum(tl.where(met, 1 / (1 + tl.exp2(-gap)), 0.0), axis=1)
        else:
            if COUNTED:
                count += tl.sum(tl.where(scores > float("-inf"), 1.0, 0.0), axis=1)
            if BOUNDED:
                steep, flat = exponentials(scores, tilt, KIND, not RING)
                if EXACT:
                    lost = rounding(found, scale, tl.load(scale_), step, tilt)
                    steep, flat = steep * (1 + lost * (tilt + 1)), flat * (1 + lost * tilt)
                heavy += tl.sum(steep, axis=1)
                if KIND != NONE:
                    light += tl.sum(flat, axis=1)
            else:
                higher = tl.maximum(peak, tl.max(scores, axis=1))
                # Where nothing was met yet, −inf less −inf would be NaN.
                base = tl.where(higher == float("-inf"), 0.0, higher)
                down = tl.exp2((peak - base) * (tilt + 1))
                steep, flat = exponentials(scores - base[:, None], tilt, KIND, False)
                if EXACT:
                    lost = rounding(found, scale, tl.load(scale_), step, tilt)
                    steep, flat = steep * (1 + lost * (tilt + 1)), flat * (1 + lost * tilt)
                heavy = heavy * down + tl.sum(steep, axis=1)
                if KIND != NONE:
                    light = light * tl.exp2((peak - base) * tilt) + tl.sum(flat, axis=1)
                peak = higher
    place, inside = (slot + part) * anchors + i, i < anchors
    tl.store(heavy_ + place, heavy, mask=inside)
    if KIND != NONE:
        tl.store(light_ + place, light, mask=inside)
    if COUNTED or KIND == POSITIVES:
        tl.store(count_ + place, count, mask=inside)
    if not BOUNDED:
        tl.store(peak_ + place, peak, mask=inside)


@triton.jit
def collect(
    heavy_, light_, count_, peak_, i, inside, anchors, slots, known, tilt,
    BLOCK: tl.constexpr, KIND: tl.constexpr, BOUNDED: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """The two sums of exponentials less the peak, the count and the peak of anchors i, from sums slot by slot.

    known: the count of every anchor, if not COUNTED
    """
    heavy = tl.zeros((BLOCK,), tl.float32)
    light = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.float32)
    top = tl.zeros((BLOCK,), tl.float32)
    if not BOUNDED:
        top += float("-inf")
        for slot in range(slots):
            top = tl.maximum(top, tl.load(peak_ + slot * anchors + i, mask=inside, other=0.0))
        top = tl.where(top == float("-inf"), 0.0, top)
    for slot in range(slots):
        place = slot * anchors + i
        down = 0.0
        if not BOUNDED:
            down = tl.load(peak_ + place, mask=inside, other=0.0) - top
        part = tl.load(heavy_ + place, mask=inside, other=0.0)
        heavy += part if BOUNDED else part * tl.exp2(down * (tilt + 1))
        if KIND != NONE:
            part = tl.load(light_ + place, mask=inside, other=0.0)
            light += part if BOUNDED else part * tl.exp2(down * tilt)
        if COUNTED:
            count += tl.load(count_ + place, mask=inside, other=0.0)
    if not COUNTED:
        count += known
    return heavy, count if KIND == NONE else light, count, top


@triton.jit
def finish(
    heavy_, light_, count_, peak_, tilt_, mean, weight, number, heavy_sum, light_sum, top_, anchors, slots, known,
    BLOCK: tl.constexpr, KIND: tl.constexpr, BOUNDED: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """The log-sums of each anchor from what was summed slot by slot."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, tilt = i < anchors, tl.load(tilt_)
    heavy, light, count, top = collect(
        heavy_, light_, count_, peak_, i, inside, anchors, slots, known, tilt, BLOCK, KIND, BOUNDED, COUNTED
    )
    some = count > 0
    log_h, log_l = log(heavy), log(light)
    tl.store(mean + i, tl.where(some, log_h - log_l + top * LN2, float("-inf")), mask=inside)
    tl.store(weight + i, tl.where(some, log_l + tilt * top * LN2, float("-inf")), mask=inside)
    tl.store(number + i, count, mask=inside)
    tl.store(heavy_sum + i, heavy, mask=inside)
    tl.store(light_sum + i, light, mask=inside)
    if not BOUNDED:
        # Above all scores where nobody was met: should rounding let somebody in later, he adds 0 and not 0·inf.
        tl.store(top_ + i, tl.where(some, top, float("inf")), mask=inside)


@triton.jit
def slopes(
    for_mean, for_weight, heavy_sum, light_sum, number, tilt_, steep_, flat_, anchors,
    BLOCK: tl.constexpr, THROUGH: tl.constexpr, WEIGHED: tl.constexpr,
):  # fmt: skip
    """What each anchor's exponentials are multiplied with in the derivative of a score, METHODS' gradient.

    (β+1)·softmax_{β+1} and −β·softmax_β; with detached weights (not THROUGH) 1 and 0
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
    tl.store(steep_ + i, steep / heavy, mask=inside)
    tl.store(flat_ + i, flat / light, mask=inside)


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
    steep_i, flat_i, top_i, lowest_i, highest_i, first_i, last_i, group_i,
    steep_, flat_, level_, lower_, upper_, first_, last_, inner_groups,
    excluded, allowed, column, columns, batch, offset, whole, named, allowed_rows, allowed_columns,
    OUTER: tl.constexpr, INNER: tl.constexpr, OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr,
    KIND: tl.constexpr, BOUNDED: tl.constexpr, OWN: tl.constexpr, EXCLUDED: tl.constexpr, GROUPS: tl.constexpr,
    ALLOWED: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr, RING: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """∂L/∂s of a tile of inner products: as rows of their outer anchors, of their inner anchors, or both added."""
    near = near_own(row, start, outer_rows, inner_rows, batch, offset, whole, OUTER, OUTER_BLOCK, INNER_BLOCK, OWN)
    group_j = 0
    if GROUPS > 0:
        group_j = tl.load(inner_groups + j, mask=j < inner_rows, other=0)[None, :]
    steep_j, flat_j, top_j = 0.0, 0.0, 0.0
    if INNER:
        steep_j = tl.load(steep_ + j, mask=j < inner_rows, other=0.0)[None, :] * factor
        flat_j = tl.load(flat_ + j, mask=j < inner_rows, other=0.0)[None, :] * factor
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
            OWN, EXCLUDED, GROUPS, ALLOWED,
        )  # fmt: skip
        scores = banded(scores, j[None, :], lowest_i, highest_i, first_i, last_i, column, LOWER, UPPER, RING)
        if INNER and KIND != POSITIVES and BOUNDED:
            # One exponential for both: their factors may be added first.
            return pulled(scores, lost, steep_i + steep_j, flat_i + flat_j, 0.0, tilt, KIND, BOUNDED, not RING, EXACT)
        found = pulled(scores, lost, steep_i, flat_i, top_i, tilt, KIND, BOUNDED, not RING, EXACT)
        if INNER:
            found += pulled(scores, lost, steep_j, flat_j, top_j, tilt, KIND, BOUNDED, not RING, EXACT)
        return found
    else:
        scores = hidden(
            found * scale, j[None, :], i[:, None], inner_rows, outer_rows, near, column, columns, batch, offset, whole,
            excluded, named, group_j, group_i, allowed, allowed_rows, allowed_columns,
            OWN, EXCLUDED, GROUPS, ALLOWED,
        )  # fmt: skip
        lowest, highest, first, last = lowest_i, highest_i, 0, 0
        if LOWER == 2:
            lowest = tl.load(lower_ + j, mask=j < inner_rows, other=0.0)[None, :] * step
        if UPPER == 2:
            highest = tl.load(upper_ + j, mask=j < inner_rows, other=0.0)[None, :] * step
        if RING:
            first = tl.load(first_ + j, mask=j < inner_rows, other=0)[None, :]
            last = tl.load(last_ + j, mask=j < inner_rows, other=0)[None, :]
        scores = banded(scores, i[:, None], lowest, highest, first, last, column, LOWER, UPPER, RING)
        return pulled(scores, lost, steep_j, flat_j, top_j, tilt, KIND, BOUNDED, not RING, EXACT)


@triton.jit
def gradient(
    outer, inner, scale_, tilt_, factor_, lower_, upper_, first_, last_, level_,
    steep_, flat_, excluded, outer_groups, inner_groups, allowed, result,
    outer_rows, inner_rows, width, outer_stride, inner_stride, column, columns, batch, offset, whole, named,
    allowed_rows, allowed_columns, base, skip, result_stride, span,
    OUTER: tl.constexpr, INNER: tl.constexpr, OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr, SCALED: tl.constexpr, KIND: tl.constexpr,
    BOUNDED: tl.constexpr, OWN: tl.constexpr, EXCLUDED: tl.constexpr, GROUPS: tl.constexpr, ALLOWED: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, RING: tl.constexpr, EXACT: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of outer rows, from one stretch of ``span`` inner rows.

    If WHOLE, result is (stretches, outer_rows, width) and holds Σ ∂L/∂s·inner·scale. If rows are too wide to be summed
    on the chip, result is (outer_rows − base, inner_rows − skip) and holds ∂L/∂s·factor itself, for a product to
    follow; ``skip`` inner rows are left out.
    SCALED: multiply ∂L/∂s with ``factor_`` before it becomes a half-precision number.
    """
    row, part = base + tl.program_id(0) * OUTER_BLOCK, tl.program_id(1)
    i = row + tl.arange(0, OUTER_BLOCK)
    inside = i < outer_rows
    tilt, factor = tl.load(tilt_), 1.0
    step = unit(tilt, KIND, BOUNDED, RING)
    scale = tl.load(scale_) * LOG2E * step
    if SCALED:
        factor = tl.load(factor_)
    tile = rows_of(outer, row, outer_rows, width, outer_stride, OUTER_BLOCK, WIDTH, 0, DESCRIBED)
    lowest, highest, first, last, group = 0.0, 0.0, 0, 0, 0
    if LOWER == 1:
        lowest = lower_ * LOG2E * step
    if UPPER == 1:
        highest = upper_ * LOG2E * step
    steep, flat, top = 0.0, 0.0, 0.0
    if OUTER:
        if LOWER == 2:
            lowest = tl.load(lower_ + i, mask=inside, other=0.0)[:, None] * step
        if UPPER == 2:
            highest = tl.load(upper_ + i, mask=inside, other=0.0)[:, None] * step
        if RING:
            first = tl.load(first_ + i, mask=inside, other=0)[:, None]
            last = tl.load(last_ + i, mask=inside, other=0)[:, None]
        steep = tl.load(steep_ + i, mask=inside, other=0.0)[:, None] * factor
        flat = tl.load(flat_ + i, mask=inside, other=0.0)[:, None] * factor
        if KIND == POSITIVES:
            top = tl.load(level_ + i, mask=inside, other=0.0)[:, None] * LOG2E
        elif not BOUNDED:
            top = tl.load(level_ + i, mask=inside, other=0.0)[:, None]
    if GROUPS > 0:
        group = tl.load(outer_groups + i, mask=inside, other=0)[:, None]
    collected = tl.zeros((OUTER_BLOCK, WIDTH), tl.float32)
    for start in range(skip + part * span, min(skip + part * span + span, inner_rows), INNER_BLOCK):
        j = start + tl.arange(0, INNER_BLOCK)
        found, other = products(
            tile, outer, inner, row, start, outer_rows, inner_rows, width, outer_stride, inner_stride,
            OUTER_BLOCK, INNER_BLOCK, WIDTH, WHOLE, PRECISION, DESCRIBED,
        )  # fmt: skip
        weights = weighed(
            found, i, j, row, start, outer_rows, inner_rows, tl.load(scale_), scale, step, tilt, factor,
            steep, flat, top, lowest, highest, first, last, group,
            steep_, flat_, level_, lower_, upper_, first_, last_, inner_groups,
            excluded, allowed, column, columns, batch, offset, whole, named, allowed_rows, allowed_columns,
            OUTER, INNER, OUTER_BLOCK, INNER_BLOCK, KIND, BOUNDED, OWN, EXCLUDED, GROUPS, ALLOWED, LOWER, UPPER, RING,
            EXACT,
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
            stored = inside[:, None] & (j < inner_rows)[None, :]
            tl.store(pointer, weights.to(result.dtype.element_ty), mask=stored)
    if WHOLE:
        k = tl.arange(0, WIDTH)
        pointer = result + (part.to(tl.int64) * outer_rows + i)[:, None] * result_stride + k[None, :]
        tl.store(pointer, collected * (tl.load(scale_) / factor), mask=inside[:, None] & (k < width)[None, :])


@triton.jit
def scores(
    anchors_, candidates_, scale_, excluded, anchor_groups, candidate_groups, allowed, result,
    anchors, candidates, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole, named,
    allowed_rows, allowed_columns, result_stride, span,
    OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, OWN: tl.constexpr, EXCLUDED: tl.constexpr, GROUPS: tl.constexpr, ALLOWED: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """The scores themselves, (anchors, candidates), in base 2."""
    row, part = tl.program_id(0) * OUTER_BLOCK, tl.program_id(1)
    i = row + tl.arange(0, OUTER_BLOCK)
    tile = rows_of(anchors_, row, anchors, width, anchor_stride, OUTER_BLOCK, WIDTH, 0, DESCRIBED)
    scale, group = tl.load(scale_) * LOG2E, 0
    if GROUPS > 0:
        group = tl.load(anchor_groups + i, mask=i < anchors, other=0)[:, None]
    for start in range(part * span, min(part * span + span, candidates), INNER_BLOCK):
        j = start + tl.arange(0, INNER_BLOCK)
        found, _ = products(
            tile, anchors_, candidates_, row, start, anchors, candidates, width, anchor_stride, candidate_stride,
            OUTER_BLOCK, INNER_BLOCK, WIDTH, WHOLE, PRECISION, DESCRIBED,
        )  # fmt: skip
        near = near_own(row, start, anchors, candidates, batch, offset, whole, True, OUTER_BLOCK, INNER_BLOCK, OWN)
        other = 0
        if GROUPS > 0:
            other = tl.load(candidate_groups + j, mask=j < candidates, other=0)[None, :]
        found = hidden(
            found * scale, i[:, None], j[None, :], anchors, candidates, near, column, columns, batch, offset, whole,
            excluded, named, group, other, allowed, allowed_rows, allowed_columns, OWN, EXCLUDED, GROUPS, ALLOWED,
        )  # fmt: skip
        pointer = result + i.to(tl.int64)[:, None] * result_stride + j[None, :]
        tl.store(pointer, found, mask=(i < anchors)[:, None] & (j < candidates)[None, :])

"""Device functions that compute a tile of scores, mask it, and compute its exponentials.

Inside the kernels scores are in base 2, s·log₂e, because the hardware computes 2^x. A masked score is −inf, whose
exponential is exactly 0.
"""

# Arguments of Triton kernels have no types that mypy knows.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import os

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

# The same condition as Triton evaluates when it first reads these kernels.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

PLAIN = tl.constexpr(INTERPRETED)  # the interpreter has no libdevice; its functions are exact
ASSEMBLY = tl.constexpr(not INTERPRETED and torch.version.hip is None)  # inline PTX is for NVIDIA GPUs only
LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_REST = tl.constexpr(1.9259629911266175e-08)  # the rounding error of LOG2E in float32
LN2 = tl.constexpr(0.6931471805599453)
NO_INDEX = tl.constexpr(0x7FFFFFFF)  # an index beyond every candidate
LOWEST_SCORE = tl.constexpr(-3.4e38)  # below all scores except −inf, the score of masked candidates

# Tilts: β = 0, 1, 2 and ½ need one exponential for both sums, any other β two. POSITIVES: sums over positives instead.
NONE, ONE, TWO, HALF, ANY, POSITIVES = (tl.constexpr(kind) for kind in range(6))


@triton.jit
def row_ranges(base, skip, outer_rows, inner_rows, span, OUTER_BLOCK: tl.constexpr, CROSSED: tl.constexpr):
    """First row and end of the outer rows of a program (from ``base`` on) and of the inner rows of its part.

    CROSSED: outer and inner rows are the same matrix, and each half of the rows is compared only with the other half;
    programs take the first half, then the second
    """
    block, part = tl.program_id(0), tl.program_id(1)
    if CROSSED:
        half = outer_rows // 2
        blocks = tl.cdiv(half, OUTER_BLOCK)
        which = block // blocks
        own, other = which * half, (1 - which) * half
        return own + (block - which * blocks) * OUTER_BLOCK, own + half, other + part * span, other + half
    else:
        return base + block * OUTER_BLOCK, outer_rows, skip + part * span, inner_rows


@triton.jit
def load_rows(
    source,
    start,
    rows,
    width,
    stride,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    first,
    DESCRIPTOR: tl.constexpr = False,
):
    """Loads a tile (BLOCK, WIDTH) of a matrix (rows, width) from row ``start`` and column ``first``; 0 outside of it.

    source: a pointer, or with DESCRIPTOR a tensor descriptor, which is read by the copy engine (TMA)
    """
    if DESCRIPTOR:
        return source.load([start, first])
    else:
        i, k = tl.arange(0, BLOCK), first + tl.arange(0, WIDTH)
        inside = (start + i < rows)[:, None] & (k < width)[None, :]
        begin = source + (tl.full((), 0, tl.int64) + start) * stride
        return tl.load(begin + i[:, None] * stride + k[None, :], mask=inside, other=0.0)


@triton.jit
def inner_products(
    tile, outer, inner, row, start, outer_rows, inner_rows, width, outer_stride, inner_stride,
    OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr = False,
):  # fmt: skip
    """Inner products of a block of outer rows with a block of inner rows, and the inner rows themselves if WHOLE."""
    if WHOLE:
        other = load_rows(inner, start, inner_rows, width, inner_stride, INNER_BLOCK, WIDTH, 0, DESCRIPTOR)
        return tl.dot(tile, tl.trans(other), input_precision=PRECISION), other
    else:
        found = tl.zeros((OUTER_BLOCK, INNER_BLOCK), tl.float32)
        for first in range(0, width, WIDTH):
            outer_tile = load_rows(outer, row, outer_rows, width, outer_stride, OUTER_BLOCK, WIDTH, first, DESCRIPTOR)
            inner_tile = load_rows(inner, start, inner_rows, width, inner_stride, INNER_BLOCK, WIDTH, first, DESCRIPTOR)
            found = tl.dot(outer_tile, tl.trans(inner_tile), found, input_precision=PRECISION)
        return found, tile


@triton.jit
def deferred(x, ENABLED: tl.constexpr = True):
    """Returns the integer x, such that the compiler cannot compute it before a branch and then execute both branches.

    Not ENABLED where a branch does much work, and next to float32 products, where it would cause register spilling.
    """
    if not (ASSEMBLY and ENABLED):
        return x
    else:
        return tl.inline_asm_elementwise("", "=r,0", [x], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def mask_scores(
    scores, anchor, candidate, anchors, candidates, needs_mask, column, columns,
    batch, offset, whole, excluded, num_excluded, anchor_group, candidate_group, allowed, allowed_rows, allowed_columns,
    OWN: tl.constexpr, EXCLUDED: tl.constexpr, GROUPS: tl.constexpr, ALLOWED: tl.constexpr,
    HALF_PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores with −inf where a candidate is not eligible for an anchor.

    anchor, candidate: their indices, one along each side of the tile · needs_mask: whether the tile may hold an
    anchor's own instance or entries beyond the matrix · anchor_group, candidate_group: shaped as ``anchor`` and
    ``candidate``, if GROUPS · the rest: see `hardneg.losses.kernels.interface.Eligibility`
    """
    if needs_mask:
        # A separate name: loads below that use ``anchors`` would wait for the branch.
        rows = deferred(anchors, HALF_PRECISION and not OWN)
        eligible = (anchor < rows) & (candidate < candidates)
        if OWN:
            eligible = eligible & (offset + anchor % batch != candidate % whole)
        scores = tl.where(eligible, scores, float("-inf"))
    if EXCLUDED:
        for which in range(num_excluded):
            excluded_index = tl.load(
                excluded + anchor.to(tl.int64) * num_excluded + which, mask=anchor < anchors, other=-1
            )
            scores = tl.where(excluded_index == candidate + column, float("-inf"), scores)
    if GROUPS == 1:  # only candidates of other groups are eligible
        scores = tl.where(anchor_group == candidate_group, float("-inf"), scores)
    if GROUPS == 2:  # only candidates of the same group are eligible
        scores = tl.where(anchor_group == candidate_group, scores, float("-inf"))
    if ALLOWED:
        mask_column = candidate + column - (columns - allowed_columns)
        known = (anchor < anchors) & (candidate < candidates) & (mask_column >= 0)
        pointer = allowed + (anchor % allowed_rows).to(tl.int64) * allowed_columns + mask_column
        scores = tl.where(tl.load(pointer, mask=known, other=1) != 0, scores, float("-inf"))
    return scores


@triton.jit
def mask_ties(scores, candidate, tied, lowest, highest, first, last, HALF_PRECISION: tl.constexpr):
    """Scores with −inf where they equal ``lowest`` before candidate ``first``, or ``highest`` after candidate ``last``.

    tied: whether the tile may hold such scores
    """
    if tied:
        candidate += deferred(0, HALF_PRECISION)
        out = ((scores == lowest) & (candidate < first)) | ((scores == highest) & (candidate > last))
        scores = tl.where(out, float("-inf"), scores)
    return scores


@triton.jit
def in_bands(scores, lowest, highest, LOWER: tl.constexpr, UPPER: tl.constexpr):
    """1.0 where a score is within the bands, else 0.0; bounds are numbers or vectors along the anchors' side.

    Floats, because the comparison instruction returns them, and the product with one fuses with the addition of a sum.
    lowest: at least LOWEST_SCORE, so that masked scores are outside of every band
    """
    if LOWER and UPPER:
        return tl.where((scores >= lowest) & (scores <= highest), 1.0, 0.0)
    elif LOWER:
        return tl.where(scores >= lowest, 1.0, 0.0)
    else:
        return tl.where((scores <= highest) & (scores > float("-inf")), 1.0, 0.0)


@triton.jit
def score_prescale(tilt, KIND: tl.constexpr, BOUNDED: tl.constexpr, RING: tl.constexpr):
    """The factor that scores are multiplied with beforehand, so that one exponential needs no multiplication."""
    if not BOUNDED or RING:  # the edges of a ring are compared with unscaled scores
        return 1.0
    elif KIND == HALF:
        return 0.5
    elif KIND == ANY:
        return tilt
    else:
        return 1.0


@triton.jit
def exponentials(scores, tilt, KIND: tl.constexpr, PRESCALED: tl.constexpr):
    """e^{(β+1)s} and e^{βs}. PRESCALED: whether the scores were multiplied with `score_prescale`."""
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
        root = tl.exp2(scores if PRESCALED else 0.5 * scores)
        return root * root * root, root
    elif PRESCALED:
        return tl.exp2(scores * (1 + 1 / tilt)), tl.exp2(scores)
    else:
        return tl.exp2(scores * (tilt + 1)), tl.exp2(scores * tilt)


@triton.jit
def rounding_error(found, scale, natural_scale, prescale, tilt):
    """Rounding error of a score, in base e and to first order; scale: ``natural_scale``·``prescale``·log₂e, rounded."""
    factor = natural_scale * prescale
    rest = tl.fma(factor, LOG2E, -scale) + factor * LOG2E_REST
    error = (tl.fma(found, scale, -(found * scale)) + found * rest) * (LN2 / prescale)
    # For very large scores the error is too large for a first-order correction, which would make exponentials negative.
    return tl.where(tl.abs(error) * (tilt + 1) < 0.01, error, 0.0)


@triton.jit
def tile_needs_mask(row, start, outer_rows, inner_rows, batch, offset, whole, OUTER: tl.constexpr,
             OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr, OWN: tl.constexpr):  # fmt: skip
    """Whether a tile may hold pairs of an anchor with its own instance, or entries beyond the matrix."""
    needs_mask = (start + INNER_BLOCK > inner_rows) | (row + OUTER_BLOCK > outer_rows)
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
        # The instances of the tile's anchors are begin … begin + anchors − 1, unless the next view starts in between.
        gap = (candidate - begin - offset) % whole
        gap = tl.where(gap < 0, gap + whole, gap)
        needs_mask = needs_mask | (begin + anchors > batch) | (gap < anchors) | (gap > whole - candidates)
    return needs_mask


@triton.jit
def log(x):
    """The logarithm with full float32 precision, which the hardware instruction does not have."""
    if PLAIN:
        return tl.log(x)
    else:
        return libdevice.log(x)


@triton.jit
def softplus(x):
    """log₂(1 + 2^x)."""
    small = tl.exp2(-tl.abs(x))
    # 1 + small is rounded; the quotient corrects its logarithm (Goldberg 1991, theorem 4).
    more = 1 + small
    left = more - 1
    rest = tl.where(left == 0, small * LOG2E, tl.log2(more) * (small / tl.where(left == 0, 1.0, left)))
    return tl.maximum(x, 0.0) + rest


@triton.jit
def load_anchors(
    anchors_, anchor_groups, scale_, i, row, anchors, width, anchor_stride,
    OUTER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, DESCRIPTOR: tl.constexpr = False,
):  # fmt: skip
    """Loads the anchors i, from ``row`` on: their tile, the scale of scores in base 2, and their groups."""
    group = 0
    if GROUPS > 0:
        group = tl.load(anchor_groups + i, mask=i < anchors, other=0)[:, None]
    tile = load_rows(anchors_, row, anchors, width, anchor_stride, OUTER_BLOCK, WIDTH, 0, DESCRIPTOR)
    return tile, tl.load(scale_) * LOG2E, group


@triton.jit
def compute_scores(
    tile, anchors_, candidates_, i, row, start, group, candidate_groups, excluded, allowed, scale,
    anchors, candidates, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole, num_excluded,
    allowed_rows, allowed_columns,
    OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, OWN: tl.constexpr, EXCLUDED: tl.constexpr, GROUPS: tl.constexpr, ALLOWED: tl.constexpr,
    DESCRIPTOR: tl.constexpr = False,
):  # fmt: skip
    """Indices j of the candidates from ``start`` on, their inner products with anchors i, and the masked scores."""
    j = start + tl.arange(0, INNER_BLOCK)
    found, _ = inner_products(
        tile, anchors_, candidates_, row, start, anchors, candidates, width, anchor_stride, candidate_stride,
        OUTER_BLOCK, INNER_BLOCK, WIDTH, WHOLE, PRECISION, DESCRIPTOR,
    )  # fmt: skip
    needs_mask = tile_needs_mask(
        row, start, anchors, candidates, batch, offset, whole, True, OUTER_BLOCK, INNER_BLOCK, OWN
    )
    other = 0
    if GROUPS > 0:
        other = tl.load(candidate_groups + j, mask=j < candidates, other=0)[None, :]
    scores = mask_scores(
        found * scale, i[:, None], j[None, :], anchors, candidates, needs_mask, column, columns, batch, offset, whole,
        excluded, num_excluded, group, other, allowed, allowed_rows, allowed_columns, OWN, EXCLUDED, GROUPS, ALLOWED,
        tile.dtype != tl.float32,
    )  # fmt: skip
    return j, found, scores

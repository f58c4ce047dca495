"""Device functions that compute a tile of scores, mask it, and compute its exponentials; and what they take.

A tile has *outer* rows along its first side and *inner* rows along its second. Either side may be the anchors'. Scores
are in base 2, s·log₂e, because the hardware computes 2^x. A masked score is −inf, whose exponential is exactly 0.
"""

# Arguments of Triton kernels have no types that mypy knows.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

# The same condition as Triton evaluates when it first reads these kernels.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

PLAIN = tl.constexpr(INTERPRETED)  # the interpreter has no libdevice; its functions are exact
ASSEMBLY = tl.constexpr(not INTERPRETED and torch.version.hip is None)  # inline PTX is for NVIDIA GPUs only
LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_REST = tl.constexpr(1.9259629911266175e-08)  # the rounding error of LOG2E in float32
LN2 = tl.constexpr(0.6931471805599453)
LOWEST_SCORE = tl.constexpr(-3.4e38)  # below all scores except −inf, the score of masked candidates

# Tilts: β = 0, 1, 2 and ½ need one exponential for both sums, any other β two. POSITIVES: sums over positives instead.
NONE, ONE, TWO, HALF, ANY, POSITIVES = (tl.constexpr(kind) for kind in range(6))


class Numbers(NamedTuple):
    """1/temperature and the tilt β, () each, on the device.

    row_max: if only the device knows whether exponentials are bounded, 0 if they are and else −inf; otherwise None
    """

    scale: Tensor
    tilt: Tensor
    row_max: Tensor | None


class Sizes(NamedTuple):
    """Numbers of outer and inner rows, their width, and the strides of their matrices."""

    outer: int
    inner: int
    width: int
    outer_stride: int
    inner_stride: int


class Mask(NamedTuple):
    """Which candidates of a block are eligible; see `interface.Eligibility`.

    column, columns: index of the block's first candidate among all, and their number · batch, offset, whole: of the
    `RowLayout` · anchor_groups (A,), candidate_groups (N,): of the block
    """

    column: int
    columns: int
    batch: int
    offset: int
    whole: int
    excluded: Tensor | None
    num_excluded: int
    anchor_groups: Tensor | None
    candidate_groups: Tensor | None
    allowed: Tensor | None
    allowed_rows: int
    allowed_columns: int


class Bounds(NamedTuple):
    """Bounds of the scores that are kept: each a number, one per anchor (A,) in base 2, or None."""

    lower: Any
    upper: Any


class Traits(NamedTuple):
    """What a program is compiled for.

    kind: of the tilt, or POSITIVES · bounded: exponentials are within the range of float32 · guarded: do nothing if the
    device finds that ``bounded`` is wrong; see `Numbers` · exact: correct the rounding errors of exponents · counted:
    count the negatives · own, excluded, allowed: parts of the mask that are used · groups: 0 not used, 1 other groups
    are eligible, 2 the same group, 3 other labels (an anchor's label < 0 is unknown), 4 the same label or instance, but
    not the same row · lower, upper: 0 no bound, 1 one for all, 2 one per anchor · precision: of float32 products
    """

    kind: int
    bounded: bool
    guarded: bool
    exact: bool
    counted: bool
    own: bool
    excluded: bool
    groups: int
    allowed: bool
    lower: int
    upper: int
    precision: str


@triton.jit
def applies(numbers, T: tl.constexpr):
    """Whether the program is the one of two that computes the results; see `Traits.guarded`."""
    return tl.load(numbers.row_max) == (0.0 if T.bounded else float("-inf"))


@triton.jit
def row_ranges(numbers, base, skip, sizes, span, T: tl.constexpr, OUTER_BLOCK: tl.constexpr, CROSSED: tl.constexpr):
    """First row and end of the outer rows of a program (from ``base`` on) and of the inner rows of its part.

    CROSSED: outer and inner rows are the same matrix, and each half of the rows is compared only with the other half;
    programs take the first half, then the second
    """
    block, part = tl.program_id(0), tl.program_id(1)
    if CROSSED:
        half = sizes.outer // 2
        blocks = tl.cdiv(half, OUTER_BLOCK)
        which = block // blocks
        own, other = which * half, (1 - which) * half
        row, row_end = own + (block - which * blocks) * OUTER_BLOCK, own + half
        begin, end = other + part * span, other + half
    else:
        row, row_end, begin, end = base + block * OUTER_BLOCK, sizes.outer, skip + part * span, sizes.inner
    if T.guarded:
        row_end, end = tl.where(applies(numbers, T), row_end, row), tl.where(applies(numbers, T), end, begin)
    return row, row_end, begin, end


@triton.jit
def load_rows(source, start, rows, width, stride, first, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
              DESCRIPTOR: tl.constexpr):  # fmt: skip
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
    tile, outer, inner, sizes, row, start, row_end, end, T: tl.constexpr, OUTER_BLOCK: tl.constexpr,
    INNER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Inner products of a block of outer rows with a block of inner rows, and the inner rows themselves if WHOLE."""
    if WHOLE:
        other = load_rows(inner, start, end, sizes.width, sizes.inner_stride, 0, INNER_BLOCK, WIDTH, DESCRIPTOR)
        return tl.dot(tile, tl.trans(other), input_precision=T.precision), other
    else:
        found = tl.zeros((OUTER_BLOCK, INNER_BLOCK), tl.float32)
        for first in range(0, sizes.width, WIDTH):
            left = load_rows(
                outer, row, row_end, sizes.width, sizes.outer_stride, first, OUTER_BLOCK, WIDTH, DESCRIPTOR
            )
            right = load_rows(inner, start, end, sizes.width, sizes.inner_stride, first, INNER_BLOCK, WIDTH, DESCRIPTOR)
            found = tl.dot(left, tl.trans(right), found, input_precision=T.precision)
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
def may_need_mask(mask, anchor, candidate, anchor_end, candidate_end, T: tl.constexpr,
                  ANCHORS: tl.constexpr, CANDIDATES: tl.constexpr):  # fmt: skip
    """Whether a tile may hold pairs of an anchor with its own instance, or entries beyond the matrix.

    anchor, candidate: the first ones of the tile · anchor_end, candidate_end: of the matrix
    """
    needed = (anchor + ANCHORS > anchor_end) | (candidate + CANDIDATES > candidate_end)
    if T.own:
        begin = anchor % mask.batch
        # The instances of the tile's anchors are begin … begin + ANCHORS − 1, unless the next view starts in between.
        gap = (candidate - begin - mask.offset) % mask.whole
        gap = tl.where(gap < 0, gap + mask.whole, gap)
        needed = needed | (begin + ANCHORS > mask.batch) | (gap < ANCHORS) | (gap > mask.whole - CANDIDATES)
    return needed


@triton.jit
def mask_scores(scores, mask, anchor, candidate, anchor_end, candidate_end, needed, anchor_group, candidate_group,
                T: tl.constexpr, HALF_PRECISION: tl.constexpr):  # fmt: skip
    """Scores with −inf where a candidate is not eligible for an anchor.

    anchor, candidate: their indices, one along each side of the tile · needed: see `may_need_mask` · anchor_group,
    candidate_group: shaped as ``anchor`` and ``candidate``, if there are groups
    """
    if needed:
        # A separate name: loads below that use ``anchor_end`` would wait for the branch.
        rows = deferred(anchor_end, HALF_PRECISION and not T.own)
        eligible = (anchor < rows) & (candidate < candidate_end)
        if T.own:
            eligible = eligible & (mask.offset + anchor % mask.batch != candidate % mask.whole)
        scores = tl.where(eligible, scores, float("-inf"))
    if T.excluded:
        for which in range(mask.num_excluded):
            pointer = mask.excluded + anchor.to(tl.int64) * mask.num_excluded + which
            excluded = tl.load(pointer, mask=anchor < anchor_end, other=-1)
            scores = tl.where(excluded == candidate + mask.column, float("-inf"), scores)
    if T.groups == 1:
        scores = tl.where(anchor_group == candidate_group, float("-inf"), scores)
    if T.groups == 2:
        scores = tl.where(anchor_group == candidate_group, scores, float("-inf"))
    if T.groups == 3:
        scores = tl.where((anchor_group == candidate_group) & (anchor_group >= 0), float("-inf"), scores)
    if T.groups == 4:
        same = (anchor_group == candidate_group) & (anchor_group >= 0)
        same = same | (mask.offset + anchor % mask.batch == candidate % mask.whole)
        own_row = mask.offset + anchor % mask.batch + anchor // mask.batch * mask.whole == candidate
        scores = tl.where(same & (own_row == 0), scores, float("-inf"))
    if T.allowed:
        column = candidate + mask.column - (mask.columns - mask.allowed_columns)
        known = (anchor < anchor_end) & (candidate < candidate_end) & (column >= 0)
        pointer = mask.allowed + (anchor % mask.allowed_rows).to(tl.int64) * mask.allowed_columns + column
        scores = tl.where(tl.load(pointer, mask=known, other=1) != 0, scores, float("-inf"))
    return scores


@triton.jit
def load_bounds(bounds, i, inside, prescale, T: tl.constexpr):
    """The bounds of anchors i: numbers, or one per anchor."""
    lowest, highest = 0.0, 0.0
    if T.lower == 1:
        lowest = tl.maximum(bounds.lower * LOG2E * prescale, LOWEST_SCORE)
    if T.lower == 2:
        lowest = tl.maximum(tl.load(bounds.lower + i, mask=inside, other=0.0) * prescale, LOWEST_SCORE)
    if T.upper == 1:
        highest = bounds.upper * LOG2E * prescale
    if T.upper == 2:
        highest = tl.load(bounds.upper + i, mask=inside, other=0.0) * prescale
    return lowest, highest


@triton.jit
def in_bounds(scores, lowest, highest, T: tl.constexpr):
    """1.0 where a score is within the bounds, else 0.0; bounds are numbers or vectors along the anchors' side.

    Floats, because the comparison instruction returns them, and the product with one fuses with the addition of a sum.
    lowest: at least LOWEST_SCORE, so that masked scores are outside. NaN is inside, so that sums become NaN.
    """
    if T.lower > 0 and T.upper > 0:
        return tl.where((scores < lowest) | (scores > highest), 0.0, 1.0)
    elif T.lower > 0:
        return tl.where(scores < lowest, 0.0, 1.0)
    else:
        return tl.where((scores > highest) | (scores == float("-inf")), 0.0, 1.0)


@triton.jit
def score_prescale(tilt, T: tl.constexpr):
    """The factor that scores are multiplied with beforehand, so that one exponential needs no multiplication."""
    if T.bounded and T.kind == HALF:
        return 0.5
    elif T.bounded and T.kind == ANY:
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
def softplus(x):
    """log₂(1 + 2^x)."""
    small = tl.exp2(-tl.abs(x))
    # 1 + small is rounded; the quotient corrects its logarithm (Goldberg 1991, theorem 4).
    more = 1 + small
    left = more - 1
    rest = tl.where(left == 0, small * LOG2E, tl.log2(more) * (small / tl.where(left == 0, 1.0, left)))
    return tl.maximum(x, 0.0) + rest


@triton.jit
def log(x):
    """The logarithm with full float32 precision, which the hardware instruction does not have."""
    if PLAIN:
        return tl.log(x)
    else:
        return libdevice.log(x)


@triton.jit
def exp(x):
    """The exponential with full float32 precision."""
    if PLAIN:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def expm1(x):
    """e^x − 1 without cancellation."""
    if PLAIN:  # Taylor series for small x
        return tl.where(tl.abs(x) < 1e-3, x * (1 + 0.5 * x * (1 + x / 3)), tl.exp(x) - 1)
    else:
        return libdevice.expm1(x)


@triton.jit
def log1p(x):
    """log(1 + x) without cancellation."""
    if PLAIN:
        return tl.where(x < 1e-4, x * (1 - 0.5 * x), tl.log(1 + x))
    else:
        return libdevice.log1p(x)

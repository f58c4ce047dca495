"""Tiles of scores, and what is done to them on the chip: what the Triton programs of the fused kernel are made of.

Inside, scores are in base 2, s·log₂e, because that is the exponential the hardware has; what may not count is −inf,
whose exponential is exactly 0.
"""

# Arguments of programs have no types that mypy knows.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import os

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

# As Triton itself decides it, when these programs are first read.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

PLAIN = tl.constexpr(INTERPRETED)  # the interpreter has no other functions, and exact ones
ASSEMBLY = tl.constexpr(not INTERPRETED and torch.version.hip is None)  # what is written in PTX only NVIDIA's GPUs read
LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_REST = tl.constexpr(1.9259629911266175e-08)  # what float32 leaves out of it
LN2 = tl.constexpr(0.6931471805599453)
LAST = tl.constexpr(0x7FFFFFFF)  # an index beyond every candidate
LEAST = tl.constexpr(-3.4e38)  # a score below all but that of the hidden, −inf

# Tilts: β = 0, 1, 2 and ½ need one exponential for both sums, any other β two. POSITIVES asks other questions of a row.
NONE, ONE, TWO, HALF, ANY, POSITIVES = (tl.constexpr(kind) for kind in range(6))


@triton.jit
def placed(base, skip, outer_rows, inner_rows, span, OUTER_BLOCK: tl.constexpr, CROSSED: tl.constexpr):
    """Where a program begins and where its rows end: of the outer rows, from ``base`` on, and of its inner stretch.

    CROSSED: both are the same rows, and each half meets the other: programs take the first half, then the second
    """
    block, part = tl.program_id(0), tl.program_id(1)
    if CROSSED:
        half = outer_rows // 2
        blocks = tl.cdiv(half, OUTER_BLOCK)
        which = block // blocks
        mine, other = which * half, (1 - which) * half
        return mine + (block - which * blocks) * OUTER_BLOCK, mine + half, other + part * span, other + half
    else:
        return base + block * OUTER_BLOCK, outer_rows, skip + part * span, inner_rows


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
def deferred(x, WORTH_IT: tl.constexpr = True):
    """x, an integer, which the compiler must not make before a branch is taken: else it takes both, and chooses.

    Not worth it where a branch does much, and harmful beside float32 products: there it makes the compiler keep
    everything in memory.
    """
    if not (ASSEMBLY and WORTH_IT):
        return x
    else:
        return tl.inline_asm_elementwise("", "=r,0", [x], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def hidden(
    scores, anchor, candidate, anchors, candidates, near, column, columns,
    batch, offset, whole, excluded, named, anchor_group, candidate_group, allowed, allowed_rows, allowed_columns,
    OWN: tl.constexpr, EXCLUDED: tl.constexpr, GROUPS: tl.constexpr, ALLOWED: tl.constexpr,
    HALF_PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores with −inf where an anchor may not meet a candidate.

    anchor, candidate: their indices, one along each side of the tile · near: may the tile hold an anchor's own
    instance, or reach beyond the matrix? · anchor_group, candidate_group: as ``anchor`` and ``candidate``, if GROUPS ·
    the rest: see `hardneg.losses.kernels.interface.Eligibility`
    """
    if near:
        # Not named ``anchors``: what is loaded below would wait for the branch.
        rows = deferred(anchors, HALF_PRECISION and not OWN)
        meets = (anchor < rows) & (candidate < candidates)
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
def untied(scores, candidate, tied, lowest, highest, first, last, HALF_PRECISION: tl.constexpr):
    """Scores with −inf where they equal ``lowest`` before candidate ``first``, or ``highest`` behind ``last``.

    tied: may the tile hold such?
    """
    if tied:
        candidate += deferred(0, HALF_PRECISION)
        out = ((scores == lowest) & (candidate < first)) | ((scores == highest) & (candidate > last))
        scores = tl.where(out, float("-inf"), scores)
    return scores


@triton.jit
def in_bands(scores, lowest, highest, LOWER: tl.constexpr, UPPER: tl.constexpr):
    """1 where a score is within the bands, 0 where not; bounds are numbers or lie along the anchors' side of the tile.

    Numbers, because the hardware makes them by the comparison itself, and to multiply with one is free in a sum.
    lowest: LEAST or more, for what is hidden is outside of every band
    """
    if LOWER and UPPER:
        return tl.where((scores >= lowest) & (scores <= highest), 1.0, 0.0)
    elif LOWER:
        return tl.where(scores >= lowest, 1.0, 0.0)
    else:
        return tl.where((scores <= highest) & (scores > float("-inf")), 1.0, 0.0)


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
def begun(
    anchors_, anchor_groups, scale_, i, row, anchors, width, anchor_stride,
    OUTER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, DESCRIBED: tl.constexpr = False,
):  # fmt: skip
    """What a walk of anchors i, from ``row`` on, begins with: these, the scale of scores in base 2, their groups."""
    group = 0
    if GROUPS > 0:
        group = tl.load(anchor_groups + i, mask=i < anchors, other=0)[:, None]
    tile = rows_of(anchors_, row, anchors, width, anchor_stride, OUTER_BLOCK, WIDTH, 0, DESCRIBED)
    return tile, tl.load(scale_) * LOG2E, group


@triton.jit
def scored(
    tile, anchors_, candidates_, i, row, start, group, candidate_groups, excluded, allowed, scale,
    anchors, candidates, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole, named,
    allowed_rows, allowed_columns,
    OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, OWN: tl.constexpr, EXCLUDED: tl.constexpr, GROUPS: tl.constexpr, ALLOWED: tl.constexpr,
    DESCRIBED: tl.constexpr = False,
):  # fmt: skip
    """Of anchors i, from ``row`` on, and candidates from ``start`` on: these, inner products, scores of who meet."""
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
        excluded, named, group, other, allowed, allowed_rows, allowed_columns, OWN, EXCLUDED, GROUPS, ALLOWED,
        tile.dtype != tl.float32,
    )  # fmt: skip
    return j, found, scores

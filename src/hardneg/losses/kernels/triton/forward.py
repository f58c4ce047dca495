"""The Triton programs of the fused kernel: tiles of scores that never leave the chip.

Every program owns a block of *outer* rows and walks over tiles of *inner* rows. In the forward pass outer rows are
anchors and inner rows candidates; the backward pass runs with the roles either way round, and where anchors and
candidates are the same rows (``OUTER and INNER``) both derivatives of a pair come from one tile. Nothing is added by
atomics: what several programs find for the same rows is kept apart and added in a fixed order.
"""

# Arguments of programs have no types that mypy knows.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from hardneg.losses.kernels.triton.score_tile import (
    LAST,
    LEAST,
    LN2,
    LOG2E,
    NONE,
    POSITIVES,
    begun,
    exponentials,
    in_bands,
    log,
    placed,
    rounding,
    rows_of,
    scored,
    softplus,
    unit,
    untied,
)  # fmt: skip


@triton.jit
def keep(pointer, x, inside, ADDED: tl.constexpr):
    """Store numbers, or add them to those there; nobody else does meanwhile."""
    if ADDED:
        x += tl.load(pointer, mask=inside, other=0.0)
    tl.store(pointer, x, mask=inside)


@triton.jit
def sums(
    anchors_, candidates_, scale_, tilt_, lower_, upper_, first_, last_, level_,
    excluded, anchor_groups, candidate_groups, allowed,
    heavy_, light_, count_, peak_, again_,
    anchors, candidates, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole, named,
    allowed_rows, allowed_columns, base, skip, behind, slot, span,
    OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, KIND: tl.constexpr, BOUNDED: tl.constexpr, COUNTED: tl.constexpr, OWN: tl.constexpr,
    EXCLUDED: tl.constexpr, GROUPS: tl.constexpr, ALLOWED: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
    RING: tl.constexpr, SOME: tl.constexpr, EXACT: tl.constexpr, MIRRORED: tl.constexpr, CROSSED: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Sums over one stretch of ``span`` candidates, for each of a block of anchors; slot by slot.

    LOWER, UPPER: 0 none, 1 one bound for all, 2 one per anchor · EXACT: make good what rounding takes from exponents ·
    SOME: only where the block holds an anchor that is summed again · base, skip: first anchor and first candidate ·
    MIRRORED: anchors and candidates are the same rows, these anchors end before ``behind``, and candidates from there
    on get what they sum as anchors, too, in the slot of the block; all is added to what the slots hold · CROSSED: see
    `placed` · outputs: (slots, anchors) each
    """
    row, row_end, begin, end = placed(base, skip, anchors, candidates, span, OUTER_BLOCK, CROSSED)
    if MIRRORED:
        row_end = behind
    i = row + tl.arange(0, OUTER_BLOCK)
    # Older versions of Triton read both sides of an ``and``.
    if SOME:  # noqa: SIM102
        if tl.max(tl.load(again_ + i, mask=i < row_end, other=0), axis=0) == 0:
            return
    tilt = tl.load(tilt_)
    step = unit(tilt, KIND, BOUNDED, RING)
    scale = tl.load(scale_) * LOG2E * step
    tile = rows_of(anchors_, row, row_end, width, anchor_stride, OUTER_BLOCK, WIDTH, 0, DESCRIBED)
    lowest, highest, first, last, level, group = 0.0, 0.0, 0, 0, 0.0, 0
    BANDED: tl.constexpr = LOWER > 0 or UPPER > 0
    if LOWER == 1:
        lowest = tl.maximum(lower_ * LOG2E * step, LEAST)
    if UPPER == 1:
        highest = upper_ * LOG2E * step
    if LOWER == 2:
        lowest = tl.maximum(tl.load(lower_ + i, mask=i < row_end, other=0.0)[:, None] * step, LEAST)
    if UPPER == 2:
        highest = tl.load(upper_ + i, mask=i < row_end, other=0.0)[:, None] * step
    until, since = 0, 0
    if RING:
        first = tl.load(first_ + i, mask=i < row_end, other=0)
        last = tl.load(last_ + i, mask=i < row_end, other=LAST)
        until, since = tl.max(first, axis=0), tl.min(last, axis=0)
        first, last = first[:, None], last[:, None]
    if KIND == POSITIVES:
        level = tl.load(level_ + i, mask=i < row_end, other=0.0)[:, None] * LOG2E
    if GROUPS > 0:
        group = tl.load(anchor_groups + i, mask=i < row_end, other=0)[:, None]
    heavy = tl.zeros((OUTER_BLOCK,), tl.float32)
    light = tl.zeros((OUTER_BLOCK,), tl.float32)
    count = tl.zeros((OUTER_BLOCK,), tl.float32)
    peak = tl.full((OUTER_BLOCK,), float("-inf"), tl.float32)
    for start in range(begin, min(begin + span, end), INNER_BLOCK):
        j, found, scores = scored(
            tile, anchors_, candidates_, i, row, start, group, candidate_groups, excluded, allowed, scale,
            row_end, end, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole, named,
            allowed_rows, allowed_columns, OUTER_BLOCK, INNER_BLOCK, WIDTH, WHOLE, PRECISION,
            OWN, EXCLUDED, GROUPS, ALLOWED, DESCRIBED,
        )  # fmt: skip
        if RING:
            tied = (start + column < until) | (start + INNER_BLOCK - 1 + column > since)
            scores = untied(
                scores, j[None, :] + column, tied, lowest, highest, first, last, tile.dtype != tl.float32
            )  # fmt: skip
        if BANDED:
            within = in_bands(scores, lowest, highest, LOWER, UPPER)
            if not BOUNDED:
                scores = tl.where(within > 0, scores, float("-inf"))
        if KIND == POSITIVES:
            met = scores > float("-inf")
            gap = level - scores
            heavy += tl.sum(tl.where(met, softplus(gap), 0.0), axis=1) * LN2
            light += tl.sum(tl.where(met, scores, 0.0), axis=1) * LN2
            count += tl.sum(tl.where(met, 1 / (1 + tl.exp2(-gap)), 0.0), axis=1)
        else:
            if COUNTED:
                counted = within if BANDED else tl.where(scores > float("-inf"), 1.0, 0.0)
                count += tl.sum(counted, axis=1)
            if not BOUNDED:
                higher = tl.maximum(peak, tl.max(scores, axis=1))
                # Where nothing was met yet, −inf less −inf would be NaN.
                known = tl.where(higher == float("-inf"), 0.0, higher)
                heavy = heavy * tl.exp2((peak - known) * (tilt + 1))
                if KIND != NONE:
                    light = light * tl.exp2((peak - known) * tilt)
                peak = higher
                scores -= known[:, None]
            steep, flat = exponentials(scores, tilt, KIND, BOUNDED and not RING)
            if EXACT:
                lost = rounding(found, scale, tl.load(scale_), step, tilt)
                steep, flat = steep * (1 + lost * (tilt + 1)), flat * (1 + lost * tilt)
            if BANDED and BOUNDED:
                steep, flat = steep * within, flat * within
            heavy += tl.sum(steep, axis=1)
            if KIND != NONE:
                light += tl.sum(flat, axis=1)
            if MIRRORED:  # noqa: SIM102
                if start >= behind:
                    across, there = (slot + tl.program_id(0)) * anchors + j, j < end
                    keep(heavy_ + across, tl.sum(steep, axis=0), there, MIRRORED)
                    if KIND != NONE:
                        keep(light_ + across, tl.sum(flat, axis=0), there, MIRRORED)
                    if COUNTED:
                        keep(count_ + across, tl.sum(counted, axis=0), there, MIRRORED)
    place, inside = (slot + tl.program_id(1)) * anchors + i, i < row_end
    keep(heavy_ + place, heavy, inside, MIRRORED)
    if KIND != NONE:
        keep(light_ + place, light, inside, MIRRORED)
    if COUNTED or KIND == POSITIVES:
        keep(count_ + place, count, inside, MIRRORED)
    if not BOUNDED:
        tl.store(peak_ + place, peak, mask=inside)


AT_ONCE = tl.constexpr(16)  # slots that `collect` reads together


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
    # Several slots at once, because every load takes its time however many there are.
    some = tl.arange(0, AT_ONCE)[:, None]
    if not BOUNDED:
        top += float("-inf")
        for first in range(0, slots, AT_ONCE):
            place, real = (first + some) * anchors + i[None, :], inside[None, :] & (first + some < slots)
            top = tl.maximum(top, tl.max(tl.load(peak_ + place, mask=real, other=float("-inf")), axis=0))
        top = tl.where(top == float("-inf"), 0.0, top)
    for first in range(0, slots, AT_ONCE):
        place, real = (first + some) * anchors + i[None, :], inside[None, :] & (first + some < slots)
        down = 0.0
        if not BOUNDED:
            down = tl.load(peak_ + place, mask=real, other=float("-inf")) - top[None, :]
        part = tl.load(heavy_ + place, mask=real, other=0.0)
        heavy += tl.sum(part if BOUNDED else part * tl.exp2(down * (tilt + 1)), axis=0)
        if KIND != NONE:
            part = tl.load(light_ + place, mask=real, other=0.0)
            light += tl.sum(part if BOUNDED else part * tl.exp2(down * tilt), axis=0)
        if COUNTED:
            count += tl.sum(tl.load(count_ + place, mask=real, other=0.0), axis=0)
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
    # The quotient first: a difference of logarithms would lose the digits that they have before the point.
    tl.store(mean + i, tl.where(some, log(tl.div_rn(heavy, light)) + top * LN2, float("-inf")), mask=inside)
    tl.store(weight + i, tl.where(some, log(light) + tilt * top * LN2, float("-inf")), mask=inside)
    tl.store(number + i, count, mask=inside)
    tl.store(heavy_sum + i, heavy, mask=inside)
    tl.store(light_sum + i, light, mask=inside)
    if not BOUNDED:
        # Above all scores where nobody was met: should rounding let somebody in later, he adds 0 and not 0·inf.
        tl.store(top_ + i, tl.where(some, top, float("inf")), mask=inside)


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
    tile, scale, group = begun(
        anchors_, anchor_groups, scale_, i, row, anchors, width, anchor_stride, OUTER_BLOCK, WIDTH, GROUPS, DESCRIBED
    )
    for start in range(part * span, min(part * span + span, candidates), INNER_BLOCK):
        j, _, found = scored(
            tile, anchors_, candidates_, i, row, start, group, candidate_groups, excluded, allowed, scale,
            anchors, candidates, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole, named,
            allowed_rows, allowed_columns, OUTER_BLOCK, INNER_BLOCK, WIDTH, WHOLE, PRECISION,
            OWN, EXCLUDED, GROUPS, ALLOWED, DESCRIBED,
        )  # fmt: skip
        pointer = result + i.to(tl.int64)[:, None] * result_stride + j[None, :]
        tl.store(pointer, found, mask=(i < anchors)[:, None] & (j < candidates)[None, :])

"""Triton kernels of the forward pass: sums of exponentials over tiles of scores that are never stored.

A program computes the scores of a block of *outer* rows with the tiles of *inner* rows of one part. In the forward pass
outer rows are anchors and inner rows candidates. The backward pass runs with either assignment, and if anchors and
candidates are the same rows (``OUTER and INNER``) both derivatives of a pair are computed from one tile. No floats are
added by atomics: the results of several programs for the same rows are stored in separate *slots* and added in a fixed
order.
"""

# Arguments of Triton kernels have no types that mypy knows.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from hardneg.losses.kernels.triton.score_tile import (
    LN2,
    LOG2E,
    LOWEST_SCORE,
    NO_INDEX,
    NONE,
    POSITIVES,
    compute_scores,
    exponentials,
    in_bands,
    load_anchors,
    load_rows,
    log,
    mask_ties,
    rounding_error,
    row_ranges,
    score_prescale,
    softplus,
)  # fmt: skip


@triton.jit
def store(pointer, x, inside, ACCUMULATE: tl.constexpr):
    """Stores x, or adds it to the stored values (ACCUMULATE); no other program accesses them at the same time."""
    if ACCUMULATE:
        x += tl.load(pointer, mask=inside, other=0.0)
    tl.store(pointer, x, mask=inside)


@triton.jit
def sums(
    anchors_, candidates_, scale_, tilt_, lower_, upper_, first_, last_, level_,
    excluded, anchor_groups, candidate_groups, allowed,
    tilted_sum_, weight_sum_, count_, slot_max_, recompute_,
    anchors, candidates, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole, num_excluded,
    allowed_rows, allowed_columns, base, skip, strip_end, slot, span,
    OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, KIND: tl.constexpr, BOUNDED: tl.constexpr, COUNTED: tl.constexpr, OWN: tl.constexpr,
    EXCLUDED: tl.constexpr, GROUPS: tl.constexpr, ALLOWED: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
    RING: tl.constexpr, RECOMPUTE: tl.constexpr, EXACT: tl.constexpr, SYMMETRIC: tl.constexpr, CROSSED: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Sums over one part of ``span`` candidates for each of a block of anchors, one slot per part.

    tilted_sum_, weight_sum_: Σ e^{(β+1)s} and Σ e^{βs}, relative to the maximum slot_max_ if not BOUNDED; (slots,
    anchors) each, as count_ · LOWER, UPPER: 0 no bound, 1 one bound for all, 2 one per anchor · EXACT: correct the
    rounding errors of exponents · RECOMPUTE: only for blocks with an anchor marked in recompute_ · base, skip: first
    anchor and first candidate · SYMMETRIC: anchors and candidates are the same rows, the anchors of this strip end
    before ``strip_end``, and the sums over columns from there on are added for these candidates as anchors, in the slot
    of the block; all results are added to the slots · CROSSED: see `row_ranges`
    """
    row, row_end, begin, end = row_ranges(base, skip, anchors, candidates, span, OUTER_BLOCK, CROSSED)
    if SYMMETRIC:
        row_end = strip_end
    i = row + tl.arange(0, OUTER_BLOCK)
    # Older versions of Triton evaluate both sides of ``and``.
    if RECOMPUTE:  # noqa: SIM102
        if tl.max(tl.load(recompute_ + i, mask=i < row_end, other=0), axis=0) == 0:
            return
    tilt = tl.load(tilt_)
    prescale = score_prescale(tilt, KIND, BOUNDED, RING)
    scale = tl.load(scale_) * LOG2E * prescale
    tile = load_rows(anchors_, row, row_end, width, anchor_stride, OUTER_BLOCK, WIDTH, 0, DESCRIPTOR)
    lowest, highest, first, last, level, group = 0.0, 0.0, 0, 0, 0.0, 0
    BANDED: tl.constexpr = LOWER > 0 or UPPER > 0
    if LOWER == 1:
        lowest = tl.maximum(lower_ * LOG2E * prescale, LOWEST_SCORE)
    if UPPER == 1:
        highest = upper_ * LOG2E * prescale
    if LOWER == 2:
        lowest = tl.maximum(tl.load(lower_ + i, mask=i < row_end, other=0.0)[:, None] * prescale, LOWEST_SCORE)
    if UPPER == 2:
        highest = tl.load(upper_ + i, mask=i < row_end, other=0.0)[:, None] * prescale
    tie_end, tie_start = 0, 0
    if RING:
        first = tl.load(first_ + i, mask=i < row_end, other=0)
        last = tl.load(last_ + i, mask=i < row_end, other=NO_INDEX)
        tie_end, tie_start = tl.max(first, axis=0), tl.min(last, axis=0)
        first, last = first[:, None], last[:, None]
    if KIND == POSITIVES:
        level = tl.load(level_ + i, mask=i < row_end, other=0.0)[:, None] * LOG2E
    if GROUPS > 0:
        group = tl.load(anchor_groups + i, mask=i < row_end, other=0)[:, None]
    tilted_sum = tl.zeros((OUTER_BLOCK,), tl.float32)
    weight_sum = tl.zeros((OUTER_BLOCK,), tl.float32)
    count = tl.zeros((OUTER_BLOCK,), tl.float32)
    row_max = tl.full((OUTER_BLOCK,), float("-inf"), tl.float32)
    for start in range(begin, min(begin + span, end), INNER_BLOCK):
        j, found, scores = compute_scores(
            tile, anchors_, candidates_, i, row, start, group, candidate_groups, excluded, allowed, scale,
            row_end, end, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole,
            num_excluded, allowed_rows, allowed_columns, OUTER_BLOCK, INNER_BLOCK, WIDTH, WHOLE, PRECISION,
            OWN, EXCLUDED, GROUPS, ALLOWED, DESCRIPTOR,
        )  # fmt: skip
        if RING:
            tied = (start + column < tie_end) | (start + INNER_BLOCK - 1 + column > tie_start)
            scores = mask_ties(
                scores, j[None, :] + column, tied, lowest, highest, first, last, tile.dtype != tl.float32
            )  # fmt: skip
        if BANDED:
            within = in_bands(scores, lowest, highest, LOWER, UPPER)
            if not BOUNDED:
                scores = tl.where(within > 0, scores, float("-inf"))
        if KIND == POSITIVES:
            eligible = scores > float("-inf")
            gap = level - scores
            tilted_sum += tl.sum(tl.where(eligible, softplus(gap), 0.0), axis=1) * LN2
            weight_sum += tl.sum(tl.where(eligible, scores, 0.0), axis=1) * LN2
            count += tl.sum(tl.where(eligible, 1 / (1 + tl.exp2(-gap)), 0.0), axis=1)
        else:
            if COUNTED:
                counted = within if BANDED else tl.where(scores > float("-inf"), 1.0, 0.0)
                count += tl.sum(counted, axis=1)
            if not BOUNDED:
                new_max = tl.maximum(row_max, tl.max(scores, axis=1))
                # Without an eligible candidate so far, −inf − −inf would be NaN.
                finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
                tilted_sum = tilted_sum * tl.exp2((row_max - finite_max) * (tilt + 1))
                if KIND != NONE:
                    weight_sum = weight_sum * tl.exp2((row_max - finite_max) * tilt)
                row_max = new_max
                scores -= finite_max[:, None]
            tilted_exp, weight_exp = exponentials(scores, tilt, KIND, BOUNDED and not RING)
            if EXACT:
                error = rounding_error(found, scale, tl.load(scale_), prescale, tilt)
                tilted_exp, weight_exp = tilted_exp * (1 + error * (tilt + 1)), weight_exp * (1 + error * tilt)
            if BANDED and BOUNDED:
                tilted_exp, weight_exp = tilted_exp * within, weight_exp * within
            tilted_sum += tl.sum(tilted_exp, axis=1)
            if KIND != NONE:
                weight_sum += tl.sum(weight_exp, axis=1)
            if SYMMETRIC:  # noqa: SIM102
                if start >= strip_end:
                    mirror, inside_j = (slot + tl.program_id(0)) * anchors + j, j < end
                    store(tilted_sum_ + mirror, tl.sum(tilted_exp, axis=0), inside_j, SYMMETRIC)
                    if KIND != NONE:
                        store(weight_sum_ + mirror, tl.sum(weight_exp, axis=0), inside_j, SYMMETRIC)
                    if COUNTED:
                        store(count_ + mirror, tl.sum(counted, axis=0), inside_j, SYMMETRIC)
    target, inside = (slot + tl.program_id(1)) * anchors + i, i < row_end
    store(tilted_sum_ + target, tilted_sum, inside, SYMMETRIC)
    if KIND != NONE:
        store(weight_sum_ + target, weight_sum, inside, SYMMETRIC)
    if COUNTED or KIND == POSITIVES:
        store(count_ + target, count, inside, SYMMETRIC)
    if not BOUNDED:
        tl.store(slot_max_ + target, row_max, mask=inside)


SLOTS_PER_LOAD = tl.constexpr(16)  # slots that `collect` loads together


@triton.jit
def collect(
    tilted_sum_, weight_sum_, count_, slot_max_, i, inside, anchors, slots, known, tilt,
    BLOCK: tl.constexpr, KIND: tl.constexpr, BOUNDED: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Sums of both exponentials relative to the row maximum, count, and row maximum of anchors i, from all slots.

    known: the count of every anchor, if not COUNTED
    """
    tilted_sum = tl.zeros((BLOCK,), tl.float32)
    weight_sum = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.float32)
    row_max = tl.zeros((BLOCK,), tl.float32)
    # Several slots per load, because the latency of a load does not depend on its size.
    offsets = tl.arange(0, SLOTS_PER_LOAD)[:, None]
    if not BOUNDED:
        row_max += float("-inf")
        for first in range(0, slots, SLOTS_PER_LOAD):
            index, valid = (first + offsets) * anchors + i[None, :], inside[None, :] & (first + offsets < slots)
            row_max = tl.maximum(row_max, tl.max(tl.load(slot_max_ + index, mask=valid, other=float("-inf")), axis=0))
        row_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    for first in range(0, slots, SLOTS_PER_LOAD):
        index, valid = (first + offsets) * anchors + i[None, :], inside[None, :] & (first + offsets < slots)
        shift = 0.0
        if not BOUNDED:
            shift = tl.load(slot_max_ + index, mask=valid, other=float("-inf")) - row_max[None, :]
        part = tl.load(tilted_sum_ + index, mask=valid, other=0.0)
        tilted_sum += tl.sum(part if BOUNDED else part * tl.exp2(shift * (tilt + 1)), axis=0)
        if KIND != NONE:
            part = tl.load(weight_sum_ + index, mask=valid, other=0.0)
            weight_sum += tl.sum(part if BOUNDED else part * tl.exp2(shift * tilt), axis=0)
        if COUNTED:
            count += tl.sum(tl.load(count_ + index, mask=valid, other=0.0), axis=0)
    if not COUNTED:
        count += known
    return tilted_sum, count if KIND == NONE else weight_sum, count, row_max


@triton.jit
def finish(
    tilted_sum_, weight_sum_, count_, slot_max_, tilt_, mean, weight, number, tilted_total, weight_total, row_max_,
    anchors, slots, known,
    BLOCK: tl.constexpr, KIND: tl.constexpr, BOUNDED: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """The log-sums of each anchor from the sums of all slots."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, tilt = i < anchors, tl.load(tilt_)
    tilted_sum, weight_sum, count, row_max = collect(
        tilted_sum_, weight_sum_, count_, slot_max_, i, inside, anchors, slots, known, tilt,
        BLOCK, KIND, BOUNDED, COUNTED,
    )  # fmt: skip
    nonempty = count > 0
    # The logarithm of the quotient: a difference of logarithms would cancel.
    tl.store(
        mean + i, tl.where(nonempty, log(tl.div_rn(tilted_sum, weight_sum)) + row_max * LN2, float("-inf")), mask=inside
    )
    tl.store(weight + i, tl.where(nonempty, log(weight_sum) + tilt * row_max * LN2, float("-inf")), mask=inside)
    tl.store(number + i, count, mask=inside)
    tl.store(tilted_total + i, tilted_sum, mask=inside)
    tl.store(weight_total + i, weight_sum, mask=inside)
    if not BOUNDED:
        # +inf for an empty support: if rounding adds a candidate in the backward pass, its term is 0 and not 0·inf.
        tl.store(row_max_ + i, tl.where(nonempty, row_max, float("inf")), mask=inside)


@triton.jit
def scores(
    anchors_, candidates_, scale_, excluded, anchor_groups, candidate_groups, allowed, result,
    anchors, candidates, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole, num_excluded,
    allowed_rows, allowed_columns, result_stride, span,
    OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, OWN: tl.constexpr, EXCLUDED: tl.constexpr, GROUPS: tl.constexpr, ALLOWED: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """The scores themselves, (anchors, candidates), in base 2."""
    row, part = tl.program_id(0) * OUTER_BLOCK, tl.program_id(1)
    i = row + tl.arange(0, OUTER_BLOCK)
    tile, scale, group = load_anchors(
        anchors_, anchor_groups, scale_, i, row, anchors, width, anchor_stride, OUTER_BLOCK, WIDTH, GROUPS, DESCRIPTOR
    )
    for start in range(part * span, min(part * span + span, candidates), INNER_BLOCK):
        j, _, found = compute_scores(
            tile, anchors_, candidates_, i, row, start, group, candidate_groups, excluded, allowed, scale,
            anchors, candidates, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole,
            num_excluded, allowed_rows, allowed_columns, OUTER_BLOCK, INNER_BLOCK, WIDTH, WHOLE, PRECISION,
            OWN, EXCLUDED, GROUPS, ALLOWED, DESCRIPTOR,
        )  # fmt: skip
        pointer = result + i.to(tl.int64)[:, None] * result_stride + j[None, :]
        tl.store(pointer, found, mask=(i < anchors)[:, None] & (j < candidates)[None, :])

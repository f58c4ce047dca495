"""Triton kernels of the forward pass: sums of exponentials over tiles of scores that are never stored, and losses.

A program computes the scores of a block of anchors with the candidates of one part. The results of several programs for
the same anchors are stored in separate *slots* and added in a fixed order, so they are bitwise reproducible. The
formulas are those of `hardneg.losses.kernels.reference`.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from hardneg.losses.kernels.triton.score_tile import (
    LN2,
    LOG2E,
    NONE,
    POSITIVES,
    applies,
    exponentials,
    in_bounds,
    inner_products,
    load_bounds,
    load_rows,
    log,
    mask_scores,
    may_need_mask,
    rounding_error,
    row_ranges,
    score_prescale,
    softplus,
)


class Slots(NamedTuple):
    """Sums of each anchor, one slot per part, (slots, A) each.

    tilted, weight: Σ e^{(β+1)s} and Σ e^{βs}, relative to ``maximum`` if they are not bounded · counts: of negatives.
    Over positives p of a level: Σ softplus(level − p), Σ p, the derivative of the first in the level, and their number
    """

    tilted: Tensor
    weight: Tensor
    counts: Tensor
    maximum: Tensor


@triton.jit
def terms(found, scores, within, numbers, scale, prescale, tilt, T: tl.constexpr):
    """e^{(β+1)s} and e^{βs} of a tile, 0 outside of the bounds.

    found: inner products · scores: of these, masked and minus the row maximum if they are not bounded
    """
    tilted_exp, weight_exp = exponentials(scores, tilt, T.kind, T.bounded)
    if T.exact:
        error = rounding_error(found, scale, tl.load(numbers.scale), prescale, tilt)
        tilted_exp, weight_exp = tilted_exp * (1 + error * (tilt + 1)), weight_exp * (1 + error * tilt)
    if (T.lower > 0 or T.upper > 0) and T.bounded:
        tilted_exp, weight_exp = tilted_exp * within, weight_exp * within
    return tilted_exp, weight_exp


@triton.jit
def sums(
    outer, inner, numbers, sizes, mask, bounds, level_, slots, slot, base, skip, span,
    T: tl.constexpr, CROSSED: tl.constexpr, OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, WHOLE: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Sums over one part of ``span`` candidates (inner rows) for each of a block of anchors (outer rows).

    level_: (A,) for sums over positives · slot: of the first part · base, skip: first anchor and first candidate ·
    CROSSED: see `row_ranges`
    """
    row, row_end, begin, end = row_ranges(numbers, base, skip, sizes, span, T, OUTER_BLOCK, CROSSED)
    i = row + tl.arange(0, OUTER_BLOCK)
    inside = i < row_end
    tilt = tl.load(numbers.tilt)
    prescale = score_prescale(tilt, T)
    scale = tl.load(numbers.scale) * LOG2E * prescale
    tile = load_rows(outer, row, row_end, sizes.width, sizes.outer_stride, 0, OUTER_BLOCK, WIDTH, DESCRIPTOR)
    BANDED: tl.constexpr = T.lower > 0 or T.upper > 0
    lowest, highest = load_bounds(bounds, i, inside, prescale, T)
    lowest = lowest[:, None] if T.lower == 2 else lowest
    highest = highest[:, None] if T.upper == 2 else highest
    level, group = 0.0, 0
    if T.kind == POSITIVES:
        level = tl.load(level_ + i, mask=inside, other=0.0)[:, None] * LOG2E
    if T.groups > 0:
        group = tl.load(mask.anchor_groups + i, mask=inside, other=0)[:, None]
    tilted_sum = tl.zeros((OUTER_BLOCK,), tl.float32)
    weight_sum = tl.zeros((OUTER_BLOCK,), tl.float32)
    count = tl.zeros((OUTER_BLOCK,), tl.float32)
    row_max = tl.full((OUTER_BLOCK,), 0.0 if T.kind == POSITIVES else float("-inf"), tl.float32)
    for start in range(begin, min(begin + span, end), INNER_BLOCK):
        j = start + tl.arange(0, INNER_BLOCK)
        found, _ = inner_products(
            tile, outer, inner, sizes, row, start, row_end, end, T, OUTER_BLOCK, INNER_BLOCK, WIDTH, WHOLE, DESCRIPTOR
        )
        other_group = 0
        if T.groups > 0:
            other_group = tl.load(mask.candidate_groups + j, mask=j < end, other=0)[None, :]
        scores = mask_scores(
            found * scale, mask, i[:, None], j[None, :], row_end, end,
            may_need_mask(mask, row, start, row_end, end, T, OUTER_BLOCK, INNER_BLOCK),
            group, other_group, T, tile.dtype != tl.float32,
        )  # fmt: skip
        within = 1.0
        if BANDED:
            within = in_bounds(scores, lowest, highest, T)
            if not T.bounded:
                scores = tl.where(within > 0, scores, float("-inf"))
        if T.kind == POSITIVES:
            eligible = scores != float("-inf")
            gap = level - scores
            tilted_sum += tl.sum(tl.where(eligible, softplus(gap), 0.0), axis=1) * LN2
            weight_sum += tl.sum(tl.where(eligible, scores, 0.0), axis=1) * LN2
            count += tl.sum(tl.where(eligible, 1 / (1 + tl.exp2(-gap)), 0.0), axis=1)
            row_max += tl.sum(tl.where(eligible, 1.0, 0.0), axis=1)
        else:
            if T.counted:
                counted = within if BANDED else tl.where(scores > float("-inf"), 1.0, 0.0)
                count += tl.sum(counted, axis=1)
            if not T.bounded:
                new_max = tl.maximum(row_max, tl.max(scores, axis=1))
                # Without an eligible candidate so far, −inf − −inf would be NaN.
                finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
                tilted_sum = tilted_sum * tl.exp2((row_max - finite_max) * (tilt + 1))
                if T.kind != NONE:
                    weight_sum = weight_sum * tl.exp2((row_max - finite_max) * tilt)
                row_max = new_max
                scores -= finite_max[:, None]
            tilted_exp, weight_exp = terms(found, scores, within, numbers, scale, prescale, tilt, T)
            tilted_sum += tl.sum(tilted_exp, axis=1)
            if T.kind != NONE:
                weight_sum += tl.sum(weight_exp, axis=1)
    target = (slot + tl.program_id(1)) * sizes.outer + i
    tl.store(slots.tilted + target, tilted_sum, mask=inside)
    if T.kind != NONE:
        tl.store(slots.weight + target, weight_sum, mask=inside)
    if T.counted or T.kind == POSITIVES:
        tl.store(slots.counts + target, count, mask=inside)
    if not T.bounded or T.kind == POSITIVES:
        tl.store(slots.maximum + target, row_max, mask=inside)


@triton.jit
def partial_sums(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Adds those rows of a tile of scores that the same thread holds, r, r + 8 and r + 64, in half precision."""
    if ROWS < 64:
        return x
    else:
        parts = tl.sum(tl.reshape(x, (ROWS // 64, 4, 2, 8, COLUMNS)), axis=2)
        return tl.reshape(tl.sum(parts, axis=0), (32, COLUMNS))


@triton.jit
def symmetric_sums(
    outer, inner, numbers, sizes, mask, bounds, slots, plane, skip, outer_end,
    T: tl.constexpr, OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Sums over candidates for each anchor, with every score computed once and added for both of its anchors.

    Outer and inner rows are the same matrix: all rows, or if the halves are crossed, the first half up to ``outer_end``
    and the second from ``skip`` on. A program takes one block of outer rows after another, and of the inner rows from
    that block on every n-th tile, where n is the number of parts. It adds the sums of inner rows to its own slot, and
    stores those of outer rows in the slot of its part, so no other program writes the same element. plane: number of
    elements from ``slots.tilted`` to ``slots.weight`` · INNER_BLOCK divides OUTER_BLOCK

    A tile of scores has inner rows along its first side. Sums over its columns, which one thread holds, are cheap and
    done for every tile. Sums over its rows are collected over all tiles of a block first.
    """
    program, programs, part, parts = tl.program_id(0), tl.num_programs(0), tl.program_id(1), tl.num_programs(1)
    tilt = tl.load(numbers.tilt)
    prescale = score_prescale(tilt, T)
    scale = tl.load(numbers.scale) * LOG2E * prescale
    lowest, highest = load_bounds(bounds, 0, True, prescale, T)  # one for all
    if T.guarded:
        outer_end = tl.where(applies(numbers, T), outer_end, 0)
    PARTIAL: tl.constexpr = INNER_BLOCK if INNER_BLOCK < 64 else 32
    for strip in range(tl.cdiv(outer_end, programs * OUTER_BLOCK)):
        # In turns from either end, because later blocks have fewer inner rows.
        row = (strip * programs + tl.where(strip % 2 == 0, program, programs - 1 - program)) * OUTER_BLOCK
        i = row + tl.arange(0, OUTER_BLOCK)
        inside = i < outer_end
        mirrored = tl.where(skip > 0, skip, row + OUTER_BLOCK)  # the first inner row that is not in this block
        first = tl.maximum(row - skip, 0) // INNER_BLOCK
        first += (part + parts - first % parts) % parts
        end = tl.where(row < outer_end, sizes.inner, 0)
        tile = load_rows(outer, row, outer_end, sizes.width, sizes.outer_stride, 0, OUTER_BLOCK, WIDTH, DESCRIPTOR)
        group = 0
        if T.groups > 0:
            group = tl.load(mask.anchor_groups + i, mask=inside, other=0)[None, :]
        tilted_sum = tl.zeros((PARTIAL, OUTER_BLOCK), tl.float32)
        weight_sum = tl.zeros((PARTIAL, OUTER_BLOCK), tl.float32)
        count = tl.zeros((PARTIAL, OUTER_BLOCK), tl.float32)
        for start in range(skip + first * INNER_BLOCK, end, parts * INNER_BLOCK):
            j = start + tl.arange(0, INNER_BLOCK)
            if WHOLE:
                rows = load_rows(
                    inner, start, sizes.inner, sizes.width, sizes.inner_stride, 0, INNER_BLOCK, WIDTH, DESCRIPTOR
                )
                found = tl.dot(rows, tl.trans(tile), input_precision=T.precision)
            else:
                found, _ = inner_products(
                    tile, inner, outer, sizes, start, row, sizes.inner, outer_end, T, INNER_BLOCK, OUTER_BLOCK, WIDTH,
                    WHOLE, DESCRIPTOR,
                )  # fmt: skip
            other_group = 0
            if T.groups > 0:
                other_group = tl.load(mask.candidate_groups + j, mask=j < sizes.inner, other=0)[:, None]
            scores = mask_scores(
                found * scale, mask, i[None, :], j[:, None], outer_end, sizes.inner,
                may_need_mask(mask, row, start, outer_end, sizes.inner, T, OUTER_BLOCK, INNER_BLOCK),
                group, other_group, T, tile.dtype != tl.float32,
            )  # fmt: skip
            within = 1.0
            if T.lower > 0 or T.upper > 0:
                within = in_bounds(scores, lowest, highest, T)
            tilted_exp, weight_exp = terms(found, scores, within, numbers, scale, prescale, tilt, T)
            # Atomic, because nothing waits for it then. No other program adds to the same element.
            target, added = program * sizes.inner + j, (j >= mirrored) & (j < sizes.inner)
            tilted_sum += partial_sums(tilted_exp, INNER_BLOCK, OUTER_BLOCK)
            row_sums = tl.sum(tilted_exp, axis=1)
            if T.kind == NONE:
                tl.atomic_add(slots.tilted + target, row_sums, mask=added, sem="relaxed")
            else:  # both together, because their layout changes through shared memory
                weight_sum += partial_sums(weight_exp, INNER_BLOCK, OUTER_BLOCK)
                both = tl.join(row_sums, tl.sum(weight_exp, axis=1))
                pointer = slots.tilted + target[:, None] + plane * tl.arange(0, 2)[None, :]
                tl.atomic_add(pointer, both, mask=added[:, None], sem="relaxed")
            if T.counted:
                counted = within if T.lower > 0 or T.upper > 0 else tl.where(scores > float("-inf"), 1.0, 0.0)
                count += partial_sums(counted, INNER_BLOCK, OUTER_BLOCK)
                tl.atomic_add(slots.counts + target, tl.sum(counted, axis=1), mask=added, sem="relaxed")
        target = (programs + part) * sizes.outer + i
        tl.store(slots.tilted + target, tl.sum(tilted_sum, axis=0), mask=inside)
        if T.kind != NONE:
            tl.store(slots.weight + target, tl.sum(weight_sum, axis=0), mask=inside)
        if T.counted:
            tl.store(slots.counts + target, tl.sum(count, axis=0), mask=inside)


SLOTS_PER_LOAD = tl.constexpr(16)  # because the latency of a load does not depend on its size


@triton.jit
def add_slots(slots, i, anchors, number, known, tilt, BLOCK: tl.constexpr, KIND: tl.constexpr, BOUNDED: tl.constexpr,
              COUNTED: tl.constexpr):  # fmt: skip
    """Sums of both exponentials relative to the row maximum, count, and row maximum of anchors i, from all slots.

    number: of slots · known: the count of every anchor, if not COUNTED
    """
    tilted_sum = tl.zeros((BLOCK,), tl.float32)
    weight_sum = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.float32)
    row_max = tl.zeros((BLOCK,), tl.float32)
    offsets = tl.arange(0, SLOTS_PER_LOAD)[:, None]
    if not BOUNDED:
        row_max += float("-inf")
        for first in range(0, number, SLOTS_PER_LOAD):
            index, valid = (first + offsets) * anchors + i[None, :], (i < anchors)[None, :] & (first + offsets < number)
            slot_max = tl.load(slots.maximum + index, mask=valid, other=float("-inf"))
            row_max = tl.maximum(row_max, tl.max(slot_max, axis=0))
        row_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    for first in range(0, number, SLOTS_PER_LOAD):
        index, valid = (first + offsets) * anchors + i[None, :], (i < anchors)[None, :] & (first + offsets < number)
        shift = 0.0
        if not BOUNDED:
            shift = tl.load(slots.maximum + index, mask=valid, other=float("-inf")) - row_max[None, :]
        part = tl.load(slots.tilted + index, mask=valid, other=0.0)
        tilted_sum += tl.sum(part if BOUNDED else part * tl.exp2(shift * (tilt + 1)), axis=0)
        if KIND != NONE:
            part = tl.load(slots.weight + index, mask=valid, other=0.0)
            weight_sum += tl.sum(part if BOUNDED else part * tl.exp2(shift * tilt), axis=0)
        if COUNTED:
            count += tl.sum(tl.load(slots.counts + index, mask=valid, other=0.0), axis=0)
    if not COUNTED:
        count += known
    return tilted_sum, count if KIND == NONE else weight_sum, count, row_max


class Totals(NamedTuple):
    """Results of each anchor, (A,): those of `LogSums`, the sums of both exponentials, the row maximum in base 2."""

    mean: Tensor
    weight: Tensor
    counts: Tensor
    tilted_sum: Tensor
    weight_sum: Tensor
    row_max: Tensor


@triton.jit
def finish(slots, numbers, totals, anchors, number, known, log_number, BLOCK: tl.constexpr, KIND: tl.constexpr,
           BOUNDED: tl.constexpr, COUNTED: tl.constexpr, LEVEL: tl.constexpr):  # fmt: skip
    """The log-sums of each anchor from the sums of all slots.

    LEVEL: 0 stores the second log-sum in ``weight``; else log(Q·G), where Q is the count (1) or e^log_number (2)
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, tilt = i < anchors, tl.load(numbers.tilt)
    tilted_sum, weight_sum, count, row_max = add_slots(
        slots, i, anchors, number, known, tilt, BLOCK, KIND, BOUNDED, COUNTED
    )
    nonempty = count > 0
    # The logarithm of the quotient: a difference of logarithms would cancel.
    mean = tl.where(nonempty, log(tl.div_rn(tilted_sum, weight_sum)) + row_max * LN2, float("-inf"))
    tl.store(totals.mean + i, mean, mask=inside)
    level = mean + (log(count) if LEVEL == 1 else log_number)
    weight = log(weight_sum) + tilt * row_max * LN2 if LEVEL == 0 else level
    tl.store(totals.weight + i, tl.where(nonempty, weight, float("-inf") if LEVEL == 0 else 0.0), mask=inside)
    tl.store(totals.counts + i, count, mask=inside)
    tl.store(totals.tilted_sum + i, tilted_sum, mask=inside)
    tl.store(totals.weight_sum + i, weight_sum, mask=inside)
    # +inf for an empty support: if rounding adds a candidate in the backward pass, its term is 0 and not 0·inf.
    tl.store(totals.row_max + i, tl.where(nonempty, row_max, float("inf")), mask=inside)

"""Triton kernels that find the edges of percentile bands that `percentile_edges` did not find: collect, bisect.

Both return immediately if they are not needed. Atomics add integers only: counts, which do not depend on the order, and
positions in a list whose order no result depends on.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from hardneg.losses.kernels.triton.order_statistics import MASKED_KEY, key_score, midpoint, score_key
from hardneg.losses.kernels.triton.percentile_edges import edge_rank
from hardneg.losses.kernels.triton.percentile_lists import (
    BELOW_HIGH,
    BELOW_LOW,
    COUNTERS,
    CUT_MULTIPLE,
    LISTED,
    NO_ROOM,
    STATUS,
    next_above,
)
from hardneg.losses.kernels.triton.score_tile import NO_INDEX, compute_scores, load_anchors


@triton.jit
def pivot_of(pivot_, cut_, offset, inside):
    """A pivot of each row, the next higher score, and its cut; where not ``inside`` all candidates are below."""
    pivot = tl.load(pivot_ + offset, mask=inside, other=float("inf"))
    return pivot, next_above(pivot), tl.load(cut_ + offset, mask=inside, other=0)


@triton.jit
def collect(
    anchors_, candidates_, scale_, excluded, anchor_groups, candidate_groups, allowed, pivot_, cut_, counters, list_,
    anchors, candidates, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole, num_excluded,
    allowed_rows, allowed_columns, base, capacity, span,
    OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, OWN: tl.constexpr, EXCLUDED: tl.constexpr, GROUPS: tl.constexpr, ALLOWED: tl.constexpr,
):  # fmt: skip
    """The same as `list_candidates` for anchors with a full list: one list for all parts, and ties separated by cuts.

    Returns immediately if there is no such anchor. list_: (anchors − base, capacity), for one part of ``span``
    candidates
    """
    tl.static_assert(INNER_BLOCK <= CUT_MULTIPLE)
    row, part = base + tl.program_id(0) * OUTER_BLOCK, tl.program_id(1)
    i = row + tl.arange(0, OUTER_BLOCK)
    strip_row = i - base
    counter, lists = counters + strip_row * COUNTERS, (list_ + strip_row.to(tl.int64) * capacity)[:, None]
    no_room = tl.load(counter + STATUS, mask=i < anchors, other=0) == NO_ROOM
    if tl.max(no_room.to(tl.int32), axis=0) > 0:
        tile, scale, group = load_anchors(
            anchors_, anchor_groups, scale_, i, row, anchors, width, anchor_stride, OUTER_BLOCK, WIDTH, GROUPS
        )
        pivot_0, above_0, cut_0 = pivot_of(pivot_, cut_, strip_row * 4, no_room)
        pivot_1, above_1, cut_1 = pivot_of(pivot_, cut_, strip_row * 4 + 1, no_room)
        pivot_2, above_2, cut_2 = pivot_of(pivot_, cut_, strip_row * 4 + 2, no_room)
        pivot_3, above_3, cut_3 = pivot_of(pivot_, cut_, strip_row * 4 + 3, no_room)
        for start in range(part * span, min(part * span + span, candidates), INNER_BLOCK):
            j, _, scores = compute_scores(
                tile, anchors_, candidates_, i, row, start, group, candidate_groups, excluded, allowed, scale,
                anchors, candidates, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole,
                num_excluded, allowed_rows, allowed_columns, OUTER_BLOCK, INNER_BLOCK, WIDTH, WHOLE, PRECISION,
                OWN, EXCLUDED, GROUPS, ALLOWED,
            )  # fmt: skip
            # If the pivots of both edges overlap, the range of the upper edge begins at the end of that of the lower
            # edge.
            bound_0 = tl.where(start < cut_0, above_0, pivot_0)
            bound_1 = tl.maximum(bound_0, tl.where(start < cut_1, above_1, pivot_1))
            bound_2 = tl.maximum(bound_1, tl.where(start < cut_2, above_2, pivot_2))
            bound_3 = tl.maximum(bound_2, tl.where(start < cut_3, above_3, pivot_3))
            there = (j < candidates)[None, :]
            under_0, under_2 = there & (scores < bound_0[:, None]), there & (scores < bound_2[:, None])
            listed = (there & (scores < bound_1[:, None]) & ~under_0).to(tl.int32)
            listed += (there & (scores < bound_3[:, None]) & ~under_2).to(tl.int32)
            tl.atomic_add(counter + BELOW_LOW, tl.sum(under_0.to(tl.int32), axis=1), mask=no_room, sem="relaxed")
            tl.atomic_add(counter + BELOW_HIGH, tl.sum(under_2.to(tl.int32), axis=1), mask=no_room, sem="relaxed")
            first = tl.atomic_add(counter + LISTED, tl.sum(listed, axis=1), mask=no_room, sem="relaxed")
            slot = first[:, None] + tl.cumsum(listed, axis=1) - 1
            entry = (scores.to(tl.int32, bitcast=True).to(tl.int64) << 32) | j.to(tl.int64)[None, :]
            tl.store(lists + slot, entry, mask=(listed > 0) & (slot < capacity))


@triton.jit(do_not_specialize=["first_", "end_"])
def bisect(
    anchors_, candidates_, scale_, excluded, anchor_groups, candidate_groups, allowed,
    eligible_, first_, end_, score_, index_, missed_,
    anchors, candidates, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole, num_excluded,
    allowed_rows, allowed_columns, base, known, stride,
    OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, COUNTED: tl.constexpr, OWN: tl.constexpr, EXCLUDED: tl.constexpr,
    GROUPS: tl.constexpr, ALLOWED: tl.constexpr,
):  # fmt: skip
    """The edges that are not in the lists, by bisection of the scores and then of the indices, with one pass per step.

    Fifty times the work of another kernel, for the rare anchor with an unrepresentative sample; returns immediately if
    there is none.
    """
    row, edge = base + tl.program_id(0) * OUTER_BLOCK, tl.program_id(1)
    i = row + tl.arange(0, OUTER_BLOCK)
    strip_row, rows = i - base, anchors - base
    missed = tl.load(missed_ + edge * rows + strip_row, mask=i < anchors, other=0) != 0
    if tl.max(missed.to(tl.int32), axis=0) > 0:
        within = tl.where(i < anchors, strip_row, 0)
        rank, _empty = edge_rank(within, edge, eligible_, first_, end_, candidates, known, COUNTED)
        tile, scale, group = load_anchors(
            anchors_, anchor_groups, scale_, i, row, anchors, width, anchor_stride, OUTER_BLOCK, WIDTH, GROUPS
        )
        low = tl.where(missed, MASKED_KEY, 0)
        high = tl.where(missed, NO_INDEX - 1, 0)
        first = tl.zeros((OUTER_BLOCK,), tl.int32)
        last = tl.where(missed, candidates - 1, 0)
        while tl.max(((low < high) | (first < last)).to(tl.int32), axis=0) > 0:
            by_score = low < high
            key = midpoint(low, high)
            index = tl.where(by_score, candidates, midpoint(first, last))
            count = tl.zeros((OUTER_BLOCK,), tl.int32)
            for start in range(0, candidates, INNER_BLOCK):
                j, _, found = compute_scores(
                    tile, anchors_, candidates_, i, row, start, group, candidate_groups, excluded, allowed, scale,
                    anchors, candidates, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole,
                    num_excluded, allowed_rows, allowed_columns, OUTER_BLOCK, INNER_BLOCK, WIDTH, WHOLE, PRECISION,
                    OWN, EXCLUDED, GROUPS, ALLOWED,
                )  # fmt: skip
                keys = score_key(found)
                upto = (keys < key[:, None]) | ((keys == key[:, None]) & (j[None, :] <= index[:, None]))
                count += tl.sum((upto & (j < candidates)[None, :]).to(tl.int32), axis=1)
            enough = count > rank
            high = tl.where(by_score & enough, key, high)
            low = tl.where(by_score & ~enough, key + 1, low)
            last = tl.where(~by_score & enough, index, last)
            first = tl.where(~by_score & ~enough, index + 1, first)
        tl.store(score_ + edge * stride + i, key_score(low), mask=missed)
        tl.store(index_ + edge * stride + i, first, mask=missed)

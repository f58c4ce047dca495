"""Triton kernel that finds the edges of percentile bands in the lists of `percentile_lists`: select."""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from hardneg.losses.kernels.triton.order_statistics import (
    count_min_max,
    index_bounds,
    key_bounds,
    lowest_from,
    score_key,
)
from hardneg.losses.kernels.triton.percentile_lists import (
    BELOW_HIGH,
    BELOW_LOW,
    COUNTERS,
    LISTED,
    NO_ROOM,
    NUM_ABOVE,
    NUM_BETWEEN,
    NUM_LISTED,
    STATUS,
    TIED,
    interleaved_index,
)
from hardneg.losses.kernels.triton.score_tile import NO_INDEX, NONE, deferred, exponentials


@triton.jit
def edge_rank(row, edge, eligible_, first_, end_, candidates, known, COUNTED: tl.constexpr):
    """Rank of a row's edge among all candidates, masked ones included, and whether the band is empty.

    first_, end_: the ranks of the band among the eligible, numbers or, if COUNTED, one per row
    """
    if COUNTED:
        eligible = tl.load(eligible_ + row).to(tl.int32)
        first, end = tl.load(first_ + row).to(tl.int32), tl.load(end_ + row).to(tl.int32)
    else:
        eligible = row * 0 + known
        first, end = row * 0 + first_, row * 0 + end_
    return candidates - eligible + tl.where(edge == 0, first, end - 1), end <= first


@triton.jit
def listed_index(words, begin, entry, mask, one_list, capacity, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """Indices of the candidates in these entries of the lists of `select`, NO_INDEX where not in ``mask``."""
    part = entry // SIZE
    # Deferred, so that the addresses of the scores are not kept in registers.
    pointer = words + deferred(begin) + (part * capacity + entry % SIZE) * 2
    found = tl.load(pointer, mask=mask, other=0)
    return tl.where(mask, tl.where(one_list, found, interleaved_index(found, part, PARTS)), NO_INDEX)


@triton.jit
def tied_index(
    words, lists, entry, scores, score, unique, rank, default, one_list, capacity,
    PARTS: tl.constexpr, SIZE: tl.constexpr, MARKED: tl.constexpr,
):  # fmt: skip
    """The index of the candidate of this rank among the listed ones with the same score; ``default`` if ``unique``.

    MARKED: there may be more than two
    """
    index = rank * 0 + default
    if ~unique:
        if MARKED:
            indices = listed_index(words, lists, entry, scores == score, one_list, capacity, PARTS, SIZE)
            lowest, highest = tl.min(indices, axis=0), tl.max(tl.where(indices < NO_INDEX, indices, -1), axis=0)
            begin, _ = index_bounds(indices, rank, 0, lowest, highest)
            index = tl.min(tl.where(indices >= begin, indices, NO_INDEX), axis=0)
        else:
            one = tl.min(tl.where(scores == score, entry, NO_INDEX), axis=0)
            other = tl.max(tl.where(scores == score, entry, -1), axis=0)
            one = listed_index(words, lists, one, other >= 0, one_list, capacity, PARTS, SIZE)
            other = listed_index(words, lists, other, other >= 0, one_list, capacity, PARTS, SIZE)
            index = tl.where(rank == 0, tl.minimum(one, other), tl.maximum(one, other))
    return index


# Ranks change while a band is annealed, which must not recompile the kernel.
@triton.jit(do_not_specialize=["first_", "end_"])
def select(
    words, pivot_, cut_, counters, part_counts_, eligible_, first_, end_, tilt_, score_, index_, missed_, recompute_,
    tilted_sum_, weight_sum_, rows, candidates, base, capacity, known, stride,
    PARTS: tl.constexpr, SIZE: tl.constexpr, COUNTED: tl.constexpr, SUMMED: tl.constexpr, KIND: tl.constexpr,
    MARKED: tl.constexpr,
):  # fmt: skip
    """The edges of an anchor's band, from its lists.

    words: the lists, as pairs of 32-bit words: candidate and score · MARKED: only for anchors with a STATUS; if not,
    anchors with a full list are skipped, and those with more than two candidates that tie with an edge get the status
    TIED: with the registers that their case needs, half as many programs would run · outputs: scores (2, stride);
    indices (2, stride), 0 and NO_INDEX if no other candidate ties with the edge; and whether the lists do not contain
    the edges (2, rows) · if SUMMED: tilted_sum_, weight_sum_: (PARTS + 1, stride), the last slot holds the sums over
    the listed candidates in the band · recompute_: (stride,), whether the sums of an anchor must be recomputed
    """
    row = tl.program_id(0)
    status = tl.load(counters + row * COUNTERS + STATUS)
    one_list = status == NO_ROOM  # one list for all parts
    if (status != 0) != MARKED:
        return
    rank_0, empty = edge_rank(row, 0, eligible_, first_, end_, candidates, known, COUNTED)
    rank_1, _ = edge_rank(row, 1, eligible_, first_, end_, candidates, known, COUNTED)
    counter, part_counts = counters + row * COUNTERS, part_counts_ + row * PARTS + tl.arange(0, PARTS)
    below_low = candidates - tl.sum(tl.load(part_counts + NUM_ABOVE * rows * PARTS), axis=0)
    length, room = tl.sum(tl.load(part_counts + NUM_LISTED * rows * PARTS), axis=0), PARTS * capacity
    entry = tl.arange(0, PARTS * SIZE)
    part, slot = entry // SIZE, entry % SIZE
    begin = row * room * 2  # all lists together have fewer than 2³¹ words
    number = tl.load(part_counts_ + (NUM_LISTED * rows + row) * PARTS + part)
    # Older versions of Triton evaluate both sides of ``and``.
    if MARKED:  # noqa: SIM102
        if one_list:
            length, below_low = tl.load(counter + LISTED), tl.load(counter + BELOW_LOW)
            number = tl.minimum(length - part * capacity, capacity)
    held = slot < number
    # Empty entries are loaded as well, so that the load does not depend on the counts.
    word = words + begin + 1 + (part * capacity + slot) * 2
    scores = tl.load(word, mask=slot < capacity, other=0).to(tl.float32, bitcast=True)
    scores = tl.where(held, scores, float("inf"))
    # The lists hold two ranges of ranks: from below_low up to pivot 1, and from below_high on.
    pivot_0, pivot_1 = tl.load(pivot_ + row * 4), tl.load(pivot_ + row * 4 + 1)
    pivot_2, pivot_3 = tl.load(pivot_ + row * 4 + 2), tl.load(pivot_ + row * 4 + 3)
    lower_listed, lowest, highest = count_min_max(scores, held, pivot_1)
    gap = below_low + lower_listed
    below_high = gap + tl.sum(tl.load(part_counts + NUM_BETWEEN * rows * PARTS), axis=0)
    if MARKED:  # noqa: SIM102
        if one_list:
            tied = listed_index(words, begin, entry, held & (scores == pivot_1), one_list, capacity, PARTS, SIZE)
            cut = tl.load(cut_ + row * 4 + 1)
            lower_listed = tl.sum((held & ((scores < pivot_1) | (tied < cut))).to(tl.int32), axis=0)
            gap, below_high = below_low + lower_listed, tl.load(counter + BELOW_HIGH)
    missed_0 = (length > room) | (rank_0 < below_low) | ((rank_0 >= gap) & (rank_0 < below_high))
    missed_1 = (length > room) | (rank_1 < below_low) | ((rank_1 >= gap) & (rank_1 < below_high))
    rank_0 = tl.where(rank_0 < gap, rank_0 - below_low, rank_0 - below_high + lower_listed)
    rank_1 = tl.where(rank_1 < gap, rank_1 - below_low, rank_1 - below_high + lower_listed)
    missed_0, missed_1 = missed_0 | (rank_0 >= length), missed_1 | (rank_1 >= length)
    # The two ranges are disjoint, unless the pivots of both edges overlap.
    lowest, highest = score_key(lowest), score_key(highest)
    separate_0, separate_1 = (
        (rank_0 < lower_listed) & (pivot_1 < pivot_2),
        (rank_1 >= lower_listed) & (pivot_1 < pivot_2),
    )
    # No search if the edge is not in the lists.
    key_0, _, below_0, upto_0, key_1, _, below_1, upto_1 = key_bounds(
        scores, lowest, tl.where(separate_0, score_key(pivot_1), highest), length * 0,
        tl.where(separate_0, lower_listed, length), rank_0, tl.where(missed_0 | empty, NO_INDEX - 1, 0),
        tl.where(separate_1, score_key(pivot_2), lowest), highest, tl.where(separate_1, lower_listed, 0),
        length, rank_1, tl.where(missed_1 | empty, NO_INDEX - 1, 0),
    )  # fmt: skip
    # Between different bounds there is only one score.
    low, high = lowest_from(scores, key_0, key_1)
    # Candidates beyond a pivot may tie without being listed.
    unique_0 = (upto_0 == below_0 + 1) & (low != pivot_0) & (low != pivot_1) & (low != pivot_2) & (low != pivot_3)
    unique_1 = (upto_1 == below_1 + 1) & (high != pivot_0) & (high != pivot_1) & (high != pivot_2) & (high != pivot_3)
    unique_0, unique_1 = unique_0 | missed_0 | empty, unique_1 | missed_1 | empty
    if not MARKED:
        tl.store(
            counter + STATUS, TIED, mask=(~unique_0 & (upto_0 > below_0 + 2)) | (~unique_1 & (upto_1 > below_1 + 2))
        )
    first = tied_index(
        words, begin, entry, scores, low, unique_0, rank_0 - below_0, 0, one_list, capacity, PARTS, SIZE, MARKED
    )
    last = tied_index(
        words, begin, entry, scores, high, unique_1, rank_1 - below_1, NO_INDEX, one_list, capacity, PARTS, SIZE, MARKED
    )
    score, index = score_ + base + row, index_ + base + row
    tl.store(score, tl.where(empty, float("inf"), low))
    tl.store(score + stride, tl.where(empty, float("-inf"), high))
    tl.store(index, first)
    tl.store(index + stride, last)
    tl.store(missed_ + row, (missed_0 & ~empty).to(tl.int32))
    tl.store(missed_ + rows + row, (missed_1 & ~empty).to(tl.int32))
    if SUMMED:
        # The candidates summed between the two ranges are in the band only if each edge is in its own range.
        invalid_sums = (below_high > gap) & ((rank_0 >= lower_listed) | (rank_1 < lower_listed))
        tl.store(recompute_ + base + row, (one_list | ((missed_0 | missed_1 | invalid_sums) & ~empty)).to(tl.int32))
        tilt = tl.load(tilt_)
        scores = tl.where((scores > low) & (scores < high) & ~empty, scores, float("-inf"))
        tilted_exp, weight_exp = exponentials(scores, tilt, KIND, False)
        # Only some of the candidates that tie with an edge are in the band; all have the same score.
        number_0 = tl.where(low == high, rank_1 - rank_0 + 1, upto_0 - rank_0)
        number_1 = tl.where(low == high, 0, rank_1 - below_1 + 1)
        tilted_exp_0, weight_exp_0 = exponentials(tl.where(empty, float("-inf"), low), tilt, KIND, False)
        tilted_exp_1, weight_exp_1 = exponentials(tl.where(empty, float("-inf"), high), tilt, KIND, False)
        last_slot = PARTS * stride + base + row
        tl.store(
            tilted_sum_ + last_slot, tl.sum(tilted_exp, axis=0) + number_0 * tilted_exp_0 + number_1 * tilted_exp_1
        )
        if KIND != NONE:
            tl.store(
                weight_sum_ + last_slot, tl.sum(weight_exp, axis=0) + number_0 * weight_exp_0 + number_1 * weight_exp_1
            )

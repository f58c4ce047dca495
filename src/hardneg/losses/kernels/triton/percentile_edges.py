"""The Triton program that finds the edges of percentile bands in the lists of `listing`: select."""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from hardneg.losses.kernels.triton.order_statistics import least, narrowed, ordered, parted, surveyed
from hardneg.losses.kernels.triton.percentile_lists import (
    ABOVE,
    AGAIN,
    BELOW_HIGH,
    BELOW_LOW,
    BETWEEN,
    COUNTERS,
    DEALT,
    LISTED,
    NO_ROOM,
    TIED,
    dealt,
)
from hardneg.losses.kernels.triton.score_tile import LAST, NONE, deferred, exponentials


@triton.jit
def ranked(row, edge, eligible_, first_, end_, candidates, known, COUNTED: tl.constexpr):
    """Rank of a row's edge among all candidates, the hidden ones included, and whether the band is empty.

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
def listed_at(words, begin, place, mask, single, capacity, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """Indices of the candidates in these places of the lists of `select`, LAST where not in ``mask``."""
    part = place // SIZE
    # Deferred, lest every address be kept from when the scores were read.
    pointer = words + deferred(begin) + (part * capacity + place % SIZE) * 2
    found = tl.load(pointer, mask=mask, other=0)
    return tl.where(mask, tl.where(single, found, dealt(found, part, PARTS)), LAST)


@triton.jit
def tie(
    words, lists, place, scores, score, alone, rank, otherwise, single, capacity,
    PARTS: tl.constexpr, SIZE: tl.constexpr, RARE: tl.constexpr,
):  # fmt: skip
    """The index of the candidate of this rank among those in a list that score the same; ``otherwise`` if ``alone``.

    RARE: may they be more than two?
    """
    index = rank * 0 + otherwise
    if ~alone:
        if RARE:
            indices = listed_at(words, lists, place, scores == score, single, capacity, PARTS, SIZE)
            lowest, highest = tl.min(indices, axis=0), tl.max(tl.where(indices < LAST, indices, -1), axis=0)
            begin, _ = parted(indices, rank, 0, lowest, highest)
            index = tl.min(tl.where(indices >= begin, indices, LAST), axis=0)
        else:
            one = tl.min(tl.where(scores == score, place, LAST), axis=0)
            other = tl.max(tl.where(scores == score, place, -1), axis=0)
            one = listed_at(words, lists, one, other >= 0, single, capacity, PARTS, SIZE)
            other = listed_at(words, lists, other, other >= 0, single, capacity, PARTS, SIZE)
            index = tl.where(rank == 0, tl.minimum(one, other), tl.maximum(one, other))
    return index


# Ranks change as a band is annealed: the same program must do.
@triton.jit(do_not_specialize=["first_", "end_"])
def select(
    words, pivot_, cut_, counters, tally_, eligible_, first_, end_, tilt_, score_, index_, missed_, again_,
    heavy_, light_, rows, candidates, base, capacity, known, stride,
    PARTS: tl.constexpr, SIZE: tl.constexpr, COUNTED: tl.constexpr, SUMMED: tl.constexpr, KIND: tl.constexpr,
    RARE: tl.constexpr,
):  # fmt: skip
    """The edges of an anchor's band, from its lists.

    words: the lists, as pairs of words: candidate and score · RARE: only of anchors marked as AGAIN; if not, those
    without room are left out, and those with more than two that tie are marked: what these need takes so many registers
    that half as many anchors would be at work · outputs: scores (2, stride); indices (2, stride), 0 and LAST where no
    other candidate ties with the edge; and whether the lists did not hold them (2, rows) · if SUMMED: heavy_, light_:
    (PARTS + 1, stride), the last are for sums of exponentials over those listed that are in the band · again_:
    (stride,), whether an anchor must be summed otherwise
    """
    row = tl.program_id(0)
    again = tl.load(counters + row * COUNTERS + AGAIN)
    single = again == NO_ROOM  # one list for all parts
    if (again != 0) != RARE:
        return
    rank_0, empty = ranked(row, 0, eligible_, first_, end_, candidates, known, COUNTED)
    rank_1, _ = ranked(row, 1, eligible_, first_, end_, candidates, known, COUNTED)
    counter, tallies = counters + row * COUNTERS, tally_ + row * PARTS + tl.arange(0, PARTS)
    below_low = candidates - tl.sum(tl.load(tallies + ABOVE * rows * PARTS), axis=0)
    length, room = tl.sum(tl.load(tallies + DEALT * rows * PARTS), axis=0), PARTS * capacity
    place = tl.arange(0, PARTS * SIZE)
    part, slot = place // SIZE, place % SIZE
    begin = row * room * 2  # all lists together have room in 32 bits
    number = tl.load(tally_ + (DEALT * rows + row) * PARTS + part)
    # Older versions of Triton read both sides of an ``and``.
    if RARE:  # noqa: SIM102
        if single:
            length, below_low = tl.load(counter + LISTED), tl.load(counter + BELOW_LOW)
            number = tl.minimum(length - part * capacity, capacity)
    held = slot < number
    # What is not held is read too: so nothing waits to hear what is.
    word = words + begin + 1 + (part * capacity + slot) * 2
    scores = tl.load(word, mask=slot < capacity, other=0).to(tl.float32, bitcast=True)
    scores = tl.where(held, scores, float("inf"))
    # The lists hold two stretches of the ranks: from below_low on up to pivot 1, and from below_high on.
    pivot_0, pivot_1 = tl.load(pivot_ + row * 4), tl.load(pivot_ + row * 4 + 1)
    pivot_2, pivot_3 = tl.load(pivot_ + row * 4 + 2), tl.load(pivot_ + row * 4 + 3)
    first_stretch, lowest, highest = surveyed(scores, held, pivot_1)
    gap = below_low + first_stretch
    below_high = gap + tl.sum(tl.load(tallies + BETWEEN * rows * PARTS), axis=0)
    if RARE:  # noqa: SIM102
        if single:
            tied = listed_at(words, begin, place, held & (scores == pivot_1), single, capacity, PARTS, SIZE)
            cut = tl.load(cut_ + row * 4 + 1)
            first_stretch = tl.sum((held & ((scores < pivot_1) | (tied < cut))).to(tl.int32), axis=0)
            gap, below_high = below_low + first_stretch, tl.load(counter + BELOW_HIGH)
    missed_0 = (length > room) | (rank_0 < below_low) | ((rank_0 >= gap) & (rank_0 < below_high))
    missed_1 = (length > room) | (rank_1 < below_low) | ((rank_1 >= gap) & (rank_1 < below_high))
    rank_0 = tl.where(rank_0 < gap, rank_0 - below_low, rank_0 - below_high + first_stretch)
    rank_1 = tl.where(rank_1 < gap, rank_1 - below_low, rank_1 - below_high + first_stretch)
    missed_0, missed_1 = missed_0 | (rank_0 >= length), missed_1 | (rank_1 >= length)
    # The stretches are apart, unless pivots of both edges overlap.
    lowest, highest = ordered(lowest), ordered(highest)
    apart_0, apart_1 = (rank_0 < first_stretch) & (pivot_1 < pivot_2), (rank_1 >= first_stretch) & (pivot_1 < pivot_2)
    # Nothing is looked for where nothing will be found.
    key_0, _, below_0, upto_0, key_1, _, below_1, upto_1 = narrowed(
        scores, lowest, tl.where(apart_0, ordered(pivot_1), highest), length * 0,
        tl.where(apart_0, first_stretch, length), rank_0, tl.where(missed_0 | empty, LAST - 1, 0),
        tl.where(apart_1, ordered(pivot_2), lowest), highest, tl.where(apart_1, first_stretch, 0),
        length, rank_1, tl.where(missed_1 | empty, LAST - 1, 0),
    )  # fmt: skip
    # Within bounds that differ there is but one.
    low, high = least(scores, key_0, key_1)
    # Beyond a pivot others may tie that are not listed.
    alone_0 = (upto_0 == below_0 + 1) & (low != pivot_0) & (low != pivot_1) & (low != pivot_2) & (low != pivot_3)
    alone_1 = (upto_1 == below_1 + 1) & (high != pivot_0) & (high != pivot_1) & (high != pivot_2) & (high != pivot_3)
    alone_0, alone_1 = alone_0 | missed_0 | empty, alone_1 | missed_1 | empty
    if not RARE:
        tl.store(counter + AGAIN, TIED, mask=(~alone_0 & (upto_0 > below_0 + 2)) | (~alone_1 & (upto_1 > below_1 + 2)))
    first = tie(words, begin, place, scores, low, alone_0, rank_0 - below_0, 0, single, capacity, PARTS, SIZE, RARE)
    last = tie(words, begin, place, scores, high, alone_1, rank_1 - below_1, LAST, single, capacity, PARTS, SIZE, RARE)
    score, index = score_ + base + row, index_ + base + row
    tl.store(score, tl.where(empty, float("inf"), low))
    tl.store(score + stride, tl.where(empty, float("-inf"), high))
    tl.store(index, first)
    tl.store(index + stride, last)
    tl.store(missed_ + row, (missed_0 & ~empty).to(tl.int32))
    tl.store(missed_ + rows + row, (missed_1 & ~empty).to(tl.int32))
    if SUMMED:
        # What was summed between the stretches is in the band only if each edge is in its own.
        astray = (below_high > gap) & ((rank_0 >= first_stretch) | (rank_1 < first_stretch))
        tl.store(again_ + base + row, (single | ((missed_0 | missed_1 | astray) & ~empty)).to(tl.int32))
        tilt = tl.load(tilt_)
        scores = tl.where((scores > low) & (scores < high) & ~empty, scores, float("-inf"))
        steep, flat = exponentials(scores, tilt, KIND, False)
        # Of those that tie with an edge only some are in the band; all score the same.
        number_0 = tl.where(low == high, rank_1 - rank_0 + 1, upto_0 - rank_0)
        number_1 = tl.where(low == high, 0, rank_1 - below_1 + 1)
        steep_0, flat_0 = exponentials(tl.where(empty, float("-inf"), low), tilt, KIND, False)
        steep_1, flat_1 = exponentials(tl.where(empty, float("-inf"), high), tilt, KIND, False)
        last_slot = PARTS * stride + base + row
        tl.store(heavy_ + last_slot, tl.sum(steep, axis=0) + number_0 * steep_0 + number_1 * steep_1)
        if KIND != NONE:
            tl.store(light_ + last_slot, tl.sum(flat, axis=0) + number_0 * flat_0 + number_1 * flat_1)

"""The Triton programs that list the candidates at the edges of percentile bands: sample, bracket, deal.

Candidates are ranked by score and then by index, so no two of an anchor's are equal, and all that is said of pairs
(score, index) holds whether or not scores tie. Scores are in base 2, −inf where an anchor may not meet a candidate;
such *hidden* ones rank before all others. What comes next is `selecting`; where it does not find all, `retrying`.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from hardneg.losses.kernels.triton.order_statistics import narrowed, ordered, parted, score_of, surveyed
from hardneg.losses.kernels.triton.score_tile import (
    ASSEMBLY,
    LAST,
    LEAST,
    NONE,
    begun,
    deferred,
    exponentials,
    hidden,
    rows_of,
)

# Cuts of `bracket` are multiples of it: no fewer candidates than a tile of `retrying.collect` holds.
GRAIN = tl.constexpr(64)

# Counters of an anchor: has it a list without room, or more than two that tie with an edge? And, for
# `retrying.collect`, how many candidates are below the pivots of the lower edge, below those of the upper edge, listed.
AGAIN, BELOW_LOW, BELOW_HIGH, LISTED, COUNTERS = (tl.constexpr(which) for which in range(5))
NO_ROOM, TIED = tl.constexpr(1), tl.constexpr(2)

# What `deal` tells of each part of an anchor's candidates: how many are listed, not below the first pivot, between the
# second and the third, and eligible.
DEALT, ABOVE, BETWEEN, ELIGIBLE, TALLIES = (tl.constexpr(which) for which in range(5))
DECK = tl.constexpr(64)  # deals between two turns; no fewer than a tile holds
DIGIT = tl.constexpr(4096)  # a tally is two numbers in one, of an eighth of a part
LONGEST_PART = tl.constexpr(8 * 4000)

# Numbers from 2²³ on have an integer in the lowest bits of their float, which are these beside the integer.
FROM, FROM_BITS = tl.constexpr(8388608.0), tl.constexpr(0x4B000000)
NOWHERE = tl.constexpr(1 << 20)  # added to a slot, beyond the end of every list


@triton.jit
def sampled(sample, STEP: tl.constexpr):
    """Which candidates are sampled: one of each STEP, not always the same, lest candidates come in the same rhythm."""
    return sample * STEP + (((sample & 0x7FFF) * 40503) >> 12) % STEP


@triton.jit
def turned(part, deck, PARTS: tl.constexpr):
    """Which candidate of every PARTS is dealt to a part: another one in each deck, turned by the golden ratio."""
    return (part + ((deck & 0x7FFF) * 40503 % 65536) * PARTS // 65536) % PARTS


@triton.jit
def dealt(deal, part, PARTS: tl.constexpr):
    """Which candidate is dealt to a part in a deal."""
    return deal * PARTS + turned(part, deal // DECK, PARTS)


@triton.jit
def scored_at(
    tile, anchors_, pointer, i, j, row, near, group, candidate_groups, excluded, allowed, scale,
    anchors, candidates, width, anchor_stride, column, columns, batch, offset, whole, named,
    allowed_rows, allowed_columns,
    OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, OWN: tl.constexpr, EXCLUDED: tl.constexpr, GROUPS: tl.constexpr, ALLOWED: tl.constexpr,
):  # fmt: skip
    """Scores of anchors i, from ``row`` on, with candidates j, wherever these are.

    pointer: where each candidate begins · near: may some not meet?
    """
    k, pointer, there = tl.arange(0, WIDTH), pointer[:, None], (j < candidates)[:, None]
    if WHOLE:
        theirs = tl.load(pointer + k[None, :], mask=there & (k < width)[None, :], other=0.0)
        found = tl.dot(tile, tl.trans(theirs), input_precision=PRECISION)
    else:
        found = tl.zeros((OUTER_BLOCK, INNER_BLOCK), tl.float32)
        for first in range(0, width, WIDTH):
            mine = rows_of(anchors_, row, anchors, width, anchor_stride, OUTER_BLOCK, WIDTH, first)
            theirs = tl.load(pointer + (first + k)[None, :], mask=there & (first + k < width)[None, :], other=0.0)
            found = tl.dot(mine, tl.trans(theirs), found, input_precision=PRECISION)
    other = 0
    if GROUPS > 0:
        other = tl.load(candidate_groups + j, mask=j < candidates, other=0)[None, :]
    return hidden(
        found * scale, i[:, None], j[None, :], anchors, candidates, near, column, columns, batch, offset, whole,
        excluded, named, group, other, allowed, allowed_rows, allowed_columns, OWN, EXCLUDED, GROUPS, ALLOWED,
        tile.dtype != tl.float32,
    )  # fmt: skip


@triton.jit
def sample(
    anchors_, candidates_, scale_, excluded, anchor_groups, candidate_groups, allowed, result,
    anchors, candidates, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole, named,
    allowed_rows, allowed_columns, base, size, span, STEP: tl.constexpr,
    OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, OWN: tl.constexpr, EXCLUDED: tl.constexpr, GROUPS: tl.constexpr, ALLOWED: tl.constexpr,
):  # fmt: skip
    """Scores of a sample of ``size`` candidates, (anchors − base, size)."""
    row, part = base + tl.program_id(0) * OUTER_BLOCK, tl.program_id(1)
    i = row + tl.arange(0, OUTER_BLOCK)
    tile, scale, group = begun(
        anchors_, anchor_groups, scale_, i, row, anchors, width, anchor_stride, OUTER_BLOCK, WIDTH, GROUPS
    )
    for start in range(part * span, min(part * span + span, size), INNER_BLOCK):
        drawn = start + tl.arange(0, INNER_BLOCK)
        j = tl.where(drawn < size, sampled(drawn, STEP), candidates)
        pointer = candidates_ + j.to(tl.int64) * candidate_stride
        scores = scored_at(
            tile, anchors_, pointer, i, j, row, True, group, candidate_groups, excluded, allowed, scale,
            anchors, candidates, width, anchor_stride, column, columns, batch, offset, whole, named,
            allowed_rows, allowed_columns, OUTER_BLOCK, INNER_BLOCK, WIDTH, WHOLE, PRECISION,
            OWN, EXCLUDED, GROUPS, ALLOWED,
        )  # fmt: skip
        pointer = result + (i - base).to(tl.int64)[:, None] * size + drawn[None, :]
        tl.store(pointer, scores, mask=(i < anchors)[:, None] & (drawn < size)[None, :])


@triton.jit
def bracket(
    sample_, pivot_, cut_, counters, size, low_share, high_share, spread,
    STEP: tl.constexpr, SIZE: tl.constexpr, OPEN: tl.constexpr,
):  # fmt: skip
    """The pivots of an anchor between which the edges of its band lie, by the ranks of a sample.

    Of pivots 0 … 3 the first two enclose the lower edge, the last two the upper one; a candidate is below a pivot if
    its score is lower than ``pivot``, or equal and its index lower than ``cut``. Cuts are multiples of GRAIN: the
    candidates of a tile are either all before one or all behind it.
    low_share, high_share: where the edges should be, as shares of the eligible · spread: half the distance of an
    edge's pivots, in standard deviations of a sampled rank · OPEN: the upper edge has no upper pivot · outputs:
    (anchors, 4), and counters set to zero
    """
    row = tl.program_id(0)
    counter = counters + row * COUNTERS
    tl.store(counter + AGAIN, 0)
    tl.store(counter + BELOW_LOW, 0)
    tl.store(counter + BELOW_HIGH, 0)
    tl.store(counter + LISTED, 0)
    place = tl.arange(0, SIZE)
    pointer = sample_ + row.to(tl.int64) * size + place
    scores = tl.load(pointer, mask=place < size, other=float("-inf"))
    met = scores > float("-inf")
    eligible, lowest, highest = surveyed(tl.where(met, scores, float("inf")), met, float("inf"))
    hidden_ones, begin, end = SIZE - eligible, ordered(lowest), ordered(highest)
    for edge in range(2):
        share = tl.where(edge == 0, low_share, high_share)
        # The binomial law of a sampled rank is skewed towards the middle; spread²/6 makes up for it (Cornish, Fisher).
        margin = spread * tl.sqrt(eligible * share * (1 - share)) + spread * spread / 6
        # A pivot may lie further out than asked, if that saves some rounds.
        slack = (margin / 8).to(tl.int32)
        lower = tl.floor(share * eligible - margin).to(tl.int32)
        upper = tl.ceil(share * eligible + margin).to(tl.int32)
        # Where nobody is beyond a pivot, no round is needed.
        all_above, all_below = lower <= 0, (upper >= eligible) | (OPEN & (edge == 1))
        lower, upper = lower + hidden_ones, upper + hidden_ones
        low, low_end, under, _, high_begin, high, over, _ = narrowed(
            scores, begin, end, hidden_ones, SIZE + 0 * eligible, lower, tl.where(all_above, SIZE, slack),
            begin, end, hidden_ones, SIZE + 0 * eligible, upper, tl.where(all_below, SIZE, slack),
        )  # fmt: skip
        # Many equals at a pivot are parted by index.
        first, last = tl.zeros((), tl.int32), tl.full((), SIZE - 1, tl.int32)
        if (low == low_end) & ~all_above:
            first, _ = parted(tl.where(scores == score_of(low), place, LAST), lower - under, slack, 0, SIZE - 1)
        if (high_begin == high) & ~all_below:
            _, last = parted(tl.where(scores == score_of(high), place, LAST), upper - over, slack, 0, SIZE - 1)
        first_cut = first * STEP // GRAIN * GRAIN
        last_cut = tl.where(last == SIZE - 1, LAST, ((last + 1) * STEP + GRAIN - 1) // GRAIN * GRAIN)
        pivot, cut = pivot_ + row * 4 + edge * 2, cut_ + row * 4 + edge * 2
        tl.store(pivot, tl.where(all_above, float("-inf"), score_of(low)))
        tl.store(cut, tl.where(all_above, LAST, first_cut))
        tl.store(pivot + 1, tl.where(all_below, float("inf"), score_of(high)))
        tl.store(cut + 1, tl.where(all_below, LAST, last_cut))


@triton.jit
def above(score):
    """The next score above; infinity stays."""
    return tl.where(score == float("inf"), score, score_of(ordered(score) + 1))


@triton.jit
def put(lists, slot, capacity, scores, which):
    """Write scores, and which they are, into lists of ``capacity`` entries, where their slot is within.

    lists: pointers, along the anchors' side of the tile · slot: floats, FROM for the first
    """
    bits = slot.to(tl.int32, bitcast=True)
    if not ASSEMBLY:
        pair = (scores.to(tl.int32, bitcast=True).to(tl.int64) << 32) | which.to(tl.int64)
        tl.store(lists + (bits - FROM_BITS), pair, mask=bits < FROM_BITS + capacity)
    else:  # by hand, because Triton would move the whole tile between threads before it stores
        begin = lists.to(tl.int64, bitcast=True) - FROM_BITS * 8
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            .reg .u64 place;
            setp.lt.u32 p, $1, $2;
            mad.wide.u32 place, $1, 8, $3;
            @p st.global.v2.b32 [place], {$5, $4};
            mov.u32 $0, 0;
            }""",
            "=r,r,r,l,f,r", [bits, FROM_BITS + capacity, begin, scores, which],
            dtype=tl.uint32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def folded(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums over every eighth column of a tile, (ROWS, 8): on tensor cores' tiles each thread adds what it holds."""
    return tl.sum(tl.reshape(x, (ROWS, COLUMNS // 8, 8)), axis=1)


@triton.jit
def deal(
    anchors_, candidates_, scale_, tilt_, excluded, anchor_groups, candidate_groups, allowed, pivot_, counters, tally_,
    list_, heavy_, light_,
    anchors, candidates, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole, named,
    allowed_rows, allowed_columns, base, capacity, stride,
    OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, PARTS: tl.constexpr, COUNTED: tl.constexpr, SUMMED: tl.constexpr, KIND: tl.constexpr,
    OPEN: tl.constexpr, OWN: tl.constexpr, EXCLUDED: tl.constexpr, GROUPS: tl.constexpr, ALLOWED: tl.constexpr,
):  # fmt: skip
    """Lists the candidates between the pivots of an edge, of one part of them, and counts the others.

    Candidates are dealt to the parts as cards are, so that every part lists about as many, wherever the similar are.
    list_: (anchors − base, PARTS, capacity) int64, a score's bits above the number of the deal · tally_: (TALLIES,
    anchors − base, PARTS) · heavy_, light_: if SUMMED, (PARTS, stride), sums of exponentials over those between the
    edges' pivots · counters: AGAIN becomes NO_ROOM of anchors that have a list without
    """
    tl.static_assert(INNER_BLOCK <= DECK)
    row, part = base + tl.program_id(0) * OUTER_BLOCK, tl.program_id(1)
    i = row + tl.arange(0, OUTER_BLOCK)
    inside, place, rows = i < anchors, i - base, anchors - base
    tile, scale, group = begun(
        anchors_, anchor_groups, scale_, i, row, anchors, width, anchor_stride, OUTER_BLOCK, WIDTH, GROUPS
    )
    tilt = 0.0
    if SUMMED:
        tilt = tl.load(tilt_)
    bound_0 = tl.maximum(tl.load(pivot_ + place * 4, mask=inside, other=float("inf")), LEAST)
    bound_1 = tl.maximum(bound_0, above(tl.load(pivot_ + place * 4 + 1, mask=inside, other=float("inf"))))
    bound_2 = tl.maximum(bound_1, tl.load(pivot_ + place * 4 + 2, mask=inside, other=float("inf")))
    bound_3 = tl.maximum(bound_2, above(tl.load(pivot_ + place * 4 + 3, mask=inside, other=float("inf"))))
    k = tl.arange(0, INNER_BLOCK)
    triangle = (k[:, None] <= k[None, :]).to(tl.float16)
    ones = tl.full((INNER_BLOCK, 16), 1.0, tl.float16)
    # Of a factor that it knows the compiler would make a choice, which takes longer than a product.
    nowhere = deferred(part * 0 + NOWHERE).to(tl.float32)
    lists = (list_ + (place.to(tl.int64) * PARTS + part) * capacity)[:, None]
    before = tl.zeros((OUTER_BLOCK, 16), tl.float32)
    tally = tl.zeros((OUTER_BLOCK, 8), tl.float32)
    eligible = tl.zeros((OUTER_BLOCK, 8), tl.float32)
    heavy = tl.zeros((OUTER_BLOCK, 8), tl.float32)
    light = tl.zeros((OUTER_BLOCK, 8), tl.float32)
    deals = tl.cdiv(candidates, PARTS)
    for start in range(0, deals, INNER_BLOCK):
        lead = start * PARTS + turned(part, start // DECK, PARTS)
        j = lead + k * PARTS
        pointer = candidates_ + lead.to(tl.int64) * candidate_stride + k * (PARTS * candidate_stride)
        scores = scored_at(
            tile, anchors_, pointer, i, j, row, OWN or (start + INNER_BLOCK >= deals), group, candidate_groups,
            excluded, allowed, scale,
            anchors, candidates, width, anchor_stride, column, columns, batch, offset, whole, named,
            allowed_rows, allowed_columns, OUTER_BLOCK, INNER_BLOCK, WIDTH, WHOLE, PRECISION,
            OWN, EXCLUDED, GROUPS, ALLOWED,
        )  # fmt: skip
        if COUNTED:
            eligible += folded(tl.where(scores > float("-inf"), 1.0, 0.0), OUTER_BLOCK, INNER_BLOCK)
        # Numbers, because the hardware makes them by the comparison itself.
        over_0, over_1 = tl.where(scores >= bound_0[:, None], 1.0, 0.0), tl.where(scores >= bound_1[:, None], 1.0, 0.0)
        between = over_1 - tl.where(scores >= bound_2[:, None], 1.0, 0.0)
        listed = over_0 - between
        if not OPEN:
            listed -= tl.where(scores >= bound_3[:, None], 1.0, 0.0)
        tally += folded(over_0 + between * DIGIT, OUTER_BLOCK, INNER_BLOCK)
        if SUMMED:
            steep, flat = exponentials(scores, tilt, KIND, False)
            heavy += folded(steep * between, OUTER_BLOCK, INNER_BLOCK)
            if KIND != NONE:
                light += folded(flat * between, OUTER_BLOCK, INNER_BLOCK)
        # The place of each in its list, from 1, by a product, because tensor cores add faster than a scan does.
        marks = listed.to(tl.float16)
        order = tl.dot(marks, triangle)
        first = (before + (FROM - 1 + NOWHERE))[:, None, :]
        first = tl.reshape(tl.broadcast_to(first, (OUTER_BLOCK, INNER_BLOCK // 16, 16)), (OUTER_BLOCK, INNER_BLOCK))
        slot = order + (first - listed * nowhere)
        before = tl.dot(marks, ones, before)
        put(lists, slot, capacity, scores, (start + k)[None, :])
    number = tl.max(before, axis=1).to(tl.int32)
    tl.store(counters + place * COUNTERS + AGAIN, NO_ROOM, mask=inside & (number > capacity))
    tallies = tally_ + place * PARTS + part
    digits = tally.to(tl.int32)
    tl.store(tallies + DEALT * rows * PARTS, number, mask=inside)
    tl.store(tallies + ABOVE * rows * PARTS, tl.sum(digits % DIGIT, axis=1), mask=inside)
    tl.store(tallies + BETWEEN * rows * PARTS, tl.sum(digits // DIGIT, axis=1), mask=inside)
    if COUNTED:
        tl.store(tallies + ELIGIBLE * rows * PARTS, tl.sum(eligible, axis=1).to(tl.int32), mask=inside)
    if SUMMED:
        tl.store(heavy_ + part * stride + i, tl.sum(heavy, axis=1), mask=inside)
        if KIND != NONE:
            tl.store(light_ + part * stride + i, tl.sum(light, axis=1), mask=inside)

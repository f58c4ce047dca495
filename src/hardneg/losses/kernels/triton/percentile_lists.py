"""Triton kernels that list the candidates near the edges of percentile bands: sample, bracket, list_candidates.

Candidates are ranked by score and then by index, so no two candidates of an anchor are equal, with or without ties.
Scores are in base 2, −inf for candidates that are not eligible; these *masked* candidates rank before all others.
`percentile_edges` finds the edges in the lists, and `percentile_bisection` those that the lists do not contain.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from hardneg.losses.kernels.triton.order_statistics import count_min_max, index_bounds, key_bounds, key_score, score_key
from hardneg.losses.kernels.triton.score_tile import (
    ASSEMBLY,
    LOWEST_SCORE,
    NO_INDEX,
    NONE,
    deferred,
    exponentials,
    load_anchors,
    load_rows,
    mask_scores,
)

# Cuts of `bracket` are multiples of it; at least the number of candidates in a tile of `percentile_bisection.collect`.
CUT_MULTIPLE = tl.constexpr(64)

# Counters of an anchor: its status (a list has no room, or more than two candidates tie with an edge) and, for
# `percentile_bisection.collect`, the numbers of candidates below the pivots of the lower edge, below those of the upper
# edge, and listed.
STATUS, BELOW_LOW, BELOW_HIGH, LISTED, COUNTERS = (tl.constexpr(which) for which in range(5))
NO_ROOM, TIED = tl.constexpr(1), tl.constexpr(2)

# Counts of `list_candidates` for each part of an anchor's candidates: listed, not below the first pivot, between the
# second and the third pivot, and eligible.
NUM_LISTED, NUM_ABOVE, NUM_BETWEEN, NUM_ELIGIBLE, NUM_COUNTS = (tl.constexpr(which) for which in range(5))
ROTATION_LENGTH = tl.constexpr(64)  # positions between two rotations; at least the candidates of a tile
COUNT_BASE = tl.constexpr(4096)  # two counts, each of an eighth of a part, are packed into one float
MAX_PART_LENGTH = tl.constexpr(8 * 4000)

# Floats from 2²³ on hold an integer in their lowest bits; this is the first one, and its bits.
SLOT_BASE, SLOT_BASE_BITS = tl.constexpr(8388608.0), tl.constexpr(0x4B000000)
NO_SLOT = tl.constexpr(1 << 20)  # added to a slot of a candidate that is not listed: beyond the end of every list


@triton.jit
def sampled(sample, STEP: tl.constexpr):
    """Index of a sampled candidate: one of each STEP, at a varying position, in case candidates have a period."""
    return sample * STEP + (((sample & 0x7FFF) * 40503) >> 12) % STEP


@triton.jit
def rotated_part(part, rotation, PARTS: tl.constexpr):
    """Position of a part within each PARTS consecutive candidates; changes by the golden ratio with each rotation."""
    return (part + ((rotation & 0x7FFF) * 40503 % 65536) * PARTS // 65536) % PARTS


@triton.jit
def interleaved_index(position, part, PARTS: tl.constexpr):
    """Index of the candidate at this position of a part."""
    return position * PARTS + rotated_part(part, position // ROTATION_LENGTH, PARTS)


@triton.jit
def compute_scores_at(
    tile, anchors_, pointer, i, j, row, needs_mask, group, candidate_groups, excluded, allowed, scale,
    anchors, candidates, width, anchor_stride, column, columns, batch, offset, whole, num_excluded,
    allowed_rows, allowed_columns,
    OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, OWN: tl.constexpr, EXCLUDED: tl.constexpr, GROUPS: tl.constexpr, ALLOWED: tl.constexpr,
):  # fmt: skip
    """Masked scores of anchors i, from ``row`` on, with candidates j at any addresses.

    pointer: address of each candidate · needs_mask: see `mask_scores`
    """
    k, pointer, there = tl.arange(0, WIDTH), pointer[:, None], (j < candidates)[:, None]
    if WHOLE:
        candidate_tile = tl.load(pointer + k[None, :], mask=there & (k < width)[None, :], other=0.0)
        found = tl.dot(tile, tl.trans(candidate_tile), input_precision=PRECISION)
    else:
        found = tl.zeros((OUTER_BLOCK, INNER_BLOCK), tl.float32)
        for first in range(0, width, WIDTH):
            anchor_tile = load_rows(anchors_, row, anchors, width, anchor_stride, OUTER_BLOCK, WIDTH, first)
            candidate_tile = tl.load(
                pointer + (first + k)[None, :], mask=there & (first + k < width)[None, :], other=0.0
            )
            found = tl.dot(anchor_tile, tl.trans(candidate_tile), found, input_precision=PRECISION)
    other = 0
    if GROUPS > 0:
        other = tl.load(candidate_groups + j, mask=j < candidates, other=0)[None, :]
    return mask_scores(
        found * scale, i[:, None], j[None, :], anchors, candidates, needs_mask, column, columns, batch, offset, whole,
        excluded, num_excluded, group, other, allowed, allowed_rows, allowed_columns, OWN, EXCLUDED, GROUPS, ALLOWED,
        tile.dtype != tl.float32,
    )  # fmt: skip


@triton.jit
def sample(
    anchors_, candidates_, scale_, excluded, anchor_groups, candidate_groups, allowed, result,
    anchors, candidates, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole, num_excluded,
    allowed_rows, allowed_columns, base, size, span, STEP: tl.constexpr,
    OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, OWN: tl.constexpr, EXCLUDED: tl.constexpr, GROUPS: tl.constexpr, ALLOWED: tl.constexpr,
):  # fmt: skip
    """Scores of a sample of ``size`` candidates, (anchors − base, size)."""
    row, part = base + tl.program_id(0) * OUTER_BLOCK, tl.program_id(1)
    i = row + tl.arange(0, OUTER_BLOCK)
    tile, scale, group = load_anchors(
        anchors_, anchor_groups, scale_, i, row, anchors, width, anchor_stride, OUTER_BLOCK, WIDTH, GROUPS
    )
    for start in range(part * span, min(part * span + span, size), INNER_BLOCK):
        drawn = start + tl.arange(0, INNER_BLOCK)
        j = tl.where(drawn < size, sampled(drawn, STEP), candidates)
        pointer = candidates_ + j.to(tl.int64) * candidate_stride
        scores = compute_scores_at(
            tile, anchors_, pointer, i, j, row, True, group, candidate_groups, excluded, allowed, scale,
            anchors, candidates, width, anchor_stride, column, columns, batch, offset, whole, num_excluded,
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
    """The pivots of an anchor that enclose the edges of its band, from the ranks of a sample.

    Of pivots 0 … 3 the first two enclose the lower edge, the last two the upper one; a candidate is below a pivot if
    its score is lower than ``pivot``, or equal and its index lower than ``cut``. Cuts are multiples of CUT_MULTIPLE:
    the candidates of a tile are either all before a cut or all after it.

    low_share, high_share: expected positions of the edges, as shares of the eligible · spread: half the distance of the
    two pivots of an edge, in standard deviations of a sampled rank · OPEN: the upper edge has no upper pivot · outputs:
    (anchors, 4), and counters set to zero
    """
    row = tl.program_id(0)
    counter = counters + row * COUNTERS
    tl.store(counter + STATUS, 0)
    tl.store(counter + BELOW_LOW, 0)
    tl.store(counter + BELOW_HIGH, 0)
    tl.store(counter + LISTED, 0)
    position = tl.arange(0, SIZE)
    pointer = sample_ + row.to(tl.int64) * size + position
    scores = tl.load(pointer, mask=position < size, other=float("-inf"))
    eligible_mask = scores > float("-inf")
    eligible, lowest, highest = count_min_max(
        tl.where(eligible_mask, scores, float("inf")), eligible_mask, float("inf")
    )
    num_masked, begin, end = SIZE - eligible, score_key(lowest), score_key(highest)
    for edge in range(2):
        share = tl.where(edge == 0, low_share, high_share)
        # The binomial distribution of a sampled rank is skewed to the middle; spread²/6 corrects for it (Cornish,
        # Fisher).
        margin = spread * tl.sqrt(eligible * share * (1 - share)) + spread * spread / 6
        # A pivot may be a little further out if that saves rounds.
        slack = (margin / 8).to(tl.int32)
        lower = tl.floor(share * eligible - margin).to(tl.int32)
        upper = tl.ceil(share * eligible + margin).to(tl.int32)
        # Without candidates beyond a pivot no round is needed.
        all_above, all_below = lower <= 0, (upper >= eligible) | (OPEN & (edge == 1))
        lower, upper = lower + num_masked, upper + num_masked
        low, low_end, under, _, high_begin, high, over, _ = key_bounds(
            scores, begin, end, num_masked, SIZE + 0 * eligible, lower, tl.where(all_above, SIZE, slack),
            begin, end, num_masked, SIZE + 0 * eligible, upper, tl.where(all_below, SIZE, slack),
        )  # fmt: skip
        # Ties at a pivot are separated by index.
        first, last = tl.zeros((), tl.int32), tl.full((), SIZE - 1, tl.int32)
        if (low == low_end) & ~all_above:
            first, _ = index_bounds(
                tl.where(scores == key_score(low), position, NO_INDEX), lower - under, slack, 0, SIZE - 1
            )
        if (high_begin == high) & ~all_below:
            _, last = index_bounds(
                tl.where(scores == key_score(high), position, NO_INDEX), upper - over, slack, 0, SIZE - 1
            )
        first_cut = first * STEP // CUT_MULTIPLE * CUT_MULTIPLE
        last_cut = tl.where(
            last == SIZE - 1, NO_INDEX, ((last + 1) * STEP + CUT_MULTIPLE - 1) // CUT_MULTIPLE * CUT_MULTIPLE
        )
        pivot, cut = pivot_ + row * 4 + edge * 2, cut_ + row * 4 + edge * 2
        tl.store(pivot, tl.where(all_above, float("-inf"), key_score(low)))
        tl.store(cut, tl.where(all_above, NO_INDEX, first_cut))
        tl.store(pivot + 1, tl.where(all_below, float("inf"), key_score(high)))
        tl.store(cut + 1, tl.where(all_below, NO_INDEX, last_cut))


@triton.jit
def next_above(score):
    """The next higher float32 score; infinity stays."""
    return tl.where(score == float("inf"), score, key_score(score_key(score) + 1))


@triton.jit
def write_entries(lists, slot, capacity, scores, which):
    """Writes scores and their positions into lists of ``capacity`` entries, if their slot is within.

    lists: pointers, along the anchors' side of the tile · slot: floats, SLOT_BASE for the first
    """
    bits = slot.to(tl.int32, bitcast=True)
    if not ASSEMBLY:
        pair = (scores.to(tl.int32, bitcast=True).to(tl.int64) << 32) | which.to(tl.int64)
        tl.store(lists + (bits - SLOT_BASE_BITS), pair, mask=bits < SLOT_BASE_BITS + capacity)
    else:  # inline, because Triton would move the whole tile between threads before the store
        begin = lists.to(tl.int64, bitcast=True) - SLOT_BASE_BITS * 8
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            .reg .u64 place;
            setp.lt.u32 p, $1, $2;
            mad.wide.u32 place, $1, 8, $3;
            @p st.global.v2.b32 [place], {$5, $4};
            mov.u32 $0, 0;
            }""",
            "=r,r,r,l,f,r", [bits, SLOT_BASE_BITS + capacity, begin, scores, which],
            dtype=tl.uint32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def sum_every_eighth(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums over every eighth column of a tile, (ROWS, 8): within a thread in the layout of tensor cores."""
    return tl.sum(tl.reshape(x, (ROWS, COLUMNS // 8, 8)), axis=1)


@triton.jit
def list_candidates(
    anchors_, candidates_, scale_, tilt_, excluded, anchor_groups, candidate_groups, allowed, pivot_, counters,
    part_counts_, list_, tilted_sum_, weight_sum_,
    anchors, candidates, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole, num_excluded,
    allowed_rows, allowed_columns, base, capacity, stride,
    OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, PARTS: tl.constexpr, COUNTED: tl.constexpr, SUMMED: tl.constexpr, KIND: tl.constexpr,
    OPEN: tl.constexpr, OWN: tl.constexpr, EXCLUDED: tl.constexpr, GROUPS: tl.constexpr, ALLOWED: tl.constexpr,
):  # fmt: skip
    """Lists the candidates of one part that are between the pivots of an edge, and counts the others.

    Candidates are interleaved between the parts so that the lists have about equal length, also if similar candidates
    are adjacent. list_: (anchors − base, PARTS, capacity) int64, the bits of a score above its position in the part ·
    part_counts_: (NUM_COUNTS, anchors − base, PARTS) · tilted_sum_, weight_sum_: if SUMMED, (PARTS, stride), sums of
    exponentials over the candidates between pivots 1 and 2 · counters: STATUS is set to NO_ROOM for anchors with a full
    list
    """
    tl.static_assert(INNER_BLOCK <= ROTATION_LENGTH)
    row, part = base + tl.program_id(0) * OUTER_BLOCK, tl.program_id(1)
    i = row + tl.arange(0, OUTER_BLOCK)
    inside, strip_row, rows = i < anchors, i - base, anchors - base
    tile, scale, group = load_anchors(
        anchors_, anchor_groups, scale_, i, row, anchors, width, anchor_stride, OUTER_BLOCK, WIDTH, GROUPS
    )
    tilt = 0.0
    if SUMMED:
        tilt = tl.load(tilt_)
    bound_0 = tl.maximum(tl.load(pivot_ + strip_row * 4, mask=inside, other=float("inf")), LOWEST_SCORE)
    bound_1 = tl.maximum(bound_0, next_above(tl.load(pivot_ + strip_row * 4 + 1, mask=inside, other=float("inf"))))
    bound_2 = tl.maximum(bound_1, tl.load(pivot_ + strip_row * 4 + 2, mask=inside, other=float("inf")))
    bound_3 = tl.maximum(bound_2, next_above(tl.load(pivot_ + strip_row * 4 + 3, mask=inside, other=float("inf"))))
    k = tl.arange(0, INNER_BLOCK)
    triangle = (k[:, None] <= k[None, :]).to(tl.float16)
    ones = tl.full((INNER_BLOCK, 16), 1.0, tl.float16)
    # Deferred: for a constant factor the compiler emits a select, which is slower than a multiplication.
    no_slot = deferred(part * 0 + NO_SLOT).to(tl.float32)
    lists = (list_ + (strip_row.to(tl.int64) * PARTS + part) * capacity)[:, None]
    before = tl.zeros((OUTER_BLOCK, 16), tl.float32)
    packed_counts = tl.zeros((OUTER_BLOCK, 8), tl.float32)
    eligible = tl.zeros((OUTER_BLOCK, 8), tl.float32)
    tilted_sum = tl.zeros((OUTER_BLOCK, 8), tl.float32)
    weight_sum = tl.zeros((OUTER_BLOCK, 8), tl.float32)
    positions = tl.cdiv(candidates, PARTS)
    for start in range(0, positions, INNER_BLOCK):
        lead = start * PARTS + rotated_part(part, start // ROTATION_LENGTH, PARTS)
        j = lead + k * PARTS
        pointer = candidates_ + lead.to(tl.int64) * candidate_stride + k * (PARTS * candidate_stride)
        scores = compute_scores_at(
            tile, anchors_, pointer, i, j, row, OWN or (start + INNER_BLOCK >= positions), group, candidate_groups,
            excluded, allowed, scale,
            anchors, candidates, width, anchor_stride, column, columns, batch, offset, whole, num_excluded,
            allowed_rows, allowed_columns, OUTER_BLOCK, INNER_BLOCK, WIDTH, WHOLE, PRECISION,
            OWN, EXCLUDED, GROUPS, ALLOWED,
        )  # fmt: skip
        if COUNTED:
            eligible += sum_every_eighth(tl.where(scores > float("-inf"), 1.0, 0.0), OUTER_BLOCK, INNER_BLOCK)
        # Floats, because the comparison instruction returns them.
        over_0, over_1 = tl.where(scores >= bound_0[:, None], 1.0, 0.0), tl.where(scores >= bound_1[:, None], 1.0, 0.0)
        between = over_1 - tl.where(scores >= bound_2[:, None], 1.0, 0.0)
        listed = over_0 - between
        if not OPEN:
            listed -= tl.where(scores >= bound_3[:, None], 1.0, 0.0)
        packed_counts += sum_every_eighth(over_0 + between * COUNT_BASE, OUTER_BLOCK, INNER_BLOCK)
        if SUMMED:
            tilted_exp, weight_exp = exponentials(scores, tilt, KIND, False)
            tilted_sum += sum_every_eighth(tilted_exp * between, OUTER_BLOCK, INNER_BLOCK)
            if KIND != NONE:
                weight_sum += sum_every_eighth(weight_exp * between, OUTER_BLOCK, INNER_BLOCK)
        # Slots in the list, from 1, by a matrix product: tensor cores add faster than a scan.
        marks = listed.to(tl.float16)
        order = tl.dot(marks, triangle)
        first = (before + (SLOT_BASE - 1 + NO_SLOT))[:, None, :]
        first = tl.reshape(tl.broadcast_to(first, (OUTER_BLOCK, INNER_BLOCK // 16, 16)), (OUTER_BLOCK, INNER_BLOCK))
        slot = order + (first - listed * no_slot)
        before = tl.dot(marks, ones, before)
        write_entries(lists, slot, capacity, scores, (start + k)[None, :])
    number = tl.max(before, axis=1).to(tl.int32)
    tl.store(counters + strip_row * COUNTERS + STATUS, NO_ROOM, mask=inside & (number > capacity))
    part_counts = part_counts_ + strip_row * PARTS + part
    digits = packed_counts.to(tl.int32)
    tl.store(part_counts + NUM_LISTED * rows * PARTS, number, mask=inside)
    tl.store(part_counts + NUM_ABOVE * rows * PARTS, tl.sum(digits % COUNT_BASE, axis=1), mask=inside)
    tl.store(part_counts + NUM_BETWEEN * rows * PARTS, tl.sum(digits // COUNT_BASE, axis=1), mask=inside)
    if COUNTED:
        tl.store(part_counts + NUM_ELIGIBLE * rows * PARTS, tl.sum(eligible, axis=1).to(tl.int32), mask=inside)
    if SUMMED:
        tl.store(tilted_sum_ + part * stride + i, tl.sum(tilted_sum, axis=1), mask=inside)
        if KIND != NONE:
            tl.store(weight_sum_ + part * stride + i, tl.sum(weight_sum, axis=1), mask=inside)

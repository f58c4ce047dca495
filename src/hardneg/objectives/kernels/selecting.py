"""The Triton programs that find the edges of percentile bands: sample, bracket, collect, select.

Candidates are ranked by score and then by index, so no two of an anchor's are equal, and all that is said of pairs
(score, index) holds whether or not scores tie. Scores are in base 2, −inf where an anchor may not meet a candidate;
such *hidden* ones rank before all others.

Atomics add integers only: sums, which no order changes, and places in a list whose order no result depends on.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from hardneg.objectives.kernels.searching import HIDDEN, between, narrowed, ordered, parted, score_of
from hardneg.objectives.kernels.tiles import LAST, LOG2E, PLAIN, deferred, hidden, rows_of, scored

# Most candidates of a tile of `collect`, and what it counts them in: digits of one number, each of which holds a GRAIN.
GRAIN = tl.constexpr(64)
DIGIT = tl.constexpr(128)

# Numbers from 2²³ on have an integer in the lowest bits of their float, which are these beside the integer.
FROM, FROM_BITS = tl.constexpr(8388608.0), tl.constexpr(0x4B000000)
NOWHERE = tl.constexpr(1 << 20)  # added to a slot, beyond the end of every list

# Counters of an anchor: how many candidates are below the pivots of the lower edge, below those of the upper edge,
# listed, and eligible. They have a sector of memory of their own, lest additions to those of others wait for them.
BELOW_LOW, BELOW_HIGH, LISTED, ELIGIBLE, COUNTERS = (tl.constexpr(which) for which in (0, 1, 2, 3, 8))


@triton.jit
def sampled(sample, STEP: tl.constexpr):
    """Which candidates are sampled: one of each STEP, not always the same, lest candidates come in the same rhythm."""
    return sample * STEP + (((sample & 0x7FFF) * 40503) >> 12) % STEP


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
    scale, group = tl.load(scale_) * LOG2E, 0
    if GROUPS > 0:
        group = tl.load(anchor_groups + i, mask=i < anchors, other=0)[:, None]
    for start in range(part * span, min(part * span + span, size), INNER_BLOCK):
        drawn = start + tl.arange(0, INNER_BLOCK)
        j = tl.where(drawn < size, sampled(drawn, STEP), candidates)
        found = tl.zeros((OUTER_BLOCK, INNER_BLOCK), tl.float32)
        for first in range(0, width, WIDTH):
            mine = rows_of(anchors_, row, anchors, width, anchor_stride, OUTER_BLOCK, WIDTH, first)
            k = first + tl.arange(0, WIDTH)
            pointer = candidates_ + j.to(tl.int64)[:, None] * candidate_stride + k[None, :]
            theirs = tl.load(pointer, mask=(j < candidates)[:, None] & (k < width)[None, :], other=0.0)
            found = tl.dot(mine, tl.trans(theirs), found, input_precision=PRECISION)
        other = 0
        if GROUPS > 0:
            other = tl.load(candidate_groups + j, mask=j < candidates, other=0)[None, :]
        found = hidden(
            found * scale, i[:, None], j[None, :], anchors, candidates, True, column, columns, batch, offset, whole,
            excluded, named, group, other, allowed, allowed_rows, allowed_columns, OWN, EXCLUDED, GROUPS, ALLOWED,
            False,
        )  # fmt: skip
        pointer = result + (i - base).to(tl.int64)[:, None] * size + drawn[None, :]
        tl.store(pointer, found, mask=(i < anchors)[:, None] & (drawn < size)[None, :])


@triton.jit
def bracket(
    sample_, pivot_, cut_, size, low_share, high_share, spread, STEP: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The two pivots of an anchor between which an edge of its band lies, by the ranks of a sample.

    Of pivots 0 … 3 the first two enclose the lower edge, the last two the upper one; a candidate is below a pivot if
    its score is lower than ``pivot``, or equal and its index lower than ``cut``. Cuts are multiples of GRAIN: the
    candidates of a tile are either all before one or all behind it.
    low_share, high_share: where the edges should be, as shares of the eligible · spread: half the distance of an
    edge's pivots, in standard deviations of a sampled rank · outputs: (anchors, 4)
    """
    row, edge = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, SIZE)
    pointer = sample_ + row.to(tl.int64) * size + place
    scores = tl.load(pointer, mask=place < size, other=float("-inf"))
    met = scores > float("-inf")
    eligible = tl.sum(met.to(tl.int32), axis=0)
    share = tl.where(edge == 0, low_share, high_share)
    # The binomial law of a sampled rank is skewed towards the middle; spread²/6 makes up for it (Cornish and Fisher).
    margin = spread * tl.sqrt(eligible * share * (1 - share)) + spread * spread / 6
    # A pivot may lie further out than asked, if that saves some rounds.
    slack = (margin / 8).to(tl.int32)
    lower = tl.floor(share * eligible - margin).to(tl.int32)
    upper = tl.ceil(share * eligible + margin).to(tl.int32)
    # Where nobody is beyond a pivot, no round is needed.
    all_above, all_below = lower <= 0, upper >= eligible
    lower, upper = lower + SIZE - eligible, upper + SIZE - eligible
    lowest = ordered(tl.min(tl.where(met, scores, float("inf")), axis=0))
    highest = ordered(tl.max(scores, axis=0))
    low, low_end, under, _, high_begin, high, over, _ = narrowed(
        scores, lowest, highest, SIZE - eligible, SIZE + 0 * eligible, lower, tl.where(all_above, SIZE, slack),
        lowest, highest, SIZE - eligible, SIZE + 0 * eligible, upper, tl.where(all_below, SIZE, slack),
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
def pivot_of(pivot_, cut_, place, inside):
    """A pivot of each row, the next score above it, and its cut; beyond the last anchor everything is below."""
    pivot = tl.load(pivot_ + place, mask=inside, other=float("inf"))
    cut = tl.load(cut_ + place, mask=inside, other=0)
    return pivot, tl.where(pivot == float("inf"), pivot, score_of(ordered(pivot) + 1)), cut


@triton.jit
def put(list_, slot, capacity, scores, candidate):
    """Write scores and their candidates into lists of ``capacity`` entries, where their slot is within.

    list_: pointers to the lists, along the anchors' side of the tile · slot: floats, FROM for the first
    """
    bits = slot.to(tl.int32, bitcast=True)
    if PLAIN:
        entry = (scores.to(tl.int32, bitcast=True).to(tl.int64) << 32) | candidate.to(tl.int64)
        tl.store(list_ + (bits - FROM_BITS), entry, mask=bits < FROM_BITS + capacity)
    else:  # by hand, because Triton would move the whole tile between threads before it stores
        begin = list_.to(tl.int64, bitcast=True) - FROM_BITS * 8
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            .reg .u64 place;
            setp.lt.u32 p, $1, $2;
            mad.wide.u32 place, $1, 8, $3;
            @p st.global.v2.b32 [place], {$5, $4};
            mov.u32 $0, 0;
            }""",
            "=r,r,r,l,f,r", [bits, FROM_BITS + capacity, begin, scores, candidate],
            dtype=tl.uint32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def collect(
    anchors_, candidates_, scale_, excluded, anchor_groups, candidate_groups, allowed, pivot_, cut_, counters, list_,
    anchors, candidates, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole, named,
    allowed_rows, allowed_columns, base, capacity, span,
    OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, COUNTED: tl.constexpr, OWN: tl.constexpr, EXCLUDED: tl.constexpr,
    GROUPS: tl.constexpr, ALLOWED: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Lists the candidates between pivots, of one stretch of ``span`` candidates, and counts those below.

    list_: (anchors − base, capacity) int64, a score's bits above its candidate's index · counters: (anchors − base,
    COUNTERS), zero to begin with; the eligible are counted if COUNTED, the listed even if there is no room for them.
    Where the pivots of both edges overlap, those of the upper edge begin where those of the lower end.
    """
    tl.static_assert(INNER_BLOCK <= GRAIN)
    row, part = base + tl.program_id(0) * OUTER_BLOCK, tl.program_id(1)
    i = row + tl.arange(0, OUTER_BLOCK)
    inside, place = i < anchors, i - base
    tile = rows_of(anchors_, row, anchors, width, anchor_stride, OUTER_BLOCK, WIDTH, 0, DESCRIBED)
    scale, group = tl.load(scale_) * LOG2E, 0
    if GROUPS > 0:
        group = tl.load(anchor_groups + i, mask=inside, other=0)[:, None]
    pivot_0, above_0, cut_0 = pivot_of(pivot_, cut_, place * 4, inside)
    pivot_1, above_1, cut_1 = pivot_of(pivot_, cut_, place * 4 + 1, inside)
    pivot_2, above_2, cut_2 = pivot_of(pivot_, cut_, place * 4 + 2, inside)
    pivot_3, above_3, cut_3 = pivot_of(pivot_, cut_, place * 4 + 3, inside)
    below_low = tl.zeros((OUTER_BLOCK,), tl.int32)
    below_high = tl.zeros((OUTER_BLOCK,), tl.int32)
    eligible = tl.zeros((OUTER_BLOCK,), tl.int32)
    counter, lists = counters + place * COUNTERS, list_ + place.to(tl.int64) * capacity
    k = tl.arange(0, INNER_BLOCK)
    triangle = (k[:, None] <= k[None, :]).to(tl.float16)
    # Of factors that it knows the compiler would make choices, which take longer than products.
    second, third = deferred(part * 0 + DIGIT).to(tl.float32), deferred(part * 0 + DIGIT * DIGIT).to(tl.float32)
    nowhere = deferred(part * 0 + NOWHERE).to(tl.float32)
    last_scores = tl.zeros((OUTER_BLOCK, INNER_BLOCK), tl.float32)
    last_order = tl.full((OUTER_BLOCK, INNER_BLOCK), NOWHERE, tl.float32)
    last_first = tl.zeros((OUTER_BLOCK,), tl.int32)
    stop = min(part * span + span, candidates)
    for start in range(part * span, stop, INNER_BLOCK):
        _, _, scores = scored(
            tile, anchors_, candidates_, i, row, start, group, candidate_groups, excluded, allowed, scale,
            anchors, candidates, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole, named,
            allowed_rows, allowed_columns, OUTER_BLOCK, INNER_BLOCK, WIDTH, WHOLE, PRECISION,
            OWN, EXCLUDED, GROUPS, ALLOWED, DESCRIBED,
        )  # fmt: skip
        if COUNTED:
            eligible += tl.sum((scores > float("-inf")).to(tl.int32), axis=1)
        bound_0 = tl.where(start < cut_0, above_0, pivot_0)
        bound_1 = tl.maximum(bound_0, tl.where(start < cut_1, above_1, pivot_1))
        bound_2 = tl.maximum(bound_1, tl.where(start < cut_2, above_2, pivot_2))
        bound_3 = tl.maximum(bound_2, tl.where(start < cut_3, above_3, pivot_3))
        under_0, under_1 = tl.where(scores < bound_0[:, None], 1.0, 0.0), tl.where(scores < bound_1[:, None], 1.0, 0.0)
        under_2, under_3 = tl.where(scores < bound_2[:, None], 1.0, 0.0), tl.where(scores < bound_3[:, None], 1.0, 0.0)
        listed = (under_1 - under_0) + (under_3 - under_2)
        total = tl.sum(under_0 + under_2 * second + listed * third, axis=1).to(tl.int32)
        below_low += total % DIGIT
        below_high += total // DIGIT % DIGIT
        number = total // (DIGIT * DIGIT)
        first = tl.atomic_add(counter + LISTED, number, mask=number > 0, sem="relaxed")
        # The place of each in the list, from 1, by a product, because tensor cores add faster than a scan does.
        order = tl.dot(listed.to(tl.float16), triangle) + (nowhere - listed * nowhere)
        # The tile before is written now, because it takes long to hear where it begins.
        candidate = (start - INNER_BLOCK + k)[None, :]
        put(lists[:, None], last_order + (last_first + (FROM - 1))[:, None], capacity, last_scores, candidate)
        last_order, last_first, last_scores = order, first, scores
    tiles = tl.cdiv(stop - part * span, INNER_BLOCK)
    candidate = (part * span + (tiles - 1) * INNER_BLOCK + k)[None, :]
    put(lists[:, None], last_order + (last_first + (FROM - 1))[:, None], capacity, last_scores, candidate)
    # What a tile holds beyond the last candidate is hidden, and was counted as below.
    beyond = tiles * INNER_BLOCK - (stop - part * span)
    tl.atomic_add(counter + BELOW_LOW, below_low - beyond, mask=inside, sem="relaxed")
    tl.atomic_add(counter + BELOW_HIGH, below_high - beyond, mask=inside, sem="relaxed")
    if COUNTED:
        tl.atomic_add(counter + ELIGIBLE, eligible, mask=inside, sem="relaxed")


@triton.jit
def ranked(row, edge, counters, first_, end_, candidates, known, COUNTED: tl.constexpr):
    """Rank of a row's edge among all candidates, the hidden ones included, and whether the band is empty.

    first_, end_: the ranks of the band among the eligible, numbers or, if COUNTED, one per row
    """
    if COUNTED:
        eligible = tl.load(counters + row * COUNTERS + ELIGIBLE)
        first, end = tl.load(first_ + row).to(tl.int32), tl.load(end_ + row).to(tl.int32)
    else:
        eligible = row * 0 + known
        first, end = row * 0 + first_, row * 0 + end_
    return candidates - eligible + tl.where(edge == 0, first, end - 1), end <= first


@triton.jit
def tie(word, scores, score, alone, rank, otherwise):
    """The index of the candidate of this rank among those in a list that score the same; ``otherwise`` if ``alone``."""
    index = rank * 0 + otherwise
    if ~alone:
        indices = tl.load(word, mask=scores == score, other=LAST)
        lowest, highest = tl.min(indices, axis=0), tl.max(tl.where(indices < LAST, indices, -1), axis=0)
        least, _ = parted(indices, rank, 0, lowest, highest)
        index = tl.min(tl.where(indices >= least, indices, LAST), axis=0)
    return index


# Ranks change as a band is annealed: the same program must do.
@triton.jit(do_not_specialize=["first_", "end_"])
def select(
    words, pivot_, cut_, counters, first_, end_, score_, index_, missed_,
    rows, candidates, base, capacity, known, stride, COUNTED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The edges of an anchor's band, from its list.

    words: the lists, as pairs of words: the index and the score · outputs: scores (2, stride); indices (2, stride), 0
    and LAST where no other candidate ties with the edge; and whether the list did not hold them (2, rows)
    """
    row = tl.program_id(0)
    rank_0, empty = ranked(row, 0, counters, first_, end_, candidates, known, COUNTED)
    rank_1, _ = ranked(row, 1, counters, first_, end_, candidates, known, COUNTED)
    counter = counters + row * COUNTERS
    below_low, below_high = tl.load(counter + BELOW_LOW), tl.load(counter + BELOW_HIGH)
    length = tl.load(counter + LISTED)
    slot = tl.arange(0, SIZE)
    held = slot < tl.minimum(length, capacity)
    word = words + row.to(tl.int64) * capacity * 2 + slot * 2
    scores = tl.load(word + 1, mask=held, other=0).to(tl.float32, bitcast=True)
    scores = tl.where(held, scores, float("inf"))
    # The list holds two stretches of the ranks: from below_low on up to pivot 1, and from below_high on.
    pivot_0, pivot_1 = tl.load(pivot_ + row * 4), tl.load(pivot_ + row * 4 + 1)
    pivot_2, pivot_3 = tl.load(pivot_ + row * 4 + 2), tl.load(pivot_ + row * 4 + 3)
    tied = tl.load(word, mask=held & (scores == pivot_1), other=LAST)
    first_stretch = tl.sum((held & ((scores < pivot_1) | (tied < tl.load(cut_ + row * 4 + 1)))).to(tl.int32), axis=0)
    gap = below_low + first_stretch
    missed_0 = (length > capacity) | (rank_0 < below_low) | ((rank_0 >= gap) & (rank_0 < below_high))
    missed_1 = (length > capacity) | (rank_1 < below_low) | ((rank_1 >= gap) & (rank_1 < below_high))
    rank_0 = tl.where(rank_0 < gap, rank_0 - below_low, rank_0 - below_high + first_stretch)
    rank_1 = tl.where(rank_1 < gap, rank_1 - below_low, rank_1 - below_high + first_stretch)
    missed_0, missed_1 = missed_0 | (rank_0 >= length), missed_1 | (rank_1 >= length)
    # The stretches are apart, unless pivots of both edges overlap; pivots may be infinite.
    lowest = ordered(tl.maximum(pivot_0, tl.min(scores, axis=0)))
    highest = ordered(tl.minimum(pivot_3, tl.max(tl.where(held, scores, float("-inf")), axis=0)))
    apart_0, apart_1 = (rank_0 < first_stretch) & (pivot_1 < pivot_2), (rank_1 >= first_stretch) & (pivot_1 < pivot_2)
    # Nothing is looked for where nothing will be found.
    key_0, _, below_0, upto_0, key_1, _, below_1, upto_1 = narrowed(
        scores, lowest, tl.where(apart_0, ordered(pivot_1), highest), length * 0,
        tl.where(apart_0, first_stretch, length), rank_0, tl.where(missed_0 | empty, SIZE, 0),
        tl.where(apart_1, ordered(pivot_2), lowest), highest, tl.where(apart_1, first_stretch, 0),
        length, rank_1, tl.where(missed_1 | empty, SIZE, 0),
    )  # fmt: skip
    # Within bounds that differ there is but one.
    low = tl.min(tl.where(scores >= score_of(key_0), scores, float("inf")), axis=0)
    high = tl.min(tl.where(scores >= score_of(key_1), scores, float("inf")), axis=0)
    # Beyond a pivot others may tie that are not listed.
    alone_0 = (upto_0 == below_0 + 1) & (low != pivot_0) & (low != pivot_1) & (low != pivot_2) & (low != pivot_3)
    alone_1 = (upto_1 == below_1 + 1) & (high != pivot_0) & (high != pivot_1) & (high != pivot_2) & (high != pivot_3)
    first = tie(word, scores, low, alone_0 | missed_0 | empty, rank_0 - below_0, 0)
    last = tie(word, scores, high, alone_1 | missed_1 | empty, rank_1 - below_1, LAST)
    score, index = score_ + base + row, index_ + base + row
    tl.store(score, tl.where(empty, float("inf"), low))
    tl.store(score + stride, tl.where(empty, float("-inf"), high))
    tl.store(index, first)
    tl.store(index + stride, last)
    tl.store(missed_ + row, (missed_0 & ~empty).to(tl.int32))
    tl.store(missed_ + rows + row, (missed_1 & ~empty).to(tl.int32))


@triton.jit(do_not_specialize=["first_", "end_"])
def bisect(
    anchors_, candidates_, scale_, excluded, anchor_groups, candidate_groups, allowed,
    counters, first_, end_, score_, index_, missed_,
    anchors, candidates, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole, named,
    allowed_rows, allowed_columns, base, known, stride,
    OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, COUNTED: tl.constexpr, OWN: tl.constexpr, EXCLUDED: tl.constexpr,
    GROUPS: tl.constexpr, ALLOWED: tl.constexpr,
):  # fmt: skip
    """The edges that were missed, by halving first the scores and then the indices in question, a walk for each half.

    Fifty times the work of another program, for the rare anchor that a sample misled; without one it returns at once.
    """
    row, edge = base + tl.program_id(0) * OUTER_BLOCK, tl.program_id(1)
    i = row + tl.arange(0, OUTER_BLOCK)
    place, rows = i - base, anchors - base
    missed = tl.load(missed_ + edge * rows + place, mask=i < anchors, other=0) != 0
    if tl.max(missed.to(tl.int32), axis=0) > 0:
        within = tl.where(i < anchors, place, 0)
        rank, _empty = ranked(within, edge, counters, first_, end_, candidates, known, COUNTED)
        tile = rows_of(anchors_, row, anchors, width, anchor_stride, OUTER_BLOCK, WIDTH, 0)
        scale, group = tl.load(scale_) * LOG2E, 0
        if GROUPS > 0:
            group = tl.load(anchor_groups + i, mask=i < anchors, other=0)[:, None]
        low = tl.where(missed, HIDDEN, 0)
        high = tl.where(missed, LAST - 1, 0)
        first = tl.zeros((OUTER_BLOCK,), tl.int32)
        last = tl.where(missed, candidates - 1, 0)
        while tl.max(((low < high) | (first < last)).to(tl.int32), axis=0) > 0:
            by_score = low < high
            key = between(low, high)
            index = tl.where(by_score, candidates, between(first, last))
            count = tl.zeros((OUTER_BLOCK,), tl.int32)
            for start in range(0, candidates, INNER_BLOCK):
                j, _, found = scored(
                    tile, anchors_, candidates_, i, row, start, group, candidate_groups, excluded, allowed, scale,
                    anchors, candidates, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole,
                    named, allowed_rows, allowed_columns, OUTER_BLOCK, INNER_BLOCK, WIDTH, WHOLE, PRECISION,
                    OWN, EXCLUDED, GROUPS, ALLOWED,
                )  # fmt: skip
                keys = ordered(found)
                upto = (keys < key[:, None]) | ((keys == key[:, None]) & (j[None, :] <= index[:, None]))
                count += tl.sum((upto & (j < candidates)[None, :]).to(tl.int32), axis=1)
            enough = count > rank
            high = tl.where(by_score & enough, key, high)
            low = tl.where(by_score & ~enough, key + 1, low)
            last = tl.where(~by_score & enough, index, last)
            first = tl.where(~by_score & ~enough, index + 1, first)
        tl.store(score_ + edge * stride + i, score_of(low), mask=missed)
        tl.store(index_ + edge * stride + i, first, mask=missed)

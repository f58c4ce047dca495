"""The Triton programs that find the edges of percentile bands: sample, bracket, collect, select.

Candidates are ranked by score and then by index, so no two of an anchor's are equal, and all that is said of pairs
(score, index) holds whether or not scores tie. Scores are in base 2, −inf where an anchor may not meet a candidate;
such *hidden* ones rank before all others. Compared are integer *keys* in the order of the scores.

Atomics add integers only: sums, which no order changes, and places in a list whose order no result depends on.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from hardneg.objectives.kernels.tiles import LOG2E, hidden, rows_of, scored

HIDDEN = tl.constexpr(-0x7F800001)  # the key of −inf
LAST = tl.constexpr(0x7FFFFFFF)  # a key above that of every score; an index beyond every candidate

# Most candidates of a tile of `collect`, and what it counts them in: digits of one number, each of which holds a GRAIN.
# The sum of two neighbours is a float16 number.
GRAIN = tl.constexpr(64)
LISTED, BELOW_HIGH, BELOW_LOW = tl.constexpr(1 << 14), tl.constexpr(1 << 7), tl.constexpr(1)


@triton.jit
def ordered(score):
    """Keys of float32 scores."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # −0.0 equals 0.0, and so must its key
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def score_of(key):
    """Scores of keys."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def between(low, high):
    """⌊(low + high) / 2⌋, where the sum may overflow."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def narrowed(keys, low, high, rank, slack):
    """Bounds of the key of this rank (from 0), drawn together until at most ``slack`` other keys lie within them.

    keys: (n,) · low, high: bounds to begin with · returns them, and how many keys are below and how many up to them.
    Equal keys cannot be parted: then low is high.
    """
    low, high = rank * 0 + low, rank * 0 + high  # tensors, should they be numbers, because a loop changes them
    below = tl.sum((keys < low).to(tl.int32), axis=0)
    upto = tl.sum((keys <= high).to(tl.int32), axis=0)
    while (low < high) & (upto - below > slack + 1):
        middle = between(low, high)
        count = tl.sum((keys <= middle).to(tl.int32), axis=0)
        enough = count > rank
        low = tl.where(enough, low, middle + 1)
        below = tl.where(enough, below, count)
        high = tl.where(enough, middle, high)
        upto = tl.where(enough, count, upto)
    return low, high, below, upto


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
        )  # fmt: skip
        pointer = result + (i - base).to(tl.int64)[:, None] * size + drawn[None, :]
        tl.store(pointer, found, mask=(i < anchors)[:, None] & (drawn < size)[None, :])


@triton.jit
def bracket(
    sample_, pivot_, cut_, size, low_share, high_share, spread, STEP: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Pivots of an anchor, between which the edges of its band lie, by the ranks of a sample.

    Of pivots 0 … 3 the first two enclose the lower edge, the last two the upper one; a candidate is below a pivot if
    its score is lower than ``pivot``, or equal and its index lower than ``cut``. Cuts are multiples of GRAIN: the
    candidates of a tile are either all before one or all behind it.
    low_share, high_share: where the edges should be, as shares of the eligible · spread: half the distance of an
    edge's pivots, in standard deviations of a sampled rank · outputs: (anchors, 4)
    """
    row, which = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, SIZE)
    pointer = sample_ + row.to(tl.int64) * size + place
    keys = ordered(tl.load(pointer, mask=place < size, other=float("-inf")))
    eligible = tl.sum((keys > HIDDEN).to(tl.int32), axis=0)
    share = tl.where(which < 2, low_share, high_share)
    # The binomial law of a sampled rank is skewed towards the middle; spread²/6 makes up for it (Cornish and Fisher).
    margin = spread * tl.sqrt(eligible * share * (1 - share)) + spread * spread / 6
    above = which % 2 == 1
    rank = tl.where(above, tl.ceil(share * eligible + margin), tl.floor(share * eligible - margin)).to(tl.int32)
    nobody = tl.where(above, rank >= eligible, rank <= 0)  # is nobody beyond the pivot?
    # A pivot may lie further out than asked, if that saves some rounds; where it holds nobody back, no round is needed.
    slack = tl.where(nobody, SIZE, (margin / 8).to(tl.int32))
    rank += SIZE - eligible
    lowest, highest = tl.min(tl.where(keys > HIDDEN, keys, LAST), axis=0), tl.max(keys, axis=0)
    low, high, below, _ = narrowed(keys, lowest, highest, rank, slack)
    # Many equals at a pivot are parted by index.
    equals = tl.where(keys == low, place, LAST)
    some = tl.where(low == high, slack, SIZE)
    first, last, _, _ = narrowed(equals, 0, SIZE - 1, rank - below, some)
    first_cut = first * STEP // GRAIN * GRAIN
    last_cut = tl.where(last == SIZE - 1, LAST, ((last + 1) * STEP + GRAIN - 1) // GRAIN * GRAIN)
    beyond = tl.where(above, float("inf"), float("-inf"))
    pivot = tl.where(nobody, beyond, score_of(tl.where(above, high, low)))
    cut = tl.where(nobody, LAST, tl.where(above, last_cut, first_cut))
    tl.store(pivot_ + row * 4 + which, pivot)
    tl.store(cut_ + row * 4 + which, cut)


@triton.jit
def pivot_of(pivot_, cut_, place, inside):
    """A pivot of each row, the next score above it, and its cut; beyond the last anchor everything is below."""
    pivot = tl.load(pivot_ + place, mask=inside, other=float("inf"))
    cut = tl.load(cut_ + place, mask=inside, other=0)
    return pivot, tl.where(pivot == float("inf"), pivot, score_of(ordered(pivot) + 1)), cut


@triton.jit
def collect(
    anchors_, candidates_, scale_, excluded, anchor_groups, candidate_groups, allowed, pivot_, cut_, counters, list_,
    anchors, candidates, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole, named,
    allowed_rows, allowed_columns, base, capacity, span,
    OUTER_BLOCK: tl.constexpr, INNER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, COUNTED: tl.constexpr, OWN: tl.constexpr, EXCLUDED: tl.constexpr,
    GROUPS: tl.constexpr, ALLOWED: tl.constexpr,
):  # fmt: skip
    """Lists the candidates between pivots, of one stretch of ``span`` candidates, and counts those below.

    list_: (anchors − base, capacity) int64, a score's bits above its candidate's index · counters: (4, anchors − base),
    zero to begin with: how many are below the lower edge's pivots, below the upper edge's, listed, and, if COUNTED,
    eligible. Where the pivots of both edges overlap, those of the upper edge begin where those of the lower end.
    """
    tl.static_assert(INNER_BLOCK <= GRAIN)
    row, part = base + tl.program_id(0) * OUTER_BLOCK, tl.program_id(1)
    i = row + tl.arange(0, OUTER_BLOCK)
    inside, place = i < anchors, i - base
    tile = rows_of(anchors_, row, anchors, width, anchor_stride, OUTER_BLOCK, WIDTH, 0)
    scale, group = tl.load(scale_) * LOG2E, 0
    if GROUPS > 0:
        group = tl.load(anchor_groups + i, mask=inside, other=0)[:, None]
    pivot_0, above_0, cut_0 = pivot_of(pivot_, cut_, place * 4, inside)
    pivot_1, above_1, cut_1 = pivot_of(pivot_, cut_, place * 4 + 1, inside)
    pivot_2, above_2, cut_2 = pivot_of(pivot_, cut_, place * 4 + 2, inside)
    pivot_3, above_3, cut_3 = pivot_of(pivot_, cut_, place * 4 + 3, inside)
    k = tl.arange(0, INNER_BLOCK)
    triangle = (k[:, None] <= k[None, :]).to(tl.float16)
    below_low = tl.zeros((OUTER_BLOCK,), tl.int32)
    below_high = tl.zeros((OUTER_BLOCK,), tl.int32)
    eligible = tl.zeros((OUTER_BLOCK,), tl.int32)
    length = counters + 2 * (anchors - base) + place
    stop = min(part * span + span, candidates)
    for start in range(part * span, stop, INNER_BLOCK):
        j, _, scores = scored(
            tile, anchors_, candidates_, i, row, start, group, candidate_groups, excluded, allowed, scale,
            anchors, candidates, width, anchor_stride, candidate_stride, column, columns, batch, offset, whole, named,
            allowed_rows, allowed_columns, OUTER_BLOCK, INNER_BLOCK, WIDTH, WHOLE, PRECISION,
            OWN, EXCLUDED, GROUPS, ALLOWED,
        )  # fmt: skip
        if COUNTED:
            eligible += tl.sum((scores > float("-inf")).to(tl.int32), axis=1)
        bound_0 = tl.where(start < cut_0, above_0, pivot_0)
        bound_1 = tl.maximum(bound_0, tl.where(start < cut_1, above_1, pivot_1))
        bound_2 = tl.maximum(bound_1, tl.where(start < cut_2, above_2, pivot_2))
        bound_3 = tl.maximum(bound_2, tl.where(start < cut_3, above_3, pivot_3))
        # A number for each score says what to add: LISTED to the list, BELOW_HIGH and BELOW_LOW to the counts. One
        # product then sums all three up to each column, because tensor cores add faster than a scan does.
        what = tl.where(scores < bound_3[:, None], LISTED, 0.0)
        what = tl.where(scores < bound_2[:, None], BELOW_HIGH, what)
        what = tl.where(scores < bound_1[:, None], LISTED + BELOW_HIGH, what)
        what = tl.where(scores < bound_0[:, None], BELOW_HIGH + BELOW_LOW, what)
        upto = tl.dot(what.to(tl.float16), triangle).to(tl.int32)
        total = tl.max(upto, axis=1)
        below_low += total & (BELOW_HIGH - 1)
        below_high += (total & (LISTED - 1)) >> 7
        number = total >> 14
        first = tl.atomic_add(length, number, mask=number > 0, sem="relaxed")
        # A list that is too long will not be read: what it cannot hold falls on its beginning.
        first = tl.where(first + number <= capacity, first, 0) + place * capacity - 1
        slot = tl.where(what >= LISTED, (upto >> 14) + first[:, None], -1)
        entry = (scores.to(tl.int32, bitcast=True).to(tl.int64) << 32) | j[None, :].to(tl.int64)
        # Unsigned, −1 is beyond every list. Asked this way, the compiler moves slots between threads once, not twice.
        mask = slot.to(tl.uint32, bitcast=True).to(tl.uint64) < 0x80000000
        tl.store(list_ + slot.to(tl.int64), entry, mask=mask)
    # What a tile holds beyond the last candidate is hidden, and was counted as below.
    beyond = tl.cdiv(stop - part * span, INNER_BLOCK) * INNER_BLOCK - (stop - part * span)
    tl.atomic_add(counters + place, below_low - beyond, mask=inside, sem="relaxed")
    tl.atomic_add(counters + (anchors - base) + place, below_high - beyond, mask=inside, sem="relaxed")
    if COUNTED:
        tl.atomic_add(counters + 3 * (anchors - base) + place, eligible, mask=inside, sem="relaxed")


@triton.jit
def ranked(row, edge, counters, first_, end_, rows, candidates, known, COUNTED: tl.constexpr):
    """Rank of a row's edge among all candidates, the hidden ones included, and whether the band is empty.

    first_, end_: the ranks of the band among the eligible, numbers or, if COUNTED, one per row
    """
    if COUNTED:
        eligible = tl.load(counters + 3 * rows + row)
        first, end = tl.load(first_ + row).to(tl.int32), tl.load(end_ + row).to(tl.int32)
    else:
        eligible = row * 0 + known
        first, end = row * 0 + first_, row * 0 + end_
    return candidates - eligible + tl.where(edge == 0, first, end - 1), end <= first


# Ranks change as a band is annealed: the same program must do.
@triton.jit(do_not_specialize=["first_", "end_"])
def select(
    words, pivot_, cut_, counters, first_, end_, score_, index_, missed_,
    rows, candidates, base, capacity, known, stride, COUNTED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The edges of an anchor's band, from its list.

    words: the lists, as pairs of words: the index and the score · outputs: scores and indices (2, stride), and
    whether the list did not hold them (2, rows)
    """
    row, edge = tl.program_id(0), tl.program_id(1)
    rank, empty = ranked(row, edge, counters, first_, end_, rows, candidates, known, COUNTED)
    below_low, below_high = tl.load(counters + row), tl.load(counters + rows + row)
    length = tl.load(counters + 2 * rows + row)
    slot = tl.arange(0, SIZE)
    held = slot < tl.minimum(length, capacity)
    word = words + row.to(tl.int64) * capacity * 2 + slot * 2
    keys = tl.where(held, ordered(tl.load(word + 1, mask=held, other=0).to(tl.float32, bitcast=True)), LAST)
    # The list holds two stretches of the ranks: from below_low on up to pivot 1, and from below_high on.
    pivot, cut = ordered(tl.load(pivot_ + row * 4 + 1)), tl.load(cut_ + row * 4 + 1)
    tied = tl.load(word, mask=held & (keys == pivot), other=LAST)
    first_stretch = tl.sum(((keys < pivot) | (tied < cut)).to(tl.int32), axis=0)
    gap = below_low + first_stretch
    missed = (length > capacity) | (rank < below_low) | ((rank >= gap) & (rank < below_high))
    rank = tl.where(rank < gap, rank - below_low, rank - below_high + first_stretch)
    missed = missed | (rank >= length)
    slack = tl.where(missed | empty, SIZE, 0)  # nothing to look for
    lowest, highest = tl.min(keys, axis=0), tl.max(tl.where(held, keys, HIDDEN), axis=0)
    least, _, below, _ = narrowed(keys, lowest, highest, rank, slack)
    key = tl.min(tl.where(keys >= least, keys, LAST), axis=0)
    index = tl.load(word, mask=held & (keys == key), other=-1)
    equals = tl.where(index >= 0, index, LAST)
    lowest, highest = tl.min(equals, axis=0), tl.max(index, axis=0)
    least, _, _, _ = narrowed(equals, lowest, highest, rank - below, slack)
    nowhere = tl.where(edge == 0, float("inf"), float("-inf"))
    tl.store(score_ + edge * stride + base + row, tl.where(empty, nowhere, score_of(key)))
    tl.store(index_ + edge * stride + base + row, tl.min(tl.where(equals >= least, equals, LAST), axis=0))
    tl.store(missed_ + edge * rows + row, (missed & ~empty).to(tl.int32))


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
        rank, _empty = ranked(within, edge, counters, first_, end_, rows, candidates, known, COUNTED)
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

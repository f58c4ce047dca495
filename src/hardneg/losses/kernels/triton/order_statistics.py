"""Order statistics on the chip: scores of given ranks among those that a Triton program holds, found by narrowing.

Scores have integer *keys* in their order. A range of keys is drawn together until nobody else lies in it: first at
scores where the rank is to be expected, then, should they be spread oddly, by halves.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from hardneg.losses.kernels.triton.score_tile import ASSEMBLY, PLAIN, deferred

HIDDEN = tl.constexpr(-0x7F800001)  # the key of −inf

# Rounds that go by expectation: evenly spread scores need ten, and after these halving takes at most 32.
EXPECTING = tl.constexpr(16)


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
def added(one, other, one_more, other_more):
    """Sums of pairs."""
    return one + one_more, other + other_more


@triton.jit
def upto(scores, key):
    """1 where a score is no higher than a key, else 0."""
    # Between the keys of 0 and of the next score below lies that of −0, which is not lower than 0.
    bound = score_of(tl.where(key == -1, -2, key))
    if not ASSEMBLY:
        return tl.where(scores <= bound, 1.0, 0.0)
    else:  # numbers made by the comparison itself, which the compiler does not always think of; float32 counts to 2²⁴
        return tl.inline_asm_elementwise(
            "set.le.f32.f32 $0, $1, $2;", "=f,f,f", [scores, bound], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def counted(scores, key_0, key_1):
    """How many scores (n,) are no higher than each of two keys."""
    if PLAIN:
        count_0, count_1 = tl.sum(upto(scores, key_0), axis=0), tl.sum(upto(scores, key_1), axis=0)
    else:  # in one go, so that threads wait for each other once
        count_0, count_1 = tl.reduce((upto(scores, key_0), upto(scores, key_1)), 0, added)
    return count_0.to(tl.int32), count_1.to(tl.int32)


@triton.jit
def met(count, lowest, highest, more, lower, higher):
    """Sums, minima and maxima of pairs."""
    return count + more, tl.minimum(lowest, lower), tl.maximum(highest, higher)


@triton.jit
def surveyed(scores, held, bound):
    """Of the scores (n,) held: how many are no higher than a bound, the lowest and the highest; others are +inf."""
    within, known = (held & (scores <= bound)).to(tl.int32), tl.where(held, scores, float("-inf"))
    if PLAIN:
        count, lowest, highest = tl.sum(within, axis=0), tl.min(scores, axis=0), tl.max(known, axis=0)
    else:
        count, lowest, highest = tl.reduce((within, scores, known), 0, met)
    return count, lowest, highest


@triton.jit
def lower(one, other, one_more, other_more):
    """Minima of pairs."""
    return tl.minimum(one, one_more), tl.minimum(other, other_more)


@triton.jit
def least(scores, key_0, key_1):
    """The lowest of the scores (n,) that is no lower than a key, for each of two keys; +inf if there is none."""
    some_0 = tl.where(scores >= score_of(key_0), scores, float("inf"))
    some_1 = tl.where(scores >= score_of(key_1), scores, float("inf"))
    if PLAIN:
        low_0, low_1 = tl.min(some_0, axis=0), tl.min(some_1, axis=0)
    else:
        low_0, low_1 = tl.reduce((some_0, some_1), 0, lower)
    return low_0, low_1


@triton.jit
def parting(low, high, below, upto, rank, rounds):
    """A key at which to part a range in which the key of this rank lies; see `narrowed`."""
    # Where it is if scores are spread evenly, a little towards the middle: at the end of a long tail that errs less.
    share = 0.8 * ((rank - below) + 0.5) / (upto - below) + 0.1
    begin, end = score_of(low), score_of(high)
    expected = ordered(begin + share * (end - begin))
    expected = tl.minimum(tl.maximum(expected, low), high - 1)
    # Deferred, lest the compiler compare every score with both and choose then.
    return deferred(tl.where(rounds < EXPECTING, expected, between(low, high)))


@triton.jit
def halved(low, high, below, upto, middle, count, rank):
    """That half of a range of keys which holds the key of this rank, and how many are below it and up to it."""
    enough = count > rank
    return (
        tl.where(enough, low, middle + 1),
        tl.where(enough, middle, high),
        tl.where(enough, below, count),
        tl.where(enough, count, upto),
    )


@triton.jit
def narrowed(
    scores, low_0, high_0, below_0, upto_0, rank_0, slack_0, low_1, high_1, below_1, upto_1, rank_1, slack_1
):  # fmt: skip
    """Bounds of the keys of two ranks (from 0), each drawn together until at most ``slack`` others lie within them.

    scores: (n,) · low, high: keys to begin with · below, upto: how many scores are below and how many up to them ·
    returns these four for each rank. Equal scores cannot be parted: then low is high.
    """
    rounds = rank_0 * 0
    while ((low_0 < high_0) & (upto_0 - below_0 > slack_0 + 1)) | ((low_1 < high_1) & (upto_1 - below_1 > slack_1 + 1)):
        middle_0 = parting(low_0, high_0, below_0, upto_0, rank_0, rounds)
        middle_1 = parting(low_1, high_1, below_1, upto_1, rank_1, rounds)
        rounds += 1
        count_0, count_1 = counted(scores, middle_0, middle_1)
        low_0, high_0, below_0, upto_0 = halved(low_0, high_0, below_0, upto_0, middle_0, count_0, rank_0)
        low_1, high_1, below_1, upto_1 = halved(low_1, high_1, below_1, upto_1, middle_1, count_1, rank_1)
    return low_0, high_0, below_0, upto_0, low_1, high_1, below_1, upto_1


@triton.jit
def parted(indices, rank, slack, low, high):
    """Bounds of the index of this rank, as `narrowed` draws those of keys; indices: (n,), LAST where there is none."""
    low, high = rank * 0 + low, rank * 0 + high  # tensors, because a loop changes them
    below = tl.sum((indices < low).to(tl.int32), axis=0)
    upto = tl.sum((indices <= high).to(tl.int32), axis=0)
    while (low < high) & (upto - below > slack + 1):
        middle = between(low, high)
        count = tl.sum((indices <= middle).to(tl.int32), axis=0)
        low, high, below, upto = halved(low, high, below, upto, middle, count, rank)
    return low, high

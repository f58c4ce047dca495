"""Order statistics within a Triton program: the scores of given ranks among those that it holds in registers.

Scores have integer *keys* in the same order. A range of keys that contains the key of a rank is narrowed until no other
score is left in it: first by interpolation, then, for unusual distributions, by bisection.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from hardneg.losses.kernels.triton.score_tile import ASSEMBLY, PLAIN, deferred

MASKED_KEY = tl.constexpr(-0x7F800001)  # the key of −inf

# Rounds of interpolation: evenly distributed scores need ten; the bisection after them takes at most 32.
INTERPOLATION_ROUNDS = tl.constexpr(16)


@triton.jit
def score_key(score):
    """Keys of float32 scores."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # −0.0 equals 0.0, so their keys must be equal
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_score(key):
    """Scores of keys."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def midpoint(low, high):
    """⌊(low + high) / 2⌋ without overflow."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def add_pairs(one, other, one_more, other_more):
    """Sums of pairs, for `tl.reduce`."""
    return one + one_more, other + other_more


@triton.jit
def is_at_most(scores, key):
    """1 where a score is no higher than the score of a key, else 0."""
    # The key between those of 0 and of the next lower score is that of −0, which is not lower than 0.
    bound = key_score(tl.where(key == -1, -2, key))
    if not ASSEMBLY:
        return tl.where(scores <= bound, 1.0, 0.0)
    else:  # one instruction that returns 1.0 or 0.0, which the compiler does not always use; float32 counts to 2²⁴
        return tl.inline_asm_elementwise(
            "set.le.f32.f32 $0, $1, $2;", "=f,f,f", [scores, bound], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def count_at_most(scores, key_0, key_1):
    """Number of scores (n,) that are no higher than each of two keys."""
    if PLAIN:
        count_0, count_1 = tl.sum(is_at_most(scores, key_0), axis=0), tl.sum(is_at_most(scores, key_1), axis=0)
    else:  # in one reduction, so that threads synchronize once
        count_0, count_1 = tl.reduce((is_at_most(scores, key_0), is_at_most(scores, key_1)), 0, add_pairs)
    return count_0.to(tl.int32), count_1.to(tl.int32)


@triton.jit
def combine_statistics(count, lowest, highest, other_count, other_lowest, other_highest):
    """Sum, minimum and maximum, for `tl.reduce`."""
    return count + other_count, tl.minimum(lowest, other_lowest), tl.maximum(highest, other_highest)


@triton.jit
def count_min_max(scores, held, bound):
    """Number of the scores (n,) held that are no higher than a bound, their minimum and maximum; others are +inf."""
    within, known = (held & (scores <= bound)).to(tl.int32), tl.where(held, scores, float("-inf"))
    if PLAIN:
        count, lowest, highest = tl.sum(within, axis=0), tl.min(scores, axis=0), tl.max(known, axis=0)
    else:
        count, lowest, highest = tl.reduce((within, scores, known), 0, combine_statistics)
    return count, lowest, highest


@triton.jit
def min_pairs(one, other, one_more, other_more):
    """Minima of pairs, for `tl.reduce`."""
    return tl.minimum(one, one_more), tl.minimum(other, other_more)


@triton.jit
def lowest_from(scores, key_0, key_1):
    """For each of two keys the lowest of the scores (n,) that is no lower than it; +inf if there is none."""
    some_0 = tl.where(scores >= key_score(key_0), scores, float("inf"))
    some_1 = tl.where(scores >= key_score(key_1), scores, float("inf"))
    if PLAIN:
        low_0, low_1 = tl.min(some_0, axis=0), tl.min(some_1, axis=0)
    else:
        low_0, low_1 = tl.reduce((some_0, some_1), 0, min_pairs)
    return low_0, low_1


@triton.jit
def split_key(low, high, below, upto, rank, rounds):
    """A key at which to split a range that contains the key of this rank; see `key_bounds`."""
    # Interpolated as for evenly distributed scores, then moved a little to the middle: more accurate at the end of a
    # long tail.
    share = 0.8 * ((rank - below) + 0.5) / (upto - below) + 0.1
    begin, end = key_score(low), key_score(high)
    expected = score_key(begin + share * (end - begin))
    expected = tl.minimum(tl.maximum(expected, low), high - 1)
    # Deferred, so that the compiler does not compare every score with both keys.
    return deferred(tl.where(rounds < INTERPOLATION_ROUNDS, expected, midpoint(low, high)))


@triton.jit
def select_half(low, high, below, upto, middle, count, rank):
    """The half of a range of keys that contains this rank, and the numbers of scores below it and up to it."""
    enough = count > rank
    return (
        tl.where(enough, low, middle + 1),
        tl.where(enough, middle, high),
        tl.where(enough, below, count),
        tl.where(enough, count, upto),
    )


@triton.jit
def key_bounds(
    scores, low_0, high_0, below_0, upto_0, rank_0, slack_0, low_1, high_1, below_1, upto_1, rank_1, slack_1
):  # fmt: skip
    """Bounds of the keys of two ranks (from 0), narrowed until at most ``slack`` other scores are within them.

    scores: (n,) · low, high: initial keys · below, upto: numbers of scores below ``low`` and up to ``high`` · returns
    these four for each rank. Equal scores cannot be separated: then low equals high.
    """
    rounds = rank_0 * 0
    while ((low_0 < high_0) & (upto_0 - below_0 > slack_0 + 1)) | ((low_1 < high_1) & (upto_1 - below_1 > slack_1 + 1)):
        middle_0 = split_key(low_0, high_0, below_0, upto_0, rank_0, rounds)
        middle_1 = split_key(low_1, high_1, below_1, upto_1, rank_1, rounds)
        rounds += 1
        count_0, count_1 = count_at_most(scores, middle_0, middle_1)
        low_0, high_0, below_0, upto_0 = select_half(low_0, high_0, below_0, upto_0, middle_0, count_0, rank_0)
        low_1, high_1, below_1, upto_1 = select_half(low_1, high_1, below_1, upto_1, middle_1, count_1, rank_1)
    return low_0, high_0, below_0, upto_0, low_1, high_1, below_1, upto_1


@triton.jit
def index_bounds(indices, rank, slack, low, high):
    """Bounds of the index of this rank, narrowed as by `key_bounds`; indices: (n,), NO_INDEX where there is none."""
    low, high = rank * 0 + low, rank * 0 + high  # tensors, because the loop changes them
    below = tl.sum((indices < low).to(tl.int32), axis=0)
    upto = tl.sum((indices <= high).to(tl.int32), axis=0)
    while (low < high) & (upto - below > slack + 1):
        middle = midpoint(low, high)
        count = tl.sum((indices <= middle).to(tl.int32), axis=0)
        low, high, below, upto = select_half(low, high, below, upto, middle, count, rank)
    return low, high

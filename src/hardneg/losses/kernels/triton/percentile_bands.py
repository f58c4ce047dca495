"""Percentile bands on a GPU: exact edges by radix selection, and the sums over the bands, on strips of stored scores.

A strip holds the inner products of some anchors with all their candidates, from PyTorch's own matrix product, so that
every pass over them sees the same numbers. One program per anchor finds both edges of its band. A histogram over equal
intervals of the scores gives the two intervals that hold the edges; their few scores are listed, and a radix selection
finds the edges among them, digit by digit. If the list has no room (most scores are nearly equal), the selection runs
over the whole row: slower, with the same result. Then the program sums over the band. The backward pass computes the
strips again. Memory is bounded by ``STRIP_BYTES``.
"""

# Arguments of Triton kernels have no types that mypy knows.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hardneg.losses.kernels.interface import Rule, count_true
from hardneg.losses.kernels.triton.backward import load_coefficients
from hardneg.losses.kernels.triton.launch import launch
from hardneg.losses.kernels.triton.score_tile import LOG2E, exponentials, in_bounds, load_bounds, mask_scores

STRIP_BYTES = 128 << 20  # of one strip of scores

CHUNK, WARPS = 4096, 16  # scores that a program reads at a time

# Capacity of the list of scores near the edges, a power of two. Shorter rows are searched whole.
LIST = 4096

SEARCH = 1024  # listed scores that a program reads at a time

# Bits of the number of intervals, and of a digit. The time of a histogram grows with its bins.
INTERVAL_BITS, DIGIT_BITS = 7, 8

NO_INDEX = tl.constexpr(0x7FFFFFFF)  # beyond every candidate

# Whether PyTorch multiplies matrices of half precision with a result in float32 (since 2.8).
MULTIPLIES_TO_FLOAT32 = hasattr(torch.ops.aten.mm, "dtype_out")


class Edges(NamedTuple):
    """The inner product and the index of the first and of the last candidate in each anchor's band, (A,) each.

    An empty band begins at +inf. The index is 0 or NO_INDEX if all candidates with the score of the edge are in it.
    """

    low: Tensor
    first: Tensor
    high: Tensor
    last: Tensor

    @classmethod
    def of(cls, memory: Tensor) -> "Edges":
        """The parts of (4, A) in float32; indices are integers of 32 bits."""
        low, first, high, last = memory.unbind()
        return cls(low, first.view(torch.int32), high, last.view(torch.int32))


@triton.jit
def score_key(scores):
    """Unsigned integers in the order of float32 scores; −0.0 equals 0.0."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)


@triton.jit
def key_score(key):
    """The score of a key."""
    bits = key.to(tl.int32, bitcast=True)
    return (bits ^ tl.where(bits < 0, -0x80000000, -1)).to(tl.float32, bitcast=True)


@triton.jit
def descend(histogram, rank, prefix, BITS: tl.constexpr):
    """The prefix of the key of a rank with its next digit, the rank among keys of that prefix, and their number."""
    digits = tl.arange(0, histogram.shape[0])
    digit = tl.sum((tl.cumsum(histogram, axis=0) <= rank).to(tl.int32), axis=0)
    below = tl.sum(tl.where(digits < digit, histogram, 0), axis=0)
    equal = tl.sum(tl.where(digits == digit, histogram, 0), axis=0)
    return (prefix << BITS) | digit.to(tl.uint32), rank - below, equal


@triton.jit
def next_digit(scores_, columns, low_key, low_rank, high_key, high_rank, LEVEL: tl.constexpr, CHUNK: tl.constexpr,
               DIGIT: tl.constexpr):  # fmt: skip
    """One more digit of the keys of two ranks: `descend` in the histograms of the keys of their prefixes."""
    BINS: tl.constexpr = 1 << DIGIT
    BITS: tl.constexpr = DIGIT if (LEVEL + 1) * DIGIT <= 32 else 32 - LEVEL * DIGIT
    SHIFT: tl.constexpr = 32 - LEVEL * DIGIT - BITS
    low_counts, high_counts = tl.zeros((BINS,), tl.int32), tl.zeros((BINS,), tl.int32)
    for start in range(0, columns, CHUNK):
        j = start + tl.arange(0, CHUNK)
        key = score_key(tl.load(scores_ + j, mask=j < columns, other=0.0))
        digit = ((key >> SHIFT) & ((1 << BITS) - 1)).to(tl.int32)
        if LEVEL == 0:
            low_counts += tl.histogram(digit, BINS, mask=j < columns)
        else:
            prefix = key >> (SHIFT + BITS)
            low_counts += tl.histogram(digit, BINS, mask=(j < columns) & (prefix == low_key))
            high_counts += tl.histogram(digit, BINS, mask=(j < columns) & (prefix == high_key))
    if LEVEL == 0:
        high_counts = low_counts
    low_key, low_rank, _ = descend(low_counts, low_rank, low_key, BITS)
    high_key, high_rank, equal = descend(high_counts, high_rank, high_key, BITS)
    return low_key, low_rank, high_key, high_rank, equal


@triton.jit
def tied_index(scores_, columns, score, rank, CHUNK: tl.constexpr):
    """The position of the entry of this rank among those of this score."""
    index, before, start = rank * 0, rank * 0, rank * 0
    while (before <= rank) & (start < columns):
        j = start + tl.arange(0, CHUNK)
        equal = (tl.load(scores_ + j, mask=j < columns, other=float("inf")) == score) & (j < columns)
        order = before + tl.cumsum(equal.to(tl.int32), axis=0) - 1
        index += tl.sum(tl.where(equal & (order == rank), j, 0), axis=0)
        before += tl.sum(equal.to(tl.int32), axis=0)
        start += CHUNK
    return index


@triton.jit
def interval_of(scores, lowest, factor, INTERVALS: tl.constexpr):
    """The number of the interval of a score; monotone, and masked scores are in the first."""
    return tl.minimum(tl.maximum((scores - lowest) * factor, 0.0), INTERVALS - 1).to(tl.int32)


@triton.jit
def list_near_edges(scores_, list_, columns, low_rank, high_rank, CHUNK: tl.constexpr, LIST: tl.constexpr,
                    INTERVALS: tl.constexpr):  # fmt: skip
    """Lists the scores in the intervals of two ranks: their number, and the ranks in the list.

    list_: (2, LIST) output, the scores, and their indices as bits, in the order of the row
    """
    k = tl.arange(0, CHUNK)
    sample = tl.load(scores_ + k * (columns // CHUNK))  # if its range is too small, the outermost intervals hold more
    lowest = tl.min(tl.where(sample == float("-inf"), float("inf"), sample), axis=0)
    span = tl.max(sample, axis=0) - lowest
    factor = tl.where((span > 0) & (span < float("inf")), INTERVALS / span, 0.0)
    lowest = tl.where(factor > 0, lowest, 0.0)
    counts = tl.zeros((INTERVALS,), tl.int32)
    for start in range(0, columns, CHUNK):
        j = start + k
        scores = tl.load(scores_ + j, mask=j < columns, other=0.0)
        counts += tl.histogram(interval_of(scores, lowest, factor, INTERVALS), INTERVALS, mask=j < columns)
    low, low_rank, number = descend(counts, low_rank, low_rank.to(tl.uint32) * 0, 0)
    high, high_rank, _ = descend(counts, high_rank, low * 0, 0)
    low, high = low.to(tl.int32), high.to(tl.int32)
    high_rank += tl.where(high > low, number, 0)
    before = low * 0
    for start in range(0, columns, CHUNK):
        j = start + k
        scores = tl.load(scores_ + j, mask=j < columns, other=0.0)
        interval = interval_of(scores, lowest, factor, INTERVALS)
        listed = ((interval == low) | (interval == high)) & (j < columns)
        slot = before + tl.cumsum(listed.to(tl.int32), axis=0) - 1
        tl.store(list_ + slot, scores, mask=listed & (slot < LIST))
        tl.store(list_ + LIST + slot, j.to(tl.float32, bitcast=True), mask=listed & (slot < LIST))
        before += tl.sum(listed.to(tl.int32), axis=0)
    tl.debug_barrier()  # all threads read the list
    return before, low_rank, high_rank


@triton.jit
def find_edges(scores_, list_, columns, low_rank, high_rank, LISTED: tl.constexpr, CHUNK: tl.constexpr,
               LIST: tl.constexpr, INTERVALS: tl.constexpr, SEARCH: tl.constexpr, DIGIT: tl.constexpr):  # fmt: skip
    """The scores and the indices of two ranks of one row; see `Edges` for the indices.

    list_: memory of the list, used if LISTED
    """
    source, length = scores_, columns
    in_list = low_rank < 0
    if LISTED:
        number, low_in_list, high_in_list = list_near_edges(
            scores_, list_, columns, low_rank, high_rank, CHUNK, LIST, INTERVALS
        )
        in_list = number <= LIST
        source = tl.where(in_list, list_, scores_)
        length = tl.where(in_list, number, columns)
        low_rank, high_rank = tl.where(in_list, low_in_list, low_rank), tl.where(in_list, high_in_list, high_rank)
    low_key, high_key = low_rank.to(tl.uint32) * 0, low_rank.to(tl.uint32) * 0
    high_equal = low_rank * 0
    for level in tl.static_range((32 + DIGIT - 1) // DIGIT):
        low_key, low_rank, high_key, high_rank, high_equal = next_digit(
            source, length, low_key, low_rank, high_key, high_rank, level, SEARCH, DIGIT
        )
    low, high = key_score(low_key), key_score(high_key)
    first, last = low_rank * 0, low_rank * 0 + NO_INDEX
    if low_rank > 0:
        first = tied_index(source, length, low, low_rank, SEARCH)
        if in_list:
            first = tl.load(list_ + LIST + first).to(tl.int32, bitcast=True)
    if high_rank < high_equal - 1:
        last = tied_index(source, length, high, high_rank, SEARCH)
        if in_list:
            last = tl.load(list_ + LIST + last).to(tl.int32, bitcast=True)
    return low, first, high, last


@triton.jit
def load_band(scores_, j, columns, low, first, high, last, lowest, highest, scale, T: tl.constexpr):
    """Scores in base 2 of candidates j of one anchor, and 1.0 where they are in its band and bounds, else 0.0."""
    found = tl.load(scores_ + j, mask=j < columns, other=float("-inf"))
    scores = found * scale
    out = (found < low) | (found > high) | ((found == low) & (j < first)) | ((found == high) & (j > last))
    within = tl.where(out, 0.0, 1.0)
    if T.lower > 0 or T.upper > 0:
        within = within * in_bounds(scores, lowest, highest, T)
    return scores, within


@triton.jit
def band_sums(
    scores_, ranks, numbers, bounds, edges, slots, base, columns, stride, T: tl.constexpr, COUNTED: tl.constexpr,
    LISTED: tl.constexpr, CHUNK: tl.constexpr, LIST: tl.constexpr, INTERVALS: tl.constexpr, SEARCH: tl.constexpr,
    DIGIT: tl.constexpr,
):  # fmt: skip
    """The edges of the band of one anchor, and the sums over it, relative to its highest score.

    ranks: eligible candidates, first and one-past-last rank of the band; if COUNTED one per anchor of the strip
    """
    row, eligible, begin, end = tl.program_id(0), ranks[0], ranks[1], ranks[2]
    anchor = base + row
    scores_ += row.to(tl.int64) * stride
    if COUNTED:
        eligible, begin, end = tl.load(ranks[0] + row), tl.load(ranks[1] + row), tl.load(ranks[2] + row)
    masked = columns - eligible  # their scores are −inf, the lowest
    low_rank, high_rank = (row * 0 + masked + begin).to(tl.int32), (row * 0 + masked + end - 1).to(tl.int32)
    low, first, high, last = row * 0.0 + float("inf"), row * 0, row * 0.0 + float("-inf"), row * 0
    if high_rank >= low_rank:
        low, first, high, last = find_edges(
            scores_, scores_ + columns, columns, low_rank, high_rank, LISTED, CHUNK, LIST, INTERVALS, SEARCH, DIGIT
        )
    tl.store(edges.low + anchor, low)
    tl.store(edges.first + anchor, first)
    tl.store(edges.high + anchor, high)
    tl.store(edges.last + anchor, last)
    tilt, scale = tl.load(numbers.tilt), tl.load(numbers.scale) * LOG2E
    lowest, highest = load_bounds(bounds, anchor, True, 1.0, T)
    row_max = high * scale
    if T.upper > 0:  # the highest score of the ring may be above the bound
        row_max = row * 0.0 + float("-inf")
        for start in range(0, columns, CHUNK):
            j = start + tl.arange(0, CHUNK)
            scores, within = load_band(scores_, j, columns, low, first, high, last, lowest, highest, scale, T)
            row_max = tl.maximum(row_max, tl.max(tl.where(within > 0, scores, float("-inf")), axis=0))
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    tilted_sum, weight_sum, count = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32), row * 0.0
    for start in range(0, columns, CHUNK):
        j = start + tl.arange(0, CHUNK)
        scores, within = load_band(scores_, j, columns, low, first, high, last, lowest, highest, scale, T)
        kept = tl.where(within > 0, scores - shift, float("-inf"))
        tilted_exp, weight_exp = exponentials(kept, tilt, T.kind, False)
        # NaN must not vanish outside of the band.
        tilted_sum += tilted_exp + tl.where(scores == float("-inf"), 0.0, scores) * 0.0
        weight_sum += weight_exp
        count += tl.sum(within, axis=0)
    tl.store(slots.tilted + anchor, tl.sum(tilted_sum, axis=0))
    tl.store(slots.weight + anchor, tl.sum(weight_sum, axis=0))
    tl.store(slots.counts + anchor, count)
    tl.store(slots.maximum + anchor, row_max)


@triton.jit
def band_gradient(scores_, numbers, bounds, edges, coefficients, result, base, columns, stride, result_stride,
                  T: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """∂L/∂s of one anchor with a chunk of its candidates. coefficients: as in `backward.gradient`"""
    row = tl.program_id(0)
    anchor, j = base + row, tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    tilt, scale, factor = tl.load(numbers.tilt), tl.load(numbers.scale) * LOG2E, 1.0
    if SCALED:
        factor = tl.load(coefficients.factor)
    lowest, highest = load_bounds(bounds, anchor, True, 1.0, T)
    low, first = tl.load(edges.low + anchor), tl.load(edges.first + anchor)
    high, last = tl.load(edges.high + anchor), tl.load(edges.last + anchor)
    scores_ += row.to(tl.int64) * stride
    scores, within = load_band(scores_, j, columns, low, first, high, last, lowest, highest, scale, T)
    tilted_coef, weight_coef, shift = load_coefficients(coefficients, anchor, True, factor, T)
    kept = tl.where(within > 0, scores - shift, float("-inf"))
    tilted_exp, weight_exp = exponentials(kept, tilt, T.kind, False)
    found = tilted_coef * tilted_exp + weight_coef * weight_exp
    tl.store(result + row.to(tl.int64) * result_stride + j, found.to(result.dtype.element_ty), mask=j < columns)


@triton.jit
def mask_strip(scores_, mask, rows, candidates, base, stride, T: tl.constexpr, ROWS: tl.constexpr,
               COLUMNS: tl.constexpr):  # fmt: skip
    """Sets the scores of a block of candidates in a strip to −inf where they are not eligible."""
    i, j = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (i < rows)[:, None] & (j < candidates)[None, :]
    anchor, group, other_group = base + i, 0, 0
    if T.groups > 0:
        group = tl.load(mask.anchor_groups + anchor, mask=i < rows, other=0)[:, None]
        other_group = tl.load(mask.candidate_groups + j, mask=j < candidates, other=0)[None, :]
    pointer = scores_ + i.to(tl.int64)[:, None] * stride + j[None, :]
    scores = mask_scores(
        tl.load(pointer, mask=inside, other=0.0), mask, anchor[:, None], j[None, :], base + rows, candidates, T.own,
        group, other_group, T, False,
    )  # fmt: skip
    tl.store(pointer, scores, mask=inside)


def strips(passes: Sequence[Any]) -> Iterator[tuple[int, Tensor]]:
    """First anchor and inner products (R, N) of each strip, −inf where a candidate is not eligible.

    passes: of the same anchors over blocks of candidates
    """
    anchors = passes[0].anchors
    columns = sum(len(block_pass.block) for block_pass in passes)
    stride = math.ceil((columns + 2 * LIST) / 16) * 16  # with room for the list of each row
    height = max(1, min(len(anchors), STRIP_BYTES // (4 * stride)))
    buffer = anchors.new_empty(height, stride, dtype=torch.float32)
    for base in range(0, len(anchors), height):
        rows = min(height, len(anchors) - base)
        for block_pass in passes:
            part = buffer[:rows, block_pass.column : block_pass.column + len(block_pass.block)]
            add_product(part, anchors[base : base + rows], block_pass.block.T, beta=0)
            traits = block_pass.traits
            if traits.own or traits.excluded or traits.groups or traits.allowed:
                arguments = {
                    "scores_": part, "mask": block_pass.mask(), "rows": rows, "candidates": len(block_pass.block),
                    "base": base, "stride": stride, "T": traits, "ROWS": 16, "COLUMNS": 256,
                }  # fmt: skip
                launch(mask_strip, (math.ceil(rows / 16), math.ceil(len(block_pass.block) / 256)), arguments)
        yield base, buffer[:rows, :columns]


def edges_and_sums(passes: Sequence[Any], slots: Any) -> Tensor:
    """The bands of all anchors, (4, A), see `Edges`; their sums are written to the slots, (1, A) each."""
    first = passes[0]
    eligibility, rule = first.problem.eligibility, first.problem.rule
    columns = eligibility.columns
    edges = torch.empty(4, len(first.anchors), device=first.anchors.device, dtype=torch.float32)
    counted = not eligibility.is_plain
    for base, scores in strips(passes):
        if counted:
            eligible = count_true(scores > -torch.inf)
            ranks = (eligible, *rule.ranks(eligible))
        else:
            ranks = (eligibility.count_per_anchor, *known_ranks(eligibility.count_per_anchor, rule.rings))
        arguments = {
            "scores_": scores, "ranks": ranks, "numbers": first.numbers, "bounds": first.bounds,
            "edges": Edges.of(edges), "slots": slots, "base": base, "columns": columns, "stride": scores.stride(0),
            "T": first.traits, "COUNTED": counted, "LISTED": columns > LIST, "CHUNK": CHUNK, "LIST": LIST,
            "SEARCH": SEARCH, "INTERVALS": 1 << INTERVAL_BITS, "DIGIT": DIGIT_BITS,
        }  # fmt: skip
        launch(band_sums, (len(scores),), arguments, WARPS)
    return edges


def gradients(
    passes: Sequence[Any], edges: Tensor, coefficients: Any, needed: Sequence[bool]
) -> tuple[Tensor, list[Tensor]]:
    """The gradients of the anchors (A, d) and of the blocks; empty for those that are not needed."""
    first = passes[0]
    anchors, columns = first.anchors, first.problem.eligibility.columns
    by_rows = torch.zeros_like(anchors, dtype=torch.float32)
    by_columns = [
        torch.zeros_like(block_pass.block if need else block_pass.block[:0], dtype=torch.float32)
        for block_pass, need in zip(passes, needed, strict=True)
    ]
    for base, scores in strips(passes):
        rows = len(scores)
        # ∂L/∂s overwrites the scores, or is stored in the precision of the product.
        weights = scores if anchors.dtype == torch.float32 else anchors.new_empty(rows, columns)
        arguments = {
            "scores_": scores, "numbers": first.numbers, "bounds": first.bounds,
            "edges": Edges.of(edges), "coefficients": coefficients, "result": weights, "base": base,
            "columns": columns, "stride": scores.stride(0), "result_stride": weights.stride(0), "T": first.traits,
            "SCALED": coefficients.factor is not None, "CHUNK": 1024,
        }  # fmt: skip
        launch(band_gradient, (rows, math.ceil(columns / 1024)), arguments)
        for block_pass, collected in zip(passes, by_columns, strict=True):
            part = weights[:, block_pass.column : block_pass.column + len(block_pass.block)]
            add_product(by_rows[base : base + rows], part, block_pass.block)
            if len(collected) > 0:
                add_product(collected, part.T, anchors[base : base + rows])
    scale = first.scale if coefficients.factor is None else first.scale / coefficients.factor
    return by_rows.mul_(scale), [part.mul_(scale) for part in by_columns]


@lru_cache(maxsize=256)
def known_ranks(eligible: int, rings: tuple[tuple[float, float], ...]) -> tuple[int, int]:
    """First and one-past-last rank of the band, if all anchors have the same number of eligible candidates."""
    begin, end = Rule(rings=rings).ranks(torch.tensor([eligible], device="cpu"))
    return int(begin), int(end)


def add_product(result: Tensor, left: Tensor, right: Tensor, beta: int = 1) -> None:
    """result = beta·result + left · right in float32, for matrices of any precision."""
    if left.is_cuda and left.dtype != torch.float32 and MULTIPLIES_TO_FLOAT32:
        torch.addmm(result, left, right, out_dtype=torch.float32, beta=beta, out=result)
    else:
        result.addmm_(left.float(), right.float(), beta=beta)  # in place: not in the precision of autocast

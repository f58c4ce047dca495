"""Percentile bands on a GPU: the first and the last candidate of each anchor's band, exact, in one pass.

A sample of the candidates gives two scores that enclose each edge (Floyd and Rivest 1975). One pass over all
candidates lists the few between them, counts the others and, if requested, sums over those that are certainly in the
band; the edges are found in the lists, as well as the remaining terms of the sums. If a list has no room, a second pass
writes one list for all parts; if the sample is not representative, more passes bisect the range. The result is always
exact, only slower in these cases. The host never synchronizes, and no matrix of scores is stored.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from hardneg.losses.kernels import percentiles
from hardneg.losses.kernels.interface import Rule
from hardneg.losses.kernels.triton import percentile_bisection, percentile_edges, percentile_lists, tile_sizes
from hardneg.losses.kernels.triton.launch import launch

# One in this number of candidates is sampled. With half the sample lists would be 1.4 times as long; with twice the
# sample its products and ranks would cost more than shorter lists save.
STEP = 16

# Half the distance between the two pivots of an edge, in standard deviations of a sampled rank. By the normal
# distribution one edge in 500 million is outside, and its tile of anchors then takes fifty passes instead of one.
# With more than half a million candidates lists would be too long: then the distance is reduced, down to the second
# number.
SPREAD, LEAST_SPREAD = 6.0, 4.0

# Capacity of a list beyond its expected length, in standard deviations: one in three hundred thousand has no room.
LIST_MARGIN = 4.5

# Up to this number all candidates are listed, which is faster than sampling.
SHORTEST_ROW = 4096

# Maximum length of the lists of an anchor, and of a sample, that a program holds in registers.
LONGEST_LIST = 32768

# Number of parts that candidates are interleaved between, and their minimum length. With more parts the lengths of the
# lists would vary more.
PARTS, SHORTEST_PART = 32, 128

# Maximum size of lists and samples; more anchors are processed in strips.
STRIP_BYTES = 128 << 20

# Before Triton 3.5 the result of an atomic addition did not reach all threads (triton-lang/triton issue 7402).
HAS_ATOMICS = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 5)


@dataclass(frozen=True)
class Edges:
    """The score in base 2 and the index of the first and of the last candidate in each anchor's band, (A,) each.

    The scores of an empty band are +inf and −inf. An index may also be 0 or beyond all candidates if no other candidate
    has the score of the edge. sums: of exponentials over the band, one slot per part, (parts + 1, A) each, if requested
    """

    low: Tensor
    first: Tensor
    high: Tensor
    last: Tensor
    sums: tuple[Tensor, Tensor] | None = None


def edges(block_pass: Any, rule: Rule, summed: bool = False) -> Edges:
    """The edges of the band that the rings of ``rule`` select from each anchor's candidates.

    Candidates are ordered by score and then by index.

    block_pass: anchors (A, d), candidates (N, d) and eligibility · summed: also sum exponentials, which must be within
    the range of float32
    """
    if not HAS_ATOMICS:
        band = percentiles.sorted_edges(block_pass.scores(), rule)
        return Edges(band.low, band.low_index, band.high, band.high_index)
    anchors, device = len(block_pass.anchors), block_pass.anchors.device
    plan = make_plan(len(block_pass.block), rule.rings)
    score = torch.empty(2, anchors, dtype=torch.float32, device=device)
    index = torch.empty(2, anchors, dtype=torch.int32, device=device)
    sums = torch.empty(2, plan.parts + 1, anchors, dtype=torch.float32, device=device) if summed else None
    recompute = torch.empty(anchors, dtype=torch.int32, device=device) if summed else None
    height = max(1, STRIP_BYTES // (8 * plan.parts * plan.capacity + 4 * plan.size))
    for base in range(0, anchors, height):
        _strip(block_pass, rule, plan, base, min(base + height, anchors), score, index, sums, recompute)
    found = Edges(score[0], index[0], score[1], index[1])
    if sums is None:
        return found
    tilted_sum, weight_sum = sums.unbind()
    if plan.size > 0:
        block_pass.banded(found).sums(
            tilted_sum, weight_sum, None, None, 0, plan.parts + 1, plan.span(len(block_pass.block)), recompute
        )
    return replace(found, sums=(tilted_sum, weight_sum))


@dataclass(frozen=True)
class Plan:
    """How the candidates of an anchor are searched.

    step, size: one in ``step`` is sampled, ``size`` in all · spread: see SPREAD · parts, capacity: number of parts that
    candidates are interleaved between, a power of two, and capacity of the list of a part · low, high: expected
    positions of the edges, as shares of the eligible · open: all candidates above the upper edge are listed, because
    they are few
    """

    step: int
    size: int
    spread: float
    parts: int
    capacity: int
    low: float
    high: float
    open: bool

    def span(self, columns: int) -> int:
        """Length of contiguous parts of the candidates, at most ``parts`` of them."""
        return math.ceil(columns / (self.parts * tile_sizes.PART_MULTIPLE)) * tile_sizes.PART_MULTIPLE


@lru_cache(maxsize=256)
def make_plan(columns: int, rings: tuple[tuple[float, float], ...]) -> Plan:
    """The plan for rows of this number of candidates.

    Examples:
        >>> plan = make_plan(65536, ((0.9, 0.99),))
        >>> plan.size, plan.parts, plan.capacity
        (4096, 32, 256)
    """
    low, high = max(lower for lower, _ in rings), min(upper for _, upper in rings)
    parts = 1 << (min(PARTS, max(1, columns // SHORTEST_PART)).bit_length() - 1)
    while math.ceil(columns / parts) > percentile_lists.MAX_PART_LENGTH.value:
        parts *= 2
    most = math.ceil(columns / parts)
    if columns <= SHORTEST_ROW:
        return Plan(STEP, 0, SPREAD, parts, most, low, high, True)
    step = max(STEP, math.ceil(columns / LONGEST_LIST))
    size = columns // step
    spread = SPREAD
    while True:
        # `bracket` may choose pivots up to an eighth further out.
        margins = [spread * math.sqrt(size * share * (1 - share)) + spread**2 / 6 for share in (low, high)]
        between = 2 * sum(margins) * 17 / 16 + 4
        # The gaps between sampled ranks vary, and so does the number of listed candidates of a part.
        each = step * between / parts
        deviation = math.sqrt(each + step**2 * between / parts**2)
        capacity = math.ceil((each + LIST_MARGIN * deviation) / 16) * 16
        # A program holds powers of two: a little less room is better than half of the entries empty.
        power = 1 << (capacity.bit_length() - 1)
        capacity = power if power >= each + (LIST_MARGIN - 1) * deviation else capacity
        if capacity * parts <= LONGEST_LIST or spread <= LEAST_SPREAD:
            break
        spread -= 0.25
    capacity = min(most, capacity, LONGEST_LIST // parts)
    return Plan(step, size, spread, parts, capacity, low, high, (1 - high) * size <= margins[1])


@lru_cache(maxsize=256)
def known_ranks(eligible: int, rings: tuple[tuple[float, float], ...]) -> tuple[int, int]:
    """First and one-past-last rank of the band, if all anchors have the same number of eligible candidates."""
    start, end = Rule(rings=rings).ranks(torch.tensor([eligible], device="cpu"))
    return int(start), int(end)


def _strip(
    block_pass: Any,
    rule: Rule,
    plan: Plan,
    base: int,
    end: int,
    score: Tensor,
    index: Tensor,
    sums: Tensor | None,
    recompute: Tensor | None,
) -> None:
    """Computes the edges, (2, A), of the anchors from ``base`` to ``end``, and sums (2, parts + 1, A) if requested.

    recompute: (A,) output, the anchors whose sums must be recomputed
    """
    rows, width, columns, device = end - base, block_pass.anchors.shape[1], len(block_pass.block), score.device
    counted = block_pass.spec.eligibility.excluded is not None or not block_pass.spec.eligibility.is_plain
    anchor_groups, candidate_groups = block_pass.groups()
    given = block_pass.common()
    common = {
        **block_pass.eligibility(),
        "anchors_": block_pass.anchors, "candidates_": block_pass.block, "scale_": block_pass.scale,
        "anchor_groups": anchor_groups, "candidate_groups": candidate_groups,
        "anchors": end, "candidates": columns, "width": width, "base": base,
        "anchor_stride": block_pass.anchors.stride(0), "candidate_stride": block_pass.block.stride(0),
        "PRECISION": given["PRECISION"],
    }  # fmt: skip
    tilted_sum, weight_sum = (None, None) if sums is None else sums.unbind()
    summing = {
        "tilted_sum_": tilted_sum, "weight_sum_": weight_sum, "tilt_": given["tilt_"],
        "SUMMED": sums is not None, "KIND": given["KIND"],
    }  # fmt: skip

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    sample = empty(rows, plan.size, dtype=torch.float32)
    if plan.size > 0:
        arguments = common | {"result": sample, "size": plan.size, "span": tile_sizes.PART_MULTIPLE, "STEP": plan.step}
        parts = math.ceil(plan.size / tile_sizes.PART_MULTIPLE)
        tile_sizes.launch(percentile_lists.sample, arguments, rows, parts, width, block_pass.whole, "sample")
    pivot, cut = empty(rows, 4, dtype=torch.float32), empty(rows, 4)
    counters = empty(rows, percentile_lists.COUNTERS.value)
    bracketing = {
        "sample_": sample, "pivot_": pivot, "cut_": cut, "counters": counters, "size": plan.size,
        "low_share": plan.low, "high_share": plan.high, "spread": plan.spread,
        "STEP": plan.step, "SIZE": _power_of_two(plan.size), "OPEN": plan.open,
    }  # fmt: skip
    launch(percentile_lists.bracket, (rows,), bracketing, _warps(plan.size, 2048))

    part_counts = empty(percentile_lists.NUM_COUNTS.value, rows, plan.parts)
    listed = empty(rows, plan.parts * plan.capacity, dtype=torch.int64)
    lists = {"pivot_": pivot, "counters": counters, "list_": listed}
    listing = {
        "part_counts_": part_counts, "capacity": plan.capacity, "stride": score.shape[1], "PARTS": plan.parts,
        "COUNTED": counted, "OPEN": plan.open,
    }  # fmt: skip
    tile_sizes.launch(
        percentile_lists.list_candidates,
        common | lists | summing | listing,
        rows,
        plan.parts,
        width,
        block_pass.whole,
        "list_candidates",
    )
    known = 0 if counted else block_pass.spec.eligibility.count_per_anchor
    eligible = part_counts[percentile_lists.NUM_ELIGIBLE.value].sum(dim=1) if counted else None
    first, stop = known_ranks(known, rule.rings) if eligible is None else rule.ranks(eligible)
    missed = empty(2, rows)
    found = {
        "eligible_": eligible, "first_": first, "end_": stop, "score_": score, "index_": index, "missed_": missed,
        "known": known, "stride": score.shape[1], "COUNTED": counted,
    }  # fmt: skip
    size = _power_of_two(plan.capacity)

    selected = found | summing | {
        "words": listed.view(torch.int32), "pivot_": pivot, "cut_": cut, "counters": counters,
        "part_counts_": part_counts,
        "recompute_": recompute, "rows": rows, "candidates": columns, "base": base, "capacity": plan.capacity,
        "PARTS": plan.parts, "SIZE": size,
    }  # fmt: skip

    def select(marked: bool) -> None:
        warps = _warps(plan.parts * size, 1024 if marked else 2048)
        launch(percentile_edges.select, (rows,), selected | {"MARKED": marked}, warps, registers=128)

    select(marked=False)
    if plan.size > 0:
        arguments = common | lists | {"cut_": cut, "capacity": listed.shape[1], "span": plan.span(columns)}
        tile_sizes.launch(percentile_bisection.collect, arguments, rows, plan.parts, width, block_pass.whole, "collect")
    select(marked=True)
    if plan.size > 0:
        tile_sizes.launch(percentile_bisection.bisect, common | found, rows, 2, width, block_pass.whole, "collect")


def _power_of_two(size: int) -> int:
    """The smallest power of two, at least 16, that is no less than ``size``."""
    return max(16, 1 << (size - 1).bit_length())


def _warps(size: int, each: int) -> int:
    """Number of warps that hold ``size`` elements, ``each`` per warp if possible."""
    return min(16, max(1, _power_of_two(size) // each))

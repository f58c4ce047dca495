"""Percentile bands on a GPU: the first and the last candidate of each anchor's band, exactly, in one walk of products.

A sample of the candidates says between which two scores each edge lies (Floyd and Rivest 1975). One walk over all
candidates lists the few between them, counts the others and, if wanted, sums over those that are certainly in the band;
the edge is found in the lists, and what they add to the sums. Should a list have no room, a second walk makes one list
for all; should the sample mislead, more walks halve the range until the edge is alone in it: never a wrong answer, only
a slower one. The host waits for nothing, and no matrix of scores is ever stored.
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

# One candidate of so many is sampled. Were it half as many, 1.4 times as many would be listed; were it twice as many,
# their products and ranks would cost more than shorter lists save.
STEP = 16

# Half the distance between the two bounds of an edge, in standard deviations of a sampled rank. By the normal law one
# edge in 500 million lies outside, and its tile of anchors then takes fifty walks where others take one. Of more than
# half a million candidates lists would be too long: there the bounds are drawn closer, but no closer than the second.
SPREAD, LEAST_SPREAD = 6.0, 4.0

# So many more than expected a list has room for, in standard deviations: one in three hundred thousand has none.
ROOM = 4.5

# Up to here all candidates are listed, which is quicker than to sample them first.
SHORTEST_ROW = 4096

# Longest lists of an anchor, and largest sample, that a program holds in registers.
LONGEST_LIST = 32768

# Parts that candidates are dealt to, each of so many at least. Were there more, their lists would vary more in length.
PARTS, SHORTEST_PART = 32, 128

# Bytes of lists and samples; more anchors than they suffice for are taken in strips.
STRIP = 128 << 20

# Before Triton 3.5 the result of an atomic addition did not reach all threads (triton-lang/triton issue 7402).
HAS_ATOMICS = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 5)


@dataclass(frozen=True)
class Edges:
    """The score in base 2 and the index of the first and of the last candidate in each anchor's band, (A,) each.

    +inf and −inf are the scores of an empty band. An index may also be 0 or beyond all where no other candidate has the
    score of an edge. sums: of exponentials over the band, part by part, (parts + 1, A) each, if they were asked for
    """

    low: Tensor
    first: Tensor
    high: Tensor
    last: Tensor
    sums: tuple[Tensor, Tensor] | None = None


def edges(walk: Any, rule: Rule, summed: bool = False) -> Edges:
    """The edges of the band that the rings of ``rule`` cut from each anchor's candidates, by score and then by index.

    walk: anchors (A, d) and candidates (N, d) of the fused kernel, and who may meet whom · summed: sum exponentials,
    too, which must not be too large for float32
    """
    if not HAS_ATOMICS:
        band = percentiles.sorted_edges(walk.scores(), rule)
        return Edges(band.low, band.low_index, band.high, band.high_index)
    anchors, device = len(walk.anchors), walk.anchors.device
    plan = planned(len(walk.block), rule.rings)
    score = torch.empty(2, anchors, dtype=torch.float32, device=device)
    index = torch.empty(2, anchors, dtype=torch.int32, device=device)
    sums = torch.empty(2, plan.parts + 1, anchors, dtype=torch.float32, device=device) if summed else None
    again = torch.empty(anchors, dtype=torch.int32, device=device) if summed else None
    height = max(1, STRIP // (8 * plan.parts * plan.capacity + 4 * plan.size))
    for base in range(0, anchors, height):
        _strip(walk, rule, plan, base, min(base + height, anchors), score, index, sums, again)
    found = Edges(score[0], index[0], score[1], index[1])
    if sums is None:
        return found
    heavy, light = sums.unbind()
    if plan.size > 0:
        walk.banded(found).sums(heavy, light, None, None, 0, plan.parts + 1, plan.span(len(walk.block)), again)
    return replace(found, sums=(heavy, light))


@dataclass(frozen=True)
class Plan:
    """How a row of candidates is searched.

    step, size: one in ``step`` is sampled, ``size`` in all · spread: see SPREAD · parts, capacity: candidates are dealt
    to so many parts, a power of two, and of each so many are listed at most · low, high: where the edges are expected,
    as shares of the eligible · open: are so few above the upper edge that all of them are listed?
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
        """The length of stretches of which there are no more than parts."""
        return math.ceil(columns / (self.parts * tile_sizes.UNIT)) * tile_sizes.UNIT


@lru_cache(maxsize=256)
def planned(columns: int, rings: tuple[tuple[float, float], ...]) -> Plan:
    """The plan for rows of so many candidates.

    Examples:
        >>> plan = planned(65536, ((0.9, 0.99),))
        >>> plan.size, plan.parts, plan.capacity
        (4096, 32, 256)
    """
    low, high = max(lower for lower, _ in rings), min(upper for _, upper in rings)
    parts = 1 << (min(PARTS, max(1, columns // SHORTEST_PART)).bit_length() - 1)
    while math.ceil(columns / parts) > percentile_lists.LONGEST_PART.value:
        parts *= 2
    most = math.ceil(columns / parts)
    if columns <= SHORTEST_ROW:
        return Plan(STEP, 0, SPREAD, parts, most, low, high, True)
    step = max(STEP, math.ceil(columns / LONGEST_LIST))
    size = columns // step
    spread = SPREAD
    while True:
        # As the program chooses pivots: up to an eighth further out.
        margins = [spread * math.sqrt(size * share * (1 - share)) + spread**2 / 6 for share in (low, high)]
        between = 2 * sum(margins) * 17 / 16 + 4
        # Gaps between sampled ranks vary, and so does what of them is dealt to a part.
        each = step * between / parts
        deviation = math.sqrt(each + step**2 * between / parts**2)
        capacity = math.ceil((each + ROOM * deviation) / 16) * 16
        # A program holds powers of two: rather a little less room than half of them empty.
        power = 1 << (capacity.bit_length() - 1)
        capacity = power if power >= each + (ROOM - 1) * deviation else capacity
        if capacity * parts <= LONGEST_LIST or spread <= LEAST_SPREAD:
            break
        spread -= 0.25
    capacity = min(most, capacity, LONGEST_LIST // parts)
    return Plan(step, size, spread, parts, capacity, low, high, (1 - high) * size <= margins[1])


@lru_cache(maxsize=256)
def known_ranks(eligible: int, rings: tuple[tuple[float, float], ...]) -> tuple[int, int]:
    """First and one-past-last rank of the band, where all anchors have the same number of eligible candidates."""
    start, end = Rule(rings=rings).ranks(torch.tensor([eligible], device="cpu"))
    return int(start), int(end)


def _strip(
    walk: Any,
    rule: Rule,
    plan: Plan,
    base: int,
    end: int,
    score: Tensor,
    index: Tensor,
    sums: Tensor | None,
    again: Tensor | None,
) -> None:
    """Fill in the edges, (2, A), of the anchors from ``base`` to ``end``, and sums (2, parts + 1, A) if wanted.

    again: (A,) of which anchors they must be made otherwise
    """
    rows, width, columns, device = end - base, walk.anchors.shape[1], len(walk.block), score.device
    counted = walk.question.eligibility.excluded is not None or not walk.question.eligibility.is_plain
    anchor_groups, candidate_groups = walk.groups()
    given = walk.common()
    common = {
        **walk.eligibility(),
        "anchors_": walk.anchors, "candidates_": walk.block, "scale_": walk.scale,
        "anchor_groups": anchor_groups, "candidate_groups": candidate_groups,
        "anchors": end, "candidates": columns, "width": width, "base": base,
        "anchor_stride": walk.anchors.stride(0), "candidate_stride": walk.block.stride(0),
        "PRECISION": given["PRECISION"],
    }  # fmt: skip
    heavy, light = (None, None) if sums is None else sums.unbind()
    summing = {
        "heavy_": heavy, "light_": light, "tilt_": given["tilt_"], "SUMMED": sums is not None, "KIND": given["KIND"],
    }  # fmt: skip

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    sample = empty(rows, plan.size, dtype=torch.float32)
    if plan.size > 0:
        arguments = common | {"result": sample, "size": plan.size, "span": tile_sizes.UNIT, "STEP": plan.step}
        parts = math.ceil(plan.size / tile_sizes.UNIT)
        tile_sizes.launch(percentile_lists.sample, arguments, rows, parts, width, walk.whole, "sample")
    pivot, cut = empty(rows, 4, dtype=torch.float32), empty(rows, 4)
    counters = empty(rows, percentile_lists.COUNTERS.value)
    bracketing = {
        "sample_": sample, "pivot_": pivot, "cut_": cut, "counters": counters, "size": plan.size,
        "low_share": plan.low, "high_share": plan.high, "spread": plan.spread,
        "STEP": plan.step, "SIZE": _power(plan.size), "OPEN": plan.open,
    }  # fmt: skip
    launch(percentile_lists.bracket, (rows,), bracketing, _warps(plan.size, 2048))

    tally = empty(percentile_lists.TALLIES.value, rows, plan.parts)
    listed = empty(rows, plan.parts * plan.capacity, dtype=torch.int64)
    lists = {"pivot_": pivot, "counters": counters, "list_": listed}
    dealing = {
        "tally_": tally, "capacity": plan.capacity, "stride": score.shape[1], "PARTS": plan.parts, "COUNTED": counted,
        "OPEN": plan.open,
    }  # fmt: skip
    tile_sizes.launch(
        percentile_lists.deal, common | lists | summing | dealing, rows, plan.parts, width, walk.whole, "deal"
    )
    known = 0 if counted else walk.question.eligibility.count_per_anchor
    eligible = tally[percentile_lists.ELIGIBLE.value].sum(dim=1) if counted else None
    first, stop = known_ranks(known, rule.rings) if eligible is None else rule.ranks(eligible)
    missed = empty(2, rows)
    found = {
        "eligible_": eligible, "first_": first, "end_": stop, "score_": score, "index_": index, "missed_": missed,
        "known": known, "stride": score.shape[1], "COUNTED": counted,
    }  # fmt: skip
    size = _power(plan.capacity)

    selected = found | summing | {
        "words": listed.view(torch.int32), "pivot_": pivot, "cut_": cut, "counters": counters, "tally_": tally,
        "again_": again, "rows": rows, "candidates": columns, "base": base, "capacity": plan.capacity,
        "PARTS": plan.parts, "SIZE": size,
    }  # fmt: skip

    def select(rare: bool) -> None:
        warps = _warps(plan.parts * size, 1024 if rare else 2048)
        launch(percentile_edges.select, (rows,), selected | {"RARE": rare}, warps, registers=128)

    select(rare=False)
    if plan.size > 0:
        arguments = common | lists | {"cut_": cut, "capacity": listed.shape[1], "span": plan.span(columns)}
        tile_sizes.launch(percentile_bisection.collect, arguments, rows, plan.parts, width, walk.whole, "collect")
    select(rare=True)
    if plan.size > 0:
        tile_sizes.launch(percentile_bisection.bisect, common | found, rows, 2, width, walk.whole, "collect")


def _power(size: int) -> int:
    """The power of two that programs hold so many numbers in."""
    return max(16, 1 << (size - 1).bit_length())


def _warps(size: int, each: int) -> int:
    """Warps to hold so many numbers, ``each`` in a warp if it can be."""
    return min(16, max(1, _power(size) // each))

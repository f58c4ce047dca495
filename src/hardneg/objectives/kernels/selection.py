"""Percentile bands on a GPU: the first and the last candidate of each anchor's band, exactly, in one walk of products.

A sample of the candidates says between which two scores each edge lies (Floyd and Rivest 1975). One walk over all
candidates lists the few between them and counts those below; the edge is found in the list. Should the sample mislead,
or too many fall between, more walks halve the range until the edge is alone in it: never a wrong answer, only a slower
one. The host waits for nothing, and no matrix of scores is ever stored.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from hardneg.objectives.kernels import ranks, selecting, tuning
from hardneg.objectives.kernels.problem import Rule

# One candidate of so many is sampled. Were it half as many, 1.4 times as many would be listed; were it twice as many,
# their products and ranks would cost more than shorter lists save.
STEP = 16

# Half the distance between the two bounds of an edge, in standard deviations of a sampled rank. By the normal law one
# edge in 500 million lies outside, and its tile of anchors then takes fifty walks where others take one.
SPREAD = 6.0

# Up to here all candidates are listed, which is quicker than to sample them first.
SHORTEST_ROW = 4096

# Longest list, and largest sample, that a program holds in registers.
LONGEST_LIST = 32768

# Bytes of lists and samples; more anchors than they suffice for are taken in strips.
STRIP = 128 << 20

# Before Triton 3.5 the result of an atomic addition did not reach all threads (triton-lang/triton issue 7402).
HAS_ATOMICS = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 5)


def edges(walk: Any, rule: Rule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The edges of the band that the rings of ``rule`` cut from each anchor's candidates, by score and then by index.

    walk: anchors (A, d) and candidates (N, d) of the fused kernel, and who may meet whom · returns for each anchor the
    score in base 2 and the index of the first and of the last candidate in its band, (A,) each; +inf and −inf are the
    scores of an empty band. An index may also be 0 or beyond all where no other candidate has the score of an edge.
    """
    if not HAS_ATOMICS:
        band = ranks.sorted_edges(walk.scores(), rule)
        return band.low, band.low_index, band.high, band.high_index
    anchors, columns = len(walk.anchors), len(walk.block)
    score = torch.empty(2, anchors, dtype=torch.float32, device=walk.anchors.device)
    index = torch.empty(2, anchors, dtype=torch.int32, device=walk.anchors.device)
    plan = planned(columns, rule.rings)
    height = max(1, STRIP // (8 * plan.capacity + 4 * plan.size))
    for base in range(0, anchors, height):
        _strip(walk, rule, plan, base, min(base + height, anchors), score, index)
    return score[0], index[0], score[1], index[1]


@dataclass(frozen=True)
class Plan:
    """How a row of candidates is searched.

    step, size: one in ``step`` is sampled, ``size`` in all · capacity: so many are listed at most · low, high: where
    the edges are expected, as shares of the eligible
    """

    step: int
    size: int
    capacity: int
    low: float
    high: float


@lru_cache(maxsize=256)
def planned(columns: int, rings: tuple[tuple[float, float], ...]) -> Plan:
    """The plan for rows of so many candidates.

    Examples:
        >>> plan = planned(65536, ((0.9, 0.99),))
        >>> plan.size, plan.capacity < 65536 / 8
        (4096, True)
    """
    low, high = max(lower for lower, _ in rings), min(upper for _, upper in rings)
    if columns <= SHORTEST_ROW:
        return Plan(STEP, 0, columns, low, high)
    step = max(STEP, math.ceil(columns / LONGEST_LIST))
    size = columns // step
    # As the program chooses pivots: up to an eighth further out.
    margins = [SPREAD * math.sqrt(size * share * (1 - share)) + SPREAD**2 / 6 for share in (low, high)]
    between = 2 * sum(margins) * 17 / 16 + 4
    # By the normal law sampled ranks so far apart enclose no more; besides, up to a grain of equals at each pivot.
    capacity = math.ceil(step * (between + SPREAD * math.sqrt(between))) + 4 * selecting.GRAIN.value
    return Plan(step, size, min(columns, capacity, LONGEST_LIST), low, high)


@lru_cache(maxsize=256)
def known_ranks(eligible: int, rings: tuple[tuple[float, float], ...]) -> tuple[int, int]:
    """First and one-past-last rank of the band, where all anchors have the same number of eligible candidates."""
    start, end = Rule(rings=rings).ranks(torch.tensor([eligible], device="cpu"))
    return int(start), int(end)


class _FromZero:
    """The program `collect` on counters set to zero, however often it is run to find the best tile."""

    arg_names = getattr(selecting.collect, "arg_names", ())

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def run(**arguments: Any) -> None:
            arguments["counters"].zero_()
            selecting.collect[grid](**arguments)

        return run


def _strip(walk: Any, rule: Rule, plan: Plan, base: int, end: int, score: Tensor, index: Tensor) -> None:
    """Fill in the edges of the anchors from ``base`` to ``end``; score, index: (2, A)."""
    rows, width, columns, device = end - base, walk.anchors.shape[1], len(walk.block), score.device
    counted = walk.question.who.excluded is not None or not walk.question.who.is_plain
    anchor_groups, candidate_groups = walk.groups()
    common = {
        **walk.eligibility(),
        "anchors_": walk.anchors, "candidates_": walk.block, "scale_": walk.scale,
        "anchor_groups": anchor_groups, "candidate_groups": candidate_groups,
        "anchors": end, "candidates": columns, "width": width, "base": base,
        "anchor_stride": walk.anchors.stride(0), "candidate_stride": walk.block.stride(0),
        "PRECISION": walk.common()["PRECISION"],
    }  # fmt: skip

    sample = torch.empty(rows, plan.size, dtype=torch.float32, device=device)
    if plan.size > 0:
        arguments = common | {"result": sample, "size": plan.size, "span": tuning.UNIT, "STEP": plan.step}
        parts = math.ceil(plan.size / tuning.UNIT)
        tuning.launch(selecting.sample, arguments, rows, parts, width, walk.whole, "sample")
    pivot = torch.empty(rows, 4, dtype=torch.float32, device=device)
    cut = torch.empty(rows, 4, dtype=torch.int32, device=device)
    selecting.bracket[(rows, 2)](
        sample, pivot, cut, plan.size, plan.low, plan.high, SPREAD,
        STEP=plan.step, SIZE=_power(plan.size), num_warps=_warps(plan.size, 2048),
    )  # fmt: skip

    counters = torch.empty(rows, selecting.COUNTERS.value, dtype=torch.int32, device=device)
    listed = torch.empty(rows, plan.capacity, dtype=torch.int64, device=device)
    parts, span = replace(walk, anchors=walk.anchors[base:end]).stretches(outer=True)
    arguments = common | {
        "pivot_": pivot, "cut_": cut, "counters": counters, "list_": listed, "capacity": plan.capacity, "span": span,
        "COUNTED": counted,
    }  # fmt: skip
    tuning.launch(_FromZero(), arguments, rows, parts, width, walk.whole, "collect")

    known = 0 if counted else walk.question.eligible()
    eligible = counters[:, selecting.ELIGIBLE.value]
    first, stop = rule.ranks(eligible) if counted else known_ranks(known, rule.rings)
    missed = torch.empty(2, rows, dtype=torch.int32, device=device)
    found = {
        "counters": counters, "first_": first, "end_": stop, "score_": score, "index_": index, "missed_": missed,
        "known": known, "stride": score.shape[1], "COUNTED": counted,
    }  # fmt: skip
    selecting.select[(rows,)](
        **found, words=listed.view(torch.int32), pivot_=pivot, cut_=cut, rows=rows, candidates=columns, base=base,
        capacity=plan.capacity, SIZE=_power(plan.capacity), num_warps=_warps(plan.capacity, 1024), maxnreg=128,
    )  # fmt: skip
    if plan.size > 0:
        # In the tile found best for `collect`: most often it has nothing to do by which it could be measured.
        tuning.launch(selecting.bisect, common | found, rows, 2, width, walk.whole, "collect")


def _power(size: int) -> int:
    """The power of two that programs hold so many numbers in."""
    return max(16, 1 << (size - 1).bit_length())


def _warps(size: int, each: int) -> int:
    """Warps to hold so many numbers, ``each`` in a warp if it can be."""
    return min(16, max(1, _power(size) // each))

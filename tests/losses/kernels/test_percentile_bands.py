"""Percentile bands of the fused kernel: edges equal those of a stable sort, interpreted and, if present, on a GPU."""

import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from images import interpreter
from losses.kernels.edges import Found, find_edges
from torch import Tensor
from torch.testing import assert_close

from hardneg.losses.kernels import Eligibility, RowLayout, Rule, percentiles

Rings = tuple[tuple[float, float], ...]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is for Linux only")

# Constants with which rows that are short enough for the interpreter are sampled.
SMALL = {"SHORTEST_ROW": 64, "STEP": 3, "SPREAD": 3.0}


def slow(*values: Any) -> Any:
    """Cases of the full grid, of which the quick run takes a few: the interpreter takes seconds for some."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def find() -> Iterator[Callable[..., Found]]:
    """`find_edges`, interpreted."""
    with interpreter.process(interpret=True) as call:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")  # the process inherits it, in case it imports Triton at its start
            call(int)
        yield lambda *given: call(find_edges, *given)


def check(found: Found, rings: Rings) -> None:
    """The edges, and which candidates lie within them, are those of a stable sort of the same scores."""
    low, _, high, _ = found.edges
    band = percentiles.sorted_edges(found.scores, Rule(rings=rings))
    assert_close(low, band.low, rtol=0, atol=0)
    assert_close(high, band.high, rtol=0, atol=0)
    expected = band.low, band.low_index, band.high, band.high_index
    assert torch.equal(within(found.scores, *found.edges), within(found.scores, *expected))


def within(scores: Tensor, low: Tensor, first: Tensor, high: Tensor, last: Tensor) -> Tensor:
    """Which candidates lie within the edges, (A, N)."""
    index = torch.arange(scores.shape[1], device=scores.device)
    low, first, high, last = (edge[:, None] for edge in (low, first, high, last))
    under = (scores < low) | ((scores == low) & (index < first))
    over = (scores > high) | ((scores == high) & (index > last))
    return ~(under | over | (scores == -math.inf))


def integers(rows: int, width: int = 8) -> Tensor:
    """Vectors with exact inner products in every order of summation, many of them equal."""
    return torch.randint(-2, 3, (rows, width)).float()


RINGS: dict[str, Rings] = {
    "narrow": ((0.9, 0.99),),
    "wide": ((0.1, 0.6),),
    "lowest": ((0.0, 0.3),),
    "highest": ((0.99, 1.0),),
    "everything": ((0.0, 1.0),),
    "one candidate": ((0.5, 0.5001),),
    "two rings": ((0.2, 0.7), (0.5, 0.9)),
    "disjoint rings": ((0.1, 0.3), (0.6, 0.8)),
}


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        *((name, 37) for name in RINGS),
        *((name, 333) if name in ("narrow", "lowest", "two rings") else slow(name, 333) for name in RINGS),
    ],
)
def test_edges_are_those_of_a_stable_sort(find: Callable[..., Found], name: str, columns: int) -> None:
    rings = RINGS[name]
    check(find(torch.randn(3, 8), torch.randn(columns, 8), Eligibility(columns), rings, SMALL), rings)


TIES: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {
    "many": lambda anchors: (integers(anchors), integers(333)),
    "all": lambda anchors: (integers(anchors), torch.ones(333, 8)),
    "pairs": lambda anchors: (torch.randn(anchors, 8), torch.randn(167, 8).repeat(2, 1)),
}
SOME_TIES = [("many", "wide"), ("all", "one candidate"), ("all", "two rings"), ("pairs", "narrow")]


@pytest.mark.parametrize(
    ("ties", "name", "anchors"),
    [*((*case, 2) for case in SOME_TIES), *(slow(ties, name, 4) for ties in TIES for name in RINGS)],
)
def test_of_equal_scores_those_with_lower_indices_rank_lower(
    find: Callable[..., Found], ties: str, name: str, anchors: int
) -> None:
    rows, candidates = TIES[ties](anchors)
    check(find(rows, candidates, Eligibility(len(candidates)), RINGS[name], SMALL), RINGS[name])


@pytest.mark.parametrize("columns", [1500, slow(6000)])
def test_equal_scores_need_no_more_than_two_passes(find: Callable[..., Found], columns: int) -> None:
    rings = ((0.3, 0.6),)
    constants = {"SHORTEST_ROW": 64, "STEP": 4, "SPREAD": 5.0}
    anchors = torch.stack([torch.zeros(8), torch.ones(8), -torch.ones(8)])
    candidates = torch.ones(columns, 8)
    # Of the second anchor a third scores 0, of the third anchor these score highest.
    candidates[torch.randperm(columns)[: columns // 3]] = 0.0
    found = find(anchors, candidates, Eligibility(columns), rings, constants)
    assert found.missed == 0
    assert found.without_room > 0
    check(found, rings)


SIMILAR: dict[str, Callable[[Tensor], Tensor]] = {
    "together": lambda index: index // 200 % 4,
    "every fourth": lambda index: index % 4,
    "every thirty-second": lambda index: index % 32,
    "in blocks": lambda index: index // 64 % 5,
}


@pytest.mark.parametrize(
    ("name", "columns"),
    [("together", 3000), ("every thirty-second", 3000), *(slow(name, 6000) for name in SIMILAR)],
)
def test_one_pass_is_enough_wherever_similar_candidates_are(
    find: Callable[..., Found], name: str, columns: int
) -> None:
    rings, constants = ((0.6, 0.9),), {"SHORTEST_ROW": 64, "STEP": 4, "SPREAD": 4.0}
    candidates = torch.randn(columns, 8) * 0.3
    candidates[:, 0] += SIMILAR[name](torch.arange(columns)) == 0
    found = find(torch.eye(8)[:3] + 0.1, candidates, Eligibility(columns), rings, constants)
    assert found.missed == found.without_room == 0
    check(found, rings)


# Candidates, constants, and which of the rare cases they reach.
SUMMED: dict[str, tuple[Callable[[], Tensor], dict[str, float], str]] = {
    "sampled": (lambda: torch.randn(333, 8), {}, "none"),
    "all listed": (lambda: torch.randn(50, 8), {}, "none"),
    "tied": (lambda: integers(333), {}, "tied"),
    "tied pairs": (lambda: torch.randn(167, 8).repeat(2, 1), {}, "none"),
    "no room": (lambda: torch.ones(600, 8), {}, "no room"),
    "missed": (lambda: torch.randn(100, 8), {"SPREAD": 0.0}, "missed"),
}
SOME_SUMS = [
    (1.3, torch.float32, "sampled"),
    (0.0, torch.float16, "tied"),
    (0.5, torch.float16, "all listed"),
    (1.0, torch.float16, "missed"),
    (2.0, torch.float16, "no room"),
    (1.3, torch.float16, "tied pairs"),
]


@pytest.mark.parametrize(
    ("tilt", "dtype", "name", "anchors"),
    [*((*case, 2) for case in SOME_SUMS), *(slow(*case[:2], name, 5) for case in SOME_SUMS for name in SUMMED)],
    ids=str,
)
def test_sums_over_the_band_come_with_its_edges(
    find: Callable[..., Found], tilt: float, dtype: torch.dtype, name: str, anchors: int
) -> None:
    make, constants, rare = SUMMED[name]
    candidates, rings = (make() / 4).to(dtype), ((0.4, 0.8),)
    given = (integers(anchors) / 4).to(dtype), candidates, Eligibility(len(candidates))
    found = find(*given, rings, SMALL | constants, tilt)
    assert (found.without_room > 0) == (rare == "no room")
    assert (found.tied > 0) == (rare == "tied")
    assert (found.missed > 0) == (rare == "missed")
    assert found.sums is not None
    check(found, rings)
    scores = found.scores.double()
    kept = within(found.scores, *found.edges)
    for total, power in zip(found.sums, (tilt + 1, tilt), strict=True):
        if power > 0:
            assert_close(total.double(), torch.where(kept, 2 ** (power * scores), 0).sum(dim=1), rtol=2e-6, atol=0)


def test_zeros_of_both_signs_are_equal(find: Callable[..., Found]) -> None:
    candidates = torch.where(torch.rand(333, 1) < 0.5, 0.0, -0.0).repeat(1, 8)
    check(find(torch.ones(2, 8), candidates, Eligibility(333), ((0.2, 0.6),), SMALL), ((0.2, 0.6),))


def eligibilities(columns: int) -> dict[str, Eligibility]:
    few = torch.rand(8, columns) < 0.5
    few[3], few[4], few[5] = False, False, False
    few[4, 17], few[5, :40] = True, True
    labels = torch.randint(0, 3, (8 + columns,))
    own = RowLayout(4, 2, 5, 30, torch.device("cpu"))
    return {
        "own instance": Eligibility(columns, own=own, pool_views=columns // 30),
        "mask": Eligibility(columns, allowed=few),
        "mask for some": Eligibility(columns, allowed=few[:4, : columns // 2]),
        "excluded": Eligibility(columns, excluded=torch.randint(0, columns, (8, 3))),
        "other groups": Eligibility(columns, anchor_groups=labels[:8], candidate_groups=labels[8:]),
        "same group": Eligibility(columns, anchor_groups=labels[:8], candidate_groups=labels[8:], same_group=True),
        "everything": Eligibility(
            columns,
            own=own,
            pool_views=columns // 30,
            excluded=torch.randint(0, columns, (8, 2)),
            anchor_groups=labels[:8],
            candidate_groups=labels[8:],
            allowed=few,
        ),
    }


@pytest.mark.parametrize("vectors", [torch.randn, slow(integers)], ids=["any scores", "ties"])
@pytest.mark.parametrize("case", eligibilities(330))
def test_ranks_are_among_the_eligible_candidates(
    find: Callable[..., Found], case: str, vectors: Callable[[int, int], Tensor]
) -> None:
    columns = 330
    eligibility, rings = eligibilities(columns)[case], ((0.3, 0.8),)
    found = find(vectors(8, 8), vectors(columns, 8), eligibility, rings, SMALL)
    masked = torch.zeros(8, columns)
    eligibility.mask_(masked, slice(0, 8), -math.inf)
    assert torch.equal(masked == -math.inf, found.scores == -math.inf)
    check(found, rings)


OUTSIDE = {"SPREAD": 0.0}  # edges lie outside of what is listed
TOO_SHORT = {"LONGEST_LIST": 64}  # lists are too short


@pytest.mark.parametrize(
    ("constants", "masked", "anchors"),
    [
        *((OUTSIDE, False, 2), (TOO_SHORT, True, 2)),
        *(slow(constants, masked, 4) for constants in (OUTSIDE, TOO_SHORT) for masked in (False, True)),
    ],
)
def test_a_missed_edge_is_found_by_more_passes(
    find: Callable[..., Found], constants: dict[str, Any], masked: bool, anchors: int
) -> None:
    eligibility = Eligibility(150, allowed=torch.rand(anchors, 150) < 0.6) if masked else Eligibility(150)
    rings = ((0.4, 0.8),)
    found = find(integers(anchors), integers(150), eligibility, rings, SMALL | constants)
    assert found.missed > 0
    check(found, rings)


def test_anchors_are_processed_in_strips_if_their_lists_take_too_much_memory(find: Callable[..., Found]) -> None:
    rings, labels = ((0.4, 0.8),), torch.randint(0, 3, (337,))
    eligibility = Eligibility(333, anchor_groups=labels[:4], candidate_groups=labels[4:])
    found = find(torch.randn(4, 8), torch.randn(333, 8), eligibility, rings, SMALL | {"STRIP_BYTES": 7000})
    assert found.strips == 2
    check(found, rings)


@pytest.mark.parametrize("order", ["ascending", "descending", "with the period of the sample"])
def test_the_order_of_candidates_does_not_matter(find: Callable[..., Found], order: str) -> None:
    scores = torch.randn(333).sort(descending=order == "descending").values
    if order == "with the period of the sample":
        scores = scores.view(3, -1).T.reshape(-1)
    candidates = torch.zeros(333, 8)
    candidates[:, 0] = scores
    check(find(torch.ones(2, 8), candidates, Eligibility(333), ((0.25, 0.6),), SMALL), ((0.25, 0.6),))


@pytest.mark.parametrize(("anchors", "columns"), [(33, 40), slow(35, 75)])  # all listed, and sampled
def test_edges_of_more_anchors_than_a_tile_holds_are_right(
    find: Callable[..., Found], anchors: int, columns: int
) -> None:
    rings = ((0.2, 0.9),)
    check(find(torch.randn(anchors, 8), torch.randn(columns, 8), Eligibility(columns), rings, SMALL), rings)


def test_edges_of_wide_rows_are_those_of_a_stable_sort(find: Callable[..., Found]) -> None:
    check(find(torch.randn(5, 300), torch.randn(200, 300), Eligibility(200), ((0.5, 0.9),), SMALL), ((0.5, 0.9),))


def sampled(size: int, step: int) -> Tensor:
    """Indices that `percentile_lists.sampled` draws."""
    places = torch.arange(size)
    return places * step + ((places & 0x7FFF) * 40503 >> 12) % step


def test_sums_are_recomputed_if_a_sample_puts_both_edges_on_one_side(find: Callable[..., Found]) -> None:
    """The sampled scores are uniform; the others are such that the whole band is below the middle."""
    rings, drawn = ((0.5, 0.8),), torch.zeros(8192, dtype=torch.bool)
    drawn[sampled(512, 16)] = True
    others = torch.cat([torch.rand(3800) * 0.3, 0.4 + torch.rand(3300) * 0.2, 0.665 + torch.rand(580) * 0.005])
    candidates = torch.empty(8192, 1)
    candidates[drawn, 0], candidates[~drawn, 0] = torch.rand(512), others[torch.randperm(len(others))]
    found = find(torch.ones(1, 1), candidates, Eligibility(8192), rings, {}, 1.0)
    assert found.missed == found.without_room == 0
    check(found, rings)
    kept = within(found.scores, *found.edges)
    assert found.sums is not None
    assert_close(found.sums[0].double(), torch.where(kept, 4 ** found.scores.double(), 0).sum(dim=1), rtol=2e-6, atol=0)


def test_pivots_of_a_narrow_band_may_lie_in_any_order(find: Callable[..., Found]) -> None:
    """The upper pivot of the lower edge is 0.6614, that of the upper edge 0.6608, and the band lies between."""
    torch.manual_seed(23)
    rings, drawn = ((0.5, 0.502),), torch.zeros(8192, dtype=torch.bool)
    drawn[sampled(512, 16)] = True
    sample = torch.rand(512)
    end = math.floor(0.502 * 8192)
    below = end - 201 - int((sample <= 0.6608).sum())
    others = torch.cat([torch.rand(below) * 0.3, 0.661 + torch.rand(400) * 3e-4, 0.7 + torch.rand(7280 - below) * 0.1])
    candidates = torch.empty(8192, 1)
    candidates[drawn, 0], candidates[~drawn, 0] = sample, others[torch.randperm(len(others))]
    check(find(torch.ones(1, 1), candidates, Eligibility(8192), rings, {}), rings)


@pytest.mark.parametrize("columns", [1, 100, 4096, 4097, 65_536, 10**6, 1 << 20, 10**7])
def test_counts_of_every_part_fit_their_packed_form(columns: int) -> None:
    from hardneg.losses.kernels.triton import percentile_bands, percentile_lists

    for rings in RINGS.values():
        plan = percentile_bands.make_plan(columns, rings)
        each = math.ceil(columns / plan.parts)
        assert math.ceil(each / 8 + percentile_lists.ROTATION_LENGTH.value / 8) < percentile_lists.COUNT_BASE.value
        assert plan.parts & (plan.parts - 1) == 0
        assert 0 < plan.capacity <= each
        assert plan.parts * plan.span(columns) >= columns


def test_no_matrix_of_scores_is_stored(find: Callable[..., Found]) -> None:
    found = find(torch.randn(3, 1), torch.randn(4000, 1), Eligibility(4000), ((0.9, 0.99),), SMALL)
    assert found.largest < 3 * 4000 / 2


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rings", RINGS.values(), ids=RINGS.keys())
@pytest.mark.parametrize(("rows", "columns", "width"), [(1024, 65536, 128), (77, 5001, 96), (256, 1000, 768)])
def test_edges_on_a_gpu_are_those_of_a_stable_sort(
    rings: Rings, dtype: torch.dtype, rows: int, columns: int, width: int
) -> None:
    anchors, candidates = (
        torch.nn.functional.normalize(torch.randn(size, width, device="cuda"), dim=1).to(dtype)
        for size in (rows, columns)
    )
    check(find_edges(anchors, candidates, Eligibility(columns), rings, {}), rings)
    coarse = candidates.float().mul(8).round().to(dtype)
    check(find_edges(anchors.float().mul(8).round().to(dtype), coarse, Eligibility(columns), rings, {}), rings)


@needs_gpu
def test_edges_on_a_gpu_are_reproducible_and_do_not_synchronize() -> None:
    anchors, candidates = torch.randn(512, 64, device="cuda"), torch.randn(20000, 64, device="cuda")
    allowed = torch.rand(512, 20000, device="cuda") < 0.3
    given = anchors.bfloat16(), candidates.bfloat16(), Eligibility(20000, allowed=allowed), ((0.9, 0.99),), {}
    once = find_edges(*given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        twice = find_edges(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(once.edges, twice.edges, strict=True):
        assert torch.equal(one, other)
    check(once, ((0.9, 0.99),))

"""Percentile bands of the fused kernel: edges equal those of a stable sort, interpreted and, if present, on a GPU."""

import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch
from interpreter import process
from losses.kernels import interpreted
from losses.kernels.edges import SCALE, Found, find_edges
from torch import Tensor
from torch.testing import assert_close

import hardneg as hn
from hardneg.losses.kernels import percentiles
from hardneg.losses.kernels.interface import Eligibility, RowLayout, Rule

Rings = tuple[tuple[float, float], ...]
Call = Callable[..., Any]
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is for Linux only")

# With these, rows that are short enough for the interpreter have several chunks, and scores near the edges are listed.
SMALL = {"CHUNK": 64, "LIST": 32}
WHOLE = {"CHUNK": 64}  # all scores of a row are searched


def slow(*values: Any) -> Any:
    """Cases of the full grid, of which the quick run takes a few: the interpreter takes a tenth of a second for one."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def call() -> Iterator[Call]:
    """Calls a function in the process that interprets Triton."""
    with process(interpret=True) as made:
        yield made


def within(scores: Tensor, low: Tensor, first: Tensor, high: Tensor, last: Tensor) -> Tensor:
    """Which candidates are within the edges, (A, N)."""
    index = torch.arange(scores.shape[1], device=scores.device)
    low, first, high, last = (edge[:, None] for edge in (low, first, high, last))
    under = (scores < low) | ((scores == low) & (index < first))
    over = (scores > high) | ((scores == high) & (index > last))
    return ~(under | over | (scores == -math.inf))


def check(found: Found, rule: Rule) -> Tensor:
    """Edges and sums are those of a stable sort of the same scores; returns the candidates in each band, (A, N)."""
    band = percentiles.sorted_edges(found.scores, rule)
    kept = within(found.scores, band.low, band.low_index, band.high, band.high_index)
    assert_close(found.edges[0], band.low, rtol=0, atol=0)
    assert_close(found.edges[2], band.high, rtol=0, atol=0)
    assert torch.equal(within(found.scores, *found.edges), kept)
    scores = found.scores.double() * SCALE
    if rule.lower is not None:
        kept &= scores >= rule.lower
    if rule.upper is not None:
        kept &= scores <= rule.upper
    assert torch.equal(found.counts, kept.sum(dim=1).float())
    highest = torch.where(kept, scores, -math.inf).amax(dim=1)
    full = kept.any(dim=1)
    assert_close(found.maximum[full].double(), highest[full], rtol=1e-6, atol=1e-6)
    relative = torch.where(kept, scores - torch.where(full, highest, 0.0)[:, None], -math.inf)
    largest = float(torch.where(kept, scores, 0.0).abs().max())
    for total, power in zip(found.sums, (rule.tilt + 1, rule.tilt), strict=True):
        exact = torch.where(kept, (power * relative).exp(), 0.0).sum(dim=1)
        if power > 0:  # Σ 1 is the count
            # Scores are rounded, which is an absolute error of the exponent.
            assert_close(total.double(), exact, rtol=3e-6 + power * largest * 2**-23, atol=0)
    return kept


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
CANDIDATES: dict[str, Callable[[], Tensor]] = {
    "all different": lambda: torch.randn(70, 8),
    "many equal": lambda: integers(70),
    "all equal": lambda: torch.ones(70, 8),
    "pairs": lambda: torch.randn(35, 8).repeat(2, 1),
    "zeros of both signs": lambda: torch.where(torch.rand(70, 1) < 0.5, 0.0, -0.0).repeat(1, 8),
    "whole chunks": lambda: torch.randn(128, 8),
    "part of a chunk": lambda: torch.randn(37, 8),
    "one": lambda: torch.randn(1, 8),
    "far outliers": lambda: torch.randn(150, 8) * torch.where(torch.arange(150) % 2 == 0, 0.01, 1.0)[:, None],
    "one far outlier": lambda: torch.cat([torch.randn(69, 8), torch.full((1, 8), 1e6)]),
    "infinitesimal": lambda: torch.randn(70, 8) * 1e-39,
}
SOME = [("many equal", ring) for ring in RINGS] + [(name, "two rings") for name in CANDIDATES]


@pytest.mark.parametrize(
    ("name", "ring"),
    [(name, ring) if (name, ring) in SOME else slow(name, ring) for name in CANDIDATES for ring in RINGS],
)
def test_edges_are_those_of_a_stable_sort(call: Call, name: str, ring: str) -> None:
    rule, candidates = Rule(rings=RINGS[ring]), CANDIDATES[name]()
    kept = check(call(find_edges, integers(1), [candidates], Eligibility(len(candidates)), rule, SMALL), rule)
    assert kept.any() == (ring != "disjoint rings" or name == "one")  # a ring keeps one candidate at least


@pytest.mark.parametrize(("name", "ring"), [("many equal", "narrow"), slow("all different", "wide")])
def test_edges_are_the_same_if_all_scores_are_searched(call: Call, name: str, ring: str) -> None:
    rule, anchors, candidates = Rule(rings=RINGS[ring]), integers(2), CANDIDATES[name]()
    found, listed = (
        call(find_edges, anchors, [candidates], Eligibility(len(candidates)), rule, constants)
        for constants in (WHOLE, SMALL)
    )
    check(found, rule)
    assert all(torch.equal(one, other) for one, other in zip(found.edges, listed.edges, strict=True))


@pytest.mark.parametrize("order", ["descending", slow("ascending"), slow("alternating")])
def test_the_order_of_candidates_does_not_matter(call: Call, order: str) -> None:
    scores = torch.randn(69).sort(descending=order == "descending").values
    if order == "alternating":
        scores = scores.view(3, -1).T.reshape(-1)
    rule, candidates = Rule(rings=((0.25, 0.6),)), scores[:, None] * torch.eye(8)[0]
    check(call(find_edges, torch.ones(1, 8), [candidates], Eligibility(69), rule, SMALL), rule)


NO_BOUNDS, BOUNDS = (None, None), (-0.4, 0.7)
SUMMED = [(0.0, torch.float32, NO_BOUNDS), (0.5, torch.float16, BOUNDS), (1.0, torch.float16, NO_BOUNDS),
          (2.0, torch.float16, NO_BOUNDS), (1.3, torch.float32, BOUNDS)]  # fmt: skip


@pytest.mark.parametrize(
    ("tilt", "dtype", "bounds"),
    [
        case if case in SUMMED else slow(*case)
        for case in product((0.0, 0.5, 1.0, 2.0, 1.3), (torch.float32, torch.float16), (NO_BOUNDS, BOUNDS))
    ],
)
def test_sums_over_the_band_are_those_of_float64(
    call: Call, tilt: float, dtype: torch.dtype, bounds: tuple[float | None, float | None]
) -> None:
    rule = Rule(tilt=tilt, rings=((0.3, 0.95),), lower=bounds[0], upper=bounds[1])
    anchors, candidates = (torch.randn(rows, 8).div(4).to(dtype) for rows in (2, 70))
    kept = check(call(find_edges, anchors, [candidates], Eligibility(70), rule, SMALL), rule)
    assert (kept.sum(dim=1) > 10).all()


COLUMNS = 60


def eligibilities() -> dict[str, Eligibility]:
    few = torch.rand(6, COLUMNS) < 0.5
    few[3:] = False
    few[4, 17], few[5, :40] = True, True
    labels = torch.randint(-1, 3, (6 + COLUMNS,))
    own = {"own": RowLayout(3, 2, 5, 20, torch.device("cpu")), "pool_views": COLUMNS // 20}
    groups = {"anchor_groups": labels[:6], "candidate_groups": labels[6:]}
    excluded = torch.randint(0, COLUMNS, (6, 3))
    return {
        "own instance": Eligibility(COLUMNS, **own),
        "mask": Eligibility(COLUMNS, allowed=few),
        "mask for some": Eligibility(COLUMNS, allowed=few[:3, : COLUMNS // 2]),
        "excluded": Eligibility(COLUMNS, excluded=excluded),
        "other groups": Eligibility(COLUMNS, **groups),
        "same group": Eligibility(COLUMNS, **groups, same_group=True),
        "everything": Eligibility(COLUMNS, **own, **groups, excluded=excluded, allowed=few),
    }


def eligible(eligibility: Eligibility) -> Tensor:
    """Which candidates are eligible, (6, COLUMNS), by a loop."""
    found, own = torch.zeros(6, COLUMNS, dtype=torch.bool), eligibility.own
    for i in range(6):
        for j in range(COLUMNS):
            fits = own is None or i % own.batch + own.offset != j % own.global_batch
            fits = fits and (eligibility.excluded is None or j not in eligibility.excluded[i].tolist())
            if eligibility.anchor_groups is not None and eligibility.candidate_groups is not None:
                one, other = int(eligibility.anchor_groups[i]), int(eligibility.candidate_groups[j])
                fits = fits and (one == other) == eligibility.same_group
            if eligibility.allowed is not None:
                rows, columns = eligibility.allowed.shape
                column = j - (COLUMNS - columns)
                fits = fits and (column < 0 or bool(eligibility.allowed[i % rows, column]))
            found[i, j] = fits
    return found


@pytest.mark.parametrize(
    "case", [case if case in ("mask for some", "same group", "everything") else slow(case) for case in eligibilities()]
)
def test_ranks_are_among_the_eligible_candidates(call: Call, case: str) -> None:
    eligibility, rule = eligibilities()[case], Rule(rings=((0.3, 0.8),))
    found = call(find_edges, integers(6), [integers(COLUMNS)], eligibility, rule, SMALL)
    assert torch.equal(found.scores > -math.inf, eligible(eligibility))
    check(found, rule)


def test_candidates_of_several_blocks_are_ranked_together(call: Call) -> None:
    rule = Rule(rings=((0.4, 0.8),))
    blocks, excluded = [integers(20), integers(27), integers(13)], torch.randint(0, COLUMNS, (6, 3))
    anchors = integers(6)
    found = call(find_edges, anchors, blocks, Eligibility(COLUMNS, excluded=excluded), rule, SMALL)
    exact = (anchors @ torch.cat(blocks).T).scatter(1, excluded, -math.inf)
    assert torch.equal(found.scores, exact)
    check(found, rule)


@pytest.mark.parametrize("room", [0, 1120])
def test_anchors_are_processed_in_strips_of_bounded_size(call: Call, room: int) -> None:
    rule, labels = Rule(rings=((0.4, 0.8),), tilt=1.0), torch.randint(0, 3, (5 + COLUMNS,))
    eligibility = Eligibility(COLUMNS, anchor_groups=labels[:5], candidate_groups=labels[5:])
    found = call(find_edges, integers(5), [integers(COLUMNS)], eligibility, rule, SMALL | {"STRIP_BYTES": room})
    assert found.strips == 5 if room == 0 else 1 < found.strips < 5
    check(found, rule)


def test_rows_may_be_wide(call: Call) -> None:
    rule = Rule(rings=((0.5, 0.9),))
    check(call(find_edges, torch.randn(2, 300), [torch.randn(66, 300)], Eligibility(66), rule, SMALL), rule)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_the_sum_of_a_row_with_a_score_that_is_not_finite_is_nan(call: Call, bad: float) -> None:
    for place in (0, 66):
        candidates = torch.randn(67, 8).abs()
        candidates[place, 3] = bad
        found = call(find_edges, torch.ones(1, 8), [candidates], Eligibility(67), Rule(rings=((0.3, 0.5),)), SMALL)
        assert found.sums[0].isnan().all()


def test_gradients_of_several_strips_and_blocks_are_those_of_float64(call: Call) -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = {"z1": 5, "z2": 5, "negatives": 31}
    arguments = {name: torch.randn(rows, 6, generator=generator) for name, rows in sizes.items()}
    options = {"hardening": (hn.Ring(0.3, 0.9), hn.Exponential(1.3)), "temperature": 0.3, "in_batch": "other"}
    constants = {"percentile_bands.STRIP_BYTES": 2 * 4 * 36, "percentile_bands.CHUNK": 64}
    found = call(interpreted.guarded, options, arguments, constants)
    exact = {name: tensor.double() for name, tensor in arguments.items()}
    truth = interpreted.run(options, exact, backend="reference")
    assert_close(found.value.double(), truth.value, rtol=1e-6, atol=0)
    for name, grad in truth.grads.items():
        assert float(grad.norm()) > 1e-3
        assert_close(found.grads[name].double(), grad, rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rings", RINGS.values(), ids=RINGS.keys())
@pytest.mark.parametrize(("rows", "columns", "width"), [(256, 65536, 128), (77, 5001, 96), (256, 1000, 768)])
def test_edges_on_a_gpu_are_those_of_a_stable_sort(
    rings: Rings, dtype: torch.dtype, rows: int, columns: int, width: int
) -> None:
    rule = Rule(rings=rings, tilt=1.0)
    anchors, candidates = (
        torch.nn.functional.normalize(torch.randn(size, width, device="cuda"), dim=1) for size in (rows, columns)
    )
    check(find_edges(anchors.to(dtype), [candidates.to(dtype)], Eligibility(columns), rule, {}), rule)
    coarse, equal = (vectors.mul(8).round().to(dtype) for vectors in (anchors, candidates))
    check(find_edges(coarse, [equal], Eligibility(columns), rule, {}), rule)


@pytest.mark.gpu
def test_edges_on_a_gpu_are_reproducible_and_do_not_synchronize() -> None:
    anchors, candidates = (torch.randn(rows, 64, device="cuda").bfloat16() for rows in (512, 20000))
    rule, allowed = Rule(rings=((0.9, 0.99),)), torch.rand(512, 20000, device="cuda") < 0.3
    given = anchors, [candidates], Eligibility(20000, allowed=allowed), rule, {}
    once = find_edges(*given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        twice = find_edges(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(once.edges, twice.edges, strict=True):
        assert torch.equal(one, other)
    check(once, rule)

"""Percentile bands without sorting equal those of a stable sort, and draws from them are uniform."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from largest_tensor import LargestTensor
from scipy.stats import chisquare
from torch import Tensor
from torch.testing import assert_close

import hardneg as hn
from hardneg.losses.kernels import percentiles, reference, strips
from hardneg.losses.kernels.interface import Eligibility, Rule, draw

Rings = tuple[tuple[float, float], ...]
MASKED = -math.inf
FINDERS = (percentiles.selected, percentiles.by_values, percentiles.sorted_edges)


def band_by_definition(row: list[float], rings: Rings) -> set[int]:
    """METHODS section 1 as a loop: sort indices by score, then index; cut each ring; intersect."""
    order = sorted((i for i, score in enumerate(row) if score > MASKED), key=lambda i: (row[i], i))
    kept = set(order)
    for lower, upper in rings:
        start = math.floor(lower * len(order) + 1e-9)
        kept &= set(order[start : max(math.floor(upper * len(order) + 1e-9), start + 1)])
    return kept


def found(find: Any, scores: Tensor, rings: Rings) -> list[set[int]]:
    """The band of each row."""
    kept = ~find(scores, Rule(rings=rings)).outside(scores) & (scores > MASKED)
    return [set(row.nonzero()[:, 0].tolist()) for row in kept]


fractions = st.sampled_from([0.0, 0.1, 0.3, 1 / 3, 0.5, 0.7, 0.9, 0.99])
one_ring = st.tuples(fractions, st.floats(0.01, 1.0)).map(lambda pair: (pair[0], min(1.0, pair[0] + pair[1])))
# Few distinct scores, for many ties; both zeros, which are equal; infinities.
some_scores = st.sampled_from([-2.0, -0.5, -0.0, 0.0, 0.25, 1.0, math.inf, MASKED])


@given(
    table=st.integers(1, 40).flatmap(
        lambda n: st.lists(st.lists(some_scores, min_size=n, max_size=n), min_size=1, max_size=3)
    ),
    rings=st.lists(one_ring, min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    find=st.sampled_from(FINDERS),
    sample=st.integers(1, 40),
)
def test_bands_equal_the_definition_with_any_ties_and_masks(
    table: list[list[float]], rings: Rings, dtype: torch.dtype, find: Any, sample: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(percentiles, "SAMPLE", sample)
        assert found(find, torch.tensor(table, dtype=dtype), rings) == [band_by_definition(row, rings) for row in table]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("digits", [None, 2, 0], ids=["distinct", "some ties", "mostly ties"])
@pytest.mark.parametrize("rings", [((0.9, 0.99),), ((0.0, 0.9),), ((0.3, 0.7), (0.5, 1.0))], ids=str)
def test_the_bands_of_a_full_queue_are_those_of_a_stable_sort(
    rings: Rings, digits: int | None, dtype: torch.dtype
) -> None:
    scores = torch.randn(6, 65536, dtype=dtype)
    if digits is not None:
        scores = scores.round(decimals=digits)
    scores[1, torch.randperm(65536)[:50000]] = MASKED
    scores[2, 1:] = MASKED
    scores[3] = MASKED
    kept = ~percentiles.edges(scores, Rule(rings=rings)).outside(scores) & (scores > MASKED)
    order = np.argsort(scores.numpy(), axis=1, kind="stable")
    for row, ordered in zip(range(6), order, strict=True):
        eligible = ordered[scores[row, ordered].numpy() > MASKED]
        starts = [math.floor(lower * len(eligible) + 1e-9) for lower, _ in rings]
        ends = [
            max(math.floor(u * len(eligible) + 1e-9), start + 1) for (_, u), start in zip(rings, starts, strict=True)
        ]
        expected = np.sort(eligible[max(starts) : min(ends)])
        assert np.array_equal(kept[row].nonzero()[:, 0].numpy(), expected)


def test_long_rows_are_selected_and_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("sorted_edges", "by_values"):
        monkeypatch.setattr(percentiles, other, None)  # calling it would raise
    assert percentiles.edges(torch.randn(2, percentiles.SHORTEST_ROW), Rule(rings=((0.5, 0.6),))).tied is not None


def test_only_rows_with_a_tie_across_an_edge_are_compared_by_index() -> None:
    scores = torch.arange(5000.0).repeat(3, 1)
    scores[1, :3000] = 0  # the edge at rank 2,500 lies among equals
    scores[2, 2500:2510] = 2500  # equal, and all on one side
    band = percentiles.selected(scores, Rule(rings=((0.5, 1.0),)))
    assert band.tied is not None
    assert band.tied.tolist() == [1]


@pytest.mark.parametrize("find", FINDERS)
@pytest.mark.parametrize("order", ["ascending", "descending", "periodic"])
def test_an_unrepresentative_sample_does_not_change_the_band(order: str, find: Any) -> None:
    columns, rings = 3 * percentiles.SAMPLE, ((0.25, 0.6),)
    row = torch.arange(float(columns))
    if order == "descending":
        row = row.flip(0)
    elif order == "periodic":  # every sampled score is among the highest
        row = row.view(3, -1).flip(0).T.reshape(-1)
    assert found(find, row[None], rings) == [band_by_definition(row.tolist(), rings)]


@pytest.mark.parametrize("position", [0, 1, 17, 4998, 4999])
def test_an_order_statistic_is_that_of_the_sorted_row(position: int) -> None:
    row = torch.randn(5000).round(decimals=1).numpy()
    ordered = np.sort(row)
    score, below, equal = percentiles.order_statistic(row, np.sort(row[::7]), position)
    assert score == ordered[position]
    assert (below, equal) == (np.sum(ordered < score), np.sum(ordered == score))


@pytest.mark.parametrize("find", FINDERS)
def test_a_band_that_keeps_nothing_is_empty_even_beside_infinite_scores(find: Any) -> None:
    scores = torch.tensor([[math.inf, 1.0, 2.0], [MASKED, MASKED, MASKED]])
    assert found(find, scores, ((0.0, 0.3), (0.7, 1.0))) == [set(), set()]
    assert found(find, scores, ((0.0, 1.0),)) == [{0, 1, 2}, set()]


SETTINGS: dict[str, dict[str, Any]] = {
    "ring": {"hardening": hn.Ring(0.9, 0.99)},
    "wide ring": {"hardening": hn.Ring(0.0, 0.9), "temperature": 0.02},
    "rings and tilt": {"hardening": (hn.Ring(0.2, 0.9), hn.Ring(0.5, 1.0), hn.Exponential(1.5))},
    "ring and threshold": {"hardening": (hn.Ring(0.2, 0.9), hn.Threshold(1.1))},
}


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_the_loss_over_a_queue_is_the_same_selected_as_sorted(
    options: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(strips.STRIP_ELEMENTS, "cpu", 10_000)  # several strips
    z1, z2, queue = torch.randn(37, 8), torch.randn(37, 8), torch.randn(2500, 8).round()  # coarse: ties
    allowed = torch.rand(37, 2500) < 0.8
    allowed[5] = False
    results = []
    for shortest in (2048, 10**9):
        monkeypatch.setattr(percentiles, "SHORTEST_ROW", shortest)
        anchors, keys = z1.clone().requires_grad_(), queue.clone().requires_grad_()
        loss = hn.InfoNCE(**{"temperature": 0.2, "in_batch": None, "backend": backend, **options})
        value = loss(anchors, z2, negatives=keys, exclude=torch.arange(37), negative_mask=allowed)
        value.backward()
        results.append([value.detach(), anchors.grad, keys.grad])
    for one, other in zip(*results, strict=True):
        assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("draws", [None, 5])
def test_gradients_through_a_selected_band_are_exact(draws: int | None) -> None:
    anchors = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    queue = torch.randn(2100, 4, dtype=torch.float64)
    positives = torch.randn(3, 4, dtype=torch.float64)

    def value(anchors: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        loss = hn.InfoNCE(
            0.5, in_batch=None, hardening=hn.Ring(0.5, 0.9), num_negatives=draws, generator=generator, backend="tiled"
        )
        result: Tensor = loss(anchors, positives, negatives=queue)
        return result

    # A step so small that no candidate crosses an edge of the band.
    assert torch.autograd.gradcheck(value, (anchors,), eps=1e-8, atol=1e-5)


def test_an_anchor_without_negatives_gets_no_gradient_when_some_are_drawn() -> None:
    # Scores so large that e^s overflows: what is not a negative must not be exponentiated.
    anchors, queue = torch.full((2, 4), 30.0, requires_grad=True), torch.full((6, 4), 5.0)
    allowed = torch.tensor([[True] * 6, [False] * 6])
    loss = hn.InfoNCE(1.0, in_batch=None, normalize=False, num_negatives=3, backend="tiled")
    loss(anchors, torch.ones(2, 4), negatives=queue, negative_mask=allowed).backward()
    assert anchors.grad is not None
    assert anchors.grad[0].isfinite().all()
    assert anchors.grad[1].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("backend", "temperature"),
    [("auto", 0.2), ("tiled", 0.2), ("tiled", 0.02)],  # the last with a row maximum
)
def test_compiled_and_eager_bands_over_a_queue_agree(backend: Any, temperature: float) -> None:
    z1, z2, queue = torch.randn(4, 8), torch.randn(4, 8), torch.randn(2500, 8)
    loss = hn.InfoNCE(temperature, in_batch=None, hardening=hn.Ring(0.5, 0.9), backend=backend)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    one, other = z1.clone().requires_grad_(), z1.clone().requires_grad_()
    first, second = compiled(one, z2, negatives=queue), loss(other, z2, negatives=queue)
    first.backward()
    second.backward()
    assert_close(first, second)
    assert_close(one.grad, other.grad)


def test_a_ring_over_a_queue_allocates_strips_and_no_matrix() -> None:
    anchors, queue = torch.randn(200, 4, requires_grad=True), torch.randn(65536, 4)
    with LargestTensor() as watch:
        hn.ring_nce(backend="tiled")(anchors, torch.randn(200, 4), negatives=queue).backward()
    assert watch.elements <= 4 * strips.STRIP_ELEMENTS["cpu"] < 200 * 65536


@pytest.mark.parametrize("columns", [200, 4000])
def test_draws_from_a_ring_are_uniform_over_its_support(columns: int) -> None:
    scores = torch.randn(3, columns).round(decimals=1)  # ties across the edges
    eligibility = Eligibility(columns, allowed=torch.rand(3, columns) < 0.7)
    rule = Rule(rings=((0.8, 0.9),))
    kept = reference.support(scores, eligibility, rule, slice(0, 3))
    times = 400_000
    drawn = draw(kept, torch.randint(1 << 62, (3, times)))
    for row in range(3):
        count = drawn[row].bincount(minlength=columns)
        assert count[~kept[row]].sum() == 0
        assert chisquare(count[kept[row]].numpy()).pvalue > 1e-3


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_the_loss_draws_its_negatives_uniformly_from_the_ring(backend: str) -> None:
    # One anchor, loss log Σ e^s over the k drawn: the gradient of candidate j is (times it was drawn)·e^{s_j}/Σ.
    columns, k = 3000, 200_000
    anchor = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    queue = torch.zeros(columns, 2, dtype=torch.float64)
    queue[:, 0] = torch.randn(columns).round(decimals=1)
    allowed = torch.rand(1, columns) < 0.7
    scores = queue[:, 0].clone().masked_fill(~allowed[0], MASKED).tolist()
    support = sorted(band_by_definition(scores, ((0.9, 0.97),)))
    queue.requires_grad_()
    loss = hn.InfoNCE(
        1.0,
        in_batch=None,
        normalize=False,
        hardening=hn.Ring(0.9, 0.97),
        num_negatives=k,
        generator=torch.Generator().manual_seed(0),
        positive_in_denominator=False,
        backend=backend,
    )
    loss(anchor, anchor, negatives=queue, negative_mask=allowed).backward()
    assert queue.grad is not None
    share = queue.grad[:, 0] * (-queue.detach()[:, 0]).exp()
    times = share / share.sum() * k
    assert_close(times, times.round(), rtol=0, atol=1e-4)
    assert times.nonzero()[:, 0].tolist() == support
    assert chisquare(times[support].round().numpy()).pvalue > 1e-3


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_cosines_have_ranks_by_index_at_every_temperature(backend: str, dtype: torch.dtype) -> None:
    # Entries ±1 have exact inner products, many of them equal. Divided by t before they are added, most are not exact.
    anchors, positives, negatives = (torch.randint(2, (rows, 16)).to(dtype) * 2 - 1 for rows in (30, 30, 50))
    products = (anchors @ negatives.T).tolist()
    cut = 0
    for temperature in (0.07, 0.3, 0.9):
        loss = hn.InfoNCE(temperature, hn.Ring(0.3, 0.7), in_batch=None, reduction="none", backend=backend)
        z = anchors.clone().requires_grad_()
        found = loss(z, positives, negatives=negatives)
        found.sum().backward()
        exact = anchors.double().clone().requires_grad_()
        losses = []
        for i, row in enumerate(products):
            order = sorted(range(50), key=lambda j, row=row: (row[j], j))
            cut += (row[order[14]] == row[order[15]]) + (row[order[34]] == row[order[35]])
            unit = exact[i] / exact[i].norm()
            scores = torch.cat([positives[i : i + 1], negatives[order[15:35]]]).double() @ unit / (4 * temperature)
            losses.append(scores.logsumexp(0) - scores[0])
        truth = torch.stack(losses)
        truth.sum().backward()
        assert_close(found.double(), truth.detach(), rtol=1e-5, atol=1e-5)
        assert z.grad is not None
        assert exact.grad is not None
        assert_close(z.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)
    assert cut > 60  # edges between equal cosines

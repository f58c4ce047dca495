"""Each hardening alone: which candidates it keeps, against the plain definition."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import hardneg as hn
from hardneg.losses.hardening import Bound

BACKENDS = ("reference", "tiled")


def kept(
    hardening: hn.Hardening | tuple[hn.Hardening, ...], scores: list[float], positive: float, backend: str
) -> list[int]:
    """Which of the candidates with these scores get a gradient."""
    anchor = torch.ones(1, 1, dtype=torch.float64)
    negatives = torch.tensor(scores, dtype=torch.float64)[:, None].requires_grad_()
    loss = hn.InfoNCE(temperature=1.0, hardening=hardening, in_batch=None, normalize=False, backend=backend)
    loss(anchor, torch.tensor([[positive]], dtype=torch.float64), negatives=negatives).backward()
    assert negatives.grad is not None
    return negatives.grad[:, 0].nonzero()[:, 0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("backend", BACKENDS)
def test_threshold_keeps_scores_at_or_above_it(backend: str) -> None:
    assert kept(hn.Threshold(1.0), [-0.1, 0.0, 0.2, -3.0], 0.0, backend) == [1, 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_below_positive_keeps_scores_up_to_the_limit(backend: str) -> None:
    scores = [0.4, 0.95, 1.0, 1.1]
    assert kept(hn.BelowPositive(), scores, 1.0, backend) == [0, 1, 2]
    assert kept(hn.BelowPositive(margin=0.5), scores, 1.0, backend) == [0]
    assert kept(hn.BelowPositive(margin=-0.2), scores, 1.0, backend) == [0, 1, 2, 3]
    assert kept(hn.BelowPositive(relative=0.95), scores, 1.0, backend) == [0, 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_bands_intersect(backend: str) -> None:
    scores = [-1.0, -0.5, 0.0, 0.5, 1.0, 1.5]
    both = (hn.Threshold(0.9), hn.BelowPositive(margin=0.4))
    assert kept(both, scores, 1.0, backend) == [2, 3]
    assert kept((hn.Ring(0.5, 1.0), hn.Ring(0.0, 0.7)), scores, 1.0, backend) == [3]
    assert kept((hn.Ring(0.0, 0.3), hn.Ring(0.7, 1.0)), scores, 1.0, backend) == []


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    scores=st.lists(st.integers(-3, 3), min_size=1, max_size=12),
    lower=st.floats(0, 0.99),
    width=st.floats(0.001, 1),
)
def test_ring_keeps_the_ranks_of_its_definition(scores: list[int], lower: float, width: float, backend: str) -> None:
    upper = min(lower + width, 1.0)
    n = len(scores)
    start = int(lower * n + 1e-9)
    end = max(int(upper * n + 1e-9), start + 1)
    order = sorted(range(n), key=lambda j: (scores[j], j))  # ascending, ties by index
    expected = sorted(order[start:end])
    assert kept(hn.Ring(lower, upper), [float(s) for s in scores], 0.0, backend) == expected


def test_custom_log_weights_do_not_overflow_where_weights_would() -> None:
    z1, z2 = torch.randn(2, 6, 4, dtype=torch.float64)
    found = hn.InfoNCE(hardening=hn.Custom(lambda s: 1000 * s, log=True))(z1, z2)
    assert_close(found, hn.InfoNCE(hardening=hn.Exponential(1000.0))(z1, z2))


@dataclass(frozen=True)
class Above(hn.Hardening):
    """A user-defined hardening: keeps candidates that score above the positive."""

    needs_positive = True

    def bounds(self, positive: Tensor | None) -> tuple[Bound, Bound]:
        return positive, None


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_user_defined_hardening_runs_in_every_kernel(backend: str) -> None:
    assert kept(Above(), [0.4, 1.0, 1.1], 1.0, backend) == [1, 2]
    assert kept((Above(), hn.Exponential(1.0), hn.Ring(0.0, 0.7)), [0.4, 1.0, 1.1], 1.0, backend) == [1]


class LinearLogWeight(hn.Hardening):
    """User-defined general weights, not a dataclass."""

    def __init__(self, slope: hn.Schedule | float) -> None:
        self.slope = slope

    def log_weight(self, scores: Tensor) -> Tensor:
        return self.slope * scores  # type: ignore[operator]


def test_user_defined_general_weights_are_applied_and_scheduled() -> None:
    z1, z2 = torch.randn(2, 6, 4)
    assert_close(hn.InfoNCE(hardening=LinearLogWeight(3.0))(z1, z2), hn.InfoNCE(hardening=hn.Exponential(3.0))(z1, z2))
    loss = hn.InfoNCE(hardening=LinearLogWeight(hn.Linear(1.0, 3.0)))
    loss.load_state_dict(loss.state_dict())
    loss.set_progress(1.0)
    assert_close(loss(z1, z2), hn.InfoNCE(hardening=hn.Exponential(3.0))(z1, z2))
    with pytest.raises(ValueError, match="at most one tilt"):
        hn.InfoNCE(hardening=(LinearLogWeight(1.0), hn.Exponential(1.0)))


def test_custom_weights_are_computed_for_eligible_scores_only() -> None:
    # At the score of the anchor with itself the first weight overflows, and the second has an infinite derivative.
    z1, z2 = torch.eye(4, 8), torch.eye(4, 8).roll(4, 1)
    loss = hn.InfoNCE(temperature=0.05, hardening=hn.Custom(lambda s: (5 * s).exp()))
    assert_close(loss(z1, z2), hn.InfoNCE(temperature=0.05, hardening=hn.Exponential(5.0))(z1, z2))
    z1 = torch.randn(64, 8, requires_grad=True)
    z2 = z1.detach() + 0.1 * torch.randn(64, 8)
    hn.InfoNCE(temperature=1.0, hardening=hn.Custom(lambda s: 2 - (1 - s).clamp(min=0).sqrt()))(z1, z2).backward()
    assert z1.grad is not None
    assert torch.isfinite(z1.grad).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copy_of_the_positive_is_kept_at_margin_zero_and_dropped_above(backend: str) -> None:
    z1, z2 = torch.randn(2, 256, 128)
    for margin, kept_by in ((0.0, 256), (1e-3, 0)):
        loss = hn.InfoNCE(in_batch=None, temperature=0.05, hardening=hn.BelowPositive(margin), backend=backend)
        loss(z1, z2, negatives=z2[:, None].clone())
        assert loss.diagnostics()["without_candidates"] == 256 - kept_by


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_of_the_positive_is_kept_however_the_products_are_summed(backend: str, dtype: torch.dtype) -> None:
    # Among 512 shared negatives each anchor has its positive. All inner products are near 1, with large partial sums.
    z1, z2 = ((1 + 0.05 * torch.randn(512, 512)).to(dtype) for _ in range(2))
    loss = hn.InfoNCE(0.1, hn.BelowPositive(), in_batch=None, backend=backend)
    loss(z1, z2, negatives=z2, negative_mask=torch.eye(512, dtype=torch.bool))
    assert loss.diagnostics()["without_candidates"] == 0


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize("form", ["towers", "queue"])
def test_a_cosine_at_the_threshold_is_kept_at_every_temperature(backend: str, form: str) -> None:
    # Cosines of vectors of ±1 are exact multiples of 1/8, so that many are at the threshold.
    anchors, others = (torch.randint(2, (64, 16)).float() * 2 - 1 for _ in range(2))
    cosines = anchors @ others.T / 16
    if form == "towers":
        cosines.fill_diagonal_(-2.0)
    at_the_threshold = 0
    for cosine in (-0.375, 0.0, 0.125, 0.5):
        at_the_threshold += int((cosines == cosine).sum())
        counts = (cosines >= cosine).sum(dim=1)
        for temperature in (0.05, 0.07, 0.1, 0.3, 0.5):
            threshold = hn.Threshold(cosine=cosine)
            loss = hn.InfoNCE(temperature, threshold, in_batch="other" if form == "towers" else None, backend=backend)
            loss(anchors, others, negatives=None if form == "towers" else others)
            assert loss.diagnostics()["support"] == pytest.approx(counts[counts > 0].double().mean().item())
    assert at_the_threshold > 1000


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_long_row_of_the_batch_does_not_loosen_the_limit_of_other_anchors(backend: str) -> None:
    # Row 1 of the candidates scores 1.5 with anchor 0, whose positive scores 1, so that it is no negative of anchor 0.
    anchors, labels = torch.eye(6, 16), torch.tensor([0, 1, 2, 3, 4, 5])
    others = anchors.clone()
    others[1, :2] = torch.tensor([1.5, 0.0])
    several = {"z2": others[:, None].repeat(1, 2, 1)}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "other": ({"in_batch": "other"}, {"z2": others}),
        "both": ({"in_batch": "both"}, {"z2": others}),
        "several": ({}, several),
        "labels": ({"supervision": "full"}, {"z2": others, "labels": labels}),
        "given": ({"in_batch": None}, {"z2": anchors, "negatives": others}),
    }
    for name, (settings, tensors) in cases.items():
        loss = hn.InfoNCE(1.0, hn.BelowPositive(), normalize=False, reduction="none", backend=backend, **settings)
        values = []
        for length in (1.0, 1e6):
            long = {key: x.clone() for key, x in tensors.items()}
            long["negatives" if name == "given" else "z2"][5] *= length
            values.append(loss(anchors, **long)[0])
        assert_close(values[0], values[1], msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_length_of_the_anchor_or_of_a_masked_positive_does_not_loosen_its_limit(backend: str) -> None:
    # The positive of the long anchor 0 is short, so that its score is 1; that of the second view of instance 1 is 1.01.
    anchors, others = torch.eye(4, 8), torch.eye(4, 8)
    anchors[0], others[0], others[1, 0] = 1e4 * anchors[0], 1e-4 * others[0], 1.01e-4
    for settings in ({"in_batch": "both"}, {"in_batch": "other"}):
        loss = hn.InfoNCE(1.0, hn.BelowPositive(), normalize=False, reduction="none", backend=backend, **settings)
        loss(anchors, others)
        kept = loss.last_call()._records[0].support[0]
        assert kept == (5 if settings["in_batch"] == "both" else 2)  # all but those of instance 1 above the limit
    positives = torch.stack([torch.eye(3, 8), 1e4 * torch.eye(3, 8)], dim=1)
    mask = torch.tensor([[True, False]]).repeat(3, 1)
    negatives = 1.01 * torch.eye(3, 8)
    loss = hn.InfoNCE(1.0, hn.BelowPositive(), in_batch=None, normalize=False, backend=backend)
    loss(torch.eye(3, 8), positives, negatives=negatives, positive_mask=mask)
    assert loss.diagnostics()["support"] == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_copies_of_the_document_among_the_queries_are_kept_at_margin_zero(backend: str) -> None:
    # Queries are a thousand times shorter than documents; half of them are copies of documents.
    documents = torch.randn(32, 768)
    queries = 1e-3 * torch.randn(32, 768)
    queries[16:] = documents[:16]
    loss = hn.InfoNCE(
        1.0, hn.BelowPositive(), in_batch=("query_to_doc", "query_to_query"), normalize=False, reduction="none",
        backend=backend,
    )  # fmt: skip
    loss(queries, documents)
    scores = queries.double() @ torch.cat([documents, queries]).double().T
    best = (queries.double() * documents.double()).sum(dim=1)
    tolerance = 1e-5 * queries.double().norm(dim=1) * documents.double().norm(dim=1)
    own = torch.eye(32, dtype=torch.bool).repeat(1, 2)
    assert ((scores[:16, 48:].diagonal() - best[:16]).abs() <= tolerance[:16]).all()  # the copies
    expected = ((scores <= (best + tolerance)[:, None]) & ~own).sum(dim=1)
    assert loss.last_call()._records[0].support[:16].tolist() == expected[:16].tolist()


def test_a_large_positive_does_not_loosen_the_limit_of_other_given_scores() -> None:
    loss = hn.InfoNCE(1.0, hn.BelowPositive(), in_batch=None, reduction="none")
    candidates = torch.tensor([[0.5, 1.01], [0.0, 1.0]])
    for other in (0.0, -1e4, 1e6):
        found = loss.from_scores(torch.tensor([[1.0], [other]]), candidates)[0]
        assert_close(found, torch.tensor(math.log1p(math.exp(-0.5))))  # 1.01 is above the positive


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_cosine_of_exactly_zero_is_kept_by_a_threshold_of_zero(backend: str, dtype: torch.dtype) -> None:
    # Inner products of small integers are exact; those of the unit vectors are rounded.
    anchors, others = (torch.randint(-2, 3, (128, 128)).to(dtype) for _ in range(2))
    products = (anchors @ others.T).fill_diagonal_(-1.0)
    assert (products == 0).sum() > 200
    loss = hn.InfoNCE(0.5, hn.Threshold(1.0), in_batch="other", backend=backend)
    loss(anchors, others)
    assert loss.diagnostics()["support"] == pytest.approx((products >= 0).sum(dim=1).double().mean().item())


@pytest.mark.parametrize(
    "hardening",
    [
        hn.Uniform(),
        hn.Exponential(1 / 3),
        hn.Exponential(hn.Linear(0.0, 2.0)),
        hn.Threshold(0.7),
        hn.Threshold(score=-3.0),
        hn.Threshold(cosine=hn.Linear(-0.3, 0.0)),
        hn.Ring(1 - hn.RingAnneal(), 1 - 0.1 * hn.RingAnneal()),
        hn.BelowPositive(0.1),
        hn.BelowPositive(relative=0.95),
    ],
)
def test_evaluating_the_repr_of_a_hardening_gives_the_same_hardening(hardening: hn.Hardening) -> None:
    again = eval(repr(hardening), vars(hn))
    assert repr(again) == repr(hardening)
    for progress in (0.0, 0.3, 1.0):
        assert again.at(progress) == hardening.at(progress)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_threshold_on_cosines_is_one_on_scores_times_the_temperature(backend: str) -> None:
    z1, z2 = torch.randn(2, 12, 4)
    by_cosine = hn.InfoNCE(0.2, hn.Threshold(cosine=0.1), backend=backend)
    by_score = hn.InfoNCE(0.2, hn.Threshold(score=0.5), backend=backend)
    assert_close(by_cosine(z1, z2), by_score(z1, z2))
    assert by_cosine.diagnostics()["support"] < 22

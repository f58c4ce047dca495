"""The four losses and Assumption 1 equal a loop from the H-SCL paper; Lemma 1 holds where the assumption does."""

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from cases import check_reached
from hypothesis import given, settings
from hypothesis import strategies as st
from largest_tensor import LargestTensor
from torch import Tensor

import hardneg as hn
from hardneg.diagnostics import loss_ordering as module
from hardneg.insight import anchor_losses, loss_ordering


def inputs(seed: int, size: int = 14, classes: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(-1, classes, (size,), generator=generator)
    centers = torch.randn(classes + 1, 4, generator=generator, dtype=torch.float64)
    noise = torch.randn(2, size, 4, generator=generator, dtype=torch.float64)
    return centers[labels] + noise[0], centers[labels] + noise[1], labels


def by_loop(z1: Tensor, z2: Tensor, labels: Tensor, t: float, eta: object, q: float | None) -> list[dict[str, float]]:
    """The definitions of section III of the paper, one anchor and one candidate at a time."""
    unit = [[x / math.hypot(*row) for x in row] for z in (z1, z2) for row in z.tolist()]
    size, known = len(z1), labels.tolist()
    found = []
    for a, anchor in enumerate(unit):
        i = a % size
        if known[i] < 0:
            continue
        positive = sum(x * y for x, y in zip(anchor, unit[(a + size) % (2 * size)], strict=True)) / t
        others = [c for c in range(2 * size) if c % size != i and known[c % size] >= 0]
        score = {c: sum(x * y for x, y in zip(anchor, unit[c], strict=True)) / t for c in others}

        def expectation(kept: list[int], weight: object, score: dict[int, float] = score) -> float:
            total = sum(weight(score[c]) for c in kept)  # type: ignore[operator]
            if total == 0:
                return math.nan
            return sum(weight(score[c]) * math.exp(score[c]) for c in kept) / total  # type: ignore[operator]

        negatives = [c for c in others if known[c % size] != known[i]]
        collisions = [c for c in others if known[c % size] == known[i]]
        count = q or 2 * sum(label >= 0 for label in known) - 2

        def loss(mean: float, count: float = count, positive: float = positive) -> float:
            return math.log(1 + count * mean * math.exp(-positive))

        flat = lambda s: 1.0  # noqa: E731
        found.append({
            "ucl": loss(expectation(others, flat)), "h_ucl": loss(expectation(others, eta)),
            "scl": loss(expectation(negatives, flat)), "h_scl": loss(expectation(negatives, eta)),
            "collisions": expectation(collisions, eta), "negatives": expectation(negatives, eta),
        })  # fmt: skip
    return found


HARDENINGS = [
    (hn.Exponential(1.0), lambda s: math.exp(s)),
    (hn.Exponential(2.5), lambda s: math.exp(2.5 * s)),
    (hn.Threshold(math.exp(-0.1)), lambda s: float(math.exp(s) >= math.exp(-0.1))),
    (hn.Custom(lambda s: s.clamp(min=0)), lambda s: max(s, 0.0)),
]


@pytest.mark.parametrize(("hardening", "eta"), HARDENINGS)
@pytest.mark.parametrize("t", [0.5, 0.1])
@pytest.mark.parametrize("q", [None, 30.0])
def test_losses_and_both_sides_of_the_assumption_equal_a_loop(
    hardening: hn.Hardening, eta: object, t: float, q: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    z1, z2, labels = inputs(1, size=18)
    monkeypatch.setattr(module, "_ELEMENTS", 60)  # several tiles
    found = anchor_losses(z1, z2, labels, temperature=t, hardening=hardening, negative_count=q)
    expected = by_loop(z1, z2, labels, t, eta, q)
    assert len(expected) == len(found.ucl) > 20
    for number, values in enumerate(expected):
        assert bool(found.comparable[number]) == (not math.isnan(values["collisions"] + values["negatives"]))
        for name in ("ucl", "scl"):
            assert float(getattr(found, name)[number]) == pytest.approx(values[name], rel=1e-10)
        if found.defined[number]:
            assert float(found.h_scl[number]) == pytest.approx(values["h_scl"], rel=1e-10)
            assert float(found.h_ucl[number]) == pytest.approx(values["h_ucl"], rel=1e-10)
        if found.comparable[number]:
            holds = values["collisions"] >= values["negatives"]
            assert bool(found.assumption_1[number]) == holds
            assert float(found.collisions[number]) == pytest.approx(math.log(values["collisions"]), abs=1e-9)


def test_the_losses_are_those_of_the_library_with_the_same_positives_and_q() -> None:
    z1, z2, labels = inputs(2)
    labels = labels.clamp(min=0)
    q = 2.0 * len(z1) - 2
    found = anchor_losses(z1, z2, labels, temperature=0.3, hardening=hn.Exponential(2.0))
    for name, hardening, supervision in [
        ("ucl", hn.Uniform(), "none"), ("h_ucl", hn.Exponential(2.0), "none"),
        ("scl", hn.Uniform(), "negatives"), ("h_scl", hn.Exponential(2.0), "negatives"),
    ]:  # fmt: skip
        loss = hn.InfoNCE(0.3, hardening, supervision=supervision, negative_count=q, reduction="none")  # type: ignore[arg-type]
        expected = loss(z1, z2) if supervision == "none" else loss(z1, z2, labels=labels)
        torch.testing.assert_close(getattr(found, name), expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(range(len(HARDENINGS))), st.sampled_from([0.05, 0.5, 2.0]))
def _lemma_1_holds_where_the_assumption_does(seed: int, which: int, t: float) -> None:
    z1, z2, labels = inputs(seed, size=10, classes=2)
    found = anchor_losses(z1, z2, labels, temperature=t, hardening=HARDENINGS[which][0])
    holds, fails = found.assumption_1, found.comparable & ~found.assumption_1
    assert bool((found.h_scl <= found.h_ucl + 1e-9)[holds].all())
    # Without the assumption the order is the other one, because H-UCL is a mixture of the two.
    assert bool((found.h_scl >= found.h_ucl - 1e-9)[fails].all())
    REACHED["holds"] += int(holds.sum())
    REACHED["fails"] += int(fails.sum())


REACHED: Counter[str] = Counter()


def test_lemma_1_holds_where_the_assumption_does() -> None:
    REACHED.clear()
    _lemma_1_holds_where_the_assumption_does()
    check_reached(REACHED, {"holds": 100, "fails": 30})


def test_the_means_are_over_anchors_and_the_intervals_over_instances() -> None:
    z1, z2, labels = inputs(3, size=40)
    each, found = anchor_losses(z1, z2, labels), loss_ordering(z1, z2, labels)
    assert found is not None
    assert found.assumption_1 is not None
    assert found.anchors == int(each.defined.sum())
    for name in ("ucl", "h_ucl", "scl", "h_scl"):
        assert getattr(found, name).value == pytest.approx(float(getattr(each, name).mean()))
    assert found.gap.value == pytest.approx(found.h_ucl.value - found.h_scl.value)
    assert found.assumption_1.value == pytest.approx(float(each.assumption_1.sum()) / found.comparable)
    instances = each.ucl.view(2, -1).mean(dim=0)
    assert found.ucl.high - found.ucl.low == pytest.approx(
        2 * 2.03 * float(instances.std()) / math.sqrt(len(instances)), rel=0.02
    )


def test_chosen_anchors_have_the_losses_of_the_whole_batch() -> None:
    z1, z2, labels = inputs(4)
    labels = labels.clamp(min=0)
    whole, some = anchor_losses(z1, z2, labels), anchor_losses(z1, z2, labels, anchors=[3, 5])
    assert some.instances.tolist() == [3, 5, 3, 5]
    rows = torch.tensor([3, 5, 3 + 14, 5 + 14])
    torch.testing.assert_close(some.h_scl, whole.h_scl[rows])


def test_no_matrix_of_all_pairs_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ELEMENTS", 2000)
    z1, z2, labels = inputs(5, size=200)
    with LargestTensor() as watched:
        loss_ordering(z1, z2, labels)
    assert watched.elements <= 8 * 400  # the results; a matrix of pairs has 160,000


@pytest.mark.parametrize("labels", [[0] * 6, [-1] * 6, [0, 1, 2, 3, 4, 5], [0, -1, -1, -1, -1, -1]])
@pytest.mark.parametrize("kind", ["plain", "zeros", "equal", "huge"])
def test_degenerate_batches_give_finite_numbers_or_none(labels: list[int], kind: str) -> None:
    z = torch.randn(6, 3)
    z = {"plain": z, "zeros": torch.zeros(6, 3), "equal": torch.ones(6, 3), "huge": 1e30 * z}[kind]
    found = loss_ordering(z, z, torch.tensor(labels), temperature=0.01)
    if len({label for label in labels if label >= 0}) < 2:
        assert found is None
        return
    assert found is not None
    assert found.assumption_1 is None  # no two samples of a class
    assert all(math.isfinite(number) for estimate in found[:5] for number in estimate)  # type: ignore[union-attr]


def test_bad_arguments_raise_an_error_that_names_the_fix() -> None:
    z, y = torch.ones(3, 2), [0, 1, 1]
    for arguments, options, message in [
        ((torch.full((3, 2), math.nan), z, y), {}, "z1 holds NaN or inf"),
        ((z, z[:2], y), {}, "pair the rows"),
        ((z, z, y[:2]), {}, "one per row of z1"),
        ((z, z, y), {"temperature": 0}, "temperature must be > 0"),
        ((z, z, y), {"hardening": hn.Ring(0.5, 1.0)}, "not a function of the score alone"),
        ((z, z, y), {"hardening": hn.BelowPositive()}, "not a function of the score alone"),
        ((z, z, y), {"hardening": hn.Exponential(hn.Linear(0.0, 1.0))}, "has a schedule"),
        ((z, z, y), {"hardening": 1.0}, "hardening must be a Hardening"),
        ((z, z, y), {"negative_count": 0}, "negative_count must be > 0"),
        ((z, z, y), {"anchors": [3]}, "indices from 0 to 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            loss_ordering(*arguments, **options)  # type: ignore[arg-type]


def test_the_order_of_harder_tilts_is_monotone() -> None:
    z1, z2, labels = inputs(6, size=60)
    betas = [loss_ordering(z1, z2, labels, hardening=hn.Exponential(beta)) for beta in (0.0, 1.0, 4.0)]
    assert betas[0] is not None
    assert betas[0].ucl.value == pytest.approx(betas[0].h_ucl.value)
    for one, other in pairwise(betas):
        assert one is not None
        assert other is not None
        assert one.h_ucl.value < other.h_ucl.value

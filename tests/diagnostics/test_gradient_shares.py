"""Gradient shares equal finite differences of a loss written from METHODS' formula, one score at a time."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hardneg as hn
from hardneg.insight import gradient_shares

B, D = 6, 4


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z1, z2 = torch.randn(2, B, D, generator=generator, dtype=torch.float64)
    return z1, z1 + 0.7 * z2, torch.tensor([0, 1, 0, 2, 1, 0])


def finite_differences(value: Callable[[dict[int, float]], float], scores: dict[int, float]) -> dict[int, float]:
    step = 1e-5
    return {
        j: (value({**scores, j: s + step}) - value({**scores, j: s - step})) / (2 * step) for j, s in scores.items()
    }


CASES: dict[str, dict[str, Any]] = {
    "uniform": {}, "tilted": {"beta": 1.0}, "detached": {"beta": 2.0, "detached": True},
    "debiased": {"beta": 1.0, "prior": 0.1},
    "threshold": {"lower": -0.2}, "decoupled": {"decoupled": True}, "labels": {"beta": 1.5, "labels": True},
    "unnormalized": {"beta": 1.0, "unnormalized": True, "detached": True},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("anchor", [1, B + 3])
def test_shares_equal_finite_differences_of_the_formula(name: str, anchor: int) -> None:
    case, t = CASES[name], 0.5
    beta, prior, lower = case.get("beta", 0.0), case.get("prior", 0.0), case.get("lower", -math.inf)
    z1, z2, labels = batch()
    unit = torch.nn.functional.normalize(torch.cat([z1, z2]), dim=1)
    score = {j: float(unit[anchor] @ unit[j]) / t for j in range(2 * B)}
    positive = score[(anchor + B) % (2 * B)]
    negatives = [j for j in score if j % B != anchor % B and score[j] >= lower]
    if case.get("labels"):
        negatives = [j for j in negatives if labels[j % B] != labels[anchor % B]]
    start = {j: score[j] for j in negatives}

    def value(scores: dict[int, float]) -> float:
        weight = {j: math.exp(beta * (start[j] if case.get("detached") else s)) for j, s in scores.items()}
        total = len(scores) if case.get("unnormalized") else sum(weight.values())
        mean = sum(weight[j] * math.exp(s) for j, s in scores.items()) / total
        estimate = (mean - prior * math.exp(positive)) / (1 - prior)
        assert estimate > math.exp(-1 / t)  # not floored
        total_score = math.log(len(scores) * estimate) - positive
        return total_score if case.get("decoupled") else math.log(1 + math.exp(total_score))

    expected = finite_differences(value, start)
    size = sum(map(abs, expected.values()))
    hardening: tuple[hn.Hardening, ...] = (hn.Exponential(beta),) if beta else ()
    if lower > -math.inf:
        hardening = (*hardening, hn.Threshold(score=lower))
    loss = hn.InfoNCE(
        t, hardening or hn.Uniform(), class_prior=prior, supervision="negatives" if case.get("labels") else "none",
        positive_in_denominator=not case.get("decoupled"), grad_through_weights=not case.get("detached"),
        normalize_weights=not case.get("unnormalized"),
    )  # fmt: skip
    found = gradient_shares(loss, z1, z2, [anchor], **({"labels": labels} if case.get("labels") else {}))
    assert found.signed.shape == (1, 2 * B)
    for j in range(2 * B):
        assert float(found.signed[0, j]) == pytest.approx(expected.get(j, 0.0) / size, abs=1e-7)
    assert float(found.shares.sum()) == pytest.approx(1)


def test_a_tilt_pulls_easy_negatives_closer() -> None:
    z1, z2, _ = batch()
    signs = gradient_shares(hn.InfoNCE(0.5, hn.Exponential(4.0)), z1, z2).signed
    assert bool((signs < -1e-3).any())
    assert bool((gradient_shares(hn.InfoNCE(0.5), z1, z2).signed >= 0).all())


def test_given_negatives_queries_and_both_directions_have_their_columns() -> None:
    z1, z2, _ = batch()
    queue = torch.randn(9, D, dtype=torch.float64)
    assert gradient_shares(hn.moco(), z1, z2, negatives=queue).shares.shape == (B, 9)
    assert gradient_shares(hn.clip(), z1, z2).shares.shape == (2 * B, B)
    per_anchor = torch.randn(B, 3, D, dtype=torch.float64)
    found = gradient_shares(hn.InfoNCE(in_batch=None), z1, z2, [4], negatives=per_anchor)
    scores = (torch.nn.functional.normalize(per_anchor[4], dim=1) @ torch.nn.functional.normalize(z1[4], dim=0)) / 0.5
    torch.testing.assert_close(found.shares[0], scores.softmax(dim=0))


def test_drawn_negatives_share_the_gradient_and_the_next_draw_stays() -> None:
    z1, z2, _ = batch()
    loss = hn.InfoNCE(num_negatives=2, generator=torch.Generator().manual_seed(0))
    before = loss.draw_state.clone()
    found = gradient_shares(loss, z1, z2)
    assert bool(((found.shares > 0).sum(dim=1) <= 2).all())
    assert loss.draw_state.tolist() == before.tolist()


def test_floored_anchors_have_no_gradient() -> None:
    z = torch.eye(4, dtype=torch.float64)
    loss = hn.InfoNCE(0.1, class_prior=0.5)
    with pytest.warns(UserWarning, match="floored"):
        found = gradient_shares(loss, z, z)
    assert not bool(found.active.any())
    assert found.of_largest(3) is None


def test_shares_of_the_largest_and_of_chosen_candidates() -> None:
    z1, z2, labels = batch()
    found = gradient_shares(hn.hcl(tau_plus=0.0), z1, z2)
    ranked = found.shares.sort(dim=1, descending=True).values
    largest = found.of_largest(3)
    assert largest is not None
    assert largest.value == pytest.approx(float(ranked[:, :3].sum(dim=1).mean()))
    whole = found.of_largest(1000)
    assert whole is not None
    assert whole.value == pytest.approx(1)
    same = labels.repeat(2)[:, None] == labels.repeat(2)
    parts = [found.of(same), found.of(~same)]
    assert sum(part.value for part in parts if part is not None) == pytest.approx(1)


def test_settings_of_another_form_are_refused() -> None:
    z1, z2, _ = batch()
    for loss, message in [
        (hn.InfoNCE(class_prior=0.1, debias="exact"), "debias='exact'"),
        (hn.InfoNCE(hardening={"batch": hn.Exponential(1.0)}), "by source"),
        (hn.JSD(), "must be an InfoNCE, got JSD"),
    ]:
        with pytest.raises(ValueError, match=message):
            gradient_shares(loss, z1, z2)  # type: ignore[arg-type]
    for anchors, message in [([], "anchors is empty"), ([2 * B], "indices from 0 to 11")]:
        with pytest.raises(ValueError, match=message):
            gradient_shares(hn.InfoNCE(), z1, z2, torch.tensor(anchors, dtype=torch.int64))
    with pytest.raises(ValueError, match="NaN or inf"):
        gradient_shares(hn.InfoNCE(), z1 * math.nan, z2)


def test_half_precision_embeddings_are_scored_in_float32() -> None:
    z1, z2, _ = batch()
    half = [z.bfloat16() for z in (z1, z2)]
    found = gradient_shares(hn.hcl(tau_plus=0.0), *half)
    exact = gradient_shares(hn.hcl(tau_plus=0.0), *(z.double() for z in half))
    torch.testing.assert_close(found.shares.double(), exact.shares, rtol=1e-4, atol=1e-6)


def test_exact_debiasing_without_a_prior_is_allowed() -> None:
    z1, z2, _ = batch()
    found = gradient_shares(hn.InfoNCE(debias="exact"), z1, z2)
    torch.testing.assert_close(found.shares, gradient_shares(hn.InfoNCE(), z1, z2).shares)

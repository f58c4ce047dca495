"""CNCE: closed forms, loops, and verdicts that follow the numbers."""

import math

import numpy as np
import pytest
import torch
from numpy.polynomial.hermite_e import hermegauss

from hardneg.theory import cnce


def test_information_of_gaussians_agrees_with_quadrature() -> None:
    nodes, weights = hermegauss(60)
    weights = weights / weights.sum()
    for rho in (-0.6, 0.2, 0.5):
        u = nodes[:, None]
        v = rho * u + math.sqrt(1 - rho**2) * nodes[None]  # given u
        log_ratio = (rho * u * v - rho**2 * (u**2 + v**2) / 2) / (1 - rho**2) - 0.5 * math.log(1 - rho**2)
        assert (weights[:, None] * weights * log_ratio).sum() == pytest.approx(cnce.gaussian_information(rho), abs=1e-9)


def test_table_of_gaussians_has_uniform_marginals_and_nearly_the_information() -> None:
    _, joint = cnce.gaussian_table(200)
    torch.testing.assert_close(joint.sum(0), joint.sum(1))
    assert cnce.information(joint) == pytest.approx(cnce.gaussian_information(), rel=0.003)
    assert cnce.information(cnce.gaussian_table(50, 0.0)[1]) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("lower", "upper"), [(0.0, 1.0), (0.25, 1.0), (0.0, 0.9), (0.5, 0.75)])
def test_conditional_estimate_is_the_papers_formula(lower: float, upper: float) -> None:
    joint = cnce.gaussian_table(20)[1]
    scores = torch.randn(20, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = 0.0
    for u in range(20):
        band = sorted(scores[u].tolist())[int(lower * 20) : int(upper * 20)]
        normalizer = math.log(sum(map(math.exp, band)) / len(band))
        expected += sum(float(joint[u, v]) * (float(scores[u, v]) - normalizer) for v in range(20))
    assert float(cnce.conditional_estimate(scores, joint, lower, upper)) == pytest.approx(expected, abs=1e-12)


def test_nce_with_the_optimal_critic_is_the_information() -> None:
    joint = cnce.gaussian_table(60)[1]
    value = cnce.conditional_estimate((joint * 60**2).log(), joint)
    assert float(value) == pytest.approx(cnce.information(joint), abs=1e-12)


def test_a_trained_critic_is_a_maximum() -> None:
    points, joint = cnce.gaussian_table(40)
    value, scores = cnce.train_critic(points, joint, 0.1, 1.0, 2)
    assert value > 0
    for seed in range(20):  # no direction of the critics' polynomials improves it
        random = np.random.default_rng(seed).normal(size=(3, 2))
        step = sum(random[i, j - 1] * points[:, None] ** i * points[None] ** j for i in range(3) for j in (1, 2))
        assert float(cnce.conditional_estimate(scores + 1e-3 * step, joint, 0.1)) <= value + 1e-12


def test_enumeration_agrees_with_the_losss_own_draws() -> None:
    deviations = [cnce.theorem_3_1(20, seed).numbers["library_deviation_in_standard_errors"] for seed in range(12)]
    assert max(map(abs, deviations)) < 4.5
    assert np.std(deviations) > 0.3  # of the order of the error, not identical


def test_theorem_3_1_needs_its_condition() -> None:
    assert cnce.theorem_3_1(300).verdict == "holds"
    mutated = cnce.theorem_3_1(300, condition=lambda values, mean: values < mean)
    assert mutated.verdict == "does not hold as printed"
    assert mutated.numbers["violations"] > 200


def test_verdict_on_table_5_follows_the_information(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"lower": (0.1,), "atoms": 30, "degree": 1}
    assert cnce.table_5(**arguments).verdict == "holds"  # type: ignore[arg-type]
    monkeypatch.setattr(cnce, "information", lambda joint: 0.001)
    assert cnce.table_5(**arguments).verdict == "does not hold as printed"  # type: ignore[arg-type]


def test_a_band_is_refuted_only_if_it_leaves_out_high_scores() -> None:
    assert cnce.ring_from_zero((1.0,), 30).verdict == "holds"
    found = cnce.ring_from_zero((0.9,), 60)
    assert found.verdict == "does not hold as printed"
    assert found.numbers["optimal_critic_90"] > 2 * found.numbers["information"]


def test_theorem_3_2_needs_its_condition() -> None:
    found = cnce.theorem_3_2(2000)
    assert found.verdict == "holds"
    assert found.numbers["one negative: condition"] > 500
    assert found.numbers["one negative: larger without condition"] > 0
    assert cnce.theorem_3_2(2000, condition=lambda q, other: q >= 0).verdict == "does not hold as printed"


@pytest.mark.parametrize("call", [lambda: cnce.theorem_3_1(0), lambda: cnce.theorem_3_2(-1),
                                  lambda: cnce.gaussian_table(3), lambda: cnce.gaussian_table(10, 1.0)])  # fmt: skip
def test_bad_arguments_are_named(call: object) -> None:
    with pytest.raises(ValueError, match=r"(trials|atoms|correlation) must be .*, got"):
        call()  # type: ignore[operator]

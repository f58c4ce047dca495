"""HCL: the limits against direct computation, and verdicts that follow the numbers."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, optimize

from hardneg.losses.hardening import Exponential
from hardneg.losses.infonce import InfoNCE
from hardneg.theory import hcl, packings


def labeled(seed: int, samples: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    z, positive = torch.nn.functional.normalize(
        torch.randn(2, samples, 3, generator=draws, dtype=torch.float64), dim=2
    ).unbind()
    return z, positive, torch.arange(samples) % 3


def test_tilted_loss_is_the_papers_formula() -> None:
    z, positive, labels = labeled(0)
    beta, temperature, q = 1.7, 0.4, 8.0
    found = hcl.tilted_loss(z, positive, labels, beta, temperature)
    for i in range(len(z)):
        others = [float(z[i] @ z[j]) / temperature for j in range(len(z)) if labels[j] != labels[i]]
        expected = sum(math.exp((beta + 1) * s) for s in others) / sum(math.exp(beta * s) for s in others)
        p = math.exp(float(z[i] @ positive[i]) / temperature)
        assert float(found[i]) == pytest.approx(-math.log(p / (p + q * expected)), rel=1e-12)


def test_no_distribution_exceeds_the_worst_case() -> None:
    z, positive, labels = labeled(1)
    worst = hcl.worst_case_loss(z, positive, labels, 0.5)
    for beta in (0.0, 1.0, 10.0):
        assert (hcl.tilted_loss(z, positive, labels, beta, 0.5) <= worst + 1e-12).all()
    torch.testing.assert_close(hcl.tilted_loss(z, positive, labels, 1e6, 0.5), worst)


def test_rate_on_the_sphere_agrees_with_quadrature() -> None:
    found = hcl.proposition_3((0.0, 3.0, 400.0), points=4000)
    for beta, row in zip((0.0, 3.0), found.rows, strict=False):
        means = [integrate.quad(lambda s, k=k: math.exp(k * s) / 2, -1, 1)[0] for k in (beta + 1, beta)]
        assert row[4] == pytest.approx(1 - math.log(means[0] / means[1]), abs=1e-9)
        assert row[3] == pytest.approx(row[4], rel=1e-3)  # the lattice
    assert found.rows[-1][4] * 400 == pytest.approx(1, rel=0.01)


def test_proposition_3_is_refuted_by_a_wrong_limit() -> None:
    assert hcl.proposition_3((0, 10, 1000), points=500).verdict == "holds"
    wrong = hcl.proposition_3((0, 10, 1000), points=500, limit=lambda *a: 1.01 * hcl.worst_case_loss(*a))
    assert wrong.verdict == "does not hold as printed"


def test_theorem_4_is_judged_by_the_loss() -> None:
    found = hcl.theorem_4(((4, 3), (5, 3)), starts=4)
    assert found.verdict == "holds with a correction"
    assert found.numbers["average_5_3"] == pytest.approx(2.025, abs=1e-6)
    assert hcl.theorem_4(((4, 3),), starts=3).verdict == "holds"
    wrong = hcl.theorem_4(((5, 3),), starts=4, objective=packings.smallest_distance)
    assert wrong.verdict == "does not hold as printed"


def test_derived_bound_is_the_least_of_the_proofs() -> None:
    excess, separation, classes, t = 0.01, 30.0, 4, 0.4
    root = math.sqrt(separation - 2 * classes * (1 + 1 / t) * math.sqrt(excess))
    least = optimize.minimize_scalar(
        lambda d: 2 * excess / d**2 + 2 * excess / (root - d) ** 2, bounds=(1e-3, root - 1e-3)
    )
    assert hcl.derived_bound(excess, separation, classes, t) == pytest.approx(least.fun, rel=1e-6)
    assert hcl.derived_bound(1.0, 1.0, 4, 1.0) == math.inf


def test_excess_agrees_with_the_losss_own_value_on_samples() -> None:
    dim, t, misplaced = 4, 0.5, 0.05
    classes, copies = 2 * dim - 1, 20  # one of twenty samples of class 0 is misplaced
    best = packings.average_nearest(packings.best_packing(classes, dim, True, 6))
    vertices = np.concatenate([np.eye(dim), -np.eye(dim)[:-1]])
    points = np.repeat(vertices, copies, axis=0)
    points[0] = -np.eye(dim)[-1]
    labels = torch.arange(classes).repeat_interleave(copies)
    z = torch.from_numpy(points)
    loss = InfoNCE(t**2, Exponential(1e7), supervision="negatives", in_batch=None, negative_count=1.0,
                   positive_in_denominator=False, backend="reference")  # fmt: skip
    positives = z.view(classes, copies, dim).repeat_interleave(copies, dim=0)  # all samples of the class, (n, 20, d)
    value = float(loss(z, positives, labels=labels, negatives=z, negative_labels=labels))
    assert value + best / 2 / t**2 == pytest.approx(hcl._excess(dim, misplaced, t, best), abs=1e-6)


def test_theorem_5_is_judged_by_both_bounds() -> None:
    found = hcl.theorem_5((5,), starts=2)
    assert found.verdict == "holds with a correction"
    assert found.numbers["embeddings"] > 100
    assert found.numbers["above_printed"] > 0
    assert found.rows[0][4] > found.rows[0][5]  # error above the printed bound
    wrong = hcl.theorem_5((5,), starts=2, derived=lambda *arguments: hcl.derived_bound(*arguments) / 1000)
    assert wrong.verdict == "does not hold as printed"

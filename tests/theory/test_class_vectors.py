"""The population loss against enumeration and draws, its minimizers, and verdicts that follow the numbers."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from hardneg.theory import class_vectors

PRIOR = (0.5, 0.3, 0.2)


def vectors(seed: int, classes: int = 3, dim: int = 2) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(classes, dim, generator=draws, dtype=torch.float64), dim=1)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_counts_have_the_multinomial_distribution(k: int) -> None:
    drawn = class_vectors.negatives(PRIOR, k)
    expected = stats.multinomial.pmf(drawn.counts.numpy(), k, PRIOR)
    np.testing.assert_allclose(drawn.probabilities, expected, rtol=1e-12)
    assert float(drawn.probabilities.sum()) == pytest.approx(1)
    assert len({tuple(row) for row in drawn.counts.tolist()}) == math.comb(k + 2, 2)


@pytest.mark.parametrize("k", [1, 3])
def test_population_loss_agrees_with_a_loop_over_all_draws(k: int) -> None:
    v = vectors(0)
    expected = 0.0
    for anchor in range(3):
        for draw in itertools.product(range(3), repeat=k):
            probability = PRIOR[anchor] * math.prod(PRIOR[c] for c in draw)
            terms = (math.exp(float(v[anchor] @ (v[c] - v[anchor]))) for c in draw)
            expected += probability * math.log(1 + sum(terms))
    found = class_vectors.population_loss(v, PRIOR, class_vectors.negatives(PRIOR, k))
    assert float(found) == pytest.approx(expected, rel=1e-12)
    # One sample per class, equally likely: the loss of samples is that of classes.
    thirds = class_vectors.negatives((1 / 3,) * 3, k)
    samples = class_vectors.sample_loss(v, torch.arange(3), thirds)
    assert float(samples) == pytest.approx(float(class_vectors.population_loss(v, (1 / 3,) * 3, thirds)), rel=1e-12)


@pytest.mark.parametrize("k", [1, 8, 64])
def test_population_loss_agrees_with_the_losss_own_draws(k: int) -> None:
    v = vectors(1)
    exact = float(class_vectors.population_loss(v, PRIOR, class_vectors.negatives(PRIOR, k)))
    mean, error = class_vectors.sampled_loss(v, PRIOR, k, 6000, 0)
    assert abs(mean - exact) < 4 * error


def test_sampled_outcomes_approximate_the_exact_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    v = vectors(2)
    exact = class_vectors.population_loss(v, PRIOR, class_vectors.negatives(PRIOR, 6))
    monkeypatch.setattr(class_vectors, "_EXACT", 3)
    drawn = class_vectors.negatives(PRIOR, 6)
    assert not drawn.exact
    assert float(class_vectors.population_loss(v, PRIOR, drawn)) == pytest.approx(float(exact), rel=0.01)


def test_gradient_of_the_loss_agrees_with_finite_differences() -> None:
    drawn = class_vectors.negatives(PRIOR, 4)
    torch.autograd.gradcheck(lambda x: class_vectors.population_loss(x, PRIOR, drawn), vectors(3).requires_grad_())


def test_minimizers_are_stationary_and_not_beaten_by_random_vectors() -> None:
    v, value = class_vectors.minimizer(PRIOR, 4, 2)
    drawn = class_vectors.negatives(PRIOR, 4)
    for seed in range(200):
        assert float(class_vectors.population_loss(vectors(seed), PRIOR, drawn)) >= value
    again = class_vectors.minimizer(PRIOR, 4, 2, 1, first=[v])[1]
    assert again <= value + 1e-12
    free = v.clone().requires_grad_()
    gradient = torch.autograd.grad(class_vectors.population_loss(free, PRIOR, drawn), free)[0]
    assert float((gradient - (gradient * v).sum(1, keepdim=True) * v).abs().max()) < 1e-6  # along the sphere


def test_downstream_loss_agrees_with_a_search_over_the_circle() -> None:
    v, prior = vectors(5, classes=2), (0.7, 0.3)
    angles = np.linspace(0, 2 * np.pi, 400)
    first, second = np.meshgrid(angles, angles, indexing="ij")
    w = np.stack([np.cos(first), np.sin(first)], -1), np.stack([np.cos(second), np.sin(second)], -1)
    x = v.numpy()
    losses = 0.7 * np.log1p(np.exp((w[1] - w[0]) @ x[0])) + 0.3 * np.log1p(np.exp((w[0] - w[1]) @ x[1]))
    assert class_vectors.downstream_loss(v, prior) == pytest.approx(losses.min(), abs=1e-4)


def test_the_simplex_has_its_known_losses() -> None:
    simplex = torch.tensor(
        [[math.cos(a), math.sin(a)] for a in (0, 2 * math.pi / 3, 4 * math.pi / 3)], dtype=torch.float64
    )
    assert class_vectors.simplex_deviation(simplex) < 1e-12
    assert class_vectors.downstream_loss(simplex, (1 / 3,) * 3) == pytest.approx(math.log(1 + 2 * math.exp(-1.5)))


def test_lemma_1_is_judged_by_the_minimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert class_vectors.lemma_1(10, (1, 2)).verdict == "holds"
    monkeypatch.setattr(class_vectors, "sample_loss", lambda points, labels, drawn: (points @ points.T).sum())
    assert class_vectors.lemma_1(10, (1,)).verdict == "does not hold as printed"


def test_balanced_classes_are_judged_by_the_gram_matrix() -> None:
    assert class_vectors.balanced_classes(((3, 2), (4, 3)), (1, 6)).verdict == "holds"
    wrong = class_vectors.balanced_classes(
        ((3, 2),), (1,), deviation=lambda v: class_vectors.simplex_deviation(v) + 0.01
    )
    assert wrong.verdict == "does not hold as printed"
    # d < C − 1: there is no simplex of four vectors in the plane.
    assert class_vectors.balanced_classes(((4, 2),), (1,)).verdict == "does not hold as printed"


def test_the_conjecture_is_refuted_by_a_loss_that_rises() -> None:
    calls = itertools.count()

    def rising(v: Tensor, prior: Sequence[float]) -> float:
        return class_vectors.downstream_loss(v, prior) + 0.01 * next(calls)

    given = {"priors": (PRIOR,), "random": 0, "ks": (1, 4)}
    assert class_vectors.unbalanced_classes(**given).verdict == "not refuted"  # type: ignore[arg-type]
    assert class_vectors.unbalanced_classes(**given, downstream=rising).verdict == "does not hold as printed"  # type: ignore[arg-type]


@pytest.mark.parametrize("prior", [(1.0,), (0.5, 0.6), (1.5, -0.5), (1.0, 0.0)])
def test_bad_priors_are_named(prior: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="prior must be two or more probabilities > 0 with sum 1, got"):
        class_vectors.negatives(prior, 2)
    with pytest.raises(ValueError, match="k must be a whole number ≥ 1, got 0"):
        class_vectors.negatives(PRIOR, 0)

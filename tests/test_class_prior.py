"""The estimators of the class prior are right where their assumption holds: positives are like same-class pairs."""

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch


@pytest.fixture
def class_prior(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("class_prior")


@pytest.mark.parametrize("prior", [0.55, 0.1, 0.02])
def test_estimators_find_the_share_of_a_mixture_of_known_components(class_prior: ModuleType, prior: float) -> None:
    draws = np.random.default_rng(0)
    positive = draws.normal(0.8, 0.1, 5000)
    same = draws.random(100_000) < prior
    other = np.where(same, draws.normal(0.8, 0.1, 100_000), draws.normal(0.0, 0.15, 100_000))
    for name, estimate in class_prior.ESTIMATORS.items():
        assert estimate(positive, other) == pytest.approx(same.mean(), rel=0.3), name


def test_positives_that_are_closer_than_the_class_lower_the_ratio(class_prior: ModuleType) -> None:
    draws = np.random.default_rng(0)
    other = np.where(draws.random(50_000) < 0.1, draws.normal(0.5, 0.1, 50_000), draws.normal(0.0, 0.15, 50_000))
    assert class_prior.best_bin(draws.normal(0.95, 0.02, 5000), other) < 0.01


def test_the_true_share_counts_pairs_of_different_samples(class_prior: ModuleType) -> None:
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    equal = [labels[i] == labels[j] for i in range(6) for j in range(6) if i != j]
    assert class_prior.true_share(labels) == pytest.approx(sum(map(int, equal)) / 30)

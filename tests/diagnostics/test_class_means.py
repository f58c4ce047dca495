"""The geometry of class means equals plain loops and the closed form of a simplex."""

import math
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
import torch
from cases import check_reached
from hypothesis import given, settings
from hypothesis import strategies as st
from largest_tensor import LargestTensor
from torch import Tensor
from torch.testing import assert_close

import hardneg.matmul as products_module
from hardneg.insight import class_means


def by_loop(features: Tensor, labels: Tensor, centered: bool) -> dict[str, object]:
    """Spreads and cosines by loops over samples and pairs in numpy."""
    unit = [row / np.linalg.norm(row) if np.linalg.norm(row) else row for row in features.double().numpy()]
    classes = sorted({int(label) for label in labels if label >= 0})
    members = {c: [u for u, label in zip(unit, labels.tolist(), strict=True) if label == c] for c in classes}
    means = {c: np.mean(rows, axis=0) for c, rows in members.items()}
    spreads = [np.mean([np.sum((u - means[c]) ** 2) for u in members[c]]) for c in classes]
    total = np.concatenate([[np.sum((u - means[c]) ** 2) for u in members[c]] for c in classes])
    center = np.mean(list(means.values()), axis=0) if centered else 0.0
    shifted = {c: mean - center for c, mean in means.items()}
    cosines = []
    for one, other in combinations(classes, 2):
        lengths = np.linalg.norm(shifted[one]) * np.linalg.norm(shifted[other])
        cosines.append(float(shifted[one] @ shifted[other] / lengths) if lengths > 1e-12 else 0.0)
    return {"spreads": spreads, "spread": total.mean(), "cosines": cosines, "classes": classes}


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("tile", [None, 7])
def test_spreads_and_cosines_equal_a_loop(centered: bool, tile: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(-1, 6, (40,), generator=generator)
    if tile is not None:
        monkeypatch.setattr(products_module, "TILE", tile)
    found, expected = class_means(features, labels, centered=centered), by_loop(features, labels, centered)
    cosines = np.array(expected["cosines"])
    assert found.labels.tolist() == expected["classes"]
    assert found.spreads.tolist() == pytest.approx(expected["spreads"])
    assert found.spread.value == pytest.approx(expected["spread"])
    assert found.cosine == pytest.approx(cosines.mean())
    assert found.deviation == pytest.approx(np.abs(cosines + 1 / 5).mean())
    assert found.nearest == pytest.approx(cosines.max())
    upper = found.cosines()[torch.triu_indices(6, 6, offset=1).unbind()]
    assert upper.tolist() == pytest.approx(expected["cosines"])


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_a_simplex_has_no_deviation(classes: int) -> None:
    simplex = torch.eye(classes, dtype=torch.float64) - 1 / classes
    found = class_means(simplex.repeat(4, 1), torch.arange(classes).repeat(4))
    assert found.target == pytest.approx(-1 / (classes - 1))
    assert found.deviation == pytest.approx(0, abs=1e-12)
    assert found.spread == pytest.approx((0, 0, 0), abs=1e-12)


def test_centering_shows_the_simplex_within_positive_features() -> None:
    features = 5 + torch.eye(4, dtype=torch.float64)
    plain, centered = (class_means(features, torch.arange(4), centered=each) for each in (False, True))
    assert plain.cosine is not None
    assert plain.cosine > 0.9
    assert centered.deviation == pytest.approx(0, abs=1e-9)


def test_no_matrix_of_all_samples_or_classes_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products_module, "TILE", 1000)
    features, labels = torch.randn(600, 3), torch.arange(600) % 300
    with LargestTensor() as watched:
        class_means(features, labels)
    assert watched.elements <= 1800  # the features; 300 classes have 90,000 pairs


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 4), st.sampled_from(["plain", "zeros", "equal"]))
def _degenerate_features_give_finite_numbers(seed: int, size: int, classes: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(size, 3, generator=generator) * 10.0 ** float(
        torch.randint(-30, 30, (), generator=generator)
    )
    if kind != "plain":
        features = torch.zeros(size, 3) if kind == "zeros" else features[:1].repeat(size, 1)
    labels = torch.randint(-1, classes, (size,), generator=generator)
    if not bool((labels >= 0).any()):
        with pytest.raises(ValueError, match="all are −1"):
            class_means(features, labels)
        REACHED["unknown"] += 1
        return
    found = class_means(features, labels, population=size + 5)
    assert found.directions.isfinite().all()
    assert 0 <= found.spread.value <= 1 + 1e-9
    several = len(found.labels) > 1
    assert all((number is None) != several for number in (found.cosine, found.target, found.deviation, found.nearest))
    if several:
        assert all(math.isfinite(number) for number in (found.cosine, found.deviation, found.nearest))  # type: ignore[arg-type]
    REACHED[kind] += 1
    REACHED["several"] += several
    REACHED["one class"] += not several


REACHED: Counter[str] = Counter()


def test_degenerate_features_give_finite_numbers() -> None:
    REACHED.clear()
    _degenerate_features_give_finite_numbers()
    check_reached(REACHED, {"plain": 5, "zeros": 5, "equal": 5, "several": 10, "one class": 5})


def test_bad_arguments_raise_an_error_that_names_the_fix() -> None:
    z = torch.ones(3, 2)
    for call, message in [
        (lambda: class_means(torch.full((3, 2), torch.nan), [0, 1, 2]), "NaN or inf"),
        (lambda: class_means(z, [0, 1]), "one per row of features"),
        (lambda: class_means(z, [0, 1, 2], centered=1), "centered must be True or False"),
        (lambda: class_means(z, [0, 1, 2], population=2), "population=2 is less than"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()  # type: ignore[no-untyped-call]


def test_half_precision_features_are_computed_in_float64() -> None:
    features, labels = torch.randn(30, 8).half(), torch.arange(30) % 3
    assert_close(class_means(features, labels).directions, class_means(features.double(), labels).directions,
                 rtol=1e-5, atol=1e-6)  # fmt: skip

"""Hubs equal a loop over anchors, and scipy's skewness."""

import math
from collections import Counter

import pytest
import torch
from cases import check_reached
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import skew
from torch import Tensor

import hardneg.matmul as products_module
from hardneg.insight import hubs


def by_loop(features: Tensor, k: int, labels: Tensor) -> tuple[list[int], list[int]]:
    """Occurrences of each sample among the k nearest of the others, all and of other classes."""
    rows = features.double().tolist()
    counts, different = [0] * len(rows), [0] * len(rows)
    for i, anchor in enumerate(rows):
        cosines = {}
        for j, other in enumerate(rows):
            lengths = math.hypot(*anchor) * math.hypot(*other)
            if j != i:
                cosines[j] = sum(a * b for a, b in zip(anchor, other, strict=True)) / lengths if lengths else 0.0
        # The library computes in float64, too; equal rows have equal cosines up to rounding.
        nearest = sorted(cosines, key=lambda j: (-round(cosines[j], 12), j))[:k]
        for j in nearest:
            counts[j] += 1
            different[j] += int(labels[i] >= 0 and labels[j] >= 0 and labels[i] != labels[j])
    return counts, different


@pytest.mark.parametrize("k", [1, 3, 29])
@pytest.mark.parametrize("tile", [None, 100])
def test_counts_equal_a_loop(k: int, tile: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(k)
    features = torch.randn(30, 4, generator=generator, dtype=torch.float64) + 0.5
    features[7] = 0
    labels = torch.randint(-1, 3, (30,), generator=generator)
    if tile is not None:
        monkeypatch.setattr(products_module, "TILE", tile)
    counts, different = by_loop(features, k, labels)
    found = hubs(features, k, labels)
    assert found.counts.tolist() == counts
    assert found.different is not None
    assert found.different.tolist() == different
    assert found.unused == counts.count(0) / 30
    assert found.order.tolist() == sorted(range(30), key=lambda row: (-counts[row], row))
    assert found.skewness == pytest.approx(0.0 if k == 29 else float(skew(counts)))


def test_a_sample_in_the_middle_of_all_others_is_the_hub() -> None:
    # In many dimensions the sample nearest to the mean is near to all (Radovanović et al. 2010).
    features = 1 + torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    features[13] = 1
    found = hubs(features, k=5)
    assert int(found.order[0]) == 13
    assert int(found.counts[13]) > 150
    assert found.skewness > 5


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 9), st.integers(1, 10), st.sampled_from(["plain", "zeros", "equal"]))
def _counts_of_degenerate_features_add_up(seed: int, size: int, k: int, kind: str) -> None:
    features = torch.randn(size, 3, generator=torch.Generator().manual_seed(seed))
    if kind != "plain":
        features = torch.zeros(size, 3) if kind == "zeros" else features[:1].repeat(size, 1)
    if k > size - 1:
        with pytest.raises(ValueError, match="lower k"):
            hubs(features, k)
        REACHED["too many"] += 1
        return
    found = hubs(features, k, torch.full((size,), -1))
    assert int(found.counts.sum()) == size * k
    assert found.different is not None
    assert int(found.different.sum()) == 0
    assert math.isfinite(found.skewness)
    REACHED[kind] += 1


REACHED: Counter[str] = Counter()


def test_counts_of_degenerate_features_add_up() -> None:
    REACHED.clear()
    _counts_of_degenerate_features_add_up()
    check_reached(REACHED, {"plain": 4, "zeros": 4, "equal": 4})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hubs(torch.ones(1, 3), 1), "only 0 other samples"),
        (lambda: hubs(torch.ones(3, 3), 0), "k must be a whole number ≥ 1"),
        (lambda: hubs(torch.full((3, 3), math.inf), 1), "NaN or inf"),
        (lambda: hubs(torch.ones(3, 3), 1, [0, 1]), "one per row of features"),
    ],
)
def test_bad_arguments_raise_an_error_that_names_the_fix(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]

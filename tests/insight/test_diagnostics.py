"""Diagnostics of embeddings equal plain loops and closed forms, also for huge, tiny and equal vectors."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import pdist
from sklearn.neighbors import NearestNeighbors
from torch import Tensor
from torch.testing import assert_close

import hardneg.matmul as products_module
from hardneg.insight import alignment, cosine_histograms, hardest_false_share, hardest_negatives, uniformity
from hardneg.insight.diagnostics import MAX_SAMPLES


def samples(seed: int, size: int = 40, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(-1, 4, (size,), generator=generator)
    return torch.randn(size, 5, generator=generator, dtype=dtype), labels


def cosine(one: Tensor, other: Tensor) -> float:
    lengths = math.hypot(*one.tolist()) * math.hypot(*other.tolist())
    return float((one * other).sum()) / lengths if lengths else 0.0


@pytest.mark.parametrize("bins", [1, 7, 50])
def test_histograms_count_each_pair_once(bins: int) -> None:
    features, labels = samples(bins)
    same, different = [0] * bins, [0] * bins
    pairs: dict[bool, list[float]] = {True: [], False: []}
    for i, j in combinations(range(len(features)), 2):
        if labels[i] < 0 or labels[j] < 0:
            continue
        found = cosine(features[i], features[j])
        index = min(int((found + 1) / 2 * bins), bins - 1)
        (same if labels[i] == labels[j] else different)[index] += 1
        pairs[bool(labels[i] == labels[j])].append(found)
    found_histograms = cosine_histograms(features, labels, bins)
    assert found_histograms.same.tolist() == same
    assert found_histograms.different.tolist() == different
    assert found_histograms.same_mean == pytest.approx(np.mean(pairs[True]))
    assert found_histograms.different_mean == pytest.approx(np.mean(pairs[False]))
    assert_close(found_histograms.edges, torch.linspace(-1, 1, bins + 1))


def test_histograms_equal_numpy() -> None:
    features, _ = samples(1)
    labels = torch.zeros(40, dtype=torch.int64)
    expected, _ = np.histogram(1 - pdist(features.numpy(), "cosine"), bins=20, range=(-1, 1))
    found = cosine_histograms(features, labels, 20)
    assert found.same.tolist() == expected.tolist()
    assert int(found.different.sum()) == 0
    assert math.isnan(found.different_mean)


def test_tiling_does_not_change_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = samples(2)
    known = labels.clamp(min=0)

    def everything() -> list[object]:
        found = cosine_histograms(features, labels)
        hardest = hardest_negatives(features, torch.arange(40), 5)
        return [found.same.tolist(), found.different.tolist(), hardest.indices.tolist(),
                round(uniformity(features), 10), hardest_false_share(features, known, 3)]  # fmt: skip

    whole = everything()
    monkeypatch.setattr(products_module, "TILE", 40 * 7)
    assert everything() == whole


def test_a_subset_of_many_samples_is_chosen_by_the_seed() -> None:
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(MAX_SAMPLES + 300, 3, generator=generator), torch.arange(MAX_SAMPLES + 300) % 3
    one, again, other = (cosine_histograms(features, labels, seed=seed) for seed in (0, 0, 1))
    assert int((one.same + one.different).sum()) == MAX_SAMPLES * (MAX_SAMPLES - 1) // 2
    assert one.same.tolist() == again.same.tolist() != other.same.tolist()
    assert one.same_mean == pytest.approx(0, abs=0.02)


def test_alignment_is_the_mean_squared_distance_of_unit_vectors() -> None:
    (z1, _), (z2, _) = samples(3), samples(4)
    expected = [2 - 2 * cosine(one, other) for one, other in zip(z1, z2, strict=True)]
    assert alignment(z1, z2) == pytest.approx(np.mean(expected))
    assert alignment(z1, 7 * z1) == pytest.approx(0)


def test_uniformity_equals_a_loop_over_pairs() -> None:
    z, _ = samples(5)
    unit = z / z.norm(dim=1, keepdim=True)
    expected = math.log(np.mean(np.exp(-2 * pdist(unit.numpy(), "sqeuclidean"))))
    assert uniformity(z) == pytest.approx(expected)
    assert uniformity(z.float()) == pytest.approx(expected, rel=1e-5)


def test_uniformity_of_a_simplex_and_of_the_sphere_equals_the_closed_form() -> None:
    # All distances of a simplex of n unit vectors are 2n/(n − 1).
    corners = torch.eye(5, dtype=torch.float64) - 0.2
    assert uniformity(corners) == pytest.approx(-2 * 2 * 5 / 4)
    # On the sphere in 3 dimensions cosines are uniform, so that E e^{−4 + 4c} = (1 − e^{−8})/8.
    generator = torch.Generator().manual_seed(0)
    many = torch.randn(3000, 3, generator=generator)
    assert uniformity(many) == pytest.approx(math.log((1 - math.exp(-8)) / 8), abs=0.01)


@pytest.mark.parametrize("k", [1, 4, 39])
def test_hardest_negatives_equal_the_neighbors_of_scikit_learn(k: int) -> None:
    features, _ = samples(6)
    anchors = torch.tensor([3, 0, 39, 3])
    peer = NearestNeighbors(n_neighbors=k + 1, metric="cosine", algorithm="brute").fit(features.numpy())
    distances, indices = peer.kneighbors(features[anchors].numpy())
    found = hardest_negatives(features, anchors, k)
    assert found.indices.tolist() == indices[:, 1:].tolist()  # the nearest is the anchor itself
    assert_close(found.cosines, torch.tensor(1 - distances[:, 1:]))


def test_an_anchor_is_not_its_own_negative_but_its_copy_is() -> None:
    features = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert hardest_negatives(features, torch.arange(3), 1).indices[:, 0].tolist() == [1, 0, 0]


@pytest.mark.parametrize("k", [1, 3, None])
def test_the_share_of_false_negatives_equals_a_loop(k: int | None) -> None:
    features, labels = samples(7)
    known = [i for i in range(40) if labels[i] >= 0]
    shares = []
    for i in known:
        others = sorted((j for j in known if j != i), key=lambda j: -cosine(features[i], features[j]))[:k]
        shares.append(np.mean([bool(labels[j] == labels[i]) for j in others]))
    assert hardest_false_share(features, labels, k) == pytest.approx(np.mean(shares))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from([-1.0, 0.0, 1.0]), st.sampled_from([-1.0, 0.0, 1.0]), st.integers(-1, 2)),
        min_size=2,
        max_size=10,
    ),
    scale=st.sampled_from([0.0, 1e-38, 1e-20, 1.0, 1e20, 3e38]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_degenerate_embeddings_give_values_in_range(
    rows: list[tuple[float, float, int]], scale: float, dtype: torch.dtype
) -> None:
    limit = min(scale, float(torch.finfo(dtype).max))
    features = (torch.tensor([row[:2] for row in rows], dtype=torch.float64) * limit).to(dtype)
    labels = torch.tensor([row[2] for row in rows])
    found = cosine_histograms(features, labels, 9)
    known = int((labels >= 0).sum())
    assert int((found.same + found.different).sum()) == known * (known - 1) // 2
    assert -8.001 <= uniformity(features) <= 1e-6
    assert 0 <= alignment(features, features.flip(0)) <= 4.001
    hardest = hardest_negatives(features, torch.arange(len(rows)), 1)
    assert bool((hardest.cosines.abs() <= 1).all())
    assert bool((hardest.indices[:, 0] != torch.arange(len(rows))).all())
    if known >= 2:
        assert 0 <= hardest_false_share(features, labels, 1) <= 1


def test_numpy_arrays_give_the_results_of_tensors() -> None:
    (z1, labels), (z2, _) = samples(8), samples(9)
    assert alignment(z1.numpy(), z2.numpy()) == alignment(z1, z2) == alignment(z1, z2.numpy())
    assert uniformity(z1.numpy()) == uniformity(z1)
    found, expected = cosine_histograms(z1.numpy(), labels.numpy()), cosine_histograms(z1, labels)
    assert found.same.tolist() == expected.same.tolist()
    assert hardest_false_share(z1.numpy(), labels.numpy(), 3) == hardest_false_share(z1, labels, 3)
    anchors = np.array([3, 0], dtype=np.int32)
    indices = hardest_negatives(z1.numpy(), anchors, np.int64(2)).indices
    assert torch.equal(indices, hardest_negatives(z1, torch.tensor([3, 0]), 2).indices)


EYE, LABELS = torch.eye(4), torch.arange(4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: alignment(EYE, EYE[:3]), r"z2 must have the shape \(4, 4\) of z1, got \(3, 4\): pair the rows"),
        (lambda: alignment(EYE.long(), EYE), "z1 must have a floating dtype"),
        (lambda: uniformity(EYE[:1]), "z must hold at least 2 samples"),
        (lambda: uniformity(EYE[0]), r"z must have shape \(N, d\)"),
        (lambda: uniformity(EYE / 0), "z holds NaN or inf: .* diverged encoder"),
        (lambda: cosine_histograms(EYE, LABELS[:3]), r"labels must have shape \(4,\)"),
        (lambda: cosine_histograms(EYE, LABELS.float()), "labels must have an integer dtype"),
        (lambda: cosine_histograms(EYE, LABELS, bins=0), "bins must be a whole number ≥ 1, got 0"),
        (lambda: hardest_negatives(EYE, LABELS, 4), "k=4, but an anchor has only 3 other samples: lower k"),
        (lambda: hardest_negatives(EYE, LABELS + 1, 1), "anchors must hold indices from 0 to 3"),
        (lambda: hardest_negatives(EYE, LABELS[:, None], 1), r"anchors must have shape \(A,\), got \(4, 1\)"),
        (lambda: hardest_false_share(EYE, LABELS, 0), "k must be a whole number ≥ 1, got 0"),
        (lambda: hardest_false_share(EYE, LABELS - 9), "labels must be known .* for at least 2 samples, got 0"),
    ],
)
def test_errors_name_the_argument_and_the_fix(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]

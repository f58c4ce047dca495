"""Statistics of batches agree with loops over all pairs and with numpy."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from largest_tensor import LargestTensor
from torch import Tensor

from hardneg.samplers import batch_statistics, cosine_histogram, false_negative_share, mean_cosine


def cosines(embeddings: Tensor) -> list[float]:
    found = []
    for one, other in itertools.combinations(embeddings.double().tolist(), 2):
        lengths = math.hypot(*one) * math.hypot(*other)
        found.append(sum(a * b for a, b in zip(one, other, strict=True)) / lengths if lengths else 0.0)
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-1, 3), min_size=1, max_size=12))
def test_false_negatives_are_the_pairs_of_equal_known_labels(labels: list[int]) -> None:
    pairs = [one == other for one, other in itertools.combinations([label for label in labels if label != -1], 2)]
    share = false_negative_share(torch.tensor(labels))
    if pairs:
        assert share == pytest.approx(sum(pairs) / len(pairs))
    else:
        assert math.isnan(share)


def test_the_share_of_several_batches_is_their_mean() -> None:
    labels = torch.tensor([[0, 0, 1], [2, 2, 2], [5, -1, -1]])  # the last has no pair of labeled samples
    assert false_negative_share(labels) == pytest.approx((1 / 3 + 1) / 2)


def test_balanced_labels_give_the_probability_of_a_pair_of_one_class() -> None:
    labels = torch.arange(10).repeat_interleave(7)
    assert false_negative_share(labels) == pytest.approx(6 / 69)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_mean_cosine_is_the_mean_over_pairs(dtype: torch.dtype) -> None:
    embeddings = torch.randn(9, 4).to(dtype)
    embeddings[3] = 0
    assert mean_cosine(embeddings) == pytest.approx(np.mean(cosines(embeddings)))


@pytest.mark.parametrize("bins", [1, 3, 40])
def test_the_histogram_is_that_of_numpy(bins: int) -> None:
    embeddings = torch.randn(20, 3)
    counts, edges = cosine_histogram(embeddings, bins)
    expected, expected_edges = np.histogram(cosines(embeddings), bins=bins, range=(-1, 1))
    assert counts.tolist() == expected.tolist()
    assert edges.tolist() == pytest.approx(expected_edges.tolist())


def test_histograms_of_true_and_false_negatives_add_up() -> None:
    embeddings, labels = torch.randn(20, 3), torch.randint(4, (20,))
    same = labels[:, None] == labels
    whole, one, other = (cosine_histogram(embeddings, 10, allowed)[0] for allowed in (None, same, ~same))
    assert whole.tolist() == (one + other).tolist()
    assert int(one.sum()) == round(false_negative_share(labels) * 190)


def test_equal_and_opposite_vectors_fall_into_the_outer_bins() -> None:
    counts, _ = cosine_histogram(torch.tensor([[0.1, 0.7], [0.1, 0.7], [-0.1, -0.7]]), 4)
    assert counts.tolist() == [2, 0, 0, 1]


def test_no_matrix_of_all_pairs_is_made_and_tiles_do_not_change_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    whole = cosine_histogram(embeddings, 13)[0].tolist()
    monkeypatch.setattr(batch_statistics, "_ELEMENTS", 300 * 7)
    with LargestTensor() as watched:
        assert cosine_histogram(embeddings, 13)[0].tolist() == whole
        assert mean_cosine(embeddings) == pytest.approx(np.mean(cosines(embeddings)))
    assert watched.elements <= 300 * 7
    assert sum(whole) == 300 * 299 // 2


def test_numpy_arrays_and_lists_give_the_statistics_of_tensors() -> None:
    embeddings, labels = torch.randn(20, 3), torch.randint(4, (2, 20))
    same = labels[0][:, None] == labels[0]
    for convert in (Tensor.numpy, Tensor.tolist):
        assert false_negative_share(convert(labels)) == false_negative_share(labels)
        assert mean_cosine(convert(embeddings)) == mean_cosine(embeddings)
        counts, _ = cosine_histogram(convert(embeddings), np.int64(5), convert(same))  # type: ignore[arg-type]
        assert counts.tolist() == cosine_histogram(embeddings, 5, same)[0].tolist()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: false_negative_share(torch.ones(3)), "integer dtype"),
        (lambda: false_negative_share(torch.tensor(3)), r"\(B,\) or \(S, B\)"),
        (lambda: false_negative_share("12"), "labels must be a tensor, a numpy array or a list of numbers, got str"),
        (lambda: mean_cosine(torch.ones(1, 3)), "B ≥ 2"),
        (lambda: mean_cosine(torch.full((3, 3), torch.nan)), "NaN or inf"),
        (lambda: cosine_histogram(torch.ones(3, 3), 0), "bins must be a whole number"),
        (lambda: cosine_histogram(torch.ones(3, 3), 4, torch.ones(3, 3)), "allowed must be bool"),
        (lambda: cosine_histogram(torch.ones(3, 3), 4, torch.ones(3, dtype=torch.bool)), r"of shape \(3, 3\)"),
    ],
)
def test_bad_arguments_raise_an_error_that_names_the_fix(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]

"""Weighted kNN equals a loop and scikit-learn for every tiling; ties are broken deterministically."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor
from torch.testing import assert_close

from hardneg.evaluation import few_label_accuracy, knn_accuracy, knn_predict


def loop(train: Tensor, labels: Tensor, test: Tensor, k: int, temperature: float) -> list[int]:
    """METHODS section 6, one pair at a time: equal cosines by index, equal votes by label."""

    def cosine(one: list[float], other: list[float]) -> float:
        lengths = math.hypot(*one) * math.hypot(*other)
        return sum(a * b for a, b in zip(one, other, strict=True)) / lengths if lengths else 0.0

    predicted = []
    for row in test.tolist():
        cosines = [cosine(row, candidate) for candidate in train.tolist()]
        nearest = sorted(range(len(cosines)), key=lambda j: (-cosines[j], j))[:k]
        votes: dict[int, float] = {}
        for j in nearest:
            label = int(labels[j])
            votes[label] = votes.get(label, 0.0) + math.exp(cosines[j] / temperature)
        predicted.append(min(votes, key=lambda label: (-votes[label], label)))
    return predicted


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    features, targets = torch.tensor(images), torch.tensor(labels)
    return features[:1200], targets[:1200], features[1200:], targets[1200:]


def random_sets(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    train = torch.randn(60, 8, generator=generator, dtype=dtype)
    labels = torch.randint(-2, 3, (60,), generator=generator)
    return train, labels, torch.randn(25, 8, generator=generator, dtype=dtype)


@pytest.mark.parametrize("k", [1, 2, 7, 59, 60, 200])
@pytest.mark.parametrize("temperature", [0.02, 0.1, 1.0])
def test_predictions_equal_a_loop(k: int, temperature: float) -> None:
    train, labels, test = random_sets(k)
    assert knn_predict(train, labels, test, k, temperature).tolist() == loop(train, labels, test, k, temperature)


@pytest.mark.parametrize("k", [1, 20, 200])
def test_predictions_equal_scikit_learn_on_digits(k: int) -> None:
    train, train_labels, test, test_labels = digits()

    def weights(distances: np.ndarray) -> np.ndarray:
        return np.exp((1 - distances) / 0.1)

    peer = KNeighborsClassifier(n_neighbors=k, metric="cosine", algorithm="brute", weights=weights)
    peer.fit(train.numpy(), train_labels.numpy())
    assert knn_predict(train, train_labels, test, k).tolist() == peer.predict(test.numpy()).tolist()
    expected = peer.score(test.numpy(), test_labels.numpy())
    assert knn_accuracy(train.float(), train_labels, test.float(), test_labels, k) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("chunk", [1, 2, 10, 24, 25, 1000])
@pytest.mark.parametrize("k", [1, 30])
def test_tiling_does_not_change_predictions(chunk: int, k: int) -> None:
    train, labels, test = random_sets(0)
    assert knn_predict(train, labels, test, k, chunk=chunk).tolist() == knn_predict(train, labels, test, k).tolist()


def test_k_of_one_does_not_depend_on_the_temperature() -> None:
    train, labels, test = random_sets(3)
    predicted = knn_predict(train, labels, test, k=1)
    unit = torch.nn.functional.normalize
    assert_close(predicted, labels[(unit(test) @ unit(train).T).argmax(dim=1)])
    assert_close(predicted, knn_predict(train, labels, test, k=1, temperature=1e-6))


def test_a_low_temperature_gives_1nn_and_a_high_one_the_majority() -> None:
    train, labels, test = random_sets(4)
    assert_close(knn_predict(train, labels, test, k=9, temperature=1e-6), knn_predict(train, labels, test, k=1))
    nearest = (test / test.norm(dim=1, keepdim=True) @ (train / train.norm(dim=1, keepdim=True)).T).topk(9).indices
    majority = [torch.tensor(row).mode().values for row in labels[nearest].tolist()]  # of equal counts, the smallest
    assert_close(knn_predict(train, labels, test, k=9, temperature=1e20), torch.stack(majority))


def test_k_above_the_number_of_samples_uses_all_samples() -> None:
    train, labels, test = random_sets(5)
    assert_close(knn_predict(train, labels, test, k=10_000), knn_predict(train, labels, test, k=60))


def test_ties_prefer_the_lower_index_and_then_the_smaller_label() -> None:
    train = torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, 0.0], [3.0, 0.0]])
    labels = torch.tensor([1, 7, 3, 3])
    test = torch.tensor([[5.0, 0.0]])
    predictions = [int(knn_predict(train, labels, test, k)) for k in (1, 2, 3)]
    assert predictions == [7, 3, 3]


@pytest.mark.parametrize("k", [1, 2, 5, 17, 39])
@pytest.mark.parametrize("chunk", [None, 3])
def test_of_equal_samples_the_lower_index_is_the_neighbor(k: int, chunk: int | None) -> None:
    # Cosines of axes are exact, so that many are equal; those of zero vectors are all 0.
    generator = torch.Generator().manual_seed(k)
    axes = torch.cat([torch.eye(4), -torch.eye(4), torch.zeros(1, 4)])
    train, test = (axes[torch.randint(0, 9, (size,), generator=generator)] for size in (40, 20))
    labels = torch.randint(0, 4, (40,), generator=generator)
    assert knn_predict(train, labels, test, k, chunk=chunk).tolist() == loop(train, labels, test, k, 0.1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    train, labels, test = random_sets(6, torch.float32)
    train, test = train.to(dtype), test.to(dtype)
    expected = knn_predict(train.float(), labels, test.float(), k=15)
    assert_close(knn_predict(train, labels, test, k=15), expected)
    assert_close(knn_predict(train, labels, test.float(), k=15), expected)


def test_autocast_does_not_change_the_cosines() -> None:
    train, labels, test = random_sets(7, torch.float32)
    expected = knn_predict(train, labels, test, k=15)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(knn_predict(train, labels, test, k=15), expected)


def test_predictions_do_not_depend_on_the_norm() -> None:
    train, labels, test = random_sets(8, torch.float32)
    factors = 2.0 ** (torch.arange(60) - 30)  # (60,) exact in floating point
    scaled = knn_predict(train * factors[:, None], labels, test * 2.0**-40, k=15)
    assert_close(scaled, knn_predict(train, labels, test, k=15))


def test_a_test_label_missing_in_training_counts_as_an_error() -> None:
    train = torch.eye(2)
    assert knn_accuracy(train, torch.tensor([3, 7]), train, torch.tensor([3, 5]), k=1) == 0.5


def test_predictions_of_features_with_gradients_have_none() -> None:
    train, labels, test = random_sets(9)
    assert not knn_predict(train.requires_grad_(), labels, test.requires_grad_()).requires_grad


@settings(max_examples=60, deadline=None)
@given(
    samples=st.lists(
        st.tuples(st.sampled_from([-1.0, 0.0, 1.0]), st.sampled_from([-1.0, 0.0, 1.0]), st.integers(-3, 3)),
        min_size=1,
        max_size=12,
    ),
    scale=st.sampled_from([0.0, 1e-38, 1e-20, 1.0, 1e20, 3e38]),
    k=st.integers(1, 15),
    chunk=st.sampled_from([None, 1, 5]),
)
def test_degenerate_features_give_labels_of_the_training_set(
    samples: list[tuple[float, float, int]], scale: float, k: int, chunk: int | None
) -> None:
    features = torch.tensor([sample[:2] for sample in samples]) * scale
    labels = torch.tensor([sample[2] for sample in samples])
    predicted = knn_predict(features, labels, features, k, chunk=chunk)
    assert set(predicted.tolist()) <= set(labels.tolist())
    assert 0 <= knn_accuracy(features, labels, features, labels, k, chunk=chunk) <= 1
    one_class = torch.full_like(labels, 5)
    assert knn_accuracy(features, one_class, features, one_class, k, chunk=chunk) == 1


def test_few_label_accuracy_equals_1nn_of_scikit_learn_over_random_draws() -> None:
    train, train_labels, test, test_labels = digits()
    mean, std = few_label_accuracy(train, train_labels, test, test_labels, per_class=1, draws=40)
    # Independent draws: scikit-learn on one random sample of each class.
    generator = np.random.default_rng(0)
    scores = []
    for _ in range(40):
        chosen = [generator.choice(np.flatnonzero(train_labels.numpy() == label)) for label in range(10)]
        peer = KNeighborsClassifier(n_neighbors=1, metric="cosine", algorithm="brute")
        scores.append(peer.fit(train[chosen].numpy(), train_labels[chosen].numpy()).score(test, test_labels))
    spread = float(np.std(scores, ddof=1))
    assert mean == pytest.approx(np.mean(scores), abs=4 * spread * math.sqrt(2 / 40))
    assert std == pytest.approx(spread, rel=0.5)


def test_few_label_accuracy_with_all_labels_equals_1nn() -> None:
    train, _, test = random_sets(10)
    labels, test_labels = torch.arange(60) % 3, torch.arange(25) % 3
    expected = knn_accuracy(train, labels, test, test_labels, k=1)
    mean, std = few_label_accuracy(train, labels, test, test_labels, per_class=20, draws=3)
    assert mean == pytest.approx(expected)
    assert std == pytest.approx(0)


def test_few_label_accuracy_depends_only_on_the_seed() -> None:
    train, train_labels, test, test_labels = digits()
    results = [few_label_accuracy(train, train_labels, test, test_labels, 1, 2, seed) for seed in (0, 0, 1)]
    assert results[0] == results[1]
    assert results[0] != results[2]


def test_more_labels_give_higher_accuracy() -> None:
    train, train_labels, test, test_labels = digits()
    one, five = (few_label_accuracy(train, train_labels, test, test_labels, count)[0] for count in (1, 5))
    assert one < five < knn_accuracy(train, train_labels, test, test_labels, k=1)
    assert few_label_accuracy(train, train_labels, test, test_labels, 1, draws=1)[1] == 0


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.uint8, np.uint32])
def test_numpy_arrays_give_the_results_of_tensors(dtype: type) -> None:
    sets = digits()
    features, labels, test, test_labels = (part.numpy() for part in sets)
    arrays = features, labels.astype(dtype), test, test_labels.astype(dtype)
    assert knn_accuracy(*arrays) == knn_accuracy(*sets)
    assert few_label_accuracy(*arrays, per_class=2, draws=2) == few_label_accuracy(*sets, per_class=2, draws=2)
    assert knn_predict(*arrays[:3]).tolist() == knn_predict(*sets[:3]).tolist()
    mixed = knn_accuracy(sets[0], arrays[1], arrays[2], sets[3], k=np.int64(3), temperature=np.float32(0.5))
    assert mixed == knn_accuracy(*sets, k=3, temperature=0.5)


FEATURES, LABELS = torch.eye(4), torch.arange(4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_features": torch.eye(4).long()}, "train_features must have a floating dtype"),
        ({"train_features": "eye"}, "train_features must be a tensor, a numpy array or a list of numbers, got str"),
        (
            {"train_features": torch.zeros(0, 4), "train_labels": LABELS[:0]},
            "train_features must have shape .* got \\(0, 4\\)",
        ),
        (
            {"test_features": torch.zeros(0, 4), "test_labels": LABELS[:0]},
            "test_features must have shape .* got \\(0, 4\\)",
        ),
        ({"test_features": torch.eye(4)[0]}, "test_features must have shape"),
        ({"test_features": torch.ones(4, 3)}, "test_features must have d = 4 as train_features, got 3"),
        ({"train_features": FEATURES.clone().fill_(torch.nan)}, "train_features holds NaN or inf: .* diverged encoder"),
        ({"test_features": FEATURES / 0}, "test_features holds NaN or inf"),
        ({"train_labels": LABELS[:3]}, "train_labels must have shape \\(4,\\)"),
        ({"test_labels": LABELS[:, None]}, "test_labels must have shape \\(4,\\)"),
        ({"test_labels": LABELS.float()}, "test_labels must have an integer dtype"),
        ({"test_labels": LABELS.to("meta")}, "test_labels is on meta, but test_features on cpu: move them"),
        ({"k": 0}, "k must be a whole number ≥ 1, got 0"),
        ({"k": 2.0}, "k must be a whole number ≥ 1, got 2.0"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"temperature": math.nan}, "temperature must be"),
        ({"chunk": 0}, "chunk must be a whole number ≥ 1, got 0"),
    ],
)
def test_errors_name_the_argument_and_the_fix(changes: dict[str, object], message: str) -> None:
    arguments = {"train_features": FEATURES, "train_labels": LABELS, "test_features": FEATURES, "test_labels": LABELS}
    with pytest.raises(ValueError, match=message):
        knn_accuracy(**{**arguments, **changes})  # type: ignore[arg-type]


def test_the_error_names_a_class_with_too_few_samples() -> None:
    labels = torch.tensor([3, 7, 7, 7])
    with pytest.raises(ValueError, match="per_class=2, but train_labels has class 3 only 1 times: lower per_class"):
        few_label_accuracy(FEATURES, labels, FEATURES, labels, per_class=2)
    with pytest.raises(ValueError, match="draws must be a whole number ≥ 1, got 0"):
        few_label_accuracy(FEATURES, labels, FEATURES, labels, per_class=1, draws=0)

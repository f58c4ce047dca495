"""The linear probe finds the minimum of scikit-learn, and chooses its penalty on held-out samples."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from hardneg import matmul
from hardneg.evaluation import linear, linear_probe
from hardneg.evaluation.linear import minimize, objective


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    features, targets = torch.tensor(images), torch.tensor(labels)
    return features[:1200], targets[:1200], features[1200:], targets[1200:]


def blobs(classes: int, per_class: int, dim: int, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(classes)
    labels = torch.arange(classes).repeat(per_class)
    centers = torch.randn(classes, dim, generator=generator)
    return centers[labels] + spread * torch.randn(len(labels), dim, generator=generator), labels


def standardized(features: Tensor, reference: Tensor) -> Tensor:
    std = reference.std(dim=0, correction=0)
    return (features - reference.mean(dim=0)) / std.masked_fill(std == 0, 1)


def loss(inputs: Tensor, targets: Tensor, weight: Tensor, bias: Tensor, penalty: float) -> float:
    """F of the module's docstring, in float64."""
    weight, bias = weight.double(), bias.double()
    data = cross_entropy(inputs.double() @ weight.T + bias, targets)
    return float(data + penalty / 2 * weight.square().sum())


def sklearn_fit(inputs: Tensor, targets: Tensor, penalty: float) -> LogisticRegression:
    peer = LogisticRegression(C=1 / (len(inputs) * penalty), tol=1e-9, max_iter=20_000)
    return peer.fit(inputs.double().numpy(), targets.numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("penalty", [1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0])
def test_the_minimum_equals_scikit_learn_on_digits(penalty: float, dtype: torch.dtype) -> None:
    train, train_labels, test, test_labels = digits()
    result = linear_probe(train.to(dtype), train_labels, test.to(dtype), test_labels, [penalty])
    inputs, held = standardized(train, train), standardized(test, train)
    peer = sklearn_fit(inputs, train_labels, penalty)
    best = loss(inputs, train_labels, torch.tensor(peer.coef_), torch.tensor(peer.intercept_), penalty)
    assert result.converged
    assert loss(inputs, train_labels, result.weight, result.bias, penalty) == pytest.approx(best, rel=1e-4)
    predicted = (held @ result.weight.double().T + result.bias).argmax(dim=1)
    agreeing = (predicted == torch.tensor(peer.predict(held.numpy()))).double().mean()
    assert agreeing >= 0.996  # two of 597 may lie on a boundary
    assert result.accuracy == pytest.approx(peer.score(held.numpy(), test_labels.numpy()), abs=0.004)


@pytest.mark.parametrize("tile", [1, 100, 1 << 25])
def test_value_and_gradient_equal_autograd(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "TILE", tile)
    features, targets = blobs(4, 5, 3)
    point = torch.randn(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    penalty = torch.tensor([0.3, 2.0], dtype=torch.float64)
    value, gradient = objective(features.double(), targets, point, penalty)
    leaf = point.clone().requires_grad_()
    expected = torch.stack(
        [
            cross_entropy(features.double() @ weights[:, :-1].T + weights[:, -1], targets)
            + strength / 2 * weights[:, :-1].square().sum()
            for weights, strength in zip(leaf, penalty, strict=True)
        ]
    )
    expected.sum().backward()
    assert_close(value, expected.detach())
    assert_close(gradient, leaf.grad)


def test_value_and_gradient_of_parts_are_those_of_their_standardized_samples() -> None:
    features, targets = blobs(4, 5, 3)
    inputs, penalty = features.double(), torch.tensor([0.3, 2.0], dtype=torch.float64)
    point = torch.randn(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = torch.rand(2, len(inputs), generator=torch.Generator().manual_seed(1)) < 0.7
    mean, std = torch.randn(2, 3).double(), torch.rand(2, 3).double() + 0.5
    value, gradient = objective(inputs, targets, point, penalty, linear.Parts(rows.double(), mean, std))
    for problem, own in enumerate(rows):
        part = (inputs[own] - mean[problem]) / std[problem]
        alone = objective(part, targets[own], point[problem, None], penalty[problem, None])
        assert_close(value[problem], alone[0][0])
        assert_close(gradient[problem], alone[1][0])


def test_float32_is_accurate_for_well_fitted_samples() -> None:
    inputs, targets = torch.tensor([[1.0], [-1.0]]), torch.tensor([0, 1])
    point = torch.tensor([[[10.0, 0.0], [-10.0, 0.0]]])
    value, gradient = objective(inputs, targets, point, torch.zeros(1))
    rest = 1 / (1 + math.exp(20))  # 2e-9: 1 − p would be 0 in float32
    assert float(value) == pytest.approx(math.log1p(math.exp(-20)), rel=1e-5)
    assert_close(gradient[0, :, 0], torch.tensor([-rest, rest]), rtol=1e-5, atol=0)


def test_a_batch_of_penalties_gives_the_same_fits_as_single_penalties() -> None:
    features, targets = blobs(5, 40, 6, spread=2.0)
    inputs, start = standardized(features, features), torch.zeros(3, 5, 7)
    grid = [1e-4, 1e-2, 1.0]
    together, reached, _ = minimize(inputs, targets, grid, start, 500)
    assert bool(reached.all())
    for index, penalty in enumerate(grid):
        alone, _, _ = minimize(inputs, targets, [penalty], start[:1], 500)
        ours, other = (
            loss(inputs, targets, solution[:, :-1], solution[:, -1], penalty)
            for solution in (together[index], alone[0])
        )
        assert ours == pytest.approx(other, rel=1e-4)


def test_a_huge_penalty_fits_the_class_shares_by_the_bias() -> None:
    features, labels = blobs(3, 20, 4)
    features, labels = features[:50], labels[:50].clone()
    labels[:10] = 2  # shares that differ
    result = linear_probe(features, labels, features, labels, [1e4])
    assert result.converged
    assert_close(result.bias.softmax(dim=0), labels.bincount() / 50, rtol=0, atol=1e-3)
    assert result.weight.abs().max() < 1e-4


def test_the_penalty_is_chosen_on_held_out_samples_and_the_final_fit_uses_all() -> None:
    train, train_labels, test, test_labels = digits()
    penalties = (1e-4, 1e-2, 1.0, 10.0)
    result = linear_probe(train, train_labels, test, test_labels, penalties, validation=0.3, seed=4)
    inputs = standardized(train, train)
    held = linear.held_out(train_labels, 0.3, 4)
    for penalty, accuracy in result.validation_accuracies.items():
        peer = sklearn_fit(inputs[~held], train_labels[~held], penalty)
        assert accuracy == pytest.approx(peer.score(inputs[held].numpy(), train_labels[held].numpy()), abs=0.006)
    best = max(result.validation_accuracies.values())
    assert result.penalty == max(p for p in penalties if result.validation_accuracies[p] == best)
    alone = linear_probe(train, train_labels, test, test_labels, [result.penalty])
    refitted, expected = (loss(inputs, train_labels, fit.weight, fit.bias, result.penalty) for fit in (result, alone))
    assert refitted == pytest.approx(expected, rel=1e-4)
    assert alone.validation_accuracies == {}


def test_the_split_holds_out_a_share_of_each_class_but_never_all_of_it() -> None:
    targets = torch.tensor([0] * 10 + [1] * 3 + [2] * 2 + [3])
    held = linear.held_out(targets, 0.2, 0)
    assert targets[held].bincount(minlength=4).tolist() == [2, 1, 0, 0]
    assert targets[linear.held_out(targets, 0.9, 0)].bincount(minlength=4).tolist() == [9, 2, 1, 0]
    assert_close(held, linear.held_out(targets, 0.2, 0))
    assert not torch.equal(held, linear.held_out(targets, 0.2, 1))


def test_the_documented_formula_gives_the_predictions() -> None:
    train, train_labels, test, test_labels = digits()
    result = linear_probe(train.float(), train_labels * 5 - 3, test.float(), test_labels * 5 - 3)
    inputs = (test - result.mean) / result.std
    predicted = result.classes[(inputs @ result.weight.double().T + result.bias).argmax(dim=1)]
    assert result.accuracy == int((predicted == test_labels * 5 - 3).sum()) / len(test)
    assert result.accuracy > 0.88
    assert result.classes.tolist() == [label * 5 - 3 for label in range(10)]


def test_two_runs_are_bitwise_equal() -> None:
    features, labels = blobs(4, 30, 5, spread=2.0)
    one, other = (linear_probe(features, labels, features, labels) for _ in range(2))
    assert torch.equal(one.weight, other.weight)
    assert torch.equal(one.bias, other.bias)
    assert one.validation_accuracies == other.validation_accuracies


def test_the_fit_does_not_depend_on_the_scale_of_the_features() -> None:
    features, labels = blobs(4, 30, 5, spread=2.0)
    expected = linear_probe(features, labels, features, labels, [0.01])
    factors = torch.tensor([1e-30, 1e-3, 1.0, 1e3, 1e30])
    moved = features * factors + 2 * factors
    result = linear_probe(moved, labels, moved, labels, [0.01])
    assert_close(result.weight, expected.weight, rtol=1e-3, atol=1e-3)
    assert result.accuracy == pytest.approx(expected.accuracy, abs=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_features_are_ignored(dtype: torch.dtype) -> None:
    features, labels = blobs(3, 20, 4)
    constants = torch.linspace(0.1, 1e6, 50, dtype=dtype).expand(60, 50)  # std from rounding would be amplified
    both = torch.cat([features.to(dtype), constants], dim=1)
    result = linear_probe(both, labels, both, labels)
    assert_close(result.std[4:], torch.ones(50, dtype=torch.float64), rtol=0, atol=0)
    assert result.weight[:, 4:].abs().max() < 1e-6


def test_half_precision_with_more_features_than_samples_is_fitted() -> None:
    features, labels = blobs(3, 6, 100)
    for dtype in (torch.float16, torch.bfloat16):
        result = linear_probe(features.to(dtype), labels, features.to(dtype), labels)
        assert result.accuracy == 1
        assert result.weight.dtype == torch.float32
        assert result.converged


def test_a_fit_with_too_few_steps_is_not_converged() -> None:
    train, train_labels, test, test_labels = digits()
    assert not linear_probe(train, train_labels, test, test_labels, [1e-3], steps=3).converged
    assert not linear_probe(train, train_labels, test, test_labels, [1e-3, 1e-2], steps=3).converged
    assert linear_probe(train, train_labels, test, test_labels, [1e-3, 1e-2]).converged


def test_a_penalty_below_float32_precision_terminates() -> None:
    features, labels = torch.eye(2).repeat(10, 1), torch.tensor([3, 7]).repeat(10)
    result = linear_probe(features, labels, features, labels, [1e-30])
    assert result.accuracy == 1
    assert bool(result.weight.isfinite().all())


def test_a_test_label_missing_in_training_counts_as_an_error() -> None:
    features, labels = torch.eye(2).repeat(10, 1), torch.tensor([3, 7]).repeat(10)
    assert linear_probe(features, labels, features, torch.tensor([3, 5]).repeat(10)).accuracy == 0.5


def test_autocast_does_not_change_the_fit() -> None:
    features, labels = blobs(4, 30, 5, spread=2.0)
    expected = linear_probe(features, labels, features, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = linear_probe(features.requires_grad_(), labels, features, labels)
    assert torch.equal(result.weight, expected.weight)
    assert not result.weight.requires_grad


@settings(max_examples=40, deadline=None)
@given(
    samples=st.lists(
        st.tuples(st.sampled_from([-1.0, 0.0, 1.0]), st.sampled_from([-1.0, 0.0, 1.0]), st.integers(-2, 2)),
        min_size=1,
        max_size=12,
    ),
    scale=st.sampled_from([0.0, 1e-38, 1e-20, 1.0, 1e20, 3e38]),
    penalty=st.sampled_from([1e-6, 1e-2, 1.0, 1e6]),
)
def test_degenerate_sets_are_fitted(samples: list[tuple[float, float, int]], scale: float, penalty: float) -> None:
    features = torch.tensor([sample[:2] for sample in samples]) * scale
    labels = torch.tensor([sample[2] for sample in samples])
    result = linear_probe(features, labels, features, labels, [penalty])
    assert result.converged
    assert bool(result.weight.isfinite().all())
    assert bool(result.bias.isfinite().all())
    most = int(labels.unique(return_counts=True)[1].max()) / len(labels)
    assert 0 <= result.accuracy <= 1
    if scale == 0:  # nothing but the bias: the most frequent label
        assert result.accuracy == pytest.approx(most)
    one_class = torch.full_like(labels, 5)
    assert linear_probe(features, one_class, features, one_class, [penalty]).accuracy == 1


def test_numpy_arrays_give_the_results_of_tensors() -> None:
    features, labels = blobs(4, 30, 5, spread=2.0)
    expected = linear_probe(features, labels, features, labels)
    arrays = features.numpy(), labels.numpy().astype("int32")
    found = linear_probe(*arrays, *arrays, validation=np.float64(0.2), steps=np.int64(500))
    assert torch.equal(found.weight, expected.weight)
    assert found.accuracy == expected.accuracy


FEATURES, LABELS = torch.eye(2).repeat(4, 1), torch.tensor([3, 7]).repeat(4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_features": FEATURES.clone().fill_(torch.inf)}, "train_features holds NaN or inf"),
        ({"train_labels": LABELS[:3]}, "train_labels must have shape \\(8,\\)"),
        ({"penalties": ()}, "penalties is empty"),
        ({"penalties": (0.1, 0.0)}, "penalties must be > 0"),
        ({"penalties": (0.1, math.nan)}, "penalties must be"),
        ({"validation": 0.0}, "validation must be > 0"),
        ({"validation": 1.0}, "validation must be > 0 and < 1, got 1"),
        ({"validation": 0.05}, "validation=0.05 holds out no sample.* more than 4: give more samples, a larger share"),
        ({"steps": 0}, "steps must be a whole number ≥ 1, got 0"),
    ],
)
def test_errors_name_the_argument_and_the_fix(changes: dict[str, object], message: str) -> None:
    arguments = {"train_features": FEATURES, "train_labels": LABELS, "test_features": FEATURES, "test_labels": LABELS}
    with pytest.raises(ValueError, match=message):
        linear_probe(**{**arguments, **changes})  # type: ignore[arg-type]

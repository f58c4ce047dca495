"""The objective against loops written from the papers, over random combinations of all its settings."""

from collections import Counter
from dataclasses import replace

import oracle
import pytest
import torch
from cases import Case, cases, check_reached, converted
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

BACKENDS = ("reference", "tiled")
pytestmark = pytest.mark.filterwarnings("ignore:.*anchors are floored")
HEALTH = [HealthCheck.too_slow, HealthCheck.filter_too_much]
# The minimum share of a test's examples for which each setting matters (`Case.matters`).
SHARES = {
    "valid": 0.9, "beta": 0.2, "class_prior": 0.3, "unfloored": 0.3, "floored": 0.06, "debias": 0.05, "rings": 0.18,
    "tau_threshold": 0.1, "below": 0.1, "weight_range": 0.06, "negatives": 0.4, "exclude": 0.08, "negative_mask": 0.1,
    "negative_labels": 0.06, "labels": 0.3, "symmetric": 0.04, "num_negatives": 0.1, "negative_count": 0.3,
    "positive_in_denominator": 0.1, "average": 0.03, "mean_of_logs": 0.05, "log_of_mean": 0.03, "in_denominator": 0.04,
    "log_of_sum": 0.03, "normalize_weights": 0.06, "given positives": 0.03,
}  # fmt: skip
# The same for cases with sources: by_source against one uniform distribution.
SOURCE_SHARES = {
    "valid": 0.8, "by_source": 0.4, "class_prior": 0.2, "negatives": 0.4, "ids": 0.25, "negative_ids": 0.06,
    "not_negatives": 0.03, "exclude": 0.08, "negative_mask": 0.08, "given positives": 0.02, "negative_labels": 0.05,
    "normalize_weights": 0.1, "log_of_sum": 0.02, "negative_count": 0.2,
}  # fmt: skip
STEP = 1e-5  # of finite differences


def backends(case: Case) -> tuple[str, ...]:
    parts = [case.oracle_options, *(case.oracle_options.get("by_source") or {}).values()]
    return ("reference",) if any("eta" in part for part in parts) else BACKENDS


def least(examples: int, shares: dict[str, float] = SHARES, **more: float) -> dict[str, int]:
    """The minimum number of examples for which each setting must matter."""
    return {name: int(share * examples) for name, share in (shares | more).items()}


def described(truth: oracle.Result) -> dict[str, float]:
    """What `InfoNCE.diagnostics` should return."""

    def mean(numbers: list[float]) -> float:
        return sum(numbers) / len(numbers) if numbers else 0.0

    negatives, positives = ([row for row in rows if row] for rows in (truth.negatives, truth.positives))
    return {
        "anchors": len(truth.losses),
        "without_candidates": len(truth.losses) - len(negatives),
        "without_positives": len(truth.losses) - len(positives),
        "floored": sum(truth.floored),
        "support": mean([len(row) for row in negatives]),
        "effective_negatives": mean([effective_size(row) for row in truth.shares if row]),
        "effective_share": mean([effective_size(row) / len(row) for row in truth.shares if row]),
        "positive_score": mean([mean(row) for row in positives]),
        "negative_score": mean([mean(row) for row in negatives]),
    }


def effective_size(weights: list[float]) -> float:
    """(Σw)² / Σw²."""
    return sum(weights) ** 2 / sum(weight**2 for weight in weights)


def check(case: Case, truth: oracle.Result) -> None:
    for backend in backends(case):
        losses = case.loss(backend=backend, reduction="none")
        found = losses(**case.arguments)
        assert_close(found, torch.tensor(truth.losses, dtype=torch.float64), rtol=1e-10, atol=1e-10)
        mean, total = (case.loss(backend=backend, reduction=r)(**case.arguments) for r in ("mean", "sum"))
        assert_close(mean, torch.tensor(truth.mean, dtype=torch.float64), rtol=1e-10, atol=1e-10)
        assert_close(total, torch.tensor(truth.total, dtype=torch.float64), rtol=1e-10, atol=1e-10)
        assert losses.diagnostics() == pytest.approx(described(truth))


SOURCES = pytest.mark.parametrize("sources", [False, True], ids=["one", "sources"])


@SOURCES
@pytest.mark.parametrize("integer", [False, True], ids=["any", "ties"])
def test_any_combination_of_settings_agrees_with_the_loops(integer: bool, sources: bool) -> None:
    reached: Counter[str] = Counter()

    @settings(max_examples=100 if sources else 300, deadline=None, suppress_health_check=HEALTH)
    @given(case=cases(integer=integer, sources=sources))  # exact scores that tie: ties go by index
    def agrees(case: Case) -> None:
        truth = case.truth()
        check(case, truth)
        reached.update(case.matters(truth))

    agrees()
    check_reached(reached, least(100, SOURCE_SHARES) if sources else least(300, eta=0.1))


@SOURCES
def test_kernels_agree_in_value_and_gradient(sources: bool) -> None:
    reached: Counter[str] = Counter()

    @settings(max_examples=80 if sources else 200, deadline=None, suppress_health_check=HEALTH)
    @given(case=cases(custom=False, sources=sources))
    def agree(case: Case) -> None:
        results = [value_and_gradients(case, backend) for backend in BACKENDS]
        for one, other in zip(*results, strict=True):
            assert_close(one, other, rtol=1e-9, atol=1e-10)
        if any(grad.abs().max() > 1e-6 for grad in results[0][1:]):
            reached.update(case.matters(case.truth()))

    agree()
    check_reached(reached, least(80, SOURCE_SHARES) if sources else least(200, valid=0.75))


@pytest.mark.parametrize("sources", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one", "sources"])
def test_gradients_agree_with_finite_differences(sources: bool) -> None:
    reached: Counter[str] = Counter()

    @settings(max_examples=60 if sources else 100, deadline=None, suppress_health_check=HEALTH)
    @given(case=cases(smooth=True, sources=sources), through=st.sampled_from([True, False, True]))
    def agree(case: Case, through: bool) -> None:
        case = replace(case, options=case.options | {"grad_through_weights": through})
        truth = case.truth()
        assume(not has_corner(case, truth))
        expected = differences(case, truth)
        for backend in backends(case):
            _, *found = value_and_gradients(case, backend)
            for one, other in zip(found, expected, strict=True):
                assert_close(one, other, rtol=1e-5, atol=1e-6)
        if any(grad.abs().max() > 1e-4 for grad in expected):
            reached.update(case.matters(truth) | ({"constant weights"} if not through else set()))

    agree()
    expected = least(50, SOURCE_SHARES) if sources else least(100, valid=0.9, eta=0.06)
    check_reached(reached, expected | {"constant weights": 8 if sources else 15})


def value_and_gradients(case: Case, backend: str) -> list[Tensor]:
    """The loss, and its gradient by each embedding."""
    leaves: list[Tensor] = []

    def leaf(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        leaves.append(tensor.clone().requires_grad_())
        return leaves[-1]

    value = case.loss(backend=backend)(**{name: converted(leaf, given) for name, given in case.arguments.items()})
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def differences(case: Case, truth: oracle.Result) -> list[Tensor]:
    """The gradient by each embedding: central differences of the loops, with constants where there is no gradient."""
    gradients = []
    embeddings: list[Tensor] = []
    for argument in case.arguments.values():
        converted(lambda tensor: embeddings.append(tensor) if tensor.is_floating_point() else None, argument)
    for tensor in embeddings:
        gradient = torch.zeros_like(tensor)
        for entry in range(tensor.numel()):
            sides = []
            for step in (STEP, -STEP):
                moved = tensor.clone()
                moved.view(-1)[entry] += step
                sides.append(with_tensors(case, {id(tensor): moved}).truth(constants=truth).mean)
            gradient.view(-1)[entry] = (sides[0] - sides[1]) / (2 * STEP)
        gradients.append(gradient)
    return gradients


def with_tensors(case: Case, moved: dict[int, Tensor]) -> Case:
    """The case with some of its tensors, by id, replaced."""
    replaced = {
        name: converted(lambda tensor: moved.get(id(tensor), tensor), argument)
        for name, argument in case.arguments.items()
    }
    return replace(case, arguments=replaced)


def has_corner(case: Case, truth: oracle.Result) -> bool:
    """Is the loss not smooth within the step of a finite difference? Bands and floors make it so."""
    steps = torch.Generator().manual_seed(0)
    for _ in range(24):

        def moved(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            return tensor + 10 * STEP * torch.randn(tensor.shape, generator=steps, dtype=tensor.dtype)

        arguments = {name: converted(moved, argument) for name, argument in case.arguments.items()}
        there = replace(case, arguments=arguments).truth()
        if (there.support, there.floored) != (truth.support, truth.floored):
            return True
    return False

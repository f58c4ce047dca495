"""The objective against loops written from the papers, over random combinations of all its settings."""

import warnings

import pytest
import torch
from cases import Case, cases
from hypothesis import HealthCheck, given, settings
from torch.testing import assert_close

BACKENDS = ("reference", "tiled")
pytestmark = pytest.mark.filterwarnings("ignore:.*anchors are floored")
thorough = settings(
    max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def backends(case: Case) -> tuple[str, ...]:
    return ("reference",) if "eta" in case.oracle_options else BACKENDS


def check(case: Case) -> None:
    truth = case.truth()
    for backend in backends(case):
        losses = case.loss(backend=backend, reduction="none")
        found = losses(**case.arguments)
        assert_close(found, torch.tensor(truth.losses, dtype=torch.float64), rtol=1e-10, atol=1e-10)
        mean, total = (case.loss(backend=backend, reduction=r)(**case.arguments) for r in ("mean", "sum"))
        assert_close(mean, torch.tensor(truth.mean, dtype=torch.float64), rtol=1e-10, atol=1e-10)
        assert_close(total, torch.tensor(truth.total, dtype=torch.float64), rtol=1e-10, atol=1e-10)
        report = losses.diagnostics()
        assert report["floored"] == sum(truth.floored)
        sizes = [len(support) for support in truth.support if support]
        assert report["support"] == pytest.approx(sum(sizes) / len(sizes) if sizes else 0)
        assert report["without_candidates"] == len(truth.support) - len(sizes)


@thorough
@given(case=cases())
def test_any_settings_agree_with_the_loops(case: Case) -> None:
    check(case)


@thorough
@given(case=cases(integer=True))
def test_ties_go_by_index(case: Case) -> None:
    check(case)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=cases(custom=False))
def test_kernels_agree_in_value_and_gradient(case: Case) -> None:
    results = []
    for backend in BACKENDS:
        inputs = {k: v.clone().requires_grad_() if v.is_floating_point() else v for k, v in case.arguments.items()}
        value = case.loss(backend=backend)(**inputs)
        value.backward()
        results.append([value.detach(), *(v.grad for v in inputs.values() if v.is_floating_point())])
    for one, other in zip(*results, strict=True):
        assert_close(one, other, rtol=1e-9, atol=1e-10)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=cases())
def test_gradients_are_those_of_finite_differences(case: Case) -> None:
    for tensor in case.arguments.values():
        if tensor.is_floating_point() and not tensor.view(-1, tensor.shape[-1]).any(dim=1).all():
            return  # a zero vector has no direction, and ties with everybody: no finite difference
    if case.options["weight_range"] is not None:
        return  # the range is held constant on purpose
    names = [name for name, tensor in case.arguments.items() if tensor.is_floating_point()]
    others = {name: tensor for name, tensor in case.arguments.items() if name not in names}
    inputs = [case.arguments[name].clone().requires_grad_() for name in names]
    for backend in backends(case):

        def value(*tensors: torch.Tensor, backend: str = backend) -> torch.Tensor:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return case.loss(backend=backend)(**dict(zip(names, tensors, strict=True)), **others)  # type: ignore[no-any-return]

        if kinks(case, inputs):
            return
        assert torch.autograd.gradcheck(value, inputs, eps=1e-6, atol=1e-5, rtol=1e-4)


def kinks(case: Case, inputs: list[torch.Tensor]) -> bool:
    """Is a jump or corner of the loss within reach of a finite difference? Bands and floors have them."""
    steps = torch.Generator().manual_seed(0)
    here = case.truth()
    for _ in range(24):
        moved = dict(case.arguments)
        for name, tensor in moved.items():
            if tensor.is_floating_point():
                moved[name] = tensor + 1e-4 * torch.randn(tensor.shape, generator=steps, dtype=tensor.dtype)
        there = Case(case.options, moved, case.oracle_options).truth()
        if there.support != here.support or there.floored != here.floored:
            return True
    return "relu" in str(case.oracle_options.get("eta", "")) or "_ramp" in str(case.oracle_options.get("eta", ""))

"""Kernels: precision, memory, in-place changes, compile and autocast."""

import gc
from typing import Any

import pytest
import torch
from largest_tensor import LargestTensor
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close

import hardneg as hn
from hardneg.losses.kernels import strips

BACKENDS = ("reference", "tiled")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tilt": {"hardening": hn.Exponential(1.0), "class_prior": 0.05},
    "large tilt": {"hardening": hn.Exponential(4.0), "temperature": 0.07},
    "fractional tilt": {"hardening": hn.Exponential(0.7), "debias": "exact", "class_prior": 0.02},
    "threshold": {"hardening": hn.Threshold(1.0)},
    "ring": {"hardening": hn.Ring(0.5, 0.95)},
    "ring and tilt": {"hardening": (hn.Ring(0.2, 0.9), hn.Exponential(2.0))},
    "below positive": {"hardening": hn.BelowPositive(1.0)},
    "labels": {"supervision": "full", "hardening": hn.Exponential(1.0)},
    "other": {"in_batch": "other", "symmetric": True},
    "detached": {"hardening": hn.Exponential(1.0), "grad_through_weights": False},
    "range": {"hardening": hn.Exponential(1.0), "normalize": False, "weight_range": 2.0},
}


def batch(rows: int, dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    z1 = torch.randn(rows, dim, generator=generator)
    z2 = z1 + torch.randn(rows, dim, generator=generator)
    return z1.to(dtype), z2.to(dtype), torch.arange(rows) % 7


def value_and_gradients(options: dict[str, Any], z1: Tensor, z2: Tensor, labels: Tensor, backend: str) -> list[Tensor]:
    z1, z2 = z1.clone().requires_grad_(), z2.clone().requires_grad_()
    extra = {"labels": labels} if "supervision" in options else {}
    value = hn.InfoNCE(**options, backend=backend)(z1, z2, **extra)
    value.backward()
    assert z1.grad is not None
    assert z2.grad is not None
    return [value.detach(), z1.grad, z2.grad]


def relative(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_kernels_agree_in_float32_to_1e_5(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(strips.STRIP_ELEMENTS, "cpu", 1000)  # many strips, the last one shorter
    z1, z2, labels = batch(61, 33)
    plain = value_and_gradients(options, z1, z2, labels, "reference")
    tiled = value_and_gradients(options, z1, z2, labels, "tiled")
    for one, other in zip(plain, tiled, strict=True):
        assert relative(one, other.double()) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_half_precision_costs_only_the_rounding_of_the_input(
    options: dict[str, Any], dtype: torch.dtype, backend: str
) -> None:
    z1, z2, labels = batch(40, 32, dtype)
    found = value_and_gradients(options, z1, z2, labels, backend)
    truth = value_and_gradients(options, z1.double(), z2.double(), labels, "reference")
    assert found[0].dtype == torch.float32
    assert found[1].dtype == dtype
    # The input is exact, so float32 inside leaves 1e-5, and the gradient is rounded once on its way out. A tie that
    # float32 breaks otherwise may move one member of a band.
    assert relative(found[0], truth[0]) < 1e-5
    for one, other in zip(found[1:], truth[1:], strict=True):
        assert relative(one, other) < torch.finfo(dtype).eps


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_does_not_change_the_precision(backend: str) -> None:
    z1, z2, _ = batch(32, 16)
    outside = hn.hcl(backend=backend)(z1, z2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = hn.hcl(backend=backend)(z1, z2)
    assert inside.dtype == torch.float32
    assert_close(inside, outside, rtol=0, atol=0)


def test_the_tiled_kernel_allocates_strips_and_no_matrix() -> None:
    rows, dim = 2048, 16
    z1, z2, _ = batch(rows, dim)
    z1.requires_grad_()
    gc.collect()
    with LargestTensor() as watch:
        hn.hcl(backend="tiled")(z1, z2).backward()
    assert watch.elements <= strips.STRIP_ELEMENTS["cpu"] < (2 * rows) ** 2


@pytest.mark.parametrize(
    "preset",
    [
        "hcl",
        "hscl",
        "moco",
        "clip",
        "ring",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("sources", "labelled rows")),
    ],
)
def test_compiles_without_a_graph_break(preset: str) -> None:
    z1, z2, labels = batch(16, 8)
    loss, extra = {
        "hcl": (hn.hcl(), {}),
        "hscl": (hn.hscl(), {"labels": labels}),
        "moco": (hn.moco(), {"negatives": torch.randn(50, 8)}),
        "clip": (hn.clip(), {}),
        "ring": (hn.InfoNCE(hardening=(hn.Ring(0.5, 0.9), hn.Exponential(hn.Linear(2.0, 1.0)))), {}),
        "sources": (
            hn.InfoNCE(hardening={"batch": hn.BelowPositive(), "queue": hn.Exponential(1.0)}),
            {"negatives": {"queue": torch.randn(50, 8), "mined": torch.randn(16, 3, 8)}, "ids": labels},
        ),
        "labelled rows": (
            hn.supcon(),
            {"labels": labels, "negatives": torch.randn(50, 8), "negative_labels": torch.arange(50) % 9},
        ),
    }[preset]
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for progress in (0.0, 0.3, 0.6, 0.9):
        loss.set_progress(progress)
        a, b = z1.clone().requires_grad_(), z1.clone().requires_grad_()
        one, other = compiled(a, z2, **extra), loss(b, z2, **extra)
        one.backward()
        other.backward()
        assert_close(one, other)
        assert_close(a.grad, b.grad)
    assert loss.diagnostics()["anchors"] in (16, 32)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["both sources", "not negatives", "labels", "rows per anchor", "labelled rows"])
def test_the_tiled_kernel_compiles_without_a_graph_break(case: str, backend: str) -> None:
    z1, z2, labels = batch(16, 8)
    rows, ids = torch.randn(50, 8), torch.arange(16) // 2
    loss, extra = {
        "both sources": (hn.hcl(), {"negatives": rows}),
        "not negatives": (
            hn.hcl(tau_plus=0.01),
            {"ids": ids, "not_negatives": torch.tensor([[0, 3], [5, 2], [0, 9], [4, 4]])},
        ),
        "labels": (hn.hscl(), {"labels": labels}),
        "rows per anchor": (hn.hcl(), {"negatives": torch.randn(16, 5, 8)}),
        "labelled rows": (
            hn.supcon(),
            {"labels": labels, "negatives": rows, "negative_labels": torch.arange(50) % 9},
        ),
    }[case]
    loss.backend = "tiled"
    torch._dynamo.reset()
    found = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend=backend)):
        a, b = z1.clone().requires_grad_(), z2.clone().requires_grad_()
        value = function(a, b, **extra)
        value.backward()
        found.append((value, a.grad, b.grad))
    for eager, compiled in zip(*found, strict=True):
        assert_close(compiled, eager)
    if case == "not negatives":
        assert found[0][0] < loss(z1, z2, ids=ids)  # the pairs matter


def test_compiled_schedules_do_not_recompile_at_every_step() -> None:
    z1, z2, _ = batch(8, 4)
    loss = hn.hcl(beta=hn.Linear(2.0, 0.0))
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for step in range(30):
        loss.set_progress(step / 30)
        compiled(z1, z2)
    assert counter.frame_count <= 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"hardening": hn.Exponential(1.5), "class_prior": 0.1}, {"in_batch": "other"}])
def test_the_learned_temperature_has_the_exact_gradient(backend: str, options: dict[str, Any]) -> None:
    z1, z2, _ = batch(10, 5, torch.float64)
    loss = hn.InfoNCE(temperature=hn.Learnable(0.3), backend=backend, **options).double()
    temperature = loss.temperature
    assert isinstance(temperature, hn.Learnable)
    loss(z1, z2).backward()

    def at(shift: float) -> Tensor:
        with torch.no_grad():
            temperature.log_value += shift
            value: Tensor = loss(z1, z2)
            temperature.log_value -= shift
        return value

    slope = (at(1e-6) - at(-1e-6)) / 2e-6
    assert temperature.log_value.grad is not None
    assert_close(temperature.log_value.grad, slope, rtol=1e-6, atol=1e-8)


def test_the_learned_temperature_also_moves_the_floor() -> None:
    z = torch.eye(4, 8, dtype=torch.float64)
    loss = hn.InfoNCE(temperature=hn.Learnable(0.1), class_prior=0.3).double()
    assert isinstance(loss.temperature, hn.Learnable)
    with pytest.warns(UserWarning, match="floored"):
        loss(z, z).backward()
    # All floored: L = log(1 + Q·e^{−1/t}·e^{−1/t}) with Q = 6, so ∂L/∂log t = σ·2/t.
    t = float(loss.temperature.log_value.detach().exp())
    share = 6 * torch.exp(torch.tensor(-2 / t, dtype=torch.float64))
    assert loss.temperature.log_value.grad is not None
    assert_close(loss.temperature.log_value.grad, share / (1 + share) * 2 / t)


def test_a_temperature_below_its_minimum_gets_a_gradient_that_raises_it() -> None:
    learned = hn.Learnable(0.02, minimum=0.01)
    with torch.no_grad():
        learned.log_value -= 5
    assert float(learned().detach()) == pytest.approx(0.01)
    learned().backward()
    assert learned.log_value.grad is not None
    assert learned.log_value.grad > 0


def test_detached_weights_have_no_gradient_of_their_own() -> None:
    # METHODS, gradient: the coefficients of the two softmaxes become 1 and 0.
    anchor, positive = torch.zeros(1, 3, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64)
    anchor[0, 0] = 1
    negatives = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    options: dict[str, Any] = {
        "temperature": 1.0,
        "in_batch": None,
        "normalize": False,
        "hardening": hn.Exponential(1.5),
    }
    for backend in BACKENDS:
        loss = hn.InfoNCE(**options, positive_in_denominator=False, grad_through_weights=False, backend=backend)
        grad = torch.autograd.grad(loss(anchor, positive, negatives=negatives), negatives)[0][:, 0]
        assert_close(grad, torch.softmax(2.5 * negatives[:, 0].detach(), dim=0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_kernel_can_be_differentiated_twice(backend: str) -> None:
    z1, z2, _ = batch(4, 3, torch.float64)
    loss = hn.hcl(tau_plus=0.01, backend=backend)
    assert torch.autograd.gradgradcheck(lambda z: loss(z, z2), (z1.requires_grad_(),))
    loss(z1, z2)
    assert loss.diagnostics()["floored"] == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("beta", [1e2, 1e4, 1e6])
def test_a_large_tilt_keeps_its_precision_in_float32(backend: str, beta: float) -> None:
    z1, z2, _ = batch(64, 8)
    exact = hn.hcl(beta, 0.0)(z1.double(), z2.double())
    assert_close(hn.hcl(beta, 0.0, backend=backend)(z1, z2).double(), exact, rtol=1e-5, atol=0)


def test_a_backward_pass_inside_autocast_is_the_same() -> None:
    z1, z2, _ = batch(16, 8)
    negatives, grads = torch.randn(16, 5, 8), []
    for inside in (False, True):
        a = z1.clone().requires_grad_()
        value = hn.simcse(backend="tiled")(a, z2, negatives=negatives)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            value.backward()
        grads.append(a.grad)
    assert_close(grads[0], grads[1], rtol=0, atol=0)


@pytest.mark.parametrize("make", [hn.hscl_threshold, lambda: hn.scl(class_prior=hn.Linear(0.1, 0.0))])
def test_compiled_thresholds_and_priors_do_not_recompile_at_every_step(make: Any) -> None:
    z1, z2, labels = batch(8, 4)
    loss = make()
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for step in range(20):
        loss.set_progress(step / 20)
        compiled(z1, z2, labels=labels)
    assert counter.frame_count <= 5


class DeviceTilt(hn.Hardening):
    """A tilt that is a tensor, as one that is computed on a device."""

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def tilt(self) -> Tensor:
        return torch.tensor(self.beta, dtype=torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("beta", [0.0, 0.7, 1.0, 4.0])
@pytest.mark.parametrize("name", ["labels", "prior", "range", "drawn", "by source"])
def test_a_tilt_may_be_a_tensor(name: str, beta: float, backend: str) -> None:
    z1, z2, labels = batch(12, 5, torch.float64)
    results = []
    for hardening in (hn.Exponential(beta), DeviceTilt(beta)):
        options: dict[str, Any] = {
            "labels": {"supervision": "full", "hardening": hardening},
            "prior": {"class_prior": 0.02, "hardening": (hardening, hn.Ring(0.1, 0.9))},
            "range": {"weight_range": 2.0, "normalize": False, "hardening": hardening},
            "drawn": {"num_negatives": 4, "generator": torch.Generator().manual_seed(2), "hardening": hardening},
            "by source": {"hardening": {"batch": hardening}, "normalize_weights": False},
        }[name]
        results.append(value_and_gradients(options, z1, z2, labels, backend))
    for one, other in zip(*results, strict=True):
        assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert results[0][1].abs().max() > 1e-6

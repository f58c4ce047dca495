"""Second derivatives, against finite differences of the gradient."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import hardneg as hn

LABELS = torch.tensor([0, 1, 0, 2, 1, 0, -1, 2])
PRESETS = {
    "simclr": (hn.simclr(), {}),
    "debiased": (hn.debiased(0.05), {}),
    "hcl": (hn.hcl(beta=1.0, tau_plus=0.02), {}),
    "hcl, other beta": (hn.hcl(beta=0.7, tau_plus=0.02, debias="exact"), {}),
    "scl": (hn.scl(), {"labels": LABELS}),
    "hscl": (hn.hscl(beta=2.0), {"labels": LABELS}),
    "hscl_threshold": (hn.hscl_threshold(-0.3, 0.0), {"labels": LABELS}),
    "supcon": (hn.supcon(), {"labels": LABELS}),
    "decoupled": (hn.decoupled(), {}),
    "simcse": (hn.simcse(temperature=0.3), {}),
    "clip": (hn.clip(temperature=0.3), {}),
    "graphcl": (hn.graphcl(), {}),
    "ring": (hn.InfoNCE(hardening=(hn.Ring(0.3, 0.9), hn.Exponential(0.5))), {}),
    "below positive": (hn.InfoNCE(hardening=hn.BelowPositive(), class_prior=0.01), {}),
    "drawn": (hn.InfoNCE(num_negatives=5), {}),
    "unnormalized": (hn.InfoNCE(temperature=4.0, normalize=False, hardening=hn.Exponential(1.0)), {}),
    "log of mean": (hn.InfoNCE(supervision="full", combine_positives="log_of_mean"), {"labels": LABELS}),
    "pairs": (hn.InfoNCE(supervision="full", average="pairs"), {"labels": LABELS}),
}


def unit_directions(inputs: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in inputs]


def gradient(loss: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """By a plain backward pass."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    loss(*leaves).backward()
    return [x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves]


def product_by_differences(loss: Callable[..., Tensor], inputs: Sequence[Tensor], step: float = 1e-5) -> list[Tensor]:
    """The Hessian times a direction, by central differences of the gradient."""
    along = unit_directions(inputs)
    ahead = gradient(loss, [x + step * v for x, v in zip(inputs, along, strict=True)])
    behind = gradient(loss, [x - step * v for x, v in zip(inputs, along, strict=True)])
    return [(a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True)]


def product_by_grad(loss: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True, allow_unused=True)
    along = unit_directions(inputs)
    inner = sum((g * v).sum() for g, v in zip(first, along, strict=True) if g is not None)
    return list(torch.autograd.grad(inner, leaves, materialize_grads=True))


def product_by_backward(loss: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    loss(*leaves).backward(create_graph=True)
    along = unit_directions(inputs)
    inner = sum((x.grad * v).sum() for x, v in zip(leaves, along, strict=True) if x.grad is not None)
    return list(torch.autograd.grad(inner, leaves, materialize_grads=True))


def product_by_hvp(loss: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    products = torch.autograd.functional.hvp(loss, tuple(inputs), tuple(unit_directions(inputs)))[1]
    return list(products)


WAYS = {"grad": product_by_grad, "backward": product_by_backward, "hvp": product_by_hvp}


def views(rows: int = 8, dim: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(rows, dim, generator=generator, dtype=torch.float64) for _ in range(2)]


def assert_same_products(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    size = max(float(x.abs().amax()) for x in expected)
    assert size > 1e-3  # not a Hessian of zeros
    assert_close(list(found), list(expected), rtol=1e-5, atol=1e-6 * size)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("name", PRESETS)
def test_second_derivatives_agree_with_differences_of_the_gradient(name: str, backend: str, way: str) -> None:
    loss, given = PRESETS[name]
    loss = loss.double()
    loss.backend = backend

    def call(z1: Tensor, z2: Tensor) -> Tensor:
        if loss.num_negatives is not None:
            loss.draw_state.zero_()  # the same draws in every call
        result: Tensor = loss(z1, z2, **given)
        return result

    assert_same_products(WAYS[way](call, views()), product_by_differences(call, views()))


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("options", [{"grad_through_weights": False}, {"weight_range": 2.0}])
def test_constant_weights_are_constant_in_second_derivatives(options: dict[str, float], backend: str) -> None:
    beta, temperature = 1.5, 3.0
    loss = hn.simcse(temperature, hardening=hn.Exponential(beta), normalize=False, backend=backend, **options)

    def written_out(z1: Tensor, z2: Tensor) -> Tensor:
        scores = z1 @ z2.T / temperature
        other = ~torch.eye(len(z1), dtype=torch.bool)
        largest = scores[other].abs().amax().detach()
        tilt = beta * (scores * 2.0 / largest if "weight_range" in options else scores.detach())
        weights = tilt.exp() * other
        expected = (weights * scores.exp()).sum(dim=1) / weights.sum(dim=1)
        return (1 + (len(z1) - 1) * expected * (-scores.diagonal()).exp()).log().mean()

    torch.testing.assert_close(loss(*views()), written_out(*views()))
    assert_same_products(product_by_grad(loss, views()), product_by_grad(written_out, views()))


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("per_anchor", [False, True])
def test_queues_have_second_derivatives_in_keys_and_queue(backend: str, per_anchor: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    shape = (8, 12, 5) if per_anchor else (12, 5)
    negatives = torch.randn(shape, generator=generator, dtype=torch.float64)
    loss = hn.ring_nce(temperature=0.5, anneal="none", lower=0.2, backend=backend, hardening=hn.Exponential(1.0))
    exclude = torch.arange(8)

    def call(z1: Tensor, z2: Tensor, negatives: Tensor) -> Tensor:
        result: Tensor = loss(z1, z2, negatives=negatives, exclude=exclude)
        return result

    inputs = [*views(), negatives]
    assert_same_products(product_by_grad(call, inputs), product_by_differences(call, inputs))


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_a_tensor_passed_as_both_views_gets_both_gradients(backend: str) -> None:
    loss = hn.hcl(tau_plus=0.01, backend=backend)
    inputs = [views()[0]]

    def call(z: Tensor) -> Tensor:
        result: Tensor = loss(z, z)
        return result

    assert_same_products(product_by_grad(call, inputs), product_by_differences(call, inputs))


def test_a_learnable_temperature_has_second_derivatives() -> None:
    temperatures = torch.tensor([-1.0], dtype=torch.float64)

    def call(log_value: Tensor, z1: Tensor, z2: Tensor) -> Tensor:
        loss = hn.hcl(tau_plus=0.01, temperature=hn.Learnable(0.3)).double()
        parameters = {"temperature.log_value": log_value[0]}
        return torch.func.functional_call(loss, parameters, (z1, z2))  # type: ignore[no-any-return]

    inputs = [temperatures, *views()]
    assert_same_products(product_by_grad(call, inputs), product_by_differences(call, inputs))


def test_second_derivatives_use_the_settings_of_the_call() -> None:
    z1, z2 = (z.requires_grad_() for z in views())
    fixed, moved = hn.hcl(beta=1.0, tau_plus=0.0), hn.hcl(beta=hn.Linear(1.0, 9.0), tau_plus=0.0)
    expected = product_by_grad(fixed, [z1, z2])
    value = moved(z1, z2)
    moved.set_progress(1.0)
    first = torch.autograd.grad(value, (z1, z2), create_graph=True)
    inner = sum((g * v).sum() for g, v in zip(first, unit_directions((z1, z2)), strict=True))
    assert_close(list(torch.autograd.grad(inner, (z1, z2))), expected)


def test_a_gradient_penalty_trains_an_encoder() -> None:
    torch.manual_seed(0)
    encoder = torch.nn.Linear(6, 4).double()
    x1, x2 = (z.requires_grad_() for z in views(8, 6))

    def penalty(weight: Tensor) -> Tensor:
        value = hn.hcl(tau_plus=0.01)(x1 @ weight.T, x2 @ weight.T)
        slope = torch.autograd.grad(value, (x1, x2), create_graph=True)
        return slope[0].square().sum() + slope[1].square().sum()

    assert torch.autograd.gradcheck(penalty, encoder.weight.detach().requires_grad_())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beta": 2.0, "class_prior": 0.2, "weight_range": None},
        {"beta": 1.0, "supervision": "full", "weight_range": None},
        {"beta": 1.0, "published": True},
        {"beta": 1.0, "weight_range": None, "tile": 3, "reduction": "none"},
    ],
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_jsd_has_second_derivatives(options: dict[str, object], way: str) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (9, 4)]
    batch = torch.tensor([0, 0, 1, 1, 1, 2, 3, 3, 3])
    labels = torch.tensor([0, 1, 0, 1]) if "supervision" in options else None
    loss = hn.JSD(**options)  # type: ignore[arg-type]

    def call(nodes: Tensor, graphs: Tensor) -> Tensor:
        result: Tensor = loss(nodes, graphs, batch, labels)
        return result.square().sum() if loss.reduction == "none" else result

    assert_same_products(WAYS[way](call, inputs), product_by_differences(call, inputs))


def test_detached_weights_of_jsd_are_constant_in_second_derivatives() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (4, 4)]
    loss = hn.JSD(beta=2.0, grad_through_weights=False, reduction="sum")

    def written_out(nodes: Tensor, graphs: Tensor) -> Tensor:
        scores = nodes @ graphs.T
        other = ~torch.eye(4, dtype=torch.bool)
        tilt = 2.0 * scores * 2.0 / scores[other].abs().amax()
        weights = tilt.masked_fill(~other, -torch.inf).softmax(dim=1).detach()
        repulsion = (weights * torch.log1p(scores.exp())).sum(dim=1)
        return (torch.log1p((-scores.diagonal()).exp()) + repulsion).sum()

    found = product_by_grad(lambda nodes, graphs: loss(nodes, graphs, torch.arange(4)), inputs)
    assert_same_products(found, product_by_grad(written_out, inputs))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("form", ["paper", "published"])
def test_local_aggregation_has_second_derivatives(form: str, reduction: str) -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(30, 5, generator=generator, dtype=torch.float64)
    clusters, idx = hn.Clusters(k=4, repeats=2).fit(rows), torch.tensor([3, 14, 15, 9])
    loss = hn.LocalAggregation(temperature=0.5, background=12, form=form, reduction=reduction)
    inputs = [torch.randn(4, 5, generator=generator, dtype=torch.float64)]

    def call(z: Tensor) -> Tensor:
        value: Tensor = loss(z, rows, idx, clusters)
        return value if reduction == "mean" else value.square().sum()

    assert_same_products(product_by_grad(call, inputs), product_by_differences(call, inputs))


@pytest.mark.filterwarnings("ignore:.*anchors are floored")
def test_second_derivatives_of_degenerate_batches_are_finite() -> None:
    z = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    for loss, labels in (
        (hn.hcl(tau_plus=0.9), None),
        (hn.scl(), torch.tensor([0, 0, 0, 0])),  # no negatives at all
        (hn.scl(), torch.tensor([0, -1, 1, 1])),
        (hn.InfoNCE(hardening=hn.BelowPositive(margin=100.0)), None),  # empty supports
    ):
        given = {} if labels is None else {"labels": labels}
        value = loss(z, z.flip(0), **given)
        (first,) = torch.autograd.grad(value, z, create_graph=True)
        assert first.isfinite().all()
        (second,) = torch.autograd.grad(first.square().sum(), z, allow_unused=True, materialize_grads=True)
        assert second.isfinite().all()


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize(
    ("options", "labels"),
    [
        (
            {"class_prior": 0.05, "debias": "exact", "supervision": "positives"},
            [0, 0, 0, 1, 1, 2],
        ),  # label 2 occurs once
        (
            {"temperature": 0.01, "supervision": "full", "combine_positives": "in_denominator"},
            [0, 1, 2, 0, 1, 2],
        ),  # positives and negatives far apart
    ],
)
def test_second_derivatives_are_finite_where_the_gradient_is(
    options: dict[str, object], labels: list[int], backend: str
) -> None:
    z = (torch.eye(3, dtype=torch.float64).repeat(2, 1) - 0.4 + 0.01 * views(6, 3)[0]).requires_grad_()
    loss = hn.InfoNCE(**options, backend=backend)  # type: ignore[arg-type]
    (first,) = torch.autograd.grad(loss(z, labels=torch.tensor(labels)), z, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), z)
    assert first.isfinite().all()
    assert second.isfinite().all()


GIVEN = torch.randn(9, 5, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
TRANSFORMED = {name: preset for name, preset in PRESETS.items() if name != "drawn"} | {
    "sources": (
        hn.InfoNCE(hardening={"batch": hn.Exponential(1.0), "mined": hn.Ring(0.2, 0.9)}, normalize_weights=False),
        {"negatives": {"mined": GIVEN}, "ids": torch.arange(8) // 2, "not_negatives": torch.tensor([[0, 3], [1, 2]])},
    ),
    "labelled rows": (
        hn.InfoNCE(supervision="full", combine_positives="log_of_sum", hardening=hn.BelowPositive()),
        {"labels": LABELS, "negatives": GIVEN, "negative_labels": torch.arange(9) % 4 - 1},
    ),
    "general weights": (hn.InfoNCE(hardening=hn.Custom(torch.nn.functional.softplus), class_prior=0.01), {}),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_torch_func_transforms_of_the_reference_agree_with_finite_differences(name: str) -> None:
    made, given = TRANSFORMED[name]
    loss = copy.deepcopy(made).double()
    loss.backend = "reference"
    z1, z2 = views()
    (along,) = unit_directions([z1])

    def call(z: Tensor) -> Tensor:
        result: Tensor = loss(z, z2, **given)
        return result

    step = 1e-5
    slope = (call(z1 + step * along) - call(z1 - step * along)) / (2 * step)
    assert abs(float(slope.detach())) > 1e-4
    (product,) = product_by_differences(call, [z1])
    assert_close((torch.func.grad(call)(z1) * along).sum(), slope, rtol=1e-5, atol=1e-7)
    assert_close(torch.func.jvp(call, (z1,), (along,))[1], slope, rtol=1e-5, atol=1e-7)
    hessian = torch.func.hessian(call)(z1).reshape(40, 40)
    assert_same_products([(hessian @ along.reshape(40)).reshape(8, 5)], [product])
    several = torch.stack([z1, z1 + along])
    assert_close(torch.func.vmap(call)(several), torch.stack([call(z) for z in several]))
    gradients = torch.stack(list(map(torch.func.grad(call), several)))
    assert_close(torch.func.vmap(torch.func.grad(call))(several), gradients)


def test_draws_inside_torch_func_are_counted() -> None:
    z1, z2 = views()
    one, other = (hn.InfoNCE(num_negatives=3, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    for _ in range(2):
        leaf = z1.clone().requires_grad_()
        (expected,) = torch.autograd.grad(one(leaf, z2), leaf)
        assert_close(torch.func.grad(lambda z: other(z, z2))(z1), expected)
    assert int(other.draw_state[1]) == 2
    with pytest.raises(RuntimeError, match=r"outside of torch\.func"):
        other.diagnostics()


def test_torch_func_transforms_agree_with_autograd() -> None:
    z1, z2 = views()
    loss = hn.hcl(tau_plus=0.01)
    leaf = z1.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf, z2), leaf)
    assert_close(torch.func.grad(lambda z: loss(z, z2))(z1), expected)
    hessian = torch.func.hessian(lambda z: loss(z, z2))(z1).reshape(40, 40)
    along = unit_directions([z1])[0].reshape(40)
    assert_close(hessian @ along, product_by_grad(lambda z: loss(z, z2), [z1])[0].reshape(40))


def test_the_tiled_kernel_is_refused_in_torch_func() -> None:
    z1, z2 = torch.randn(2, 4, 3).unbind()
    with pytest.raises(ValueError, match=r"backend='tiled' does not work in torch\.func: use backend='auto'"):
        torch.func.grad(lambda z: hn.simclr(backend="tiled")(z, z2))(z1)

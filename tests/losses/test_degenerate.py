"""Finite input never gives NaN or inf; anchors without candidates or positives contribute exactly nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import hardneg as hn

BACKENDS = ("reference", "tiled")
PRESETS = {
    "simclr": hn.simclr,
    "debiased": hn.debiased,
    "hcl": hn.hcl,
    "scl": hn.scl,
    "hscl": hn.hscl,
    "hscl_threshold": hn.hscl_threshold,
    "supcon": hn.supcon,
    "decoupled": hn.decoupled,
    "simcse": hn.simcse,
    "clip": hn.clip,
    "graphcl": hn.graphcl,
    "moco": hn.moco,
    "instance_discrimination": hn.instance_discrimination,
    "ring_nce": hn.ring_nce,
}
SUPERVISED = {"scl", "hscl", "hscl_threshold", "supcon"}
MEMORY = {"moco", "instance_discrimination", "ring_nce"}


def run(loss: hn.InfoNCE, z1: Tensor, z2: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    z1, z2 = z1.clone().requires_grad_(), z2.clone().requires_grad_()
    extra: dict[str, Tensor] = {}
    if loss.supervision != "none":
        extra["labels"] = labels
    if loss.in_batch is None:
        extra["negatives"] = torch.cat([z1, z2]).detach()
    value = loss(z1, z2, **extra)
    value.backward()
    assert z1.grad is not None
    assert z2.grad is not None
    return value.detach(), z1.grad, z2.grad


@pytest.mark.filterwarnings("ignore:.*anchors are floored")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("kind", ["zero", "equal", "one_row", "opposite", "huge", "tiny", "one_class"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_presets_are_finite_on_degenerate_batches(name: str, kind: str, backend: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    z1, z2 = torch.randn(2, 6, 4, generator=generator)
    labels = torch.arange(6) % 3
    if kind == "zero":
        z1[0] = z2[3] = 0
    elif kind == "equal":
        z1[:], z2[:] = z1[0], z1[0]
    elif kind == "one_row":
        z1, z2, labels = z1[:1], z2[:1], labels[:1]
    elif kind == "opposite":
        z2 = -z1
    elif kind == "huge":
        z1, z2 = z1 * (1e4 if dtype == torch.float16 else 1e30), z2
    elif kind == "tiny":
        z1, z2 = z1 * (1e-3 if dtype == torch.float16 else 1e-25), z2
    elif kind == "one_class":
        labels = torch.zeros_like(labels)
    value, grad1, grad2 = run(PRESETS[name](backend=backend), z1.to(dtype), z2.to(dtype), labels)
    for tensor in (value, grad1, grad2):
        assert torch.isfinite(tensor).all()


@pytest.mark.filterwarnings("ignore:.*anchors are floored")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sharpness", [100.0, 500.0, 2000.0])
@pytest.mark.parametrize("beta", [0.0, 1.0, 50.0])
@pytest.mark.parametrize("prior", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("form", ["hcl", "exact"])
def test_no_overflow_up_to_an_exponent_of_2000(
    backend: str, sharpness: float, beta: float, prior: float, form: str
) -> None:
    loss = hn.hcl(beta, prior, temperature=(1 + beta) / sharpness, debias=form, backend=backend)
    generator = torch.Generator().manual_seed(1)
    z1 = torch.randn(8, 5, generator=generator)
    for noise in (0.0, 0.1, 2.0):
        z2 = z1 + noise * torch.randn(8, 5, generator=generator)
        for tensor in run(loss, z1, z2, torch.arange(8)):
            assert torch.isfinite(tensor).all()


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 6),
    dim=st.integers(1, 5),
    entries=st.data(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    backend=st.sampled_from(BACKENDS),
    beta=st.sampled_from([0.0, 0.5, 1.0, 7.0]),
    prior=st.sampled_from([0.0, 0.1, 0.5]),
    temperature=st.sampled_from([0.01, 0.07, 0.5, 10.0]),
)
@pytest.mark.filterwarnings("ignore:.*anchors are floored")
def test_any_finite_embedding_gives_a_finite_loss_and_gradient(
    rows: int,
    dim: int,
    entries: st.DataObject,
    dtype: torch.dtype,
    backend: str,
    beta: float,
    prior: float,
    temperature: float,
) -> None:
    # Entries of all magnitudes that 16-bit floats represent well, with zeros and repeats.
    number = st.sampled_from([0.0, 1.0, -1.0, 0.5, 3.0, -2.0, 1e-2, 1e3, -1e3])
    flat = entries.draw(st.lists(number, min_size=2 * rows * dim, max_size=2 * rows * dim))
    z1, z2 = torch.tensor(flat, dtype=dtype).reshape(2, rows, dim)
    for tensor in run(hn.hcl(beta, prior, temperature, backend=backend), z1, z2, torch.zeros(rows, dtype=torch.long)):
        assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_zero_vector_stays_zero_and_gets_no_gradient(backend: str) -> None:
    z1, z2 = torch.randn(2, 5, 4)
    z1[2] = 0
    _, grad, _ = run(hn.hcl(backend=backend), z1, z2, torch.arange(5))
    assert (grad[2] == 0).all()
    assert (grad[0] != 0).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options", [{}, {"positive_in_denominator": False}, {"class_prior": 0.1}, {"in_batch": "other"}]
)
def test_a_single_row_has_zero_loss_and_gradient(backend: str, options: dict[str, object]) -> None:
    value, grad1, grad2 = run(hn.InfoNCE(backend=backend, **options), *torch.randn(2, 1, 4), torch.zeros(1).long())  # type: ignore[arg-type]
    assert value == 0
    assert (grad1 == 0).all()
    assert (grad2 == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("preset", [hn.scl, hn.hscl, hn.supcon])
def test_a_batch_of_one_class_has_no_negatives(backend: str, preset: object) -> None:
    loss = preset(backend=backend)  # type: ignore[operator]
    value, grad1, grad2 = run(loss, *torch.randn(2, 6, 4), torch.zeros(6).long())
    assert value == 0
    assert (grad1 == 0).all()
    assert (grad2 == 0).all()
    assert loss.diagnostics()["without_candidates"] == 12


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_anchor_without_negatives_is_not_averaged(backend: str) -> None:
    z1, z2, negatives = torch.randn(4, 3), torch.randn(4, 3), torch.randn(5, 3)
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[1] = False
    loss = hn.moco(backend=backend)
    kept = [0, 2, 3]
    expected = loss(z1[kept], z2[kept], negatives=negatives)
    z1.requires_grad_()
    found = loss(z1, z2, negatives=negatives, negative_mask=mask)
    found.backward()
    assert_close(found, expected)
    assert z1.grad is not None
    assert (z1.grad[1] == 0).all()
    assert loss.diagnostics()["without_candidates"] == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_anchor_without_positives_is_not_averaged(backend: str) -> None:
    z = torch.randn(5, 4, requires_grad=True)
    labels = torch.tensor([0, 0, 1, 1, 2])  # the last has no positive
    losses = hn.scl(backend=backend, reduction="none")(z, labels=labels)
    mean = hn.scl(backend=backend)(z, labels=labels)
    assert losses[4] == 0
    assert_close(mean, losses[:4].mean())
    grad = torch.autograd.grad(losses[4], z)[0]
    assert (grad == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("average", ["anchors", "pairs"])
@pytest.mark.parametrize(
    ("combine", "decoupled"),
    [
        ("mean_of_logs", False),
        ("mean_of_logs", True),
        ("log_of_mean", False),
        ("log_of_mean", True),
        ("in_denominator", False),
    ],
)
def test_every_way_of_combining_positives_is_finite_for_anchors_without_positives(
    backend: str, combine: str, average: str, decoupled: bool
) -> None:
    z = torch.randn(5, 4, requires_grad=True)
    loss = hn.InfoNCE(
        supervision="full",
        class_prior=0.05,
        combine_positives=combine,
        average=average,
        positive_in_denominator=not decoupled,
        backend=backend,
    )
    value = loss(z, labels=torch.tensor([0, 0, 1, -1, 2]))
    value.backward()
    assert torch.isfinite(value)
    assert z.grad is not None
    assert torch.isfinite(z.grad).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_negatives_of_a_floored_anchor_get_no_gradient(backend: str) -> None:
    z1 = torch.eye(4, 8)
    z2 = z1.clone()
    negatives = -torch.eye(4, 8).roll(1, 0).requires_grad_()
    loss = hn.moco(temperature=0.1, class_prior=0.1, backend=backend)
    with pytest.warns(UserWarning, match="4 of 4 anchors are floored"):
        grad = torch.autograd.grad(loss(z1, z2, negatives=negatives), negatives)[0]
    assert (grad == 0).all()
    assert loss.diagnostics()["floored"] == 4


def test_the_warning_about_floored_anchors_is_given_once(recwarn: pytest.WarningsRecorder) -> None:
    z = torch.eye(6, 8)
    loss = hn.debiased(0.5, temperature=0.05)
    for _ in range(3):
        loss(z, z)
    assert len([w for w in recwarn if "floored" in str(w.message)]) == 1


def test_unnormalized_scores_that_would_overflow_raise() -> None:
    with pytest.raises(ValueError, match="too large for normalize=False"):
        hn.InfoNCE(normalize=False)(torch.full((4, 3), 1e20), torch.full((4, 3), 1e20))


def test_positives_that_would_overflow_raise() -> None:
    loss = hn.InfoNCE(in_batch=None, normalize=False)
    with pytest.raises(ValueError, match="too large for normalize=False"):
        loss(torch.full((2, 3), 1e10), torch.full((2, 3), 1e30), negatives=torch.full((4, 3), 1e-10))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_runs_in_inference_mode(name: str) -> None:
    z1, z2 = torch.randn(2, 6, 4)
    loss = PRESETS[name]()
    extra: dict[str, Tensor] = {"labels": torch.arange(6) % 2} if name in SUPERVISED else {}
    if name in MEMORY:
        extra["negatives"] = torch.randn(9, 4)
    with torch.inference_mode():
        inside = loss(z1, z2, **extra)
    assert_close(inside, loss(z1, z2, **extra))
    assert loss.diagnostics()["anchors"] > 0


@pytest.mark.parametrize("name", ["moco", "ring_nce"])
@pytest.mark.parametrize("options", [{}, {"weight_range": 2.0, "normalize": False}, {"num_negatives": 3}])
def test_an_empty_queue_gives_zero(name: str, options: dict[str, object]) -> None:
    z1, z2 = torch.randn(2, 6, 4)
    loss = PRESETS[name](**options)
    z1.requires_grad_()
    value = loss(z1, z2, negatives=torch.empty(0, 4))
    value.backward()
    assert value == 0
    assert z1.grad is not None
    assert (z1.grad == 0).all()
    assert loss.diagnostics()["without_candidates"] == 6


def test_weights_of_tiny_unnormalized_scores_are_finite() -> None:
    loss = hn.InfoNCE(in_batch=None, normalize=False, weight_range=2.0, hardening=hn.Exponential(1.0), class_prior=0.1)
    z1, z2, negatives = torch.randn(6, 4), torch.randn(6, 4), torch.randn(5, 4)
    for tiny in (1e-12, 1e-39):
        exact = loss(z1.double(), z2.double(), negatives=tiny * negatives.double())
        assert_close(loss(z1, z2, negatives=tiny * negatives).double(), exact, rtol=1e-4, atol=1e-4)


def test_float16_rows_too_short_for_a_finite_gradient_are_treated_as_zero() -> None:
    z1, z2 = torch.randn(2, 6, 4)
    z1 = (z1 * 1e-6).half().requires_grad_()
    hn.simclr()(z1, z2.half()).backward()
    assert z1.grad is not None
    assert torch.isfinite(z1.grad).all()


def test_the_loss_can_be_added_to_in_place() -> None:
    z1, z2 = torch.randn(2, 6, 4)
    z1.requires_grad_()
    total = hn.moco()(z1, z2, negatives=torch.randn(5, 4))
    total += 1.0
    total.backward()
    assert z1.grad is not None

"""Sources of candidates by name, a scale of the call's own, and the errors of what does not fit together."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import hardneg as hn

BACKENDS = ("reference", "tiled")


def tensors(rows: int = 6, dim: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z1, z2 (B, d), mined (B, 3, d) and a queue (9, d)."""
    generator = torch.Generator().manual_seed(1)
    shapes = (rows, dim), (rows, dim), (rows, 3, dim), (9, dim)
    first, second, mined, queue = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return first, second, mined, queue


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"hardening": (hn.Ring(0.2, 0.9), hn.Exponential(1.0)), "class_prior": 0.02}])
def test_a_single_hardening_is_one_distribution_over_all_sources(options: dict[str, Any], backend: str) -> None:
    z1, z2, _, queue = tensors()
    loss = hn.InfoNCE(**options, backend=backend)
    whole = loss(z1, z2, negatives=queue, exclude=torch.arange(6))
    parts = loss(
        z1, z2, negatives={"new": queue[:4], "old": queue[4:]},
        exclude={"new": torch.arange(4)[[0, 1, 2, 3, 0, 0]], "old": torch.tensor([0, 0, 0, 0, 0, 1])},
        negative_mask={"new": torch.tensor([True] * 4 + [False] * 2)[:, None] | ~torch.eye(6, 4, dtype=torch.bool)},
    )  # fmt: skip
    assert_close(loss(z1, z2, negatives={"any name": queue}, exclude={"any name": torch.arange(6)}), whole)
    # Rows 4 and 5 exclude other rows than above, so only the first four anchors of each view agree.
    loss.reduction = "none"
    rows = torch.tensor([0, 1, 2, 3, 6, 7, 8, 9])
    masked = torch.arange(9) != torch.arange(6)[:, None]
    both = loss(z1, z2, negatives={"new": queue[:4], "old": queue[4:]},
                negative_mask={"new": masked[:, :4], "old": masked[:, 4:]})  # fmt: skip
    assert_close(both[rows], loss(z1, z2, negatives=queue, exclude=torch.arange(6))[rows])
    assert_close(both.mean(), whole)
    assert parts.isfinite()


@pytest.mark.parametrize("backend", BACKENDS)
def test_totals_of_sources_are_added(backend: str) -> None:
    # log(Q·G) is the log of the sum of the sources' Q·G, each of which is that of a loss with this source alone.
    z1, z2, mined, queue = tensors()
    options: dict[str, Any] = {"positive_in_denominator": False, "reduction": "none", "backend": backend}
    batch = hn.InfoNCE(hardening=hn.BelowPositive(), in_batch="other", class_prior=0.02, **options)(z1, z2)
    of_mined = hn.InfoNCE(in_batch=None, **options)(z1, z2, negatives=mined)
    of_queue = hn.InfoNCE(in_batch=None, hardening=hn.Exponential(2.0), **options)(z1, z2, negatives=queue)
    hardening = {"batch": hn.BelowPositive(), "queue": hn.Exponential(2.0)}
    loss = hn.InfoNCE(hardening=hardening, in_batch="other", class_prior=0.02, **options)
    found = loss(z1, z2, negatives={"mined": mined, "queue": queue})
    # An anchor whose batch is empty has the loss 0 alone, and adds nothing here.
    kept = torch.where(batch == 0, -torch.inf, batch)
    assert_close(found, torch.logsumexp(torch.stack([kept, of_mined, of_queue]), dim=0))
    assert loss.diagnostics()["anchors"] == 6


def test_curated_negatives_are_kept_where_those_of_the_batch_are_dropped() -> None:
    z1, z2, _, _ = tensors()
    everywhere = hn.InfoNCE(hardening=hn.BelowPositive(100.0), in_batch="other")
    assert float(everywhere(z1, z2, negatives=z1)) == 0.0
    loss = hn.InfoNCE(hardening={"batch": hn.BelowPositive(100.0)}, in_batch="other")
    assert_close(loss(z1, z2, negatives=z1), hn.InfoNCE(in_batch=None)(z1, z2, negatives=z1))


def test_an_empty_source_changes_nothing() -> None:
    z1, z2, mined, queue = tensors()
    loss = hn.InfoNCE(hardening={"queue": hn.Ring(0.5, 1.0)})
    assert_close(loss(z1, z2, negatives={"queue": queue[:0]}), hn.simclr()(z1, z2))
    assert_close(
        loss(z1, z2, negatives={"queue": queue, "mined": mined[:, :0]}), loss(z1, z2, negatives={"queue": queue})
    )


def test_a_hardening_by_source_is_fixed_but_can_be_assigned_and_copied() -> None:
    loss = hn.InfoNCE(hardening={"batch": hn.Exponential(hn.Linear(0.0, 2.0))})
    with pytest.raises(TypeError):
        loss.hardening["batch"] = hn.Uniform()  # type: ignore[index, call-overload]
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        other.set_progress(1.0)
        loss.set_progress(1.0)
        assert_close(other(*tensors()[:2]), loss(*tensors()[:2]))
    assert_close(loss(*tensors()[:2]), hn.InfoNCE(hardening=hn.Exponential(2.0))(*tensors()[:2]))
    loss.hardening = {"batch": hn.Uniform()}
    assert_close(loss(*tensors()[:2]), hn.simclr()(*tensors()[:2]))
    with pytest.raises(ValueError, match=r"hardening\['queue'\] takes at most one tilt"):
        loss.hardening = {"queue": (hn.Exponential(1.0), hn.Exponential(2.0))}
    assert_close(loss(*tensors()[:2]), hn.simclr()(*tensors()[:2]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hardening": {}}, "hardening={} names no source"),
        ({"hardening": {1: hn.Uniform()}}, "hardening must have names of sources as keys"),
        ({"hardening": {"batch": 1.0}}, r"hardening\['batch'\] must be a Hardening or a tuple of them, got 1.0"),
        ({"hardening": {"batch": hn.Uniform()}, "negative_count": 7.0}, "negative_count=7.0 does not fit"),
        ({"hardening": {"batch": hn.Uniform()}, "num_negatives": 7}, "num_negatives=7 does not fit"),
        ({"hardening": {"batch": hn.Uniform()}, "in_batch": None}, "source 'batch', but in_batch=None"),
        ({"hardening": {"given": hn.Uniform()}, "in_batch": None, "class_prior": 0.1}, "class_prior=0.1 debiases"),
        ({"hardening": {"given": hn.Custom(torch.exp)}, "backend": "tiled"}, "cannot run Custom weights"),
        ({"normalize_weights": False, "class_prior": 0.1}, "normalize_weights=False contradicts class_prior=0.1"),
        ({"normalize_weights": 1}, "normalize_weights must be True or False"),
        ({"combine_positives": "log_of_sums"}, "did you mean 'log_of_sum'"),
    ],
)
def test_settings_that_do_not_fit_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hn.InfoNCE(**options)


@pytest.mark.parametrize("preset", [hn.hcl, hn.hscl, hn.ring_nce, hn.hscl_threshold])
def test_presets_with_a_hardening_take_none_by_source(preset: Any) -> None:
    with pytest.raises(ValueError, match="takes no hardening by source"):
        preset(hardening={"batch": hn.BelowPositive()})
    assert isinstance(hn.moco(hardening={"queue": hn.Ring(0.5, 0.9)}, normalize_weights=False), hn.InfoNCE)


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({}, {"negatives": {}}, "negatives={} names no source"),
        ({}, {"negatives": {"batch": torch.zeros(2, 4)}}, "choose another name"),
        ({}, {"negatives": {"q": torch.zeros(2, 3)}}, r"negatives\['q'\] must have shape"),
        ({}, {"negatives": {"q": torch.zeros(2, 4)}, "exclude": torch.zeros(6).long()}, "must both be mappings"),
        ({}, {"negatives": {"q": torch.zeros(2, 4)}, "exclude": {"p": torch.zeros(6).long()}}, "negatives has 'q'"),
        ({}, {"negatives": {"q": torch.zeros(2, 4)}, "exclude": {"q": torch.ones(6).long() * 2}}, "out of range"),
        ({}, {"exclude": {"q": torch.zeros(6).long()}}, "exclude names the source 'q', but negatives has 'given'"),
        ({"hardening": {"minde": hn.Uniform()}}, {"negatives": {"mined": torch.zeros(2, 4)}}, "source 'minde'"),
        ({"supervision": "full"},
         {"labels": torch.zeros(6).long(), "negatives": {"q": torch.zeros(2, 4)}}, r"needs negative_labels\['q'\]"),
        ({}, {"negatives": torch.zeros(2, 4), "negative_labels": torch.zeros(2).long()}, "ignores them"),
        ({}, {"ids": torch.zeros(5).long()}, r"ids must have shape \(6,\)"),
        ({}, {"ids": torch.zeros(6, 3).long()}, r"ids must have shape \(6, 2\)"),
        ({}, {"ids": torch.full((6,), -2)}, "ids must be ≥ −1"),
        ({}, {"ids": torch.zeros(6)}, "ids must have an integer dtype"),
        ({}, {"not_negatives": torch.zeros(1, 2).long()}, "not_negatives was given without ids"),
        ({}, {"ids": torch.zeros(6).long(), "not_negatives": torch.zeros(2).long()}, "not_negatives must have shape"),
        ({}, {"ids": torch.zeros(6).long(), "not_negatives": -torch.ones(1, 2).long()}, "not_negatives must hold ids"),
        ({}, {"negatives": torch.zeros(2, 4), "negative_ids": torch.zeros(2).long()}, "were given without ids"),
        ({}, {"ids": torch.zeros(6).long(), "negative_ids": torch.zeros(2).long()}, "was given without negatives"),
        ({}, {"scale": 0.0}, "scale must be > 0"),
        ({}, {"scale": torch.tensor([2.0])}, "without dimensions"),
        ({}, {"scale": torch.tensor(-1.0)}, "scale must be > 0"),
        ({"hardening": hn.Threshold(cosine=0.1)}, {"scale": 2.0}, "leave scale out"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_raise(options: dict[str, Any], given: dict[str, Any], message: str) -> None:
    z1, z2 = torch.randn(6, 4), torch.randn(6, 4)
    with pytest.raises(ValueError, match=message):
        hn.InfoNCE(**options)(z1, z2, **given)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"hardening": hn.Exponential(1.5), "class_prior": 0.05}, {"hardening": {"batch": hn.Exponential(1.5)}}],
)
def test_a_scale_replaces_the_temperature_and_has_a_gradient(options: dict[str, Any], backend: str) -> None:
    z1, z2, _, queue = tensors()
    loss = hn.InfoNCE(temperature=0.2, **options, backend=backend)
    expected = hn.InfoNCE(temperature=1 / 3.5, **options, backend=backend)(z1, z2, negatives=queue)
    assert_close(loss(z1, z2, negatives=queue, scale=3.5), expected)
    scale = torch.tensor(3.5, dtype=torch.float64, requires_grad=True)
    found = loss(z1, z2, negatives=queue, scale=scale)
    assert_close(found, expected)
    found.backward()
    step = 1e-5
    ends = [float(loss(z1, z2, negatives=queue, scale=3.5 + sign * step)) for sign in (1, -1)]
    assert scale.grad is not None
    assert float(scale.grad) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6)
    assert abs(float(scale.grad)) > 1e-3
    (slope,) = torch.autograd.grad(loss(z1, z2, scale=scale), scale, create_graph=True)
    assert torch.autograd.grad(slope, scale)[0].abs() > 0
    # The next call has the temperature again.
    assert_close(loss(z1, z2), hn.InfoNCE(temperature=0.2, **options, backend=backend)(z1, z2))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("alpha", [0.5, 4.0, 20.0])
def test_unnormalized_weights_are_the_hardness_of_sentence_transformers(alpha: float, backend: str) -> None:
    # MultipleNegativesRankingLoss(hardness_strength=α) adds α·cos, without gradient, to the logits of negatives.
    z1, z2, _, queue = tensors()
    temperature = 0.05
    results = []
    for ours in (True, False):
        a, b = (z.clone().requires_grad_() for z in (z1, z2))
        if ours:
            loss = hn.simcse(
                temperature, hardening=hn.Exponential(alpha * temperature), normalize_weights=False,
                grad_through_weights=False, backend=backend,
            )  # fmt: skip
            value = loss(a, b, negatives=queue)
        else:
            unit = [torch.nn.functional.normalize(z, dim=1) for z in (a, b, queue)]
            cosines = unit[0] @ torch.cat(unit[1:]).T
            negative = torch.ones_like(cosines) - torch.eye(*cosines.shape, dtype=torch.float64)
            logits = cosines / temperature + alpha * cosines.detach() * negative
            value = torch.nn.functional.cross_entropy(logits, torch.arange(len(a)))
        value.backward()
        results.append([value.detach(), a.grad, b.grad])
    for one, other in zip(*results, strict=True):
        assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_no_new_argument_may_be_overwritten_before_the_backward_pass() -> None:
    z1, z2, mined, queue = tensors()
    given: dict[str, Any] = {
        "negatives": {"mined": mined, "queue": queue}, "ids": torch.arange(6), "not_negatives": torch.tensor([[0, 3]]),
        "negative_ids": {"queue": torch.arange(9)}, "negative_mask": {"mined": torch.ones(6, 3).bool()},
        "scale": torch.tensor(2.0, dtype=torch.float64),
    }  # fmt: skip
    changed = [mined, queue, given["ids"], given["not_negatives"], given["negative_ids"]["queue"],
               given["negative_mask"]["mined"], given["scale"]]  # fmt: skip
    for tensor in changed:
        value = hn.InfoNCE(backend="tiled")(z1.requires_grad_(), z2, **given)
        tensor.copy_(tensor.clone())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.backward()

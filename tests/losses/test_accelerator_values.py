"""On an accelerator a bad value makes the loss and its gradients NaN: no error, no assertion on the device.

Here the CPU takes the place of an accelerator; `tests/losses/kernels/test_fused_gpu.py` runs on a real one.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import hardneg as hn
from hardneg import checks
from hardneg.losses.kernels import tiled
from hardneg.losses.kernels.interface import PairSupport

BATCH, DIM, NEGATIVES = 6, 4, 9


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as an accelerator, and fail at an assertion on the device."""
    monkeypatch.setattr(checks, "on_accelerator", lambda device: True)

    def refuse(*args: Any) -> None:
        raise AssertionError("an assertion on the device would end its use by this process")

    monkeypatch.setattr(torch, "_assert_async", refuse)
    monkeypatch.setattr(tiled, "pair_support", PairSupport(device="cuda"))  # its short path is for a CPU


def arguments() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "z1": torch.randn(BATCH, DIM, generator=generator),
        "z2": torch.randn(BATCH, DIM, generator=generator),
        "several": torch.randn(BATCH, 3, DIM, generator=generator),
        "negatives": torch.randn(NEGATIVES, DIM, generator=generator),
        "labels": torch.tensor([0, 0, 1, 1, 2, -1]),
        "negative_labels": torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, -1]),
        "exclude": torch.arange(BATCH),
    }


# Options of the loss, the arguments of the call by their names in `arguments`, and which of them gets which value.
CASES: dict[str, tuple[dict[str, Any], dict[str, str], str, float]] = {
    "NaN in z1": ({}, {"z2": "z2"}, "z1", torch.nan),
    "inf in z2": ({"hardening": hn.Exponential(1.0), "class_prior": 0.1}, {"z2": "z2"}, "z2", torch.inf),
    "NaN in a ring": ({"hardening": hn.Ring(0.2, 0.8)}, {"z2": "z2"}, "z1", torch.nan),
    "NaN above a threshold": ({"hardening": hn.Threshold(cosine=0.1)}, {"z2": "z2"}, "z2", torch.nan),
    "NaN as positive": ({"hardening": hn.BelowPositive()}, {"z2": "z2"}, "z2", torch.nan),
    "−inf without normalization": ({"normalize": False}, {"z2": "z2"}, "z2", -torch.inf),
    "overflow without normalization": ({"normalize": False}, {"z2": "z2"}, "z2", 3e38),
    "NaN with rescaled weights": (
        {"normalize": False, "weight_range": 2.0, "hardening": hn.Exponential(1.0)}, {"z2": "z2"}, "z2", torch.nan
    ),
    "NaN among several positives": ({}, {"z2": "several"}, "several", torch.nan),
    "NaN in negatives": ({"in_batch": None}, {"z2": "z2", "negatives": "negatives"}, "negatives", torch.nan),
    "drawn negatives": ({"num_negatives": 3}, {"z2": "z2"}, "z1", torch.nan),
    "one loss per anchor": ({"reduction": "none"}, {"z2": "z2"}, "z1", torch.nan),
    "sum": ({"reduction": "sum", "in_batch": "other", "symmetric": True}, {"z2": "z2"}, "z1", torch.nan),
    "decoupled": ({"positive_in_denominator": False}, {"z2": "z2"}, "z1", torch.nan),
    "label": ({"supervision": "full"}, {"z2": "z2", "labels": "labels"}, "labels", -2),
    "label of one view": ({"supervision": "positives", "combine_positives": "in_denominator"}, {"labels": "labels"},
                          "labels", -7),
    "label of a negative": (
        {"supervision": "full"},
        {"z2": "z2", "labels": "labels", "negatives": "negatives", "negative_labels": "negative_labels"},
        "negative_labels", -2,
    ),
    "index too large": (
        {"in_batch": None}, {"z2": "z2", "negatives": "negatives", "exclude": "exclude"}, "exclude", NEGATIVES
    ),
    "index far too large": ({}, {"z2": "z2", "negatives": "negatives", "exclude": "exclude"}, "exclude", 1 << 40),
    "negative index": (
        {"negative_count": "batch"}, {"z2": "z2", "negatives": "negatives", "exclude": "exclude"}, "exclude", -1
    ),
}  # fmt: skip


def computed(options: dict[str, Any], names: dict[str, str], given: dict[str, Tensor], backend: str) -> list[Tensor]:
    """The loss, and the gradients of the embeddings."""
    chosen = {"z1": given["z1"], **{name: given[source] for name, source in names.items()}}
    leaves = [chosen[name].requires_grad_() for name in ("z1", "z2") if name in chosen]
    if "num_negatives" in options:
        options = {**options, "generator": torch.Generator().manual_seed(0)}
    loss = hn.InfoNCE(**options, backend=backend)(**chosen)
    return [loss, *torch.autograd.grad(loss.sum(), leaves)]


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("case", CASES)
def test_a_bad_value_gives_a_nan_loss_and_nan_gradients(case: str, backend: str, accelerator: None) -> None:
    options, names, spoiled, value = CASES[case]
    given = arguments()
    given[spoiled].view(-1)[5] = value
    loss, *gradients = computed(options, names, given, backend)
    assert loss.isnan().all()
    for gradient in gradients:
        assert gradient.isnan().any()


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("case", CASES)
def test_good_values_give_the_same_loss_as_on_a_cpu(case: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, names, *_ = CASES[case]
    expected = computed(options, names, arguments(), backend)
    assert expected[0].isfinite().all()
    with monkeypatch.context() as patched:
        patched.setattr(checks, "on_accelerator", lambda device: True)
        found = computed(options, names, arguments(), backend)
    assert_close(found, expected, rtol=1e-5, atol=1e-6)  # a CPU normalizes in another order


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -1.0])
def test_bad_custom_weights_give_a_nan_loss(value: float, accelerator: None) -> None:
    given = arguments()

    def weigh(scores: Tensor) -> Tensor:
        return torch.where(scores > 0.3, value, scores.exp())

    loss = hn.InfoNCE(hardening=hn.Custom(weigh))(given["z1"], given["z2"])
    assert loss.isnan()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_bad_custom_log_weights_give_a_nan_loss(value: float, accelerator: None) -> None:
    given = arguments()

    def weigh(scores: Tensor) -> Tensor:
        return torch.where(scores > 0.3, value, scores)

    loss = hn.InfoNCE(hardening=hn.Custom(weigh, log=True), class_prior=0.1)(given["z1"], given["z2"])
    assert loss.isnan()


def test_custom_weights_of_zero_still_leave_candidates_out(accelerator: None) -> None:
    given = arguments()
    loss = hn.InfoNCE(hardening=hn.Custom(lambda scores: (scores > 0).to(scores)))(given["z1"], given["z2"])
    assert_close(loss, hn.InfoNCE(hardening=hn.Threshold(1.0))(given["z1"], given["z2"]))


def call_with_sources() -> dict[str, Any]:
    """A call with every argument of sources, ids and scales, all of them valid."""
    given = arguments()
    generator = torch.Generator().manual_seed(1)
    return {
        "z1": given["z1"],
        "z2": given["z2"],
        "labels": given["labels"],
        "negatives": {"mined": torch.randn(BATCH, 2, DIM, generator=generator), "queue": given["negatives"]},
        "exclude": {"queue": given["exclude"]},
        "negative_labels": {"mined": torch.full((BATCH, 2), 3), "queue": given["negative_labels"]},
        "negative_ids": {"mined": torch.arange(2 * BATCH).view(BATCH, 2), "queue": torch.arange(NEGATIVES)},
        "ids": torch.arange(BATCH),
        "not_negatives": torch.tensor([[0, 1], [2, 7], [3, 3]]),
        "scale": torch.tensor(2.0),
    }


SOURCE_CASES: dict[str, tuple[str, str | None, float]] = {
    "NaN in rows per anchor": ("negatives", "mined", torch.nan),
    "inf in a second source": ("negatives", "queue", torch.inf),
    "index into a second source": ("exclude", "queue", NEGATIVES),
    "label of rows per anchor": ("negative_labels", "mined", -2),
    "label of a second source": ("negative_labels", "queue", -2),
    "id of rows per anchor": ("negative_ids", "mined", -2),
    "id of a second source": ("negative_ids", "queue", -2),
    "id": ("ids", None, -2),
    "id of a pair": ("not_negatives", None, -1),
    "negative scale": ("scale", None, -2.0),
    "infinite scale": ("scale", None, torch.inf),
    "NaN as scale": ("scale", None, torch.nan),
}


@pytest.mark.parametrize("hardening", [hn.Ring(0.1, 0.9), {"batch": hn.Exponential(1.0), "queue": hn.Ring(0.1, 0.9)}])
@pytest.mark.parametrize("case", SOURCE_CASES)
def test_a_bad_value_of_any_source_gives_a_nan_loss(case: str, hardening: Any, accelerator: None) -> None:
    loss = hn.InfoNCE(hardening=hardening, supervision="full")
    assert loss(**call_with_sources()).isfinite()
    name, source, value = SOURCE_CASES[case]
    call = call_with_sources()
    spoiled = call[name] if source is None else call[name][source]
    spoiled.view(-1)[-1] = value
    z1 = call["z1"].requires_grad_()
    found = loss(**call)
    assert found.isnan()
    (gradient,) = torch.autograd.grad(found, z1, create_graph=True)
    assert gradient.isnan().any()
    assert torch.autograd.grad(gradient.sum(), z1)[0].isnan().any()


def test_bad_custom_weights_of_a_source_give_a_nan_loss(accelerator: None) -> None:
    call = call_with_sources()

    def weigh(scores: Tensor) -> Tensor:
        return torch.where(scores > 0.3, torch.nan, scores)

    loss = hn.InfoNCE(hardening={"batch": hn.Custom(weigh, log=True)}, class_prior=0.1)
    assert loss(call["z1"], call["z2"], negatives=call["negatives"]).isnan()


@pytest.mark.parametrize("spoiled", ["positive", "candidates"])
def test_bad_scores_give_a_nan_loss(spoiled: str, accelerator: None) -> None:
    given = {"positive": torch.rand(4, 2), "candidates": torch.rand(4, 5)}
    loss = hn.InfoNCE(hardening=hn.Threshold(score=0.5), num_negatives=2)
    assert loss.from_scores(**given).isfinite()
    given[spoiled][1, 1] = torch.inf
    assert loss.from_scores(**given).isnan()


def test_second_derivatives_of_a_bad_value_are_nan(accelerator: None) -> None:
    given = arguments()
    given["exclude"][0] = NEGATIVES
    z1 = given["z1"].requires_grad_()
    loss = hn.InfoNCE(backend="tiled")(z1, given["z2"], negatives=given["negatives"], exclude=given["exclude"])
    (gradient,) = torch.autograd.grad(loss, z1, create_graph=True)
    assert torch.autograd.grad(gradient.square().sum(), z1)[0].isnan().any()


JSD_CASES: dict[str, tuple[str, float]] = {
    "NaN in nodes": ("nodes", torch.nan),
    "inf in graphs": ("graphs", torch.inf),
    "overflow": ("graphs", 3e38),
    "graph too large": ("batch", 4),
    "negative graph": ("batch", -3),
    "label": ("labels", -2),
    "count": ("counts", 0),
}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("case", JSD_CASES)
def test_a_bad_value_gives_a_nan_jsd(case: str, reduction: Any, accelerator: None) -> None:
    generator = torch.Generator().manual_seed(0)
    given = {
        "nodes": torch.randn(7, DIM, generator=generator),
        "graphs": torch.randn(4, DIM, generator=generator),
        "batch": torch.tensor([0, 0, 1, 1, 2, 2, 3]),
        "labels": torch.tensor([0, 1, 0, -1]),
        "counts": torch.tensor([1, 2, 1, 1, 3, 1, 1]),
    }
    loss = hn.JSD(beta=1.0, class_prior=0.1, supervision="full", reduction=reduction)
    good = loss(**copy.deepcopy(given))
    assert good.isfinite().all()
    spoiled, value = JSD_CASES[case]
    given[spoiled].view(-1)[3] = value
    nodes = given["nodes"].requires_grad_()
    found = loss(**given)
    assert found.isnan().all()
    assert torch.autograd.grad(found.sum(), nodes)[0].isnan().any()


@pytest.mark.parametrize("form", ["paper", "published"])
@pytest.mark.parametrize(
    ("spoiled", "value"), [("z", torch.nan), ("z", torch.inf), ("rows", torch.nan), ("idx", 20), ("idx", -1)]
)
def test_a_bad_value_gives_a_nan_local_aggregation(spoiled: str, value: float, form: Any, accelerator: None) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(20, DIM, generator=generator)
    clusters = hn.Clusters(k=3, backend="torch").fit(rows)
    given = {"z": torch.randn(3, DIM, generator=generator), "rows": rows, "idx": torch.tensor([3, 14, 15])}
    loss = hn.LocalAggregation(background=5, form=form)
    assert loss(**given, clusters=clusters).isfinite()
    given[spoiled].view(-1)[2] = value
    z = given["z"].requires_grad_()
    found = loss(**given, clusters=clusters)
    assert found.isnan()
    assert torch.autograd.grad(found, z)[0].isnan().any()

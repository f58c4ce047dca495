"""Bad input raises ValueError naming the argument, the value given and the fix."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hardneg as hn
from hardneg.losses import presets

Z = torch.tensor([[1.0, 0.2, 0.0], [0.1, 1.0, 0.3], [-1.0, 0.4, 0.5], [0.3, -1.0, 0.2]])  # cosines of either sign
Y = torch.tensor([0, 1, 0, 1])
N = torch.cat([Z, -Z[:1]])
NAN = torch.tensor([[float("nan"), 0, 0]] + [[1.0, 0, 0]] * 3)
INF = torch.tensor([[float("inf"), 0, 0]] + [[1.0, 0, 0]] * 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, r"temperature must be > 0.*got 0"),
        ({"temperature": -1.5}, r"temperature must be > 0.*got -1.5"),
        ({"temperature": float("nan")}, r"temperature must be > 0.*got nan"),
        ({"temperature": "warm"}, r"temperature must be a number or a schedule, got 'warm'"),
        ({"temperature": hn.Linear(0.5, 0.0)}, r"temperature must be > 0.*got 0"),
        ({"class_prior": 1.0}, r"class_prior must be ≥ 0 and < 1, got 1"),
        ({"class_prior": -0.1}, r"class_prior must be ≥ 0 and < 1, got -0.1"),
        ({"debias": "hc"}, r"debias='hc' is not known: did you mean 'hcl'\?"),
        ({"in_batch": "bot"}, r"did you mean 'both'\?"),
        ({"supervision": "ful"}, r"did you mean 'full'\?"),
        ({"supervision": "zzz"}, r"choose one of 'none', 'positives', 'negatives', 'full'"),
        ({"combine_positives": "mean_of_log"}, r"did you mean 'mean_of_logs'\?"),
        ({"average": "pair"}, r"did you mean 'pairs'\?"),
        ({"negative_count": "suport"}, r"did you mean 'support'\?"),
        ({"negative_count": 0}, r"negative_count must be > 0"),
        ({"reduction": "avg"}, r"reduction='avg'"),
        ({"backend": "tile"}, r"did you mean 'tiled'\?"),
        ({"backend": "tiled", "hardening": hn.Custom(torch.exp)}, r"backend='tiled' cannot run Custom"),
        ({"symmetric": True}, r"symmetric=True needs in_batch='other', got in_batch='both'"),
        ({"normalize": "no"}, r"normalize must be True or False, got 'no'"),
        ({"generator": 3}, r"generator must be a torch.Generator or None, got 3"),
        ({"backend": "fused", "hardening": hn.Custom(torch.exp)}, r"backend='fused' cannot run Custom weights"),
        ({"num_negatives": 0}, r"num_negatives must be a whole number ≥ 1, got 0"),
        ({"num_negatives": 2.5}, r"num_negatives must be a whole number"),
        ({"weight_range": 0.0}, r"weight_range must be > 0"),
        ({"hardening": (hn.Exponential(1.0), hn.Exponential(2.0))}, r"at most one tilt"),
        ({"hardening": "hard"}, r"hardening must be a Hardening"),
        ({"combine_positives": "in_denominator", "positive_in_denominator": False}, r"contradicts"),
    ],
)
def test_invalid_settings_raise_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hn.InfoNCE(**options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hn.Exponential(-1.0), r"beta must be ≥ 0"),
        (lambda: hn.Threshold(0.0), r"tau must be > 0"),
        (lambda: hn.Ring(0.9, 0.5), r"lower must be < upper.*lower=0.9, upper=0.5"),
        (lambda: hn.Ring(0.5, 0.5), r"lower must be < upper"),
        (lambda: hn.Ring(-0.1, 0.5), r"lower must be ≥ 0"),
        (lambda: hn.Ring(0.1, 1.5), r"upper must be ≥ 0 and ≤ 1, got 1.5"),
        (lambda: hn.BelowPositive(relative=-1.0), r"relative must be > 0"),
        (lambda: hn.BelowPositive(margin=0.1, relative=0.9), r"not both"),
        (lambda: hn.Custom("exp"), r"fn must be callable"),
        (lambda: hn.Learnable(0.001, minimum=0.01), r"initial must be ≥ 0.01"),
        (lambda: hn.Learnable(0.1, minimum=0.0), r"minimum must be > 0"),
        (lambda: hn.Linear(0, 1, until=0), r"until must be > 0"),
        (lambda: hn.Steps([1.0], [0.5]), r"one more than boundaries"),
        (lambda: hn.Steps([1.0, 2.0, 3.0], [0.5, 0.5]), r"boundaries must increase"),
        (lambda: hn.HardnessAnneal(1.0, 0), r"changes must be a whole number ≥ 1"),
        (lambda: hn.HardnessAnneal(1.0, 2, "sideways"), r"'down' or 'up'"),
        (lambda: hn.Adaptive(start=2.0), r"start must be in"),
        (lambda: hn.Adaptive(step=0.0), r"step must be > 0"),
        (lambda: hn.Adaptive(better="more"), r"'higher' or 'lower'"),
        (lambda: hn.Adaptive().update(float("nan")), r"reading must be finite"),
        (lambda: hn.hscl_threshold(temperature=0), r"temperature must be > 0"),
        (lambda: hn.hscl_threshold(temperature=hn.Learnable(0.1)), r"temperature must be a number or a schedule"),
        (lambda: hn.ring_nce(lower=1.0, upper=1.0), r"lower must be ≥ 0 and < 1"),
        (lambda: hn.clip(temperature=hn.Linear(0.1, 0.05)), r"takes no schedule"),
        (lambda: hn.simclr().set_progress(1.5), r"fraction must be in \[0, 1\], got 1.5"),
    ],
)
def test_invalid_hardenings_schedules_and_presets_raise_at_construction(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, {"z1": Z[0], "z2": Z}, r"z1 must have shape \(B, d\).*got \(3,\)"),
        ({}, {"z1": Z[:0], "z2": Z[:0]}, r"z1 must have shape"),
        ({}, {"z1": Z, "z2": Z[:3]}, r"z2 must have shape.*got \(3, 3\)"),
        ({}, {"z1": Z, "z2": Z[:, :2]}, r"z2 must have shape"),
        ({}, {"z1": Z.long(), "z2": Z}, r"z1 must have a floating dtype, got torch.int64"),
        ({}, {"z1": Z.numpy(), "z2": Z}, r"z1 must be a torch.Tensor, got ndarray"),
        ({}, {"z1": Z, "z2": Z.numpy()}, r"z2 must be a torch.Tensor, got ndarray"),
        ({"supervision": "full"}, {"z1": Z, "z2": Y}, r"z2 must hold the embeddings of the other view.*labels="),
        ({}, {"z1": Z, "z2": Y}, r"z2 must hold the embeddings of the other view, got dtype torch.int64"),
        ({}, {"z1": NAN, "z2": Z}, r"z1 holds NaN or inf"),
        ({}, {"z1": Z, "z2": INF}, r"z2 holds NaN or inf"),
        ({"in_batch": None}, {"z1": Z, "z2": Z, "negatives": NAN}, r"negatives holds NaN or inf"),
        ({}, {"z1": Z, "z2": Z, "labels": Y}, r"labels were given, but supervision='none'"),
        ({"supervision": "full"}, {"z1": Z, "z2": Z}, r"supervision='full' needs labels"),
        ({"supervision": "full"}, {"z1": Z, "z2": Z, "labels": Y[:3]}, r"labels must have shape \(4,\)"),
        ({"supervision": "full"}, {"z1": Z, "z2": Z, "labels": Y.float()}, r"labels must have an integer dtype"),
        ({"supervision": "full"}, {"z1": Z, "z2": Z, "labels": torch.eye(4)}, r"of one-hot rows labels\.argmax\(1\)"),
        ({"supervision": "full"}, {"z1": Z, "z2": Z, "labels": torch.eye(4).long()}, r"rows labels\.argmax\(1\)"),
        (
            {"supervision": "full"},
            {"z1": Z, "z2": Z, "labels": Y, "negatives": N, "negative_labels": torch.eye(5)},
            r"rows negative_labels\.argmax\(1\)",
        ),
        ({"supervision": "full"}, {"z1": Z, "z2": Z, "labels": Y[:, None]}, r"labels must have shape \(4,\)"),
        ({"supervision": "full"}, {"z1": Z, "z2": Z, "labels": Y - 5}, r"labels must be ≥ −1"),
        ({}, {"z1": Z}, r"one view needs positives from labels"),
        ({"supervision": "negatives"}, {"z1": Z, "labels": Y}, r"one view needs positives from labels"),
        ({"supervision": "full", "in_batch": "other"}, {"z1": Z, "labels": Y}, r"in_batch='other' needs a second view"),
        ({"in_batch": None}, {"z1": Z, "z2": Z}, r"in_batch=None takes no negatives from the batch"),
        ({}, {"z1": Z, "z2": Z, "negatives": N[:, :2]}, r"negatives must have shape"),
        ({}, {"z1": Z, "z2": Z, "negatives": torch.randn(3, 5, 3)}, r"negatives must have shape"),
        ({}, {"z1": Z, "z2": Z, "exclude": Y}, r"exclude was given without negatives"),
        ({}, {"z1": Z, "z2": Z, "negatives": N, "exclude": Y + 4}, r"exclude must hold indices from 0 to 4"),
        ({}, {"z1": Z, "z2": Z, "negatives": N, "exclude": Y - 1}, r"exclude must hold indices from 0 to 4"),
        ({}, {"z1": Z, "z2": Z, "negatives": N, "exclude": Y[:2]}, r"exclude must have shape \(4,\)"),
        ({}, {"z1": Z, "z2": Z, "negatives": N, "negative_mask": torch.ones(4, 5)}, r"must be a bool tensor"),
        ({}, {"z1": Z, "z2": Z, "negatives": N, "negative_mask": torch.ones(4, 4).bool()}, r"must have shape \(4, 5\)"),
        (
            {},
            {"z1": Z, "z2": Z, "negatives": N, "negative_labels": torch.zeros(5).long()},
            r"supervision='none' ignores",
        ),
        ({"supervision": "full"}, {"z1": Z, "z2": Z, "labels": Y, "negatives": N}, r"needs negative_labels"),
        (
            {"supervision": "full"},
            {"z1": Z, "z2": Z, "labels": Y, "negatives": N, "negative_labels": Y},
            r"negative_labels must have shape \(5,\)",
        ),
        ({"in_batch": "other", "symmetric": True}, {"z1": Z, "z2": Z[:, None]}, r"symmetric=True needs z2 of shape"),
    ],
)
def test_invalid_arguments_raise_at_the_call(
    options: dict[str, Any], arguments: dict[str, Any], message: str, backend: str
) -> None:
    with pytest.raises(ValueError, match=message):
        hn.InfoNCE(backend=backend, **options)(**arguments)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda s: s, r"fn must return finite weights ≥ 0"),
        (lambda s: (1000 * s.abs() + 1000).exp(), r"fn must return finite weights"),
        (lambda s: s.exp().sum(), r"fn must return a tensor of its input's shape"),
        (lambda s: 1.0, r"fn must return a tensor"),
    ],
)
def test_a_custom_function_that_returns_no_weights_raises(fn: Callable[[torch.Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hn.InfoNCE(hardening=hn.Custom(fn))(Z, Z.flip(0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hn.simclr(temprature=0.1), r"simclr\(\) has no argument 'temprature': did you mean temperature\?"),
        (
            lambda: hn.hcl(tau=0.1),
            r"hcl\(\) has no argument 'tau': it has beta, tau_plus, temperature and those of Inf",
        ),
        (lambda: hn.ring_nce(uper=0.9), "did you mean upper"),
        (lambda: hn.supcon(supervison="full"), r"supcon\(\) .* did you mean supervision"),
        (lambda: presets.infograph(publised=True), r"infograph\(\) .* did you mean published"),
    ],
)
def test_an_unknown_argument_of_a_preset_names_the_nearest(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize(
    ("loss", "arguments", "message"),
    [
        (hn.simclr(), {"z1": Z, "z2": Z, "labels": Y}, r"use hn\.scl\(\), hn\.hscl\(\) or hn\.supcon\(\), set superv"),
        (hn.simclr(), {"z1": Z.long(), "z2": Z.long()}, r"z1 must have a floating dtype, got torch\.int64"),
        (hn.simclr(), {"z1": Z, "z2": Z.long()}, r"z2 must have a floating dtype, got torch\.int64"),
        (hn.simclr(), {"z1": Z, "z2": Y}, r"z2 must hold the embeddings .*: pass labels by keyword, labels="),
        (hn.supcon(), {"z1": Z, "z2": Z, "labels": Y.tolist()}, r"labels .* got list: pass torch\.as_tensor\(labels\)"),
        (hn.simclr(), {"z1": Z}, r"pass the other view as z2, or pass labels= to .* hn\.supcon\(\)"),
        (hn.simclr(), {"z1": [{"input_ids": Y}], "z2": Y}, r"HardNegativeLoss\(model, loss\)"),
    ],
)
def test_an_error_names_the_fix_in_terms_of_presets(loss: hn.InfoNCE, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss(**arguments)


def test_labels_by_position_are_asked_for_by_keyword() -> None:
    with pytest.raises(TypeError, match="pass labels and all other arguments by keyword, labels="):
        hn.supcon()(Z, Z.flip(0), Y)  # type: ignore[arg-type]


def test_a_misspelled_name_of_the_package_suggests_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'simCLR': did you mean hardneg\.simclr\?"):
        hn.simCLR  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'tensorflow'$"):
        hn.tensorflow  # type: ignore[attr-defined]  # noqa: B018


def test_diagnostics_before_any_call_raise() -> None:
    with pytest.raises(RuntimeError, match="call the loss first"):
        hn.simclr().diagnostics()


@pytest.mark.parametrize("make", [lambda: hn.InfoNCE(0.5, hn.Uniform(), 0.1), lambda: hn.JSD(1.0, 0.1, 2.0)])  # type: ignore[call-arg, misc]
def test_further_settings_are_keyword_only(make: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match="positional argument"):
        make()

"""The fused kernel inside `torch.compile`: one node of one graph, with the results of eager mode."""

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from interpreter import process
from losses.kernels import interpreted
from torch import Tensor
from torch.testing import assert_close

import hardneg as hn
from hardneg.losses import paired
from hardneg.losses.hardening import Hardening

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is for Linux only")
Call = Callable[..., Any]

CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "hcl": ({"hardening": hn.Exponential(1.0), "class_prior": 0.1}, ["z2"]),
    "one loss per anchor": ({"reduction": "none"}, ["z2"]),
    "labels": ({"supervision": "full", "hardening": hn.Exponential(0.5)}, ["z2", "labels"]),
    "supcon, one view": ({"supervision": "full", "combine_positives": "in_denominator"}, ["labels"]),
    "labels of negatives": ({"supervision": "negatives"}, ["z2", "labels"]),
    "both directions, learned": (
        {"in_batch": "other", "symmetric": True, "temperature": hn.Learnable(0.2)},
        ["z2"],
    ),
    "queue": ({"in_batch": None, "hardening": hn.Threshold(0.5)}, ["z2", "negatives", "exclude"]),
    "ring": ({"in_batch": None, "hardening": hn.Ring(0.5, 0.9)}, ["z2", "negatives", "negative_mask"]),
}


@pytest.fixture(scope="module")
def call() -> Iterator[Call]:
    """Calls a function of `interpreted` in the process that interprets Triton."""
    with process(interpret=True) as made:
        yield made


def arguments() -> dict[str, Tensor]:
    return {
        "z1": torch.randn(7, 5),
        "z2": torch.randn(7, 5),
        "labels": torch.tensor([0, 1, 0, -1, 1, 2, -1]),
        "negatives": torch.randn(11, 5),
        "exclude": torch.randint(0, 11, (7, 2)),
        "negative_mask": torch.rand(7, 11) < 0.7,
    }


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_loss_is_one_operator_with_the_results_of_eager_mode(call: Call, name: str) -> None:
    options, names = CASES[name]
    every = arguments()
    (eager, compiled), operators = call(interpreted.run_compiled, options, {key: every[key] for key in ("z1", *names)})
    assert operators == 1
    assert_close(compiled.value, eager.value, rtol=0, atol=0)
    assert compiled.grads.keys() == eager.grads.keys()
    for key, grad in eager.grads.items():
        assert grad.abs().max() > 1e-4
        assert_close(compiled.grads[key], grad, rtol=0, atol=0)
    assert compiled.report == pytest.approx(eager.report)


OTHERS: dict[str, dict[str, Any]] = {
    "draws": {"num_negatives": 3},
    "unnormalized": {"normalize": False},
    "weight range": {"weight_range": 2.0},
    "below positive": {"hardening": hn.BelowPositive()},
    "custom weights": {"hardening": hn.Custom(torch.exp)},
    "exact debiasing": {"class_prior": 0.1, "debias": "exact"},
    "log of mean": {"combine_positives": "log_of_mean", "supervision": "full"},
    "tilted supcon": {
        "combine_positives": "in_denominator", "supervision": "full", "hardening": hn.Exponential(1.0),
    },
    "scheduled tilt": {"hardening": hn.Exponential(hn.Linear(1.0, 0.0))},
    "effective share": {"hardening": hn.Exponential(hn.EffectiveShare(0.5))},
    "scheduled temperature": {"temperature": hn.Linear(0.5, 0.1)},
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_settings_and_schedules_compile_the_reference_kernel(name: str) -> None:
    assert hn.InfoNCE(**OTHERS[name])._key is None
    assert hn.InfoNCE()._key is not None


def test_settings_have_the_same_key_only_if_they_are_equal() -> None:
    made = [{}, {"class_prior": 0.1}, {"hardening": hn.Exponential(1.0)}, {"hardening": hn.Exponential(1.0 + 1e-9)}]
    losses = [hn.InfoNCE(**options) for options in made]
    keys = {loss._key[0] for loss in losses if loss._key is not None}
    assert len(keys) == len(made)
    assert keys <= set(paired.KEYS)


@dataclass(frozen=True)
class Hidden(Hardening):
    """A hardening whose repr does not show its number."""

    low: float = field(repr=False)

    def bounds(self, positive: Tensor | None) -> tuple[float | None, float | None]:
        return self.low, None


def test_hardenings_of_users_have_no_key() -> None:
    assert hn.InfoNCE(hardening=Hidden(0.1))._key is None


def test_keys_are_forgotten_with_their_losses_and_known_to_copies() -> None:
    loss = hn.InfoNCE(temperature=0.123)
    packed = pickle.dumps(loss)
    assert loss._key is not None
    key, number = loss._key[0], len(paired.KEYS)
    for step in range(20):
        loss.temperature = 0.2 + step / 100
    del loss
    gc.collect()
    assert key not in paired.KEYS
    assert len(paired.KEYS) <= number
    again = pickle.loads(packed)
    assert again._key[0] == key
    assert key in paired.KEYS
    assert copy.deepcopy(again)._key[0] == key

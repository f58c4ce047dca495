"""Numbers and flags may be numpy scalars or tensors without dimensions; they are stored as Python numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import hardneg as hn
from hardneg.losses.presets import infograph

NUMBERS: dict[str, Callable[[Any], Any]] = {
    "numpy float32": lambda x: np.float32(x),
    "numpy array": lambda x: np.array(x),
    "tensor": lambda x: torch.tensor(x),
}
INTEGERS: dict[str, Callable[[Any], Any]] = {"numpy int64": np.int64, "numpy array": np.array, "tensor": torch.tensor}
BOOLS: dict[str, Callable[[Any], Any]] = {"numpy bool": np.bool_, "numpy array": np.array, "tensor": torch.tensor}


def views() -> tuple[Tensor, Tensor]:
    z1 = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    return z1, z1.roll(1, 1)


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("name", ["temperature", "class_prior", "negative_count", "weight_range"])
def test_numbers_of_infonce_are_stored_as_floats(name: str, kind: str) -> None:
    loss = hn.InfoNCE(**{name: NUMBERS[kind](0.25)})
    assert type(getattr(loss, name)) is float
    assert_close(loss(*views()), hn.InfoNCE(**{name: 0.25})(*views()))  # type: ignore[arg-type]
    setattr(loss, name, NUMBERS[kind](0.5))
    assert getattr(loss, name) == 0.5
    assert type(getattr(loss, name)) is float


@pytest.mark.parametrize("kind", INTEGERS)
def test_whole_numbers_are_stored_as_ints(kind: str) -> None:
    number = INTEGERS[kind](3)
    assert type(hn.InfoNCE(num_negatives=number).num_negatives) is int
    assert type(hn.JSD(tile=number).tile) is int
    assert type(hn.LocalAggregation(background=number).background) is int
    assert type(hn.HardnessAnneal(1.0, number).changes) is int
    assert type(hn.Adaptive(window=number).window) is int


@pytest.mark.parametrize("kind", BOOLS)
def test_flags_are_stored_as_bools(kind: str) -> None:
    flag = BOOLS[kind](False)
    assert hn.InfoNCE(normalize=flag).normalize is False
    assert hn.JSD(grad_through_weights=flag).grad_through_weights is False
    assert hn.Custom(torch.exp, log=flag).log is False
    with pytest.raises(ValueError, match="normalize must be True or False, got 1"):
        hn.InfoNCE(normalize=np.int64(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize(
    "make",
    [
        lambda x: hn.Exponential(x),
        lambda x: hn.Threshold(x),
        lambda x: hn.Threshold(score=x),
        lambda x: hn.Threshold(cosine=x),
        lambda x: hn.Ring(x, 1.0),
        lambda x: hn.Ring(0.0, x),
        lambda x: hn.BelowPositive(x),
        lambda x: hn.BelowPositive(relative=x),
    ],
)
def test_hardenings_of_converted_numbers_are_equal(make: Callable[[Any], hn.Hardening], kind: str) -> None:
    made = make(NUMBERS[kind](0.25))
    assert made == make(0.25)
    assert repr(made) == repr(make(0.25))


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize(
    "make",
    [
        lambda x: hn.Constant(x),
        lambda x: hn.Linear(x, x, x),
        lambda x: hn.Steps([x, x], [x]),
        lambda x: hn.HardnessAnneal(x, 2),
        lambda x: hn.RingAnneal(x, x, x),
        lambda x: hn.Adaptive(x, x, 2, x, x),
        lambda x: hn.Linear(0.5, 1.0) - x,
        lambda x: x - x * hn.Linear(0.5, 1.0) / x + x,
    ],
)
def test_schedules_of_converted_numbers_have_the_same_values(make: Callable[[Any], hn.Schedule], kind: str) -> None:
    made = make(NUMBERS[kind](0.25))
    assert repr(made) == repr(make(0.25))
    assert type(made.at(0.5)) is float


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize(
    "make",
    [
        lambda x: hn.simclr(x), lambda x: hn.debiased(x), lambda x: hn.hcl(x, x, x), lambda x: hn.scl(x),
        lambda x: hn.hscl(x, x), lambda x: hn.hscl_threshold(x, x, x), lambda x: hn.supcon(x),
        lambda x: hn.decoupled(x), lambda x: hn.simcse(x), lambda x: hn.clip(x), lambda x: hn.graphcl(x),
        lambda x: hn.moco(x), lambda x: hn.instance_discrimination(x),
        lambda x: hn.ring_nce(x, 2 * x, "step", x, x), lambda x: infograph(x, x),
        lambda x: hn.InfoNCE(hn.Learnable(x, x)), lambda x: hn.JSD(x, x, weight_range=x),
        lambda x: hn.LocalAggregation(x),
    ],
)  # fmt: skip
def test_presets_take_converted_numbers(make: Callable[[Any], torch.nn.Module], kind: str) -> None:
    assert repr(make(NUMBERS[kind](0.25))) == repr(make(0.25))


@pytest.mark.parametrize("temperature", [torch.nn.Parameter(torch.tensor(0.2)), torch.tensor(0.2, requires_grad=True)])
@pytest.mark.parametrize("make", [hn.InfoNCE, hn.simclr, hn.hcl, hn.clip, hn.hscl_threshold, hn.LocalAggregation])
def test_a_temperature_with_a_gradient_is_refused_and_learnable_named(make: Any, temperature: Tensor) -> None:
    with pytest.raises(ValueError, match=r"temperature requires a gradient: pass hn\.Learnable\(0\.2\)"):
        make(temperature=temperature)
    loss = hn.simclr()
    with pytest.raises(ValueError, match=r"temperature requires a gradient: pass hn\.Learnable"):
        loss.temperature = temperature  # type: ignore[assignment]
    assert loss.temperature == 0.5
    assert list(loss.parameters()) == []


def test_a_parameter_as_initial_value_of_a_learnable_temperature_raises() -> None:
    with pytest.raises(ValueError, match=r"initial requires a gradient: pass hn\.Learnable\(0\.2\)"):
        hn.Learnable(torch.nn.Parameter(torch.tensor(0.2)))  # type: ignore[arg-type]


def test_a_parameter_of_several_numbers_as_temperature_names_learnable() -> None:
    with pytest.raises(ValueError, match=r"temperature requires a gradient: pass hn\.Learnable\(0\.07\)"):
        hn.simclr(torch.nn.Parameter(torch.full((3,), 0.2)))  # type: ignore[arg-type]


def test_clip_takes_a_learnable_temperature_as_it_is() -> None:
    temperature = hn.Learnable(0.1, minimum=0.05)
    assert hn.clip(temperature=temperature).temperature is temperature
    assert float(hn.clip(0.1).temperature().detach()) == pytest.approx(0.1)  # type: ignore[operator]


@pytest.mark.parametrize("name", ["negative_count", "weight_range"])
def test_settings_without_schedules_refuse_them(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a number, got the schedule Linear"):
        hn.InfoNCE(**{name: hn.Linear(1.0, 2.0)})  # type: ignore[arg-type]

"""Checks of arguments: what they convert, and what they refuse."""

import numpy as np
import pytest
import torch

import hardneg as hn
from hardneg import checks


def test_as_tensor_returns_a_tensor_unchanged() -> None:
    tensor = torch.randn(3, requires_grad=True)
    assert checks.as_tensor("z", tensor) is tensor


def test_as_tensor_shares_the_memory_of_an_array() -> None:
    array = np.zeros((2, 3), dtype=np.float32)
    checks.as_tensor("z", array)[1, 2] = 5
    assert array[1, 2] == 5


@pytest.mark.parametrize("change", [lambda array: array[::-1], lambda array: array.astype(array.dtype.newbyteorder())])
def test_as_tensor_copies_arrays_that_torch_cannot_share(change) -> None:  # type: ignore[no-untyped-def]
    array = change(np.arange(6.0).reshape(2, 3))
    assert checks.as_tensor("z", array).tolist() == array.tolist()


def test_as_tensor_copies_a_read_only_array(recwarn: pytest.WarningsRecorder) -> None:
    array = np.arange(3)
    array.flags.writeable = False
    checks.as_tensor("idx", array)[0] = 7
    assert array.tolist() == [0, 1, 2]
    assert not recwarn.list


def test_as_tensor_converts_lists_of_numbers() -> None:
    assert checks.as_tensor("idx", [3, 1]).dtype == torch.int64
    assert checks.as_tensor("z", ((1.0, 2.0), (3.0, 4.0))).shape == (2, 2)


@pytest.mark.parametrize("given", [None, "12", 3, {"a": 1}, [[1], [2, 3]], ["a"], np.array(["a"]), np.array([None])])
def test_as_tensor_refuses_what_holds_no_numbers_and_names_the_argument(given: object) -> None:
    with pytest.raises(ValueError, match=r"^labels "):
        checks.as_tensor("labels", given)


@pytest.mark.parametrize("given", [0.5, np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5)])
def test_number_returns_a_python_number(given: object) -> None:
    found = checks.number("temperature", given, above=0)
    assert type(found) is float
    assert found == 0.5


def test_number_returns_a_schedule_unchanged() -> None:
    schedule = hn.Linear(0.2, 0.1)
    assert checks.number("restart", schedule, at_least=0) is schedule


@pytest.mark.parametrize("given", [True, np.bool_(True), torch.tensor(True), torch.tensor([0.5]), 1j, "1", None])
def test_number_refuses_what_is_no_number(given: object) -> None:
    with pytest.raises(ValueError, match="temperature must be a number"):
        checks.number("temperature", given)


def test_number_checks_the_range_of_converted_values() -> None:
    with pytest.raises(ValueError, match="temperature must be > 0, got -1"):
        checks.number("temperature", torch.tensor(-1.0), above=0)
    with pytest.raises(ValueError, match="temperature must be > 0, got nan"):
        checks.number("temperature", np.float32("nan"), above=0)


def test_number_refuses_a_tensor_that_requires_a_gradient() -> None:
    with pytest.raises(ValueError, match=r"temperature requires a gradient.*temperature\.detach\(\)"):
        checks.number("temperature", torch.tensor(0.5, requires_grad=True))


@pytest.mark.parametrize("given", [4, np.int64(4), np.uint8(4), np.array(4), torch.tensor(4)])
def test_whole_returns_a_python_int(given: object) -> None:
    found = checks.whole("size", given)
    assert type(found) is int
    assert found == 4


@pytest.mark.parametrize("given", [4.0, np.float64(4), torch.tensor(4.0), True, torch.tensor([4]), "4", np.int64(0)])
def test_whole_refuses_what_is_no_positive_whole_number(given: object) -> None:
    with pytest.raises(ValueError, match="size must be a whole number ≥ 1"):
        checks.whole("size", given)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as an accelerator."""
    monkeypatch.setattr(checks, "on_accelerator", lambda device: True)


BAD_VALUES = [torch.tensor([1.0, torch.nan]), torch.tensor([[torch.inf]]), torch.tensor([2.0, -torch.inf])]


@pytest.mark.parametrize("bad", BAD_VALUES)
def test_finite_raises_on_a_cpu(bad: torch.Tensor) -> None:
    with pytest.raises(checks.NonFiniteError, match="z holds NaN or inf"):
        checks.finite("z", bad)
    assert checks.finite("z", torch.zeros(3)) is None
    assert checks.finite("z", torch.zeros(0)) is None


@pytest.mark.parametrize("bad", BAD_VALUES)
def test_finite_returns_nan_on_an_accelerator(bad: torch.Tensor, accelerator: None) -> None:
    found = [checks.finite("z", given) for given in (bad, torch.zeros(3), torch.zeros(0))]
    assert [number is not None and number.tolist() for number in found] == [pytest.approx(torch.nan, nan_ok=True), 1, 1]


def test_in_range_returns_the_indices_on_a_cpu_or_raises() -> None:
    indices = torch.tensor([0, 4])
    assert checks.in_range("idx", indices, 5) == (indices, None)
    for bad in ([-1, 2], [0, 5]):
        with pytest.raises(ValueError, match="idx must hold indices from 0 to 4"):
            checks.in_range("idx", torch.tensor(bad), 5)


@pytest.mark.parametrize(("bad", "clamped"), [([-1, 2], [0, 2]), ([0, 5], [0, 4]), ([1 << 62, -(1 << 62)], [4, 0])])
def test_in_range_clamps_indices_on_an_accelerator(bad: list[int], clamped: list[int], accelerator: None) -> None:
    found, validity = checks.in_range("idx", torch.tensor(bad), 5)
    assert found.tolist() == clamped
    assert validity is not None
    assert validity.isnan()
    found, validity = checks.in_range("idx", torch.tensor([0, 4]), 5)
    assert found.tolist() == [0, 4]
    assert validity == 1


def test_poisoned_spoils_the_value_and_the_gradient_only_if_a_check_failed() -> None:
    for validity, expected in ((None, 2.0), (torch.tensor(1.0), 2.0), (torch.tensor(torch.nan), torch.nan)):
        x = torch.tensor([1.0, 5.0], dtype=torch.float64, requires_grad=True)
        found = checks.poisoned(2 * x, None, validity, None)
        found.sum().backward()
        assert found.dtype == torch.float64
        assert x.grad is not None
        assert x.grad.tolist() == pytest.approx([expected] * 2, nan_ok=True)


def test_jointly_fails_if_one_check_failed() -> None:
    good, bad = torch.tensor(1.0), torch.tensor(torch.nan)
    assert checks.jointly(None, None) is None
    assert checks.jointly(None, good, good) == 1
    joint = checks.jointly(good, bad, None, good)
    assert joint is not None
    assert joint.isnan()


def test_required_values_raise_on_an_accelerator_too(accelerator: None) -> None:
    with pytest.raises(checks.NonFiniteError, match="x holds NaN or inf"):
        checks.require_finite("x", torch.tensor([torch.nan]))
    with pytest.raises(ValueError, match="idx must hold indices from 0 to 1"):
        checks.require_in_range("idx", torch.tensor([2]), 2)
    with pytest.raises(ValueError, match="wrong"):
        checks.require(torch.tensor([True, False]), "wrong")


def test_inside_vmap_only_the_examples_with_bad_values_are_nan() -> None:
    rows = torch.tensor([[1.0, 2.0], [torch.nan, 2.0], [3.0, 4.0], [torch.inf, 0.0]])

    def total(row: torch.Tensor) -> torch.Tensor:
        return checks.poisoned(torch.ones(2).sum(), checks.finite("row", row))

    assert torch.vmap(total)(rows).isnan().tolist() == [False, True, False, True]

"""The loss tests of other libraries: their values and gradients, and the number of tests that can be expressed."""

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peers.adapters import ADAPTERS, Adapter
from peers.peer_cases import NOT_EXPRESSED, OTHER_OBJECTIVES, Case, cases, summary
from torch import Tensor

import hardneg as hn

HERE = Path(__file__).parent
STORED = json.loads((HERE / "values.json").read_text(encoding="utf-8"))
# Relative to the norm of a gradient. Half-precision inputs are rounded first, as in the peers' own tests.
TOLERANCE = {"float64": 1e-8, "float32": 1e-4, "float16": 2e-2}
BEYOND = "beyond their tests"
CASES = cases()


def found(case: Case, adapter: Adapter, inputs: dict[str, Tensor]) -> dict[str, Any]:
    """The losses of a gradient descent, and the first gradient."""
    leaves = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
    values, gradients = [], {}
    for step in range(case.steps + 1):
        value = adapter(case, inputs)
        values.append(float(value.detach()))
        if not leaves:
            break
        gradient = torch.autograd.grad(value, list(leaves.values()))
        if step == 0:
            gradients = dict(zip(leaves, map(summary, gradient), strict=True))
        with torch.no_grad():
            for leaf, part in zip(leaves.values(), gradient, strict=True):
                leaf -= 0.5 * part
    return {"values": values, "gradients": gradients}


def check(made: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    for one, other in zip(made["values"], expected["values"], strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance)
    assert made["gradients"].keys() == expected["gradients"].keys()
    for name, numbers in expected["gradients"].items():
        # The error of an inner product is relative to the norm, which is the first number.
        allowed = 10 * tolerance * max(numbers[0], 1e-3)
        assert made["gradients"][name] == pytest.approx(numbers, rel=tolerance, abs=allowed), name


@pytest.mark.parametrize(("peer", "loss"), ADAPTERS)
def test_value_and_gradient_agree_with_the_peer(peer: str, loss: str) -> None:
    chosen = [case for case in CASES if (case.peer, case.loss) == (peer, loss)]
    assert chosen
    for case in chosen:
        inputs = case.tensors(getattr(torch, case.dtype))
        made = found(case, ADAPTERS[peer, loss], inputs)
        try:
            check(made, STORED["values"][case.key], TOLERANCE[case.dtype])
        except AssertionError as error:
            raise AssertionError(f"{case.test}, {case.key}") from error


@pytest.mark.parametrize("case", [c for c in CASES if c.ours.get("cached")], ids=lambda case: case.test.split("::")[1])
def test_gradients_in_chunks_agree_with_the_peer(case: Case) -> None:
    inputs = case.tensors()
    views = tuple(inputs.values())
    loss = hn.simcse(1 / case.settings["scale"], symmetric=case.settings.get("symmetric", False))

    def scaled(z1: Tensor, z2: Tensor, *negatives: Tensor) -> Tensor:
        value = loss(z1, z2, **({"negatives": negatives[0]} if negatives else {}))
        return value * case.settings.get("scaler", 1.0)  # type: ignore[no-any-return]

    parts = [torch.nn.Parameter(view.detach().clone()) for view in views]  # an encoder that returns rows of a table
    encoders = tuple(lambda rows, part=part: part[rows] for part in parts)
    rows = torch.arange(len(views[0]))
    value = hn.cached_step(encoders, (rows,) * len(parts), scaled, chunk_size=case.ours["cached"])
    gradients = {name: summary(part.grad) for name, part in zip(inputs, parts, strict=True) if part.grad is not None}
    check({"values": [float(value)], "gradients": gradients}, STORED["values"][case.key], TOLERANCE["float64"])


def is_trivial(case: Case) -> bool:
    """Has the peer's test no gradient by design: one row or dimension, parallel rows, no pairs, or all is masked?"""
    names = ("test_with_no_valid_pairs", "test_zero_loss", "under_no_grad", "suppresses_closer_negative")
    if any(name in case.test for name in names):
        return True
    recipes = list(case.inputs.values())
    return any(recipe[0] == "parallel" or (recipe[0] in ("normal", "uniform") and 1 in recipe[2]) for recipe in recipes)


def test_all_cases_of_nontrivial_tests_have_a_loss_and_a_gradient() -> None:
    others = [case for case in CASES if not is_trivial(case)]
    assert len(others) >= 280
    for case in others:
        expected = STORED["values"][case.key]
        assert abs(expected["values"][0]) > 1e-6, case
        assert any(numbers[0] > 1e-6 for numbers in expected["gradients"].values()), case
    assert all(math.isfinite(number) for entry in STORED["values"].values() for number in entry["values"])


def test_gradient_descents_lower_the_loss() -> None:
    descents = [case for case in CASES if case.steps]
    assert len(descents) == 4
    for case in descents:
        values = STORED["values"][case.key]["values"]
        assert values[-1] < values[0]


def test_invalid_calls_of_the_peers_raise() -> None:
    with pytest.raises(ValueError, match="temperature must be"):
        hn.simclr(temperature=-1.0)
    with pytest.raises(ValueError, match="z1 must have shape"):
        hn.simcse()(torch.empty(0, 4), torch.empty(0, 4))


def test_every_stored_value_belongs_to_a_case() -> None:
    assert {case.key for case in CASES} == set(STORED["values"])


def test_the_documentation_has_these_numbers() -> None:
    tests = {(case.peer, case.test) for case in CASES if not case.test.startswith(BEYOND)}
    expressed = Counter(peer for peer, _ in tests)
    missing: Counter[str] = Counter()
    for peer, _, number, _ in NOT_EXPRESSED:
        missing[peer] += number
    page = (HERE.parents[1] / "docs" / "peers.md").read_text(encoding="utf-8")
    for peer, version in STORED["about"]["float64 on"].items():
        if peer in OTHER_OBJECTIVES:
            passed = expressed[peer]  # or another test here fails
            row = f"| {peer} {version} | {expressed[peer]} | {passed} | {missing[peer]} | {OTHER_OBJECTIVES[peer]} |"
            assert row in page, row
    for peer, test, number, why in NOT_EXPRESSED:
        assert re.search(rf"\| {re.escape(peer)} \| `?{re.escape(test)}`? \| {number} \| {re.escape(why)} \|", page), (
            test
        )

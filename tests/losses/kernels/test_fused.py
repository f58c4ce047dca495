"""The fused kernel in Triton's interpreter, against loops, float64, and itself under unusual conditions."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import children
import pytest
import torch
from cases import Case, cases, check_reached
from hypothesis import HealthCheck, given, settings
from interpreter import process
from losses.kernels import interpreted
from losses.kernels.interpreted import Found, Work
from torch import Tensor
from torch.nn.functional import normalize
from torch.testing import assert_close

import hardneg as hn
from hardneg.losses.kernels import reference, tiled
from hardneg.losses.kernels.interface import RowLayout

Call = Callable[..., Any]
Arguments = dict[str, Tensor]
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is for Linux only")
# Constants with which small problems take the code paths of large ones.
IN_PARTS = {"launch.SMALL_PROBLEM": 0, "operators.SMALL_PROBLEM": 0, "launch.PART_MULTIPLE": 64}
IN_STRIPS = {"passes.WIDEST": 16, "passes.STRIP_BYTES": 0}
SYMMETRIC = {"passes.SYMMETRIC_BLOCKS": 2, "passes.MIN_SYMMETRIC_ROWS": 64, "launch.SMALL_PROBLEM": 0}


def slow(*values: Any) -> Any:
    """Cases of the full grid, of which the quick run takes a few."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def call() -> Iterator[Call]:
    """Calls a function of `interpreted` in the process that interprets Triton."""
    with process(interpret=True) as made:
        yield made


def views(rows: int, dim: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Arguments:
    """Two views at varying distances."""
    generator = torch.Generator().manual_seed(seed)
    z1 = torch.randn(rows, dim, generator=generator)
    z2 = z1 + torch.linspace(0.1, 2, rows)[:, None] * torch.randn(rows, dim, generator=generator)
    return {"z1": z1.to(dtype), "z2": z2.to(dtype)}


def full(rows: int = 11, dim: int = 6, keys: int = 41) -> Arguments:
    """Views and all optional arguments."""
    generator = torch.Generator().manual_seed(1)
    return {
        **views(rows, dim),
        "negatives": torch.randn(keys, dim, generator=generator),
        "exclude": torch.randint(keys, (rows, 2), generator=generator),
        "negative_mask": torch.rand(rows, keys, generator=generator) < 0.7,
        "labels": (torch.randint(-1, 4, (rows,), generator=generator) << 32).clamp(min=-1),  # beyond 32 bits
        "negative_labels": (torch.randint(-1, 4, (keys,), generator=generator) << 32).clamp(min=-1),
    }


def error(found: Tensor, truth: Tensor) -> float:
    """Relative to the norm of the truth if it is not 0; absolute for a single number, which may be nearly 0."""
    size = float(truth.norm()) if truth.dim() else 1.0
    return float((found.double() - truth).norm()) / (size if size > 0 else 1.0)


def check(found: Found, options: dict[str, Any], arguments: Arguments) -> None:
    """The error is at most 1.2 times that of other kernels in float32, or a few roundings; diagnostics are equal."""
    exact = {name: t.double() if t.is_floating_point() else t for name, t in arguments.items()}
    truth = interpreted.run(options, exact, backend="reference")
    others = [interpreted.run(options, arguments, backend=backend) for backend in ("reference", "tiled")]
    temperature = options.get("temperature", 0.5)
    # With few numbers errors differ at random, and one rounding of a product is multiplied by 1/t in its score.
    slack = 5e-7 + 2**-24 / (0.1 if isinstance(temperature, hn.Learnable) else temperature)
    for name, exactly in truth.grads.items():
        worst = max(error(other.grads[name], exactly) for other in others)
        # The gradient of a temperature adds the errors of all anchors, with random signs.
        growth = 1.0 if exactly.dim() else (2 * len(arguments["z1"])) ** 0.5 * max(1.0, float(exactly.abs()))
        assert found.grads[name].dtype == others[0].grads[name].dtype
        assert error(found.grads[name], exactly) <= 1.2 * worst + growth * slack, name
    size = float(truth.value.norm())
    worst = max(error(other.value, truth.value) for other in others)
    assert error(found.value, truth.value) <= 1.2 * worst + slack * max(size, 1.0)
    assert found.report == pytest.approx(others[1].report, rel=1e-4, abs=1e-5)


def against_the_loops(call: Call, case: Case) -> set[str]:
    """Compares with the oracle, and returns the settings that matter to the result."""
    arguments = {name: t.float() if t.is_floating_point() else t for name, t in case.arguments.items()}
    options = dict(case.options)
    if not options["normalize"]:
        options["class_prior"] = 0.0  # the floor of unnormalized scores is below the range of float32
    case = replace(case, options=options, arguments=arguments)
    truth = case.truth()
    hardening = [part for part in options["hardening"] if not isinstance(part, hn.Custom)]
    losses, report = call(interpreted.losses, {**options, "hardening": tuple(hardening)}, arguments)
    assert_close(losses, torch.tensor(truth.losses), rtol=1e-3, atol=1e-3)
    assert report["floored"] == sum(truth.floored)
    sizes = [len(support) for support in truth.support if support]
    assert report["support"] == pytest.approx(sum(sizes) / len(sizes) if sizes else 0)
    assert report["without_candidates"] == len(truth.support) - len(sizes)
    return case.matters(truth)


@pytest.mark.parametrize("examples", [8, slow(40)])
@pytest.mark.parametrize("integer", [False, True], ids=["any", "ties"])
def test_any_settings_agree_with_the_loops(call: Call, integer: bool, examples: int) -> None:
    reached: Counter[str] = Counter()

    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
    @given(case=cases(custom=False, integer=integer))  # exact scores that tie: ties go by index
    def agrees(case: Case) -> None:
        reached.update(against_the_loops(call, case))

    agrees()
    if examples == 8:
        check_reached(reached, {"valid": 5, "negatives": 1})
        return
    few = dict.fromkeys(["weight_range", "exclude", "negative_mask", "negative_labels", "below", "tau_threshold"], 1)
    some = dict.fromkeys(["beta", "rings", "labels", "negative_count"], 6)
    check_reached(reached, {"valid": 35, "negatives": 12, **some, **few} | ({} if integer else {"unfloored": 6}))


@pytest.mark.parametrize("cases", [4, slow(80)])
def test_random_settings_equal_the_reference_in_float64(call: Call, cases: int) -> None:
    tally = call(interpreted.random_settings, cases, 5)
    assert (tally["tried"], tally["wrong"]) == (cases, 0), tally["failures"]
    assert tally["reached"]["any"] > cases / 2


def test_random_settings_find_an_error_of_two_percent(call: Call) -> None:
    tally = call(interpreted.random_settings, 4, 5, 1.02)
    assert tally["wrong"] >= 2
    assert tally["worst"] > 1


@pytest.mark.parametrize("temperature", [0.5, 0.07, 0.01])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 2.0, 1.3])
def test_every_tilt_and_temperature_has_the_gradient_of_float64(call: Call, beta: float, temperature: float) -> None:
    # With bounded exponents, 2(β+1)/t < 80, and with a maximum for each row.
    options = {"temperature": temperature, "hardening": hn.Exponential(beta), "class_prior": 0.02}
    arguments = views(11, 6)
    check(call(interpreted.run, options, arguments), options, arguments)


@pytest.mark.parametrize("size", [1e3, 1e8, 1e16])
def test_large_unnormalized_scores_keep_their_gradient(call: Call, size: float) -> None:
    arguments = {name: size**0.5 * t for name, t in views(12, 6).items()}
    options = {"normalize": False, "temperature": 1.0, "hardening": hn.Exponential(1.3)}
    check(call(interpreted.run, options, arguments), options, arguments)


@pytest.mark.parametrize("beta", [1e-46, 1e-20, 1e2, 1e4, 1e6])
def test_very_small_and_very_large_tilts_keep_their_precision(call: Call, beta: float) -> None:
    options, arguments = {"hardening": hn.Exponential(beta)}, views(16, 8)
    exact = hn.hcl(beta, 0.0)(*(t.double() for t in arguments.values()))
    assert_close(call(interpreted.run, options, arguments).value.double(), exact, rtol=1e-5, atol=0)


QUEUE = ["negatives", "exclude"]
TOWERS = {"in_batch": "other", "symmetric": True}
SETTINGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "other view": ({"in_batch": "other", "hardening": hn.Exponential(0.5)}, []),
    "both directions": ({"in_batch": "other", "symmetric": True, "temperature": 0.05, "class_prior": 0.1}, []),
    "both directions, banded": (TOWERS | {"hardening": (hn.Threshold(0.5), hn.Exponential(1.0))}, []),
    "both directions, learned": (TOWERS | {"temperature": hn.Learnable(0.2), "hardening": hn.Exponential(1.3)}, []),
    "both directions, none": (TOWERS | {"reduction": "none", "hardening": hn.Exponential(2.0)}, []),
    "both directions, number": (TOWERS | {"negative_count": "batch", "hardening": hn.Threshold(0.5)}, []),
    "both directions, ring": (TOWERS | {"hardening": hn.Ring(0.3, 0.9)}, []),
    "both directions, labels": (TOWERS | {"supervision": "negatives"}, ["labels"]),
    "both directions and queue": (TOWERS | {"hardening": hn.Exponential(0.5)}, QUEUE),
    "other view, ring": ({"in_batch": "other", "hardening": hn.Ring(0.3, 0.9)}, []),
    "other view, learned": ({"in_batch": "other", "temperature": hn.Learnable(0.2), "class_prior": 0.02}, []),
    "decoupled": ({"positive_in_denominator": False, "hardening": hn.Exponential(1.0)}, []),
    "decoupled queue": ({"positive_in_denominator": False, "in_batch": None}, QUEUE),
    "number of negatives": ({"negative_count": 0.25, "class_prior": 0.1}, []),
    "number of the batch": ({"negative_count": "batch", "hardening": hn.Threshold(1.0)}, []),
    "exact debiasing": ({"debias": "exact", "class_prior": 0.05, "hardening": hn.Exponential(1.3)}, []),
    "learned temperature": ({"temperature": hn.Learnable(0.2), "hardening": hn.Exponential(1.0)}, []),
    "learned, safe": ({"temperature": hn.Learnable(0.2, minimum=0.1), "class_prior": 0.1, "reduction": "none"}, []),
    "learned, queue": ({"temperature": hn.Learnable(0.2), "in_batch": None, "hardening": hn.Exponential(2.0)}, QUEUE),
    "learned, batch and queue": ({"temperature": hn.Learnable(0.1), "class_prior": 0.01}, QUEUE),
    "learned, labels": ({"temperature": hn.Learnable(0.1), "supervision": "full"}, ["labels"]),
    "threshold": ({"hardening": (hn.Threshold(1.2), hn.Exponential(1.0))}, []),
    "cold threshold": ({"hardening": hn.Threshold(9.0), "temperature": 0.02}, []),
    "below positive": ({"hardening": (hn.BelowPositive(0.1), hn.Exponential(0.5))}, []),
    "below positive, cold": ({"hardening": hn.BelowPositive(relative=0.9), "temperature": 0.02}, QUEUE),
    "ring": ({"hardening": (hn.Ring(0.3, 0.9), hn.Exponential(1.0))}, []),
    "ring of batch and queue": ({"hardening": (hn.Ring(0.3, 0.9), hn.Threshold(0.7))}, QUEUE),
    "detached weights": ({"hardening": hn.Exponential(1.0), "grad_through_weights": False}, []),
    "detached, cold": ({"hardening": hn.Exponential(1.3), "grad_through_weights": False, "temperature": 0.03}, QUEUE),
    "range": ({"hardening": hn.Exponential(1.5), "normalize": False, "weight_range": 2.0}, []),
    "unnormalized": ({"normalize": False, "temperature": 2.0, "hardening": hn.Exponential(1.0)}, QUEUE),
    "queue": ({"in_batch": None, "temperature": 0.07}, QUEUE),
    "queue with a mask": ({"in_batch": None, "hardening": hn.Exponential(1.0)}, ["negatives", "negative_mask"]),
    "batch and queue": ({"hardening": hn.Exponential(2.0)}, [*QUEUE, "negative_mask"]),
    "labels": ({"supervision": "full", "hardening": hn.Exponential(1.0)}, ["labels"]),
    "labels of negatives": ({"supervision": "negatives"}, ["labels", "negatives", "negative_labels"]),
    "labels, sum": ({"supervision": "positives", "reduction": "sum", "temperature": 0.05}, ["labels"]),
    "labels, denominator": ({"supervision": "full", "combine_positives": "in_denominator"}, ["labels"]),
    "labels, debiased": ({"supervision": "full", "class_prior": 0.05, "combine_positives": "log_of_mean"}, ["labels"]),
    "labels, decoupled": ({"supervision": "full", "positive_in_denominator": False, "average": "pairs"}, ["labels"]),
    "labels, below positive": ({"supervision": "positives", "hardening": hn.BelowPositive(0.2)}, ["labels"]),
    "effective share": ({"hardening": hn.Exponential(hn.EffectiveShare(0.5)), "class_prior": 0.02}, []),
    "effective share, queue": ({"hardening": hn.Exponential(hn.EffectiveShare(0.5)), "in_batch": None}, QUEUE),
    "effective share, all": ({"hardening": hn.Exponential(hn.EffectiveShare(1.0)), "temperature": 0.1}, QUEUE),
    "effective share, denominator": (
        {
            "hardening": hn.hscl(hn.EffectiveShare(0.4)).hardening,
            "supervision": "full",
            "combine_positives": "in_denominator",
        },
        ["labels"],
    ),
    "no reduction": ({"reduction": "none", "in_batch": "other"}, []),
    "sum": ({"reduction": "sum", "hardening": hn.Exponential(0.5)}, []),
}


IN_SLOW_RUN = {"both directions, ring", "other view, ring"}  # rings take seconds, and others have them


@pytest.mark.parametrize("name", [slow(name) if name in IN_SLOW_RUN else name for name in SETTINGS])
def test_every_setting_has_the_gradient_of_float64(call: Call, name: str) -> None:
    options, names = SETTINGS[name]
    everything = full()
    arguments = {key: everything[key] for key in ("z1", "z2", *names)}
    check(call(interpreted.run, options, arguments), options, arguments)


@pytest.mark.parametrize("in_batch", ["both", "other"])
def test_several_positives_have_the_gradient_of_float64(call: Call, in_batch: str) -> None:
    generator = torch.Generator().manual_seed(0)
    arguments = {"z1": torch.randn(9, 5, generator=generator), "z2": torch.randn(9, 3, 5, generator=generator)}
    options = {"in_batch": in_batch, "hardening": hn.Exponential(1.0), "class_prior": 0.02}
    check(call(interpreted.run, options, arguments), options, arguments)


def test_one_view_finds_positives_by_label(call: Call) -> None:
    arguments = {"z1": views(33, 4)["z1"], "labels": torch.arange(33) % 5}
    options = {"supervision": "full", "hardening": hn.Exponential(1.0)}
    check(call(interpreted.run, options, arguments), options, arguments)


LABEL_FORMS: dict[str, dict[str, Any]] = {
    "scl": {"negative_count": "batch"},
    "hscl": {"negative_count": "batch", "hardening": hn.Exponential(1.0)},
    "hscl, any tilt": {"hardening": hn.Exponential(0.7)},
    "hscl, cold": {"hardening": hn.Exponential(2.0), "temperature": 0.03},
    "hscl, threshold": {"negative_count": "batch", "hardening": hn.Threshold(1.0)},
    "decoupled": {"hardening": hn.Exponential(1.0), "positive_in_denominator": False},
    "supcon": {"combine_positives": "in_denominator"},
    "supcon, cold": {"combine_positives": "in_denominator", "temperature": 0.01},
}
LABELS: dict[str, Callable[[int], Tensor]] = {
    "some": lambda rows: torch.arange(rows) % 4 << 33,  # beyond 32 bits
    "some unknown": lambda rows: torch.arange(rows) * 7 % 5 - 1,
    "all unknown": lambda rows: torch.full((rows,), -1),
    "one class": lambda rows: torch.full((rows,), 3),
    "all different": lambda rows: torch.arange(rows),
}


def label_case(
    form: str, labels: str, two_views: bool, reduction: str, rows: int, dim: int
) -> tuple[dict[str, Any], Arguments]:
    """Options with a learned temperature, and arguments."""
    options = {**LABEL_FORMS[form], "supervision": "full", "reduction": reduction}
    options["temperature"] = hn.Learnable(options.get("temperature", 0.5))
    arguments = {**views(rows, dim), "labels": LABELS[labels](rows)}
    return options, {key: t for key, t in arguments.items() if two_views or key != "z2"}


@pytest.mark.parametrize(
    ("form", "labels", "two_views", "reduction"),
    [
        *((form, "some unknown", True, "mean") for form in LABEL_FORMS),
        *((form, "some unknown", False, "none") for form in ("hscl", "supcon", "decoupled")),
        *((form, labels, True, "sum") for form in ("hscl", "supcon") for labels in LABELS if labels != "some unknown"),
        *(slow(*case) for case in product(LABEL_FORMS, LABELS, (True, False), ("mean", "none", "sum"))),
    ],
)
def test_labels_in_the_short_path_have_the_gradient_of_float64(
    call: Call, form: str, labels: str, two_views: bool, reduction: str
) -> None:
    options, arguments = label_case(form, labels, two_views, reduction, rows=19, dim=6)
    found = call(interpreted.run, options, arguments)
    check(found, options, arguments)
    # Without negatives, or without positives, there is no loss.
    empty = labels == "one class" or (labels in ("all different", "all unknown") and not two_views)
    assert (float(found.value.abs().sum()) == 0) == empty
    for grad in found.grads.values():
        assert (float(grad.norm()) == 0) == empty


@pytest.mark.parametrize("form", LABEL_FORMS)
def test_labels_take_the_short_path(call: Call, form: str) -> None:
    options, arguments = label_case(form, "some", True, "mean", rows=9, dim=4)
    assert "finish_labels" in call(interpreted.work, options, arguments).launches


@pytest.mark.parametrize("constants", [IN_PARTS, IN_STRIPS], ids=["parts", "strips"])
@pytest.mark.parametrize("form", ["hscl", "supcon"])
def test_labels_in_the_short_path_are_right_in_parts_and_strips(
    call: Call, form: str, constants: dict[str, Any]
) -> None:
    options, arguments = label_case(form, "some unknown", True, "mean", rows=37, dim=18)
    check(call(interpreted.guarded, options, arguments, constants), options, arguments)


@pytest.mark.parametrize("form", ["hscl", "supcon"])
def test_labels_in_the_short_path_cost_only_the_rounding_in_float16(call: Call, form: str) -> None:
    options, arguments = label_case(form, "some", True, "mean", rows=12, dim=16)
    halves = {key: t.half() if t.is_floating_point() else t for key, t in arguments.items()}
    exact = {key: t.double() if t.is_floating_point() else t for key, t in halves.items()}
    truth = interpreted.run(options, exact, backend="reference")
    found = call(interpreted.run, options, halves)
    assert error(found.value, truth.value) < torch.finfo(torch.float16).eps
    for key, grad in found.grads.items():
        assert error(grad, truth.grads[key]) < 6 * torch.finfo(torch.float16).eps


@pytest.mark.parametrize("dim", [1, 3, 16, 17, 64, 100, 257, 300])
def test_rows_of_any_width(call: Call, dim: int) -> None:
    arguments, options = views(9, dim), {"hardening": hn.Exponential(1.0), "temperature": 0.2}
    check(call(interpreted.guarded, options, arguments), options, arguments)


@pytest.mark.parametrize("rows", [31, 32, 33, 65])
def test_any_number_of_rows_and_of_candidates(call: Call, rows: int) -> None:
    # Tiles are 32 × 32 here. Buffers are filled with NaN and enclosed by guard elements.
    options = {"in_batch": "other", "hardening": hn.Exponential(0.5)}
    generator = torch.Generator().manual_seed(rows)
    arguments = {**views(rows, 5), "negatives": torch.randn(rows % 7 + 30, 5, generator=generator)}
    check(call(interpreted.guarded, options, arguments), options, arguments)


@pytest.mark.parametrize(("batch", "anchor_views", "offset", "whole", "pool_views"), [
    (70, 2, 0, 70, 2), (101, 1, 0, 101, 1), (33, 2, 40, 150, 2), (64, 1, 96, 161, 2), (5, 2, 3, 90, 1), (1, 2, 0, 1, 2),
])  # fmt: skip
def test_own_instances_are_masked_wherever_tiles_begin(
    call: Call, batch: int, anchor_views: int, offset: int, whole: int, pool_views: int
) -> None:
    # Most tiles hold no such pair and skip the mask: the condition must be right.
    found = call(interpreted.masked, RowLayout(batch, anchor_views, offset, whole, torch.device("cpu")), pool_views)
    own = offset + torch.arange(batch).repeat(anchor_views)
    assert torch.equal(found, own[:, None] == torch.arange(whole).repeat(pool_views))


@pytest.mark.parametrize("hardening", [hn.Uniform(), hn.BelowPositive(-9.0)])
def test_gradients_leave_out_the_own_instance_wherever_tiles_begin(call: Call, hardening: hn.Hardening) -> None:
    # Without a band per row, one pass computes both parts of the gradient; with it, two passes do.
    arguments = views(70, 3)
    options = {"hardening": hardening, "normalize": False, "temperature": 3.0}
    check(call(interpreted.run, options, arguments), options, arguments)


@pytest.mark.parametrize(
    "options",
    [
        {"in_batch": None, "hardening": hn.Exponential(1.3), "normalize": False},
        {"in_batch": "other", "supervision": "negatives", "temperature": 0.7, "normalize": False},
        {"in_batch": None, "hardening": hn.Exponential(1.0), "class_prior": 0.02},
    ],
)
def test_sums_of_several_parts_are_added(call: Call, options: dict[str, Any]) -> None:
    # Parts are of 64 candidates.
    everything = full(rows=7, dim=4, keys=76)
    names = ["labels", "negative_labels"] if "supervision" in options else []
    arguments = {key: everything[key] for key in ("z1", "z2", "negatives", *names)}
    check(call(interpreted.guarded, options, arguments, IN_PARTS), options, arguments)


@pytest.mark.parametrize("constants", [{}, IN_STRIPS], ids=["whole", "strips"])
@pytest.mark.parametrize("options", [{"in_batch": "other"}, TOWERS], ids=str)
def test_two_towers_support_a_bound_per_anchor(call: Call, options: dict[str, Any], constants: dict[str, Any]) -> None:
    options, arguments = options | {"hardening": interpreted.AboveItsOwn(torch.linspace(-0.5, 0.5, 20))}, views(20, 18)
    check(call(interpreted.guarded, options, arguments, constants), options, arguments)


@pytest.mark.parametrize(("constants", "rows"), [(IN_PARTS, 78), slow({"launch.SMALL_PROBLEM": 0}, 270)])
@pytest.mark.parametrize("options", [{}, {"hardening": hn.Exponential(1.3), "normalize": False}, {"temperature": 0.01}])
def test_both_directions_of_two_towers_are_right_wherever_tiles_and_parts_begin(
    call: Call, options: dict[str, Any], constants: dict[str, Any], rows: int
) -> None:
    # Neither tiles nor parts of the candidates end where a half of the rows does.
    arguments, options = views(rows, 3), TOWERS | options
    check(call(interpreted.guarded, options, arguments, constants), options, arguments)


@pytest.mark.parametrize(
    "name", ["plain", "labels", "below positive, cold", "learned, queue", "both directions", "other view"]
)
def test_wide_rows_are_processed_in_strips(call: Call, name: str) -> None:
    options, names = SETTINGS.get(name, ({"hardening": hn.Exponential(1.0), "class_prior": 0.02}, []))
    everything = full(rows=19, dim=18)
    arguments = {key: everything[key] for key in ("z1", "z2", *names)}
    check(call(interpreted.guarded, options, arguments, IN_STRIPS), options, arguments)


# Options, and whether each score is computed once for both of its anchors.
SYMMETRIC_CASES: list[tuple[dict[str, Any], bool]] = [
    ({"hardening": hn.Exponential(1.3), "temperature": 0.1}, True),
    ({"hardening": (hn.Threshold(0.1), hn.Exponential(2.0))}, True),
    ({"supervision": "negatives", "hardening": hn.Exponential(0.5)}, True),
    (TOWERS | {"hardening": (hn.Threshold(0.1), hn.Exponential(1.3))}, True),
    ({"temperature": 0.01}, False),
    ({"hardening": hn.BelowPositive()}, False),
    ({}, True),
    ({"hardening": hn.Exponential(1.0), "class_prior": 0.02}, True),
    ({"hardening": hn.Threshold(0.1)}, True),
    ({"supervision": "full"}, True),
    ({"in_batch": "other"}, False),
    (TOWERS, True),
    (TOWERS | {"temperature": 0.01}, False),
]


@pytest.mark.parametrize(
    ("options", "symmetric", "rows", "wide"),
    [
        # None: the fewest rows that fill two blocks.
        *((*case, None, k % 2 == 0) for k, case in enumerate(SYMMETRIC_CASES[:6])),
        *(slow(*case, rows, wide) for case in SYMMETRIC_CASES for rows in (72, 65) for wide in (False, True)),
    ],
)
def test_symmetric_scores_are_computed_once(
    call: Call, options: dict[str, Any], symmetric: bool, rows: int | None, wide: bool
) -> None:
    everything = full(rows=rows or (65 if options.get("symmetric") else 33), dim=18)
    arguments = {key: everything[key] for key in ("z1", "z2", *(["labels"] if "supervision" in options else []))}
    constants = SYMMETRIC | (IN_STRIPS if wide else {})
    check(call(interpreted.guarded, options, arguments, constants), options, arguments)
    work: Work = call(interpreted.work, options, arguments, constants)
    assert ("symmetric_sums" in work.launches) == symmetric


LEARNED: list[dict[str, Any]] = [
    {"hardening": hn.Exponential(1.0), "class_prior": 0.02},
    {"hardening": (hn.Threshold(0.1), hn.Exponential(0.5))},
    {"hardening": hn.Exponential(1.3), "supervision": "negatives"},
    TOWERS,
]


@pytest.mark.parametrize(
    ("options", "temperature", "wide"),
    [
        *((LEARNED[k % 4], t, wide) for k, (t, wide) in enumerate(product((0.5, 0.07, 0.01), (False, True)))),
        *(slow(*case) for case in product(LEARNED, (0.5, 0.07, 0.01), (False, True))),
    ],
)
def test_the_device_decides_whether_a_learned_temperature_bounds_the_scores(
    call: Call, options: dict[str, Any], temperature: float, wide: bool
) -> None:
    # (β + 1)/t is on either side of 40, and its limit for the smallest temperature, 0.01, is beyond.
    options = options | {"temperature": hn.Learnable(temperature)}
    everything = full(rows=65 if options.get("symmetric") else 33, dim=18)
    arguments = {key: everything[key] for key in ("z1", "z2", *(["labels"] if "supervision" in options else []))}
    constants = SYMMETRIC | (IN_STRIPS if wide else {})
    found = call(interpreted.guarded, options, arguments, constants)
    assert "temperature.log_value" in found.grads
    check(found, options, arguments)
    work: Work = call(interpreted.work, options, arguments, constants)
    assert {"sums", "symmetric_sums"} <= set(work.launches)


def test_the_device_decides_inside_a_compiled_graph_too(call: Call) -> None:
    options = {"temperature": hn.Learnable(0.5), "hardening": hn.Exponential(1.0)}
    (eager, compiled), operators = call(interpreted.run_compiled, options, views(33, 18), SYMMETRIC)
    assert operators == 1
    for name, grad in eager.grads.items():  # a row maximum would change the rounding
        assert torch.equal(compiled.grads[name], grad)


@pytest.mark.parametrize("scale", [2.0, 100.0])
def test_the_device_decides_whether_a_given_scale_bounds_the_scores(call: Call, scale: float) -> None:
    options, arguments = {"hardening": hn.Exponential(1.0)}, views(33, 18) | {"scale": torch.tensor(scale)}
    found: Found = call(interpreted.run, options, arguments, SYMMETRIC)
    exact = {name: t.double() for name, t in arguments.items()}
    truth = interpreted.run(options, exact, backend="reference")
    assert error(found.value, truth.value) <= 1e-5
    for name, exactly in truth.grads.items():
        assert error(found.grads[name], exactly) <= 1e-5


@pytest.mark.parametrize("supervision", ["negatives", "full"])
def test_large_and_unknown_labels_of_many_rows_are_numbered(call: Call, supervision: str) -> None:
    arguments = views(36, 18) | {"labels": torch.tensor([-1, 3, 3 + 2**32, 2**62, -1, 3, 2**62, 0, 7]).repeat(4)}
    options = {"supervision": supervision, "hardening": hn.Exponential(1.0)}
    check(call(interpreted.guarded, options, arguments, SYMMETRIC), options, arguments)


@pytest.mark.parametrize("name", ["other view", "labels", "queue", "below positive", "unnormalized", "both directions"])
def test_float16_costs_only_the_rounding_of_unit_vectors(call: Call, name: str) -> None:
    options, names = SETTINGS[name]
    everything = full(rows=12, dim=16)
    arguments = {key: everything[key] for key in ("z1", "z2", *names)}
    halves = {key: t.half() if t.is_floating_point() else t for key, t in arguments.items()}
    exact = {key: t.double() if t.is_floating_point() else t for key, t in halves.items()}
    found = call(interpreted.run, options, halves)
    truth = interpreted.run(options, exact, backend="reference")
    for key, grad in found.grads.items():
        assert grad.dtype == torch.float16
        # Two roundings in each product, and one of the gradient itself; the error of a score is 1/t times that of its
        # vectors.
        assert error(grad, truth.grads[key]) < 3 * torch.finfo(torch.float16).eps / options.get("temperature", 0.5)
    if options.get("normalize", True):
        exact = {key: normalize(t, dim=1).half().double() if t.is_floating_point() else t for key, t in exact.items()}
        options = {**options, "normalize": False}
    truth = interpreted.run(options, exact, backend="reference")
    assert found.value.dtype == torch.float32
    assert error(found.value, truth.value) < 1e-4


def test_a_large_gradient_does_not_overflow_float16(call: Call) -> None:
    arguments = {name: t.half() for name, t in views(12, 8).items()}
    for options in ({"reduction": "sum"}, {"in_batch": "other", "hardening": hn.Exponential(2.0)}):
        found = call(interpreted.run, {**options, "temperature": 0.01}, arguments)
        assert all(torch.isfinite(grad).all() for grad in found.grads.values())


def test_mixed_precisions_are_converted_to_float32(call: Call) -> None:
    arguments = full(rows=9)
    mixed = {"z1": arguments["z1"].half(), "z2": arguments["z2"], "negatives": arguments["negatives"].half()}
    for options in ({}, {"normalize": False}):
        found = call(interpreted.run, options, mixed)
        truth = interpreted.run(options, {name: t.double() for name, t in mixed.items()}, backend="reference")
        assert error(found.value, truth.value) < 1e-6
        assert [grad.dtype for grad in found.grads.values()] == [torch.float16, torch.float32, torch.float16]


def test_float32_negatives_beyond_the_range_of_float16_stay_float32(call: Call) -> None:
    z = {name: t.half() for name, t in views(6, 4).items()}
    arguments = {**z, "negatives": 1e5 * torch.randn(9, 4)}
    options = {"normalize": False, "in_batch": None, "temperature": 1e5}
    truth = interpreted.run(options, {name: t.double() for name, t in arguments.items()}, backend="reference")
    assert error(call(interpreted.run, options, arguments).value, truth.value) < 1e-6


def test_results_are_bitwise_reproducible(call: Call) -> None:
    for name in ("labels", "learned temperature"):
        options, names = SETTINGS[name]
        everything = full()
        arguments = {key: everything[key] for key in ("z1", "z2", *names)}
        one, other = call(interpreted.run_many, [(options, arguments, IN_PARTS)] * 2)
        assert torch.equal(one.value, other.value)
        assert all(torch.equal(grad, other.grads[key]) for key, grad in one.grads.items())


@pytest.mark.parametrize(
    "options", [{}, {"in_batch": "other"}, {"temperature": 0.01, "hardening": hn.Exponential(2.0)}]
)
@pytest.mark.parametrize("kind", ["one row", "zero", "equal", "opposite", "huge", "tiny"])
def test_finite_input_gives_finite_results(call: Call, kind: str, options: dict[str, Any]) -> None:
    arguments = views(6, 4)
    if kind == "one row":
        arguments = {name: t[:1] for name, t in arguments.items()}
    elif kind == "zero":
        arguments["z1"][0] = arguments["z2"][3] = 0
    elif kind == "equal":
        arguments = {name: arguments["z1"][:1].repeat(6, 1) for name in arguments}
    elif kind == "opposite":
        arguments["z2"] = -arguments["z1"]
    elif kind == "huge":
        arguments["z1"] *= 1e30
    else:
        arguments["z1"] *= 1e-25
    found = call(interpreted.run, options, arguments)
    for tensor in (found.value, *found.grads.values()):
        assert torch.isfinite(tensor).all()
    if kind == "one row":
        assert found.value == 0
        assert all((grad == 0).all() for grad in found.grads.values())
    if kind == "zero":
        assert (found.grads["z1"][0] == 0).all()
        assert (found.grads["z1"][1] != 0).any()


@pytest.mark.parametrize(
    "options", [{"hardening": hn.Threshold(1e8)}, {"hardening": hn.Threshold(1e8), "temperature": 0.01}]
)
def test_anchors_without_candidates_contribute_nothing(call: Call, options: dict[str, Any]) -> None:
    for more in ({}, {"in_batch": "other"}):
        found = call(interpreted.run, {**options, **more}, {"z1": torch.eye(6, 8), "z2": torch.eye(6, 8).roll(1, 1)})
        kept = 6 if more else 12
        if options.get("temperature") is None:
            assert found.report["without_candidates"] == kept
            assert found.value == 0
        for tensor in (found.value, *found.grads.values()):
            assert torch.isfinite(tensor).all()


def test_an_empty_queue_leaves_nothing_or_the_batch(call: Call) -> None:
    arguments = {**views(5, 4), "negatives": torch.zeros(0, 4)}
    assert call(interpreted.run, {"in_batch": None}, arguments).value == 0
    options = {"in_batch": "both"}
    check(call(interpreted.run, options, arguments), options, arguments)


def test_all_anchors_may_be_floored(call: Call) -> None:
    arguments = {"z1": torch.eye(4, 8), "z2": torch.eye(4, 8)}
    for options in ({"temperature": hn.Learnable(0.1, minimum=0.05)}, {"temperature": 0.1, "in_batch": "other"}):
        options = {**options, "class_prior": 0.3}
        found = call(interpreted.run, options, arguments)
        assert found.report["floored"] == found.report["anchors"]
        check(found, options, arguments)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("options", [{}, {"in_batch": None}, {"in_batch": "other", "normalize": False}])
def test_nan_and_inf_raise_the_same_error_as_other_kernels(call: Call, options: dict[str, Any], bad: float) -> None:
    arguments = {**views(4, 3), **({"negatives": torch.randn(3, 3)} if "in_batch" in options else {})}
    for name, tensor in arguments.items():
        poisoned = {**arguments, name: tensor.clone()}
        poisoned[name][-1, -1] = bad
        text = call(interpreted.message, options, poisoned)
        assert name in text
        assert "holds NaN or inf: look for a diverged model" in text


def test_wrong_shapes_raise_the_same_error_as_other_kernels(call: Call) -> None:
    for arguments in ({"z1": torch.randn(4, 3), "z2": torch.randn(5, 3)}, {"z1": torch.randn(4), "z2": torch.randn(4)}):
        with pytest.raises(ValueError, match="must have shape") as caught:
            hn.InfoNCE(backend="tiled")(**arguments)
        assert call(interpreted.message, {}, arguments) == str(caught.value)


@pytest.mark.parametrize("constants", [{}, IN_STRIPS])
def test_no_matrix_of_scores_is_allocated(call: Call, constants: dict[str, Any]) -> None:
    rows, dim, keys = 30, 17, 160
    arguments = {**views(rows, dim), "negatives": torch.randn(keys, dim)}
    work: Work = call(interpreted.work, {"hardening": hn.Exponential(1.0)}, arguments, constants)
    assert keys * dim <= work.largest < 2 * rows * keys / 3


def test_the_loss_of_two_views_takes_few_launches(call: Call) -> None:
    for options in ({}, {"hardening": hn.Exponential(1.0)}, {"hardening": hn.Threshold(1.0), "temperature": 0.02}):
        work: Work = call(interpreted.work, options, views(20, 8))
        assert len(work.launches) <= 5
        assert len(work.operations) <= 6  # all but one of them check a flag, which is one operation on a GPU
    assert len(call(interpreted.work, TOWERS | {"hardening": hn.Exponential(1.0)}, views(20, 8)).launches) <= 5
    assert len(call(interpreted.work, {"in_batch": "other"}, views(20, 8)).launches) <= 6
    queue = {**views(20, 8), "negatives": torch.randn(40, 8)}
    assert len(call(interpreted.work, {"in_batch": None}, queue).launches) <= 6


def test_overwriting_the_negatives_between_loss_and_backward_raises(call: Call) -> None:
    for normalized in (True, False):
        for dtype in (torch.float32, torch.float16):
            assert "inplace operation" in call(interpreted.refuses_overwritten_negatives, normalized, dtype)


def test_overwriting_any_argument_between_loss_and_backward_raises(call: Call) -> None:
    for in_batch, supervision, names in (
        (None, "none", ["z1", "z2", "negatives", "exclude", "negative_mask"]),
        ("both", "full", list(full())),
    ):
        arguments = {key: tensor for key, tensor in full().items() if key in ("z1", "z2", *names)}
        options = {"in_batch": in_batch, "supervision": supervision}
        assert call(interpreted.refuses_overwriting, options, arguments) == names


SECOND = {
    "pairs": ({"hardening": hn.Exponential(1.0), "class_prior": 0.01}, []),
    "other view, decoupled": ({"in_batch": "other", "positive_in_denominator": False}, []),
    "both directions": ({"in_batch": "other", "symmetric": True, "temperature": hn.Learnable(0.3)}, []),
    "labels": ({"supervision": "full", "combine_positives": "in_denominator"}, ["labels"]),
    "queue": ({"in_batch": None, "hardening": hn.Ring(0.2, 0.9)}, ["negatives", "exclude"]),
    "queue and batch": ({"hardening": hn.Exponential(0.6)}, ["negatives", "negative_mask"]),
}


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_are_those_of_the_reference_in_float64(call: Call, name: str) -> None:
    options, names = SECOND[name]
    arguments = {key: tensor for key, tensor in full().items() if key in ("z1", "z2", *names)}
    found = call(interpreted.second, options, arguments)
    exact = {key: t.double() if t.is_floating_point() else t for key, t in arguments.items()}
    truth = interpreted.second(options, exact, backend="reference")
    assert found.keys() == truth.keys()
    for key, exactly in truth.items():
        assert float(exactly.norm()) > 1e-3
        assert error(found[key], exactly) < 1e-4


@pytest.mark.parametrize("options", [{}, {"in_batch": None}])
def test_common_usage_of_a_loss_gives_right_results(call: Call, options: dict[str, Any]) -> None:
    found = call(interpreted.usages, options)
    assert all(found.values()), [name for name, right in found.items() if not right]


def test_auto_does_not_choose_the_fused_kernel_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    assert hn.simclr()._kernel(cpu) is tiled
    assert hn.InfoNCE(hardening=hn.Custom(torch.exp))._kernel(cpu) is reference
    code = "import sys, torch, hardneg; z = torch.randn(4, 3); hardneg.hcl()(z, z); assert 'triton' not in sys.modules"
    children.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_unsupported_calls_raise_an_error_with_the_fix() -> None:
    with pytest.raises(ValueError, match="runs on CUDA devices, but the embeddings are on cpu: use backend='auto'"):
        hn.InfoNCE(backend="fused")(*torch.randn(2, 4, 3))
    with pytest.raises(ValueError, match="Custom weights: use backend='reference' or 'auto'"):
        hn.InfoNCE(hardening=hn.Custom(torch.relu), backend="fused")


@pytest.mark.slow  # three more processes that import torch and Triton; test_distributed has the other kernels
def test_two_processes_equal_one(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # inherited by the processes
    short = ["simclr", "hcl", "learnable temperature"]
    names, sizes = [*short, "hscl", "batch and queue"], [5, 7]
    children.spawn(interpreted.run_process, (sizes, names, str(tmp_path)), 2)
    parts = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for name in names:
        single = call(interpreted.run_rows, name, slice(0, sum(sizes)), False)
        for value, _, took_short_path in (part[name] for part in parts):
            assert_close(value, single.value, rtol=1e-5, atol=1e-6)
            assert took_short_path == (name in short)
        grads = [part[name][1] for part in parts]
        for view in ("z1", "z2"):  # DDP averages over processes
            joined = torch.cat([grad[view] for grad in grads]) / 2
            assert_close(joined, single.grads[view], rtol=1e-4, atol=1e-6)
        if "temperature.log_value" in single.grads:
            average = torch.stack([grad["temperature.log_value"] for grad in grads]).mean()
            assert_close(average, single.grads["temperature.log_value"], rtol=1e-4, atol=1e-6)


BAD_LABELS: dict[str, tuple[dict[str, Any], list[int], bool]] = {
    "without a valid anchor": ({"supervision": "full"}, [-5, -5, 0, 0], False),
    "decoupled": ({"supervision": "positives", "positive_in_denominator": False}, [0, -2, 0, 1], True),
    "negatives, ring": ({"supervision": "negatives", "hardening": hn.Ring(0.2, 0.9)}, [0, -2, 0, 1], True),
    "supcon": ({"supervision": "full", "combine_positives": "in_denominator"}, [0, -2, 0, 1], True),
}


@pytest.mark.parametrize("name", BAD_LABELS)
def test_a_label_below_minus_one_gives_nan(call: Call, name: str) -> None:
    options, labels, paired = BAD_LABELS[name]
    arguments = views(4, 5) | {"labels": torch.tensor(labels)}
    if not paired:
        del arguments["z2"]
    assert call(interpreted.poisoned, options, arguments).isnan()
    arguments["labels"].clamp_(min=-1)
    assert call(interpreted.poisoned, options, arguments).isfinite()


def test_an_embedding_that_is_not_finite_gives_nan_without_any_valid_anchor(call: Call) -> None:
    arguments = {"z1": torch.randn(4, 5), "labels": torch.arange(4)}
    assert call(interpreted.poisoned, {"supervision": "full"}, arguments) == 0
    arguments["z1"][2, 3] = torch.nan
    assert call(interpreted.poisoned, {"supervision": "full"}, arguments).isnan()


@pytest.mark.parametrize("normalize", [True, False])
def test_negatives_made_in_inference_mode_are_accepted(call: Call, normalize: bool) -> None:
    assert_close(*call(interpreted.of_inference_tensors, normalize), rtol=0, atol=0)

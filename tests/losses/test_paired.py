"""The short path for paired and labelled batches: equal to plain autograd, decided once, and never wrong in silence."""

import copy
import gc
import subprocess
import sys
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import hardneg as hn
from hardneg.losses import paired
from hardneg.losses.hardening import Hardening
from hardneg.losses.kernels import strips

Call = tuple[dict[str, Any], dict[str, Any]]  # options of InfoNCE and arguments of a call


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each planned call, whether the short path computed it."""
    found: list[bool] = []
    original = paired.Plan.compute_loss

    def watched(self: paired.Plan, *arguments: Any) -> Any:
        result = original(self, *arguments)
        found.append(result is not None)
        return result

    monkeypatch.setattr(paired.Plan, "compute_loss", watched)
    return found


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Calls that the short path serves, with duplicates, unknown labels, one class, zero rows and single pairs."""
    layout = draw(st.sampled_from(["both", "other", "symmetric", "queue", "one view", "labels"]))
    tilts = [(), (hn.Exponential(0.5),), (hn.Exponential(1.0),), (hn.Exponential(3.0),)]
    bands = [(), (), (hn.Threshold(score=0.0),), (hn.Threshold(score=draw(st.floats(-2, 2))),)]
    parts = draw(st.sampled_from(tilts)) + draw(st.sampled_from(bands))
    options: dict[str, Any] = {
        "temperature": draw(st.sampled_from([0.01, 0.05, 0.5, 2.0])),
        "hardening": parts or (hn.Uniform(),),
        "positive_in_denominator": draw(st.sampled_from([True, True, False])),
        "negative_count": draw(st.sampled_from(["support", "batch", 7.0])),
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
        "grad_through_weights": draw(st.booleans()),
        "in_batch": {"other": "other", "symmetric": "other", "queue": None}.get(layout, "both"),
        "symmetric": layout == "symmetric",
    }
    batch, dim = draw(st.sampled_from([6, 4, 9, 2, 3, 1])), draw(st.sampled_from([4, 3, 2, 6, 1]))
    chance = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))

    def rows(number: int) -> Tensor:
        return torch.randn(number, dim, generator=chance, dtype=torch.float64)

    arguments: dict[str, Any] = {"z1": rows(batch)}
    if layout != "one view":
        arguments["z2"] = rows(batch)
    if layout == "queue":
        arguments["negatives"] = rows(draw(st.integers(1, 12)))
        number = len(arguments["negatives"])
        if draw(st.booleans()):
            arguments["exclude"] = torch.randint(number, (batch, 2), generator=chance)
        if draw(st.booleans()):
            arguments["negative_mask"] = torch.rand(batch, number, generator=chance) < 0.7
    supervisions = {"one view": ["positives", "full"], "labels": ["positives", "negatives", "full"]}.get(
        layout, ["none"]
    )
    options["supervision"] = draw(st.sampled_from(supervisions))
    if options["supervision"] != "none":
        classes = draw(st.sampled_from([1, 2, 4]))
        unknown = draw(st.booleans())
        arguments["labels"] = torch.randint(-1 if unknown else 0, classes, (batch,), generator=chance)
        if options["positive_in_denominator"]:
            options["combine_positives"] = draw(st.sampled_from(["mean_of_logs", "in_denominator"]))
    if options["supervision"] in ("none", "negatives") and dim > 1:  # of one dimension, G often equals the floor
        options["class_prior"] = draw(st.sampled_from([0.0, 0.1, 0.6]))
    spoilt = draw(st.sampled_from(["no", "no", "no", "duplicates", "zero row"]))
    if spoilt == "duplicates":
        arguments["z1"][batch // 2 :] = arguments["z1"][0].clone()
    elif spoilt == "zero row":
        arguments["z1"][0] = 0
    return options, arguments


def computed(options: dict[str, Any], arguments: dict[str, Any], dtype: torch.dtype, **more: Any) -> list[Tensor]:
    """Loss, gradients of the embeddings and of the temperature, and diagnostics."""
    learnable = hn.Learnable(options["temperature"], minimum=1e-3).to(dtype)
    loss = hn.InfoNCE(**{**options, "temperature": learnable, **more})
    given = {
        name: x.detach().clone().to(dtype).requires_grad_() if x.is_floating_point() else x
        for name, x in arguments.items()
    }
    values = loss(**given)
    weights = torch.linspace(0.5, 1.5, values.numel(), dtype=values.dtype).view(values.shape)
    (values * weights).sum().backward()
    report = loss.diagnostics()
    gradients = [x.grad for x in given.values() if x.is_floating_point()]
    assert learnable.log_value.grad is not None
    return [values.detach(), *gradients, learnable.log_value.grad, torch.tensor(list(report.values()))]  # type: ignore[list-item]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(call=calls(), elements=st.sampled_from([6, 40, 1 << 20]))
@pytest.mark.filterwarnings("ignore:.*anchors are floored")
def test_the_short_path_equals_plain_autograd_in_float64(
    call: Call, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, arguments = call
    monkeypatch.setitem(strips.STRIP_ELEMENTS, "cpu", elements)  # from one strip to one per row
    monkeypatch.setattr(strips, "LEAST_ROWS", 1)
    short = computed(options, arguments, torch.float64)
    plain = computed(options, arguments, torch.float64, backend="reference")
    for one, other in zip(short, plain, strict=True):
        assert_close(one, other, rtol=1e-7, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(call=calls())
@pytest.mark.filterwarnings("ignore:.*anchors are floored")
def test_the_short_path_is_finite_and_accurate_in_float32(call: Call) -> None:
    options, arguments = call
    temperature = options["temperature"]
    if "class_prior" in options and options["class_prior"] > 0:
        return  # next to the floor rounding decides
    options = {
        **options,
        "hardening": tuple(part for part in options["hardening"] if not part.has_band) or hn.Uniform(),
    }
    rounded = {name: x.float() if x.is_floating_point() else x for name, x in arguments.items()}
    short = computed(options, rounded, torch.float32)
    plain = computed(options, rounded, torch.float64, backend="reference")
    for one, other in zip(short[:-1], plain[:-1], strict=True):
        assert one.isfinite().all()
        largest = other.abs().amax().item() if other.numel() else 0.0
        assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-5 * (1 / temperature + largest))


@pytest.mark.filterwarnings("ignore:.*anchors are floored")
def test_most_generated_calls_take_the_short_path_with_a_gradient(taken: list[bool]) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @given(call=calls())
    def count(call: Call) -> None:
        options, arguments = call
        taken.clear()
        z1 = arguments["z1"].clone().requires_grad_()
        value = hn.InfoNCE(**options)(**{**arguments, "z1": z1}).sum()
        value.backward()
        assert z1.grad is not None
        seen["all"] += 1
        seen["short"] += taken == [True]
        seen["nonzero"] += taken == [True] and bool((z1.grad != 0).any())

    count()
    assert seen["short"] > 0.5 * seen["all"]
    assert seen["nonzero"] > 0.3 * seen["all"]


PRESETS: dict[str, tuple[Any, bool, bool]] = {  # the loss, whether it takes labels, and a second view
    "simclr": (hn.simclr, False, True), "debiased": (hn.debiased, False, True), "hcl": (hn.hcl, False, True),
    "decoupled": (hn.decoupled, False, True), "simcse": (hn.simcse, False, True), "clip": (hn.clip, False, True),
    "graphcl": (hn.graphcl, False, True), "scl": (hn.scl, True, True), "hscl": (hn.hscl, True, True),
    "hscl_threshold": (hn.hscl_threshold, True, True), "supcon": (hn.supcon, True, True),
    "supcon of one view": (hn.supcon, True, False), "scl of one view": (hn.scl, True, False),
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_presets_take_the_short_path_and_equal_the_oracle(name: str, taken: list[bool]) -> None:
    preset, labelled, paired_views = PRESETS[name]
    loss = preset()
    chance = np.random.default_rng(3)
    arrays: dict[str, Any] = {"z1": chance.normal(size=(7, 4))}
    if paired_views:
        arrays["z2"] = chance.normal(size=(7, 4))
    if labelled:
        arrays["labels"] = np.array([0, 1, 0, -1, 2, 1, -1])
    value = loss(**{key: torch.from_numpy(array) for key, array in arrays.items()})
    options: dict[str, Any] = {
        key: getattr(loss, key)
        for key in ("class_prior", "in_batch", "symmetric", "supervision", "combine_positives", "negative_count",
                    "positive_in_denominator")
    }  # fmt: skip
    temperature = loss.temperature
    options["temperature"] = float(temperature().detach()) if isinstance(temperature, hn.Learnable) else temperature
    for part in loss.hardening:
        if isinstance(part, hn.Exponential):
            options["beta"] = part.beta
        if isinstance(part, hn.Threshold):
            options["tau_threshold"] = float(np.exp(-0.3 / options["temperature"]))
    assert taken == [True]
    assert float(value.detach()) == pytest.approx(oracle.info_nce(**arrays, **options).mean, rel=1e-6)


def test_the_plan_of_a_call_is_kept_until_settings_or_shapes_change(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[bool] = []
    original = paired.plan

    def counted(*arguments: Any) -> Any:
        plans.append(True)
        return original(*arguments)

    monkeypatch.setattr(paired, "plan", counted)
    loss = hn.simclr()
    z1, z2 = torch.randn(6, 4), torch.randn(6, 4)
    for _ in range(3):
        loss(z1, z2)
    assert len(plans) == 1
    assert_close(loss(z1[:4], z2[:4]), hn.simclr(backend="reference")(z1[:4], z2[:4]))
    loss.temperature = 0.1
    assert_close(loss(z1, z2), hn.simclr(0.1, backend="reference")(z1, z2))
    loss.in_batch, loss.class_prior = "other", 0.05
    expected = hn.debiased(0.05, 0.1, in_batch="other", backend="reference")(z1, z2)
    assert_close(loss(z1, z2), expected)
    assert_close(loss(z1.double(), z2.double()), expected.double(), atol=1e-5, rtol=1e-5)


def test_schedules_and_copies_do_not_use_an_old_plan() -> None:
    loss = hn.hcl(beta=hn.Linear(0.0, 4.0))
    z1, z2 = torch.randn(6, 4), torch.randn(6, 4)
    first = loss(z1, z2)
    other = copy.deepcopy(loss)
    loss.set_progress(1.0)
    assert_close(loss(z1, z2), hn.hcl(4.0, backend="reference")(z1, z2))
    assert_close(other(z1, z2), first)


QUEUE = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
GENERAL_CALLS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 3.0},
    "ids": {"ids": torch.tensor([0, 0, 1, 2])},
    "ids of negatives": {"ids": torch.arange(4), "negatives": QUEUE, "negative_ids": torch.arange(5)},
    "pairs": {"ids": torch.arange(4), "not_negatives": torch.tensor([[0, 1], [2, 2]])},
    "one source": {"negatives": {"given": QUEUE}},
    "two sources": {"negatives": {"given": QUEUE, "mined": QUEUE[:2]}},
    "exclusions by source": {"negatives": {"queue": QUEUE}, "exclude": {"queue": torch.arange(4)}},
}


@pytest.mark.parametrize("in_batch", ["both", None])
@pytest.mark.parametrize("name", GENERAL_CALLS)
def test_calls_with_ids_sources_or_a_scale_take_the_general_path(name: str, in_batch: Any, taken: list[bool]) -> None:
    generator = torch.Generator().manual_seed(0)
    z1, z2 = torch.randn(2, 4, 3, generator=generator)
    plain = {} if in_batch else {"negatives": QUEUE}
    options: dict[str, Any] = {"in_batch": in_batch, "hardening": hn.Exponential(1.0)}
    loss, reference = hn.InfoNCE(**options), hn.InfoNCE(**options, backend="reference")
    for arguments in (plain, plain | GENERAL_CALLS[name], plain, plain | GENERAL_CALLS[name]):
        assert_close(loss(z1, z2, **arguments), reference(z1, z2, **arguments))
    assert taken == [True, True]


@pytest.mark.parametrize(
    "general",
    [
        {"normalize_weights": False},
        {"combine_positives": "log_of_sum"},
        {"hardening": {"batch": hn.Exponential(1.0)}},
    ],
)
def test_settings_of_the_general_path_are_not_planned(general: dict[str, Any], taken: list[bool]) -> None:
    z1, z2 = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    loss = hn.InfoNCE(hardening=hn.Exponential(1.0))
    loss(z1, z2)
    assert taken == [True]
    for name, value in general.items():
        setattr(loss, name, value)
    expected = hn.InfoNCE(**{"hardening": hn.Exponential(1.0)} | general, backend="reference")(z1, z2)
    assert_close(loss(z1, z2), expected)
    assert taken == [True]


def test_values_are_checked_in_every_call() -> None:
    loss, labels = hn.supcon(), torch.tensor([0, 1, 0, 1])
    z = torch.randn(4, 3)
    loss(z, labels=labels)
    with pytest.raises(ValueError, match="z1 holds NaN or inf"):
        loss(torch.full((4, 3), torch.nan), labels=labels)
    with pytest.raises(ValueError, match="labels must be ≥ −1"):
        loss(z, labels=labels - 3)
    with pytest.raises(ValueError, match="labels must have an integer dtype"):
        loss(z, labels=labels.float())
    with pytest.raises(ValueError, match="needs labels"):
        loss(z)
    with pytest.raises(ValueError, match=r"z1 must be a torch\.Tensor"):
        loss(z.numpy(), labels=labels)


def test_labels_of_any_integer_type_and_size_are_groups() -> None:
    z, labels = torch.randn(6, 3), torch.tensor([5, 2, 5, -1, 2, -1])
    expected = hn.supcon(backend="reference")(z, labels=labels)
    assert_close(hn.supcon()(z, labels=labels.int()), expected)
    large = torch.where(labels >= 0, labels + (1 << 60), labels)  # equal as float32
    assert_close(hn.supcon()(z, labels=large), expected)


@pytest.mark.parametrize("name", ["simclr", "clip", "supcon"])
def test_a_graph_can_be_used_twice_and_inputs_must_not_change(name: str) -> None:
    loss = getattr(hn, name)()
    more = {"labels": torch.arange(6) % 2} if name == "supcon" else {}
    z1, z2 = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)
    value = loss(z1, z2, **more)
    first = torch.autograd.grad(value, z1, retain_graph=True)[0].clone()
    assert_close(torch.autograd.grad(value, z1, retain_graph=True)[0], first)
    z2.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_a_loss_with_a_learned_temperature_can_be_checkpointed_in_its_first_call() -> None:
    loss, other = hn.clip(), hn.clip()
    z1, z2 = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)
    checkpoint(loss, z1, z2, use_reentrant=False).backward()
    other(z1, z2).backward()
    assert_close(*[next(made.parameters()).grad for made in (loss, other)])


@pytest.mark.parametrize("backward_inside", [True, False])
def test_autocast_does_not_lower_the_precision(backward_inside: bool) -> None:
    z1, z2 = torch.randn(8, 16, requires_grad=True), torch.randn(8, 16)
    expected = torch.autograd.grad(hn.hcl()(z1, z2), z1)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = hn.hcl()(z1, z2)
        if backward_inside:
            value.backward()
    if not backward_inside:
        value.backward()
    assert z1.grad is not None
    assert_close(z1.grad, expected)


@dataclass(frozen=True)
class Moving(Hardening):
    """A hardening of a user, whose numbers change between calls."""

    numbers: dict[str, float]

    def tilt(self) -> float:
        return self.numbers["tilt"]

    def bounds(self, positive: Tensor | None) -> tuple[float | None, float | None]:
        return self.numbers["lower"], None


def test_numbers_of_a_users_hardening_may_change_between_calls() -> None:
    numbers = {"tilt": 0.0, "lower": -9.0}
    z1, z2 = torch.randn(9, 4), torch.randn(9, 4)
    loss, plain = (hn.InfoNCE(hardening=Moving(numbers), backend=backend) for backend in ("auto", "reference"))
    values = []
    for numbers["tilt"], numbers["lower"] in ((0.0, -9.0), (2.0, -9.0), (2.0, 0.3)):
        values.append(loss(z1, z2))
        assert_close(values[-1], plain(z1, z2))
    assert len({round(float(value), 4) for value in values}) == 3


def test_gradients_in_float64_keep_their_precision_with_labels() -> None:
    z1, z2 = (torch.randn(7, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    labels, found = torch.tensor([0, 1, 0, 1, 2, -1, 2]), []
    for backend in ("auto", "reference"):
        found.append(torch.autograd.grad(hn.hscl(backend=backend)(z1, z2, labels=labels), (z1, z2)))
    for one, other in zip(*found, strict=True):
        assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", ["labels", "exclude", "negative_mask"])
def test_no_argument_may_be_overwritten_before_the_backward_pass(name: str, create_graph: bool) -> None:
    z1, z2 = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)
    if name == "labels":
        loss, given = hn.scl(), {"labels": torch.tensor([0, 1, 0, 1, 0, 1])}
    else:
        every = {"exclude": torch.arange(6), "negative_mask": torch.rand(6, 9) < 0.8}
        loss, given = hn.moco(), {"negatives": torch.randn(9, 4), name: every[name]}
    value = loss(z1, z2, **given)
    given[name].zero_()
    with pytest.raises(RuntimeError, match="inplace operation"):
        torch.autograd.grad(value, z1, create_graph=create_graph)


def test_progress_without_schedules_keeps_the_plan() -> None:
    loss, scheduled = hn.hcl(), hn.hcl(beta=hn.Linear(1.0, 0.0))
    for made in (loss, scheduled):
        made(torch.randn(5, 3), torch.randn(5, 3))
    before, other = loss._plan, scheduled._settings
    for made in (loss, scheduled):
        made.set_progress(0.5)
        made(torch.randn(5, 3), torch.randn(5, 3))
    assert before is not None
    assert loss._plan is before
    assert scheduled._settings is not other


def test_the_record_of_a_call_does_not_keep_the_graph_of_its_negatives() -> None:
    rows = torch.randn(8, 4, requires_grad=True)
    negatives = rows * 2
    watch = weakref.ref(negatives)
    loss = hn.InfoNCE(supervision="full", num_negatives=3)
    labels = {"labels": torch.arange(6) % 2, "negative_labels": torch.arange(8) % 2}
    loss(torch.randn(6, 4), torch.randn(6, 4), negatives=negatives, **labels)
    del negatives
    gc.collect()
    assert watch() is None
    assert loss.diagnostics()["anchors"] == 12


PEAK = """
import torch, hardneg as hn
def peak():  # of this process; ru_maxrss would begin at that of its parent
    return next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
torch.set_num_threads(1)
z1, z2 = (torch.randn(4096, 32, requires_grad=True) for _ in "12")
before = peak()
for _ in range(3):
    hn.supcon()(z1, z2, labels=torch.arange(4096) % 50).backward()
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_strips_of_a_labeled_batch_do_not_fragment_the_memory() -> None:
    # One matrix of all scores would take 256 MiB. It came to 450 to 630 MiB with small tensors between freed strips.
    grown = [
        int(subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    assert max(grown) < 200, grown

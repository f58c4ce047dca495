"""β from an effective share: against a root finder in float64, closed forms, and an uninterrupted run."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losses import share_processes
from scipy.optimize import brentq
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import hardneg as hn
from hardneg.losses import effective_share, tilt_state
from hardneg.losses.effective_share import LARGEST_EXPONENT, Supports
from hardneg.losses.tilt_state import RATE

SHARES = (0.95, 0.6, 0.3, 0.1)


def share_by_loop(rows: list[np.ndarray], beta: float) -> float:
    """The mean of (Σw)²/Σw²/|S| over anchors with negatives. rows: the scores of each anchor's negatives"""
    found = []
    for scores in rows:
        if len(scores):
            weight = np.exp(beta * (scores - scores.max()))
            found.append(weight.sum() ** 2 / (weight**2).sum() / len(scores))
    return float(np.mean(found))


def root(rows: list[np.ndarray], share: float, largest: float) -> float:
    if share_by_loop(rows, largest) > share:
        return largest
    return float(brentq(lambda beta: share_by_loop(rows, beta) - share, 0, largest, xtol=1e-12))


def views(rows: int = 24, dim: int = 8, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z1 = torch.randn(rows, dim, generator=generator, dtype=dtype)
    return z1.requires_grad_(), z1.detach() + 0.5 * torch.randn(rows, dim, generator=generator, dtype=dtype)


def rows_of(z1: Tensor, z2: Tensor, temperature: float, kept: Callable[[int, int], bool]) -> list[np.ndarray]:
    """The scores of both views' negatives by a loop. kept: whether instance j may be a negative of instance i"""
    z = torch.cat([z1, z2]).detach().double()
    z = z / z.norm(dim=1, keepdim=True)
    scores, batch = (z @ z.T / temperature).numpy(), len(z1)
    return [
        np.array([scores[i, j] for j in range(2 * batch) if i % batch != j % batch and kept(i % batch, j % batch)])
        for i in range(2 * batch)
    ]


SCORES: dict[str, Callable[[torch.Generator], Tensor]] = {
    "Gaussian": lambda g: torch.randn(40, 150, generator=g),
    "uniform": lambda g: 4 * torch.rand(40, 150, generator=g),
    "two groups": lambda g: 0.1 * torch.randn(40, 150, generator=g) + 5 * (torch.rand(40, 150, generator=g) < 0.1),
    "two values": lambda g: 10.0 * (torch.rand(40, 150, generator=g) < 0.02),
    "long tail": lambda g: -5 * torch.rand(40, 150, generator=g).log(),
    "long lower tail": lambda g: 5 * torch.rand(40, 150, generator=g).log(),
    "different spreads": lambda g: torch.randn(40, 150, generator=g) * torch.logspace(-2, 1, 40)[:, None],
    "nearly equal": lambda g: 0.9 + 1e-3 * torch.randn(40, 150, generator=g),
}


@pytest.mark.parametrize("device", ["cpu", "accelerator"])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", SCORES)
def test_beta_is_the_root_of_the_share(name: str, share: float, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "accelerator":
        monkeypatch.setattr(effective_share, "READ_AT_ONCE", ())
    generator = torch.Generator().manual_seed(len(name))
    scores = SCORES[name](generator)
    kept = torch.rand(scores.shape, generator=generator) < 0.9
    kept[3] = False  # an empty support
    rows = [row[mask].double().numpy() for row, mask in zip(scores, kept, strict=True)]
    largest = 256.0 / max(1.0, float(scores.abs().max()))
    found = float(Supports([(scores[:15], kept[:15]), (scores[15:], kept[15:])]).solve(share, torch.tensor(largest)))
    assert found == pytest.approx(root(rows, share, largest), rel=2e-4)
    if found < (1 - 1e-6) * largest:
        assert share_by_loop(rows, found) == pytest.approx(share, rel=1e-3)


@pytest.mark.parametrize("share", [0.9, 0.6, 0.3])
def test_few_evaluations_find_beta_on_a_cpu(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    mean_share = Supports.mean_share

    def counted(self: Supports, beta: Tensor) -> Tensor:
        asked.append(float(beta))
        return mean_share(self, beta)

    monkeypatch.setattr(Supports, "mean_share", counted)
    scores = 2.0 * torch.randn(64, 500, generator=torch.Generator().manual_seed(2))
    Supports([(scores, torch.ones_like(scores, dtype=torch.bool))]).solve(share, torch.tensor(50.0))
    assert len(asked) <= 7


def test_weights_too_small_for_normal_numbers_count_for_nothing() -> None:
    scores = torch.cat([torch.zeros(3, 2), -torch.logspace(0, 4, 60).expand(3, -1)], dim=1)
    kept = torch.ones_like(scores, dtype=torch.bool)
    kept[:, ::3], kept[2] = False, False
    found = Supports([(scores, kept)]).mean_share(torch.tensor(1.0))
    rows = [row[mask].double().numpy() for row, mask in zip(scores[:2], kept[:2], strict=True)]
    assert float(found) == pytest.approx(share_by_loop(rows, 1.0), rel=1e-6)


@pytest.mark.parametrize("share", [0.9, 0.6, 0.3])
def test_beta_of_gaussian_scores_has_a_closed_form(share: float) -> None:
    scores = 2.5 * torch.randn(64, 20_000, generator=torch.Generator().manual_seed(1))
    found = float(Supports([(scores, torch.ones_like(scores, dtype=torch.bool))]).solve(share, torch.tensor(50.0)))
    assert found == pytest.approx(math.sqrt(-math.log(share)) / 2.5, rel=0.01)


@pytest.mark.parametrize("temperature", [0.05, 0.5, 5.0])
@pytest.mark.parametrize("share", SHARES)
def test_the_first_call_sets_beta_from_all_scores(share: float, temperature: float) -> None:
    z1, z2 = views()
    loss = hn.InfoNCE(temperature, hn.Exponential(hn.EffectiveShare(share)))
    loss(z1, z2)
    expected = root(rows_of(z1, z2, temperature, lambda i, j: True), share, LARGEST_EXPONENT * temperature)
    report = loss.diagnostics()
    assert report["beta"] == pytest.approx(expected, rel=1e-3)
    assert report["effective_share"] == pytest.approx(share, rel=2e-3)


def test_labels_leave_the_support_before_the_share_is_computed() -> None:
    z1, z2 = views()
    labels = torch.arange(24) % 3
    loss = hn.hscl(beta=hn.EffectiveShare(0.5), temperature=0.2)
    loss(z1, z2, labels=labels)
    expected = root(rows_of(z1, z2, 0.2, lambda i, j: i % 3 != j % 3), 0.5, LARGEST_EXPONENT * 0.2)
    assert loss.diagnostics()["beta"] == pytest.approx(expected, rel=1e-3)


def test_ten_times_the_temperature_gives_ten_times_beta_and_the_same_share() -> None:
    z1, z2 = views()
    found = []
    for temperature in (0.05, 0.5):
        loss = hn.hcl(beta=hn.EffectiveShare(0.6), tau_plus=0.0, temperature=temperature)
        loss(z1, z2)
        found.append(loss.diagnostics())
    assert found[1]["beta"] == pytest.approx(10 * found[0]["beta"], rel=1e-4)
    assert found[1]["effective_share"] == pytest.approx(found[0]["effective_share"], rel=1e-4)


def tilt(share: float = 0.5) -> hn.Exponential:
    return hn.Exponential(hn.EffectiveShare(share))


QUEUE = torch.randn(30, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "both": ({"hardening": tilt()}, {}),
    "symmetric": ({"hardening": tilt(), "in_batch": "other", "symmetric": True}, {}),
    "directions": ({"hardening": tilt(), "in_batch": ("query_to_doc", "doc_to_query", "query_to_query")}, {}),
    "ring": ({"hardening": (hn.Ring(0.3, 0.9), tilt())}, {}),
    "threshold": ({"hardening": (hn.Threshold(cosine=0.0), tilt())}, {}),
    "below positive": ({"hardening": (hn.BelowPositive(0.2), tilt())}, {}),
    "prior": ({"hardening": tilt(), "class_prior": 0.01}, {}),
    "queue": ({"hardening": tilt(), "in_batch": None}, {"negatives": QUEUE, "exclude": torch.arange(24)}),
    "own negatives": ({"hardening": tilt()}, {"negatives": QUEUE[:24].reshape(24, 1, 8) + QUEUE[None, :5]}),
    "ids": ({"hardening": tilt()}, {"ids": torch.arange(24) // 2}),
    "guide": ({"hardening": (hn.Guided(0.1), tilt())}, {"guide": views(24, 3, seed=9)}),
    "range": ({"hardening": tilt(), "normalize": False, "weight_range": 2.0}, {}),
    "unnormalized": ({"hardening": tilt(), "normalize": False, "temperature": 8.0}, {}),
    "scale": ({"hardening": tilt()}, {"scale": torch.tensor(7.0)}),
    "labels": ({"hardening": tilt(), "supervision": "full"}, {"labels": torch.arange(24) % 4}),
}


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("name", CALLS)
def test_every_setting_reaches_the_share_and_has_the_loss_of_that_beta(name: str, backend: str) -> None:
    options, arguments = CALLS[name]
    loss = hn.InfoNCE(**{"temperature": 0.3, **options}, backend=backend)
    z1, z2 = views()
    value = loss(z1, z2, **arguments)
    value.backward()
    report = loss.diagnostics()
    # Of several directions it is that of their mixture.
    assert report["effective_share"] == pytest.approx(0.5, rel=0.03 if name == "directions" else 3e-3)
    assert report["beta"] > 0.01
    known = hn.Exponential(report["beta"])
    parts = options["hardening"] if isinstance(options["hardening"], tuple) else (options["hardening"],)
    fixed = tuple(known if isinstance(part, hn.Exponential) else part for part in parts)
    w1, w2 = views()
    other = hn.InfoNCE(**{"temperature": 0.3, **options, "hardening": fixed}, backend=backend)(w1, w2, **arguments)
    other.backward()
    assert_close(value, other, rtol=1e-5, atol=1e-7)
    assert z1.grad is not None
    assert_close(z1.grad, w1.grad, rtol=1e-4, atol=1e-7)
    assert float(z1.grad.abs().max()) > 1e-4


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("options", [{}, {"normalize_weights": False}, {"normalize": False}])
def test_float64_embeddings_have_the_loss_of_beta_in_float64(backend: str, options: dict[str, Any]) -> None:
    z1, z2 = (z.detach().double().requires_grad_() for z in views())
    loss = hn.InfoNCE(0.1, hn.Exponential(hn.EffectiveShare(0.3)), backend=backend, **options)
    found = torch.autograd.grad(loss(z1, z2), (z1, z2))
    fixed = hn.InfoNCE(0.1, hn.Exponential(loss.diagnostics()["beta"]), backend=backend, **options)
    for one, other in zip(found, torch.autograd.grad(fixed(z1, z2), (z1, z2)), strict=True):
        assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_each_source_has_its_own_beta() -> None:
    hardening = {"batch": tilt(0.8), "queue": (hn.Ring(0.0, 0.9), tilt(0.3)), "mined": hn.Uniform()}
    loss = hn.InfoNCE(0.3, hardening)
    z1, z2 = views()
    loss(z1, z2, negatives={"queue": QUEUE, "mined": QUEUE[:4] + 1})
    report = loss.diagnostics()
    batch = root(rows_of(z1, z2, 0.3, lambda i, j: True), 0.8, 77.0)
    z = torch.nn.functional.normalize(torch.cat([z1, z2]).detach(), dim=1)
    scores = (z @ torch.nn.functional.normalize(QUEUE, dim=1).T / 0.3).sort(dim=1).values[:, :27]
    assert report["beta_batch"] == pytest.approx(batch, rel=1e-3)
    assert report["beta_queue"] == pytest.approx(root(list(scores.numpy()), 0.3, 77.0), rel=1e-3)


def test_scores_computed_elsewhere_set_beta() -> None:
    scores = torch.randn(20, 50, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    loss = hn.InfoNCE(1.0, tilt(0.4))
    loss.from_scores(scores[:, :1].requires_grad_(), scores, mask=scores < 2)
    expected = root([row[row < 2] for row in scores.detach().numpy()], 0.4, 80.0)
    assert loss.diagnostics()["beta"] == pytest.approx(expected, rel=1e-3)


def test_later_calls_move_beta_a_tenth_of_the_way() -> None:
    loss, first, second = hn.InfoNCE(0.3, tilt()), views(seed=0), views(seed=1, dim=3)
    alone = hn.InfoNCE(0.3, tilt())
    alone(*second)
    loss(*first)
    before = loss.diagnostics()["beta"]
    loss(*second)
    expected = (1 - RATE) * before + RATE * alone.diagnostics()["beta"]
    assert loss.diagnostics()["beta"] == pytest.approx(expected, rel=1e-5)
    assert abs(expected - before) > 1e-3


@pytest.mark.parametrize("how", ["eval", "no_grad", "no gradient", "torch.func"])
def test_beta_is_fixed_without_training(how: str) -> None:
    loss, (z1, z2) = hn.InfoNCE(0.3, tilt()), views()
    assert_close(loss.eval()(z1, z2), hn.InfoNCE(0.3)(z1, z2))  # 0 before the first call in training
    loss.train()(z1, z2)
    before = copy.deepcopy(loss.state_dict())
    other = views(seed=5)
    if how == "eval":
        loss.eval()(*other)
    elif how == "no_grad":
        with torch.no_grad():
            loss(*other)
    elif how == "no gradient":
        loss(other[0].detach(), other[1])
    else:
        torch.func.grad(lambda z: loss(z, other[1]))(other[0].detach())
    assert all(torch.equal(tensor, before[name]) for name, tensor in loss.state_dict().items())


def steps(loss: hn.InfoNCE, first: int, last: int) -> list[Tensor]:
    """Losses of steps whose anchors and candidates are both more than an estimate takes."""
    found = []
    for step in range(first, last):
        z1, z2 = views(150, 6, seed=step, dtype=torch.float32)
        queue = torch.randn(4500, 6, generator=torch.Generator().manual_seed(step))
        found.append(loss(z1, z2, negatives=queue).detach())
    return found


def test_a_resumed_run_has_the_same_beta_bit_for_bit() -> None:
    whole = hn.InfoNCE(0.3, tilt())
    expected = steps(whole, 0, 5)
    begun, resumed = hn.InfoNCE(0.3, tilt()), hn.InfoNCE(0.3, tilt())
    steps(begun, 0, 3)
    resumed.load_state_dict(begun.state_dict())
    assert all(torch.equal(*pair) for pair in zip(steps(resumed, 3, 5), expected[3:], strict=True))
    assert torch.equal(resumed.tilt_state, whole.tilt_state)
    assert int(resumed.tilt_calls) == 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_beta_keeps_its_precision_if_the_model_changes_its_own(dtype: torch.dtype) -> None:
    z1, z2 = views()
    plain, model = hn.auto(temperature=0.1), torch.nn.ModuleList([hn.auto(temperature=0.1)]).to(dtype)
    for _ in range(5):
        plain(z1, z2)
        model[0](z1, z2)
    assert torch.equal(model.to(dtype)[0].tilt_state, plain.tilt_state)
    limit = hn.auto(temperature=1000.0).to(dtype)  # of equal scores β is 256·t, above the largest number of float16
    assert bool(limit(torch.ones(4, 3, requires_grad=True), torch.ones(4, 3)).isfinite())
    assert float(limit.tilt_state[0, 0]) == pytest.approx(256_000)


def test_an_estimate_from_some_anchors_and_candidates_is_close_to_that_of_all() -> None:
    z1, z2 = views(400, 6, dtype=torch.float32)
    queue = torch.randn(20_000, 6, generator=torch.Generator().manual_seed(1))
    loss = hn.InfoNCE(0.3, tilt(), in_batch=None)
    loss(z1, z2, negatives=queue)
    assert loss.diagnostics()["effective_share"] == pytest.approx(0.5, rel=0.03)


def test_drawn_negatives_use_the_beta_of_the_support() -> None:
    z1, z2 = views()
    drawn, every = hn.InfoNCE(0.3, tilt(), num_negatives=5), hn.InfoNCE(0.3, tilt())
    drawn(z1, z2)
    every(z1, z2)
    assert drawn.diagnostics()["beta"] == every.diagnostics()["beta"]


@pytest.mark.parametrize("backend", ["reference", "tiled", "auto"])
def test_a_backward_pass_after_another_call_uses_its_own_beta(backend: str) -> None:
    loss = hn.InfoNCE(0.3, tilt(), backend=backend)
    first, second = views(seed=0), views(seed=1, dim=3)
    value = loss(*first)
    beta = loss.diagnostics()["beta"]
    loss(*second)
    value.backward()
    again = views(seed=0)
    hn.InfoNCE(0.3, hn.Exponential(beta), backend=backend)(*again).backward()
    assert first[0].grad is not None
    assert_close(first[0].grad, again[0].grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("backend", ["reference", "tiled", "auto"])
def test_second_derivatives_take_beta_as_a_constant(backend: str) -> None:
    loss, found = hn.InfoNCE(0.3, tilt(), backend=backend), []
    for made in (lambda: loss, lambda: hn.InfoNCE(0.3, hn.Exponential(loss.diagnostics()["beta"]), backend=backend)):
        z1, z2 = views(8)
        (first,) = torch.autograd.grad(made()(z1, z2), z1, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), z1)[0])
    assert_close(found[0], found[1], rtol=1e-4, atol=1e-7)
    assert float(found[0].abs().max()) > 1e-4


def test_recomputation_in_a_backward_pass_is_refused() -> None:
    loss, (z1, z2) = hn.InfoNCE(0.3, tilt()), views()
    value = torch.utils.checkpoint.checkpoint(loss, z1, z2, use_reentrant=False)
    with pytest.raises(RuntimeError, match="EffectiveShare would move β once more"):
        value.backward()


def test_a_step_in_chunks_has_the_gradient_and_the_beta_of_a_plain_step() -> None:
    found = []
    for chunked in (False, True):
        torch.manual_seed(0)
        encoder, loss, (x1, x2) = torch.nn.Linear(8, 5).double(), hn.InfoNCE(0.3, tilt()), views()
        x1 = x1.detach()
        if chunked:
            hn.cached_step(encoder, (x1, x2), loss, chunk_size=7)
        else:
            loss(encoder(x1), encoder(x2)).backward()
        found.append((encoder.weight.grad, loss.tilt_state))
    assert_close(found[0][0], found[1][0], rtol=1e-9, atol=1e-12)
    assert_close(found[0][1], found[1][1], rtol=1e-6, atol=0)


def test_a_compiled_loss_moves_beta_at_every_call() -> None:
    torch._dynamo.reset()
    plain, wrapped = hn.InfoNCE(0.3, tilt()), hn.InfoNCE(0.3, tilt())
    compiled = torch.compile(lambda a, b: wrapped(2 * a, b) + 1, backend="eager")
    for seed in range(3):
        z1, z2 = views(seed=seed)
        assert_close(compiled(z1, z2), plain(2 * z1, z2) + 1)
        assert torch.equal(wrapped.tilt_state, plain.tilt_state)
    assert int(wrapped.tilt_calls) == 3


DEGENERATE = st.sampled_from(
    ["equal", "zero", "duplicates", "one pair", "one dimension", "one class", "tiny", "random"]
)


@settings(deadline=None, max_examples=40)
@given(DEGENERATE, st.floats(1e-6, 1.0), st.sampled_from([0.01, 0.5, 20.0]), st.integers(0, 99), st.booleans())
def test_no_input_gives_nan_or_a_beta_beyond_its_limit(
    kind: str, share: float, temperature: float, seed: int, banded: bool
) -> None:
    z1, z2 = views(2 if kind == "one pair" else 6, 1 if kind == "one dimension" else 4, seed)
    z1 = z1.detach()
    if kind in ("equal", "zero", "tiny"):
        z1, z2 = torch.ones_like(z1), torch.ones_like(z2)
        factor = {"equal": 1.0, "zero": 0.0, "tiny": 1e-20}[kind]
        z1, z2 = factor * z1, factor * z2
    elif kind == "duplicates":
        z1[1:3] = z1[0]
    elif kind == "one pair":
        z1, z2 = z1[:1], z2[:1]
    parts = (hn.Threshold(cosine=0.9), tilt(share)) if banded else (tilt(share),)
    options: dict[str, Any] = {"supervision": "negatives"} if kind == "one class" else {}
    loss = hn.InfoNCE(temperature, parts, **options)
    arguments = {"labels": torch.zeros(len(z1), dtype=torch.long)} if kind == "one class" else {}
    for _ in range(2):
        leaf = z1.clone().requires_grad_()
        value = loss(leaf, z2, **arguments)
        value.backward()
        assert torch.isfinite(value)
        assert leaf.grad is not None
        assert torch.isfinite(leaf.grad).all()
        beta = loss.diagnostics()["beta"]
        assert 0 <= beta <= LARGEST_EXPONENT * temperature * (1 + 1e-6)
        if kind in ("one pair", "one class"):
            assert beta == 0  # no negatives: nothing to estimate from
        if kind == "equal" and share < 0.999 and not banded:
            assert beta == pytest.approx(LARGEST_EXPONENT * temperature)


def test_a_share_of_one_is_a_beta_of_zero() -> None:
    loss, (z1, z2) = hn.InfoNCE(0.3, tilt(1.0)), views()
    assert_close(loss(z1, z2), hn.InfoNCE(0.3)(z1, z2))
    assert loss.diagnostics()["beta"] == 0


def test_a_support_of_one_leaves_beta_as_it_is() -> None:
    loss, (z1, z2) = hn.InfoNCE(0.3, tilt()), views(2)
    loss(*views())
    before = loss.tilt_state.clone()
    single = hn.InfoNCE(0.3, tilt(), in_batch="other")
    single(z1, z2)
    assert single.diagnostics()["beta"] == 0
    loss(z1[:1], z2[:1])
    assert torch.equal(loss.tilt_state, before)


class NoReading(TorchDispatchMode):
    """Raises where a value is read from a tensor, for which the host would wait for an accelerator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(func) for name in ("_local_scalar_dense", "nonzero", "is_nonzero", "item")), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["both", "ring", "below positive", "queue", "own negatives", "range", "labels"])
def test_an_estimate_does_not_wait_for_the_device(name: str) -> None:
    options, arguments = CALLS[name]
    loss, (z1, z2) = hn.InfoNCE(**options), views()
    seen: list[Tensor] = []
    moved = tilt_state.moved

    def watched(*given: Any) -> Tensor:
        with NoReading():
            found = moved(*given)
        seen.append(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tilt_state, "moved", watched)
        patch.setattr(effective_share, "READ_AT_ONCE", ())
        loss(z1, z2, **arguments)
    assert len(seen) == 1
    assert float(seen[0][0, 0]) > 0


def test_nan_scores_give_no_estimate() -> None:
    scores = torch.randn(4, 6)
    kept = torch.ones(4, 6, dtype=torch.bool)
    assert Supports([(scores, kept)]).is_defined()
    scores[1, 2] = torch.nan
    assert not Supports([(scores, kept)]).is_defined()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_that_overflow_leave_beta_as_it_is(sign: float) -> None:
    z1, z2 = views(dtype=torch.float32)
    loss = hn.InfoNCE(0.1, hn.Exponential(hn.EffectiveShare(0.6)), normalize=False)
    loss(z1, z2)
    before = loss.tilt_state.clone()
    with pytest.raises(ValueError, match="scores overflow"):
        loss(z1 * 1e20, sign * z2 * 1e20)
    assert torch.equal(loss.tilt_state, before)


def test_an_empty_source_is_estimated_when_it_has_negatives() -> None:
    loss, (z1, z2) = hn.InfoNCE(0.3, {"queue": tilt()}), views()
    loss(z1, z2, negatives={"queue": QUEUE[:0]})
    assert loss.diagnostics()["beta_queue"] == 0
    loss(z1, z2, negatives={"queue": QUEUE})
    alone = hn.InfoNCE(0.3, {"queue": tilt()})
    alone(z1, z2, negatives={"queue": QUEUE})
    assert loss.diagnostics()["beta_queue"] == alone.diagnostics()["beta_queue"] > 0


def test_settings_assigned_later_keep_beta_and_another_hardening_drops_it() -> None:
    loss, (z1, z2) = hn.InfoNCE(0.3, tilt()), views()
    loss(z1, z2)
    beta = loss.tilt_state.clone()
    loss.class_prior = 0.01
    loss.hardening = (hn.Ring(0.0, 0.9), tilt(0.7))
    assert torch.equal(loss.tilt_state, beta)
    loss.hardening = hn.Exponential(1.0)
    assert "tilt_state" not in loss.state_dict()
    loss.hardening = tilt()
    assert loss.tilt_state.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hn.EffectiveShare(0.0), "share must be > 0 and ≤ 1, got 0"),
        (lambda: hn.EffectiveShare(1.2), "share must be > 0 and ≤ 1, got 1.2"),
        (lambda: hn.EffectiveShare(math.nan), "share must be > 0"),
        (lambda: hn.EffectiveShare("half"), "share must be a number"),  # type: ignore[arg-type]
        (lambda: hn.EffectiveShare(hn.Linear(1, 0.5)), "share must be a number, got the schedule"),  # type: ignore[arg-type]
        (lambda: hn.JSD(beta=hn.EffectiveShare(0.5)), "beta must be a number or a schedule"),  # type: ignore[arg-type]
        (lambda: hn.InfoNCE(hardening=(tilt(), hn.Exponential(1.0))), "at most one tilt"),
        (lambda: tilt().tilt(), "is computed by a loss in training"),
    ],
)
def test_wrong_use_is_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        make()


def test_processes_share_the_mean_of_their_estimates(tmp_path: Path) -> None:
    ranks = share_processes.launch(2, tmp_path)
    assert torch.equal(ranks[0]["state"], ranks[1]["state"])
    assert ranks[0]["own"] != ranks[1]["own"]
    # Each process estimates from its anchors and the candidates of both.
    expected = (ranks[0]["own"] + ranks[1]["own"]) / 2
    assert float(ranks[0]["state"][0, 0]) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("batch", [64, 128, 511])
def test_uniform_weights_have_a_share_of_1_and_never_more(batch: int) -> None:
    # By rounding, (Σq)²/Σq² in float32 exceeds the number of negatives.
    loss = hn.simclr()
    loss(torch.randn(batch, 16), torch.randn(batch, 16))
    found = loss.diagnostics()
    assert found["effective_share"] <= 1
    assert found["effective_negatives"] <= found["support"]
    assert found["effective_share"] == pytest.approx(1)

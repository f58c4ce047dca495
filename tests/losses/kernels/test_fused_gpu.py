"""The fused kernel on a GPU: half precision, large tiles and sizes. Needs torch, pytest and hardneg only."""

import copy
import importlib
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hardneg as hn

launching = pytest.importorskip("hardneg.losses.kernels.triton.launch", reason="Triton is for Linux only")
pytestmark = pytest.mark.gpu
Arguments = dict[str, Tensor]


def views(rows: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Arguments:
    generator = torch.Generator("cuda").manual_seed(seed)
    z1 = torch.randn(rows, dim, generator=generator, device="cuda")
    z2 = z1 + torch.randn(rows, dim, generator=generator, device="cuda")
    return {"z1": z1.to(dtype), "z2": z2.to(dtype)}


def keys(rows: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(9)
    return torch.randn(rows, dim, generator=generator, device="cuda").to(dtype)


def run(options: dict[str, Any], arguments: Arguments, backend: str) -> list[Tensor]:
    """The loss and the gradients of z1, z2 and a learned temperature."""
    loss = hn.InfoNCE(**copy.deepcopy(options), backend=backend).cuda()  # each call has its own learned temperature
    given = {name: t.clone().requires_grad_() if name in ("z1", "z2") else t for name, t in arguments.items()}
    value = loss(**given)
    value.sum().backward()
    grads = [given["z1"].grad, given["z2"].grad, *(parameter.grad for parameter in loss.parameters())]
    return [value.detach(), *(grad for grad in grads if grad is not None)]


def exact(options: dict[str, Any], arguments: Arguments) -> list[Tensor]:
    """The same in float64, by the reference kernel."""
    doubled = {name: t.double() if t.is_floating_point() else t for name, t in arguments.items()}
    return run(options, doubled, "reference")


def errors(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [float((f.double() - t).norm() / t.norm()) for f, t in zip(found, truth, strict=True)]


def eager(arguments: Arguments, beta: float, temperature: float) -> list[Tensor]:
    """HCL's published formula without debiasing, in the precision of its input."""
    z1, z2 = (arguments[name].clone().requires_grad_() for name in ("z1", "z2"))
    z = torch.nn.functional.normalize(torch.cat([z1, z2]), dim=1)
    rows = len(z1)
    exponentials = (z @ z.T / temperature).exp()
    others = ~torch.eye(rows, dtype=torch.bool, device="cuda").repeat(2, 2)
    negatives = exponentials[others].view(2 * rows, -1)
    weights = negatives**beta
    total = (weights * negatives).sum(dim=1) / weights.mean(dim=1)
    positive = exponentials.diagonal(rows).repeat(2)
    value = (1 + total / positive).log().mean()
    value.backward()
    assert z1.grad is not None
    assert z2.grad is not None
    return [value.detach(), z1.grad, z2.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 2.0, 1.3])
@pytest.mark.parametrize(("rows", "dim"), [(256, 128), (333, 64), (200, 100), (130, 300)])
def test_gradients_are_as_exact_as_those_of_eager_pytorch(rows: int, dim: int, beta: float, dtype: torch.dtype) -> None:
    arguments = views(rows, dim, dtype)
    options = {"hardening": hn.Exponential(beta)}
    truth = exact(options, arguments)
    found = errors(run(options, arguments, "fused"), truth)
    peer = errors(eager(arguments, beta, 0.5), truth)
    assert found[0] <= 1.2 * peer[0] + 1e-6  # a single number may be accurate by coincidence
    for one, other in zip(found[1:], peer[1:], strict=True):
        assert one <= 1.2 * other


SETTINGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "cold": ({"temperature": 0.02, "hardening": hn.Exponential(2.0)}, []),
    "debiased": ({"class_prior": 0.1, "hardening": hn.Exponential(1.0)}, []),
    "threshold": ({"hardening": (hn.Threshold(1.1), hn.Exponential(1.0))}, []),
    "below positive": ({"hardening": hn.BelowPositive(0.1)}, []),
    "ring": ({"hardening": (hn.Ring(0.5, 0.95), hn.Exponential(1.0))}, []),
    "both directions": ({"in_batch": "other", "symmetric": True, "temperature": 0.07}, []),
    "both directions, learned": ({"in_batch": "other", "symmetric": True, "temperature": hn.Learnable(0.1)}, []),
    "both directions, banded": ({"in_batch": "other", "symmetric": True, "hardening": hn.Threshold(0.2)}, []),
    "other view": ({"in_batch": "other", "hardening": hn.Exponential(1.0)}, []),
    "learned": ({"temperature": hn.Learnable(0.1), "hardening": hn.Exponential(1.0)}, []),
    "labels": ({"supervision": "full", "hardening": hn.Exponential(1.0)}, ["labels"]),
    "labels, cold": ({"supervision": "full", "temperature": 0.02}, ["labels"]),
    "queue": ({"in_batch": None, "temperature": 0.07}, ["negatives", "exclude"]),
    "batch and queue": ({"hardening": hn.Exponential(1.3)}, ["negatives", "negative_mask"]),
    "ring of batch and queue": ({"hardening": hn.Ring(0.5, 0.95)}, ["negatives", "exclude"]),
    "unnormalized": ({"normalize": False, "temperature": 8.0, "hardening": hn.Exponential(1.0)}, []),
}


def case(name: str, rows: int, dim: int, dtype: torch.dtype) -> tuple[dict[str, Any], Arguments]:
    options, names = SETTINGS[name]
    everything = {
        "negatives": keys(1001, dim, dtype),
        "exclude": torch.arange(rows, device="cuda") % 1001,
        "negative_mask": torch.arange(rows * 1001, device="cuda").view(rows, 1001) % 5 > 0,
        "labels": torch.arange(rows, device="cuda") % 17 * (1 << 33),
    }
    return options, {**views(rows, dim, dtype), **{key: everything[key] for key in names}}


@pytest.mark.parametrize("dim", [64, 300])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_equals_the_tiled_kernel_in_float32(name: str, dim: int) -> None:
    options, arguments = case(name, 301, dim, torch.float32)
    truth = exact(options, arguments)
    found, peer = (errors(run(options, arguments, backend), truth) for backend in ("fused", "tiled"))
    for one, other in zip(found, peer, strict=True):
        assert one <= 1.5 * other + 3e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name in SETTINGS if "ring" not in name and "cold" not in name])
def test_half_precision_costs_the_rounding_of_unit_vectors(name: str, dtype: torch.dtype) -> None:
    options, arguments = case(name, 301, 96, dtype)
    found, truth = run(options, arguments, "fused"), exact(options, arguments)
    assert found[0].dtype == torch.float32
    assert found[1].dtype == found[2].dtype == dtype
    temperature = options.get("temperature", 0.5)
    scale = 10.0 if isinstance(temperature, hn.Learnable) else max(1.0, 1 / temperature)
    assert max(errors(found, truth)) < 3 * torch.finfo(dtype).eps * scale


@pytest.mark.parametrize("dim", [64, 128, 256, 768])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_batches_in_large_tiles_equal_the_tiled_kernel(dim: int, dtype: torch.dtype) -> None:
    # 16,384 rows, which the copy engine loads if there is one.
    arguments, options = views(8192, dim, dtype), {"hardening": hn.Exponential(1.0), "class_prior": 0.1}
    found = run(options, arguments, "fused")
    peer = run(options, {name: t.float() for name, t in arguments.items()}, "tiled")
    limit = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    assert max(errors(found, [t.double() for t in peer])) < limit
    again = run(options, arguments, "fused")
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def test_a_process_may_begin_with_a_large_batch() -> None:
    # The first kernel that autograd's thread launches is loaded by the copy engine, and was compiled in other threads.
    code = """
import torch, hardneg as hn
z1, z2 = (torch.randn(8192, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
hn.hcl(backend="fused")(z1, z2).backward()
assert z1.grad.isfinite().all() and z1.grad.abs().sum() > 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["debiased", "threshold", "labels", "both directions"])
@pytest.mark.parametrize("dim", [60, 128, 256, 320])
def test_symmetric_scores_equal_the_tiled_kernel(
    name: str, dtype: torch.dtype, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hardneg.losses.kernels.triton import passes

    # Large tiles in half precision. Among more pairs, the scores of some in float32 would be on the other side of the
    # threshold after rounding.
    options, arguments = case(name, 2085 if dtype == torch.float32 else 4221, dim, dtype)
    options = {**options, "reduction": "sum"}  # gradients of the mean would be below the resolution of float16
    peer = run(options, {key: t.float() if t.is_floating_point() else t for key, t in arguments.items()}, "tiled")
    limit = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps / options.get("temperature", 0.5)
    sums, calls = passes.BlockPass.symmetric_sums, []
    monkeypatch.setattr(passes.BlockPass, "symmetric_sums", lambda given: calls.append(given) or sums(given))
    monkeypatch.setattr(passes, "MIN_SYMMETRIC_ROWS", 1024)
    found = run(options, arguments, "fused")
    assert max(errors(found, [t.double() for t in peer])) < limit
    calls.clear()  # a first call launches kernels to compile them
    again = run(options, arguments, "fused")
    assert len(calls) == 1
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize("dim", [128, 320])
@pytest.mark.parametrize("temperature", [0.5, 0.01])
def test_a_learned_temperature_of_many_rows_equals_a_fixed_one(temperature: float, dim: int) -> None:
    arguments, options = views(16_500, dim, torch.bfloat16), {"hardening": hn.Exponential(1.0), "reduction": "sum"}
    fixed = run({**options, "temperature": temperature}, arguments, "fused")
    *learned, d_temperature = run({**options, "temperature": hn.Learnable(temperature)}, arguments, "fused")
    # 1/t differs by a rounding, after which some products in half precision round the other way.
    assert max(errors(learned, [t.double() for t in fixed])) < 1e-3
    assert d_temperature.isfinite()


@pytest.mark.parametrize("dim", [128, 256, 320])
@pytest.mark.parametrize(("rows", "towers"), [(16_500, False), (32_800, True)])
def test_symmetric_scores_of_many_rows_equal_the_tiled_kernel(rows: int, dim: int, towers: bool) -> None:
    arguments, options = views(rows, dim, torch.bfloat16), {"hardening": hn.Exponential(1.0), "class_prior": 0.1}
    options |= {"in_batch": "other", "symmetric": True} if towers else {}
    found = run(options, arguments, "fused")
    peer = run(options, {name: t.float() for name, t in arguments.items()}, "tiled")
    assert max(errors(found, [t.double() for t in peer])) < 2 * torch.finfo(torch.bfloat16).eps
    again = run(options, arguments, "fused")
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize("name", ["debiased", "labels", "queue"])
@pytest.mark.parametrize("dim", [64, 256, 320])
def test_large_and_small_tiles_give_the_same_results(name: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options, arguments = case(name, 515, dim, torch.bfloat16)
    options = {**options, "reduction": "sum"}
    small = run(options, arguments, "fused")
    monkeypatch.setattr(launching, "LARGE_PROBLEM", 0)
    large = run(options, arguments, "fused")
    limit = torch.finfo(torch.bfloat16).eps / options.get("temperature", 0.5)
    assert max(errors(large, [t.double() for t in small])) < limit


@pytest.mark.parametrize("seed", range(8))
def test_random_settings_equal_the_reference_in_float64(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    settings = importlib.import_module("random_settings")
    tally = settings.run_cases(10, seed)
    assert (tally.tried, tally.wrong) == (10, 0), "\n".join(tally.failures)
    assert tally.worst <= 1
    assert tally.reached["any"] >= 5
    assert len([kind for kind in settings.KINDS if tally.reached[kind] > 0]) >= len(settings.KINDS) // 2


@pytest.mark.parametrize("dim", [128, 768])
@pytest.mark.parametrize(
    ("options", "queue"),
    [
        ({"in_batch": "other", "symmetric": True, "temperature": 0.07}, 0),
        ({"in_batch": None, "temperature": 0.07}, 65536),
        ({"in_batch": None, "hardening": (hn.Ring(0.9, 0.99), hn.Exponential(1.0))}, 65536),
    ],
    ids=["two towers", "queue", "ring"],
)
def test_two_towers_and_long_queues_equal_the_tiled_kernel(options: dict[str, Any], queue: int, dim: int) -> None:
    rows = 1024 if queue else 8192
    for dtype in (torch.float32, torch.bfloat16):
        arguments = views(rows, dim, dtype) | ({"negatives": keys(queue, dim, dtype)} if queue else {})
        found = run(options, arguments, "fused")
        peer = run(options, {name: t.float() for name, t in arguments.items()}, "tiled")
        # At this temperature the error of a score is fourteen times that of its vectors; rounding may move a candidate
        # out of a band.
        limit = 2e-4 if dtype == torch.float32 else 15 * torch.finfo(dtype).eps
        assert max(errors(found, [t.double() for t in peer])) < limit


def test_memory_grows_with_rows_and_not_with_their_square() -> None:
    rows, dim = 32768, 128  # a matrix of scores would be 16 GiB
    arguments = {name: t.requires_grad_() for name, t in views(rows, dim, torch.bfloat16).items()}
    loss = hn.hcl()
    loss(**arguments).backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss(**arguments).backward()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= 8 * 2 * rows * dim + 64 * 2 * rows + (64 << 20)


def test_auto_chooses_the_fused_kernel() -> None:
    from hardneg.losses.kernels import reference
    from hardneg.losses.kernels.triton import operators

    device = torch.device("cuda", 0)
    assert hn.simclr()._kernel(device) is operators
    assert hn.InfoNCE(hardening=hn.Custom(torch.exp))._kernel(device) is reference


def without_synchronizing(step: Callable[[], Any]) -> None:
    """Runs a step after one that compiles its kernels; raises if it waits for the GPU."""
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


STEPS: dict[str, tuple[Callable[[], hn.InfoNCE], list[str]]] = {
    "hcl": (hn.hcl, []),
    "moco": (hn.moco, ["negatives"]),
    "moco, some excluded": (hn.moco, ["negatives", "exclude"]),
    "hscl": (hn.hscl, ["labels"]),
    "supcon": (hn.supcon, ["labels"]),
    "clip": (hn.clip, []),
    "ring": (lambda: hn.moco(hardening=hn.Ring(0.5, 0.9)), ["negatives"]),
    "ring, masked": (lambda: hn.moco(hardening=hn.Ring(0.5, 0.9)), ["negatives", "negative_mask"]),
    "scheduled tilt": (lambda: hn.hcl(beta=hn.Linear(0.1, 2.0)), []),
    "scheduled prior": (lambda: hn.hcl(tau_plus=hn.Linear(0.1, 0.01)), []),
    "scheduled temperature": (lambda: hn.hcl(temperature=hn.Linear(0.5, 0.1)), []),
    "everything scheduled": (lambda: hn.hcl(hn.Linear(0.1, 2.0), hn.Linear(0.1, 0.01), hn.Linear(0.5, 0.1)), []),
    "scheduled tilt, labels": (lambda: hn.hscl(beta=hn.Linear(0.1, 2.0)), ["labels"]),
    "learned temperature": (lambda: hn.hcl(temperature=hn.Learnable(0.1)), []),
    "learned temperature, towers": (lambda: hn.clip(temperature=hn.Learnable(0.1)), []),
    "learned temperature, queue": (lambda: hn.moco(temperature=hn.Learnable(0.1)), ["negatives"]),
    "learned temperature, labels": (lambda: hn.supcon(temperature=hn.Learnable(0.1)), ["labels"]),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_does_not_synchronize_with_the_gpu(name: str) -> None:
    make, names = STEPS[name]
    everything = {
        "negatives": keys(500, 128),
        "exclude": torch.arange(256, device="cuda"),
        "negative_mask": torch.rand(256, 500, device="cuda") < 0.7,
        "labels": torch.arange(256, device="cuda") % 9,
    }
    given = {key: t.requires_grad_() for key, t in views(256, 128, torch.bfloat16).items()}
    given |= {key: everything[key] for key in names}
    loss = make().cuda()
    progress = iter((0.25, 0.5))

    def step() -> None:
        loss.set_progress(next(progress))
        loss(**given).backward()

    without_synchronizing(step)


def test_diagnostics_are_those_of_the_tiled_kernel() -> None:
    arguments, reports = views(200, 64), []
    for backend in ("fused", "tiled"):
        loss = hn.hcl(backend=backend)
        loss(**arguments)
        reports.append(loss.diagnostics())
    assert reports[0] == pytest.approx(reports[1], rel=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_another_gpu_than_the_current_one_gives_the_same_results() -> None:
    arguments = views(256, 64)
    here = run({}, arguments, "fused")
    elsewhere = [t.to("cuda:1").requires_grad_() for t in arguments.values()]
    value = hn.InfoNCE(backend="fused")(*elsewhere)
    value.backward()
    assert torch.equal(value.cpu(), here[0].cpu())
    assert elsewhere[0].grad is not None
    assert torch.equal(elsewhere[0].grad.cpu(), here[1].cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cached_kernels_are_those_that_triton_looks_up(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    given = views(65, 40, dtype)
    shifted = {name: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for name, t in given.items()}
    assert all(t.data_ptr() % 16 != 0 for t in shifted.values())
    options = {"hardening": hn.Exponential(1.0), "class_prior": 0.1}
    monkeypatch.setattr(launching, "CACHES_KERNELS", False)
    wanted = [gradients_in_place(options, arguments) for arguments in (given, shifted)]
    monkeypatch.setattr(launching, "CACHES_KERNELS", True)
    for _ in range(3):
        for arguments, truth in zip((given, shifted), wanted, strict=True):
            found = gradients_in_place(options, arguments)
            assert all(torch.equal(one, other) for one, other in zip(found, truth, strict=True))


def gradients_in_place(options: dict[str, Any], arguments: Arguments) -> list[Tensor]:
    """The loss and the gradients of the given tensors themselves, at their alignment."""
    given = [t.detach().requires_grad_() for t in arguments.values()]
    value = hn.InfoNCE(**options, backend="fused")(*given)
    return [value.detach(), *torch.autograd.grad(value, given)]


def test_a_replayed_cuda_graph_uses_its_present_input() -> None:
    first, second = views(128, 64, torch.bfloat16), views(128, 64, torch.bfloat16, seed=1)
    loss = hn.hcl(backend="fused")
    z1, z2 = (t.clone().requires_grad_() for t in first.values())
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            torch.autograd.grad(loss(z1, z2), (z1, z2))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = loss(z1, z2)
        grads = torch.autograd.grad(value, (z1, z2))
    with torch.no_grad():
        z1.copy_(second["z1"])
        z2.copy_(second["z2"])
    graph.replay()
    again = [t.clone().requires_grad_() for t in second.values()]
    wanted = loss(*again)
    assert torch.equal(value, wanted)
    for found, grad in zip(grads, torch.autograd.grad(wanted, again), strict=True):
        assert torch.equal(found, grad)


def test_hooks_of_profilers_see_every_launch() -> None:
    knobs = pytest.importorskip("triton.knobs")
    if not hasattr(knobs.runtime.launch_enter_hook, "add"):
        pytest.skip("this Triton has one hook, not a chain of them")
    loss, arguments, seen = hn.hcl(backend="fused"), views(64, 32), []
    loss(**arguments)

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        loss(**arguments)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert seen == ["normalize", "sums", "finish_pairs"]


@pytest.mark.parametrize("name", [name for name in SETTINGS if "cold" not in name])
def test_second_derivatives_are_those_of_the_reference_in_float64(name: str) -> None:
    options, arguments = case(name, 65, 24, torch.float32)

    def second(arguments: Arguments, backend: str) -> list[Tensor]:
        loss = hn.InfoNCE(**copy.deepcopy(options), backend=backend).cuda()
        given = {key: t.clone().requires_grad_() if t.is_floating_point() else t for key, t in arguments.items()}
        leaves = [*(t for t in given.values() if t.requires_grad), *loss.parameters()]
        first = torch.autograd.grad(loss(**given), leaves, create_graph=True)
        return list(torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), leaves))

    doubled = {key: t.double() if t.is_floating_point() else t for key, t in arguments.items()}
    truth = second(doubled, "reference")
    assert all(float(t.norm()) > 1e-8 for t in truth)
    assert max(errors(second(arguments, "fused"), truth)) < 1e-3


@pytest.mark.parametrize("name", ["queue", "batch and queue", "labels"])
def test_no_argument_may_be_overwritten_before_the_backward_pass(name: str) -> None:
    options, arguments = case(name, 65, 24, torch.float32)
    for key in arguments:
        copies = {other: t.clone() for other, t in arguments.items()}
        value = hn.InfoNCE(**options)(**{**copies, "z1": copies["z1"].requires_grad_()})
        with torch.no_grad():
            copies[key][0] = copies[key][1]
        with pytest.raises(RuntimeError, match="inplace operation"):
            value.backward()


def test_draws_are_those_of_a_cpu_on_any_device_of_the_counter() -> None:
    arguments = views(64, 16, torch.float64)
    losses = [
        hn.InfoNCE(num_negatives=5, reduction="none", generator=torch.Generator().manual_seed(3)) for _ in range(3)
    ]
    losses[1].cuda()
    for _ in range(3):
        on_host = losses[0](arguments["z1"].cpu(), arguments["z2"].cpu())
        for loss in losses[1:]:
            torch.testing.assert_close(loss(**arguments).cpu(), on_host)


HARDENINGS: dict[str, tuple[hn.Hardening, ...]] = {
    "uniform": (hn.Uniform(),),
    "tilt": (hn.Exponential(1.0),),
    "any tilt": (hn.Exponential(1.3),),
    "threshold": (hn.Threshold(1.1),),
    "below positive": (hn.BelowPositive(0.1),),
    "ring": (hn.Ring(0.3, 0.9),),
    "ring, tilt and threshold": (hn.Ring(0.3, 0.9), hn.Exponential(0.5), hn.Threshold(0.2)),
}
LAYOUTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "pairs": ({}, []),
    "pairs, cold": ({"temperature": 0.01}, []),
    "debiased": ({"class_prior": 0.1}, []),
    "towers": ({"in_batch": "other", "symmetric": True}, []),
    "one direction": ({"in_batch": "other"}, []),
    "queue": ({"in_batch": None}, ["negatives", "exclude"]),
    "batch and queue": ({}, ["negatives", "negative_mask"]),
    "labels": ({"supervision": "full"}, ["labels"]),
    "supcon": ({"supervision": "full", "combine_positives": "in_denominator"}, ["labels"]),
}


def poisoned(arguments: Arguments, name: str, bad: float, row: int) -> Arguments:
    changed = arguments[name].clone()
    changed[row, changed.shape[1] // 2] = bad
    return {**arguments, name: changed}


def check_still_right() -> None:
    """The process still computes a right loss: no assertion on the device has ended it."""
    torch.cuda.synchronize()
    arguments = views(64, 32)
    assert max(errors(run({}, arguments, "fused"), exact({}, arguments))) < 1e-5


def check_not_a_number(options: dict[str, Any], arguments: Arguments) -> None:
    """The reduced loss is NaN, and so is at least one of separate losses; the backward pass does not fail."""
    for reduction in ("mean", "sum", "none"):
        loss = hn.InfoNCE(**options, reduction=reduction, backend="fused")
        given = {key: t.detach().clone().requires_grad_(t.is_floating_point()) for key, t in arguments.items()}
        value = loss(**given)
        assert bool(value.isnan().any()), reduction
        value.sum().backward()


@pytest.mark.parametrize("hardening", HARDENINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loss_of_input_that_is_not_finite_is_nan(layout: str, hardening: str) -> None:
    more, names = LAYOUTS[layout]
    options = {**more, "hardening": HARDENINGS[hardening]}
    everything = {
        "negatives": keys(130, 48),
        "exclude": torch.arange(70, device="cuda"),
        "negative_mask": torch.ones(70, 130, dtype=torch.bool, device="cuda"),
        "labels": torch.arange(70, device="cuda") % 5,
    }
    for dtype in (torch.float32, torch.bfloat16):
        arguments = views(70, 48, dtype) | {key: everything[key] for key in names}
        for key in [key for key, t in arguments.items() if t.is_floating_point()]:
            for bad, row in ((math.nan, 0), (math.inf, -1), (-math.inf, 33)):
                check_not_a_number(options, poisoned(arguments, key, bad, row))
    check_still_right()


def test_the_loss_of_a_temperature_that_is_not_finite_is_nan() -> None:
    for options in ({}, {"hardening": hn.Exponential(1.3)}, {"in_batch": "other", "symmetric": True}):
        loss = hn.InfoNCE(**options, temperature=hn.Learnable(0.1), backend="fused").cuda()
        with torch.no_grad():
            next(loss.parameters()).fill_(math.nan)
        assert bool(loss(**views(70, 48)).isnan())
    check_still_right()


# Last, because an assertion on the device would end all tests after these.
@pytest.mark.parametrize("name", ["z1", "z2", "negatives"])
def test_the_loss_of_unnormalized_input_that_is_not_finite_is_nan(name: str) -> None:
    options = {"normalize": False, "temperature": 8.0}
    for hardening in HARDENINGS.values():
        arguments = {**views(70, 48), "negatives": keys(130, 48)}
        for bad in (math.nan, math.inf, -math.inf):
            check_not_a_number({**options, "hardening": hardening}, poisoned(arguments, name, bad, 33))
    check_still_right()


@pytest.mark.parametrize("wrong", ["exclude", "labels"])
def test_the_loss_of_an_index_or_label_out_of_range_is_nan(wrong: str) -> None:
    arguments = views(70, 48)
    if wrong == "exclude":
        given = {"negatives": keys(130, 48), "exclude": torch.full((70,), 130, device="cuda")}
        assert bool(hn.InfoNCE(in_batch=None, backend="fused")(**arguments, **given).isnan())
    else:
        labels = torch.arange(70, device="cuda") % 5 - 2
        assert bool(hn.InfoNCE(supervision="full", backend="fused")(**arguments, labels=labels).isnan())
    check_still_right()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [768, 1024, 2048])
def test_a_copy_of_the_positive_is_kept_however_tensor_cores_round(dtype: torch.dtype, dim: int) -> None:
    # Inner products near 1 have large partial sums, which tensor cores truncate.
    z1, z2 = (1 + 0.05 * x for x in views(512, dim).values())
    loss = hn.InfoNCE(0.1, hn.BelowPositive(), in_batch=None, backend="fused")
    copies = torch.eye(512, dtype=torch.bool, device="cuda")
    loss(z1.to(dtype), z2.to(dtype), negatives=z2.to(dtype), negative_mask=copies)
    assert loss.diagnostics()["without_candidates"] == 0

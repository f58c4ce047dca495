"""Calls of the fused loss in a process that interprets Triton, with access to its launches and buffers."""

import copy
import pickle
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hardneg as hn
from hardneg import checks
from hardneg.losses.hardening import Bound, Hardening
from hardneg.losses.kernels.interface import Eligibility, RowLayout, Rule

Options = dict[str, Any]
KERNELS = "hardneg.losses.kernels.triton"
GUARD, MARK = 64, 77  # number and value of the guard elements on either side of a buffer


@dataclass(frozen=True)
class AboveItsOwn(Hardening):
    """Keeps candidates that score at least the given bound of each anchor of a direction."""

    least: Tensor

    def bounds(self, positive: Tensor | None) -> tuple[Bound, Bound]:
        return self.least, None


@dataclass
class Found:
    """The result of a call: the loss, the gradients of embeddings and of a learned temperature, and the diagnostics."""

    value: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)
    report: dict[str, float] = field(default_factory=dict)


@dataclass
class Work:
    """What a call executes: size of the largest tensor, names of launched kernels, and PyTorch operations."""

    largest: int
    launches: list[str]
    operations: list[str]


@contextmanager
def patched(constants: dict[str, Any] | None) -> Iterator[None]:
    """A context in which constants of kernel modules, such as ``"passes.WIDEST"``, have other values."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (constants or {}).items():
            module, attribute = name.split(".")
            patch.setattr(import_module(f"{KERNELS}.{module}"), attribute, value)
        yield


def run(
    options: Options, arguments: dict[str, Tensor], constants: dict[str, Any] | None = None, backend: str = "fused"
) -> Found:
    """The loss and all gradients, with a different weight for the loss of each anchor. constants: of kernel modules."""
    with patched(constants), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = hn.InfoNCE(**copy.deepcopy(options), backend=backend)
        if any(tensor.dtype == torch.float64 for tensor in arguments.values()):
            loss = loss.double()
        given = {
            name: tensor.detach().clone().requires_grad_() if tensor.is_floating_point() else tensor
            for name, tensor in arguments.items()
        }
        value = loss(**given)
        (value * torch.linspace(0.5, 1.5, value.numel()).to(value.dtype).view(value.shape)).sum().backward()
        learned = {name: tensor for name, tensor in given.items() if tensor.is_floating_point() and tensor.numel() > 0}
        grads = {name: tensor.grad for name, tensor in (*learned.items(), *loss.named_parameters())}
        assert all(grad is not None for grad in grads.values())
        return Found(value.detach(), grads, loss.diagnostics())  # type: ignore[arg-type]


def run_many(calls: list[tuple[Any, ...]]) -> list[Found]:
    """`run` of each call; one message to the process is faster than several."""
    return [run(*call) for call in calls]


def run_compiled(
    options: Options, arguments: dict[str, Tensor], constants: dict[str, Any] | None = None
) -> tuple[list[Found], int]:
    """`run` in eager mode and as one compiled graph, and the number of custom operators in the graph."""
    operators = 0

    def count(graph: Any, example: Any) -> Any:
        nonlocal operators
        operators += sum("hardneg" in str(node.target) for node in graph.graph.nodes)
        return graph

    found = []
    for compiled in (False, True):
        loss = hn.InfoNCE(**copy.deepcopy(options), backend="fused")
        torch._dynamo.reset()
        given = {
            name: t.detach().clone().requires_grad_() if t.is_floating_point() else t for name, t in arguments.items()
        }
        with patched(constants):
            value = (torch.compile(loss, fullgraph=True, backend=count) if compiled else loss)(**given)
            (value * torch.linspace(0.5, 1.5, value.numel()).view(value.shape)).sum().backward()
        learned = {name: tensor for name, tensor in given.items() if tensor.is_floating_point()}
        grads = {name: tensor.grad for name, tensor in (*learned.items(), *loss.named_parameters())}
        found.append(Found(value.detach(), {k: g for k, g in grads.items() if g is not None}, loss.diagnostics()))
    return found, operators


def poisoned(options: Options, arguments: dict[str, Tensor]) -> Tensor:
    """The loss of invalid values as on a GPU, where nothing raises."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "finite", lambda name, tensor: None)
        patch.setattr(checks, "on_accelerator", lambda device: True)
        return hn.InfoNCE(**options, backend="fused")(**arguments)


def of_inference_tensors(normalize: bool) -> tuple[Tensor, Tensor]:
    """The gradient of a query with a queue made in inference mode, and with a plain one."""
    with torch.inference_mode():
        queue, keys = torch.randn(9, 4), torch.randn(6, 4)
    query, found = torch.randn(6, 4, requires_grad=True), []
    for z2, negatives in ((keys, queue), (keys.clone(), queue.clone())):
        loss = hn.moco(backend="fused", normalize=normalize)(query, z2, negatives=negatives)
        found.append(torch.autograd.grad(loss, query)[0])
    return found[0], found[1]


def losses(options: Options, arguments: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
    """One loss per anchor, and the diagnostics."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if options.get("num_negatives") is not None:
            options = {**options, "generator": torch.Generator().manual_seed(7)}
        loss = hn.InfoNCE(**options, backend="fused", reduction="none")
        return loss(**arguments), loss.diagnostics()


def message(options: Options, arguments: dict[str, Tensor]) -> str:
    """The message of the ValueError that the call raises."""
    with pytest.raises(ValueError, match=r".") as caught:
        hn.InfoNCE(**options, backend="fused")(**arguments)
    return str(caught.value)


def random_settings(cases: int, seed: int, factor: float = 1.0) -> Any:
    """Random settings of `benchmarks/random_settings.py`, in small. factor: of the fused kernel's results"""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
        settings = import_module("random_settings")
        plain = settings.run

        def scaled(case: Any, backend: str, double: bool = False) -> list[Tensor]:
            return [factor * t if backend == "fused" else t for t in plain(case, backend, double)]

        patch.setattr(settings, "run", scaled)
        # The interpreter has no bfloat16.
        limits = settings.Limits("cpu", (torch.float32, torch.float16), rows=12, keys=20, dim=40)
        return vars(settings.run_cases(cases, seed, limits))


class _Watch(TorchDispatchMode):
    """Records the tensors that PyTorch creates, except those of the interpreter."""

    paused = False

    def __init__(self) -> None:
        super().__init__()
        self.work = Work(0, [], [])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.paused:
            made = [part for part in (result if isinstance(result, tuple | list) else [result])]
            sizes = [part.numel() for part in made if isinstance(part, Tensor)]
            self.work.largest = max([self.work.largest, *sizes])
            if not func.is_view and "empty" not in func.__name__:
                self.work.operations.append(func.__name__)
        return result


def work(options: Options, arguments: dict[str, Tensor], constants: dict[str, Any] | None = None) -> Work:
    """What a loss and its gradient execute."""
    from triton.runtime.interpreter import GridExecutor

    plain, watch = GridExecutor.__call__, _Watch()

    def counted(self: Any, *given: Any, **named: Any) -> Any:
        watch.work.launches.append(self.fn.__name__)
        watch.paused = True
        try:
            return plain(self, *given, **named)
        finally:
            watch.paused = False

    loss = hn.InfoNCE(**options, backend="fused")
    with patched(constants), pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", counted)
        patch.setattr(checks, "finite", lambda name, tensor: None)  # not called on a GPU
        given = {k: v.requires_grad_() if k in ("z1", "z2") else v for k, v in arguments.items()}
        with watch:
            loss(**given).backward()
    return watch.work


def guarded(options: Options, arguments: dict[str, Tensor], constants: dict[str, Any] | None = None) -> Found:
    """`run` with buffers filled with NaN and enclosed by guard elements, which must be unchanged at the end."""
    bases: list[Tensor] = []

    def make(size: Any, dtype: torch.dtype | None) -> Tensor:
        numel = torch.Size(size).numel()
        base = torch.full((numel + 2 * GUARD,), MARK, dtype=dtype or torch.float32)
        bases.append(base)
        base[GUARD : GUARD + numel] = torch.nan if base.is_floating_point() else -MARK
        inside = torch.tensor([], dtype=base.dtype)
        return inside.set_(base.untyped_storage(), GUARD, torch.Size(size))  # not a view, for autograd

    def shape(size: Any) -> Any:
        return size[0] if len(size) == 1 and not isinstance(size[0], int) else size

    with _empty_by(make, shape):
        found = run(options, arguments, constants)
    assert bases
    for base in bases:
        assert (base[:GUARD] == MARK).all()
        assert (base[-GUARD:] == MARK).all()
    return found


@contextmanager
def _empty_by(make: Any, shape: Any) -> Iterator[None]:
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(Tensor, "new_empty", lambda self, *s, dtype=None, **_: make(shape(s), dtype or self.dtype))
        patch.setattr(torch, "empty", lambda *s, dtype=None, **_: make(shape(s), dtype))
        patch.setattr(torch, "empty_like", lambda other, **_: make(other.shape, other.dtype))
        yield


def masked(layout: RowLayout, pool_views: int) -> Tensor:
    """Which candidates of a pool (N,) are masked in the scores of each anchor, (A, N)."""
    from hardneg.losses.kernels.triton import passes, percentile_bands
    from hardneg.losses.kernels.triton.problem import Problem

    anchors, pool = torch.randn(layout.batch * layout.views, 2), torch.randn(layout.global_batch * pool_views, 2)
    problem = Problem(Eligibility(len(pool), own=layout, pool_views=pool_views), Rule())
    block_pass = passes.BlockPass(problem, torch.ones(()), anchors, pool)
    return torch.cat([scores.clone() for _, scores in percentile_bands.strips([block_pass])]) == -torch.inf


def refuses_overwritten_negatives(normalize: bool, dtype: torch.dtype) -> str:
    """The error of a backward pass after an enqueue that came too early."""
    z1, z2, queue = (torch.randn(rows, 4, dtype=dtype) for rows in (8, 8, 32))
    value = hn.moco(backend="fused", normalize=normalize)(z1.requires_grad_(), z2, negatives=queue)
    queue[:8] = z2
    with pytest.raises(RuntimeError) as caught:
        value.backward()
    return str(caught.value)


def second(options: Options, arguments: dict[str, Tensor], backend: str = "fused") -> dict[str, Tensor]:
    """The gradient of a squared gradient, by argument and parameter."""
    loss = hn.InfoNCE(**copy.deepcopy(options), backend=backend)
    arguments = {name: t.detach().clone() for name, t in arguments.items()}
    leaves = {name: t.requires_grad_() for name, t in arguments.items() if t.is_floating_point()}
    leaves |= dict(loss.to(arguments["z1"].dtype).named_parameters())
    first = torch.autograd.grad(loss(**arguments), list(leaves.values()), create_graph=True)
    penalty = torch.stack([grad.square().sum() for grad in first]).sum()
    return dict(zip(leaves, torch.autograd.grad(penalty, list(leaves.values())), strict=True))


def refuses_overwriting(options: Options, arguments: dict[str, Tensor], backend: str = "fused") -> list[str]:
    """The arguments of a loss that must not be overwritten before its backward pass."""
    refused = []
    for name in arguments:
        copies = {key: tensor.clone() for key, tensor in arguments.items()}
        value = hn.InfoNCE(**options, backend=backend)(**{**copies, "z1": copies["z1"].requires_grad_()})
        with torch.no_grad():
            copies[name][0] = copies[name][1]
        with suppress(AssertionError):
            with pytest.raises(RuntimeError, match="inplace operation"):
                value.backward()
            refused.append(name)
    return refused


def usages(options: Options) -> dict[str, bool]:
    """Common ways to call a loss in user code, and whether each result is right."""
    z1, z2 = torch.randn(9, 5), torch.randn(9, 5)
    extra = {"negatives": torch.randn(7, 5)} if options.get("in_batch", "both") is None else {}
    loss = hn.InfoNCE(**options, backend="fused")

    def gradient(value: Tensor, of: Tensor, **more: Any) -> Tensor:
        return torch.autograd.grad(value.sum(), of, **more)[0]

    a = z1.clone().requires_grad_()
    expected = loss(a, z2, **extra)
    grad = gradient(expected, a, retain_graph=True)
    found = {"a second backward pass": torch.equal(gradient(expected, a), grad)}
    value = loss(a, z2, **extra)
    value += 1  # in place
    found["in place"] = torch.equal(gradient(value, a), grad)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(a, z2, **extra)
        found["autocast"] = torch.equal(value, expected) and torch.equal(gradient(value, a), grad)
    with torch.inference_mode():
        found["inference"] = torch.equal(loss(z1, z2, **extra), expected)
    with torch.no_grad():
        found["no gradient"] = torch.equal(loss(z1, z2, **extra), expected)
    found["after inference"] = torch.equal(gradient(loss(a, z2, **extra), a), grad)
    for name, other in (("deepcopy", copy.deepcopy(loss)), ("pickle", pickle.loads(pickle.dumps(loss)))):
        found[name] = torch.equal(other(z1, z2, **extra), expected)
    columns = z1.T.contiguous().T.requires_grad_()
    found["columns"] = torch.equal(gradient(loss(columns, z2, **extra), columns), grad)
    wide = torch.randn(9, 11)
    wide[:, 3:8] = z1
    wide.requires_grad_()
    found["a slice"] = torch.equal(gradient(loss(wide[:, 3:8], z2, **extra), wide)[:, 3:8], grad)
    one = z1[:1].clone().requires_grad_()
    repeated = gradient(loss(one.expand(9, 5), z2, **extra), one)
    copied = z1[:1].repeat(9, 1).requires_grad_()
    total = gradient(loss(copied, z2, **extra), copied).sum(dim=0, keepdim=True)
    found["expanded"] = torch.allclose(repeated, total, rtol=1e-5, atol=1e-7)
    same = loss(a, a, **extra)
    first, second = z1.clone().requires_grad_(), z1.clone().requires_grad_()
    parts = torch.autograd.grad(loss(first, second, **extra).sum(), (first, second))
    found["one tensor twice"] = torch.allclose(gradient(same, a), parts[0] + parts[1], rtol=1e-5, atol=1e-7)
    b = z2.clone().requires_grad_()
    both = torch.autograd.grad(loss(a, b, **extra).sum(), (a, b))
    found["one side only"] = torch.equal(gradient(loss(z1, b, **extra), b), both[1])
    with torch.device("meta"):
        found["default device"] = torch.equal(loss(z1, z2, **extra), expected)
    torch.set_default_dtype(torch.float64)
    found["default dtype"] = torch.equal(loss(z1, z2, **extra), expected)
    torch.set_default_dtype(torch.float32)
    compiled = torch.compile(lambda x: loss(2 * x, z2, **extra), backend="eager")
    found["compiled around"] = torch.allclose(compiled(z1), expected)
    return found


def run_rows(name: str, rows: slice, gather: bool) -> Found:
    """A case of `processes` on some rows of its batch, in float32."""
    import processes

    options, names = processes.settings()[name]
    whole = {key: t.float() if t.is_floating_point() else t for key, t in processes.inputs().items()}
    arguments = {key: whole[key] if key == "negatives" else whole[key][rows] for key in ("z1", "z2", *names)}
    return run({**options, "gather": gather}, arguments)


def run_process(rank: int, sizes: list[int], names: list[str], folder: str) -> None:
    """One of several processes: its rows are the ``rank``-th part of the batch; it saves its results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=len(sizes))
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    from hardneg.losses.kernels.triton import paired_loss

    plain, short = paired_loss.forward_pass, []

    def noted(*given: Any) -> Any:
        short.append(name)
        return plain(*given)

    paired_loss.forward_pass = noted
    found = {}
    for name in names:
        part = run_rows(name, rows, gather=True)
        found[name] = part.value, part.grads, name in short
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()

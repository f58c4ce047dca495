"""The Triton kernels of every setting compile for a GPU; compiling needs none."""

from collections import defaultdict
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

import hardneg as hn

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is for Linux only"),
    pytest.mark.filterwarnings("ignore"),  # the losses are not computed
]

ROWS, KEYS = 64, 2048
SHARED_MEMORY = 227 * 1024  # bytes of a program on a Hopper GPU
Note = tuple[Any, dict[str, Any], int, int, int | None]  # kernel, arguments, warps, stages, registers


class Recorder:
    """Records launches instead of executing them.

    sizes: whether each kernel is launched in the tile of large problems (True), of small ones (False), or both
    """

    def __init__(self, sizes: tuple[bool, ...]) -> None:
        self.sizes = sizes
        self.notes: list[Note] = []

    def launch(
        self,
        program: Any,
        grid: Any,
        arguments: dict[str, Any],
        warps: int = 4,
        stages: int = 3,
        registers: int | None = None,
    ) -> None:
        self.notes.append((program, arguments, warps, stages, registers))

    def launch_tiled(
        self,
        program: Any,
        arguments: dict[str, Any],
        rows: int,
        parts: int,
        whole: bool,
        name: str,
        halves: int = 1,
        blocks: int | None = None,
    ) -> None:
        from triton.tools.tensor_descriptor import TensorDescriptor

        from hardneg.losses.kernels.triton.launch import choose_tile

        outer, inner = arguments["outer"], arguments["inner"]
        width = outer.shape[1]
        for large in self.sizes:
            tile = choose_tile(name, width, outer.element_size(), whole, large)
            chunk = tile.chunk or max(16, 1 << (width - 1).bit_length())
            descriptor = tile.descriptor and width % chunk == 0 and outer.element_size() == 2
            given = arguments | {
                "OUTER_BLOCK": tile.outer, "INNER_BLOCK": tile.inner, "WIDTH": chunk, "WHOLE": tile.chunk is None,
                "DESCRIPTOR": descriptor,
            }  # fmt: skip
            if descriptor:
                given["outer"] = TensorDescriptor.from_tensor(outer, [tile.outer, chunk])
                given["inner"] = TensorDescriptor.from_tensor(inner, [tile.inner, chunk])
            self.notes.append((program, given, tile.warps, tile.stages, tile.registers))


def launches(loss: Any, sizes: tuple[bool, ...]) -> list[Note]:
    """Kernels that a forward and backward pass would launch on a GPU. loss: a function without arguments"""
    from hardneg.losses.kernels.triton import (
        anchor_losses,
        normalize,
        operators,
        passes,
        percentile_bands,
    )

    recorder = Recorder(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "available", lambda device: True)
        patch.setattr(passes, "launch_tiled", recorder.launch_tiled)
        for module in (anchor_losses, normalize, operators, percentile_bands):
            patch.setattr(module, "launch", recorder.launch)
        loss().sum().backward()
    return recorder.notes


def compiled(program: Any, arguments: dict[str, Any], warps: int, stages: int, registers: int | None) -> Any:
    """A kernel compiled for the types of the given arguments, specialized as at a launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    given = arguments | {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
    bound, specialization, rest = create_function_from_signature(program.signature, program.params, backend)(**given)
    _, signature, constants, attributes = program._pack_args(backend, given, bound, specialization, rest)
    return triton.compile(ASTSource(program, signature, constants, attributes), target=target, options=rest)


def check(notes: list[Note]) -> list[Note]:
    """Compile all of these kernels, and check that each fits in the memory of a multiprocessor."""
    assert len(notes) >= 4
    for program, *given in notes:
        assert given[0].keys() == set(program.arg_names)
        made = compiled(program, *given)
        assert made.metadata.shared <= SHARED_MEMORY, f"{program.__name__} does not fit: {given[1:]}"
    return notes


def embeddings(rows: int, dtype: torch.dtype, dim: int) -> Tensor:
    return torch.randn(rows, dim).to(dtype).requires_grad_()


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "pairs": ({"hardening": hn.Exponential(1.0), "class_prior": 0.1}, []),
    "plain": ({}, []),
    "cold": ({"temperature": 0.02, "hardening": hn.Exponential(1.3)}, []),
    "labels": ({"supervision": "full", "hardening": hn.Exponential(0.5)}, ["labels"]),
    "labels of negatives": ({"supervision": "negatives", "hardening": hn.Exponential(2.0)}, ["labels"]),
    "towers": ({"in_batch": "other", "symmetric": True, "hardening": hn.BelowPositive(0.1)}, []),
    "towers, whole loss": ({"in_batch": "other", "symmetric": True, "hardening": hn.Exponential(1.0)}, []),
    "towers, cold": ({"in_batch": "other", "symmetric": True, "temperature": 0.01}, []),
    "one direction": ({"in_batch": "other"}, []),
    "learned": ({"temperature": hn.Learnable(0.1), "hardening": (hn.Threshold(0.5), hn.Exponential(0.5))}, []),
    "queue": ({"in_batch": None}, ["negatives"]),
    "queue, some excluded": ({"in_batch": None}, ["negatives", "exclude"]),
    "queue, masked": ({"in_batch": None, "hardening": hn.Threshold(0.5)}, ["negatives", "negative_mask"]),
    "ring": ({"in_batch": None, "hardening": hn.Ring(0.9, 0.99)}, ["negatives"]),
    "ring, some excluded": ({"in_batch": None, "hardening": hn.Ring(0.9, 0.99)}, ["negatives", "exclude"]),
    "ring, masked": (
        {"in_batch": None, "hardening": (hn.Ring(0.9, 0.99), hn.BelowPositive())},
        ["negatives", "negative_mask"],
    ),
    "ring of batch and queue": ({"hardening": (hn.Ring(0.9, 0.99), hn.Exponential(1.0))}, ["negatives"]),
    "batch and queue, masked": ({"hardening": hn.Exponential(2.0)}, ["negatives", "negative_mask"]),
}
BFLOAT16, FLOAT32, WIDE, FLOAT16 = (
    (torch.bfloat16, 128), (torch.float32, 64), (torch.bfloat16, 384), (torch.float16, 256),
)  # fmt: skip
# The quick run compiles every kernel once, in one of the forms, in the tiles of small problems.
QUICK = {("pairs", BFLOAT16), ("towers", FLOAT32), ("queue, some excluded", WIDE), ("ring, masked", BFLOAT16)}
SMALL, BOTH = (False,), (True, False)


def some(names: Any, quick: Any, forms: Any = (BFLOAT16, FLOAT32, WIDE, FLOAT16)) -> list[Any]:
    """Cases in the tiles of small problems in the quick run, all of them in both in the slow one."""
    fast = [pytest.param(name, *form, SMALL) for name in names for form in forms if (name, form) in quick]
    return fast + [pytest.param(name, *form, BOTH, marks=pytest.mark.slow) for name in names for form in forms]


@pytest.mark.parametrize(("name", "dtype", "dim", "sizes"), some(CASES, QUICK), ids=str)
def test_kernels_compile_for_a_gpu(name: str, dtype: torch.dtype, dim: int, sizes: tuple[bool, ...]) -> None:
    options, names = CASES[name]
    everything = {
        "negatives": embeddings(KEYS, dtype, dim),
        "exclude": torch.arange(ROWS) % KEYS,
        "negative_mask": torch.ones(ROWS, KEYS, dtype=torch.bool),
        "labels": torch.arange(ROWS) % 7,
    }
    given = {key: everything[key] for key in names}
    loss = hn.InfoNCE(**options, backend="fused")
    z1, z2 = (embeddings(ROWS, dtype, dim) for _ in range(2))
    check(launches(lambda: loss(z1, z2, **given), sizes))


FORMS: dict[str, dict[str, Any]] = {
    "mean_of_logs": {"hardening": hn.Exponential(1.0)},
    "decoupled": {"hardening": hn.Exponential(0.5), "positive_in_denominator": False},
    "in_denominator": {"combine_positives": "in_denominator"},
}


@pytest.mark.parametrize(("form", "dtype", "dim", "sizes"), some(FORMS, {("mean_of_logs", FLOAT32)}), ids=str)
def test_kernels_of_labels_in_the_short_path_compile(
    form: str, dtype: torch.dtype, dim: int, sizes: tuple[bool, ...]
) -> None:
    loss = hn.InfoNCE(**FORMS[form], supervision="full", backend="fused")
    z1, z2 = (embeddings(ROWS, dtype, dim) for _ in range(2))
    notes = check(launches(lambda: loss(z1, z2, labels=torch.arange(ROWS) % 7), sizes))
    assert {program.__name__ for program, *_ in notes} >= {"finish_labels", "sums", "gradient", "normalize"}


TILTED = hn.Exponential(1.3)


@pytest.mark.parametrize(
    ("hardening", "dtype", "dim"),
    [
        pytest.param(hardening, dtype, dim, marks=[] if (dtype, dim) == (torch.bfloat16, 128) else pytest.mark.slow)
        for hardening in (TILTED, (hn.Exponential(1.0), hn.Threshold(0.5)))
        for dtype in (torch.bfloat16, torch.float32)
        for dim in (128, 256, 384)
    ],
    ids=str,
)
def test_kernels_that_use_the_symmetry_of_scores_compile(
    hardening: Any, dtype: torch.dtype, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hardneg.losses.kernels.triton import passes

    monkeypatch.setattr(passes, "MIN_SYMMETRIC_ROWS", 64)
    loss = hn.InfoNCE(supervision="negatives", hardening=hardening, backend="fused")
    z1, z2 = (embeddings(ROWS, dtype, dim) for _ in range(2))
    notes = check(launches(lambda: loss(z1, z2, labels=torch.arange(ROWS) % 7), BOTH))
    assert sum("outer_end" in arguments for _, arguments, *_ in notes) == 2


@pytest.mark.parametrize("dim", [128, pytest.param(384, marks=pytest.mark.slow)])
def test_kernels_of_a_learned_temperature_compile_for_either_bound(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from hardneg.losses.kernels.triton import passes

    monkeypatch.setattr(passes, "MIN_SYMMETRIC_ROWS", 64)
    loss = hn.hcl(temperature=hn.Learnable(0.1), backend="fused")
    z1, z2 = (embeddings(ROWS, torch.bfloat16, dim) for _ in range(2))
    notes = check(launches(lambda: loss(z1, z2), (True,)))
    kinds = [(program.__name__, given["T"].bounded) for program, given, *_ in notes if "T" in given]
    assert set(kinds) == {("sums", False), ("symmetric_sums", True), ("gradient", False), ("gradient", True)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [1, 16, 17, 32, 64, 100, 128, 129, 192, 256, 257, 512, 768, 1024])
def test_tiles_of_every_width_and_precision_fit_in_a_multiprocessor(dim: int, dtype: torch.dtype) -> None:
    loss = hn.InfoNCE(hardening=(hn.Threshold(0.5), hn.Exponential(1.3)), backend="fused")
    z1, z2 = (embeddings(ROWS, dtype, dim) for _ in range(2))
    check([note for note in launches(lambda: loss(z1, z2), BOTH) if "OUTER_BLOCK" in note[1]])


class Driver:
    """Stands for the driver of a GPU that is never used: no other test has a device of this number."""

    def get_current_device(self) -> int:
        return 99

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.mark.parametrize("name", ["pairs", "labels", "towers, whole loss", "queue", "ring"])
def test_a_first_call_compiles_all_kernels_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.compiler import CompiledKernel
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from hardneg.losses.kernels.triton import launch, operators

    original = JITFunction.run
    programs, loaded = set[Any](), list[Any]()
    ahead, launched = set[str](), set[str]()

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **given: Any) -> Any:
        """Compiles a kernel, but never runs it."""
        if self not in programs:
            programs.add(self)
            self.device_caches.pop(99, None)  # of other tests
        known = self.device_caches[99][0]
        before = len(known)
        found = original(self, *arguments, grid=grid, warmup=True, **given)
        if warmup:
            ahead.add(self.fn.__name__)
            return found
        assert len(known) == before, f"{self.fn.__name__} was not compiled together with the others"
        launched.add(self.fn.__name__)
        return defaultdict(lambda: lambda *values, stream: None)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(CompiledKernel, "__getitem__", lambda self, grid: loaded.append(self))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(operators, "available", lambda device: True)
    monkeypatch.setattr(launch, "_compiled", {})
    options, names = CASES[name]
    loss = hn.InfoNCE(**options, backend="fused")
    for dim in (64, 272):  # the gradient of wide rows is computed in strips
        given = {"labels": torch.arange(ROWS) % 7, "negatives": embeddings(KEYS, torch.bfloat16, dim)}
        given = {key: given[key] for key in names}
        z1, z2 = (embeddings(ROWS, torch.bfloat16, dim) for _ in range(2))
        with torch.no_grad():
            loss(z1, z2, **given)
        if dim == 64:
            assert ahead == launched
            assert "normalize_backward" not in ahead
        launch._compiled.clear()  # as in a new process
        for program in programs:
            program.device_caches.pop(99)
        loaded.clear()
        for _ in range(2):
            loss(z1, z2, **given).backward()
        assert len(loaded) == len({id(kernel) for kernel in loaded})
    assert ahead == launched == {kernel.src.fn.fn.__name__ for kernel in loaded}
    assert {"normalize", "normalize_backward"} < ahead
    assert len(ahead) >= 5

"""Cached compiled kernels are those that Triton itself would look up; tiles that cannot be compiled are replaced."""

import math
import time
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from importlib.util import find_spec
from itertools import combinations_with_replacement, product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

if find_spec("triton") is None:
    pytest.skip("Triton is for Linux only", allow_module_level=True)

import triton

from hardneg.losses.kernels.triton import anchor_losses, backward, forward, launch, normalize, percentile_bands
from hardneg.losses.kernels.triton.launch import (
    Compiled,
    Tile,
    choose_tile,
    compile_together,
    described,
    launch_tiled,
)

LAUNCHED = (
    forward.sums, forward.finish, backward.gradient, backward.score_coefficients, percentile_bands.band_sums,
    percentile_bands.band_gradient, percentile_bands.mask_strip, anchor_losses.finish_pairs,
    anchor_losses.finish_labels, normalize.normalize, normalize.normalize_backward,
)  # fmt: skip


class Inner(NamedTuple):
    tensor: Tensor | None
    size: int


class Outer(NamedTuple):
    first: Inner
    factor: float


class Program:
    """A fake Triton kernel that counts how often it is looked up, and how often it is compiled without being run."""

    arg_names = ("x", "y", "size", "factor", "nested", "SHAPE", "TRAITS")
    constexprs = (5, 6)

    def __init__(self) -> None:
        self.lookups = self.compiled = 0
        self.launches: list[Any] = []
        self.result: Any = None

    def warmup(self, **arguments: Any) -> "Handle":
        self.compiled += 1
        return Handle(self.launches)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(**arguments: Any) -> Any:
            self.lookups += 1
            return self.result or Handle(self.launches)

        return run


class Handle(dict[tuple[int, ...], Callable[..., None]]):
    """A fake compiled kernel that records its launches."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self, launches: list[Any]) -> None:
        self.launches = launches

    def __missing__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *values, stream: self.launches.append((grid, values, stream))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A fake current device."""
    current = SimpleNamespace(number=0)
    active = SimpleNamespace(
        get_current_device=lambda: current.number, get_current_stream=lambda device: f"of {device}"
    )
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    return current


def plain() -> dict[str, Any]:
    nested = Outer(Inner(torch.zeros(64), 3), 0.25)
    return {"x": torch.zeros(64), "y": None, "size": 48, "factor": 0.5, "nested": nested, "SHAPE": 8, "TRAITS": (1, 2)}


def test_a_cached_kernel_is_launched_with_the_present_arguments(device: SimpleNamespace) -> None:
    program = Program()
    compiled = Compiled(program)
    compiled.launch((3, 2), plain(), 4, 3)
    other = torch.zeros(64)
    second = plain() | {"factor": 2.5, "nested": Outer(Inner(other, 3), 7.5)}
    compiled.launch((5,), second, 4, 3)
    assert program.lookups == 1
    nested = Outer(Inner(other.data_ptr(), 3), 7.5)
    assert program.launches == [((5, 1, 1), (second["x"].data_ptr(), None, 48, 2.5, nested, 8, (1, 2)), "of 0")]


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(65)[1:]},
        {"x": torch.zeros(64, dtype=torch.bfloat16)},
        {"x": None},
        {"y": torch.zeros(64)},
        {"size": 1},
        {"size": 47},
        {"size": 1 << 40},
        {"nested": Outer(Inner(None, 3), 0.25)},
        {"nested": Outer(Inner(torch.zeros(64, dtype=torch.int32), 3), 0.25)},
        {"nested": Outer(Inner(torch.zeros(65)[1:], 3), 0.25)},
        {"nested": Outer(Inner(torch.zeros(64), 1), 0.25)},
        {"SHAPE": 16},
        {"TRAITS": (1, 3)},
        {"registers": 128},
        {"warps": 8},
        {"stages": 1},
        {"device": 1},
    ],
    ids=str,
)
def test_a_different_signature_is_looked_up_again(device: SimpleNamespace, other: dict[str, Any]) -> None:
    program = Program()
    compiled = Compiled(program)
    compiled.launch((1,), plain(), 4, 3)
    changed = plain() | other
    device.number = changed.pop("device", 0)
    settings = changed.pop("warps", 4), changed.pop("stages", 3), changed.pop("registers", None)
    compiled.launch((1,), changed, *settings)
    assert program.lookups == 2
    compiled.launch((1,), changed, *settings)
    assert (program.lookups, len(program.launches)) == (2, 1)


@pytest.mark.parametrize("value", [True, "text", object()])
def test_arguments_of_unknown_types_are_refused(device: SimpleNamespace, value: Any) -> None:
    with pytest.raises(AssertionError):
        Compiled(Program()).launch((1,), plain() | {"size": value}, 4, 3)


def test_the_cache_is_bounded(device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_CACHED", 10)
    compiled = Compiled(Program())
    for size in range(35):
        compiled.launch((1,), plain() | {"size": size}, 4, 3)
        assert 1 <= len(compiled.cache) <= 10


class Together:
    """Stands for Triton's mode of compiling in parallel."""

    entered = 0

    def __init__(self, executor: Executor) -> None:
        pass

    def __enter__(self) -> None:
        Together.entered += 1

    def __exit__(self, *error: object) -> None:
        pass


def test_kernels_of_a_first_call_are_compiled_together(
    device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "AsyncCompileMode", Together)
    monkeypatch.setattr(Together, "entered", 0)
    programs = [Program(), Program(), Program()]
    kernels = [Compiled(program) for program in programs]

    def run(*numbers: int, size: int = 48, shape: int = 8) -> str:
        for number in numbers:
            kernels[number].launch((2,), plain() | {"size": size, "SHAPE": shape}, 4, 3)
        return "result"

    def state() -> list[tuple[int, int, int]]:
        return [(program.compiled, program.lookups, len(program.launches)) for program in programs]

    def call(**changed: int) -> str:
        return compile_together(lambda: run(0, 1, **changed), lambda: run(0, 1, 2, **changed))

    assert call() == "result"
    assert state() == [(1, 1, 0), (1, 1, 0), (1, 0, 0)]  # a lookup also runs the kernel
    run(2)
    call()
    assert (state(), Together.entered) == ([(1, 1, 1), (1, 1, 1), (1, 1, 0)], 1)
    call(size=64)  # also divisible by 16
    assert (state(), Together.entered) == ([(1, 2, 1), (1, 2, 1), (1, 1, 0)], 1)
    call(size=49)
    assert (state(), Together.entered) == ([(2, 3, 1), (2, 3, 1), (2, 1, 0)], 2)
    call(shape=16)
    assert (state(), Together.entered) == ([(3, 4, 1), (3, 4, 1), (3, 1, 0)], 3)


def test_sizes_of_every_step_do_not_start_threads(device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "AsyncCompileMode", Together)
    monkeypatch.setattr(Together, "entered", 0)
    monkeypatch.setattr(launch, "MAX_CACHED", 10)
    compiled = Compiled(Program())
    for size in range(2, 200):
        run = partial(compiled.launch, (2,), plain() | {"size": size}, 4, 3)
        compile_together(run, run)
    assert Together.entered == len(compiled.kinds) == 2  # divisible by 16, or not


@pytest.mark.parametrize("wrong", ["launch_all", "run"])
def test_an_error_leaves_no_state(device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setattr(launch, "AsyncCompileMode", Together)
    program = Program()
    compiled = Compiled(program)

    def launched() -> None:
        compiled.launch((2,), plain(), 4, 3)

    def fails() -> None:
        launched()
        raise RuntimeError("wrong")

    if wrong == "launch_all":
        compile_together(launched, fails)
    else:
        with pytest.raises(RuntimeError, match="wrong"):
            compile_together(fails, launched)
    assert (program.compiled, program.lookups, len(program.launches)) == (1, 1, 0)
    launched()
    assert (program.compiled, program.lookups, len(program.launches)) == (1, 1, 1)


def test_ctrl_c_while_kernels_are_compiled(device: SimpleNamespace) -> None:
    from triton.runtime import _async_compile

    program = Program()
    compiled = Compiled(program)
    run = partial(compiled.launch, (2,), plain(), 4, 3)

    def launch_all() -> None:
        run()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_together(run, launch_all)
    assert _async_compile.active_mode.get() is None
    compile_together(run, run)
    run()
    assert (program.compiled, program.lookups, len(program.launches)) == (2, 1, 1)


def test_a_kernel_that_another_thread_compiles_is_waited_for(device: SimpleNamespace) -> None:
    program = Program()
    compiled = Compiled(program)
    handle = Handle(program.launches)
    program.result = SimpleNamespace(result=lambda: handle)
    for _ in range(2):
        compiled.launch((2,), plain(), 4, 3)
    assert len(program.launches) == 1


def test_the_message_comes_while_kernels_are_compiled(
    device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "AsyncCompileMode", Together)
    monkeypatch.setattr(launch._Compilation, "seconds", 2.0)
    monkeypatch.setattr(launch._Compilation, "told", False)
    compiled = Compiled(Program())
    said: list[str] = []

    def launch_all() -> None:
        for _ in range(1000):
            said.append(capsys.readouterr().err)
            if said[-1]:
                return
            time.sleep(0.01)

    compile_together(partial(compiled.launch, (2,), plain(), 4, 3), launch_all)
    assert "compiling GPU kernels" in said[-1]


def test_values_of_equal_signature_are_equal_to_triton() -> None:
    native = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.tools.tensor_descriptor import TensorDescriptor

    backend = make_backend(GPUTarget("cuda", 90, 32))
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8)
    bases = [torch.zeros(64, dtype=dtype) for dtype in dtypes]
    edges = [sign * (1 << power) + step for sign in (1, -1) for power in (0, 4, 5, 31, 32, 62) for step in (-1, 0, 1)]
    descriptors = [
        TensorDescriptor.from_tensor(torch.zeros(rows, width, dtype=dtype), [block, 32])
        for rows, width, block, dtype in product((64, 256), (64, 96), (32, 64), (torch.bfloat16, torch.float16))
    ]
    values = [
        None,
        *descriptors,
        0.0,
        1.0,
        16.0,
        0.1,
        math.inf,
        math.nan,
        *edges,
        *(base[k:] for base in bases for k in range(17)),
    ]

    values += [Inner(tensor, size) for tensor in (None, torch.zeros(3), torch.zeros(9)[1:]) for size in (1, 3, 16)]
    values += [Outer(Inner(None, 2), factor) for factor in (0.5, 2.0)] + [(1, 2), (2.0, 3), (torch.zeros(3), 4)]

    def signature(value: Any) -> Any:
        kinds: list[Any] = []
        described([value], kinds)
        return kinds

    alike = 0
    for one, other in combinations_with_replacement(values, 2):
        if signature(one) == signature(other):
            assert native(backend, one, False, True, True) == native(backend, other, False, True, True)
            alike += one is not other
    assert alike > 100


@pytest.mark.parametrize("program", LAUNCHED, ids=lambda program: program.__name__)
def test_constants_are_the_last_arguments_of_every_kernel(program: Any) -> None:
    names = program.arg_names
    assert [name.isupper() for name in names] == [place >= Compiled(program).constants for place in range(len(names))]


class OnGpu(SimpleNamespace):
    """Stands for a matrix on a GPU."""

    is_cuda = True

    def element_size(self) -> int:
        return 2


LARGE, SMALL = (choose_tile("sums", 128, 2, True, large) for large in (True, False))


def attempt(
    monkeypatch: pytest.MonkeyPatch, rows: int, error: Callable[[Tile], Exception | None], times: int = 1
) -> list[int]:
    """The outer rows of the tiles that `launch_tiled` launches, where ``error`` is raised for some."""
    seen: list[int] = []
    monkeypatch.setattr(launch, "_too_large", set())
    monkeypatch.setattr(launch, "_has_descriptor", lambda matrix: False)

    def launched(
        program: Any, grid: tuple[int, ...], given: dict[str, Any], warps: int, stages: int, registers: int | None
    ) -> None:
        tile = next(tile for tile in (LARGE, SMALL) if (tile.inner, tile.stages) == (given["INNER_BLOCK"], stages))
        assert (given["OUTER_BLOCK"], warps, registers) == (tile.outer, tile.warps, tile.registers)
        assert (given["WIDTH"], given["WHOLE"], given["DESCRIPTOR"]) == (128, True, False)
        assert grid == (math.ceil(rows / tile.outer), 3)
        seen.append(tile.inner)
        if (raised := error(tile)) is not None:
            raise raised

    monkeypatch.setattr(launch, "launch", launched)
    matrix = OnGpu(shape=(rows, 128))
    for _ in range(times):
        launch_tiled("program", {"outer": matrix, "inner": matrix}, rows, 3, True, "sums")
    return seen


def test_only_large_problems_take_large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LARGE.inner != SMALL.inner
    assert attempt(monkeypatch, 8192, lambda tile: None) == [LARGE.inner]
    assert attempt(monkeypatch, 8191, lambda tile: None) == [SMALL.inner]


@pytest.mark.parametrize(
    "error",
    [triton.runtime.errors.OutOfResources(1 << 20, 1 << 18, "shared memory"), RuntimeError("PassManager failed")],
)
def test_a_tile_that_cannot_be_compiled_is_replaced_by_the_small_one_and_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    found = attempt(monkeypatch, 8192, lambda tile: error if tile is LARGE else None, times=3)
    assert found == [LARGE.inner, *[SMALL.inner] * 3]


@pytest.mark.parametrize("rows", [8192, 64])
def test_the_error_of_the_last_tile_is_raised(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    with pytest.raises(RuntimeError, match="PassManager"):
        attempt(monkeypatch, rows, lambda tile: RuntimeError("PassManager failed"))


def test_other_errors_are_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Tile] = []
    with pytest.raises(RuntimeError, match="illegal memory access"):
        attempt(monkeypatch, 8192, lambda tile: tried.append(tile) or RuntimeError("an illegal memory access"))
    assert tried == [LARGE]

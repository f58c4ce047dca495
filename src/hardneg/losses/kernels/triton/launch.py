"""Launches Triton kernels with little host time, in tiles that suit the size of the problem.

At every launch Triton binds and inspects all arguments to find the compiled kernel for them. In small batches that
takes longer than everything else on the host. So a compiled kernel is looked up once and then called directly.
"""

import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor
from triton import JITFunction
from triton.runtime import driver

try:
    from triton.tools.tensor_descriptor import TensorDescriptor as TensorDescriptor
except ImportError:  # before Triton 3.4
    TensorDescriptor = None

try:
    from triton import AsyncCompileMode as AsyncCompileMode
except ImportError:  # before Triton 3.5
    AsyncCompileMode = None

# On AMD GPUs a compiled kernel depends on more than `Compiled.signature` holds: there Triton looks it up every time.
CACHES_KERNELS = torch.version.hip is None

# The cache is emptied at this size: every step may have new sizes, and Triton keeps the kernels themselves.
MAX_CACHED = 1024

BLOCK = 128  # outer rows of an ordinary tile
PART_MULTIPLE = 256  # the length of a part is a multiple of it, and it is a multiple of every tile

# Up to this number of pairs a second launch that adds the results of several parts costs more than it saves.
SMALL_PROBLEM = 1 << 19

# From this number of pairs on, large tiles are used; below, the launch takes longer than the kernel.
LARGE_PROBLEM = 1 << 26


@dataclass(frozen=True)
class Tile:
    """Outer and inner rows of a tile, warps per program, and pipeline stages.

    chunk: columns loaded at a time, None for whole rows · descriptor: whether the copy engine (TMA) loads it, if there
    is one · registers: maximum number per thread, so that more programs fit on a multiprocessor
    """

    outer: int
    inner: int
    warps: int
    stages: int
    chunk: int | None = None
    descriptor: bool = False
    registers: int | None = None


@lru_cache
def choose_tile(name: str, width: int, bytes_each: int, whole: bool, large: bool) -> Tile:
    """The tile of a kernel: of two dozen, the fastest on an H200 for large problems, a small one for others.

    name: ``"sums"``, ``"symmetric"``, ``"labelled"``, ``"gradient"`` or ``"strip"``
    """
    if bytes_each == 4:  # float32 products do not use tensor cores; large tiles would spill
        wide = name not in ("symmetric", "labelled") and (large or (name == "sums" and width <= 128))
        return Tile(32, 64 if wide else 32, 4, 2 if width <= 128 else 1, None if whole else 64)
    if not large:
        return Tile(64, 64, 4, 3 if width <= 128 or not whole else 2, None if whole else 64)
    if name in ("symmetric", "labelled"):
        # Wide rows in chunks: 2.3 instead of 2.9 ms for 65,536 rows of 256 numbers.
        return Tile(128, 64, 4, 3, None, True) if width <= 128 else Tile(128, 128, 4, 3, 64, True)
    if not whole:
        return Tile(128, 256, 8, 4, 64, descriptor=True)
    if width <= 128:
        return Tile(64, 128, 4, 2 if name == "gradient" else 3, None, True, None if name == "gradient" else 128)
    return Tile(128, 64, 8, 3, None, descriptor=name != "gradient")


def launch_tiled(
    program: Any,
    arguments: dict[str, Any],
    rows: int,
    parts: int,
    whole: bool,
    name: str,
    halves: int = 1,
    blocks: int | None = None,
) -> None:
    """Runs a kernel over ``rows`` outer rows and ``parts`` parts of the inner rows.

    whole: whether a row fits in a tile · halves: 2 if no block may have rows of both halves · blocks: the number of
    programs for the outer rows, if not one per tile
    """
    outer, inner = arguments["outer"], arguments["inner"]
    width, large = outer.shape[1], rows * inner.shape[0] >= LARGE_PROBLEM
    if not outer.is_cuda:
        tiles = [Tile(32, 32, 4, 1, None if whole else 64)]  # small, so that small tests have several tiles
    else:
        sizes = (True, False) if large else (False,)
        tiles = [choose_tile(name, width, outer.element_size(), whole, size) for size in sizes]
    for tile in tiles:
        if (program, tile, width) in _too_large and tile is not tiles[-1]:
            continue
        chunk = tile.chunk or max(16, 1 << (width - 1).bit_length())
        descriptor = tile.descriptor and width % chunk == 0 and _has_descriptor(outer) and _has_descriptor(inner)
        given = {
            **arguments, "OUTER_BLOCK": tile.outer, "INNER_BLOCK": tile.inner, "WIDTH": chunk,
            "WHOLE": tile.chunk is None, "DESCRIPTOR": descriptor,
        }  # fmt: skip
        if descriptor:
            _ensure_context(outer.device)
            given["outer"] = TensorDescriptor.from_tensor(outer, [tile.outer, chunk])
            given["inner"] = TensorDescriptor.from_tensor(inner, [tile.inner, chunk])
        grid = blocks or halves * math.ceil(rows / halves / tile.outer), parts
        try:
            launch(program, grid, given, tile.warps, tile.stages, tile.registers)
            return
        except (triton.runtime.errors.OutOfResources, RuntimeError) as error:
            # The tile needs more memory than this GPU has, or Triton fails to compile it.
            known = isinstance(error, triton.runtime.errors.OutOfResources) or "PassManager" in str(error)
            if not known or tile is tiles[-1]:
                raise
            _too_large.add((program, tile, width))


class _Thread(threading.local):
    """Whether a CUDA context was made current in this thread."""

    has_context = False


_thread = _Thread()


def _ensure_context(device: torch.device) -> None:
    """Makes a CUDA context current, without which Triton cannot encode a descriptor; a new thread has none."""
    if not _thread.has_context:
        torch.cuda.mem_get_info(device)
        _thread.has_context = True


_too_large: set[tuple[Any, Tile, int]] = set()  # tiles that cannot be used on this machine


def launch(
    program: Any,
    grid: tuple[int, ...],
    arguments: dict[str, Any],
    warps: int = 4,
    stages: int = 3,
    registers: int | None = None,
) -> None:
    """Runs a kernel; arguments: all of its arguments by name · registers: maximum number per thread."""
    if not (CACHES_KERNELS and isinstance(program, JITFunction)):  # the interpreter has no compiled kernels
        program[grid](**arguments, num_warps=warps, num_stages=stages, maxnreg=registers)
        return
    compiled = _compiled.get(program.fn)
    if compiled is None:
        compiled = _compiled[program.fn] = Compiled(program)
    compiled.launch(grid, arguments, warps, stages, registers)


class Compiled:
    """The compiled versions of one kernel, by signature of the arguments."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.in_order = itemgetter(*program.arg_names)
        self.constants: int = program.constexprs[0]  # index of the first one
        assert list(program.constexprs) == list(range(self.constants, len(program.arg_names)))
        self.cache: dict[tuple[Any, ...], Any] = {}
        self.kinds: set[tuple[Any, ...]] = set()  # what compiled kernels depend on

    def launch(
        self, grid: tuple[int, ...], arguments: dict[str, Any], warps: int, stages: int, registers: int | None = None
    ) -> None:
        """Runs the kernel in the current stream of the current device."""
        device = driver.active.get_current_device()
        values = self.in_order(arguments)
        signature: list[Any] = [device, warps, stages, registers]
        passed = described(values[: self.constants], signature)
        key = (*signature, *values[self.constants :])
        found, ahead = self.cache.get(key), _compiled_ahead.get()
        if found is not None and ahead is None:
            stream = driver.active.get_current_stream(device)
            found[(*grid, 1, 1)[:3]](*passed, *values[self.constants :], stream=stream)
            return
        kind = (*map(_size, signature), *values[self.constants :])
        if _compiled_only.get() and kind not in self.kinds:
            raise _NotCompiledError
        options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
        if ahead is not None:
            if found is None:
                ahead.add(self.program.warmup(**arguments, grid=grid, **options))
            return
        begin = time.perf_counter()
        made = self.program[grid](**arguments, **options)
        _Compilation.seconds += time.perf_counter() - begin
        if _Compilation.seconds > 2:
            _tell()
        if made is not None:
            if len(self.cache) >= MAX_CACHED:
                self.cache.clear()
            self.cache[key] = _finished(made)
            self.kinds.add(kind)


def _size(part: Any) -> Any:
    """What a kernel depends on of an integer."""
    return (part == 1, part % 16 == 0, part >= 1 << 31) if type(part) is int else part


def _finished(kernel: Any) -> Any:
    """A compiled kernel; waits for it if another thread compiles it."""
    return kernel.result() if hasattr(kernel, "result") else kernel


_compiled_only = ContextVar("compiled_only", default=False)  # raise _NotCompiledError instead of compiling a kernel
_compiled_ahead: ContextVar[set[Any] | None] = ContextVar("compiled_ahead", default=None)  # instead of being run
_Result = TypeVar("_Result")


class _NotCompiledError(Exception):
    """A kernel has not been compiled in this process."""


def compile_together(run: Callable[[], _Result], launch_all: Callable[[], object]) -> _Result:
    """Returns ``run()``. If it needs a new kernel, all that ``launch_all`` launches are compiled first, in parallel.

    Most of a first call is the time of an assembler and of a compiler of C, which other threads need not wait for.

    launch_all: launches the kernels of ``run`` and later ones; they do not run, so numbers in tensors are arbitrary
    """
    if AsyncCompileMode is None or not CACHES_KERNELS:
        return run()
    token = _compiled_only.set(True)
    try:
        return run()
    except _NotCompiledError:
        pass
    finally:
        _compiled_only.reset(token)
    with suppress(Exception):  # what fails here is compiled, and fails again, when it is launched
        copy_context().run(_compile, launch_all)  # its own context: Triton 3.6 does not end its mode after Ctrl-C
    return run()


def _compile(launch_all: Callable[[], object]) -> None:
    """Compiles and loads the kernels that ``launch_all`` launches, in parallel, without running them."""
    begin = time.perf_counter()
    message = threading.Timer(max(0.0, 2.0 - _Compilation.seconds), _tell)
    message.daemon = True
    message.start()
    kernels = set[Any]()
    _compiled_ahead.set(kernels)
    try:
        with ThreadPoolExecutor() as executor:
            with AsyncCompileMode(executor):
                launch_all()
            list(executor.map(partial(_load, driver.active.get_current_device()), kernels))
    finally:
        message.cancel()
        _Compilation.seconds += time.perf_counter() - begin


def _load(device: int, kernel: Any) -> None:
    """Makes a compiled kernel ready to be launched."""
    with suppress(Exception), torch.cuda.device(device):
        _finished(kernel)[1, 1, 1]


class _Compilation:
    """The time that kernels of this process have taken to compile."""

    seconds = 0.0
    told = False


def _tell() -> None:
    """Says once what the first calls are waiting for, after two seconds of compiling."""
    if not _Compilation.told:
        _Compilation.told = True
        print(
            "hardneg: compiling GPU kernels. It takes some seconds, once for each setting: Triton keeps them on disk. "
            "`hardneg doctor --warm` compiles those of the presets ahead.",
            file=sys.stderr,
            flush=True,
        )


def described(values: Sequence[Any], signature: list[Any]) -> list[Any]:
    """The values as they are passed to a compiled kernel: tensors by address. What the kernel depends on is appended.

    It depends on the dtype of a tensor and on whether it is aligned to 16 bytes, on the dtype and the tile shape of a
    tensor descriptor, on whether an integer is 1, divisible by 16, or beyond 32 bits (for simplicity, on its value), on
    which arguments are None or floats, and on the constants.
    """
    passed, note = [], signature.append
    for value in values:
        kind = type(value)
        if kind is int or value is None:
            note(value)
            passed.append(value)
        elif isinstance(value, Tensor):
            address = value.data_ptr()
            note(value.dtype if address % 16 == 0 else (value.dtype,))
            passed.append(address)
        elif isinstance(value, tuple):
            passed.append(tuple(described(value, signature)))  # kernels read the parts by position
        else:
            assert kind is float or kind is TensorDescriptor, f"no kernel takes {value!r}"
            note(float if kind is float else (value.base.dtype, *value.block_shape))
            passed.append(value)
    return passed


_compiled: dict[Any, Compiled] = {}  # by function: to hash a kernel, Triton reads its source


def _has_descriptor(matrix: Tensor) -> bool:
    """Whether the copy engine of a GPU (Hopper and later) can load tiles of this matrix."""
    item = matrix.element_size()
    aligned = matrix.data_ptr() % 16 == 0 and matrix.stride(0) * item % 16 == 0
    return item == 2 and aligned and TensorDescriptor is not None and _has_copy_engine(matrix.device)


@lru_cache
def _has_copy_engine(device: torch.device) -> bool:
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


def split_inner_rows(rows: int, others: int, device: torch.device) -> tuple[int, int]:
    """Number of parts that inner rows are split into, and the length of a part.

    There are enough parts to keep every multiprocessor busy. The results of the parts are stored separately.
    """
    if rows * others <= SMALL_PROBLEM:
        return 1, math.ceil(others / PART_MULTIPLE) * PART_MULTIPLE
    blocks, units = math.ceil(rows / BLOCK), math.ceil(others / PART_MULTIPLE)
    wanted = max(1, min(units, num_programs(device) // blocks))
    each = math.ceil(units / wanted)
    return math.ceil(units / each), each * PART_MULTIPLE


@lru_cache
def num_programs(device: torch.device) -> int:
    """The number of programs that keep a device busy."""
    if device.type != "cuda":
        return 4
    return 4 * int(torch.cuda.get_device_properties(device).multi_processor_count)

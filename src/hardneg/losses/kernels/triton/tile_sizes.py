"""Tile sizes of the Triton kernels: measured once for large problems, a fixed choice for small ones."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
import triton
from torch import Tensor

from hardneg.losses.kernels.triton import launch as launching

BLOCK = 128  # outer rows of an ordinary tile
PART_MULTIPLE = 256  # the length of a part is a multiple of it, and it is a multiple of every tile

# Up to this number of pairs a second launch that adds the results of several parts costs more than it saves.
SMALL_PROBLEM = 1 << 19

# Below this number of pairs the launch takes longer than the kernel, and all tiles are about equally fast.
MIN_MEASURED_PAIRS = 1 << 26

# Number of measurements of a tile, unless they take longer than this number of milliseconds.
ROUNDS, MAX_MEASURING_MS = 8, 1000.0

# Measurements are kept for each power of two of a size, up to this exponent.
MAX_LOG_SIZE = 17


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
def tile_options(name: str, width: int, bytes_each: int, whole: bool) -> list[Tile]:
    """Tiles to measure, the one for small problems first; the best of two dozen on an H200."""
    if name == "recompute":  # mostly returns immediately, which cannot be measured
        return tile_options("sums", width, bytes_each, whole)[:1]
    if name == "collect":
        return tile_options("list_candidates", width, bytes_each, whole)[:1]
    if bytes_each == 4:  # float32 products do not use tensor cores; large tiles would spill
        if width <= 128 and name == "gradient":
            return [Tile(32, 32, 4, 2), Tile(32, 64, 4, 2)]
        if width <= 128:
            return [Tile(32, 64, 4, 2), Tile(64, 64, 4, 2)]
        chunk = None if whole else 64
        return [Tile(32, 32, 4, 1, chunk), Tile(32, 64, 4, 1, chunk)]
    if name == "list_candidates":
        if not whole:
            return [Tile(64, 32, 4, 3, 64), Tile(64, 64, 4, 2, 64)]
        few = Tile(64, 32, 4, 3, registers=128)
        return [few, replace(few, outer=128, warps=8)] if width <= 128 else [few]
    if name == "sample":
        return [Tile(64, 64, 4, 3 if width <= 128 else 2, None if whole else 64)]
    if not whole and name == "strip":
        return [Tile(64, 64, 4, 3, 64), Tile(128, 128, 4, 3, 64, True), Tile(128, 256, 8, 4, 64, True)]
    if not whole and name == "symmetric":
        return [Tile(64, 64, 4, 3, 64), Tile(128, 128, 4, 3, 64, True)]
    if not whole:
        return [Tile(64, 64, 4, 3, 64), Tile(128, 256, 8, 3, 64, True), Tile(128, 256, 8, 4, 64, True)]
    if name == "gradient":
        if width <= 128:
            return [Tile(64, 64, 4, 2), Tile(64, 128, 4, 2, descriptor=True), Tile(64, 128, 4, 2)]
        return [Tile(64, 64, 4, 2), Tile(64, 64, 4, 2, descriptor=True), Tile(128, 64, 8, 3)]
    if width <= 128:
        wide = Tile(64, 128, 4, 3, descriptor=True)
        return [Tile(64, 64, 4, 3), Tile(128, 64, 4, 3), wide, replace(wide, registers=128)]
    return [Tile(64, 64, 4, 2), Tile(128, 64, 8, 3, descriptor=True), Tile(128, 256, 8, 3, 64, True)]


def options_for(matrix: Tensor, name: str, whole: bool) -> list[Tile]:
    """Tiles that are possible for a matrix."""
    if not matrix.is_cuda:
        return [Tile(32, 32, 4, 1, None if whole else 64)]  # small, so that small tests have several tiles
    return tile_options(name, matrix.shape[1], matrix.element_size(), whole)


def launch(
    program: Any,
    arguments: dict[str, Any],
    rows: int,
    parts: int,
    width: int,
    whole: bool,
    name: str,
    accumulated: tuple[str, ...] = (),
) -> None:
    """Runs a kernel over ``rows`` outer rows and ``parts`` parts of the inner rows, with the best known tile.

    accumulated: tensors that the kernel adds to; measuring uses scratch copies of them
    """
    outer_name, inner_name = ("anchors_", "candidates_") if "anchors_" in arguments else ("outer", "inner")
    matrix, others = arguments[outer_name], arguments[inner_name]
    options = options_for(matrix, name, whole)
    if rows * others.shape[0] < MIN_MEASURED_PAIRS:
        options = options[:1]

    def attempt(tile: Tile, arguments: dict[str, Any] = arguments) -> None:
        chunk = tile.chunk or max(16, 1 << (width - 1).bit_length())
        given = {
            **arguments,
            "OUTER_BLOCK": tile.outer, "INNER_BLOCK": tile.inner, "WIDTH": chunk, "WHOLE": tile.chunk is None,
        }  # fmt: skip
        if "DESCRIPTOR" in getattr(program, "arg_names", ()):
            descriptor = tile.descriptor and width % chunk == 0 and _has_descriptor(matrix) and _has_descriptor(others)
            given["DESCRIPTOR"] = descriptor
            if descriptor:
                given[outer_name] = launching.TensorDescriptor.from_tensor(matrix, [tile.outer, chunk])
                given[inner_name] = launching.TensorDescriptor.from_tensor(others, [tile.inner, chunk])
        halves = 2 if arguments.get("CROSSED", False) else 1  # no block has rows of both halves
        grid = halves * math.ceil(rows / halves / tile.outer), parts
        launching.launch(program, grid, given, tile.warps, tile.stages, tile.registers)

    if len(options) == 1:
        attempt(options[0])
        return
    key = (
        name,
        width,
        matrix.dtype,
        matrix.device,
        # Beyond this size every multiprocessor is busy.
        min(rows.bit_length(), MAX_LOG_SIZE),
        min(len(others).bit_length(), MAX_LOG_SIZE),
        *(value for argument, value in arguments.items() if argument.isupper()),
    )
    if key not in _best and torch.cuda.is_current_stream_capturing():  # measuring is impossible during capture
        attempt(options[0])
        return
    if key not in _best:
        scratch = {which: torch.empty_like(arguments[which]) for which in accumulated if arguments[which] is not None}
        _best[key] = _fastest(partial(attempt, arguments=arguments | scratch), options)
    attempt(_best[key])


def _has_descriptor(matrix: Tensor) -> bool:
    """Whether the copy engine of a GPU (Hopper and later) can load tiles of this matrix."""
    item = matrix.element_size()
    aligned = matrix.data_ptr() % 16 == 0 and matrix.stride(0) * item % 16 == 0
    return item == 2 and aligned and launching.TensorDescriptor is not None and _has_copy_engine(matrix.device)


@lru_cache
def _has_copy_engine(device: torch.device) -> bool:
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


_best: dict[tuple[Any, ...], Tile] = {}


def _fastest(attempt: Callable[[Tile], None], options: list[Tile]) -> Tile:
    """The tile with the shortest time of a launch, of those that can be launched; the first if none can."""
    able = [tile for tile in options if _can_launch(attempt, tile)] or options[:1]
    if len(able) == 1:
        return able[0]
    times: dict[Tile, list[float]] = {tile: [] for tile in able}
    # Interleaved, because the clock drops as the chip heats up.
    while len(times[able[0]]) < ROUNDS and sum(map(sum, times.values())) < MAX_MEASURING_MS:
        for tile in able:
            times[tile].append(_milliseconds(attempt, tile))
    return min(able, key=lambda tile: min(times[tile]))


def _can_launch(attempt: Callable[[Tile], None], tile: Tile) -> bool:
    """Whether the tile fits on the chip and Triton can compile it; if so, the kernel is launched."""
    try:
        attempt(tile)
    except triton.runtime.errors.OutOfResources:
        return False
    except RuntimeError as error:
        if "PassManager" in str(error):  # a bug in Triton, not an error of the GPU
            return False
        raise
    return True


def _milliseconds(attempt: Callable[[Tile], None], tile: Tile) -> float:
    """Time of one launch with this tile."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    attempt(tile)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


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

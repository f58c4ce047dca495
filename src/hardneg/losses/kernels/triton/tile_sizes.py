"""How Triton programs are cut into tiles and stretches: for large problems measured once, else a good guess."""

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
UNIT = 256  # stretches of inner rows are multiples of it, as it is of every tile

# Up to so many pairs another launch, to add what was found apart, takes longer than finding it in one piece.
SMALL = 1 << 19

# Below so many pairs of rows a launch takes longer than the work, and no tile is much better than another.
WORTH_MEASURING = 1 << 26

# So often tiles are measured, unless that takes longer than so many milliseconds.
ROUNDS, LONG_ENOUGH = 8, 1000.0

# Sizes are told apart by powers of two up to this one.
ENOUGH = 17


@dataclass(frozen=True)
class Tile:
    """Outer and inner rows of a tile, warps that share it, tiles in flight.

    chunk: columns taken at a time, None for whole rows · described: does the copy engine read it, where there is one? ·
    registers: of a thread at most, so that more tiles share a multiprocessor
    """

    outer: int
    inner: int
    warps: int
    stages: int
    chunk: int | None = None
    described: bool = False
    registers: int | None = None


@lru_cache
def candidates(name: str, width: int, bytes_each: int, whole: bool) -> list[Tile]:
    """Tiles to try, the one for small problems first; the best of two dozen on an H200."""
    if name == "again":  # what most often has nothing to do cannot be measured
        return candidates("sums", width, bytes_each, whole)[:1]
    if name == "collect":
        return candidates("deal", width, bytes_each, whole)[:1]
    if bytes_each == 4:  # float32 products run beside the tensor cores, where large tiles spill
        if width <= 128 and name == "gradient":
            return [Tile(32, 32, 4, 2), Tile(32, 64, 4, 2)]
        if width <= 128:
            return [Tile(32, 64, 4, 2), Tile(64, 64, 4, 2)]
        chunk = None if whole else 64
        return [Tile(32, 32, 4, 1, chunk), Tile(32, 64, 4, 1, chunk)]
    if name == "deal":
        if not whole:
            return [Tile(64, 32, 4, 3, 64), Tile(64, 64, 4, 2, 64)]
        few = Tile(64, 32, 4, 3, registers=128)
        return [few, replace(few, outer=128, warps=8)] if width <= 128 else [few]
    if name == "sample":
        return [Tile(64, 64, 4, 3 if width <= 128 else 2, None if whole else 64)]
    if not whole and name == "strip":
        return [Tile(64, 64, 4, 3, 64), Tile(128, 128, 4, 3, 64, True), Tile(128, 256, 8, 4, 64, True)]
    if not whole and name == "mirrored":
        return [Tile(64, 64, 4, 3, 64), Tile(128, 128, 4, 3, 64, True)]
    if not whole:
        return [Tile(64, 64, 4, 3, 64), Tile(128, 256, 8, 3, 64, True), Tile(128, 256, 8, 4, 64, True)]
    if name == "gradient":
        if width <= 128:
            return [Tile(64, 64, 4, 2), Tile(64, 128, 4, 2, described=True), Tile(64, 128, 4, 2)]
        return [Tile(64, 64, 4, 2), Tile(64, 64, 4, 2, described=True), Tile(128, 64, 8, 3)]
    if width <= 128:
        wide = Tile(64, 128, 4, 3, described=True)
        return [Tile(64, 64, 4, 3), Tile(128, 64, 4, 3), wide, replace(wide, registers=128)]
    return [Tile(64, 64, 4, 2), Tile(128, 64, 8, 3, described=True), Tile(128, 256, 8, 3, 64, True)]


def options_for(matrix: Tensor, name: str, whole: bool) -> list[Tile]:
    """Tiles that a matrix may be taken in."""
    if not matrix.is_cuda:
        return [Tile(32, 32, 4, 1, None if whole else 64)]  # small ones, so that small tests have several
    return candidates(name, matrix.shape[1], matrix.element_size(), whole)


def launch(
    program: Any,
    arguments: dict[str, Any],
    rows: int,
    parts: int,
    width: int,
    whole: bool,
    name: str,
    added: tuple[str, ...] = (),
) -> None:
    """Run a program over ``rows`` outer rows and ``parts`` stretches of inner rows, in the best tiles known.

    added: tensors that it does not fill but adds to: what is measured must add elsewhere
    """
    outer_name, inner_name = ("anchors_", "candidates_") if "anchors_" in arguments else ("outer", "inner")
    matrix, others = arguments[outer_name], arguments[inner_name]
    options = options_for(matrix, name, whole)
    if rows * others.shape[0] < WORTH_MEASURING:
        options = options[:1]

    def attempt(tile: Tile, arguments: dict[str, Any] = arguments) -> None:
        chunk = tile.chunk or max(16, 1 << (width - 1).bit_length())
        given = {
            **arguments,
            "OUTER_BLOCK": tile.outer, "INNER_BLOCK": tile.inner, "WIDTH": chunk, "WHOLE": tile.chunk is None,
        }  # fmt: skip
        if "DESCRIBED" in getattr(program, "arg_names", ()):
            described = tile.described and width % chunk == 0 and _describable(matrix) and _describable(others)
            given["DESCRIBED"] = described
            if described:
                given[outer_name] = launching.TensorDescriptor.from_tensor(matrix, [tile.outer, chunk])
                given[inner_name] = launching.TensorDescriptor.from_tensor(others, [tile.inner, chunk])
        halves = 2 if arguments.get("CROSSED", False) else 1  # no block has rows of both
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
        # Beyond so many rows every multiprocessor is busy whatever their number.
        min(rows.bit_length(), ENOUGH),
        min(len(others).bit_length(), ENOUGH),
        *(value for argument, value in arguments.items() if argument.isupper()),
    )
    if key not in _best and torch.cuda.is_current_stream_capturing():  # nothing can be measured now
        attempt(options[0])
        return
    if key not in _best:
        spare = {which: torch.empty_like(arguments[which]) for which in added if arguments[which] is not None}
        _best[key] = _fastest(partial(attempt, arguments=arguments | spare), options)
    attempt(_best[key])


def _describable(matrix: Tensor) -> bool:
    """Can the copy engine of a GPU (Hopper's and later) read tiles of this matrix by itself?"""
    item = matrix.element_size()
    aligned = matrix.data_ptr() % 16 == 0 and matrix.stride(0) * item % 16 == 0
    return item == 2 and aligned and launching.TensorDescriptor is not None and _has_copy_engine(matrix.device)


@lru_cache
def _has_copy_engine(device: torch.device) -> bool:
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


_best: dict[tuple[Any, ...], Tile] = {}


def _fastest(attempt: Callable[[Tile], None], options: list[Tile]) -> Tile:
    """The tile in which a launch takes the shortest time, of those that can be launched; the first if none can."""
    able = [tile for tile in options if _runs(attempt, tile)] or options[:1]
    if len(able) == 1:
        return able[0]
    times: dict[Tile, list[float]] = {tile: [] for tile in able}
    # In turns, because a chip is slower the warmer it is.
    while len(times[able[0]]) < ROUNDS and sum(map(sum, times.values())) < LONG_ENOUGH:
        for tile in able:
            times[tile].append(_milliseconds(attempt, tile))
    return min(able, key=lambda tile: min(times[tile]))


def _runs(attempt: Callable[[Tile], None], tile: Tile) -> bool:
    """Does it fit on the chip, and can Triton compile it? If so, it is launched."""
    try:
        attempt(tile)
    except triton.runtime.errors.OutOfResources:
        return False
    except RuntimeError as error:
        if "PassManager" in str(error):  # a fault of Triton's, not of the GPU
            return False
        raise
    return True


def _milliseconds(attempt: Callable[[Tile], None], tile: Tile) -> float:
    """Time of one launch in this tile."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    attempt(tile)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def stretches_of(rows: int, others: int, device: torch.device) -> tuple[int, int]:
    """Into how many stretches inner rows are cut, so that every multiprocessor has programs to run; their length.

    What each stretch finds is kept apart.
    """
    if rows * others <= SMALL:
        return 1, math.ceil(others / UNIT) * UNIT
    blocks, units = math.ceil(rows / BLOCK), math.ceil(others / UNIT)
    wanted = max(1, min(units, programs_wanted(device) // blocks))
    each = math.ceil(units / wanted)
    return math.ceil(units / each), each * UNIT


@lru_cache
def programs_wanted(device: torch.device) -> int:
    """How many programs keep a device busy."""
    if device.type != "cuda":
        return 4
    return 4 * int(torch.cuda.get_device_properties(device).multi_processor_count)

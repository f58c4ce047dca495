"""How Triton programs are cut into tiles: for large problems measured once, for small ones a good guess."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton

BLOCK = 128  # outer rows of an ordinary tile
UNIT = 256  # stretches of inner rows are multiples of it, as it is of every tile

# Below so many pairs of rows a launch takes longer than the work, and no tile is much better than another.
WORTH_MEASURING = 1 << 26

# Sizes are told apart by powers of two up to this one.
ENOUGH = 17

# Whether PyTorch can add a product of half-precision matrices to a float32 one; it can since 2.8.
ADDS_IN_FLOAT32 = hasattr(torch.ops.aten.addmm, "dtype_out")


@dataclass(frozen=True)
class Tile:
    """Outer and inner rows of a tile, warps that share it, tiles in flight."""

    outer: int
    inner: int
    warps: int
    stages: int


def candidates(name: str, width: int, bytes_each: int) -> list[Tile]:
    """Tiles to try, the safest guess first."""
    if bytes_each == 4:  # float32 products run beside the tensor cores, where large tiles spill
        small = [Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)]
        return small if width <= 128 else [Tile(32, 32, 4, 1), Tile(32, 64, 4, 1)]
    if name == "collect":  # much is done with every score: several small tiles at once, while some wait for memory
        return [Tile(64, 32, 4, 3), Tile(128, 32, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)]
    if name == "gradient":
        if width <= 128:
            return [Tile(64, 64, 4, 2), Tile(64, 128, 4, 2), Tile(64, 128, 4, 3)]
        return [Tile(64, 64, 4, 2), Tile(128, 64, 8, 3), Tile(128, 64, 8, 2)]
    if width <= 128:
        return [Tile(64, 64, 4, 3), Tile(128, 64, 4, 3), Tile(64, 128, 4, 3)]
    if width <= 256:
        return [Tile(64, 64, 4, 2), Tile(128, 64, 8, 3), Tile(128, 64, 4, 3)]
    return [Tile(64, 64, 4, 3), Tile(128, 256, 8, 4), Tile(128, 256, 8, 3)]


def launch(
    program: Any, arguments: dict[str, Any], rows: int, parts: int, width: int, whole: bool, name: str
) -> Tile:
    """Run a program over ``rows`` outer rows and ``parts`` stretches of inner rows, in the best tiles known: these."""
    matrix = arguments["anchors_"] if "anchors_" in arguments else arguments["outer"]
    interpreted = not matrix.is_cuda
    chunk = max(16, 1 << (width - 1).bit_length()) if whole else 64
    inner = next(arguments[many] for many in ("candidates", "inner_rows", "anchors") if many in arguments)
    options = candidates(name, width, matrix.element_size())
    if interpreted:
        options = [Tile(32, 32, 4, 1)]  # small ones, so that small tests have several
    elif rows * inner < WORTH_MEASURING:
        options = options[:1]

    def attempt(tile: Tile) -> None:
        program[(math.ceil(rows / tile.outer), parts)](
            **arguments,
            OUTER_BLOCK=tile.outer, INNER_BLOCK=tile.inner, WIDTH=chunk, WHOLE=whole,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    if len(options) == 1:
        attempt(options[0])
        return options[0]
    key = (
        name,
        width,
        matrix.dtype,
        matrix.device,
        # Beyond so many rows every multiprocessor is busy whatever their number.
        min(rows.bit_length(), ENOUGH),
        min(inner.bit_length(), ENOUGH),
        *(value for argument, value in arguments.items() if argument.isupper()),
    )
    if key not in _best:
        _best[key] = min(options, key=lambda tile: _milliseconds(attempt, tile))
    attempt(_best[key])
    return _best[key]


_best: dict[tuple[Any, ...], Tile] = {}


def _milliseconds(attempt: Any, tile: Tile) -> float:
    """Time of one launch in this tile; infinite if it does not fit on the chip."""
    try:
        attempt(tile)
    except triton.runtime.errors.OutOfResources:
        return math.inf
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(2):
        attempt(tile)
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


@lru_cache
def programs_wanted(device: torch.device) -> int:
    """How many programs keep a device busy."""
    if device.type != "cuda":
        return 4
    return 4 * int(torch.cuda.get_device_properties(device).multi_processor_count)

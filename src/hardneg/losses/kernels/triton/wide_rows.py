"""Rows so wide that they do not fit on the chip with their gradient: strips of anchors, in both passes.

Where anchors meet each other, a strip begins at the diagonal, or, if each half meets the other, is of the first half:
what it finds serves whom it meets, too, so that little more than half the scores are made.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hardneg.losses.kernels.triton import backward, tile_sizes
from hardneg.losses.kernels.triton.row_sums import Negatives

# Bytes of a strip of derivatives, beyond three for each number of the rows.
STRIP = 48 << 20

# Most rows of such a strip: what is on the wrong side of the diagonal is for nothing.
TALLEST = 4096

# So many anchors are summed at a time, if there are at least so many times as many: with fewer, products are too small
# a part of the time.
MIRRORED, WORTH_MIRRORING = 4096, 8

# Whether PyTorch can add a product of half-precision matrices to a float32 one; it can since 2.8.
ADDS_IN_FLOAT32 = hasattr(torch.ops.aten.addmm, "dtype_out")


def worth_mirroring(walk: Any) -> bool:
    """Does every anchor meet whom he is met by, and does it pay to make their score once? walk: of anchors alone."""
    question = walk.question
    if walk.whole or not isinstance(question, Negatives) or _taken(walk) < WORTH_MIRRORING * MIRRORED:
        return False
    return question.bounded and question.mirrors and question.eligibility.excluded is None


def _taken(walk: Any) -> int:
    """So many anchors are taken in strips: with all whom these meet, everybody is served."""
    rows: int = walk.anchors.shape[0]
    return rows // 2 if walk.crossed else rows


def mirrored_sums(walk: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What `walks.partial_sums` finds, (slots, A) each, strip by strip: those behind one are met by whom they meet."""
    anchors, rows, taken = walk.anchors, walk.anchors.shape[0], _taken(walk)
    strips = [range(base, min(base + MIRRORED, taken)) for base in range(0, taken, MIRRORED)]
    met = [taken if walk.crossed else rows - strip.start for strip in strips]
    stretches = [
        tile_sizes.stretches_of(len(strip), many, anchors.device) for strip, many in zip(strips, met, strict=True)
    ]
    tiles = tile_sizes.options_for(anchors, "mirrored", walk.whole)
    # A tile is of one strip, and all of its candidates or none of them are behind it.
    assert walk.crossed or all(MIRRORED % tile.outer == MIRRORED % tile.inner == 0 for tile in tiles)
    slots = max(math.ceil(MIRRORED / min(tile.outer for tile in tiles)), *(parts for parts, _ in stretches))
    heavy, light, count = anchors.new_zeros(3, slots, rows, dtype=torch.float32).unbind()
    for strip, (parts, span) in zip(strips, stretches, strict=True):
        walk.sums(heavy, light, count, None, 0, parts, span, strip=strip)
    if walk.question.counts is not None:
        count[0] = walk.question.counts
    return heavy, light, count


def gradient(walk: Any, arguments: dict[str, Any], both: bool, into: Tensor | None, other: Tensor | None) -> Tensor:
    """As `walks.Walk.gradient`: derivatives of scores strip by strip, each followed by products.

    arguments: of `gradients.gradient`, but for where a strip is · both: derivatives serve both whom they belong to
    """
    assert both or not walk.crossed
    mine, others, factor = arguments["outer"], arguments["inner"], arguments["factor_"]
    rows, width = mine.shape
    across = rows // 2 if walk.crossed else 0  # inner rows begin here, if not at the diagonal
    diagonal = both and not walk.crossed
    room = min(STRIP + 3 * rows * width, 1 << 31) // mine.element_size()
    strips = list(strips_of(across or rows, len(others) - across, room, diagonal))
    strip = mine.new_empty(max((end - base) * stride for base, end, stride in strips))
    scale = walk.scale if factor is None else walk.scale / factor
    result = (mine.new_empty(rows, width, dtype=torch.float32) if into is None else into).zero_()
    if other is not None:
        other.zero_()
    opposite = result[across:] if walk.crossed else other  # whom all strips meet
    for base, end, stride in strips:
        skip = base if diagonal else across
        parts, span = tile_sizes.stretches_of(end - base, len(others) - skip, mine.device)
        arguments |= {
            "result": strip, "base": base, "skip": skip, "result_stride": stride, "span": span, "outer_rows": end,
        }  # fmt: skip
        tile_sizes.launch(backward.gradient, arguments, end - base, parts, width, False, "strip")
        weights = strip[: (end - base) * stride].view(-1, stride)[:, : len(others) - skip]  # (R, N − skip)
        with torch.autocast(mine.device.type, enabled=False):
            add_product(result[base:end], weights, others[skip:])
            if opposite is not None:
                add_product(opposite, weights.T, mine[base:end])
            elif both and end < rows:
                add_product(result[end:], weights[:, end - base :].T, mine[base:end])
    if other is not None:
        other.mul_(scale)
    return result.mul_(scale)


def strips_of(rows: int, others: int, room: int, diagonal: bool) -> Iterator[tuple[int, int, int]]:
    """First row, end and stride of strips of derivatives, each of at most so many numbers, if a row is.

    diagonal: a strip begins there, so the later are shorter, and may be taller

    Examples:
        >>> list(strips_of(1024, 1024, 300_000, diagonal=True))
        [(0, 256, 1024), (256, 512, 768), (512, 1024, 512)]
        >>> list(strips_of(300, 1024, 600_000, diagonal=False))
        [(0, 300, 1024)]
    """
    base = 0
    while base < rows:
        # Rows of a strip begin where tensor cores can read them.
        stride = math.ceil((others - base if diagonal else others) / 16) * 16
        height = max(1, room // stride)
        height -= height % tile_sizes.UNIT if height > tile_sizes.UNIT else 0
        height = min(height, TALLEST if diagonal else rows)
        yield base, min(base + height, rows), stride
        base += height


def add_product(result: Tensor, left: Tensor, right: Tensor) -> None:
    """result += left · right in float32, of matrices of any precision."""
    if left.dtype == torch.float32:
        result.addmm_(left, right)
    elif left.is_cuda and ADDS_IN_FLOAT32:
        torch.addmm(result, left, right, out_dtype=torch.float32, out=result)
    else:
        result += left.float() @ right.float()

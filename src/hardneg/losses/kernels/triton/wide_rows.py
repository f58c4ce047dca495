"""Forward and backward passes in strips of anchors, for rows that are too wide for a tile with their gradient.

If anchors and candidates are the same rows, a strip begins at the diagonal (or, if the halves are crossed, covers the
first half), and each score is used for both of its anchors. That computes little more than half of the scores.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hardneg.losses.kernels.triton import backward, tile_sizes
from hardneg.losses.kernels.triton.row_sums import NegativeSums

# Size of a strip of ∂L/∂s, in addition to three bytes per element of the rows.
STRIP_BYTES = 48 << 20

# Maximum number of rows of a strip at the diagonal: the entries on the other side of it are computed but not used.
MAX_STRIP_ROWS = 4096

# Anchors of a strip in the forward pass, and the minimum number of strips: with fewer, products take too small a part
# of the time.
SYMMETRIC_STRIP, MIN_SYMMETRIC_STRIPS = 4096, 8

# Whether PyTorch can add a product of half-precision matrices to a float32 matrix (since 2.8).
ADDS_IN_FLOAT32 = hasattr(torch.ops.aten.addmm, "dtype_out")


def uses_symmetry(block_pass: Any) -> bool:
    """Whether each score is computed once for both of its anchors. block_pass: of the anchors with themselves."""
    spec = block_pass.spec
    if (
        block_pass.whole
        or not isinstance(spec, NegativeSums)
        or _num_strip_rows(block_pass) < MIN_SYMMETRIC_STRIPS * SYMMETRIC_STRIP
    ):
        return False
    return spec.bounded and spec.symmetric and spec.eligibility.excluded is None


def _num_strip_rows(block_pass: Any) -> int:
    """The number of anchors that are covered by strips; the scores of the others are in the columns of these."""
    rows: int = block_pass.anchors.shape[0]
    return rows // 2 if block_pass.crossed else rows


def symmetric_sums(block_pass: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The same as `blocks.partial_sums`, (slots, A) each, in strips; each score is added for both of its anchors."""
    anchors, rows, num_strip_rows = block_pass.anchors, block_pass.anchors.shape[0], _num_strip_rows(block_pass)
    strips = [
        range(base, min(base + SYMMETRIC_STRIP, num_strip_rows)) for base in range(0, num_strip_rows, SYMMETRIC_STRIP)
    ]
    num_candidates = [num_strip_rows if block_pass.crossed else rows - strip.start for strip in strips]
    splits = [
        tile_sizes.split_inner_rows(len(strip), columns, anchors.device)
        for strip, columns in zip(strips, num_candidates, strict=True)
    ]
    tiles = tile_sizes.options_for(anchors, "symmetric", block_pass.whole)
    # A tile belongs to one strip, and all of its candidates or none of them are after the strip.
    assert block_pass.crossed or all(
        SYMMETRIC_STRIP % tile.outer == SYMMETRIC_STRIP % tile.inner == 0 for tile in tiles
    )
    slots = max(math.ceil(SYMMETRIC_STRIP / min(tile.outer for tile in tiles)), *(parts for parts, _ in splits))
    tilted_sum, weight_sum, count = anchors.new_zeros(3, slots, rows, dtype=torch.float32).unbind()
    for strip, (parts, span) in zip(strips, splits, strict=True):
        block_pass.sums(tilted_sum, weight_sum, count, None, 0, parts, span, strip=strip)
    if block_pass.spec.counts is not None:
        count[0] = block_pass.spec.counts
    return tilted_sum, weight_sum, count


def gradient(
    block_pass: Any, arguments: dict[str, Any], both: bool, into: Tensor | None, other: Tensor | None
) -> Tensor:
    """The same as `BlockPass.gradient` for wide rows: ∂L/∂s in strips, each followed by matrix products.

    arguments: of `backward.gradient`, without the position of the strip · both: use ∂L/∂s for both anchors of a pair
    """
    assert both or not block_pass.crossed
    outer_vectors, inner_vectors, factor = arguments["outer"], arguments["inner"], arguments["factor_"]
    rows, width = outer_vectors.shape
    half = rows // 2 if block_pass.crossed else 0  # first inner row, if not at the diagonal
    diagonal = both and not block_pass.crossed
    room = min(STRIP_BYTES + 3 * rows * width, 1 << 31) // outer_vectors.element_size()
    strips = list(strips_of(half or rows, len(inner_vectors) - half, room, diagonal))
    strip = outer_vectors.new_empty(max((end - base) * stride for base, end, stride in strips))
    scale = block_pass.scale if factor is None else block_pass.scale / factor
    result = (outer_vectors.new_empty(rows, width, dtype=torch.float32) if into is None else into).zero_()
    if other is not None:
        other.zero_()
    inner_result = result[half:] if block_pass.crossed else other  # gradient of the inner rows of all strips
    for base, end, stride in strips:
        skip = base if diagonal else half
        parts, span = tile_sizes.split_inner_rows(end - base, len(inner_vectors) - skip, outer_vectors.device)
        arguments |= {
            "result": strip, "base": base, "skip": skip, "result_stride": stride, "span": span, "outer_rows": end,
        }  # fmt: skip
        tile_sizes.launch(backward.gradient, arguments, end - base, parts, width, False, "strip")
        weights = strip[: (end - base) * stride].view(-1, stride)[:, : len(inner_vectors) - skip]  # (R, N − skip)
        with torch.autocast(outer_vectors.device.type, enabled=False):
            add_product(result[base:end], weights, inner_vectors[skip:])
            if inner_result is not None:
                add_product(inner_result, weights.T, outer_vectors[base:end])
            elif both and end < rows:
                add_product(result[end:], weights[:, end - base :].T, outer_vectors[base:end])
    if other is not None:
        other.mul_(scale)
    return result.mul_(scale)


def strips_of(rows: int, columns: int, room: int, diagonal: bool) -> Iterator[tuple[int, int, int]]:
    """First row, end and stride of strips of ∂L/∂s, each of at most ``room`` elements or of a single row.

    diagonal: a strip begins at the diagonal, so later ones are narrower and may have more rows

    Examples:
        >>> list(strips_of(1024, 1024, 300_000, diagonal=True))
        [(0, 256, 1024), (256, 512, 768), (512, 1024, 512)]
        >>> list(strips_of(300, 1024, 600_000, diagonal=False))
        [(0, 300, 1024)]
    """
    base = 0
    while base < rows:
        # Rows of a strip are aligned for tensor cores.
        stride = math.ceil((columns - base if diagonal else columns) / 16) * 16
        height = max(1, room // stride)
        height -= height % tile_sizes.PART_MULTIPLE if height > tile_sizes.PART_MULTIPLE else 0
        height = min(height, MAX_STRIP_ROWS if diagonal else rows)
        yield base, min(base + height, rows), stride
        base += height


def add_product(result: Tensor, left: Tensor, right: Tensor) -> None:
    """result += left · right in float32, for matrices of any precision."""
    if left.dtype == torch.float32:
        result.addmm_(left, right)
    elif left.is_cuda and ADDS_IN_FLOAT32:
        torch.addmm(result, left, right, out_dtype=torch.float32, out=result)
    else:
        result += left.float() @ right.float()

"""Matrix products in blocks of rows, and in full precision under any training settings."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

WITHOUT_FLOAT64 = {"mps"}  # device types without float64
# Elements of the largest temporary (128 MiB in float32): enough to use all of an accelerator.
TILE = 1 << 25


def row_blocks(rows: int, columns: int, size: int | None = None) -> list[slice]:
    """Blocks of ``size`` rows, or by default of as many rows as fit into a tile with these columns.

    Examples:
        >>> row_blocks(5, 10, 3)
        [slice(0, 3, None), slice(3, 6, None)]
    """
    size = size or max(1, TILE // columns)
    return [slice(start, start + size) for start in range(0, rows, size)]


def precise_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device that has no float64."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def where_precise(tensor: Tensor) -> Tensor:
    """The tensor on its device, or on the host if its device has no float64."""
    return tensor.cpu() if tensor.device.type in WITHOUT_FLOAT64 else tensor


def largest_columns(scores: Tensor, k: int) -> Tensor:
    """Columns of the k largest scores of each row (R, N), in any order; of equal scores, the first columns.

    Examples:
        >>> largest_columns(torch.tensor([[0.1, 0.7, 0.3, 0.7]]), 1)
        tensor([[1]])
    """
    if k == scores.shape[1]:
        return torch.arange(k, device=scores.device).expand(len(scores), k)
    largest, columns = _largest(scores, k + 1)
    columns = columns[:, :k].contiguous()
    # The order of topk among equal values is undefined. It matters only if the k-th and the next value are equal.
    tied_rows = (largest[:, k - 1] == largest[:, k]).nonzero()[:, 0]
    if len(tied_rows):
        scores, bound = scores[tied_rows], largest[tied_rows, k - 1, None]
        inside, tied = ~(scores <= bound), scores == bound  # NaN is above all numbers, as in topk
        free = k - inside.sum(dim=1, keepdim=True)
        inside |= tied & (tied.cumsum(dim=1, dtype=torch.int32) <= free)
        columns[tied_rows] = inside.nonzero()[:, 1].view(-1, k)
    return columns


def _largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As ``topk`` along rows (R, N), faster for N ≫ k.

    The k largest scores are in the k groups of columns with the largest maxima, and maxima are faster than a selection.
    """
    size = math.isqrt(scores.shape[1] // k)  # of a group: the number of groups is about that of the columns left
    if size < 4:
        return scores.topk(k, dim=1)
    count = scores.shape[1] // size
    whole = count * size
    maxima = scores[:, :whole].view(len(scores), size, count).amax(dim=1)  # (R, G); group g: columns g, g + G, …
    groups = maxima.topk(k, dim=1, sorted=False).indices
    every = torch.arange(scores.shape[1], device=scores.device)
    columns = (groups[:, :, None] + every[:whole:count]).flatten(1)
    columns = torch.cat([columns, every[whole:].expand(len(scores), -1)], dim=1)
    largest, places = scores.gather(1, columns).topk(k, dim=1)
    return largest, columns.gather(1, places)


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Disable gradients, autocast and TF32: float32 matrix products are computed in float32."""
    matmul = torch.backends.cuda.matmul if device.type == "cuda" else getattr(torch.backends.mkldnn, "matmul", None)
    # PyTorch 2.9 renamed the setting, and reading the old one raises an error once the new one was set.
    setting, exact = ("fp32_precision", "ieee") if hasattr(matmul, "fp32_precision") else ("allow_tf32", False)
    before = getattr(matmul, setting, None)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        if before is not None:
            setattr(matmul, setting, exact)
        try:
            yield
        finally:
            if before is not None:
                setattr(matmul, setting, before)

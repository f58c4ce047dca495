"""Matrix products: by the faster library of a CPU, in blocks of rows, and in full precision under any settings."""

import math
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

WITHOUT_FLOAT64 = {"mps"}  # device types without float64
# Elements of the largest temporary (128 MiB in float32): enough to use all of an accelerator.
TILE = 1 << 25

ONEDNN_PRODUCTS = (
    1 << 22
)  # multiplications from which a call of oneDNN is faster than one of MKL (`benchmarks/products.py`)


def multiply(
    left: Tensor, right: Tensor, out: Tensor, factor: float = 1.0, *, add: bool = False, any_size: bool = False
) -> None:
    """Write ``factor · left @ right.T`` to ``out``, or add it. left: (R, d) · right: (N, d) · out: (R, N)

    Without gradient, in the precision that PyTorch is set to. ``out`` has the same dtype and shares no memory with the
    others.

    any_size: whether the same library computes products of all sizes, so that equal rows have equal products; for
    callers whose sizes seldom change, because oneDNN keeps a routine of about 0.4 MiB for each

    Examples:
        >>> out = torch.ones(1, 2)
        >>> multiply(torch.tensor([[1.0, 2.0]]), torch.eye(2), out, 0.5, add=True)
        >>> out
        tensor([[1.5000, 2.0000]])
    """
    if torch.compiler.is_compiling():
        # Graphs refuse out= for a part of a matrix, and with out= inductor (2.13) gave wrong gradients for two blocks.
        found = left @ right.t()
        out.copy_(torch.add(out, found, alpha=factor) if add else found * factor)
        return
    if not (_onednn_is_faster_for(left) and (any_size or _suits_onednn(len(left), left.shape[1], len(right)))):
        torch.addmm(out, left, right.t(), beta=1 if add else 0, alpha=factor, out=out)
        return
    found = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    if add:
        out.add_(found, alpha=factor)
    else:
        torch.mul(found, factor, out=out)


def _onednn_is_faster_for(rows: Tensor) -> bool:
    if rows.device.type != "cpu" or rows.dtype != torch.float32:
        return False
    return bool(torch.backends.mkldnn.enabled) and _onednn_is_faster()


def _suits_onednn(rows: int, dim: int, columns: int) -> bool:
    """Whether a product is large enough, and its sizes have at most five significant bits.

    oneDNN compiles a routine for each size. There are few such sizes, so batches or queues of changing size neither
    wait for the compiler nor fill the memory. It depends on the sizes alone, so that a resumed run has the same bits.
    """
    return rows * dim * columns >= ONEDNN_PRODUCTS and all(
        size & -size >= 1 << (size.bit_length() - 5) for size in (rows, dim, columns) if size >= 1 << 5
    )


@cache
def _onednn_is_faster() -> bool:
    """Whether this is a processor of AMD with AVX-512, and PyTorch has both libraries.

    PyTorch multiplies by MKL, except in the operator for linear layers of compiled models. On two cores of a Zen 5
    oneDNN is faster (`benchmarks/products.py`).
    """
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if not has_mkl or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    cpu = Path("/proc/cpuinfo")
    vendor = cpu.read_text(encoding="utf-8") if cpu.exists() else platform.processor()
    return "AuthenticAMD" in vendor and hasattr(torch.ops.mkldnn, "_linear_pointwise")


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

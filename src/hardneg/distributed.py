"""Gathering across processes with exact gradients.

Every process computes the scores of its own anchors with the candidates of all processes. The gradient of a gathered
tensor is summed over the processes, and each process gets that of its own rows. `torch.distributed.nn` does the same
for equal shapes; this version also takes batches of different sizes.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hardneg import randomness


def world_size() -> int:
    """Number of processes; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Rank of this process; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def supports(device: torch.device) -> bool:
    """True if the process group can communicate tensors on this device; NCCL alone cannot on the CPU."""
    return f"{device.type}:" in dist.get_backend_config()


def batch_sizes(rows: int, device: torch.device) -> list[int]:
    """Rows of the batch on every process, in order of rank."""
    sizes = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(world_size())]
    dist.all_gather(sizes, torch.tensor([rows], device=device))
    return [int(size) for size in sizes]


def gather(rows: Tensor, sizes: list[int]) -> Tensor:
    """The rows of all processes, in order of rank; differentiable.

    rows: (sizes[rank], …) · sizes: from `batch_sizes` · returns (sum(sizes), …)
    """
    result: Tensor = _Gather.apply(rows, sizes)  # type: ignore[no-untyped-call]
    return result


@torch.no_grad()
def identical(*tensors: Tensor | None) -> bool:
    """True if every process holds the same tensors, bit for bit; up to collisions of 62-bit hashes.

    Only the hashes are communicated. None takes part as an empty tensor.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    shapes = torch.tensor([size for tensor in given for size in (-1, *tensor.shape)], device=given[0].device)
    prints = torch.stack([_hash(tensor) for tensor in (shapes, *given)])
    code = _hash(prints)[None]
    codes = [torch.empty_like(code) for _ in range(world_size())]
    dist.all_gather(codes, code)
    return bool((torch.cat(codes) == code).all())


def total(tensor: Tensor) -> Tensor:
    """The sum over all processes; no gradient."""
    result = tensor.detach().clone()
    dist.all_reduce(result)
    return result


def total_loss(part: Tensor) -> Tensor:
    """The sum over all processes of their parts of a loss, whose gradients DDP's average over processes makes exact."""
    share = world_size() * part
    return share + (total(part) - share).detach()


def maximum(tensor: Tensor) -> Tensor:
    """The maximum over all processes; no gradient."""
    result = tensor.detach().clone()
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    return result


def _hash(tensor: Tensor) -> Tensor:
    """A 62-bit hash of the bits of a tensor, ()."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    table = tensor.detach().contiguous().view(integer)
    table = table[:, None] if table.dim() == 1 else table.flatten(1)  # (N, d)
    key = torch.zeros(2, dtype=torch.long, device=tensor.device)
    rows, columns = (torch.arange(size, device=tensor.device) for size in table.shape)
    factors = randomness.integers(key, columns, 1)[:, 0] | 1  # (d,)
    # Products wrap around. Row by row the sums are mixed with the row's number, so that the order matters too.
    sums = [(part.long() * factors).sum(dim=1) for part in torch.split(table, 4096)]
    mixed = randomness.integers(key, torch.cat(sums) ^ (rows << 32), 1) if sums else key[:1]
    return mixed.sum()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int]) -> Tensor:
        ctx.sizes = sizes
        height = max(sizes)
        padded = rows.new_zeros(height, *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Scatter.apply(grad, ctx.sizes), None  # type: ignore[no-untyped-call]


class _Scatter(torch.autograd.Function):
    """The transpose of `_Gather`: each process gets its own rows of the sum over all processes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int]) -> Tensor:
        ctx.sizes = sizes
        rows = rows.contiguous().clone()
        dist.all_reduce(rows)
        start = sum(sizes[: dist.get_rank()])
        return rows[start : start + sizes[dist.get_rank()]].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gather(grad, ctx.sizes), None

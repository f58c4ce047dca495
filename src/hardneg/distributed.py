"""Gathering across processes with exact gradients.

Every process computes the scores of its own anchors with the candidates of all processes. The gradient of a gathered
tensor is summed over the processes, and each process gets that of its own rows. `torch.distributed.nn` does the same
for equal shapes; this version also takes batches of different sizes.

Each function takes the process group whose processes take part; None is the default group, of all processes.
"""

from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from hardneg import checks, randomness

# A string, because a torch built without distributed has no ProcessGroup.
Group: TypeAlias = "dist.ProcessGroup | None"
Gather: TypeAlias = "bool | dist.ProcessGroup"  # the argument of losses: all processes, none, or those of a group

# Backends whose reduce_scatter is missing or, in gloo, an all_reduce of the whole tensor.
_WITHOUT_REDUCE_SCATTER = ("gloo", "mpi")


def checked(name: str, given: object) -> Gather:
    """Raise unless ``given`` is True, False or a process group that this process belongs to; return it."""
    if dist.is_available():
        if given is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"{name}: this process is not in the group; create the loss in the group's processes only")
        if isinstance(given, dist.ProcessGroup):
            return given
    try:
        return checks.boolean(name, given)
    except ValueError as error:
        raise ValueError(f"{name} must be True, False or a torch.distributed.ProcessGroup, got {given!r}") from error


def group_of(gather: Gather) -> Group:
    """The process group of the setting ``gather``; None, the default group, for True and False."""
    return None if isinstance(gather, bool) else gather


def gathers(gather: Gather) -> bool:
    """True if the setting ``gather`` makes several processes exchange rows."""
    if isinstance(gather, bool):
        return gather and world_size() > 1
    if not dist.is_initialized():
        raise RuntimeError("gather holds a process group, but torch.distributed is not initialized: assign another one")
    return world_size(gather) > 1


def world_size(group: Group = None) -> int:
    """Number of processes; 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def rank(group: Group = None) -> int:
    """Rank of this process within the group; 0 without torch.distributed."""
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def supports(device: torch.device) -> bool:
    """True if the process group can communicate tensors on this device; NCCL alone cannot on the CPU."""
    return f"{device.type}:" in dist.get_backend_config()


def batch_sizes(rows: int, device: torch.device, group: Group = None) -> list[int]:
    """Rows of the batch on every process, in order of rank."""
    sizes = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(world_size(group))]
    dist.all_gather(sizes, torch.tensor([rows], device=device), group=group)
    found: list[int] = torch.cat(sizes).tolist()
    return found


def gather(rows: Tensor, sizes: list[int], group: Group = None) -> Tensor:
    """The rows of all processes, in order of rank; differentiable any number of times.

    rows: (sizes[rank], …) · sizes: from `batch_sizes` · returns (sum(sizes), …)
    """
    result: Tensor = _Gather.apply(rows, sizes, group)  # type: ignore[no-untyped-call]
    return result


@torch.no_grad()
def gathered(rows: Tensor, sizes: list[int], group: Group = None) -> Tensor:
    """As `gather`, without a gradient."""
    result: Tensor = _Gather.apply(rows, sizes, group)  # type: ignore[no-untyped-call]
    return result


@torch.no_grad()
def scattered(rows: Tensor, sizes: list[int], group: Group = None) -> Tensor:
    """This process's rows of the sum over all processes: the gradient of `gather`, without a gradient of its own.

    rows: (sum(sizes), …) · returns (sizes[rank], …)
    """
    result: Tensor = _Scatter.apply(rows, sizes, group)  # type: ignore[no-untyped-call]
    return result


@torch.no_grad()
def identical(*tensors: Tensor | None, group: Group = None) -> bool:
    """True if every process holds the same tensors, bit for bit; up to collisions of 62-bit hashes.

    Only the hashes are communicated. None takes part as an empty tensor.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    shapes = torch.tensor([size for tensor in given for size in (-1, *tensor.shape)], device=given[0].device)
    prints = torch.stack([_hash(tensor) for tensor in (shapes, *given)])
    code = _hash(prints)[None]
    codes = [torch.empty_like(code) for _ in range(world_size(group))]
    dist.all_gather(codes, code, group=group)
    return bool((torch.cat(codes) == code).all())


def total(tensor: Tensor, group: Group = None) -> Tensor:
    """The sum over all processes; no gradient."""
    result = tensor.detach().clone()
    dist.all_reduce(result, group=group)
    return result


def total_loss(part: Tensor, group: Group = None) -> Tensor:
    """The sum over all processes of their parts of a loss, whose gradients DDP's average over processes makes exact."""
    share = world_size(group) * part
    return share + (total(part, group) - share).detach()


def with_averaged_gradient(tensor: Tensor, group: Group = None) -> Tensor:
    """The same tensor, whose gradient is averaged over all processes, as DDP averages those of its own parameters."""
    result: Tensor = _AveragedGradient.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result


def maximum(tensor: Tensor, group: Group = None) -> Tensor:
    """The maximum over all processes; no gradient."""
    result = tensor.detach().clone()
    dist.all_reduce(result, op=dist.ReduceOp.MAX, group=group)
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
    def forward(ctx: Any, rows: Tensor, sizes: list[int], group: Group) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        padded = _padded(rows, max(sizes))
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Scatter.apply(grad, ctx.sizes, ctx.group), None, None  # type: ignore[no-untyped-call]


class _Scatter(torch.autograd.Function):
    """The transpose of `_Gather`: each process gets its own rows of the sum over all processes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], group: Group) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        if _backend(rows.device, group) in _WITHOUT_REDUCE_SCATTER:
            return _sum_of_received(rows.contiguous(), sizes, group)
        height = max(sizes)
        padded = torch.cat([_padded(part, height) for part in torch.split(rows, sizes)])
        found = rows.new_empty(height, *rows.shape[1:])
        # Since torch 2.13 under another name; the old one warns.
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        reduce_scatter(found, padded, group=group)
        return found[: sizes[rank(group)]]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather(grad, ctx.sizes, ctx.group), None, None


class _AveragedGradient(torch.autograd.Function):
    """The identity; its backward pass is the average over all processes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Average.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]


class _Average(torch.autograd.Function):
    """The average over all processes, which is its own transpose."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return total(tensor, group) / world_size(group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Average.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]


def _sum_of_received(rows: Tensor, sizes: list[int], group: Group) -> Tensor:
    """As a reduce-scatter, which sends as many bytes: each process sends the others their rows and sums its own.

    rows: (sum(sizes), …), contiguous · returns (sizes[rank], …)
    """
    own = sizes[rank(group)]
    received = rows.new_empty(len(sizes) * own, *rows.shape[1:])
    dist.all_to_all_single(received, rows, [own] * len(sizes), sizes, group=group)
    return received.view(len(sizes), own, *rows.shape[1:]).sum(dim=0)


def _padded(rows: Tensor, height: int) -> Tensor:
    """Contiguous rows, followed by rows of zeros up to the height."""
    if len(rows) == height:
        return rows.contiguous()
    padded = rows.new_zeros(height, *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded


def _backend(device: torch.device, group: Group) -> str:
    """Name of the backend that communicates tensors on this device, such as ``"nccl"``."""
    for entry in dist.get_backend_config(group).split(","):  # "cpu:gloo,cuda:nccl"
        kind, _, backend = entry.partition(":")
        if kind == device.type and backend:
            return backend
    return dist.get_backend(group)

"""A memory bank: the embedding of every instance of the data as it was last seen (IR, CMC, LA; METHODS, section 3)."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from hardneg import checks, distributed
from hardneg.checks import whole
from hardneg.losses.inputs import normalized
from hardneg.matmul import row_blocks
from hardneg.randomness import generator


class MemoryBank(checks.Fixed, nn.Module):
    """One unit vector per instance, moved towards its newest embedding: row = normalize(m·row + (1−m)·z).

    Look up the positives and call the loss, run backward, then update: in between, autograd refuses the backward pass,
    because rows are overwritten in place. Lookup and update cost O(batch), however large the bank.

    An instance that occurs several times in one batch moves once, towards its last occurrence (of the last process
    that has it, with ``gather``), on every device. A row that would become zero stays as it was.

    Under DDP pass ``gather=True``, and ``broadcast_buffers=False`` to DDP: the banks are equal without it, and rows on
    the host cannot be broadcast between GPUs.

    Args:
        size: number of instances, N
        dim: length of a row, d
        momentum: m, in [0, 1]; 0 replaces rows (Ring), 0.5 is IR, LA and CMC
        dtype: in which rows are stored; arithmetic is in float32 at least
        on_host: rows stay in the host's memory wherever the module is moved, pinned if there is a CUDA device;
            lookups come to the device of the indices, and negatives must be looked up, ``bank[drawn]``
        gather: update with the batches of all processes, in order of rank, so that every process has the same bank
        seed: of the random unit vectors that rows start as

    Examples:
        >>> import hardneg as hn
        >>> bank = MemoryBank(size=100, dim=16)
        >>> idx, z = torch.tensor([3, 14, 15]), torch.randn(3, 16)
        >>> loss = hn.instance_discrimination()(z, bank[idx], negatives=bank.rows, exclude=idx)
        >>> bank.update(idx, z)
    """

    def __init__(
        self,
        size: int,
        dim: int,
        momentum: float = 0.5,
        dtype: torch.dtype = torch.float32,
        on_host: bool = False,
        gather: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        whole("size", size)
        whole("dim", dim)
        if not isinstance(momentum, int | float):
            raise ValueError(f"momentum must be a number in [0, 1], got {momentum!r}")
        checks.number("momentum", momentum, at_least=0, at_most=1)
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be floating, got {dtype}: use torch.float32 or torch.float16")
        self.size, self.dim, self.momentum = size, dim, float(momentum)
        self.on_host, self.gather = on_host, gather
        rows = torch.empty(size, dim, dtype=dtype, pin_memory=on_host and torch.cuda.is_available())
        # In blocks of a fixed height, so that rows do not depend on how much fits into memory.
        for block in row_blocks(size, dim, 1 << 16):
            drawn = torch.randn(rows[block].shape, generator=generator("cpu", seed, block.start))
            rows[block] = normalized(drawn.to(torch.promote_types(torch.float32, dtype)))
        self.rows: Tensor
        self.register_buffer("rows", rows)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: Tensor) -> Tensor:
        """Copies of the rows of these instances.

        idx: integers of any shape · returns (*idx.shape, d), in the stored dtype and on the device of the indices, or
        of the rows if the indices are on the host
        """
        idx = self._indices(idx)
        found = self.rows[idx.to(self.rows.device)]
        return found.to(idx.device) if self.rows.device.type == "cpu" else found

    @torch.no_grad()
    def update(self, idx: Tensor, z: Tensor) -> None:
        """Move the rows of these instances towards their new embeddings.

        idx: (B,) integers · z: (B, d), of any length
        """
        checks.floating("z", z)
        if z.dim() != 2 or z.shape[1] != self.dim:
            raise ValueError(f"z must have shape (B, {self.dim}), got {tuple(z.shape)}")
        idx = self._indices(idx).to(z.device)
        checks.integers("idx", idx, (len(z),), "one per row of z")
        checks.finite("z", z)
        if self.gather and distributed.world_size() > 1:
            sizes = distributed.batch_sizes(len(z), z.device)
            idx, z = distributed.gather(idx, sizes), distributed.gather(z.detach(), sizes)
        if len(z) == 0:
            return
        # Equal indices all write the value of the last one: then the order of writing, which is free, does not matter.
        z = z[_last_of_equals(idx)].to(self.rows.device)
        idx = idx.to(self.rows.device)
        precise = torch.promote_types(torch.float32, torch.promote_types(z.dtype, self.rows.dtype))
        before = self.rows[idx].to(precise)  # (B, d)
        moved = normalized(self.momentum * before + (1 - self.momentum) * normalized(z.to(precise)))
        vanished = (moved == 0).all(dim=1, keepdim=True)  # (B, 1)
        self.rows[idx] = torch.where(vanished, before, moved).to(self.rows.dtype)

    def extra_repr(self) -> str:
        return (
            f"size={self.size}, dim={self.dim}, momentum={self.momentum:g}, dtype={self.rows.dtype}, "
            f"on_host={self.on_host}, gather={self.gather}"
        )

    def _indices(self, idx: Tensor) -> Tensor:
        shape = tuple(idx.shape) if isinstance(idx, Tensor) else ()
        idx = checks.integers("idx", idx, shape, "instances")
        checks.in_range("idx", idx, self.size)
        return idx

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if not self.on_host:  # the rows are all there is to move
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        stored = state_dict.get(f"{prefix}rows")
        if stored is not None and tuple(stored.shape) != (self.size, self.dim):
            size, dim = stored.shape
            errors: list[str] = rest[-1]
            errors.append(
                f"the state of {prefix.rstrip('.') or 'the bank'} holds size={size}, dim={dim}, but this bank has "
                f"size={self.size}, dim={self.dim}: build it with MemoryBank(size={size}, dim={dim})"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _last_of_equals(idx: Tensor) -> Tensor:
    """For each index the position of the last one equal to it, (B,), without waiting for the device.

    Examples:
        >>> _last_of_equals(torch.tensor([5, 2, 5, 9])).tolist()
        [2, 1, 2, 3]
    """
    ordered, order = idx.sort(stable=True)
    return order[torch.searchsorted(ordered, idx, right=True) - 1]

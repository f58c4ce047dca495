"""A memory bank: one embedding per instance, averaged over its occurrences (IR, CMC, LA; METHODS, section 3)."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from hardneg import checks, distributed
from hardneg.checks import TensorLike, as_tensor, whole
from hardneg.losses.inputs import normalized
from hardneg.losses.schedules import Schedule
from hardneg.losses.sources import Memory
from hardneg.matmul import row_blocks
from hardneg.memory.module import MemoryModule, checked_dtype, size_mismatch
from hardneg.randomness import generator


class MemoryBank(checks.Fixed, MemoryModule, Memory):
    """One unit vector per instance, an average of its embeddings: row = normalize(m·row + (1−m)·z).

    Look up the positives and call the loss, run backward, then update. After an update between loss and backward, the
    backward pass raises an error, because rows are overwritten in place. Lookup and update cost O(batch).

    An instance that occurs several times in a batch is updated once, with its last occurrence (of the last process
    that has it, with ``gather``), on every device. A row that would become zero is not changed.

    Under DDP pass ``gather=True``. An averaged copy of a model (EMA, SWA) keeps the bank it was copied with.

    Args:
        size: number of instances, N
        dim: length of a row, d
        momentum: m, in [0, 1]; 0 replaces rows (Ring), 0.5 is IR, LA and CMC
        dtype: of the stored rows; arithmetic is in float32 at least
        on_host: rows stay in host memory when the module is moved, pinned if there is a CUDA device; lookups are copied
            to the device of the indices, and negatives must be looked up, ``bank[drawn]``
        gather: update with the batches of all processes, in order of rank, so that every process has the same bank
        seed: of the random unit vectors that rows are initialized with

    Examples:
        >>> import hardneg as hn
        >>> bank = MemoryBank(size=100, dim=16)
        >>> idx, z = torch.tensor([3, 14, 15]), torch.randn(3, 16)
        >>> loss = hn.instance_discrimination()(z, bank[idx], negatives=bank, exclude=idx)
        >>> bank.update(idx, z)
    """

    tensors = ("rows",)

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
        self.size, self.dim = whole("size", size), whole("dim", dim)
        checked = checks.number("momentum", momentum, at_least=0, at_most=1)
        if isinstance(checked, Schedule):
            raise ValueError(f"momentum must be a number in [0, 1], got {momentum!r}")
        checked_dtype(dtype)
        self.momentum, self.on_host, self.gather = float(checked), on_host, gather
        self.rows = torch.empty(self.size, self.dim, dtype=dtype, pin_memory=on_host and torch.cuda.is_available())
        # In blocks of a fixed height, so that the rows do not depend on the tile size.
        for block in row_blocks(self.size, self.dim, 1 << 16):
            drawn = torch.randn(self.rows[block].shape, generator=generator("cpu", seed, block.start))
            self.rows[block] = normalized(drawn.to(torch.promote_types(torch.float32, dtype)))

    def candidates(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The rows, which ``negatives=bank`` passes to a loss."""
        return self.rows, None, None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: TensorLike) -> Tensor:
        """Copies of the rows of these instances.

        idx: integers of any shape · returns (*idx.shape, d), in the stored dtype and on the device of the indices, or
        of the rows if the indices are on the host. If an index on an accelerator is out of range, all are NaN
        """
        idx = self._integers(idx)
        device = idx.device
        idx, validity = self._in_range(idx)
        found = checks.poisoned(self.rows[idx], validity)
        return found.to(device) if self.rows.device.type == "cpu" else found

    @torch.no_grad()
    def update(self, idx: TensorLike, z: TensorLike) -> None:
        """Average the rows of these instances with their new embeddings.

        idx: (B,) integers · z: (B, d), of any norm

        On an accelerator NaN and inf in z make their rows NaN, and an index out of range prevents the whole update.
        """
        z = checks.floating("z", as_tensor("z", z))
        if z.dim() != 2 or z.shape[1] != self.dim:
            raise ValueError(f"z must have shape (B, {self.dim}), got {tuple(z.shape)}")
        idx = self._integers(idx)
        checks.integers("idx", idx, (len(z),), "one per row of z")
        if not checks.on_accelerator(idx.device):
            checks.in_range("idx", idx, self.size)
        if not checks.on_accelerator(z.device):
            checks.finite("z", z)
        idx = idx.to(z.device)
        if self.gather and distributed.world_size() > 1:
            sizes = distributed.batch_sizes(len(z), z.device)
            idx, z = distributed.gather(idx, sizes), distributed.gather(z.detach(), sizes)
        if len(z) == 0:
            return
        # Checked after gathering, so that all processes make the same update.
        idx, validity = self._in_range(idx)
        # Equal indices all write the value of the last one, because the order of writes is undefined.
        z = z.to(self.rows.device)[_last_occurrence(idx)]
        precise = torch.promote_types(torch.float32, torch.promote_types(z.dtype, self.rows.dtype))
        before = self.rows[idx].to(precise)  # (B, d)
        averaged = normalized(self.momentum * before + (1 - self.momentum) * normalized(z.to(precise)))
        is_zero = (averaged == 0).all(dim=1, keepdim=True)  # (B, 1)
        unchanged = is_zero if validity is None else is_zero | validity.isnan()
        self.rows[idx] = torch.where(unchanged, before, averaged).to(self.rows.dtype)

    def extra_repr(self) -> str:
        return (
            f"size={self.size}, dim={self.dim}, momentum={self.momentum:g}, dtype={self.rows.dtype}, "
            f"on_host={self.on_host}, gather={self.gather}"
        )

    @staticmethod
    def _integers(idx: TensorLike) -> Tensor:
        idx = as_tensor("idx", idx)
        return checks.integers("idx", idx, tuple(idx.shape), "instances")

    def _in_range(self, idx: Tensor) -> tuple[Tensor, Tensor | None]:
        """Indices on the device of the rows, safe to use, and their validity; see `checks.in_range`."""
        if not checks.on_accelerator(idx.device):
            checks.in_range("idx", idx, self.size)
            return idx.to(self.rows.device), None
        return checks.in_range("idx", idx.to(self.rows.device), self.size)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return self if self.on_host else super()._apply(fn, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        mismatch = size_mismatch("bank", state_dict.get(f"{prefix}rows"), self.size, self.dim, prefix)
        if mismatch is not None:
            rest[-1].append(mismatch)
        else:
            super()._load_from_state_dict(state_dict, prefix, *rest)


def _last_occurrence(idx: Tensor) -> Tensor:
    """For each index the position of the last one equal to it, (B,), without synchronizing with the device.

    Examples:
        >>> _last_occurrence(torch.tensor([5, 2, 5, 9])).tolist()
        [2, 1, 2, 3]
    """
    ordered, order = idx.sort(stable=True)
    return order[torch.searchsorted(ordered, idx, right=True) - 1]

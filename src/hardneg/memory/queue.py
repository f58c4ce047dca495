"""A first-in, first-out queue of keys (MoCo; METHODS, section 3)."""

from typing import Any

import torch
from torch import Tensor

from hardneg import checks, distributed
from hardneg.checks import TensorLike, as_tensor, whole
from hardneg.losses.inputs import normalized
from hardneg.losses.sources import Memory
from hardneg.memory.module import MemoryModule, checked_dtype, size_mismatch


class Queue(checks.Fixed, MemoryModule, Memory):
    """The last ``size`` keys (K of MoCo), each with a label and an instance id.

    Losses take it as ``negatives``. Enqueue after the backward pass: before the loss, a positive would become its own
    negative; between loss and backward, the backward pass raises an error, because keys are overwritten in place.

    Under DDP pass ``gather=True``. An averaged copy of a model (EMA, SWA) keeps the queue it was copied with.

    Args:
        size: number of keys; a batch need not divide it, and may be larger
        dim: length of a key, d
        dtype: of the stored keys; losses convert them to float32 at least
        gather: enqueue the keys of all processes, in order of rank, so that every process has the same queue

    Examples:
        >>> import hardneg as hn
        >>> queue = Queue(size=4, dim=2)
        >>> queue.enqueue(torch.eye(2), ids=torch.tensor([7, 8]))
        >>> queue.keys.shape, queue.labels.tolist(), queue.ids.tolist()
        (torch.Size([2, 2]), [-1, -1], [7, 8])
        >>> queries, keys, ids = torch.randn(3, 2), torch.randn(3, 2), torch.tensor([8, 9, 10])
        >>> others = ~queue.same_instance(ids)
        >>> hn.moco()(queries, keys, negatives=queue, negative_mask=others).shape
        torch.Size([])
    """

    tensors = ("key_store", "label_store", "id_store")

    def __init__(self, size: int, dim: int, dtype: torch.dtype = torch.float32, gather: bool = False) -> None:
        super().__init__()
        self.size, self.dim, self.gather = whole("size", size), whole("dim", dim), gather
        self.key_store = torch.zeros(self.size, self.dim, dtype=checked_dtype(dtype))
        self.label_store = torch.full((self.size,), -1)
        self.id_store = torch.full((self.size,), -1)
        # Python numbers: reading them from an accelerator would synchronize with it at every access.
        self._next, self._filled = 0, 0

    @property
    def keys(self) -> Tensor:
        """The keys enqueued so far, (F, d) with F = len(queue), in order of slot and not of age; a view."""
        return self.key_store[: self._filled]

    @property
    def labels(self) -> Tensor:
        """The labels of the keys, (F,), −1 = unknown; a view."""
        return self.label_store[: self._filled]

    @property
    def ids(self) -> Tensor:
        """The instance ids of the keys, (F,), −1 = unknown; a view."""
        return self.id_store[: self._filled]

    def candidates(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Keys, labels and ids, which ``negatives=queue`` passes to a loss."""
        return self.keys, self.labels, self.ids

    def __len__(self) -> int:
        return self._filled

    def __bool__(self) -> bool:
        return True  # also if empty, so that `if queue` tests for None as with other modules

    @torch.no_grad()
    def enqueue(self, keys: TensorLike, labels: TensorLike | None = None, ids: TensorLike | None = None) -> None:
        """Store a batch of keys at unit length; they replace the oldest keys of a full queue.

        keys: (B, d) · labels, ids: (B,) integers ≥ −1, −1 = unknown

        On an accelerator keys with NaN or inf are stored as NaN, and the losses computed with them are NaN.
        """
        keys = checks.floating("keys", as_tensor("keys", keys))
        if keys.dim() != 2 or keys.shape[1] != self.dim:
            raise ValueError(f"keys must have shape (B, {self.dim}), got {tuple(keys.shape)}")
        if not checks.on_accelerator(keys.device):
            checks.finite("keys", keys)
        columns = [self._checked_integers(name, given, keys) for name, given in (("labels", labels), ("ids", ids))]
        integers = torch.stack(columns, dim=1)  # (B, 2)
        keys = normalized(keys.to(torch.promote_types(torch.float32, keys.dtype)))
        if self.gather and distributed.world_size() > 1:
            sizes = distributed.batch_sizes(len(keys), keys.device)
            keys, integers = distributed.gather(keys, sizes), distributed.gather(integers, sizes)
        # Of a batch larger than the queue only the last `size` keys would remain.
        first = max(0, len(keys) - self.size)
        start = (self._next + first) % self.size
        keys, integers = keys[first:], integers[first:]
        before_end = min(len(keys), self.size - start)
        for slots, part in (
            (slice(start, start + before_end), slice(0, before_end)),
            (slice(0, len(keys) - before_end), slice(before_end, None)),
        ):
            if len(keys[part]):
                self.key_store[slots] = keys[part].to(self.key_store)
                self.label_store[slots] = integers[part, 0]
                self.id_store[slots] = integers[part, 1]
        self._next = (start + len(keys)) % self.size
        self._filled = min(self.size, self._filled + len(keys))

    def same_instance(self, ids: TensorLike) -> Tensor:
        """Mask of the keys with the same instance id, (B, F) bool; pass its inverse as ``negative_mask``.

        ids: (B,) integers; −1 = unknown, which equals no id
        """
        ids = as_tensor("ids", ids)
        ids = checks.integers("ids", ids, tuple(ids.shape[:1]), "one per anchor")
        ids = ids.to(self.id_store.device)[:, None]
        return (ids == self.ids) & (ids >= 0)

    def get_extra_state(self) -> Tensor:
        """The slot of the next key, and the number of keys."""
        return torch.tensor([self._next, self._filled])

    def set_extra_state(self, state: Tensor) -> None:
        """Load a state from `get_extra_state`."""
        self._next, self._filled = (int(number) for number in state)

    def extra_repr(self) -> str:
        return f"size={self.size}, dim={self.dim}, filled={self._filled}, gather={self.gather}"

    def _checked_integers(self, name: str, given: TensorLike | None, keys: Tensor) -> Tensor:
        """Labels or ids of the keys, (B,); −1 if not given."""
        if given is None:
            return torch.full((len(keys),), -1, device=keys.device)
        found = checks.integers(name, as_tensor(name, given), (len(keys),), "one per key")
        if not checks.on_accelerator(found.device):  # there the loss checks the labels it is given
            checks.values(found >= -1, f"{name} must be ≥ −1, where −1 means unknown")
        return found.to(keys.device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        mismatch = size_mismatch("queue", state_dict.get(f"{prefix}key_store"), self.size, self.dim, prefix)
        if mismatch is not None:
            rest[-1].append(mismatch)
        else:
            super()._load_from_state_dict(state_dict, prefix, *rest)

"""A first-in, first-out queue of keys (MoCo; METHODS, section 3)."""

from typing import Any

import torch
from torch import Tensor, nn

from hardneg import checks, distributed
from hardneg.checks import whole
from hardneg.losses.inputs import normalized


class Queue(checks.Fixed, nn.Module):
    """The newest ``size`` keys (K of MoCo), with a label and an instance id beside each.

    Enqueue after the backward pass. Before the loss, a positive would become its own negative; between loss and
    backward, autograd refuses the backward pass, because keys are overwritten in place.

    Under DDP pass ``gather=True``, and ``broadcast_buffers=False`` to DDP: the queues are equal without it.

    Args:
        size: number of keys; a batch need not divide it, and may be larger
        dim: length of a key, d
        dtype: in which keys are stored; the losses compute in float32 from any
        gather: enqueue the keys of all processes, in order of rank, so that every process has the same queue

    Examples:
        >>> import hardneg as hn
        >>> queue = Queue(size=4, dim=2)
        >>> queue.enqueue(torch.eye(2), ids=torch.tensor([7, 8]))
        >>> queue.keys.shape, queue.labels.tolist(), queue.ids.tolist()
        (torch.Size([2, 2]), [-1, -1], [7, 8])
        >>> queries, keys, ids = torch.randn(3, 2), torch.randn(3, 2), torch.tensor([8, 9, 10])
        >>> others = ~queue.same_instance(ids)
        >>> hn.moco()(queries, keys, negatives=queue.keys, negative_mask=others).shape
        torch.Size([])
    """

    def __init__(self, size: int, dim: int, dtype: torch.dtype = torch.float32, gather: bool = False) -> None:
        super().__init__()
        whole("size", size)
        whole("dim", dim)
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be floating, got {dtype}: use torch.float32 or torch.float16")
        self.size, self.dim, self.gather = size, dim, gather
        self.key_store: Tensor
        self.label_store: Tensor
        self.id_store: Tensor
        self.register_buffer("key_store", torch.zeros(size, dim, dtype=dtype))
        self.register_buffer("label_store", torch.full((size,), -1))
        self.register_buffer("id_store", torch.full((size,), -1))
        # Plain numbers: as tensors on an accelerator, every look at the queue would wait for it.
        self._next, self._filled = 0, 0

    @property
    def keys(self) -> Tensor:
        """The keys there are, (F, d) with F = len(queue); a view, in order of place and not of age."""
        return self.key_store[: self._filled]

    @property
    def labels(self) -> Tensor:
        """Their labels, (F,), −1 = unknown; a view."""
        return self.label_store[: self._filled]

    @property
    def ids(self) -> Tensor:
        """The instances they are views of, (F,), −1 = unknown; a view."""
        return self.id_store[: self._filled]

    def __len__(self) -> int:
        return self._filled

    def __bool__(self) -> bool:
        return True  # an empty queue is still a queue: `if queue` asks whether there is one

    @torch.no_grad()
    def enqueue(self, keys: Tensor, labels: Tensor | None = None, ids: Tensor | None = None) -> None:
        """Put in a batch of keys, brought to unit length; the oldest ones give way.

        keys: (B, d) · labels, ids: (B,) integers ≥ −1, −1 = unknown
        """
        checks.floating("keys", keys)
        if keys.dim() != 2 or keys.shape[1] != self.dim:
            raise ValueError(f"keys must have shape (B, {self.dim}), got {tuple(keys.shape)}")
        checks.finite("keys", keys)
        facts = torch.stack([self._facts("labels", labels, keys), self._facts("ids", ids, keys)], dim=1)  # (B, 2)
        keys = normalized(keys.to(torch.promote_types(torch.float32, keys.dtype)))
        if self.gather and distributed.world_size() > 1:
            sizes = distributed.batch_sizes(len(keys), keys.device)
            keys, facts = distributed.gather(keys, sizes), distributed.gather(facts, sizes)
        # One after another, all but the last `size` keys of a larger batch would be overwritten.
        first = max(0, len(keys) - self.size)
        start = (self._next + first) % self.size
        keys, facts = keys[first:], facts[first:]
        before_the_end = min(len(keys), self.size - start)
        for place, part in (
            (slice(start, start + before_the_end), slice(0, before_the_end)),
            (slice(0, len(keys) - before_the_end), slice(before_the_end, None)),
        ):
            if len(keys[part]):
                self.key_store[place] = keys[part].to(self.key_store)
                self.label_store[place] = facts[part, 0]
                self.id_store[place] = facts[part, 1]
        self._next = (start + len(keys)) % self.size
        self._filled = min(self.size, self._filled + len(keys))

    def same_instance(self, ids: Tensor) -> Tensor:
        """Which keys are views of these instances, (B, F) bool; an unknown id is no one's. Pass its inverse as mask.

        ids: (B,) integers, −1 = unknown
        """
        ids = checks.integers("ids", ids, tuple(ids.shape[:1]) if isinstance(ids, Tensor) else (), "one per anchor")
        ids = ids.to(self.id_store.device)[:, None]
        return (ids == self.ids) & (ids >= 0)

    def get_extra_state(self) -> Tensor:
        """Where the next key goes, and how many there are."""
        return torch.tensor([self._next, self._filled])

    def set_extra_state(self, state: Tensor) -> None:
        """Take back what `get_extra_state` gave."""
        self._next, self._filled = (int(number) for number in state)

    def extra_repr(self) -> str:
        return f"size={self.size}, dim={self.dim}, filled={self._filled}, gather={self.gather}"

    def _facts(self, name: str, given: Tensor | None, keys: Tensor) -> Tensor:
        if given is None:
            return torch.full((len(keys),), -1, device=keys.device)
        given = checks.integers(name, given, (len(keys),), "one per key").to(keys.device)
        checks.values(given >= -1, f"{name} must be ≥ −1, where −1 means unknown")
        return given

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        stored = state_dict.get(f"{prefix}key_store")
        if stored is not None and tuple(stored.shape) != (self.size, self.dim):
            size, dim = stored.shape
            errors: list[str] = rest[-1]
            errors.append(
                f"the state of {prefix.rstrip('.') or 'the queue'} holds size={size}, dim={dim}, but this queue has "
                f"size={self.size}, dim={self.dim}: build it with Queue(size={size}, dim={dim})"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *rest)

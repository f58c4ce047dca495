"""The base class of memories: tensors that are saved and moved with a module, but are not among its buffers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn


class MemoryModule(nn.Module):
    """A module with tensors that are part of ``state_dict()`` and follow ``to()``, but are not in ``buffers()``.

    `torch.optim.swa_utils.AveragedModel` averages buffers, and DDP broadcasts them before every step. A memory needs
    neither: the mean of two keys or of two labels has no meaning, and the processes have the same memory without a
    broadcast. The memory of an averaged model stays as it was when the model was copied.
    """

    tensors: ClassVar[tuple[str, ...]] = ()  # names of the attributes that hold them

    @contextmanager
    def _tensors_as_buffers(self) -> Iterator[None]:
        """Register the tensors as buffers for the duration of a call that saves, loads or moves buffers."""
        self._buffers.update({name: getattr(self, name) for name in self.tensors})
        try:
            yield
        finally:
            for name in self.tensors:
                self.__dict__[name] = self._buffers.pop(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with self._tensors_as_buffers():
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with self._tensors_as_buffers():
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        with self._tensors_as_buffers():
            super()._load_from_state_dict(state_dict, prefix, *rest)


def checked_dtype(dtype: torch.dtype) -> torch.dtype:
    """Raise unless ``dtype`` is a floating-point dtype; return it."""
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be floating, got {dtype}: use torch.float32 or torch.float16")
    return dtype


def size_mismatch(kind: str, stored: Tensor | None, size: int, dim: int, prefix: str) -> str | None:
    """An error message if a state holds rows of another shape than (size, dim), else None.

    kind: "bank" or "queue" · stored: the rows of the state · prefix: of the module in the state
    """
    if stored is None or tuple(stored.shape) == (size, dim):
        return None
    found = f"size={stored.shape[0]}, dim={stored.shape[1]}"
    constructor = {"bank": "MemoryBank", "queue": "Queue"}[kind]
    return (
        f"the state of {prefix.rstrip('.') or f'the {kind}'} holds {found}, but this {kind} has size={size}, "
        f"dim={dim}: build it with {constructor}({found})"
    )

"""Chunks of a batch, and what it takes to encode one twice: the same random numbers, and buffers that move once."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def cut(view: Any, chunk_size: int) -> list[tuple[Any, int]]:
    """The chunks of a view and the rows of each: as few as can be, and of sizes that differ by one at most.

    view: a tensor (B, …), or a mapping, tuple or list of such, nested at will. What has no rows (None, numbers,
    strings) goes into every chunk; a mapping becomes a dict.

    Examples:
        >>> [(chunk["ids"].tolist(), rows) for chunk, rows in cut({"ids": torch.arange(5), "task": "sts"}, 3)]
        [([0, 1, 2], 3), ([3, 4], 2)]
    """
    rows = {len(tensor) for tensor in _tensors(view)}
    if len(rows) != 1 or 0 in rows:
        found = ", ".join(map(str, sorted(rows))) or "no tensor"
        raise ValueError(
            f"every view of inputs must hold tensors with one row per sample, got {found}"
            + (" rows" if rows else f" in a {type(view).__name__}: cut it with split=")
        )
    (total,) = rows
    number = -(-total // chunk_size)
    least, more = divmod(total, number)
    edges = [part * least + min(part, more) for part in range(number + 1)]
    return [(_take(view, slice(start, end)), end - start) for start, end in pairwise(edges)]


def _tensors(view: Any) -> Iterator[Tensor]:
    if isinstance(view, Tensor):
        if view.dim() > 0:
            yield view
    elif isinstance(view, Mapping):
        for part in view.values():
            yield from _tensors(part)
    elif isinstance(view, tuple | list):
        for part in view:
            yield from _tensors(part)
    elif view is not None and not isinstance(view, str | int | float):
        raise ValueError(
            f"inputs holds a {type(view).__name__}, which cannot be cut into chunks: give tensors, mappings, tuples or "
            "lists of them, or cut it with split="
        )


def _take(view: Any, rows: slice) -> Any:
    if isinstance(view, Tensor):
        return view[rows] if view.dim() > 0 else view
    if isinstance(view, Mapping):
        return {name: _take(part, rows) for name, part in view.items()}
    if isinstance(view, tuple | list):
        parts = [_take(part, rows) for part in view]
        return type(view)(*parts) if hasattr(view, "_fields") else type(view)(parts)
    return view


def random_state() -> list[Tensor]:
    """Where torch's generators stand, on the CPU and on every accelerator in use."""
    return [generator.get_state() for generator in _generators()]


def set_random_state(states: Sequence[Tensor]) -> None:
    """Take back what `random_state` gave."""
    # A device that came into use in between has no state here, and keeps its own.
    for generator, state in zip(_generators(), states, strict=False):
        generator.set_state(state)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Leave the generators as they were found."""
    states = random_state()
    try:
        yield
    finally:
        set_random_state(states)


def _generators() -> list[torch.Generator]:
    # Empty for accelerators that nothing has used yet.
    found = [torch.default_generator, *torch.cuda.default_generators, *torch.xpu.default_generators]
    if torch.backends.mps.is_available():
        found.append(torch.mps._get_default_mps_generator())
    return found


def modules_of(encoder: Callable[..., Any]) -> list[nn.Module]:
    """The modules that an encoder is or, if it is a function, that it was made from.

    Examples:
        >>> linear = nn.Linear(2, 2)
        >>> modules_of(lambda rows: linear(rows).relu()) == [linear]
        True
    """
    if isinstance(encoder, nn.Module):
        return [encoder]
    if isinstance(encoder, partial):
        return modules_of(encoder.func)
    owner = getattr(encoder, "__self__", None)  # of a method
    if isinstance(owner, nn.Module):
        return [owner]
    try:
        names = inspect.getclosurevars(inspect.unwrap(encoder))
    except TypeError:  # an object that can be called
        return [part for part in vars(encoder).values() if isinstance(part, nn.Module)]
    return [part for part in (*names.nonlocals.values(), *names.globals.values()) if isinstance(part, nn.Module)]


def warn_of_batch_norm(modules: Sequence[nn.Module]) -> None:
    """Warn if some layer of these looks across the batch."""
    if any(isinstance(layer, _BatchNorm) and layer.training for module in modules for layer in module.modules()):
        warnings.warn(
            "encoder has batch-norm in training mode, which sees one chunk at a time: the gradient is exact for chunks "
            "normalised each by itself, not for the batch as one. Use group or layer norm, or freeze it with .eval()",
            stacklevel=3,
        )


def own_no_sync(modules: Sequence[nn.Module]) -> list[Callable[[], AbstractContextManager[Any]]]:
    """The ``no_sync`` of every outermost module that has one (DDP, FSDP)."""
    found: list[Callable[[], AbstractContextManager[Any]]] = []
    for module in modules:
        context = getattr(module, "no_sync", None)
        found += [context] if callable(context) else own_no_sync(list(module.children()))
    return found


def versions(modules: Sequence[nn.Module]) -> dict[Tensor, int]:
    """How often each buffer has been written to."""
    return {buffer: buffer._version for module in modules for buffer in module.buffers() if not buffer.is_inference()}


@contextmanager
def buffers_kept(modules: Sequence[nn.Module], before: Mapping[Tensor, int]) -> Iterator[None]:
    """Leave as they are found the buffers of all layers that were written to since ``before``, what `versions` gave."""
    # By layers, as batch-norm writes its statistics without leaving a trace, but counts its batches with one.
    kept = {
        buffer: buffer.clone()
        for module in modules
        for layer in module.modules()
        if any(buffer._version != before.get(buffer) for buffer in layer.buffers(recurse=False) if buffer in before)
        for buffer in layer.buffers(recurse=False)
    }
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept.items():
                buffer.copy_(value)

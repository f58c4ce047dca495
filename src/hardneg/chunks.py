"""Chunks of a batch, and the state to encode a chunk twice: random generators and buffers of the encoder."""

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


def split_rows(view: Any, chunk_size: int) -> list[tuple[Any, int]]:
    """The chunks of a view with the number of rows of each: as few as possible, of sizes that differ by at most one.

    view: a tensor (B, …), or a mapping, tuple or list of such, also nested. Values without rows (None, numbers,
    strings) are copied to every chunk; a mapping becomes a dict.

    Examples:
        >>> [(chunk["ids"].tolist(), rows) for chunk, rows in split_rows({"ids": torch.arange(5), "task": "sts"}, 3)]
        [([0, 1, 2], 3), ([3, 4], 2)]
    """
    rows = {len(tensor) for tensor in _tensors(view)}
    if len(rows) != 1 or 0 in rows:
        found = ", ".join(map(str, sorted(rows))) or "no tensor"
        raise ValueError(
            f"every view of inputs must hold tensors with one row per sample, got {found}"
            + (" rows" if rows else f" in a {type(view).__name__}: split it with split=")
        )
    (total,) = rows
    count = -(-total // chunk_size)
    least, larger = divmod(total, count)
    edges = [chunk * least + min(chunk, larger) for chunk in range(count + 1)]
    return [(_select(view, slice(start, end)), end - start) for start, end in pairwise(edges)]


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
            f"inputs holds a {type(view).__name__}, which cannot be split into chunks: give tensors, mappings, tuples "
            "or lists of them, or split it with split="
        )


def _select(view: Any, rows: slice) -> Any:
    if isinstance(view, Tensor):
        return view[rows] if view.dim() > 0 else view
    if isinstance(view, Mapping):
        return {name: _select(part, rows) for name, part in view.items()}
    if isinstance(view, tuple | list):
        parts = [_select(part, rows) for part in view]
        return type(view)(*parts) if hasattr(view, "_fields") else type(view)(parts)
    return view


def random_state() -> list[Tensor]:
    """The states of torch's default generators, on the CPU and on every accelerator in use."""
    return [generator.get_state() for generator in _generators()]


def set_random_state(states: Sequence[Tensor]) -> None:
    """Load states from `random_state`."""
    # A device that was first used after `random_state` has no state here.
    for generator, state in zip(_generators(), states, strict=False):
        generator.set_state(state)


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the states of the generators on exit."""
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
    """The modules of an encoder: itself, or those that a function refers to.

    Examples:
        >>> linear = nn.Linear(2, 2)
        >>> modules_of(lambda rows: linear(rows).relu()) == [linear]
        True
    """
    if isinstance(encoder, nn.Module):
        return [encoder]
    if isinstance(encoder, partial):
        return modules_of(encoder.func)
    owner = getattr(encoder, "__self__", None)  # of a bound method
    if isinstance(owner, nn.Module):
        return [owner]
    try:
        names = inspect.getclosurevars(inspect.unwrap(encoder))
    except TypeError:  # a callable object
        return [part for part in vars(encoder).values() if isinstance(part, nn.Module)]
    return [part for part in (*names.nonlocals.values(), *names.globals.values()) if isinstance(part, nn.Module)]


def warn_about_batch_norm(modules: Sequence[nn.Module]) -> None:
    """Warn if a layer normalizes across the batch."""
    if any(isinstance(layer, _BatchNorm) and layer.training for module in modules for layer in module.modules()):
        warnings.warn(
            "encoder has batch-norm in training mode, which sees one chunk at a time: the gradient is exact for chunks "
            "normalized separately, not for the whole batch. Use group or layer norm, or freeze it with .eval()",
            stacklevel=3,
        )


def no_sync_contexts(modules: Sequence[nn.Module]) -> list[Callable[[], AbstractContextManager[Any]]]:
    """The ``no_sync`` of every outermost module that has one (DDP, FSDP)."""
    found: list[Callable[[], AbstractContextManager[Any]]] = []
    for module in modules:
        context = getattr(module, "no_sync", None)
        found += [context] if callable(context) else no_sync_contexts(list(module.children()))
    return found


def buffer_versions(modules: Sequence[nn.Module]) -> dict[Tensor, int]:
    """The version counter of each buffer, which counts in-place writes."""
    return {buffer: buffer._version for module in modules for buffer in module.buffers() if not buffer.is_inference()}


@contextmanager
def preserve_buffers(modules: Sequence[nn.Module], before: Mapping[Tensor, int]) -> Iterator[None]:
    """Restore on exit the buffers of all layers that were written to since ``before``, from `buffer_versions`."""
    # Per layer: batch-norm writes its statistics without a new version, but its counter of batches with one.
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

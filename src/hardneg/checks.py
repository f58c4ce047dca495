"""Checks of arguments: each failure names the argument, the value given and what to do."""

import inspect
import operator
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypedDict, Unpack, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardneg import spelling
from hardneg.losses.schedules import Schedule, value

TensorLike = Tensor | NDArray[Any] | Sequence[Any]  # what `as_tensor` converts


class Fixed:
    """A class whose constructor arguments, stored as attributes, cannot be assigned later.

    Tensors, graphs and batches were built from them, and would not change.
    """

    _arguments: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._arguments = cls._arguments | frozenset(inspect.signature(cls.__init__).parameters)

    def __setattr__(self, name: str, given: object) -> None:
        if name in self._arguments and name in vars(self):
            raise AttributeError(f"{name} is fixed: make a new {type(self).__name__} with {name}={given!r}")
        super().__setattr__(name, given)


def as_tensor(name: str, given: object) -> Tensor:
    """Return a tensor unchanged, and convert a numpy array or a list of numbers to one.

    Arrays share their memory with the tensor where PyTorch allows it; read-only arrays are copied.

    Examples:
        >>> as_tensor("labels", np.array([3, 7]))
        tensor([3, 7])
        >>> as_tensor("labels", "3, 7")
        Traceback (most recent call last):
        ValueError: labels must be a tensor, a numpy array or a list of numbers, got str
    """
    if isinstance(given, Tensor):
        return given
    try:
        if isinstance(given, np.ndarray):
            # PyTorch supports neither read-only memory, nor negative strides, nor a non-native byte order.
            if not given.flags.writeable or not given.dtype.isnative or any(step < 0 for step in given.strides):
                given = np.array(given, dtype=given.dtype.newbyteorder("="), order="C")
            return torch.from_numpy(given)
        if isinstance(given, list | tuple):
            return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} cannot be converted to a tensor ({error}): pass numbers in equal rows") from error
    raise ValueError(f"{name} must be a tensor, a numpy array or a list of numbers, got {type(given).__name__}")


class Limits(TypedDict, total=False):
    """The range of a number: > above, ≥ at_least, < below, ≤ at_most."""

    above: float
    at_least: float
    below: float
    at_most: float


_COMPARISONS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "above": (">", operator.gt),
    "at_least": ("≥", operator.ge),
    "below": ("<", operator.lt),
    "at_most": ("≤", operator.le),
}


@overload
def number(name: str, given: float, **limits: Unpack[Limits]) -> float: ...
@overload
def number(name: str, given: Schedule, **limits: Unpack[Limits]) -> Schedule: ...
@overload
def number(name: str, given: object, **limits: Unpack[Limits]) -> float | Schedule: ...


def number(name: str, given: object, **limits: Unpack[Limits]) -> float | Schedule:
    """Raise unless ``given`` is a number in the range or a schedule between such numbers; return it.

    A numpy scalar or a tensor without dimensions is returned as a Python number. A schedule is checked at both ends.

    Examples:
        >>> number("temperature", np.float32(0.5), above=0)
        0.5
    """
    found = given if isinstance(given, Schedule) else _python_number(name, given)
    if found is None:
        raise ValueError(f"{name} must be a number or a schedule, got {given!r}")
    bounds: list[tuple[str, Callable[[Any, Any], bool], Any]] = [
        (*_COMPARISONS[key], limit) for key, limit in limits.items()
    ]
    for end in [value(found, 0.0), value(found, 1.0)] if isinstance(found, Schedule) else [float(found)]:
        if end != end or not all(holds(end, limit) for _, holds, limit in bounds):
            wanted = " and ".join(f"{sign} {limit:g}" for sign, _, limit in bounds) or "a number"
            raise ValueError(f"{name} must be {wanted}, got {end:g}")
    return found


def whole(name: str, given: object, at_least: int = 1) -> int:
    """Raise unless ``given`` is a whole number of at least ``at_least``; return it.

    A numpy integer or an integer tensor without dimensions is returned as a Python number.

    Examples:
        >>> whole("size", torch.tensor(4096))
        4096
    """
    found = _python_number(name, given)
    if not isinstance(found, int) or found < at_least:
        raise ValueError(f"{name} must be a whole number ≥ {at_least}, got {given!r}")
    return found


def _python_number(name: str, given: object) -> int | float | None:
    """A number, a numpy scalar or a tensor without dimensions as a Python number; None for anything else."""
    if isinstance(given, Tensor | np.ndarray | np.generic) and given.ndim == 0:
        if isinstance(given, Tensor) and given.requires_grad:
            raise ValueError(f"{name} requires a gradient, which a setting cannot have: pass {name}.detach()")
        given = given.item()
    return given if isinstance(given, int | float) and not isinstance(given, bool) else None


def choice(name: str, given: object, options: Sequence[str]) -> None:
    """Raise unless ``given`` is one of the ``options``; suggest the nearest one."""
    if given in options:
        return
    near = spelling.nearest(str(given), options)
    hint = f"did you mean {near!r}?" if near else "choose one of " + ", ".join(map(repr, options))
    raise ValueError(f"{name}={given!r} is not known: {hint}")


def floating(name: str, tensor: object) -> Tensor:
    """Raise unless ``tensor`` is a floating-point tensor."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}: convert it with torch.as_tensor")
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must have a floating dtype, got {tensor.dtype}: convert it with .float()")
    return tensor


def integers(name: str, tensor: object, shape: tuple[int, ...], meaning: str) -> Tensor:
    """Raise unless ``tensor`` is an integer tensor of ``shape``."""
    if not isinstance(tensor, Tensor):
        raise ValueError(
            f"{name} must be an integer tensor, got {type(tensor).__name__}: convert it with torch.as_tensor"
        )
    if name.endswith("labels") and tuple(tensor.shape[:-1]) == shape and tensor.shape[-1] > 1:
        raise ValueError(
            f"{name} must have shape {shape} ({meaning}), got {tuple(tensor.shape)}: pass class numbers, of one-hot "
            f"rows {name}.argmax({len(shape)})"
        )
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} must have an integer dtype, got {tensor.dtype}: convert it with .long()")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape} ({meaning}), got {tuple(tensor.shape)}")
    return tensor.long()


def boolean(name: str, given: object) -> bool:
    """Raise unless ``given`` is True or False, also as a numpy bool or a bool tensor without dimensions; return it.

    Examples:
        >>> boolean("normalize", np.bool_(True))
        True
    """
    if isinstance(given, Tensor | np.ndarray | np.generic) and given.ndim == 0:
        given = given.item()
    if not isinstance(given, bool):
        raise ValueError(f"{name} must be True or False, got {given!r}")
    return given


class NonFiniteError(ValueError):
    """A tensor holds NaN or inf."""


# Checks of values. Reading a value would synchronize with an accelerator, and an assertion there ends the process's
# use of the device. A check of a tensor on an accelerator therefore returns a validity instead of raising: a tensor
# without dimensions that is 1, or NaN where the check failed. The result is multiplied by it (`poisoned`), so that it
# and its gradients are NaN. On a CPU a check raises, and returns None.


def on_accelerator(device: torch.device) -> bool:
    """True if reading a value from this device would synchronize with it."""
    return device.type != "cpu"


def finite(name: str, tensor: Tensor) -> Tensor | None:
    """Raise on NaN or inf on the CPU; return the validity on an accelerator."""
    return values(_is_finite(tensor), _not_finite(name), NonFiniteError)


def in_range(name: str, indices: Tensor, size: int) -> tuple[Tensor, Tensor | None]:
    """Raise on the CPU unless every index is in [0, size); return the indices, and the validity on an accelerator.

    The indices returned are safe for memory accesses: those out of range on an accelerator are clamped.
    """
    validity = values(_is_in_range(indices, size), _out_of_range(name, size))
    return indices if validity is None else indices.clamp(0, max(size - 1, 0)), validity


def values(condition: Tensor, message: str, error: type[ValueError] = ValueError) -> Tensor | None:
    """Raise on the CPU unless the condition is true everywhere; return the validity on an accelerator.

    Inside `torch.vmap`, where no value can be read, it returns the validity of each example.
    """
    condition = condition.all()
    batched = torch._C._are_functorch_transforms_active() and _is_batched(condition)
    if on_accelerator(condition.device) or batched:
        return torch.where(condition, 1.0, torch.nan)
    if torch.compiler.is_compiling():  # reading the value would break the graph
        torch._assert_async(condition, message)
    else:
        require(condition, message, error)
    return None


def _is_batched(tensor: Tensor) -> bool:
    """True if a tensor holds the values of all examples of a `torch.vmap`."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def jointly(*validities: Tensor | None) -> Tensor | None:
    """The validity of several checks together; None if all are."""
    found = None
    for validity in validities:
        if validity is not None:
            found = validity if found is None else found * validity
    return found


def poisoned(result: Tensor, *validities: Tensor | None) -> Tensor:
    """The result unchanged if all checks held, else NaN throughout, as its gradients.

    Examples:
        >>> poisoned(torch.tensor([2.0, 3.0]), None, torch.tensor(torch.nan))
        tensor([nan, nan])
    """
    validity = jointly(*validities)
    return result if validity is None else result * validity


def require(condition: Tensor, message: str, error: type[ValueError] = ValueError) -> None:
    """Raise unless the condition is true everywhere; synchronizes with an accelerator."""
    if not bool(condition.all()):
        raise error(message)


def require_finite(name: str, tensor: Tensor) -> None:
    """Raise on NaN or inf; synchronizes with an accelerator."""
    require(_is_finite(tensor), _not_finite(name), NonFiniteError)


def require_in_range(name: str, indices: Tensor, size: int) -> None:
    """Raise unless every index is in [0, size); synchronizes with an accelerator."""
    require(_is_in_range(indices, size), _out_of_range(name, size))


def _is_finite(tensor: Tensor) -> Tensor:
    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    lowest, highest = torch.aminmax(tensor.detach())  # one pass, no temporary; NaN propagates
    return torch.isfinite(lowest) & torch.isfinite(highest)


def _not_finite(name: str) -> str:
    return f"{name} holds NaN or inf: look for a diverged model or a division by zero before the loss"


def _is_in_range(indices: Tensor, size: int) -> Tensor:
    if indices.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=indices.device)
    lowest, highest = torch.aminmax(indices)
    return (lowest >= 0) & (highest < size)


def _out_of_range(name: str, size: int) -> str:
    return f"{name} must hold indices from 0 to {size - 1}: an index is out of range"


def has_folder(file: Path) -> None:
    """Raise if the folder that a file is to be written to does not exist: it may be misspelled."""
    if not file.parent.is_dir():
        raise ValueError(
            f"there is no folder {str(file.parent)!r} for {file.name}: create it, or choose another with --to "
            "(in Python: to=)"
        )


def regular_file(path: Path) -> Path:
    """Return the path of a regular file; raise for others: reading a FIFO would block, a device may be endless."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is not a regular file: remove it, or put a file there")
    return path

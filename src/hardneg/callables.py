"""User-defined functions and classes, named as ``package.module:callable``."""

import functools
import importlib
import inspect
import re
import sys
import typing
from collections.abc import Callable
from typing import Any

from torch import nn

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_name(text: str) -> bool:
    """Whether the text has the form ``package.module:callable``.

    Examples:
        >>> is_name("torch.nn:Flatten"), is_name("resnet18"), is_name("C:/images")
        (True, False, False)
    """
    return _NAME.fullmatch(text) is not None


def load(name: str, setting: str) -> Callable[..., Any]:
    """The callable that ``package.module:callable`` names; ``setting`` is the recipe key in error messages."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing a module can raise anything
        reason = f"{type(error).__name__}: " + " ".join(str(error).split())
        raise ValueError(
            f"{setting}={name!r} could not be imported: {reason}; write it as package.module:callable"
        ) from error
    if not callable(found):
        raise ValueError(f"{setting}={name!r} is a {type(found).__name__}, which cannot be called: name a function")
    return found  # type: ignore[no-any-return]


def module_from(name: str, setting: str, options: dict[str, Any]) -> nn.Module:
    """The module that ``package.module:callable`` makes; the target is checked before it is called.

    Examples:
        >>> module_from("torch.nn:Flatten", "encoder.name", {})
        Flatten(start_dim=1, end_dim=-1)
    """
    target = load(name, setting)
    _check_factory(name, setting, target)
    try:
        made = target(**options)
    except TypeError as error:
        raise ValueError(f"options of {setting}={name!r}: {error}") from error
    if not isinstance(made, nn.Module):
        raise ValueError(f"{setting}={name!r} must return a torch.nn.Module, got {type(made).__name__}")
    return made


def _check_factory(name: str, setting: str, target: Any) -> None:
    """Raise, before it is called, if the target cannot make a module: it must be a module class or a function."""
    factory = target
    while isinstance(factory, functools.partial):
        factory = factory.func
    factory = inspect.unwrap(factory) if callable(factory) else factory
    package = str(getattr(factory, "__module__", "")).partition(".")[0]
    wrong = None
    if inspect.isclass(factory):
        if not issubclass(factory, nn.Module):
            wrong = "is a class, but not a torch.nn.Module"
    elif not (inspect.isfunction(factory) or inspect.ismethod(factory)):
        wrong = f"is a {type(factory).__name__}, not a class or a function written in Python"
    elif package in sys.stdlib_module_names:
        wrong = f"belongs to Python's own {package}"
    elif inspect.isclass(returned := _return_annotation(factory)) and not issubclass(returned, nn.Module):
        wrong = f"is annotated to return {returned.__name__}"
    if wrong is not None:
        raise ValueError(f"{setting}={name!r} {wrong}: name an nn.Module class, or a function that returns a module")


def _return_annotation(function: Callable[..., Any]) -> Any:
    """The return annotation; None if there is none, or if it cannot be evaluated."""
    try:
        return typing.get_type_hints(function).get("return")
    except Exception:  # an annotation may name something that is not imported
        return None

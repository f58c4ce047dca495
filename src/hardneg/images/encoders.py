"""Encoders: small ones of our own, or any module of the user's."""

import functools
import importlib
import inspect
import sys
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hardneg import checks
from hardneg.images.resnet import ResNet, resnet18, resnet34, resnet50
from hardneg.images.tiny import Tiny, projection

KNOWN: dict[str, Callable[..., nn.Module]] = {
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "tiny": Tiny,
}


def build(name: str, **options: Any) -> nn.Module:
    """An encoder by name, or by ``package.module:callable`` for one of the user's own.

    Examples:
        >>> build("tiny", channels=1, size=8).features
        128
        >>> build("torch.nn:Flatten")
        Flatten(start_dim=1, end_dim=-1)
    """
    if ":" not in name:
        checks.choice("encoder", name, tuple(KNOWN))
        try:
            return KNOWN[name](**options)
        except TypeError as error:
            raise ValueError(f"options of encoder={name!r}: {error}") from error
    target = _imported(name)
    _check_target(name, target)
    try:
        made = target(**options)
    except TypeError as error:
        raise ValueError(f"options of encoder={name!r}: {error}") from error
    if not isinstance(made, nn.Module):
        raise ValueError(f"encoder={name!r} must return a torch.nn.Module, got {type(made).__name__}")
    return made


def _imported(name: str) -> Any:
    """What ``package.module:callable`` names."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module may raise anything when it is imported
        reason = f"{type(error).__name__}: " + " ".join(str(error).split())
        raise ValueError(
            f"encoder={name!r} could not be imported: {reason}; write it as package.module:callable"
        ) from error


def _check_target(name: str, target: Any) -> None:
    """Raise, before it is called, if the target cannot be what makes an encoder: a module class, or a function."""
    made_by = target
    while isinstance(made_by, functools.partial):
        made_by = made_by.func
    made_by = inspect.unwrap(made_by) if callable(made_by) else made_by
    home = str(getattr(made_by, "__module__", "")).partition(".")[0]
    wrong = None
    if not callable(made_by):
        wrong = f"is a {type(made_by).__name__}, which cannot be called"
    elif inspect.isclass(made_by):
        if not issubclass(made_by, nn.Module):
            wrong = "is a class, but no torch.nn.Module"
    elif not (inspect.isfunction(made_by) or inspect.ismethod(made_by)):
        wrong = f"is a {type(made_by).__name__}, no class and no function written in Python"
    elif home in sys.stdlib_module_names:
        wrong = f"belongs to Python's own {home}"
    elif inspect.isclass(said := _said_to_return(made_by)) and not issubclass(said, nn.Module):
        wrong = f"is said to return {said.__name__}"
    if wrong is not None:
        raise ValueError(f"encoder={name!r} {wrong}: name an nn.Module class, or a function that returns a module")


def _said_to_return(function: Callable[..., Any]) -> Any:
    """The return annotation; None if there is none, or none that can be read."""
    try:
        return typing.get_type_hints(function).get("return")
    except Exception:  # an annotation may name what is not imported
        return None


@torch.no_grad()
def feature_size(encoder: nn.Module, shape: tuple[int, ...]) -> int:
    """How many features the encoder gives a picture of this shape (C, H, W), found by trying."""
    modes = [(module, module.training) for module in encoder.modules()]
    try:
        found = encoder.eval()(torch.zeros(1, *shape))
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"the encoder does not take a picture of shape {shape}: {reason}") from error
    finally:
        for module, mode in modes:
            module.training = mode
    if not isinstance(found, torch.Tensor) or found.dim() != 2:
        given = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise ValueError(f"the encoder must return (B, features), but gave {given} for one picture")
    return int(found.shape[1])


__all__ = ["ResNet", "Tiny", "build", "feature_size", "projection", "resnet18", "resnet34", "resnet50"]

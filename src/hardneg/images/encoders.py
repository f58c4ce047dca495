"""Image encoders by name, or any user-defined module."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hardneg import callables, checks
from hardneg.heads import projection
from hardneg.images.resnet import ResNet, resnet18, resnet34, resnet50
from hardneg.images.tiny import Tiny

ENCODERS: dict[str, Callable[..., nn.Module]] = {
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "tiny": Tiny,
}


def build(name: str, **options: Any) -> nn.Module:
    """An encoder by name, or by ``package.module:callable`` for a user-defined one.

    Examples:
        >>> build("tiny", channels=1, size=8).features
        128
        >>> build("torch.nn:Flatten")
        Flatten(start_dim=1, end_dim=-1)
    """
    if ":" in name:
        return callables.module_from(name, "encoder", options)
    checks.choice("encoder", name, tuple(ENCODERS))
    try:
        return ENCODERS[name](**options)
    except TypeError as error:
        raise ValueError(f"options of encoder={name!r}: {error}") from error


@torch.no_grad()
def feature_size(encoder: nn.Module, shape: tuple[int, ...]) -> int:
    """The number of features that the encoder returns for an image of this shape (C, H, W), found by a forward pass."""
    modes = [(module, module.training) for module in encoder.modules()]
    try:
        found = encoder.eval()(torch.zeros(1, *shape))
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"the encoder does not take an image of shape {shape}: {reason}") from error
    finally:
        for module, mode in modes:
            module.training = mode
    if not isinstance(found, torch.Tensor) or found.dim() != 2:
        given = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise ValueError(f"the encoder must return (B, features), but gave {given} for one image")
    return int(found.shape[1])


__all__ = ["ResNet", "Tiny", "build", "feature_size", "projection", "resnet18", "resnet34", "resnet50"]

"""Momentum copies of a network: MoCo's key encoder, θ' = mθ' + (1−m)θ."""

from copy import deepcopy

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


def momentum_copy(network: nn.Module) -> nn.Module:
    """A copy of the network whose parameters require no gradient.

    Examples:
        >>> any(weight.requires_grad for weight in momentum_copy(nn.Linear(2, 2)).parameters())
        False
    """
    return deepcopy(network).requires_grad_(False)


@torch.no_grad()
def follow(copy: nn.Module, network: nn.Module, momentum: float) -> None:
    """Move the weights of ``copy`` towards those of ``network``; it keeps its own batch-norm statistics.

    Examples:
        >>> slow, fast = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        >>> _ = slow.weight.data.fill_(0.0), fast.weight.data.fill_(1.0)
        >>> follow(slow, fast, momentum=0.75)
        >>> slow.weight.item()
        0.25
    """
    pairs = list(zip(copy.parameters(), network.parameters(), strict=True))
    if pairs:
        averages, weights = (list(each) for each in zip(*pairs, strict=True))
        get_ema_multi_avg_fn(momentum)(averages, weights, None)  # type: ignore[no-untyped-call]

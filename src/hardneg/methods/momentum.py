"""A network that follows another slowly: the key encoder of MoCo, θ' = mθ' + (1−m)θ (METHODS, section 3)."""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


def slow_copy(network: nn.Module) -> nn.Module:
    """A copy that no gradient reaches.

    Examples:
        >>> any(weight.requires_grad for weight in slow_copy(nn.Linear(2, 2)).parameters())
        False
    """
    return copy.deepcopy(network).requires_grad_(False)


@torch.no_grad()
def follow(slow: nn.Module, fast: nn.Module, momentum: float) -> None:
    """Move the weights of ``slow`` towards those of ``fast``; running statistics of norms stay its own.

    Examples:
        >>> slow, fast = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        >>> _ = slow.weight.data.fill_(0.0), fast.weight.data.fill_(1.0)
        >>> follow(slow, fast, momentum=0.75)
        >>> slow.weight.item()
        0.25
    """
    pairs = list(zip(slow.parameters(), fast.parameters(), strict=True))
    if pairs:
        behind, ahead = (list(weights) for weights in zip(*pairs, strict=True))
        get_ema_multi_avg_fn(momentum)(behind, ahead, None)  # type: ignore[no-untyped-call]

"""Projection heads: between the encoder and the loss in training, discarded afterwards."""

from torch import nn


def projection(inputs: int, hidden: int = 512, outputs: int = 128, norm: bool = True) -> nn.Sequential:
    """Linear, batch-norm, ReLU, linear: SimCLR's head as HCL and H-SCL use it; without ``norm`` MoCo v2's.

    Examples:
        >>> import torch
        >>> projection(512)(torch.zeros(2, 512)).shape
        torch.Size([2, 128])
    """
    middle: list[nn.Module] = [nn.BatchNorm1d(hidden)] if norm else []
    return nn.Sequential(nn.Linear(inputs, hidden, bias=not norm), *middle, nn.ReLU(), nn.Linear(hidden, outputs))


def head(inputs: int, hidden: int, outputs: int, norm: bool) -> nn.Module:
    """A `projection`, or a linear map if ``hidden`` is 0."""
    return nn.Linear(inputs, outputs) if hidden == 0 else projection(inputs, hidden, outputs, norm)

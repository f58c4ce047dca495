"""A tiny encoder for pictures of a few pixels, and the projection heads of the papers."""

from torch import Tensor, nn


class Tiny(nn.Module):
    """Two hidden layers on the pixels: enough for scikit-learn's digits, and fast on a CPU.

    Examples:
        >>> import torch
        >>> Tiny(channels=1, size=8)(torch.zeros(4, 1, 8, 8)).shape
        torch.Size([4, 128])
    """

    def __init__(self, channels: int = 1, size: int = 8, width: int = 256, features: int = 128) -> None:
        super().__init__()
        self.features = features
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels * size * size, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, features),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


def projection(inputs: int, hidden: int = 512, outputs: int = 128, norm: bool = True) -> nn.Sequential:
    """Linear, batch-norm, ReLU, linear: the head of SimCLR as HCL and H-SCL use it; without ``norm`` MoCo v2's.

    Examples:
        >>> import torch
        >>> projection(512)(torch.zeros(2, 512)).shape
        torch.Size([2, 128])
    """
    middle: list[nn.Module] = [nn.BatchNorm1d(hidden)] if norm else []
    return nn.Sequential(nn.Linear(inputs, hidden, bias=not norm), *middle, nn.ReLU(), nn.Linear(hidden, outputs))

"""A small encoder for images of a few pixels."""

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

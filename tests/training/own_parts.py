"""Data, views and encoders of a user's own, named in recipes as ``training.own_parts:…``."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

IMAGES = np.random.default_rng(0).integers(0, 100, (60, 8, 8), dtype=np.uint8)
LABELS = np.arange(60) % 2


def images(split: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Dark and bright images: 40 to train on, 20 to test on."""
    rows = {"train": slice(0, 40), "test": slice(40, 60)}.get(split)
    return None if rows is None else (IMAGES[rows] + 150 * LABELS[rows, None, None].astype(np.uint8), LABELS[rows])


class BrightnessViews:
    """Views that add a random brightness to each image."""

    def __init__(self, size: int = 8, strength: float = 0.1) -> None:
        self.size, self.strength = size, strength

    def __call__(self, images: Tensor, generator: torch.Generator, views: int = 2, **layout: Any) -> Tensor:
        pixels = torch.cat([self.plain(images)] * views)
        return pixels + self.strength * torch.rand(len(pixels), 1, 1, 1, generator=generator)

    def plain(self, images: Tensor) -> Tensor:
        """The images as the encoder takes them."""
        return images.float() / 255


def image_encoder(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())


def graphs(split: str) -> list[Any]:
    """Paths and stars of 5 to 8 nodes."""
    from torch_geometric.data import Data

    made = []
    for number in range(40):
        others = torch.arange(1, 5 + number // 2 % 4)
        pairs = torch.stack([torch.zeros_like(others) if number % 2 else others - 1, others])
        edges = torch.cat([pairs, pairs.flip(0)], dim=1)
        degrees = edges[0].bincount()[:, None].float()
        made.append(Data(x=degrees, edge_index=edges, y=torch.tensor([number % 2])))
    return made


class NoisyFeatures:
    """Views of graphs that add noise to the features of nodes."""

    def __init__(self, strength: float = 0.1) -> None:
        self.strength = strength

    def __call__(self, batch: Any, generator: torch.Generator, views: int = 2, **part: Any) -> Any:
        from torch_geometric.data import Batch

        both = Batch.from_data_list([graph for _ in range(views) for graph in batch.to_data_list()])
        both.x = both.x + self.strength * torch.randn(both.x.shape, generator=generator)
        return both


class DegreeEncoder(nn.Module):
    """A graph encoder: a linear map of the nodes, and their mean."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.features = width
        self.map = nn.Linear(1, width)

    def forward(self, batch: Any) -> Tensor:
        nodes = torch.relu(self.map(batch.x))  # (n, width)
        sums = nodes.new_zeros(int(batch.num_graphs), self.features).index_add(0, batch.batch, nodes)
        return sums / batch.batch.bincount(minlength=int(batch.num_graphs))[:, None]

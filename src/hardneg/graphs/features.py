"""Features of whole sets of graphs."""

import torch
from torch import Tensor, nn

from hardneg.evaluation.features import evaluating
from hardneg.graphs.data import GraphSet


@torch.no_grad()
def extract_graphs(encoder: nn.Module, graphs: GraphSet, batch_size: int = 512) -> Tensor:
    """Features (N, d) of every graph of a set, in evaluation mode, on the device of the encoder.

    encoder: maps a PyG batch to (B, d) · graphs: the set · batch_size: graphs per batch
    """
    device = next(iter(encoder.parameters()), graphs.x).device
    with evaluating(encoder):
        parts = torch.split(torch.arange(len(graphs)), batch_size)
        return torch.cat([encoder(graphs.batch(part).to(device)) for part in parts])

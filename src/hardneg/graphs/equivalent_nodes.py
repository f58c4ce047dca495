"""Equivalent nodes: nodes of one graph that message passing cannot distinguish, so that one can represent all."""

import torch
from torch import Tensor

from hardneg.matmul import where_precise

ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # SplitMix64's constants as signed numbers


def equivalent_nodes(x: Tensor, edge_index: Tensor, graph_of_node: Tensor, hops: int) -> Tensor:
    """The first node that is equivalent to each node, (n,); the node itself if no earlier one is.

    Equivalent nodes are in one graph, have equal features and receive equal messages for ``hops`` rounds: color
    refinement (Weisfeiler and Leman 1968). ``hops`` layers of sums over neighbors give them equal embeddings.

    x: (n, F) features · edge_index: (2, E), messages go from the first row to the second · graph_of_node: (n,) ·
    hops: ≥ 0

    Features and messages are compared by 64-bit hashes: among a million nodes, two different ones are taken for
    equivalent with a probability of about 10⁻⁷.

    Examples:
        >>> star = torch.tensor([[0, 1, 0, 2], [1, 0, 2, 0]])
        >>> equivalent_nodes(torch.ones(4, 1), star, torch.tensor([0, 0, 0, 1]), hops=2)
        tensor([0, 1, 1, 3])
    """
    color = _hash(graph_of_node)  # (n,)
    # torch.unique by rows takes a hundred times as long.
    for column in (where_precise(x).double() + 0.0).view(torch.int64).T.to(color.device):  # as bits; −0 becomes 0
        color = _hash(color * ODD[0] + _hash(column))
    color = _numbered(color)
    sources, targets = edge_index
    for _ in range(hops):
        message = _hash(color)  # (n,)
        received = torch.zeros_like(message).index_add_(0, targets, message[sources])
        color = _numbered(message * ODD[0] + _hash(received))
    nodes = torch.arange(len(color), device=color.device)
    first: Tensor = torch.zeros_like(nodes).scatter_reduce_(0, color, nodes, "amin", include_self=False)
    return first[color]


def _numbered(values: Tensor) -> Tensor:
    """Equal numbers from 0 for equal values, (n,)."""
    numbers: Tensor = torch.unique(values, return_inverse=True)[1]
    return numbers


def _hash(values: Tensor) -> Tensor:
    """A 64-bit hash of each integer, different for different ones (the last steps of SplitMix64)."""
    mixed = values + ODD[0]
    for shift, factor in ((30, ODD[1]), (27, ODD[2])):
        # Shifting a signed number copies its sign, which the mask removes.
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return mixed ^ ((mixed >> 31) & ((1 << 33) - 1))

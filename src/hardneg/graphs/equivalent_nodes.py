"""Twins: nodes of one graph that message passing cannot tell apart, so that one of them may stand for all."""

import torch
from torch import Tensor

from hardneg.matmul import where_precise

ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # of splitmix64, as signed numbers


def twins(x: Tensor, edge_index: Tensor, owner: Tensor, hops: int) -> Tensor:
    """The first node that is a twin of each node, (n,): itself, if none comes before it.

    Twins are in one graph, have the same features, and hear the same from their neighbours, for so many hops: colour
    refinement (Weisfeiler and Leman 1968), in which every embedding by so many layers of sums over neighbours agrees.

    x: (n, F) features · edge_index: (2, E), of which messages run from the first to the second · owner: (n,) the graph
    of each node · hops: ≥ 0

    Features and what a node hears are told by 64-bit hashes: among a million nodes, two that differ pass for twins with
    a chance of about 10⁻⁷.

    Examples:
        >>> star = torch.tensor([[0, 1, 0, 2], [1, 0, 2, 0]])
        >>> twins(torch.ones(4, 1), star, torch.tensor([0, 0, 0, 1]), hops=2)
        tensor([0, 1, 1, 3])
    """
    kind = _hash(owner)  # (n,)
    # Row by row torch.unique takes a hundred times as long.
    for column in (where_precise(x).double() + 0.0).view(torch.int64).T.to(owner.device):  # as bits, −0 being 0
        kind = _hash(kind * ODD[0] + _hash(column))
    kind = _numbered(kind)
    sources, targets = edge_index
    for _ in range(hops):
        said = _hash(kind)  # (n,)
        heard = torch.zeros_like(said).index_add_(0, targets, said[sources])
        kind = _numbered(said * ODD[0] + _hash(heard))
    nodes = torch.arange(len(kind), device=kind.device)
    first: Tensor = torch.zeros_like(nodes).scatter_reduce_(0, kind, nodes, "amin", include_self=False)
    return first[kind]


def _numbered(values: Tensor) -> Tensor:
    """The same number from 0 on for equal values, (n,)."""
    numbers: Tensor = torch.unique(values, return_inverse=True)[1]
    return numbers


def _hash(values: Tensor) -> Tensor:
    """A scrambled 64-bit number for each whole number, different for different ones (splitmix64's last steps)."""
    mixed = values + ODD[0]
    for shift, factor in ((30, ODD[1]), (27, ODD[2])):
        # The shift of a signed number drags its sign along, which the mask takes off.
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return mixed ^ ((mixed >> 31) & ((1 << 33) - 1))

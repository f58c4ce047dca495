"""Finds, for each batch, the pairs of samples that are not negatives of each other."""

import torch
from torch import Tensor

from hardneg.losses.kernels.identities import are_in, expand


class BatchPairs:
    """Pairs of ids, by id, so that a batch costs as much as it has pairs, however long the list is.

    Args:
        pairs: (P, 2) ids ≥ 0, in any order

    Examples:
        >>> listed = BatchPairs(torch.tensor([[0, 5], [5, 9], [2, 3]]))
        >>> listed.of(torch.tensor([9, 0, 5]), within=True)
        tensor([[9, 5],
                [0, 5],
                [5, 0],
                [5, 9]])
    """

    def __init__(self, pairs: Tensor) -> None:
        self.count = len(pairs)
        entries = torch.cat([pairs, pairs.flip(1)])
        for column in (1, 0):
            entries = entries[entries[:, column].argsort(stable=True)]
        new = torch.ones(len(entries), dtype=torch.bool)
        new[1:] = (entries[1:] != entries[:-1]).any(dim=1)
        entries = entries[new]  # (E, 2), each once, by the first id
        self.ids, sizes = torch.unique_consecutive(entries[:, 0], return_counts=True)  # (I,)
        self.start, self.size = sizes.cumsum(0) - sizes, sizes  # of each id's partners
        self.partners = entries[:, 1].contiguous()  # (E,)

    def to(self, device: torch.device) -> "BatchPairs":
        """The same pairs on another device."""
        for name in ("ids", "start", "size", "partners"):
            setattr(self, name, getattr(self, name).to(device))
        return self

    def of(self, ids: Tensor, within: bool) -> Tensor:
        """The pairs (P, 2) of the ids (B,), on whose device the list is. within: only those of two of these ids"""
        ids = ids[are_in(self.ids, ids)]
        place = torch.searchsorted(self.ids, ids)
        number, position = expand(self.start[place], self.size[place])
        found = torch.stack([ids[number], self.partners[position]], dim=1)
        return found[are_in(ids.sort().values, found[:, 1])] if within else found

"""Candidates as integers in the order of their ranks.

A candidate is one int64 key, its score in the upper half and its index in the lower. The largest keys are the highest
scores and, among equal scores, the lowest indices, so that the result does not depend on the order of a search.
"""

import torch
from torch import Tensor

EMPTY = -(1 << 63)  # the key of no candidate
_LOW = (1 << 32) - 1


def packed(scores: Tensor, indices: Tensor) -> Tensor:
    """Keys of float32 scores and of indices below 2³², in the order of the scores, then of descending indices.

    Examples:
        >>> keys = packed(torch.tensor([0.5, -0.25, 0.5]), torch.tensor([7, 1, 2]))
        >>> unpacked(keys.sort(descending=True).values)
        (tensor([ 0.5000,  0.5000, -0.2500]), tensor([2, 7, 1]))
    """
    bits = (scores + 0.0).view(torch.int32).long()  # −0 becomes 0
    return (_ordered(bits) << 32) | (_LOW - indices)


def unpacked(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and indices of keys; −inf and −1 where there is no candidate."""
    scores = _ordered(keys >> 32).int().view(torch.float32)
    empty = keys == EMPTY
    return scores.masked_fill(empty, -torch.inf), (_LOW - (keys & _LOW)).masked_fill(empty, -1)


def _ordered(bits: Tensor) -> Tensor:
    """Bits of float32 as integers in the order of the numbers, and back: those of negative numbers are inverted."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)

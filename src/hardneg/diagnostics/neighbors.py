"""The nearest other samples of each anchor, exact, computed in tiles."""

from typing import NamedTuple

import torch
from torch import Tensor

from hardneg.checks import whole
from hardneg.losses.inputs import normalized
from hardneg.matmul import exact_products, largest_columns, row_blocks


class Hardest(NamedTuple):
    """The hardest negatives of each anchor, hardest first: indices (A, k) and their cosines (A, k)."""

    indices: Tensor
    cosines: Tensor


def nearest_others(features: Tensor, k: int, anchors: Tensor | None = None) -> Hardest:
    """Find the k other samples with the highest cosine to each anchor; of equal cosines, the first ones.

    features: (N, d), finite · k: at most N − 1 · anchors: (A,) indices into the features; None for all of them

    Examples:
        >>> nearest_others(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]), k=1).indices.tolist()
        [[1], [0], [1]]
    """
    size, k = len(features), whole("k", k)
    if k > size - 1:
        raise ValueError(f"k={k}, but an anchor has only {size - 1} other samples: lower k")
    rows = torch.arange(size, device=features.device) if anchors is None else anchors  # (A,)
    indices = torch.empty(len(rows), k, dtype=torch.int64, device=features.device)
    nearest = torch.empty(indices.shape, dtype=torch.promote_types(torch.float32, features.dtype), device=rows.device)
    with exact_products(features.device):
        unit = normalized(features.to(nearest.dtype))
        for block in row_blocks(len(rows), size):
            cosines = (unit[rows[block]] @ unit.T).clamp_(-1, 1)  # (R, N)
            cosines.scatter_(1, rows[block, None], -torch.inf)  # not itself
            columns = largest_columns(cosines, k).sort(dim=1).values  # (R, k)
            nearest[block], ranks = cosines.gather(1, columns).sort(dim=1, descending=True, stable=True)
            indices[block] = columns.gather(1, ranks)
    return Hardest(indices, nearest)

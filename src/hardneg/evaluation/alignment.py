"""Alignment and uniformity of embeddings (Wang & Isola 2020), exact, computed in tiles; a zero vector stays zero."""

import math

import torch
from torch import Tensor

from hardneg import checks
from hardneg.checks import TensorLike
from hardneg.losses.inputs import normalized
from hardneg.matmul import exact_products, row_blocks, where_precise

_ELEMENTS = 1 << 20  # of a tile of pairs: 8 MiB in float64, of which a few exist at a time


def alignment(z1: TensorLike, z2: TensorLike) -> float:
    """Mean squared distance ‖z − z⁺‖² of normalized positive pairs, from 0 (equal) to 4 (opposite); lower is better.

    z1, z2: (B, d), row i of each a view of sample i

    Examples:
        >>> alignment(torch.eye(3), torch.eye(3)), alignment(torch.eye(3), -2 * torch.eye(3))
        (0.0, 4.0)
    """
    return float(where_precise(squared_distances(z1, z2)).double().mean())


def uniformity(z: TensorLike) -> float:
    """Log of the mean of e^{−2‖z − z'‖²} over all pairs of different samples: how uniformly they cover the sphere.

    z: (B, d), B ≥ 2 · returns at most 0, the value of equal embeddings; lower is more uniform

    Examples:
        >>> uniformity(torch.ones(4, 3)), uniformity(torch.tensor([[1.0], [-1.0]]))
        (0.0, -8.0)
    """
    return math.log(float(mean_potentials(z).mean()))


def squared_distances(z1: TensorLike, z2: TensorLike) -> Tensor:
    """Squared distances ‖z − z⁺‖² of normalized positive pairs, (B,); z1, z2: (B, d)."""
    (z1, first), (z2, second) = checked_embeddings("z1", z1), checked_embeddings("z2", z2)
    dtype = torch.promote_types(first, second)
    if z1.shape != z2.shape:
        raise ValueError(f"z2 must have the shape {tuple(z1.shape)} of z1, got {tuple(z2.shape)}: pair the rows")
    with exact_products(z1.device):
        distance = normalized(z1.to(dtype)) - normalized(z2.to(dtype))  # (B, d)
        return distance.square().sum(dim=1)


def mean_potentials(z: TensorLike) -> Tensor:
    """The mean of e^{−2‖z − z'‖²} over the other samples z' for each sample z, (B,) float64; z: (B, d), B ≥ 2."""
    z, dtype = checked_embeddings("z", z)
    if len(z) < 2:
        raise ValueError(f"z must hold at least 2 samples to have pairs, got {len(z)}: pass a larger batch")
    z = where_precise(z)
    sums = torch.empty(len(z), dtype=torch.float64, device=z.device)
    with exact_products(z.device):
        unit = normalized(z.to(dtype))
        squares = unit.square().sum(dim=1)  # (B,): 1, or 0 for a zero vector
        for block in row_blocks(len(z), len(z), max(1, _ELEMENTS // len(z))):
            distances = (squares[block, None] + squares - 2 * (unit[block] @ unit.T)).clamp(min=0)  # (R, B)
            potentials = (-2 * distances.double()).exp()
            potentials.diagonal(block.start).zero_()  # not a pair: a sample with itself
            sums[block] = potentials.sum(dim=1)
    return sums / (len(z) - 1)


def checked_embeddings(name: str, given: TensorLike) -> tuple[Tensor, torch.dtype]:
    """Check embeddings (N, d); returns them as a tensor, and the dtype to compute in, which is at least float32."""
    vectors = checks.floating(name, checks.as_tensor(name, given))
    if vectors.dim() != 2 or 0 in vectors.shape:
        raise ValueError(f"{name} must have shape (N, d) with N, d ≥ 1, got {tuple(vectors.shape)}")
    if not bool(torch.stack(torch.aminmax(vectors.detach())).isfinite().all()):
        raise ValueError(f"{name} holds NaN or inf: look for a diverged encoder or an overflow in half precision")
    return vectors, torch.promote_types(torch.float32, vectors.dtype)

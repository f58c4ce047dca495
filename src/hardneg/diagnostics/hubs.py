"""Hubs: samples that are a hard negative of many anchors."""

from typing import NamedTuple

from torch import Tensor

from hardneg import checks
from hardneg.checks import TensorLike
from hardneg.diagnostics.neighbors import nearest_others
from hardneg.evaluation.alignment import checked_embeddings


class Hubs(NamedTuple):
    """How often each sample is among the k nearest other samples of an anchor.

    counts: (N,) anchors that each sample is near to; their mean is k · different: (N,) those of another class, None
    without labels · skewness: of the counts, 0 if all are equal; above 1 a few samples are hard negatives of many
    anchors (Radovanović et al. 2010) · unused: share of samples that are near to no anchor · order: (N,) samples by
    descending count; of equal counts, the first ones
    """

    counts: Tensor
    different: Tensor | None
    skewness: float
    unused: float
    order: Tensor


def hubs(features: TensorLike, k: int = 10, labels: TensorLike | None = None) -> Hubs:
    """Count how often each sample is one of the k hardest negatives (highest cosines) of the others; exact, in tiles.

    features: (N, d) · k: at most N − 1; of equal cosines, the first samples count · labels: (N,) integer, −1 =
    unknown, to count the anchors of another class separately; pairs with an unknown label are in neither

    Examples:
        >>> import torch
        >>> angles = torch.tensor([0.0, 0.5, 1.0, -1.2])
        >>> found = hubs(torch.stack([angles.cos(), angles.sin()], dim=1), k=1)
        >>> found.counts.tolist(), found.unused
        ([2, 2, 0, 0], 0.5)
    """
    features, _ = checked_embeddings("features", features)
    size = len(features)
    known = None
    if labels is not None:
        known = checks.integers("labels", checks.as_tensor("labels", labels), (size,), "one per row of features")
        known = known.to(features.device)[:, None]  # (N, 1)
    nearest = nearest_others(features, k).indices  # (N, k)
    counts = nearest.flatten().bincount(minlength=size)
    different = None
    if known is not None:
        other = known[nearest, 0]
        different = nearest[(known != other) & (known >= 0) & (other >= 0)].bincount(minlength=size)
    return Hubs(
        counts,
        different,
        _skewness(counts),
        float((counts == 0).sum()) / size,
        counts.argsort(descending=True, stable=True),
    )


def _skewness(counts: Tensor) -> float:
    """E(x − μ)³/σ³ of whole numbers, 0 if they are all equal."""
    values = counts.cpu().double()
    centered = values - values.mean()
    deviation = float(centered.square().mean().sqrt())
    return float(centered.pow(3).mean()) / deviation**3 if deviation > 0 else 0.0

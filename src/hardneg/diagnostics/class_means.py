"""Geometry of classes: how far samples are from the mean of their class, and the angles between class means."""

from typing import NamedTuple

import torch
from torch import Tensor

from hardneg import checks
from hardneg.checks import TensorLike
from hardneg.diagnostics.estimates import Estimate, mean_estimate
from hardneg.evaluation.alignment import checked_embeddings
from hardneg.losses.inputs import normalized
from hardneg.matmul import exact_products, row_blocks, where_precise


class ClassMeans(NamedTuple):
    """The means of the normalized embeddings of each class.

    labels: (C,) of the classes, ascending · counts: (C,) samples of each · directions: (C, d) unit vectors along the
    class means, zero for a mean of zero · spreads: (C,) mean of ‖z − mean‖² over the class's samples, from 0 (equal)
    to 1 · spread: its mean over all samples · cosine: mean of the cosines of pairs of class means, None with one
    class · target: −1/(C − 1), the cosine of every pair of a simplex, None with one class · deviation: mean of
    |cosine − target| over the pairs, 0 for a simplex · nearest: the highest cosine of a pair
    """

    labels: Tensor
    counts: Tensor
    directions: Tensor
    spreads: Tensor
    spread: Estimate
    cosine: float | None
    target: float | None
    deviation: float | None
    nearest: float | None

    def cosines(self) -> Tensor:
        """The cosines of all pairs of class means, (C, C)."""
        with exact_products(self.directions.device):
            return (self.directions @ self.directions.T).clamp(-1, 1)


def class_means(
    features: TensorLike, labels: TensorLike, *, centered: bool = False, population: int | None = None
) -> ClassMeans:
    """Within-class spread of normalized embeddings, and the cosines of class means against −1/(C − 1).

    features: (N, d) · labels: (N,) integer; samples with label −1 are left out · centered: subtract the mean of the
    class means before their cosines are computed. The embeddings that minimize a contrastive loss have class means
    that sum to zero; features after a ReLU do not, and all their cosines are positive without it · population: number
    of samples that these were drawn from, for the interval of ``spread`` (Student's t over samples)

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0]])
        >>> found = class_means(z, torch.tensor([0, 0, 1]))
        >>> found.spread.value, found.cosine, found.target, found.deviation
        (0.0, -1.0, -1.0, 0.0)
    """
    features, dtype = checked_embeddings("features", features)
    centered = checks.boolean("centered", centered)
    given = checks.integers("labels", checks.as_tensor("labels", labels), (len(features),), "one per row of features")
    given, features = where_precise(given).to(where_precise(features).device), where_precise(features)
    known = given >= 0
    if not bool(known.any()):
        raise ValueError("labels must be known (≥ 0) for at least 1 sample, and all are −1: pass labels of classes")
    with exact_products(features.device):
        unit = normalized(features[known].to(dtype)).double()  # (n, d)
        present, classes, counts = torch.unique(given[known], return_inverse=True, return_counts=True)
        sums = torch.zeros(len(present), unit.shape[1], dtype=unit.dtype, device=unit.device)
        means = sums.index_add_(0, classes, unit) / counts[:, None]  # (C, d)
        distances = (unit - means[classes]).square().sum(dim=1)  # (n,)
        spreads = torch.zeros(len(present), dtype=unit.dtype, device=unit.device).index_add_(0, classes, distances)
        # The rounding of a mean that is zero has no direction.
        compared = means - means.mean(dim=0) if centered else means
        directions = normalized(compared, smallest=1e-6)
        cosine, target, deviation, nearest = _pairs(directions)
    spread = mean_estimate(distances, population)
    return ClassMeans(present, counts, directions, spreads / counts, spread, cosine, target, deviation, nearest)


def _pairs(directions: Tensor) -> tuple[float | None, float | None, float | None, float | None]:
    """Mean cosine of the pairs of rows, its target, the mean distance from it, and the highest cosine, in tiles."""
    number = len(directions)
    if number < 2:
        return None, None, None, None
    target = -1 / (number - 1)
    total = distance = torch.zeros((), dtype=directions.dtype, device=directions.device)
    nearest = torch.full_like(total, -torch.inf)
    for rows in row_blocks(number, number):
        cosines = (directions[rows] @ directions.T).clamp(-1, 1)  # (R, C)
        own = cosines.diagonal(rows.start)
        own.fill_(target)  # not a pair: a class with itself
        total, distance = total + cosines.sum() - own.sum(), distance + (cosines - target).abs().sum()
        own.fill_(-torch.inf)
        nearest = torch.maximum(nearest, cosines.amax())
    pairs = number * (number - 1)
    return float(total) / pairs, target, float(distance) / pairs, float(nearest)

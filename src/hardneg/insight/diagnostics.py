"""Diagnostics of embeddings: cosines of pairs and hardest negatives.

All are exact, computed in tiles, of normalized vectors; a zero vector stays zero.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hardneg import checks
from hardneg.checks import TensorLike, whole
from hardneg.diagnostics.neighbors import Hardest, nearest_others
from hardneg.evaluation.alignment import checked_embeddings
from hardneg.losses.inputs import normalized
from hardneg.matmul import exact_products, row_blocks, where_precise
from hardneg.randomness import generator

MAX_SAMPLES = 2000  # histograms of more samples are computed from a random subset: two million pairs suffice


class Histograms(NamedTuple):
    """Histograms of the cosines of same-class and of different-class pairs.

    edges: (bins + 1,), from −1 to 1 · same, different: counts (bins,) · same_mean, different_mean: mean cosine, NaN
    without pairs
    """

    edges: Tensor
    same: Tensor
    different: Tensor
    same_mean: float
    different_mean: float


def cosine_histograms(features: TensorLike, labels: TensorLike, bins: int = 50, seed: int = 0) -> Histograms:
    """Compute histograms of the cosines of same-class and of different-class pairs, each pair counted once.

    features: (N, d) · labels: (N,) integer; samples with label −1 are left out · bins: of equal width, from −1 to
    1 · seed: of the random subset of 2,000 samples if there are more

    Examples:
        >>> same, other = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
        >>> found = cosine_histograms(torch.stack([same, same, other]), torch.tensor([0, 0, 1]), bins=2)
        >>> found.same.tolist(), found.different.tolist(), found.same_mean, found.different_mean
        ([0, 1], [0, 2], 1.0, 0.0)
    """
    features, dtype = checked_embeddings("features", features)
    bins = whole("bins", bins)
    features, labels = _labeled(where_precise(features), labels)
    if len(features) > MAX_SAMPLES:
        drawn = torch.randperm(len(features), generator=generator("cpu", seed))[:MAX_SAMPLES].to(features.device)
        features, labels = features[drawn], labels[drawn]
    counts = torch.zeros(2, bins, dtype=torch.int64, device=features.device)
    sums = torch.zeros(2, dtype=torch.float64, device=features.device)
    with exact_products(features.device):
        unit = normalized(features.to(dtype))
        later = torch.arange(len(unit), device=unit.device)
        for block in row_blocks(len(unit), max(1, len(unit))):  # all labels may be unknown
            cosines = (unit[block] @ unit.T).clamp(-1, 1)  # (R, N)
            once = later > later[block, None]  # (R, N): each pair once
            same = labels[block, None] == labels  # (R, N)
            bin_of = ((cosines + 1) * (bins / 2)).long().clamp(max=bins - 1)
            for row, pairs in enumerate((once & same, once & ~same)):
                counts[row] += bin_of[pairs].bincount(minlength=bins)
                sums[row] += cosines[pairs].double().sum()
    means = (sums / counts.sum(dim=1)).tolist()  # NaN without pairs
    return Histograms(torch.linspace(-1, 1, bins + 1), counts[0].cpu(), counts[1].cpu(), means[0], means[1])


def hardest_negatives(features: TensorLike, anchors: TensorLike, k: int) -> Hardest:
    """Find the k other samples with the highest cosine to each anchor; of equal cosines, the first ones.

    features: (N, d) · anchors: (A,) indices into them · k: at most N − 1

    Examples:
        >>> features = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.8, 0.6], [-1.0, 0.0]])
        >>> hardest_negatives(features, torch.tensor([0]), k=2).indices
        tensor([[2, 1]])
    """
    features, _ = checked_embeddings("features", features)
    anchors = checks.as_tensor("anchors", anchors)
    if anchors.dim() != 1:
        raise ValueError(f"anchors must have shape (A,), got {tuple(anchors.shape)}: flatten them")
    anchors = checks.integers("anchors", anchors, (len(anchors),), "one index per anchor").to(features.device)
    checks.require_in_range("anchors", anchors, len(features))
    return nearest_others(features, k, anchors)


def hardest_false_share(features: TensorLike, labels: TensorLike, k: int | None = None) -> float:
    """Share of the k hardest negatives that have the anchor's label, mean over all anchors, in [0, 1].

    features: (N, d) · labels: (N,) integer; samples with label −1 are left out, as anchors and as negatives · k:
    number of hardest negatives; None for all other samples, which is the expected share in a uniform batch

    Examples:
        >>> features = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
        >>> hardest_false_share(features, torch.tensor([0, 0, 1, 1]), k=1)
        1.0
        >>> round(hardest_false_share(features, torch.tensor([0, 0, 1, 1])), 4)
        0.3333
    """
    features, labels = _labeled(checked_embeddings("features", features)[0], labels)
    if len(labels) < 2:
        raise ValueError(f"labels must be known (≥ 0) for at least 2 samples, got {len(labels)}")
    if k is None:
        counts = torch.unique(labels, return_counts=True)[1]
        return int((counts * (counts - 1)).sum()) / (len(labels) * (len(labels) - 1))
    nearest = nearest_others(features, k).indices  # (N, k)
    return int((labels[nearest] == labels[:, None]).sum()) / nearest.numel()


def _labeled(features: Tensor, given: TensorLike) -> tuple[Tensor, Tensor]:
    """The features and labels of the samples with a label ≥ 0."""
    labels = checks.as_tensor("labels", given)
    labels = checks.integers("labels", labels, (len(features),), "one per row of features").to(features.device)
    return features[labels >= 0], labels[labels >= 0]

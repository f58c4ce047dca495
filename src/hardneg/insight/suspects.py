"""Pairs of samples that are treated as negatives but probably are not: suspected false negatives, for review."""

from typing import NamedTuple

import torch
from torch import Tensor

from hardneg import checks
from hardneg.checks import TensorLike, whole
from hardneg.diagnostics.neighbors import nearest_others
from hardneg.evaluation.alignment import checked_embeddings
from hardneg.losses.inputs import normalized
from hardneg.matmul import exact_products, row_blocks, where_precise

_TILE = 1 << 23  # elements of the largest temporary: 32 MiB in float32


class Suspects(NamedTuple):
    """Pairs of row numbers (P, 2), the smaller number first, their scores (P,) in [0, 1], and a reason for each.

    The highest score comes first.
    """

    pairs: Tensor
    scores: Tensor
    reasons: list[str]


def suspected_false_negatives(
    features: TensorLike,
    labels: TensorLike | None = None,
    guide: TensorLike | None = None,
    k: int = 10,
    count: int = 500,
) -> Suspects:
    """Find the pairs of samples that are most probably no negatives of each other, for a person to confirm.

    features: (N, d), N ≥ 2 · labels: (N,) integer, −1 where unknown; a pair with one known label is left out, because
    the labels already say that it is no negative · guide: (N, d') features of the same samples by a stronger
    model · k: nearest neighbors of a sample, of which there may be fewer; only a pair with one among the neighbors of
    the other is considered · count: the most pairs that are returned

    A pair's score is the mean of what is known of it, each in [0, 1]: its cosine above the mean cosine of all pairs;
    the shared part of both neighborhoods (intersection over union); with labels, the larger share of one sample's
    neighbors that have the other's label; with a guide, the guide's cosine above its mean. The cosines are computed in
    tiles: memory is linear in N.

    Examples:
        >>> features = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, -0.1], [-0.1, 1.0], [0.1, 1.0]])
        >>> found = suspected_false_negatives(features, k=2, count=1)
        >>> found.pairs.tolist(), found.reasons
        ([[0, 1]], ['cosine 0.995, 3 of 3 neighbors shared'])
    """
    features, dtype = checked_embeddings("features", features)
    if len(features) < 2:
        raise ValueError(f"features must hold at least 2 samples, got {len(features)}")
    k, count = min(whole("k", k), len(features) - 1), whole("count", count)
    known = None
    if labels is not None:
        known = checks.integers("labels", checks.as_tensor("labels", labels), (len(features),), "one per row")
        known = known.to(features.device)
    stronger = None
    if guide is not None:
        given, guide_dtype = checked_embeddings("guide", guide)
        if len(given) != len(features):
            raise ValueError(f"guide has {len(given)} rows, but features {len(features)}: pass the same samples")
        stronger = where_precise(given).to(features.device, guide_dtype)
    with exact_products(features.device):
        unit = normalized(features.to(dtype))
        neighbors = nearest_others(features, k).indices  # (N, k)
        pairs = _candidate_pairs(neighbors, known)  # (P, 2)
        cosines = _cosines(unit, pairs)  # (P,)
        evidence = [_above_chance(unit, cosines)]
        around = torch.cat([torch.arange(len(unit), device=unit.device)[:, None], neighbors], dim=1)  # (N, k + 1)
        shared = _shared(around, pairs)  # (P,)
        evidence.append(shared / (2 * (k + 1) - shared))
        votes = None
        if known is not None:
            votes = _votes(known, neighbors, pairs)  # (P, 2)
            evidence.append(votes.amax(dim=1) / k)
        guide_cosines = None
        if stronger is not None:
            guide_unit = normalized(stronger)
            guide_cosines = _cosines(guide_unit, pairs)
            evidence.append(_above_chance(guide_unit, guide_cosines))
        scores = torch.stack([each.to(dtype) for each in evidence]).mean(dim=0)  # (P,)
    # Of equal scores, the first pairs: the result does not depend on the device.
    best = scores.sort(descending=True, stable=True).indices[:count]
    reasons = [
        _reason(
            k,
            float(cosines[row]),
            int(shared[row]),
            None if votes is None else votes[row].tolist(),
            None if guide_cosines is None else float(guide_cosines[row]),
        )
        for row in best.tolist()
    ]
    return Suspects(pairs[best].cpu(), scores[best].cpu(), reasons)


def _candidate_pairs(neighbors: Tensor, labels: Tensor | None) -> Tensor:
    """Each pair once, (P, 2) with the smaller row first, in ascending order; pairs of one known label are left out."""
    rows = torch.arange(len(neighbors), device=neighbors.device)[:, None].expand_as(neighbors)
    low, high = torch.minimum(rows, neighbors), torch.maximum(rows, neighbors)
    keys = torch.unique(low * len(neighbors) + high)
    pairs = torch.stack([keys // len(neighbors), keys % len(neighbors)], dim=1)
    if labels is None:
        return pairs
    one, other = labels[pairs].unbind(dim=1)
    return pairs[(one != other) | (one < 0)]


def _cosines(unit: Tensor, pairs: Tensor) -> Tensor:
    found = unit.new_empty(len(pairs))
    for block in row_blocks(len(pairs), unit.shape[1], max(1, _TILE // unit.shape[1])):
        one, other = pairs[block].unbind(dim=1)
        found[block] = (unit[one] * unit[other]).sum(dim=1)
    return found.clamp(-1, 1)


def _above_chance(unit: Tensor, cosines: Tensor) -> Tensor:
    """Cosines on a scale from the mean of all pairs (0) to 1: in a narrow cone, high cosines alone say nothing."""
    total = float(unit.sum(dim=0).square().sum()) - float(unit.square().sum())
    mean = total / (len(unit) * (len(unit) - 1))
    return ((cosines - mean) / max(1 - mean, 1e-12)).clamp(0, 1)


def _shared(around: Tensor, pairs: Tensor) -> Tensor:
    """Number of samples in both neighborhoods, (P,). around: (N, k + 1), each sample and its neighbors"""
    found = torch.empty(len(pairs), dtype=torch.int64, device=pairs.device)
    width = around.shape[1]
    for block in row_blocks(len(pairs), width * width, max(1, _TILE // (width * width))):
        one, other = pairs[block].unbind(dim=1)
        found[block] = (around[one][:, :, None] == around[other][:, None, :]).sum(dim=(1, 2))
    return found


def _votes(labels: Tensor, neighbors: Tensor, pairs: Tensor) -> Tensor:
    """How many neighbors of the first have the second's label, and of the second the first's, (P, 2)."""
    around = labels[neighbors]  # (N, k)
    one, other = pairs.unbind(dim=1)
    found = [
        ((around[row] == labels[opposite, None]) & (labels[opposite, None] >= 0)).sum(dim=1)
        for row, opposite in ((one, other), (other, one))
    ]
    return torch.stack(found, dim=1)


def _reason(k: int, cosine: float, shared: int, votes: list[int] | None, guide: float | None) -> str:
    parts = [f"cosine {cosine:.3f}", f"{shared} of {k + 1} neighbors shared"]
    if votes is not None and max(votes):
        parts.append(f"{max(votes)} of {k} neighbors of one have the other's label")
    if guide is not None:
        parts.append(f"guide's cosine {guide:.3f}")
    return ", ".join(parts)

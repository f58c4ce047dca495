"""What embeddings look like: the numbers of METHODS, section 7, exact and tiled.

All of them compare directions: vectors are brought to unit length first, and a zero vector stays zero.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hardneg import checks
from hardneg.checks import whole
from hardneg.losses.inputs import normalized
from hardneg.matmul import exact_products, row_blocks, where_precise
from hardneg.randomness import generator

# All pairs of this many samples are looked at; of more, so many are drawn: two million pairs tell a histogram.
MOST = 2000


class Histograms(NamedTuple):
    """Cosines of same-class and different-class pairs: edges (bins + 1,) from −1 to 1, counts (bins,), and means.

    A mean is NaN where there is no such pair.
    """

    edges: Tensor
    same: Tensor
    different: Tensor
    same_mean: float
    different_mean: float


class Hardest(NamedTuple):
    """The hardest negatives of each anchor, hardest first: indices (A, k) and their cosines (A, k)."""

    indices: Tensor
    cosines: Tensor


def cosine_histograms(features: Tensor, labels: Tensor, bins: int = 50, seed: int = 0) -> Histograms:
    """Histograms of the cosines of same-class and of different-class pairs, each pair counted once.

    features: (N, d) · labels: (N,) integer; samples of label −1 are left out · bins: of equal width, from −1 to 1 ·
    seed: of the draw of 2,000 samples where there are more

    Examples:
        >>> same, other = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
        >>> found = cosine_histograms(torch.stack([same, same, other]), torch.tensor([0, 0, 1]), bins=2)
        >>> found.same.tolist(), found.different.tolist(), found.same_mean, found.different_mean
        ([0, 1], [0, 2], 1.0, 0.0)
    """
    dtype = _check("features", features)
    whole("bins", bins)
    features, labels = _known(where_precise(features), where_precise(labels))
    if len(features) > MOST:
        drawn = torch.randperm(len(features), generator=generator("cpu", seed))[:MOST].to(features.device)
        features, labels = features[drawn], labels[drawn]
    counts = torch.zeros(2, bins, dtype=torch.int64, device=features.device)
    sums = torch.zeros(2, dtype=torch.float64, device=features.device)
    with exact_products(features.device):
        unit = normalized(features.to(dtype))
        later = torch.arange(len(unit), device=unit.device)
        for block in row_blocks(len(unit), max(1, len(unit))):  # no label may be known
            cosines = (unit[block] @ unit.T).clamp(-1, 1)  # (R, N)
            once = later > later[block, None]  # (R, N): a pair is met from its earlier sample only
            alike = labels[block, None] == labels  # (R, N)
            bin_of = ((cosines + 1) * (bins / 2)).long().clamp(max=bins - 1)
            for row, pairs in enumerate((once & alike, once & ~alike)):
                counts[row] += bin_of[pairs].bincount(minlength=bins)
                sums[row] += cosines[pairs].double().sum()
    means = (sums / counts.sum(dim=1)).tolist()  # 0 / 0 is NaN: no pair, no mean
    return Histograms(torch.linspace(-1, 1, bins + 1), counts[0].cpu(), counts[1].cpu(), means[0], means[1])


def alignment(z1: Tensor, z2: Tensor) -> float:
    """How far positives are apart: the mean of ‖z − z⁺‖² over unit vectors, from 0 (together) to 4 (opposite).

    z1, z2: (B, d), row i of each a view of sample i

    Examples:
        >>> alignment(torch.eye(3), torch.eye(3)), alignment(torch.eye(3), -2 * torch.eye(3))
        (0.0, 4.0)
    """
    dtype = torch.promote_types(_check("z1", z1), _check("z2", z2))
    if z1.shape != z2.shape:
        raise ValueError(f"z2 must have the shape {tuple(z1.shape)} of z1, got {tuple(z2.shape)}: pair the rows")
    with exact_products(z1.device):
        apart = normalized(z1.to(dtype)) - normalized(z2.to(dtype))  # (B, d)
        return float(where_precise(apart.square().sum(dim=1)).double().mean())


def uniformity(z: Tensor) -> float:
    """How evenly embeddings cover the sphere: log of the mean of e^{−2‖z − z'‖²} over all pairs of different samples.

    z: (B, d), B ≥ 2 · returns at most 0, which is everything in one point; lower is more even

    Examples:
        >>> uniformity(torch.ones(4, 3)), uniformity(torch.tensor([[1.0], [-1.0]]))
        (0.0, -8.0)
    """
    dtype = _check("z", z)
    if len(z) < 2:
        raise ValueError(f"z must hold at least 2 samples to have pairs, got {len(z)}: pass a larger batch")
    z = where_precise(z)
    total = torch.zeros((), dtype=torch.float64, device=z.device)
    with exact_products(z.device):
        unit = normalized(z.to(dtype))
        squares = unit.square().sum(dim=1)  # (B,): 1, or 0 for a zero vector
        for block in row_blocks(len(z), len(z)):
            distances = (squares[block, None] + squares - 2 * (unit[block] @ unit.T)).clamp(min=0)  # (R, B)
            potentials = (-2 * distances.double()).exp()
            potentials.diagonal(block.start).zero_()  # a sample is no pair with itself
            total += potentials.sum()
    return math.log(float(total) / (len(z) * (len(z) - 1)))


def hardest_negatives(features: Tensor, anchors: Tensor, k: int) -> Hardest:
    """The k other samples nearest to each anchor by cosine; of equal ones, those that come first.

    features: (N, d) · anchors: (A,) indices into them · k: at most N − 1

    Examples:
        >>> features = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.8, 0.6], [-1.0, 0.0]])
        >>> hardest_negatives(features, torch.tensor([0]), k=2).indices
        tensor([[2, 1]])
    """
    dtype = _check("features", features)
    if not isinstance(anchors, Tensor) or anchors.dim() != 1:
        raise ValueError(f"anchors must be an integer tensor of shape (A,), got {_described(anchors)}")
    checks.integers("anchors", anchors, tuple(anchors.shape), "one index per anchor")
    anchors = anchors.to(features.device)
    checks.in_range("anchors", anchors, len(features))
    _check_k(k, len(features))
    indices = torch.empty(len(anchors), k, dtype=torch.int64, device=features.device)
    nearest = torch.empty(len(anchors), k, dtype=dtype, device=features.device)
    with exact_products(features.device):
        unit = normalized(features.to(dtype))
        for block in row_blocks(len(anchors), len(unit)):
            cosines = (unit[anchors[block]] @ unit.T).clamp(-1, 1)  # (R, N)
            cosines.scatter_(1, anchors[block, None], -torch.inf)
            ordered = cosines.sort(dim=1, descending=True, stable=True)
            indices[block], nearest[block] = ordered.indices[:, :k], ordered.values[:, :k]
    return Hardest(indices, nearest)


def hardest_false_share(features: Tensor, labels: Tensor, k: int | None = None) -> float:
    """Share of an anchor's k hardest negatives that have its own label, mean over all anchors, in [0, 1].

    features: (N, d) · labels: (N,) integer; samples of label −1 are left out, as anchors and as negatives · k: how many
    of the hardest; None for all other samples, which is the share in a batch that is drawn without labels

    Examples:
        >>> features = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
        >>> hardest_false_share(features, torch.tensor([0, 0, 1, 1]), k=1)
        1.0
        >>> round(hardest_false_share(features, torch.tensor([0, 0, 1, 1])), 4)
        0.3333
    """
    _check("features", features)
    features, labels = _known(features, labels)
    if len(labels) < 2:
        raise ValueError(f"labels must be known (≥ 0) for at least 2 samples, got {len(labels)}")
    if k is None:
        counts = torch.unique(labels, return_counts=True)[1]
        return int((counts * (counts - 1)).sum()) / (len(labels) * (len(labels) - 1))
    _check_k(k, len(features))
    found = hardest_negatives(features, torch.arange(len(features), device=features.device), k)
    return int((labels[found.indices] == labels[:, None]).sum()) / found.indices.numel()


def _check(name: str, vectors: Tensor) -> torch.dtype:
    """Check embeddings (N, d); returns the dtype to compute in, at least float32."""
    checks.floating(name, vectors)
    if vectors.dim() != 2 or 0 in vectors.shape:
        raise ValueError(f"{name} must have shape (N, d) with N, d ≥ 1, got {tuple(vectors.shape)}")
    if not bool(torch.stack(torch.aminmax(vectors.detach())).isfinite().all()):
        raise ValueError(f"{name} holds NaN or inf: look for a diverged encoder or an overflow in half precision")
    return torch.promote_types(torch.float32, vectors.dtype)


def _check_k(k: int, samples: int) -> None:
    whole("k", k)
    if k > samples - 1:
        raise ValueError(f"k={k}, but an anchor has only {samples - 1} other samples: lower k")


def _known(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The samples whose label is known."""
    labels = checks.integers("labels", labels, (len(features),), "one per row of features").to(features.device)
    return features[labels >= 0], labels[labels >= 0]


def _described(thing: object) -> str:
    return str(tuple(thing.shape)) if isinstance(thing, Tensor) else type(thing).__name__

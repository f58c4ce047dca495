"""Hardness of a batch, and the share of its negatives that are false (ProSampler, Figures 4, 8 and 9)."""

import torch
from torch import Tensor

from hardneg import checks
from hardneg.checks import TensorLike, as_tensor
from hardneg.losses.inputs import normalized
from hardneg.matmul import where_precise


def false_negative_share(labels: TensorLike) -> float:
    """Share of the pairs of a batch that have the same label, and are false negatives of each other.

    labels: (B,) integer, or (S, B) for the mean over S batches; −1 is unknown, and pairs with it are not counted ·
    returns a number in [0, 1], NaN if no batch has two labeled samples

    Examples:
        >>> round(false_negative_share([3, 3, 7]), 3)
        0.333
    """
    labels = as_tensor("labels", labels)
    if labels.dim() not in (1, 2) or labels.numel() == 0:
        raise ValueError(f"labels must be integers of shape (B,) or (S, B), got {tuple(labels.shape)}")
    labels = checks.integers("labels", labels, tuple(labels.shape), "a label per sample of each batch")
    shares = []
    for batch in labels.reshape(-1, labels.shape[-1]):  # (B,) each
        labeled = batch[batch != -1]
        if len(labeled) > 1:
            # Counts per class instead of a B × B comparison: a batch of 4,096 has 8 million pairs.
            _, counts = torch.unique(labeled, return_counts=True)
            shares.append(int((counts * (counts - 1)).sum()) / (len(labeled) * (len(labeled) - 1)))
    return sum(shares) / len(shares) if shares else float("nan")


def mean_cosine(embeddings: TensorLike) -> float:
    """Mean cosine similarity over the pairs of a batch, (B, d), as a measure of its hardness.

    Examples:
        >>> mean_cosine(torch.tensor([[1.0, 0.0], [5.0, 0.0], [0.0, 1.0]]))
        0.333...
    """
    return float(_pairwise_cosines(as_tensor("embeddings", embeddings)).mean())


def cosine_histogram(
    embeddings: TensorLike, bins: int = 40, allowed: TensorLike | None = None
) -> tuple[Tensor, Tensor]:
    """Histogram of the cosine similarities of the pairs of a batch.

    embeddings: (B, d), of any norm · bins: equal parts of [−1, 1] · allowed: (B, B) bool, symmetric, which pairs to
    count (default: all), such as ``labels[:, None] == labels`` for the false negatives · returns the counts (bins,),
    each pair once, and the edges of the bins (bins + 1,)

    Examples:
        >>> counts, edges = cosine_histogram(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]), bins=4)
        >>> counts.tolist(), edges.tolist()
        ([0, 0, 2, 1], [-1.0, -0.5, 0.0, 0.5, 1.0])
    """
    bins = checks.whole("bins", bins)
    embeddings = as_tensor("embeddings", embeddings)
    cosines = _pairwise_cosines(embeddings)
    if allowed is not None:
        allowed = as_tensor("allowed", allowed)
        size = len(embeddings)
        if allowed.shape != (size, size) or allowed.dtype != torch.bool:
            raise ValueError(
                f"allowed must be bool of shape {(size, size)}, got {allowed.dtype} {tuple(allowed.shape)}"
            )
        allowed = where_precise(allowed)
        rows, columns = torch.triu_indices(size, size, offset=1, device=allowed.device)
        cosines = cosines[allowed[rows, columns]]
    edges = torch.linspace(-1, 1, bins + 1, dtype=torch.float64)
    bin_index = ((cosines + 1) * (bins / 2)).long().clamp(0, bins - 1).cpu()  # a rounded cosine may exceed 1
    return bin_index.bincount(minlength=bins), edges


def _pairwise_cosines(embeddings: Tensor) -> Tensor:
    """Cosines of all pairs i < j of a batch: (B(B − 1)/2,) float64."""
    checks.floating("embeddings", embeddings)
    if embeddings.dim() != 2 or len(embeddings) < 2:
        raise ValueError(f"embeddings must have shape (B, d) with B ≥ 2, got {tuple(embeddings.shape)}")
    checks.require_finite("embeddings", embeddings)
    unit = normalized(where_precise(embeddings.detach()).double())
    rows, columns = torch.triu_indices(len(unit), len(unit), offset=1, device=unit.device)
    return (unit @ unit.T)[rows, columns]

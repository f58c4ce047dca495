"""Hardness of a batch, and the share of its negatives that are false (ProSampler, Figures 4, 8 and 9)."""

import torch
from torch import Tensor

from hardneg import checks
from hardneg.checks import TensorLike, as_tensor
from hardneg.losses.inputs import normalized
from hardneg.matmul import row_blocks, where_precise

_ELEMENTS = 1 << 20  # of a tile: 8 MiB in float64


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
    unit = _unit_vectors(as_tensor("embeddings", embeddings))
    # Σ_{i≠j} ⟨u_i, u_j⟩ = ‖Σ u‖² − Σ ‖u‖²: no matrix of pairs.
    pairs = unit.sum(dim=0).square().sum() - unit.square().sum()
    return float(pairs) / (len(unit) * (len(unit) - 1))


def cosine_histogram(
    embeddings: TensorLike, bins: int = 40, allowed: TensorLike | None = None
) -> tuple[Tensor, Tensor]:
    """Histogram of the cosine similarities of the pairs of a batch, computed in tiles.

    embeddings: (B, d), of any norm · bins: equal parts of [−1, 1] · allowed: (B, B) bool, symmetric, which pairs to
    count (default: all), such as ``labels[:, None] == labels`` for the false negatives · returns the counts (bins,),
    each pair once, and the edges of the bins (bins + 1,)

    Examples:
        >>> counts, edges = cosine_histogram(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]), bins=4)
        >>> counts.tolist(), edges.tolist()
        ([0, 0, 2, 1], [-1.0, -0.5, 0.0, 0.5, 1.0])
    """
    bins = checks.whole("bins", bins)
    unit = _unit_vectors(as_tensor("embeddings", embeddings))
    size = len(unit)
    if allowed is not None:
        allowed = as_tensor("allowed", allowed)
        if allowed.shape != (size, size) or allowed.dtype != torch.bool:
            raise ValueError(
                f"allowed must be bool of shape {(size, size)}, got {allowed.dtype} {tuple(allowed.shape)}"
            )
        allowed = allowed.to(unit.device)
    counts = torch.zeros(bins, dtype=torch.int64, device=unit.device)
    columns = torch.arange(size, device=unit.device)
    for rows in row_blocks(size, size, max(1, _ELEMENTS // size)):
        # Pairs i < j only: the columns left of the block are of earlier pairs.
        cosines = unit[rows] @ unit[rows.start :].T  # (R, B − start)
        counted = columns[rows.start :] > columns[rows, None]
        if allowed is not None:
            counted = counted & allowed[rows, rows.start :]
        # A rounded cosine may exceed 1.
        bin_index = ((cosines[counted] + 1) * (bins / 2)).long().clamp(0, bins - 1)
        counts += bin_index.bincount(minlength=bins)
    return counts.cpu(), torch.linspace(-1, 1, bins + 1, dtype=torch.float64)


def _unit_vectors(embeddings: Tensor) -> Tensor:
    """The checked embeddings of a batch, normalized: (B, d) float64."""
    checks.floating("embeddings", embeddings)
    if embeddings.dim() != 2 or len(embeddings) < 2:
        raise ValueError(f"embeddings must have shape (B, d) with B ≥ 2, got {tuple(embeddings.shape)}")
    checks.require_finite("embeddings", embeddings)
    return normalized(where_precise(embeddings.detach()).double())

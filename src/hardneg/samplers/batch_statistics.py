"""How hard a batch is, and how many of its negatives are false (ProSampler, Figures 4, 8 and 9)."""

import torch
from torch import Tensor

from hardneg import checks
from hardneg.checks import whole
from hardneg.losses.inputs import normalized
from hardneg.matmul import where_precise


def false_negative_share(labels: Tensor) -> float:
    """Share of the pairs of a batch that have the same label: negatives that should not be.

    labels: (B,) integer, or (S, B) for the mean over S batches; −1 is unknown, and pairs with it do not count · returns
    a number in [0, 1], NaN where no pair is known

    Examples:
        >>> round(false_negative_share(torch.tensor([3, 3, 7])), 3)
        0.333
    """
    if not isinstance(labels, Tensor) or labels.dim() not in (1, 2) or labels.numel() == 0:
        given = tuple(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"labels must be an integer tensor (B,) or (S, B), got {given}")
    labels = checks.integers("labels", labels, tuple(labels.shape), "a label per sample of each batch")
    shares = []
    for batch in labels.reshape(-1, labels.shape[-1]):  # (B,) each
        known = batch[batch != -1]
        if len(known) > 1:
            # By counts, not by pairs: a batch of 4,096 has 8 million of those.
            _, counts = torch.unique(known, return_counts=True)
            shares.append(int((counts * (counts - 1)).sum()) / (len(known) * (len(known) - 1)))
    return sum(shares) / len(shares) if shares else float("nan")


def mean_cosine(embeddings: Tensor) -> float:
    """Mean cosine of the pairs of a batch, (B, d): one number for its hardness.

    Examples:
        >>> mean_cosine(torch.tensor([[1.0, 0.0], [5.0, 0.0], [0.0, 1.0]]))
        0.333...
    """
    return float(_pairs(embeddings).mean())


def cosine_histogram(embeddings: Tensor, bins: int = 40, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """How many pairs of a batch have which cosine.

    embeddings: (B, d), of any length · bins: equal parts of [−1, 1] · allowed: (B, B) bool, symmetric, which pairs to
    count (default: all), such as ``labels[:, None] == labels`` for the false negatives · returns the counts (bins,),
    each pair once, and the edges of the bins (bins + 1,)

    Examples:
        >>> counts, edges = cosine_histogram(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]), bins=4)
        >>> counts.tolist(), edges.tolist()
        ([0, 0, 2, 1], [-1.0, -0.5, 0.0, 0.5, 1.0])
    """
    whole("bins", bins)
    cosines = _pairs(embeddings)
    if allowed is not None:
        size = len(embeddings)
        if allowed.shape != (size, size) or allowed.dtype != torch.bool:
            raise ValueError(
                f"allowed must be bool of shape {(size, size)}, got {allowed.dtype} {tuple(allowed.shape)}"
            )
        allowed = where_precise(allowed)
        rows, columns = torch.triu_indices(size, size, offset=1, device=allowed.device)
        cosines = cosines[allowed[rows, columns]]
    edges = torch.linspace(-1, 1, bins + 1, dtype=torch.float64)
    place = ((cosines + 1) * (bins / 2)).long().clamp(0, bins - 1).cpu()  # rounding may leave [−1, 1]
    return place.bincount(minlength=bins), edges


def _pairs(embeddings: Tensor) -> Tensor:
    """Cosines of all pairs i < j of a batch: (B(B − 1)/2,) float64."""
    checks.floating("embeddings", embeddings)
    if embeddings.dim() != 2 or len(embeddings) < 2:
        raise ValueError(f"embeddings must have shape (B, d) with B ≥ 2, got {tuple(embeddings.shape)}")
    checks.finite("embeddings", embeddings)
    unit = normalized(where_precise(embeddings.detach()).double())
    rows, columns = torch.triu_indices(len(unit), len(unit), offset=1, device=unit.device)
    return (unit @ unit.T)[rows, columns]

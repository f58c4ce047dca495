"""Other implementations of the loss, for `fused.py` and `loss.py`; HCL's published formula itself is in `loss.py`.

filled     HCL's published formula with the anchor's own entries filled instead of selected away: the same numbers,
           without the index that masked_select builds, and without a break in a compiled graph
chunked    the same, a block of rows at a time under torch.utils.checkpoint
tiled      plain InfoNCE in the manner of Inf-CL: square tiles, online log-sum-exp, tiles recomputed in the
           backward pass; neither hardening nor debiasing, and none of Inf-CL's communication
LIBRARIES  losses of other libraries as their users call them, each with ours that computes the same. Where the library
           need not be installed (lightly, sentence-transformers, open_clip), its operations are written out
supcon     SupCon's formula in plain PyTorch
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from loss import BETA, PRIOR, TEMPERATURE, published_hcl
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.checkpoint import checkpoint

import hardneg as hn

# Scores in a block of `chunked` (1 GiB in float32) and rows of a tile of `tiled`: large enough to fill a GPU.
CHUNK, TILE = 1 << 28, 8192
# Fill value of the anchor's own entries: at most a rounding error in any sum, with a finite logarithm.
NOTHING = 1e-30


def filled_hcl(z1: Tensor, z2: Tensor) -> Tensor:
    """HCL over the whole matrix, own entries filled."""
    z = torch.cat([normalize(z1, dim=1), normalize(z2, dim=1)])
    return _hcl(z, _reweighted(z, 0, len(z)))


def chunked_hcl(z1: Tensor, z2: Tensor) -> Tensor:
    """HCL by blocks of rows, each recomputed in the backward pass."""
    z = torch.cat([normalize(z1, dim=1), normalize(z2, dim=1)])
    height = max(1, CHUNK // len(z))
    parts = [
        checkpoint(_reweighted, z, start, start + height, use_reentrant=False, preserve_rng_state=False)
        for start in range(0, len(z), height)
    ]
    return _hcl(z, torch.cat(parts))


def tiled_infonce(z1: Tensor, z2: Tensor) -> Tensor:
    """NT-Xent by tiles."""
    z = torch.cat([normalize(z1, dim=1), normalize(z2, dim=1)])
    batch, kind = len(z1), z.device.type
    products = z.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else z
    with torch.autocast(kind, enabled=False):
        total: Tensor = _TiledLogSum.apply(products)  # type: ignore[no-untyped-call]
    positive = (z[:batch] * z[batch:]).sum(dim=1).repeat(2) / TEMPERATURE
    return (total - positive).mean()


def plain_supcon(z1: Tensor, z2: Tensor, labels: Tensor, temperature: float = 0.07) -> Tensor:
    """SupCon (Khosla et al. 2020, eq. 2) by masks and a log-softmax of the whole matrix, in float32."""
    z = torch.cat([normalize(z1, dim=1), normalize(z2, dim=1)])
    labels = labels.repeat(2)
    own = torch.eye(len(z), dtype=torch.bool, device=z.device)  # (2B, 2B)
    scores = (z @ z.T).float() / temperature
    log_probabilities = scores.masked_fill(own, -torch.inf).log_softmax(dim=1)
    positive = (labels[:, None] == labels) & ~own
    return -(log_probabilities.where(positive, 0).sum(dim=1) / positive.sum(dim=1)).mean()


def _reweighted(z: Tensor, start: int, stop: int) -> Tensor:
    """Q·R of the anchors ``start`` to ``stop`` against all rows of z (2B, d), as HCL's code computes it."""
    exponentials = torch.exp(z[start:stop] @ z.T / TEMPERATURE)  # (R, 2B)
    anchors = torch.arange(start, start + len(exponentials), device=z.device)
    own = torch.stack([anchors, (anchors + len(z) // 2) % len(z)], dim=1)  # (R, 2)
    negatives = exponentials.scatter(1, own, NOTHING)
    importance = (BETA * negatives.log()).exp()
    return (importance * negatives).sum(dim=1) / (importance.sum(dim=1) / (len(z) - 2))


def _hcl(z: Tensor, reweighted: Tensor) -> Tensor:
    batch, count = len(z) // 2, len(z) - 2
    positive = torch.exp((z[:batch] * z[batch:]).sum(dim=1) / TEMPERATURE).repeat(2)
    total = ((reweighted - PRIOR * count * positive) / (1 - PRIOR)).clamp(min=count * math.exp(-1 / TEMPERATURE))
    return -(positive / (positive + total)).log().mean()


class _TiledLogSum(torch.autograd.Function):
    """log Σ_{j≠i} e^{s_ij} of each row i of unit vectors (R, d), in float32."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        total = z.new_empty(len(z), dtype=torch.promote_types(z.dtype, torch.float32))
        for start in range(0, len(z), TILE):
            rows = slice(start, start + TILE)
            peak = torch.full_like(total[rows], -torch.inf)
            sums = torch.zeros_like(peak)
            for column in range(0, len(z), TILE):
                scores = _tile(z, start, column, total.dtype)
                highest = torch.maximum(peak, scores.amax(dim=1))
                sums = sums * (peak - highest).exp() + scores.sub_(highest[:, None]).exp_().sum(dim=1)
                peak = highest
            total[rows] = peak + sums.log()
        ctx.save_for_backward(z, total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        z, total = ctx.saved_tensors
        found = torch.zeros_like(z, dtype=total.dtype)
        for start in range(0, len(z), TILE):
            rows = slice(start, start + TILE)
            for column in range(0, len(z), TILE):
                weights = _tile(z, start, column, total.dtype).sub_(total[rows, None]).exp_().mul_(grad[rows, None])
                weights = weights.to(z.dtype)
                found[rows] += weights @ z[column : column + TILE]
                found[column : column + TILE] += weights.T @ z[rows]
        return found.div_(TEMPERATURE).to(z.dtype)


def _tile(z: Tensor, start: int, column: int, dtype: torch.dtype) -> Tensor:
    """Scores of the rows from ``start`` with those from ``column``, −inf on the diagonal."""
    scores = (z[start : start + TILE] @ z[column : column + TILE].T).to(dtype).div_(TEMPERATURE)
    return scores.fill_diagonal_(-torch.inf) if start == column else scores


class NTXent(nn.Module):
    """lightly's NTXentLoss without a memory bank: four blocks of logits, the diagonals of two selected away."""

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        views, batch = [normalize(z1, dim=1), normalize(z2, dim=1)], len(z1)
        others = ~torch.eye(batch, dtype=torch.bool)
        rows = []
        for own, other in (views, views[::-1]):
            crossed = torch.einsum("nc,mc->nm", own, other) / TEMPERATURE
            same = torch.einsum("nc,mc->nm", own, own) / TEMPERATURE
            rows.append(torch.cat([crossed, same[others].view(batch, -1)], dim=1))  # (B, 2B − 1)
        return cross_entropy(torch.cat(rows), torch.arange(batch).repeat(2))


class MultipleNegativesRanking(nn.Module):
    """sentence-transformers' loss of that name for pairs: rows by index, cosines times 20, log-sum of joined scores."""

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        documents, rows = torch.cat([z2]), torch.arange(len(z1))
        queries = normalize(z1[rows], p=2, dim=1)
        scores = torch.mm(queries, normalize(documents, p=2, dim=1).transpose(0, 1)) * 20.0
        positive = scores[rows, rows]
        return -(positive - torch.cat([scores], dim=1).logsumexp(dim=1)).mean()


class CrossEntropy(nn.Module):
    """SimCSE in plain code."""

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        scores = normalize(z1, dim=1) @ normalize(z2, dim=1).T * 20.0
        return cross_entropy(scores, torch.arange(len(scores)))


class Clip(nn.Module):
    """open_clip's ClipLoss, the features normalized and the scale learnt as in its models."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        images, texts, scale = normalize(z1, dim=-1), normalize(z2, dim=-1), self.log_scale.exp()
        by_image, by_text = scale * images @ texts.T, scale * texts @ images.T
        labels = torch.arange(len(by_image))
        return (cross_entropy(by_image, labels) + cross_entropy(by_text, labels)) / 2


class SupCon(nn.Module):
    """pytorch-metric-learning's SupConLoss, or ours, of classes with eight instances each."""

    def __init__(self, ours: bool, views: int) -> None:
        super().__init__()
        self.ours, self.views = ours, views
        if ours:
            self.loss: nn.Module = hn.supcon()
        else:
            from pytorch_metric_learning.losses import SupConLoss

            self.loss = SupConLoss(temperature=0.07)

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        labels = torch.arange(len(z1)) % max(2, len(z1) // 8)
        if self.ours:
            found: Tensor = self.loss(z1, z2 if self.views == 2 else None, labels=labels)
            return found
        found = self.loss(z1, labels) if self.views == 1 else self.loss(torch.cat([z1, z2]), labels.repeat(2))
        return found


# The peer and our loss of the same value, by the name of the row.
LIBRARIES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "lightly NT-Xent / simclr": (NTXent, lambda: hn.simclr(TEMPERATURE)),
    "HCL's code / hcl": (lambda: published_hcl, lambda: hn.hcl(BETA, PRIOR, TEMPERATURE)),
    "pytorch-metric-learning SupCon / supcon": (lambda: SupCon(False, 1), lambda: SupCon(True, 1)),
    "the same, two views": (lambda: SupCon(False, 2), lambda: SupCon(True, 2)),
    "MultipleNegativesRankingLoss / simcse": (MultipleNegativesRanking, hn.simcse),
    "cross-entropy of cosines / simcse": (CrossEntropy, hn.simcse),
    "open_clip ClipLoss / clip": (Clip, hn.clip),
}

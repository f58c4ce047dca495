"""The losses UCL, H-UCL, SCL and H-SCL of one model, and the assumption that orders two of them (H-SCL, Lemma 1)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hardneg import checks
from hardneg.checks import TensorLike
from hardneg.diagnostics.estimates import Estimate, instance_means, mean_estimate, share_estimate
from hardneg.evaluation.alignment import checked_embeddings
from hardneg.losses.hardening import Exponential, Hardening
from hardneg.losses.inputs import normalized
from hardneg.losses.kernels.interface import EXACT_SOFTPLUS
from hardneg.matmul import exact_products, row_blocks, where_precise

_ELEMENTS = 1 << 21  # of a tile


class AnchorLosses(NamedTuple):
    """The four losses of each anchor, and the two sides of Assumption 1; tensors are (A,), views after one another.

    ucl, h_ucl, scl, h_scl: losses log(1 + Q·E_q[e^s]·e^{−p}) · collisions, negatives: log E[e^s] under q_Hcol (hardened
    negatives of the anchor's class) and under q_HSCL (of other classes) · defined: whether the anchor has negatives of
    other classes, so that all four losses exist · comparable: whether it also has negatives of its class, so that
    Assumption 1 says something about it · instances: (A,) row of each anchor in z1 and z2
    """

    ucl: Tensor
    h_ucl: Tensor
    scl: Tensor
    h_scl: Tensor
    collisions: Tensor
    negatives: Tensor
    defined: Tensor
    comparable: Tensor
    instances: Tensor

    @property
    def assumption_1(self) -> Tensor:
        """Whether E_Hcol[e^s] ≥ E_HSCL[e^s], (A,) bool; False where it is not ``comparable``."""
        return self.comparable & (self.collisions >= self.negatives)


class LossOrdering(NamedTuple):
    """The four losses of one model with the same positives and the same Q, means over anchors.

    ucl, h_ucl, scl, h_scl: losses · gap: H-UCL − H-SCL, at least 0 where Assumption 1 holds (Lemma 1) · assumption_1:
    share of the comparable anchors with Assumption 1, None if there are none · anchors: number of anchors of the
    losses · comparable: number of anchors of the share

    Intervals are over instances, given the candidates: Student's t for losses, Wilson's for the share.
    """

    ucl: Estimate
    h_ucl: Estimate
    scl: Estimate
    h_scl: Estimate
    gap: Estimate
    assumption_1: Estimate | None
    anchors: int
    comparable: int


def anchor_losses(
    z1: TensorLike,
    z2: TensorLike,
    labels: TensorLike,
    *,
    temperature: float = 0.5,
    hardening: Hardening = Exponential(1.0),  # noqa: B008  # frozen
    negative_count: float | None = None,
    anchors: TensorLike | None = None,
) -> AnchorLosses:
    """UCL, H-UCL, SCL and H-SCL of each anchor, without debiasing, in tiles (H-SCL section III).

    The candidates of an anchor are both views of all other instances, its positive is its other view. q_UCL is
    uniform over them; q_H ∝ η(s)·q with the hardening η; SCL and H-SCL keep other classes, Hcol the anchor's class.

    z1, z2: (B, d), row i of each a view of instance i · labels: (B,) integer; instances with label −1 are left
    out · temperature: of the scores s · hardening: `Exponential` or `Threshold`, the same for H-UCL, H-SCL and
    Hcol · negative_count: Q of all four losses (default: the number of candidates, 2B − 2) · anchors: instances whose
    views are anchors (default: all)

    Examples:
        >>> z, y = torch.randn(8, 4), torch.arange(8) % 2
        >>> found = anchor_losses(z, z + 0.1 * torch.randn(8, 4), y)
        >>> found.h_scl.shape, bool((found.h_scl <= found.h_ucl)[found.assumption_1].all())
        (torch.Size([16]), True)
    """
    (z1, first), (z2, second) = checked_embeddings("z1", z1), checked_embeddings("z2", z2)
    if z1.shape != z2.shape:
        raise ValueError(f"z2 must have the shape {tuple(z1.shape)} of z1, got {tuple(z2.shape)}: pair the rows")
    known = checks.integers("labels", checks.as_tensor("labels", labels), (len(z1),), "one per row of z1")
    temperature = checks.number("temperature", temperature, above=0, below=float("inf"))
    _check_hardening(hardening)
    rows = _rows(anchors, known)
    hardening = hardening.in_scores(temperature)
    dtype = torch.promote_types(first, second)
    with exact_products(z1.device):
        views = [normalized(where_precise(z).to(dtype)).double() for z in (z1, z2)]
        device = views[0].device
        known, rows = known.to(device), rows.to(device)
        labeled = (known >= 0).nonzero()[:, 0]
        classes = known[labeled].repeat(2)  # (N,)
        candidates = torch.cat([view[labeled] for view in views])  # (N, d)
        number = float(max(len(candidates) - 2, 1)) if negative_count is None else negative_count
        log_q = math.log(checks.number("negative_count", number, above=0, below=float("inf")))
        tables: list[Tensor] = []
        for view, other in (views, views[::-1]):
            for part in row_blocks(len(rows), 1, max(1, _ELEMENTS // max(len(candidates), 1))):
                own = rows[part]
                scores = view[own] @ candidates.T / temperature  # (R, N)
                allowed = own[:, None] != labeled.repeat(2)
                same = known[own, None] == classes
                positive = torch.linalg.vecdot(view[own], other[own]) / temperature
                tables.append(_losses(scores, allowed, same, positive, hardening, log_q))
    table = torch.cat(tables, dim=1) if tables else torch.zeros(8, 0, dtype=torch.float64, device=device)  # (8, A)
    ucl, h_ucl, scl, h_scl, collisions, negatives, defined, comparable = table
    return AnchorLosses(
        ucl, h_ucl, scl, h_scl, collisions, negatives, defined > 0, comparable > 0, instances=rows.repeat(2)
    )


def loss_ordering(
    z1: TensorLike,
    z2: TensorLike,
    labels: TensorLike,
    *,
    temperature: float = 0.5,
    hardening: Hardening = Exponential(1.0),  # noqa: B008  # frozen
    negative_count: float | None = None,
    anchors: TensorLike | None = None,
) -> LossOrdering | None:
    """The means of `anchor_losses` over anchors, and the share of anchors with Assumption 1 (H-SCL figures 4 and 5).

    Arguments as for `anchor_losses` · returns None if no anchor has negatives of another class

    Examples:
        >>> z, y = torch.randn(32, 4), torch.arange(32) % 2
        >>> found = loss_ordering(z, z + 0.1 * torch.randn(32, 4), y)
        >>> found.anchors, found.ucl.low < found.ucl.value < found.ucl.high
        (64, True)
    """
    each = anchor_losses(
        z1,
        z2,
        labels,
        temperature=temperature,
        hardening=hardening,
        negative_count=negative_count,
        anchors=anchors,
    )
    if not bool(each.defined.any()):
        return None
    defined, comparable = each.defined.view(2, -1), each.comparable.view(2, -1)

    def mean(values: Tensor) -> Estimate:
        return mean_estimate(instance_means(values.view(2, -1), defined))

    gap = torch.where(each.defined, each.h_ucl - each.h_scl, 0.0)
    share = None
    if bool(comparable.any()):
        holds = instance_means(each.assumption_1.view(2, -1).double(), comparable)
        share = share_estimate(float(holds.mean()), len(holds))
    return LossOrdering(
        mean(each.ucl),
        mean(each.h_ucl),
        mean(each.scl),
        mean(each.h_scl),
        mean(gap),
        share,
        int(defined.sum()),
        int(comparable.sum()),
    )


def _losses(
    scores: Tensor, allowed: Tensor, same: Tensor, positive: Tensor, hardening: Hardening, log_q: float
) -> Tensor:
    """The fields of `AnchorLosses` without the last for a block of anchors, (8, R)."""
    lower, upper = hardening.bounds(None)
    inside = torch.ones_like(allowed)
    if lower is not None:
        inside &= scores >= lower
    if upper is not None:
        inside &= scores <= upper
    log_weight = hardening.log_weight(scores) if hardening.has_general_weights else hardening.tilt() * scores
    log_weight = log_weight.masked_fill(~inside, -torch.inf)
    flat = torch.zeros_like(scores)

    def log_mean(weight: Tensor, kept: Tensor) -> Tensor:
        """log E_q[e^s] with q ∝ e^weight on the candidates kept; −inf without any."""
        weight = weight.masked_fill(~kept, -torch.inf)
        empty = ~(weight > -torch.inf).any(dim=1)
        safe = weight.masked_fill(empty[:, None], 0)
        return (torch.logsumexp(safe + scores, 1) - torch.logsumexp(safe, 1)).masked_fill(empty, -torch.inf)

    own, others = allowed & same, allowed & ~same
    collisions, negatives = log_mean(log_weight, own), log_mean(log_weight, others)
    means = [log_mean(flat, allowed), log_mean(log_weight, allowed), log_mean(flat, others), negatives]
    losses = [softplus(log_q + mean - positive, threshold=EXACT_SOFTPLUS) for mean in means]  # (R,) each
    defined = negatives > -torch.inf
    flags = [defined.double(), (defined & (collisions > -torch.inf)).double()]
    return torch.stack([*losses, collisions, negatives, *flags])


def _check_hardening(hardening: Hardening) -> None:
    if not isinstance(hardening, Hardening):
        raise ValueError(f"hardening must be a Hardening, such as hn.Exponential(1.0), got {hardening!r}")
    if hardening.needs_positive or hardening.needs_guide or hardening.percentiles() is not None:
        raise ValueError(
            f"hardening={hardening!r} is not a function of the score alone: use hn.Exponential or hn.Threshold"
        )
    if any(True for _ in hardening.schedules()):
        raise ValueError(f"hardening={hardening!r} has a schedule: pass hardening.at(progress)")


def _rows(anchors: TensorLike | None, labels: Tensor) -> Tensor:
    """The labeled ones of the instances that are anchors, (R,)."""
    if anchors is None:
        return (labels >= 0).nonzero()[:, 0]
    rows = checks.as_tensor("anchors", anchors)
    rows = checks.integers("anchors", rows, (rows.numel(),), "one index per anchor").to(labels.device)
    checks.require_in_range("anchors", rows, len(labels))
    return rows[labels[rows] >= 0]

"""The reference kernel: whole score matrices, plain autograd, any floating dtype, no graph break under compile."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hardneg.losses.kernels import percentiles
from hardneg.losses.kernels.interface import (
    EXACT_SOFTPLUS,
    Eligibility,
    HalfCopies,
    LogSums,
    PairSupport,
    Rule,
    count_true,
    draw,
    per_row,
)

units = pair_loss = None  # computed by plain operations
pair_support = PairSupport()


def log_sums(
    anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor, eligibility: Eligibility, rule: Rule
) -> LogSums:
    """The two log-sums and the support size of each anchor's negatives.

    anchors: (A, d) · candidates: shared (N, d) or per anchor (B, N, d), one after the other · scale: (), 1/temperature
    """
    scores = score_matrix(anchors, candidates, scale)  # (A, N)
    return log_sums_of_scores(scores, eligibility, rule, slice(0, len(scores)))


def log_sums_of_scores(scores: Tensor, eligibility: Eligibility, rule: Rule, rows: slice) -> LogSums:
    """The log-sums of the anchors ``rows`` from their scores with all candidates, (R, N)."""
    kept = support(scores.detach(), eligibility, rule, rows)  # (R, N)
    if rule.log_weight is None:
        log_weight = rule.log_weights(scores)  # (R, N)
    else:
        # General weights get the scores of kept candidates only: elsewhere they, or their gradients, may be infinite.
        safe = scores.detach().masked_fill(~kept, -torch.inf).amax(dim=1, keepdim=True)
        log_weight = rule.log_weights(torch.where(kept, scores, safe.masked_fill(safe == -torch.inf, 0)))
        kept = kept & (log_weight != -torch.inf)  # NaN is kept: the loss becomes NaN
    if rule.draws is not None:
        picked = draw(kept, rule.draws[rows])  # (R, k)
        scores, log_weight = scores.gather(1, picked), log_weight.gather(1, picked)
        kept = kept.any(dim=1, keepdim=True).expand_as(picked)
    return sums(scores, log_weight, kept)


def sums(scores: Tensor, log_weight: Tensor, kept: Tensor) -> LogSums:
    """The log-sums of each row of ``scores`` (A, N) over the entries ``kept``."""
    nonempty = kept.any(dim=1)

    def row_maximum(values: Tensor) -> Tensor:
        highest = values.detach().masked_fill(~kept, -torch.inf).amax(dim=1, keepdim=True)
        return highest.masked_fill(~nonempty[:, None], 0)  # (A, 1)

    max_score, max_weight = row_maximum(scores), row_maximum(log_weight)
    # Rows that keep nothing are set to 0: with −inf throughout, second derivatives would be NaN.
    weight = (log_weight - max_weight).masked_fill(~kept, -torch.inf).masked_fill(~nonempty[:, None], 0)
    tilted = torch.logsumexp(weight + (scores - max_score).masked_fill(~kept, 0), dim=1)
    total = torch.logsumexp(weight, dim=1)
    return LogSums(
        torch.where(nonempty, tilted - total + max_score[:, 0], -torch.inf),
        torch.where(nonempty, total + max_weight[:, 0], -torch.inf),
        count_true(kept).to(scores.dtype),
    )


def positive_sums(
    anchors: Tensor,
    pool: Tensor,
    scale: Tensor,
    eligibility: Eligibility,
    offset: Tensor,
    half_copies: HalfCopies | None = None,
) -> tuple[Tensor, Tensor]:
    """Over each anchor's positives with scores p: Σ softplus(offset − p), and Σ p.

    anchors: (A, d) · pool: (N, d) · offset: (A,)
    """
    scores = score_matrix(anchors, [pool], scale)  # (A, N)
    positive = support(scores.detach(), eligibility, Rule(), slice(0, len(scores)))  # (A, N)
    terms = softplus(offset[:, None] - scores, threshold=EXACT_SOFTPLUS)  # (A, N)
    return terms.masked_fill(~positive, 0).sum(dim=1), scores.masked_fill(~positive, 0).sum(dim=1)


def score_matrix(anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor) -> Tensor:
    """Scores ⟨anchor, candidate⟩·scale of all anchors with all their candidates, (A, N)."""
    blocks = []
    for block in candidates:
        if block.dim() == 2:
            blocks.append(anchors @ block.T)  # (A, N)
        else:
            # (V, B, d): row i of the block holds the candidates of anchors i, i + B, …
            views = anchors.reshape(-1, len(block), anchors.shape[1])
            blocks.append(torch.einsum("vbd,bnd->vbn", views, block).flatten(0, 1))  # (A, N)
    products = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
    # Sums of scaled numbers would be rounded in another way for each candidate: equal cosines would get unequal ranks.
    return products * scale


def support(scores: Tensor, eligibility: Eligibility, rule: Rule, rows: slice) -> Tensor:
    """The negatives of the anchors ``rows`` with these scores, (R, N) bool; weights of zero are not excluded."""
    eligible = torch.ones_like(scores, dtype=torch.bool)
    eligibility.mask_(eligible, rows, False)
    return banded(scores, eligible, rule, rows)


def banded(
    scores: Tensor, eligible: Tensor, rule: Rule, rows: slice, columns: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Those of the eligible candidates (R, N) that are in the bands of the rule, (R, N) bool.

    columns: selects the columns of these scores from a matrix of all candidates, if they are not all
    """
    kept = eligible
    if rule.rings:
        band = percentiles.edges(scores.masked_fill(~eligible, -torch.inf), rule)
        kept = kept & ~band.outside(scores)
    if rule.lower is not None:
        kept = kept & (scores >= per_row(rule.lower, rows))
    if rule.upper is not None:
        kept = kept & (scores <= per_row(rule.upper, rows))
    if rule.guide is not None:
        outside = rule.guide.outside(rows)
        kept = kept & ~(outside if columns is None else columns(outside))
    return kept

"""Diagnostics of a call: statistics of its negatives, computed on request, so that training never waits for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hardneg.losses.candidates import CandidateSet
from hardneg.losses.kernels import Eligibility, PairRecord, Rule, reference, tiled
from hardneg.losses.kernels.interface import draw
from hardneg.losses.positives import OwnPositives


@dataclass(frozen=True)
class CallRecord:
    """The results of a call for one candidate set, kept for its diagnostics, without gradients; tensors are (A,).

    versions: of the candidates' tensors at the time of the call; None inside a compiled graph, which copies them
    """

    candidates: CandidateSet
    rule: Rule
    valid: Tensor
    floored: Tensor
    support: Tensor
    positive_count: Tensor
    versions: list[int | None] | None


class Diagnostics:
    """Statistics of one call.

    ``compute()`` returns: anchors · without_candidates, without_positives: anchors that contributed nothing, and why ·
    floored: anchors whose debiased negatives vanished · support: mean number of negatives ·
    effective_negatives: mean of 1/Σq², the effective sample size of the weighted negatives · positive_score,
    negative_score: means over positives and over the support. Each mean is over the anchors for which its quantity is
    defined; 0 if there are none.
    """

    def __init__(self, records: Sequence[CallRecord], scale: Tensor) -> None:
        self._records, self._scale = records, scale

    @torch.no_grad()
    def compute(self) -> dict[str, float]:
        """The statistics as numbers; this synchronizes with the device."""
        for record in self._records:
            if record.versions is not None and record.versions != record.candidates.versions():
                raise RuntimeError("the negatives of the last call were overwritten: read diagnostics() before that")
        effective, negative, positive = (
            torch.cat(column) for column in zip(*map(self._means, self._records), strict=True)
        )
        support = torch.cat([record.support for record in self._records])
        positives = torch.cat([record.positive_count for record in self._records])
        return {
            "anchors": len(support),
            "without_candidates": int((support == 0).sum()),
            "without_positives": int((positives == 0).sum()),
            "floored": sum(int(record.floored.sum()) for record in self._records),
            "support": _mean(support, support > 0),
            "effective_negatives": _mean(effective, support > 0),
            "positive_score": _mean(positive, positives > 0),
            "negative_score": _mean(negative, support > 0),
        }

    def _means(self, record: CallRecord) -> tuple[Tensor, Tensor, Tensor]:
        """Effective number of negatives, mean negative score and mean positive score of each anchor, (A,) each."""
        candidates, rule = record.candidates, record.rule
        effective, negative = torch.zeros_like(record.support), torch.zeros_like(record.support)
        blocks = tiled.strips(candidates.anchors, candidates.candidates, self._scale) if candidates.candidates else ()
        for rows, scores in blocks:
            kept = reference.support(scores, candidates.eligibility, rule, rows)
            log_weight = rule.log_weights(scores)
            kept &= log_weight > -torch.inf
            if rule.draws is not None:
                drawn = draw(kept, rule.draws[rows])
                scores, log_weight = scores.gather(1, drawn), log_weight.gather(1, drawn)
                kept = kept.any(dim=1, keepdim=True).expand_as(drawn)
            log_weight = log_weight.masked_fill(~kept, -torch.inf)
            total, squares = log_weight.logsumexp(dim=1), (2 * log_weight).logsumexp(dim=1)
            effective[rows] = (2 * total - squares).exp()
            negative[rows] = scores.masked_fill(~kept, 0).sum(dim=1) / kept.sum(dim=1).clamp(min=1)
        similarity = candidates.own_similarity
        if similarity is not None:
            return effective, negative, OwnPositives(similarity * self._scale, candidates.positive_mask).mean()
        zero = torch.zeros_like(record.support)
        _, total = tiled.positive_sums(candidates.anchors, candidates.pool, self._scale, candidates.same_label, zero)
        return effective, negative, total / record.positive_count.clamp(min=1)


def pair_record(found: PairRecord) -> CallRecord:
    """The record of a call whose kernel computed the whole loss of a paired batch."""
    same_label = Eligibility(0)
    if found.groups is not None:
        same_label = Eligibility(
            columns=len(found.candidates),
            excluded=torch.arange(len(found.anchors), device=found.anchors.device)[:, None],  # the anchor itself
            anchor_groups=found.groups,
            candidate_groups=found.groups,
            same_group=True,
        )
    candidates = CandidateSet(
        anchors=found.anchors,
        layout=found.layout,
        candidates=(found.candidates,),
        eligibility=found.eligibility,
        count_before_labels=lambda: found.count,
        pair_similarity=None if found.similarity is None else found.similarity[:, None],
        positive_mask=None,
        pool=found.anchors,
        same_label=same_label,
    )
    positive_count = torch.ones_like(found.losses) if found.positive_count is None else found.positive_count
    valid = (found.count > 0) & (positive_count > 0)
    # The kernel's own copies cannot be overwritten by the caller.
    return CallRecord(candidates, found.rule, valid, found.floored.bool(), found.count, positive_count, versions=None)


def _mean(values: Tensor, chosen: Tensor) -> float:
    return float(values[chosen].mean()) if bool(chosen.any()) else 0.0

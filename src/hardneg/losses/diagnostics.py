"""Diagnostics of a call: statistics of its negatives, computed on request, so that training never waits for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hardneg.losses.candidates import CandidateSet
from hardneg.losses.kernels import reference, tiled
from hardneg.losses.kernels.interface import Eligibility, PairRecord, RowLayout, Rule, draw
from hardneg.losses.positives import OwnPositives


@dataclass(frozen=True)
class CallRecord:
    """The results of a call for one direction, kept for its diagnostics, without gradients; tensors are (A,).

    sets, rules, supports, versions: one each, or one for each source with a distribution of its own · versions: of the
    candidates' tensors at the time of the call; None inside a compiled graph, which copies them
    """

    sets: tuple[CandidateSet, ...]
    rules: tuple[Rule, ...]
    valid: Tensor
    floored: Tensor
    supports: tuple[Tensor, ...]
    positive_count: Tensor
    versions: tuple[list[int | None] | None, ...]

    @property
    def support(self) -> Tensor:
        """The number of negatives of each anchor, (A,)."""
        return self.supports[0] if len(self.supports) == 1 else torch.stack(self.supports).sum(dim=0)

    @property
    def overwritten(self) -> bool:
        """Whether candidates were overwritten after the call."""
        kept = zip(self.versions, self.sets, strict=True)
        return any(versions is not None and versions != candidates.versions() for versions, candidates in kept)


def joined_record(records: Sequence[CallRecord]) -> CallRecord:
    """One record of the same anchors from one for each source."""
    return CallRecord(
        sets=tuple([candidates for record in records for candidates in record.sets]),
        rules=tuple([rule for record in records for rule in record.rules]),
        valid=torch.stack([record.valid for record in records]).any(dim=0),
        floored=torch.stack([record.floored for record in records]).any(dim=0),
        supports=tuple([support for record in records for support in record.supports]),
        positive_count=records[0].positive_count,
        versions=tuple([versions for record in records for versions in record.versions]),
    )


class Diagnostics:
    """Statistics of one call.

    ``compute()`` returns: anchors · without_candidates, without_positives: anchors that contributed nothing, and why ·
    floored: anchors whose debiased negatives vanished · support: mean number of negatives ·
    effective_negatives: mean of 1/Σq², the effective sample size of the weighted negatives, where each source counts
    in proportion to its number of negatives · effective_share: mean of the same divided by the number of negatives ·
    positive_score, negative_score: means over positives and over the support · beta: of an `EffectiveShare`, by source
    if it has one. Each mean is over the anchors for which its quantity is defined; 0 if there are none.
    """

    def __init__(self, records: Sequence[CallRecord], scale: Tensor, betas: Mapping[str, Tensor] | None = None) -> None:
        self._records, self._scale, self._betas = records, scale, betas or {}

    @torch.no_grad()
    def compute(self) -> dict[str, float]:
        """The statistics as numbers; this synchronizes with the device."""
        self._check_current()
        effective, negative, positive = (
            torch.cat(column) for column in zip(*map(self._means, self._records), strict=True)
        )
        support = torch.cat([record.support for record in self._records])
        positives = torch.cat([record.positive_count for record in self._records])
        effective = effective.minimum(support.to(effective))  # rounding may exceed it, and a share is at most 1
        return {
            "anchors": len(support),
            "without_candidates": int((support == 0).sum()),
            "without_positives": int((positives == 0).sum()),
            "floored": sum(int(record.floored.sum()) for record in self._records),
            "support": _mean(support, support > 0),
            "effective_negatives": _mean(effective, support > 0),
            "effective_share": _mean(effective / support.clamp(min=1), support > 0),
            "positive_score": _mean(positive, positives > 0),
            "negative_score": _mean(negative, support > 0),
            **{f"beta_{name}" if name else "beta": float(beta) for name, beta in self._betas.items()},
        }

    @property
    def temperature(self) -> float:
        """The temperature of the call."""
        return 1 / float(self._scale)

    @property
    def number_of_anchors(self) -> int:
        """The number of anchors of the call, of both directions if there are two."""
        return sum(len(record.valid) for record in self._records)

    def slopes(self, anchors: Tensor, normalize_weights: bool = True) -> Tensor:
        """∂log R/∂s_ij of the chosen anchors in each of their candidates, (n, N), 0 where an anchor has no gradient.

        R is E_q[e^s], the only part of an anchor's loss that its negatives enter unless weights are debiased exactly,
        so that ∂L/∂s_ij is a multiple of it. anchors: (n,) rows of the call · normalize_weights: as in `InfoNCE`
        """
        self._check_current()
        starts = [0]
        for record in self._records:
            if len(record.sets) != 1:
                raise ValueError("each source has a distribution of its own: slopes are of losses with one hardening")
            starts.append(starts[-1] + len(record.valid))
        found = []
        for anchor in anchors.tolist():
            number = next(n for n, end in enumerate(starts[1:]) if anchor < end)
            found.append(self._slope(self._records[number], anchor - starts[number], normalize_weights))
        return torch.stack(found)

    @torch.enable_grad()
    def _slope(self, record: CallRecord, row: int, normalize_weights: bool) -> Tensor:
        """∂log R/∂s of one anchor in its candidates, (N,)."""
        (candidates,), (rule,) = record.sets, record.rules
        dtype = torch.promote_types(torch.float32, candidates.anchors.dtype)  # the records may be half-precision copies
        anchor = candidates.anchors[row].to(dtype) * self._scale  # (d,)
        blocks = [block if block.dim() == 2 else block[row % len(block)] for block in candidates.candidates]  # (N, d)
        scores = torch.cat([block.to(dtype) @ anchor for block in blocks]).detach()  # (N,)
        slope = torch.zeros_like(scores)
        if bool(record.valid[row]) and not bool(record.floored[row]):
            scores.requires_grad_()
            rows = slice(row, row + 1)
            sums = reference.log_sums_of_scores(scores[None], candidates.eligibility, rule, rows)
            sums = sums if normalize_weights else sums.unnormalized()
            (slope,) = torch.autograd.grad(sums.mean.sum(), scores)
        if candidates.eligibility.crossed:  # both directions in one: the other half of the columns are no candidates
            half = len(slope) // 2
            return slope[half:] if row < half else slope[:half]
        return slope

    def _check_current(self) -> None:
        for record in self._records:
            if record.overwritten:
                raise RuntimeError("the negatives of the last call were overwritten: read diagnostics() before that")

    def _means(self, record: CallRecord) -> tuple[Tensor, Tensor, Tensor]:
        """Effective number of negatives, mean negative score and mean positive score of each anchor, (A,) each."""
        number = record.support
        squares, negative = torch.zeros_like(number), torch.zeros_like(number)
        for candidates, rule, support in zip(record.sets, record.rules, record.supports, strict=True):
            effective, scores = self._negative_means(candidates, rule, support)
            share = support / number.clamp(min=1)
            # Σq² of a mixture of distributions without common candidates, each of which has 1/Σq² = effective.
            squares += torch.where(support > 0, share.square() / effective.clamp(min=1e-30), 0.0)
            negative += share * scores
        effective = torch.where(number > 0, 1 / squares.clamp(min=1e-30), 0.0)
        candidates = record.sets[0]
        similarity = candidates.own_similarity
        if similarity is not None:
            return effective, negative, OwnPositives(similarity * self._scale, candidates.positive_mask).mean()
        zero, total = torch.zeros_like(number), torch.zeros_like(number)
        for part in candidates.labelled_rows:
            total += tiled.positive_sums(candidates.anchors, part.rows, self._scale, part.eligibility, zero)[1]
        return effective, negative, total / record.positive_count.clamp(min=1)

    def _negative_means(self, candidates: CandidateSet, rule: Rule, support: Tensor) -> tuple[Tensor, Tensor]:
        """Effective number of negatives and mean negative score of each anchor, (A,) each."""
        effective, negative = torch.zeros_like(support), torch.zeros_like(support)
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
        return effective, negative


def pair_record(found: PairRecord) -> CallRecord:
    """The record of a call whose kernel computed the whole loss of a paired batch."""
    rows, device = len(found.anchors), found.anchors.device
    same_label = Eligibility(0)
    if found.groups is not None:
        same_label = Eligibility(
            columns=len(found.candidates),
            excluded=torch.arange(rows, device=device)[:, None],  # the anchor itself
            anchor_groups=found.groups,
            candidate_groups=found.groups,
            same_group=True,
        )
    candidates = CandidateSet(
        anchors=found.anchors,
        layout=found.eligibility.own or RowLayout(rows, 1, 0, rows, device),
        candidates=(found.candidates,),
        eligibility=found.eligibility,
        count_before_labels=lambda: found.count,
        pair_similarity=None if found.similarity is None else found.similarity[:, None],
        positive_mask=None,
        pool=found.anchors,
        same_label=same_label,
    )
    positive_count = torch.ones_like(found.count) if found.positive_count is None else found.positive_count
    valid = (found.count > 0) & (positive_count > 0)
    # The kernel's own copies cannot be overwritten by the caller.
    floored = found.floored.bool()
    return CallRecord((candidates,), (found.rule,), valid, floored, (found.count,), positive_count, versions=(None,))


def _mean(values: Tensor, chosen: Tensor) -> float:
    return float(values[chosen].mean()) if bool(chosen.any()) else 0.0

"""What the negatives of a call were: numbers read only when asked for, so that training never waits for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hardneg.losses.candidates import Meeting
from hardneg.losses.kernels import Eligibility, PairRecord, Rule, reference, tiled
from hardneg.losses.kernels.interface import draw
from hardneg.losses.positives import Given


@dataclass(frozen=True)
class Answer:
    """The losses of a meeting's anchors and how they came about; tensors of shape (A,)."""

    meeting: Meeting
    rule: Rule
    losses: Tensor
    valid: Tensor
    floored: Tensor
    support: Tensor
    positive_count: Tensor


class Diagnostics:
    """A record of one call.

    ``read()`` gives: anchors · without_candidates, without_positives: anchors that contributed nothing, and why ·
    floored: anchors whose debiased negatives vanished · support: mean number of negatives ·
    effective_negatives: mean of 1/Σq², how many negatives the weights leave · positive_score, negative_score: means
    over positives and over the support. Means are over the anchors that have what is averaged; 0 if none has.
    """

    def __init__(self, answers: Sequence[Answer], scale: Tensor) -> None:
        self._answers = [
            Answer(a.meeting, a.rule, a.losses.detach(), a.valid, a.floored, a.support.detach(), a.positive_count)
            for a in answers
        ]
        self._scale = scale
        # A compiled graph makes its own copies, which nobody overwrites.
        compiling = torch.compiler.is_compiling()
        self._versions = None if compiling else [_versions(answer.meeting) for answer in answers]

    def floored(self) -> dict[str, Tensor]:
        """How many of how many valid anchors are floored."""
        return {"floored": self._sum("floored"), "anchors": self._sum("valid")}

    @torch.no_grad()
    def read(self) -> dict[str, float]:
        """The record as numbers; this waits for the device."""
        versions = self._versions
        if versions is not None and [_versions(answer.meeting) for answer in self._answers] != versions:
            raise RuntimeError("the negatives of the last call were overwritten: read diagnostics() before that")
        effective, negative, positive = (
            torch.cat(column) for column in zip(*map(self._means, self._answers), strict=True)
        )
        support = torch.cat([a.support for a in self._answers])
        positives = torch.cat([a.positive_count for a in self._answers])
        return {
            "anchors": len(support),
            "without_candidates": int((support == 0).sum()),
            "without_positives": int((positives == 0).sum()),
            "floored": int(self._sum("floored")),
            "support": _mean(support, support > 0),
            "effective_negatives": _mean(effective, support > 0),
            "positive_score": _mean(positive, positives > 0),
            "negative_score": _mean(negative, support > 0),
        }

    def _sum(self, name: str) -> Tensor:
        return torch.stack([getattr(answer, name).sum() for answer in self._answers]).sum()

    def _means(self, answer: Answer) -> tuple[Tensor, Tensor, Tensor]:
        """Effective number of negatives, mean negative score and mean positive score of each anchor, (A,) each."""
        meeting, rule = answer.meeting, answer.rule
        effective, negative = torch.zeros_like(answer.support), torch.zeros_like(answer.support)
        blocks = tiled.strips(meeting.anchors, meeting.candidates, self._scale) if meeting.candidates else ()
        for rows, scores in blocks:
            kept = reference.support(scores, meeting.eligibility, rule, rows)
            log_weight = rule.log_weights(scores)
            kept &= log_weight > -torch.inf
            if rule.draws is not None:
                picked = draw(kept, rule.draws[rows])
                scores, log_weight = scores.gather(1, picked), log_weight.gather(1, picked)
                kept = kept.any(dim=1, keepdim=True).expand_as(picked)
            log_weight = log_weight.masked_fill(~kept, -torch.inf)
            total, squares = log_weight.logsumexp(dim=1), (2 * log_weight).logsumexp(dim=1)
            effective[rows] = (2 * total - squares).exp()
            negative[rows] = scores.masked_fill(~kept, 0).sum(dim=1) / kept.sum(dim=1).clamp(min=1)
        if meeting.similarity is not None:
            return effective, negative, Given(meeting.similarity * self._scale, meeting.real).mean()
        nothing = torch.zeros_like(answer.support)
        _, total = tiled.positive_sums(meeting.anchors, meeting.pool, self._scale, meeting.friends, nothing)
        return effective, negative, total / answer.positive_count.clamp(min=1)


def answer_of_pairs(seen: PairRecord) -> Answer:
    """What a kernel that makes the whole loss of pairs let one see, as an `Answer`."""
    nothing = torch.zeros_like(seen.losses)
    meeting = Meeting(
        anchors=seen.anchors,
        layout=seen.layout,
        candidates=(seen.candidates,),
        eligibility=seen.eligibility,
        met=lambda: nothing,  # nobody asks
        pairs=seen.similarity[:, None],
        real=None,
        pool=seen.anchors,
        friends=Eligibility(0),
    )
    return Answer(meeting, seen.rule, seen.losses, seen.count > 0, seen.floored.bool(), seen.count, nothing + 1)


def _versions(meeting: Meeting) -> list[int | None]:
    # Inference tensors have no version, and cannot be overwritten outside inference mode.
    return [None if block.is_inference() else block._version for block in meeting.candidates]


def _mean(numbers: Tensor, chosen: Tensor) -> float:
    return float(numbers[chosen].mean()) if bool(chosen.any()) else 0.0

"""The two kinds of sums that the fused kernel computes per anchor: log-sums over negatives, and sums over positives."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hardneg.losses.kernels.interface import Eligibility, Rule
from hardneg.losses.kernels.strips import SAFE_EXPONENT
from hardneg.losses.kernels.triton import score_tile
from hardneg.losses.kernels.triton.percentile_bands import known_ranks

# A smaller tilt changes no sum, and might be rounded to 0, which times −inf would be NaN.
LEAST_TILT = 1e-30

NONE, ANY = int(score_tile.NONE.value), int(score_tile.ANY.value)
KINDS = {1.0: int(score_tile.ONE.value), 2.0: int(score_tile.TWO.value), 0.5: int(score_tile.HALF.value)}


@dataclass(frozen=True)
class NegativeSums:
    """The two log-sums and the count of `LogSums`, over the negatives of each anchor."""

    eligibility: Eligibility
    rule: Rule
    counts: Tensor | None = None  # (A,) if known beforehand

    @property
    def kind(self) -> int:
        tilt = self.rule.tilt
        if isinstance(tilt, Tensor):
            return ANY
        return KINDS.get(tilt, ANY) if tilt > LEAST_TILT else NONE

    @property
    def bounded(self) -> bool:
        """Whether all exponentials are within the range of float32, so that rows need no maximum."""
        tilt, largest = self.rule.tilt, self.rule.max_abs_score
        return largest is not None and not isinstance(tilt, Tensor) and (tilt + 1) * largest <= SAFE_EXPONENT

    @property
    def counted(self) -> bool:
        """Whether the kernel must count the negatives, because their number is not known beforehand."""
        bounded = self.rule.lower is not None or self.rule.upper is not None  # the size of a ring alone is known
        return self.counts is None and (
            bounded or not self.eligibility.is_plain or self.eligibility.excluded is not None
        )

    @property
    def symmetric(self) -> bool:
        """Whether ∂L/∂s_ji can be computed in the tile of s_ij, given that the scores are symmetric."""
        rule = self.rule
        one_for_all = not isinstance(rule.lower, Tensor) and not isinstance(rule.upper, Tensor)
        return one_for_all and not rule.rings and self.eligibility.allowed is None

    def known_count(self) -> int:
        """The number of negatives of every anchor, if they need not be counted."""
        if not self.rule.rings:
            return self.eligibility.count_per_anchor
        first, end = known_ranks(self.eligibility.count_per_anchor, self.rule.rings)
        return max(0, end - first)


@dataclass(frozen=True)
class PositiveSums:
    """Σ softplus(level − p), Σ p, and the derivative of the first in the level, over the positives p of each anchor."""

    eligibility: Eligibility
    level: Tensor  # (A,)
    rule: Rule

    kind = score_tile.POSITIVES.value
    bounded = counted = symmetric = True


def number_groups(eligibility: Eligibility, rule: Rule) -> tuple[Eligibility, Tensor | None]:
    """The same eligibility with groups numbered in 32 bits, and the counts (A,) if groups alone determine them."""
    if eligibility.anchor_groups is None or eligibility.candidate_groups is None:
        return eligibility, None
    ordered = eligibility.candidate_groups.sort().values
    first = torch.searchsorted(ordered, eligibility.anchor_groups)
    last = torch.searchsorted(ordered, eligibility.anchor_groups, right=True)
    found = last > first
    renumbered = replace(
        eligibility,
        anchor_groups=torch.where(found, first, -1).int(),
        candidate_groups=torch.searchsorted(ordered, eligibility.candidate_groups, out_int32=True),
    )
    if eligibility.same_group or rule.is_banded or eligibility.allowed is not None or eligibility.excluded is not None:
        return renumbered, None
    # An anchor's own instance is in its group, unless the group is unknown.
    own_views = 0 if eligibility.own is None else eligibility.pool_views
    return renumbered, (eligibility.columns - torch.where(found, last - first, own_views)).float()

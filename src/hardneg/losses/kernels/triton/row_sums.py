"""What the fused kernel is asked of each anchor: log-sums over its negatives, or sums over its positives."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hardneg.losses.kernels import tiled
from hardneg.losses.kernels.interface import Eligibility, Rule
from hardneg.losses.kernels.triton import score_tile
from hardneg.losses.kernels.triton.percentile_bands import known_ranks

# As in the tiled kernel: up to here e^{±x} and sums of millions of them are ordinary float32 numbers.
SAFE_EXPONENT = tiled.SAFE_EXPONENT

# No smaller tilt changes any sum, and float32 might take it for 0, which −inf must not be multiplied with.
LEAST_TILT = 1e-30

NONE, ANY = int(score_tile.NONE.value), int(score_tile.ANY.value)
KINDS = {1.0: int(score_tile.ONE.value), 2.0: int(score_tile.TWO.value), 0.5: int(score_tile.HALF.value)}


@dataclass(frozen=True)
class Negatives:
    """The two log-sums and the count of `LogSums`."""

    eligibility: Eligibility
    rule: Rule
    counts: Tensor | None = None  # (A,) where they are known beforehand

    @property
    def kind(self) -> int:
        tilt = self.rule.tilt
        if isinstance(tilt, Tensor):
            return ANY
        return KINDS.get(tilt, ANY) if tilt > LEAST_TILT else NONE

    @property
    def bounded(self) -> bool:
        """Can no exponential leave the range of float32, so that no row needs its maximum?"""
        tilt, largest = self.rule.tilt, self.rule.max_abs_score
        return largest is not None and not isinstance(tilt, Tensor) and (tilt + 1) * largest <= SAFE_EXPONENT

    @property
    def counted(self) -> bool:
        """Must negatives be counted, because their number is not known beforehand?"""
        bounded = self.rule.lower is not None or self.rule.upper is not None  # a ring alone says how many it keeps
        return self.counts is None and (
            bounded or not self.eligibility.is_plain or self.eligibility.excluded is not None
        )

    @property
    def mirrors(self) -> bool:
        """Is ∂L/∂s_ji found in the tile of s_ij, if scores are symmetric?"""
        rule = self.rule
        one_for_all = not isinstance(rule.lower, Tensor) and not isinstance(rule.upper, Tensor)
        return one_for_all and not rule.rings and self.eligibility.allowed is None

    def known_count(self) -> int:
        """The number of negatives of every anchor, where they need not be counted."""
        if not self.rule.rings:
            return self.eligibility.count_per_anchor
        first, end = known_ranks(self.eligibility.count_per_anchor, self.rule.rings)
        return max(0, end - first)


@dataclass(frozen=True)
class Positives:
    """Σ softplus(level − p), Σ p, and the derivative of the first in the level, over each anchor's positives."""

    eligibility: Eligibility
    level: Tensor  # (A,)
    rule: Rule

    kind = score_tile.POSITIVES.value
    bounded = counted = mirrors = True


def numbered(eligibility: Eligibility, rule: Rule) -> tuple[Eligibility, Tensor | None]:
    """The same with groups numbered in 32 bits, and the counts (A,) where groups alone decide them."""
    if eligibility.anchor_groups is None or eligibility.candidate_groups is None:
        return eligibility, None
    ordered = eligibility.candidate_groups.sort().values
    first = torch.searchsorted(ordered, eligibility.anchor_groups)
    last = torch.searchsorted(ordered, eligibility.anchor_groups, right=True)
    found = last > first
    numbered = replace(
        eligibility,
        anchor_groups=torch.where(found, first, -1).int(),
        candidate_groups=torch.searchsorted(ordered, eligibility.candidate_groups, out_int32=True),
    )
    if eligibility.same_group or rule.is_banded or eligibility.allowed is not None or eligibility.excluded is not None:
        return numbered, None
    # An anchor's own instance is of its group, unless that is unknown.
    alone = 0 if eligibility.own is None else eligibility.pool_views
    return numbered, (eligibility.columns - torch.where(found, last - first, alone)).float()

"""What the kernels compute: sums over the eligible candidates of each anchor. Groups are numbered before."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hardneg.losses.kernels.identities import equal_range
from hardneg.losses.kernels.interface import Eligibility, Rule
from hardneg.losses.kernels.strips import SAFE_EXPONENT
from hardneg.losses.kernels.triton import score_tile

# A smaller tilt changes no sum, and might be rounded to 0, which times −inf would be NaN.
LEAST_TILT = 1e-30

NONE, ANY, POSITIVES = (int(kind.value) for kind in (score_tile.NONE, score_tile.ANY, score_tile.POSITIVES))
KINDS = {1.0: int(score_tile.ONE.value), 2.0: int(score_tile.TWO.value), 0.5: int(score_tile.HALF.value)}


@dataclass(frozen=True)
class Problem:
    """The sums that are computed for each anchor: over its negatives, or over its positives if there is a level.

    level: (A,), see `forward.Slots` · counts: (A,) numbers of negatives, if known beforehand · by_label: groups are
    labels as given, where −1 is unknown and less gives NaN; with ``same_group``, those of the same label or instance
    """

    eligibility: Eligibility
    rule: Rule
    level: Tensor | None = None
    counts: Tensor | None = None
    by_label: bool = False

    @property
    def kind(self) -> int:
        tilt = self.rule.tilt
        if self.level is not None:
            return POSITIVES
        if isinstance(tilt, Tensor):
            return ANY
        return KINDS.get(tilt, ANY) if tilt > LEAST_TILT else NONE

    @property
    def bounded(self) -> bool:
        """Whether all exponentials are within the range of float32, so that rows need no maximum."""
        tilt, largest = self.rule.tilt, self.rule.max_abs_score
        if self.level is not None:
            return True
        if largest is None or isinstance(tilt, Tensor) or self.rule.rings:
            return False
        return (tilt + 1) * largest <= SAFE_EXPONENT

    @property
    def may_be_bounded(self) -> bool:
        """Whether that depends on numbers that only the device knows."""
        rule = self.rule
        return rule.max_abs_score is not None and (rule.learned_scale or isinstance(rule.tilt, Tensor))

    @property
    def counted(self) -> bool:
        """Whether the kernel must count the negatives, because their number is not known beforehand."""
        known = self.eligibility.is_plain and not self.rule.is_banded
        return self.counts is None and self.level is None and not known

    @property
    def symmetric(self) -> bool:
        """Whether ∂L/∂s_ji can be computed in the tile of s_ij, given that the scores are symmetric."""
        one_for_all = not isinstance(self.rule.lower, Tensor) and not isinstance(self.rule.upper, Tensor)
        return one_for_all and not self.rule.rings and self.eligibility.allowed is None


def number_groups(eligibility: Eligibility, rule: Rule) -> tuple[Eligibility, Tensor | None]:
    """The same eligibility with groups numbered in 32 bits, and the counts (A,) if groups alone determine them."""
    if eligibility.anchor_groups is None or eligibility.candidate_groups is None:
        return eligibility, None
    ordered = eligibility.candidate_groups.sort().values
    first, size = equal_range(ordered, eligibility.anchor_groups)
    found = size > 0
    renumbered = replace(
        eligibility,
        anchor_groups=torch.where(found, first, -1).int(),
        candidate_groups=torch.searchsorted(ordered, eligibility.candidate_groups, out_int32=True),
    )
    if eligibility.same_group or rule.is_banded or eligibility.allowed is not None or eligibility.excluded is not None:
        return renumbered, None
    # An anchor's own instance is in its group, unless the group is unknown.
    own_views = 0 if eligibility.own is None else eligibility.pool_views
    return renumbered, (eligibility.columns - torch.where(found, size, own_views)).float()


def numbered_labels(labels: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Labels (A,) as numbers of 32 bits, which take fewer registers, and the same as groups of rows.

    −1 stays, and less becomes −2. As a group, each unknown instance has its own number.
    """
    numbers = torch.where(labels < 0, labels.clamp(min=-2), torch.searchsorted(labels.sort().values, labels)).int()
    rows = torch.arange(labels.shape[0], dtype=torch.int32, device=labels.device)
    return numbers, torch.where(numbers == -1, labels.shape[0] + rows % batch, numbers)

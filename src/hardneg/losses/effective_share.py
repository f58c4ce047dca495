"""β from a target: the effective number of negatives as a share of their number, and the β that gives this share.

For weights w = e^{βs} on a support S the effective number is ESS = (Σw)²/Σw² (Kish 1965). ESS/|S| is 1 at β = 0 and
decreases in β: with K the cumulant function of the scores, ln ESS/|S| = 2K(β) − K(2β), whose derivative
2(K′(β) − K′(2β)) is ≤ 0 because K is convex. So there is one β for each share above that of the largest scores alone.
For Gaussian scores ESS/|S| = e^{−β²σ²}; √(−ln ESS/|S|) is therefore nearly linear in β, and its root is found by
interpolation in a bracket, in a fixed number of steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hardneg import checks
from hardneg.losses.schedules import Schedule

STEPS = 11  # evaluations of the share; the error of β is then below 1e-4, also for scores that are far from Gaussian
LINES = 3  # of these, along the line through the last two points
READ_AT_ONCE = ("cpu",)  # devices whose numbers the host reads without waiting
CLOSE = 1e-5  # the relative distance of √(−ln share) from its target at which steps end on these devices
# Of a weight e^x: smaller ones and their squares would be denormal numbers, which take CPUs twenty times as long.
LEAST_EXPONENT = -40.0
# The largest β times the largest |score|. All scores may be equal: then no β reaches a share below 1.
LARGEST_EXPONENT = 256.0


@dataclass(frozen=True)
class EffectiveShare:
    """A setting for β: as large as needed for an effective number of negatives of ``share`` times their number.

    Each call of the loss in training mode with gradients estimates β from its scores and moves the β in use a tenth of
    the way; the first call sets it. In evaluation mode and without gradients β stays as it is, 0 before the first
    training call. It is part of the loss's ``state_dict()``, and ``loss.diagnostics()`` reports ``beta`` and
    ``effective_share``.

    share: in (0, 1]; 1 is β = 0, all negatives alike · β is at most 256·temperature, where a share cannot be reached

    Examples:
        >>> import torch, hardneg as hn
        >>> loss = hn.hcl(beta=hn.EffectiveShare(0.6), tau_plus=0.0, temperature=0.1)
        >>> _ = loss(torch.randn(64, 16, requires_grad=True), torch.randn(64, 16))
        >>> round(loss.diagnostics()["effective_share"], 2)
        0.6
    """

    share: float

    def __post_init__(self) -> None:
        if isinstance(self.share, Schedule):
            raise ValueError(f"share must be a number, got the schedule {self.share!r}: a schedule of β is hn.Linear")
        object.__setattr__(self, "share", float(checks.number("share", self.share, above=0, at_most=1)))


class Supports:
    """The scores of some anchors with the negatives in their supports.

    parts: pairs of scores (R, N) and a bool matrix (R, N) of the same shape, True in the support
    """

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._scores, self._highest, self._counts = [], [], []
        for scores, kept in parts:
            shifted = scores.masked_fill(~kept, -torch.inf)
            highest = shifted.amax(dim=1, keepdim=True)
            self._scores.append(shifted - highest.masked_fill(highest == -torch.inf, 0.0))  # (R, N), at most 0
            self._highest.append(highest)  # (R, 1), NaN if a score in the support is
            self._counts.append(kept.sum(dim=1, dtype=scores.dtype))  # (R,)
        self._nonempty = torch.stack([(count > 0).sum() for count in self._counts]).sum()  # ()

    def mean_share(self, beta: Tensor) -> Tensor:
        """ESS/|S| for β > 0, the mean over anchors with negatives, ()."""
        found = []
        for scores, count in zip(self._scores, self._counts, strict=True):
            # (R, N), the largest of a row is 1. Of masked candidates it is e^{−40}, which adds nothing to a sum.
            weight = (scores * beta).clamp_(min=LEAST_EXPONENT).exp_()
            total, squares = weight.sum(dim=1), torch.linalg.vecdot(weight, weight)
            found.append((total.square() / squares / count.clamp(min=1)).masked_fill_(count == 0, 0.0).sum())
        return torch.stack(found).sum() / self._nonempty.clamp(min=1)

    def is_defined(self) -> Tensor:
        """Whether the share depends on β: some anchor has two negatives, and no score is NaN, () bool."""
        several = torch.stack([(count > 1).any() for count in self._counts]).any()
        return several & ~torch.stack([highest.isnan().any() for highest in self._highest]).any()

    def solve(self, share: float, largest: Tensor) -> Tensor:
        """The β in [0, largest] at which the mean share is ``share``, (); ``largest`` if all shares are above.

        All steps run on the device, without waiting for an accelerator. The root of √(−ln share(β)) − √(−ln share) is
        bracketed. The first steps go along the line through the last two points, while it stays in the bracket; the
        others interpolate between its ends (the Illinois method: the value at an end that stays is halved).
        """
        zero = torch.zeros_like(largest)
        if share == 1:
            return zero
        target = math.sqrt(-math.log(share))
        low, high = zero, largest
        at_low, at_high = zero - target, self._distance(largest, target)
        reachable = at_high > 0
        last, at_last, was_below = low, at_low, zero.bool()
        # The curve begins as σβ, with the scores' standard deviation σ; the chord of a bracket that ends at the largest
        # β would be far from it.
        small = largest / LARGEST_EXPONENT
        line = small * target / self._distance(small, 0.0)
        for step in range(STEPS):
            chord = low - at_low * (high - low) / (at_high - at_low).clamp(min=1e-30)
            beta = chord
            if step < LINES:
                beta = torch.where((line > low) & (line < high), line, chord)
            beta = torch.where((beta > low) & (beta < high), beta, (low + high) / 2)
            value = self._distance(beta, target)
            if largest.device.type in READ_AT_ONCE and abs(float(value)) <= CLOSE * target:
                return beta
            below = value < 0
            # An end that stays twice would stay forever.
            halved = 1 - 0.5 * (below == was_below) if step else torch.ones_like(zero)
            low, high = torch.where(below, beta, low), torch.where(below, high, beta)
            at_low, at_high = torch.where(below, value, at_low * halved), torch.where(below, at_high * halved, value)
            line = beta - value * (beta - last) / (value - at_last)  # not finite where both values are the same
            last, at_last, was_below = beta, value, below
        found = low - at_low * (high - low) / (at_high - at_low).clamp(min=1e-30)
        return torch.where(reachable, found.clamp(zero, largest), largest)

    def _distance(self, beta: Tensor, target: float) -> Tensor:
        return (-self.mean_share(beta).clamp(1e-30, 1.0).log()).sqrt() - target

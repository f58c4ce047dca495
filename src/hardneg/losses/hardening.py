"""Which candidates count as negatives, and how much: a tilt (weights) or a band (a range of scores or ranks).

A hardening answers up to three questions about the scores ``s = cos/temperature`` of an anchor's candidates:
how to weight them (`log_weight` or a plain `tilt`), between which scores to keep them (`bounds`), and between which
ranks (`percentiles`). What it does not answer it leaves alone. To add one, subclass `Hardening` and answer one
question; it then works in every objective and, unless it is a general weight, in every kernel.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from hardneg import checks
from hardneg.losses.kernels.interface import Bound
from hardneg.losses.schedules import Schedule, Setting, value
from hardneg.losses.temperature import Learnable


def tighter(one: Bound, other: Bound, pick: Callable[[float, float], float]) -> Bound:
    """The tighter of two bounds: ``pick`` is max for lower ones, min for upper ones."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.maximum(one, other) if pick is max else torch.minimum(one, other)
    if isinstance(other, Tensor):
        one, other = other, one
    if isinstance(one, Tensor):
        return one.clamp(min=other) if pick is max else one.clamp(max=other)
    return pick(one, other)  # type: ignore[arg-type]


class Hardening:
    """What every hardening answers; the defaults say "all candidates alike". Settings may be schedules.

    The objective asks a copy whose schedules were replaced by the numbers they stand for at the moment (`at`), so the
    answers see numbers only.
    """

    needs_positive: ClassVar[bool] = False  # does `bounds` read the positive's score?

    def tilt(self) -> float:
        """The β of weights e^{βs}."""
        return 0.0

    def log_weight(self, scores: Tensor) -> Tensor:
        """Logarithm of general weights η(s), −inf where a candidate is left out."""
        raise TypeError(f"{type(self).__name__} has no general weights")  # asked only of those that define it

    def bounds(self, positive: Tensor | None) -> tuple[Bound, Bound]:
        """The lowest and highest score kept; ``positive`` (A,) is the score of the anchor's best positive."""
        return None, None

    def percentiles(self) -> tuple[float, float] | None:
        """The lowest and highest rank kept, as fractions of the anchor's candidates."""
        return None

    @property
    def has_general_weights(self) -> bool:
        """Does it define `log_weight`? Then only the reference kernel can run it."""
        return type(self).log_weight is not Hardening.log_weight

    @property
    def weighs(self) -> bool:
        """Does it weigh candidates? An objective takes at most one that does."""
        return self.has_general_weights or type(self).tilt is not Hardening.tilt

    def schedules(self) -> Iterator[Schedule]:
        """The schedules among its settings."""
        return (setting for setting in vars(self).values() if isinstance(setting, Schedule))

    def in_scores(self, temperature: float | Learnable) -> "Hardening":
        """The same in terms of scores, if it is given in terms of cosines."""
        return self

    def at(self, progress: float) -> Self:
        """A copy with each schedule replaced by its number at this progress, checked like any number given."""
        numbers = {name: value(s, progress) for name, s in vars(self).items() if isinstance(s, Schedule)}
        if not numbers:
            return self
        if is_dataclass(self):
            return replace(self, **numbers)
        twin = copy.copy(self)
        vars(twin).update(numbers)
        return twin


@dataclass(frozen=True)
class Uniform(Hardening):
    """All candidates count alike: plain InfoNCE.

    Examples:
        >>> Uniform().tilt()
        0.0
    """


@dataclass(frozen=True)
class Exponential(Hardening):
    """Weights ``e^{beta·s}``: the harder a negative, the more it counts (HCL eq. 2–4; H-SCL's η_exp).

    beta: concentration, ≥ 0; it acts on s = cos/temperature, so on cosines it is ``beta/temperature``

    Examples:
        >>> import torch, hardneg as hn
        >>> z1, z2 = torch.eye(4), torch.eye(4).roll(1, 0)
        >>> float(hn.InfoNCE(hardening=hn.Exponential(1.0))(z1, z2)) > float(hn.InfoNCE()(z1, z2))
        True
    """

    beta: Setting = 1.0

    def __post_init__(self) -> None:
        checks.number("beta", self.beta, at_least=0, below=float("inf"))

    def tilt(self) -> float:
        return float(self.beta)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Threshold(Hardening):
    """Keeps candidates with ``e^s ≥ tau`` (H-SCL's η_thresh), that is, with ``s ≥ score``.

    tau: threshold on e^s, > 0 · score: threshold on s itself instead, which cannot overflow · cosine: threshold on the
    cosine instead, whatever the temperature is; that must be a number or a schedule then

    Examples:
        >>> Threshold(1.0).bounds(None)
        (0.0, None)
        >>> Threshold(score=-5000.0).bounds(None)
        (-5000.0, None)
    """

    tau: Setting | None = None
    score: Setting | None = None
    cosine: Setting | None = None

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.tau, self.score, self.cosine)) != 1:
            raise ValueError(
                f"give tau, score or cosine, one of them, got tau={self.tau!r}, score={self.score!r}, "
                f"cosine={self.cosine!r}"
            )
        if self.cosine is not None:
            checks.number("cosine", self.cosine, at_least=-1, at_most=1)
            return
        if self.tau is None:
            checks.number("score", self.score, above=-float("inf"), below=float("inf"))
            return
        checks.number("tau", self.tau, above=0, below=float("inf"))
        if not isinstance(self.tau, Schedule):  # here, because a compiled graph would take the logarithm for a constant
            object.__setattr__(self, "_lowest", math.log(self.tau))

    def in_scores(self, temperature: float | Learnable) -> Hardening:
        if self.cosine is None:
            return self
        if isinstance(temperature, Learnable):
            raise ValueError("Threshold(cosine=…) needs a temperature that is known: give a number or a schedule")
        return Threshold(score=value(self.cosine, 0.0) / temperature)

    def bounds(self, positive: Tensor | None) -> tuple[Bound, Bound]:
        return self._lowest if self.score is None else float(self.score), None  # type: ignore[attr-defined, arg-type]


@dataclass(frozen=True)
class Ring(Hardening):
    """Keeps the candidates between two percentiles of the anchor's own ranking (Ring/CNCE, section 4).

    lower, upper: fractions in [0, 1], lower < upper; of n candidates in ascending order of score (ties by index) it
    keeps positions ⌊lower·n⌋ up to, not including, ⌊upper·n⌋, and always at least one

    Examples:
        >>> import torch, hardneg as hn
        >>> loss = hn.InfoNCE(hardening=hn.Ring(0.5, 1.0), in_batch="other")
        >>> _ = loss(torch.randn(9, 16), torch.randn(9, 16))
        >>> loss.diagnostics()["support"]
        4.0
    """

    lower: Setting
    upper: Setting

    def __post_init__(self) -> None:
        checks.number("lower", self.lower, at_least=0, at_most=1)
        checks.number("upper", self.upper, at_least=0, at_most=1)
        for progress in (0.0, 1.0):
            lower, upper = value(self.lower, progress), value(self.upper, progress)
            if not lower < upper:
                raise ValueError(f"lower must be < upper, both in [0, 1], got lower={lower:g}, upper={upper:g}")

    def percentiles(self) -> tuple[float, float]:
        return float(self.lower), float(self.upper)  # type: ignore[arg-type]


@dataclass(frozen=True)
class BelowPositive(Hardening):
    """Keeps candidates that score at most the positive less a margin: the usual filter of false negatives.

    margin: in units of the score s = cos/temperature (a margin m on cosines is ``m/temperature``), any sign ·
    relative: if given, such as 0.95, the limit is ``positive − (1 − relative)·|positive|`` instead: ``relative``
    times a positive score, and as far below a negative one. Of several positives the best counts.
    A copy of the positive itself is kept at margin 0 (within rounding); any margin above drops it.

    Examples:
        >>> BelowPositive(relative=0.5).bounds(torch.tensor([2.0, -2.0]))
        (None, tensor([ 1., -3.]))
    """

    needs_positive: ClassVar[bool] = True
    margin: Setting = 0.0
    relative: Setting | None = None

    def __post_init__(self) -> None:
        checks.number("margin", self.margin, above=-float("inf"), below=float("inf"))
        if self.relative is not None:
            checks.number("relative", self.relative, above=0, below=float("inf"))
            if self.margin != 0.0:
                raise ValueError(f"give margin or relative, not both, got margin={self.margin!r}, {self.relative!r}")

    def bounds(self, positive: Tensor | None) -> tuple[Bound, Bound]:
        assert positive is not None  # guaranteed by needs_positive
        if self.relative is None:
            return None, positive - self.margin  # type: ignore[operator]
        limit = positive - (1 - self.relative) * positive.abs()  # type: ignore[operator]
        return None, torch.where(positive == -torch.inf, positive, limit)  # an anchor without positives


@dataclass(frozen=True)
class Custom(Hardening):
    """Weights ``fn(s)``: any nonnegative, nondecreasing hardening function η (H-SCL definition 1).

    fn: maps a tensor of scores to weights of the same shape; a weight of 0 leaves the candidate out ·
    log: True if ``fn`` returns log-weights, which cannot overflow. Runs in the reference kernel only.

    Examples:
        >>> import torch, hardneg as hn
        >>> z1, z2 = torch.randn(8, 16), torch.randn(8, 16)
        >>> custom = hn.InfoNCE(hardening=hn.Custom(lambda s: (2 * s).exp()))(z1, z2)
        >>> torch.testing.assert_close(custom, hn.InfoNCE(hardening=hn.Exponential(2.0))(z1, z2))
    """

    fn: Callable[[Tensor], Tensor]
    log: bool = False

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ValueError(f"fn must be callable, got {self.fn!r}")

    def log_weight(self, scores: Tensor) -> Tensor:
        weight = self.fn(scores)
        if not isinstance(weight, Tensor) or weight.shape != scores.shape:
            got = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
            raise ValueError(f"fn must return a tensor of its input's shape {tuple(scores.shape)}, got {got}")
        weight = weight.to(scores.dtype)
        if self.log:
            checks.values(
                ~torch.isnan(weight) & (weight < torch.inf), "fn must return log-weights below inf, never NaN"
            )
            return weight
        checks.values(
            (weight >= 0) & (weight < torch.inf), "fn must return finite weights ≥ 0: use log=True for large ones"
        )
        # log 0 has an infinite slope, and 0 · inf is NaN: take it where it is finite only.
        return torch.where(weight > 0, weight, 1.0).log().masked_fill(weight == 0, -torch.inf)

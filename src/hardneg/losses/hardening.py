"""Which candidates are negatives, and their weights: a tilt (weights) or a band (a range of scores or ranks).

A hardening defines up to three things about the scores ``s = cos/temperature`` of an anchor's candidates: their weights
(`log_weight` or a plain `tilt`), the range of scores to keep (`bounds`), and the range of ranks to keep
(`percentiles`). To add one, subclass `Hardening` and define one of them; it then works in every objective and, unless
it has general weights, in every kernel.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass, replace
from typing import ClassVar, Self, Unpack

import torch
from torch import Tensor

from hardneg import checks
from hardneg.losses.effective_share import EffectiveShare
from hardneg.losses.kernels.interface import Bound
from hardneg.losses.schedules import Schedule, Setting, value
from hardneg.losses.temperature import Learnable

INFINITY = float("inf")


class Hardening:
    """Base class of all hardenings; by default all candidates are kept, with equal weights. Settings may be schedules.

    The objective uses a copy whose schedules are replaced by their current values (`at`), so the methods below see
    numbers only.
    """

    needs_positive: ClassVar[bool] = False  # whether `bounds` uses the positive's score
    needs_guide: ClassVar[bool] = False  # whether it has a band of a guide model's scores, `guide_limit`
    has_general_weights: ClassVar[bool] = False  # whether it defines `log_weight`; only the reference kernel runs it
    has_weights: ClassVar[bool] = False  # whether it weights candidates; an objective takes at most one that does
    has_band: ClassVar[bool] = False  # whether it leaves out candidates by score or rank

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.has_general_weights = cls.log_weight is not Hardening.log_weight
        cls.has_weights = cls.has_general_weights or cls.tilt is not Hardening.tilt
        cls.needs_guide = cls.guide_limit is not Hardening.guide_limit
        by_score = cls.bounds is not Hardening.bounds or cls.percentiles is not Hardening.percentiles
        cls.has_band = by_score or cls.needs_guide

    def tilt(self) -> float | Tensor:
        """The β ≥ 0 of weights e^{βs}; a number, or a tensor () on the device of the embeddings."""
        return 0.0

    def effective_share(self) -> float | None:
        """The target from which the loss computes β, instead of `tilt`; None for a β that is known."""
        return None

    def log_weight(self, scores: Tensor) -> Tensor:
        """Logarithm of general weights η(s), −inf where a candidate is left out."""
        raise TypeError(f"{type(self).__name__} has no general weights")

    def bounds(self, positive: Tensor | None) -> tuple[Bound, Bound]:
        """The lowest and highest score kept; ``positive`` (A,) is the score of the anchor's best positive."""
        return None, None

    def percentiles(self) -> tuple[float, float] | None:
        """The lowest and highest rank kept, as fractions of the anchor's candidates."""
        return None

    def guide_limit(self, positive: Tensor) -> Tensor:
        """The highest guide score kept, (A,); ``positive`` (A,) is the guide's score of the anchor's best positive."""
        raise TypeError(f"{type(self).__name__} uses no guide")

    def schedules(self) -> Iterator[Schedule]:
        """The schedules among its settings."""
        for setting in vars(self).values():
            if isinstance(setting, Schedule):
                yield setting

    def in_scores(self, temperature: float | Learnable) -> "Hardening":
        """An equivalent hardening in terms of scores, if this one is given in terms of cosines."""
        return self

    def at(self, progress: float) -> Self:
        """A copy with each schedule replaced by its number at this progress, checked like any number."""
        numbers = {}
        for name, setting in vars(self).items():
            if isinstance(setting, Schedule):
                numbers[name] = setting.at(progress)
        if not numbers:
            return self
        if is_dataclass(self):
            return replace(self, **numbers)
        changed = copy.copy(self)
        vars(changed).update(numbers)
        return changed

    def _check(self, name: str, **limits: Unpack[checks.Limits]) -> None:
        """Check a setting of a frozen dataclass, and store it as a Python number unless it is a schedule."""
        number = checks.number(name, getattr(self, name), **limits)
        object.__setattr__(self, name, number if isinstance(number, Schedule) else float(number))


@dataclass(frozen=True)
class Uniform(Hardening):
    """All candidates have equal weights: plain InfoNCE.

    Examples:
        >>> Uniform().tilt()
        0.0
    """


@dataclass(frozen=True)
class Exponential(Hardening):
    """Weights ``e^{beta·s}``: the harder a negative, the larger its weight (HCL eq. 2–4; H-SCL's η_exp).

    beta: concentration, ≥ 0; it acts on s = cos/temperature, so on cosines it is ``beta/temperature``. Or an
    `EffectiveShare`, from which the loss computes it

    Examples:
        >>> import torch, hardneg as hn
        >>> z1, z2 = torch.eye(4), torch.eye(4).roll(1, 0)
        >>> float(hn.InfoNCE(hardening=hn.Exponential(1.0))(z1, z2)) > float(hn.InfoNCE()(z1, z2))
        True
    """

    beta: Setting | EffectiveShare = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.beta, EffectiveShare):
            self._check("beta", at_least=0, below=INFINITY)

    def effective_share(self) -> float | None:
        return self.beta.share if isinstance(self.beta, EffectiveShare) else None

    def tilt(self) -> float:
        if isinstance(self.beta, EffectiveShare):
            raise ValueError(
                f"beta={self.beta!r} is computed by a loss in training, and is not known here: give a number"
            )
        return self.beta  # type: ignore[return-value]


@dataclass(frozen=True)
class Threshold(Hardening):
    """Keeps candidates with ``e^s ≥ tau`` (H-SCL's η_thresh), that is, with ``s ≥ score``.

    tau: threshold on e^s, > 0 · score: threshold on s itself instead, which cannot overflow · cosine: threshold on the
    cosine instead, for any temperature that is a number or a schedule

    Examples:
        >>> Threshold(1.0).bounds(None)
        (0.0, None)
        >>> Threshold(score=-5000.0).bounds(None)
        (-5000.0, None)
        >>> Threshold(cosine=0.2).in_scores(temperature=0.5)
        Threshold(tau=None, score=0.4, cosine=None)
    """

    tau: Setting | None = None
    score: Setting | None = None
    cosine: Setting | None = None

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.tau, self.score, self.cosine)) != 1:
            raise ValueError(
                f"give exactly one of tau, score and cosine, got tau={self.tau!r}, score={self.score!r}, "
                f"cosine={self.cosine!r}"
            )
        if self.cosine is not None:
            self._check("cosine", at_least=-1, at_most=1)
        elif self.score is not None:
            self._check("score", above=-INFINITY, below=INFINITY)
        else:
            self._check("tau", above=0, below=INFINITY)
            if not isinstance(self.tau, Schedule):  # here, because a compiled graph would treat it as a constant
                object.__setattr__(self, "_lowest", math.log(self.tau))  # type: ignore[arg-type]

    def in_scores(self, temperature: float | Learnable) -> Hardening:
        if self.cosine is None:
            return self
        if isinstance(temperature, Learnable):
            raise ValueError("Threshold(cosine=…) needs a temperature that is known: give a number or a schedule")
        return Threshold(score=value(self.cosine, 0.0) / temperature)

    def bounds(self, positive: Tensor | None) -> tuple[Bound, Bound]:
        return self._lowest if self.score is None else self.score, None  # type: ignore[attr-defined, return-value]


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
        self._check("lower", at_least=0, at_most=1)
        self._check("upper", at_least=0, at_most=1)
        for progress in (0.0, 1.0):
            lower, upper = value(self.lower, progress), value(self.upper, progress)
            if not lower < upper:
                raise ValueError(f"lower must be < upper, both in [0, 1], got lower={lower:g}, upper={upper:g}")

    def percentiles(self) -> tuple[float, float]:
        return self.lower, self.upper  # type: ignore[return-value]


@dataclass(frozen=True)
class BelowPositive(Hardening):
    """Keeps candidates that score at most the positive less a margin: the usual filter of false negatives.

    margin: in units of the score s = cos/temperature (a margin m on cosines is ``m/temperature``), any sign ·
    relative: if given, such as 0.95, the limit is ``positive − (1 − relative)·|positive|`` instead: ``relative``
    times a positive score, and as far below a negative one. Of several positives the best one sets the limit.
    A copy of the positive itself is kept at margin 0, and dropped by a margin above rounding (about 1e-5 on cosines).

    Examples:
        >>> BelowPositive(relative=0.5).bounds(torch.tensor([2.0, -2.0]))
        (None, tensor([ 1., -3.]))
    """

    needs_positive: ClassVar[bool] = True
    margin: Setting = 0.0
    relative: Setting | None = None

    def __post_init__(self) -> None:
        self._check("margin", above=-INFINITY, below=INFINITY)
        if self.relative is not None:
            self._check("relative", above=0, below=INFINITY)
            if self.margin != 0.0:
                raise ValueError(f"give margin or relative, not both, got margin={self.margin!r}, {self.relative!r}")

    def bounds(self, positive: Tensor | None) -> tuple[Bound, Bound]:
        assert positive is not None  # guaranteed by needs_positive
        return None, _below(positive, self.margin, self.relative)


@dataclass(frozen=True)
class Guided(Hardening):
    """Keeps candidates that a guide model scores at most as the positive, less a margin (GISTEmbed, Solatorio 2024).

    A stronger model decides which candidates are false negatives. Its embeddings are arguments of the call, ``guide=``
    and ``negative_guide=``; they may have another width. Its scores are cosines, without temperature and gradient.

    margin: in units of the cosine, any sign · relative: if given, such as 0.95, the limit is
    ``positive − (1 − relative)·|positive|`` instead. Of several positives the best one sets the limit.

    Examples:
        >>> import torch, hardneg as hn
        >>> z1, z2, g1, g2 = torch.randn(4, 8, 16).unbind()
        >>> loss = hn.InfoNCE(0.05, hn.Guided(margin=0.05), in_batch="other")
        >>> loss(z1, z2, guide=(g1, g2)).shape
        torch.Size([])
    """

    margin: Setting = 0.0
    relative: Setting | None = None

    def __post_init__(self) -> None:
        self._check("margin", above=-INFINITY, below=INFINITY)
        if self.relative is not None:
            self._check("relative", above=0, below=INFINITY)
            if self.margin != 0.0:
                raise ValueError(f"give margin or relative, not both, got margin={self.margin!r}, {self.relative!r}")

    def guide_limit(self, positive: Tensor) -> Tensor:
        return _below(positive, self.margin, self.relative)


def _below(positive: Tensor, margin: Setting, relative: Setting | None) -> Tensor:
    """The limit of `BelowPositive` and `Guided`; −inf for an anchor without positives."""
    if relative is None:
        return positive - margin  # type: ignore[operator]
    limit = positive - (1 - relative) * positive.abs()  # type: ignore[operator]
    return torch.where(positive == -torch.inf, positive, limit)


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
        object.__setattr__(self, "log", checks.boolean("log", self.log))

    def log_weight(self, scores: Tensor) -> Tensor:
        weight = self.fn(scores)
        if not isinstance(weight, Tensor) or weight.shape != scores.shape:
            got = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
            raise ValueError(f"fn must return a tensor of its input's shape {tuple(scores.shape)}, got {got}")
        weight = weight.to(scores.dtype)
        if self.log:
            validity = checks.values(
                ~torch.isnan(weight) & (weight < torch.inf), "fn must return log-weights below inf, never NaN"
            )
            return checks.poisoned(weight, validity)
        validity = checks.values(
            (weight >= 0) & (weight < torch.inf), "fn must return finite weights ≥ 0: use log=True for large ones"
        )
        # The derivative of log is infinite at 0, and 0 · inf is NaN: take the log of nonzero weights only.
        log_weight = torch.where(weight > 0, weight, 1.0).log().masked_fill(weight == 0, -torch.inf)
        return checks.poisoned(log_weight, validity)

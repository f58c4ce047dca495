"""Estimates from samples with confidence intervals of 95 %: means, shares, alignment and uniformity."""

import math
from typing import NamedTuple

from torch import Tensor

from hardneg import checks
from hardneg.checks import TensorLike
from hardneg.evaluation.alignment import mean_potentials, squared_distances
from hardneg.extras import required
from hardneg.matmul import where_precise

CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A number measured on a sample, and the ends of its confidence interval of 95 %."""

    value: float
    low: float
    high: float


def mean_estimate(values: TensorLike, population: int | None = None) -> Estimate:
    """Mean of independent values, with Student's t interval; of one value the interval is unbounded.

    values: (n,), n ≥ 1 · population: number of values that they were drawn from without replacement (default: many);
    the interval shrinks by √(1 − n/population)

    Examples:
        >>> mean_estimate([1.0, 2.0, 3.0])
        Estimate(value=2.0, low=-0.48..., high=4.48...)
    """
    given = where_precise(checks.floating("values", checks.as_tensor("values", values)).detach()).double()
    if given.dim() != 1 or len(given) == 0:
        raise ValueError(f"values must have shape (n,) with n ≥ 1, got {tuple(given.shape)}")
    checks.require_finite("values", given)
    left_out = _left_out(len(given), population)
    mean = float(given.mean())
    if left_out == 0:
        return Estimate(mean, mean, mean)
    if len(given) == 1:
        return Estimate(mean, -math.inf, math.inf)
    error = math.sqrt(left_out / len(given)) * float(given.std())
    room = _student(len(given) - 1) * error
    return Estimate(mean, mean - room, mean + room)


def share_estimate(share: float, trials: int, population: int | None = None) -> Estimate:
    """A share of independent trials, with Wilson's score interval.

    share: in [0, 1] · trials: number of trials · population: as for `mean_estimate`

    Examples:
        >>> share_estimate(0.5, 100)
        Estimate(value=0.5, low=0.403..., high=0.596...)
        >>> share_estimate(1.0, 10).low < 0.75
        True
    """
    share, trials = checks.number("share", share, at_least=0, at_most=1), checks.whole("trials", trials)
    left_out = _left_out(trials, population)
    if left_out == 0:
        return Estimate(share, share, share)
    squared = _student(math.inf) ** 2 * left_out / trials
    center = (share + squared / 2) / (1 + squared)
    room = math.sqrt(share * (1 - share) * squared + squared**2 / 4) / (1 + squared)
    return Estimate(share, min(max(center - room, 0.0), share), max(min(center + room, 1.0), share))


def alignment_estimate(z1: TensorLike, z2: TensorLike, population: int | None = None) -> Estimate:
    """`alignment`, the mean of ‖z − z⁺‖², with Student's t interval over the samples.

    z1, z2: (B, d), row i of each a view of sample i · population: as for `mean_estimate`

    Examples:
        >>> import torch
        >>> alignment_estimate(torch.eye(3), torch.eye(3))
        Estimate(value=0.0, low=0.0, high=0.0)
    """
    return mean_estimate(squared_distances(z1, z2), population)


def uniformity_estimate(z: TensorLike, population: int | None = None) -> Estimate:
    """`uniformity`, log E e^{−2‖z − z'‖²}, with an interval for samples drawn from a larger set.

    z: (B, d), B ≥ 2 · population: as for `mean_estimate`

    The mean over pairs is a U-statistic U: its standard error is 2·s/√B, with s the standard deviation over samples of
    each one's mean over its pairs; the error of log U is that divided by U. For embeddings that are uniform on the
    sphere the interval is wider than needed.

    Examples:
        >>> import torch
        >>> uniformity_estimate(torch.ones(4, 3))
        Estimate(value=0.0, low=0.0, high=0.0)
    """
    potentials = mean_potentials(z)  # (B,)
    mean = float(potentials.mean())
    left_out = _left_out(len(potentials), population)
    error = 2 * math.sqrt(left_out / len(potentials)) * float(potentials.std()) / mean
    value, room = math.log(mean), _student(len(potentials) - 1) * error
    return Estimate(value, value - room, value + room)


def instance_means(values: Tensor, defined: Tensor) -> Tensor:
    """The mean of each instance's defined values, (n,), without instances that have none.

    values, defined: (V, B), one row per view. Views of one instance are not independent; their means are.
    """
    number = defined.sum(dim=0)
    total = values.masked_fill(~defined, 0).sum(dim=0)
    return (total / number.clamp(min=1))[number > 0]


def _left_out(number: int, population: int | None) -> float:
    """The share of the population that was not drawn."""
    if population is None:
        return 1.0
    if population < number:
        raise ValueError(f"population={population} is less than the {number} values drawn from it: leave it out")
    return 1 - number / population


def _student(freedom: float) -> float:
    """The quantile of Student's distribution that leaves 2.5 % above it."""
    special = required("scipy.special", "train")
    half = 0.5 + CONFIDENCE / 2
    return float(special.ndtri(half)) if math.isinf(freedom) else float(special.stdtrit(freedom, half))

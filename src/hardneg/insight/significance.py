"""Welch's t-test between the seeds of two rows: the difference of means, its standard error, and its significance."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hardneg.evaluation.metrics import Better
from hardneg.extras import required

CONFIDENCE = 0.95


class Difference(NamedTuple):
    """The difference of two means.

    error: its standard error, None if neither side has a spread · significant: at the 0.05 level, two-sided
    """

    mean: float
    error: float | None
    significant: bool


def difference(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """The mean of the values minus the mean of the baseline, by Welch's t-test (two-sided).

    If one side has a single value, the standard deviation of the other is used for both. With one value on each side no
    difference is significant.

    Examples:
        >>> found = difference([0.90, 0.92, 0.91], [0.80, 0.82, 0.81])
        >>> round(found.mean, 3), round(found.error, 4), found.significant
        (0.1, 0.0082, True)
        >>> difference([0.9], [0.8]).significant
        False
    """
    if not values or not baseline:
        raise ValueError(
            f"values and baseline must not be empty, got {len(values)} and {len(baseline)} values: leave the row out"
        )
    mean = statistics.fmean(values) - statistics.fmean(baseline)
    sizes = [len(values), len(baseline)]
    if max(sizes) == 1:
        return Difference(mean, None, False)
    if min(sizes) == 1:
        several = values if len(values) > 1 else baseline
        error = statistics.stdev(several) * math.sqrt(1 / sizes[0] + 1 / sizes[1])
        freedom = float(len(several) - 1)
    else:
        parts = [statistics.variance(side) / len(side) for side in (values, baseline)]
        error = math.sqrt(sum(parts))
        weights = sum(part**2 / (size - 1) for part, size in zip(parts, sizes, strict=True))
        freedom = sum(parts) ** 2 / weights if weights else float(sum(sizes) - 2)
    special = required("scipy.special", "train")
    bound = float(special.stdtrit(freedom, 0.5 + CONFIDENCE / 2)) * error
    # Equal values differ by rounding only.
    return Difference(mean, error, abs(mean) > max(bound, 1e-12))


def significant_best(rows: Mapping[str, Sequence[float]], better: Better = "higher") -> str | None:
    """The row with the best mean if it differs significantly from every other row, else None.

    rows: values by name; a row without values is ignored · better: ``"higher"`` or ``"lower"``

    Examples:
        >>> rows = {"a": [0.9, 0.91], "b": [0.5, 0.52]}
        >>> significant_best(rows), significant_best(rows, "lower"), significant_best({"a": [0.9, 0.5], "b": [0.6]})
        ('a', 'b', None)
    """
    filled = {name: values for name, values in rows.items() if values}
    if len(filled) < 2:
        return None
    choose = max if better == "higher" else min
    best = choose(filled, key=lambda name: statistics.fmean(filled[name]))
    others = (values for name, values in filled.items() if name != best)
    return best if all(difference(filled[best], values).significant for values in others) else None

"""Comparing a few seeds with a few others: the difference of means, its standard error, and whether it is clear."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hardneg.extras import required

CONFIDENCE = 0.95


class Difference(NamedTuple):
    """mean, and its standard error (None if neither side has a spread) · clear: beyond the noise at 95 %."""

    mean: float
    error: float | None
    clear: bool


def difference(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """How much more the values are than the baseline on average, by Welch's t-test (two-sided).

    A side with one value lends the spread of the other; with one value each, nothing is clear.

    Examples:
        >>> found = difference([0.90, 0.92, 0.91], [0.80, 0.82, 0.81])
        >>> round(found.mean, 3), round(found.error, 4), found.clear
        (0.1, 0.0082, True)
        >>> difference([0.9], [0.8]).clear
        False
    """
    if not values or not baseline:
        raise ValueError(f"values and baseline must not be empty, got {len(values)} and {len(baseline)}")
    mean = statistics.fmean(values) - statistics.fmean(baseline)
    sizes = [len(values), len(baseline)]
    if max(sizes) == 1:
        return Difference(mean, None, False)
    if min(sizes) == 1:
        many = values if len(values) > 1 else baseline
        error = statistics.stdev(many) * math.sqrt(1 / sizes[0] + 1 / sizes[1])
        freedom = float(len(many) - 1)
    else:
        parts = [statistics.variance(side) / len(side) for side in (values, baseline)]
        error = math.sqrt(sum(parts))
        weights = sum(part**2 / (size - 1) for part, size in zip(parts, sizes, strict=True))
        freedom = sum(parts) ** 2 / weights if weights else float(sum(sizes) - 2)
    # scipy comes with the extra that training needs; the tables of t have no place in ours.
    special = required("scipy.special", "train")
    bound = float(special.stdtrit(freedom, 0.5 + CONFIDENCE / 2)) * error
    # Equal values differ by rounding only.
    return Difference(mean, error, abs(mean) > max(bound, 1e-12))


def clear_best(rows: Mapping[str, Sequence[float]]) -> str | None:
    """The row with the highest mean, if it is clear of every other; None if the noise does not tell.

    Examples:
        >>> clear_best({"a": [0.9, 0.91], "b": [0.5, 0.52]}), clear_best({"a": [0.9, 0.5], "b": [0.6, 0.5]})
        ('a', None)
    """
    filled = {name: values for name, values in rows.items() if values}
    if len(filled) < 2:
        return None
    best = max(filled, key=lambda name: statistics.fmean(filled[name]))
    others = (values for name, values in filled.items() if name != best)
    return best if all(difference(filled[best], values).clear for values in others) else None

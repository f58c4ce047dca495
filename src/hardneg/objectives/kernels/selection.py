"""Percentile bands on a GPU."""

from typing import Any

from torch import Tensor

from hardneg.objectives.kernels import ranks
from hardneg.objectives.kernels.problem import Rule


def edges(walk: Any, rule: Rule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The edges of each anchor's band."""
    band = ranks.sorted_edges(walk.scores(), rule)
    return band.low, band.low_index, band.high, band.high_index

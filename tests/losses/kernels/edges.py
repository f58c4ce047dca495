"""Percentile bands as the fused kernel computes them, to be called where Triton is interpreted."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hardneg.losses.kernels.interface import Eligibility, Rule

SCALE = 2.0  # 1/temperature


@dataclass
class Found:
    """The bands of all anchors.

    edges: low, first, high, last, (A,) each · scores: (A, N) inner products, −inf where masked · sums: Σ e^{(β+1)s} and
    Σ e^{βs} over the band, relative to its maximum · maximum: of s over the band · counts: (A,) each · strips: number
    """

    edges: tuple[Tensor, ...]
    scores: Tensor
    sums: tuple[Tensor, Tensor]
    maximum: Tensor
    counts: Tensor
    strips: int


def find_edges(
    anchors: Tensor, blocks: list[Tensor], eligibility: Eligibility, rule: Rule, constants: dict[str, Any]
) -> Found:
    """The bands of anchors (A, d) among blocks of candidates (N, d). constants: values for those of the module."""
    from hardneg.losses.kernels.triton import passes, percentile_bands
    from hardneg.losses.kernels.triton.forward import Slots
    from hardneg.losses.kernels.triton.problem import Problem

    problem = Problem(eligibility, rule)
    made = passes.make_passes(problem, torch.full((), SCALE, device=anchors.device), anchors, blocks)
    slots = Slots(*anchors.new_full((4, 1, len(anchors)), torch.nan, dtype=torch.float32).unbind())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(percentile_bands, name, value, raising=False)
        edges = percentile_bands.Edges.of(percentile_bands.edges_and_sums(made, slots))
        scores = [scores.clone() for _, scores in percentile_bands.strips(made)]
    maximum = slots.maximum[0] / percentile_bands.LOG2E.value
    sums = slots.tilted[0], slots.weight[0]
    return Found(tuple(edges), torch.cat(scores), sums, maximum, slots.counts[0], len(scores))

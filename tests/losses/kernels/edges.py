"""Edges of percentile bands as the fused kernel computes them, to be called where Triton is interpreted."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hardneg.losses.kernels import Eligibility, Rule


@dataclass
class Found:
    """The edges, and how they were found.

    edges: low, first, high, last, (A,) each · scores: (A, N) that they are the edges of · sums: of e^{(β+1)s} and
    e^{βs} over the band, (A,) each, if requested, the second if β > 0 · missed_edges: for each strip of anchors, the
    edges that took the bisection · statuses: for each strip, the status of each anchor · largest: elements of the
    largest tensor created
    """

    edges: tuple[Tensor, ...]
    scores: Tensor
    sums: tuple[Tensor, Tensor] | None
    missed_edges: list[Tensor]
    statuses: list[Tensor]
    largest: int

    @property
    def missed(self) -> int:
        return sum(int(part.sum()) for part in self.missed_edges)

    @property
    def without_room(self) -> int:
        """Number of anchors with a full list."""
        return self._with_status("NO_ROOM")

    @property
    def tied(self) -> int:
        """Number of anchors with more than two candidates that tie with an edge."""
        return self._with_status("TIED")

    def _with_status(self, status: str) -> int:
        from hardneg.losses.kernels.triton import percentile_lists

        return sum(int((part == getattr(percentile_lists, status).value).sum()) for part in self.statuses)

    @property
    def strips(self) -> int:
        return len(self.missed_edges)


class Watch(TorchDispatchMode):
    """Records the size of the largest tensor."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype != torch.uint8:  # the interpreter copies arguments as bytes
            self.largest = max(self.largest, result.numel())
        return result


def find_edges(
    anchors: Tensor,
    candidates: Tensor,
    eligibility: Eligibility,
    rings: tuple[tuple[float, float], ...],
    constants: dict[str, Any],
    tilt: float | None = None,
) -> Found:
    """The edges of the bands of anchors (A, d) among candidates (N, d).

    constants: values for constants of `percentile_bands` · tilt: also sum over the bands; scores must not exceed 8
    """
    from hardneg.losses.kernels.triton import blocks, percentile_bands, percentile_lists, row_sums, tile_sizes

    rule, scale = Rule(rings=rings, tilt=tilt or 0.0, max_abs_score=8.0), torch.full((), 2.0, device=anchors.device)
    block_pass = blocks.BlockPass(
        row_sums.NegativeSums(eligibility, rule), scale, anchors, candidates, 0, blocks.Band(), False
    )
    launch, missed, statuses = tile_sizes.launch, [], []

    def watched(program: Any, arguments: dict[str, Any], *given: Any, **named: Any) -> Any:
        if "missed_" in arguments:
            missed.append(arguments["missed_"])
        if "cut_" in arguments:
            statuses.append(arguments["counters"][:, percentile_lists.STATUS.value].clone())
        return launch(program, arguments, *given, **named)

    with pytest.MonkeyPatch.context() as patch, Watch() as watch:
        patch.setattr(tile_sizes, "launch", watched)
        for name, value in constants.items():
            patch.setattr(percentile_bands, name, value)
        percentile_bands.make_plan.cache_clear()
        edges = percentile_bands.edges(block_pass, rule, summed=tilt is not None)
        percentile_bands.make_plan.cache_clear()
    sums = None if edges.sums is None else (edges.sums[0].sum(dim=0), edges.sums[1].sum(dim=0))
    found = edges.low, edges.first, edges.high, edges.last
    return Found(found, block_pass.scores(), sums, missed, statuses, watch.largest)

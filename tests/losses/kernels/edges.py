"""Edges of bands as the fused kernel finds them, to be called where Triton is interpreted."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hardneg.losses.kernels import Eligibility, Rule


@dataclass
class Found:
    """What was found, and how.

    edges: low, first, high, last, (A,) each · scores: (A, N) that they are the edges of · sums: of e^{(β+1)s} and
    e^{βs} over the band, (A,) each, if asked for, the second if β > 0 · marks: of each strip of anchors, the edges that
    took many walks · looks: likewise, why anchors were looked at again · largest: elements of the largest tensor made
    """

    edges: tuple[Tensor, ...]
    scores: Tensor
    sums: tuple[Tensor, Tensor] | None
    marks: list[Tensor]
    looks: list[Tensor]
    largest: int

    @property
    def missed(self) -> int:
        return sum(int(part.sum()) for part in self.marks)

    @property
    def again(self) -> int:
        """Anchors that had a list without room."""
        return self._looked_at_for("NO_ROOM")

    @property
    def tied(self) -> int:
        """Anchors that had more than two candidates that tie with an edge."""
        return self._looked_at_for("TIED")

    def _looked_at_for(self, why: str) -> int:
        from hardneg.losses.kernels.triton import percentile_lists

        return sum(int((part == getattr(percentile_lists, why).value).sum()) for part in self.looks)

    @property
    def strips(self) -> int:
        return len(self.marks)


class Watch(TorchDispatchMode):
    """Watches the size of the tensors made."""

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

    constants: of the module `selection`, instead of its own · tilt: sum over the bands, too; scores may be up to 8
    """
    from hardneg.losses.kernels.triton import blocks, percentile_bands, percentile_lists, row_sums, tile_sizes

    rule, scale = Rule(rings=rings, tilt=tilt or 0.0, max_abs_score=8.0), torch.full((), 2.0, device=anchors.device)
    walk = blocks.Walk(row_sums.Negatives(eligibility, rule), scale, anchors, candidates, 0, blocks.Band(), False)
    launch, missed, looks = tile_sizes.launch, [], []

    def watched(program: Any, arguments: dict[str, Any], *given: Any, **named: Any) -> Any:
        if "missed_" in arguments:
            missed.append(arguments["missed_"])
        if "cut_" in arguments:
            looks.append(arguments["counters"][:, percentile_lists.AGAIN.value].clone())
        return launch(program, arguments, *given, **named)

    with pytest.MonkeyPatch.context() as patch, Watch() as watch:
        patch.setattr(tile_sizes, "launch", watched)
        for name, value in constants.items():
            patch.setattr(percentile_bands, name, value)
        percentile_bands.planned.cache_clear()
        edges = percentile_bands.edges(walk, rule, summed=tilt is not None)
        percentile_bands.planned.cache_clear()
    sums = None if edges.sums is None else (edges.sums[0].sum(dim=0), edges.sums[1].sum(dim=0))
    found = edges.low, edges.first, edges.high, edges.last
    return Found(found, walk.scores(), sums, missed, looks, watch.largest)

"""Edges of bands as the fused kernel finds them, to be called where Triton is interpreted."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hardneg.objectives.kernels import Eligibility, Rule


@dataclass
class Found:
    """What was found, and how.

    edges: low, first, high, last, (A,) each · scores: (A, N) that they are the edges of · marks: of each strip of
    anchors, the edges that took more than one walk · largest: elements of the largest tensor made
    """

    edges: tuple[Tensor, ...]
    scores: Tensor
    marks: list[Tensor]
    largest: int

    @property
    def missed(self) -> int:
        return sum(int(part.sum()) for part in self.marks)

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
    who: Eligibility,
    rings: tuple[tuple[float, float], ...],
    constants: dict[str, Any],
) -> Found:
    """The edges of the bands of anchors (A, d) among candidates (N, d).

    constants: of the module `selection`, instead of its own
    """
    from hardneg.objectives.kernels import questions, selection, tuning, walks

    rule, scale = Rule(rings=rings), torch.full((), 2.0, device=anchors.device)
    walk = walks.Walk(questions.Negatives(who, rule), scale, anchors, candidates, 0, walks.Band(), False)
    launch, missed = tuning.launch, []

    def watched(program: Any, arguments: dict[str, Any], *given: Any) -> Any:
        if "missed_" in arguments:
            missed.append(arguments["missed_"])
        return launch(program, arguments, *given)

    with pytest.MonkeyPatch.context() as patch, Watch() as watch:
        patch.setattr(tuning, "launch", watched)
        for name, value in constants.items():
            patch.setattr(selection, name, value)
        selection.planned.cache_clear()
        edges = selection.edges(walk, rule)
        selection.planned.cache_clear()
    return Found(edges, walk.scores(), missed, watch.largest)

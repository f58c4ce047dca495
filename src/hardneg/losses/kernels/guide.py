"""Candidates that are left out by the scores of a guide model, which are computed one strip of rows at a time."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GuideRows:
    """The guide's unit vectors of a candidate set, without gradient.

    anchors: (A, e) · candidates: blocks (N, e) or (B, N, e), one for each block of the candidate set · best: (A,) the
    guide's score of the anchor's best positive; −inf where there is none
    """

    anchors: Tensor
    candidates: tuple[Tensor, ...]
    best: Tensor


@dataclass(frozen=True)
class GuideBand:
    """Keeps the candidates whose guide score is at most ``highest`` (A,)."""

    rows: GuideRows
    highest: Tensor

    def outside(self, rows: slice) -> Tensor:
        """The candidates of the anchors ``rows`` that are left out, (R, N) bool."""
        anchors, blocks = self.rows.anchors[rows], []
        for block in self.rows.candidates:
            if block.dim() == 2:
                blocks.append(anchors @ block.T)  # (R, N)
            else:
                own = torch.arange(rows.start, rows.stop, device=block.device) % len(block)
                blocks.append(torch.einsum("rd,rnd->rn", anchors, block[own]))
        scores = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
        return scores > self.highest[rows, None]

"""Kernels: given anchors, candidates and a rule, the two log-sums and the count of each anchor's negatives."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from hardneg.objectives.kernels import reference, tiled
from hardneg.objectives.kernels.problem import Eligibility, LogSums, Places, Rule

BACKENDS = ("auto", "reference", "tiled", "fused")


class Kernel(Protocol):
    """What every kernel module offers."""

    def log_sums(
        self, anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor, who: Eligibility, rule: Rule
    ) -> LogSums:
        """The two log-sums and the support size of each anchor's negatives."""

    def positive_sums(
        self, anchors: Tensor, pool: Tensor, scale: Tensor, who: Eligibility, offset: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Σ softplus(offset − p) and Σ p over each anchor's positives."""


def choose(backend: str, *, general_weights: bool) -> Kernel:
    """The kernel that ``backend`` names.

    ``"auto"`` takes the tiled one, which is faster at every size measured (docs/kernels.md), except where only the
    reference one will do: general weights, and inside torch.compile, which fuses the plain operations itself.
    """
    if backend == "fused":
        raise ValueError("backend='fused' is not there yet: use 'tiled' or 'auto'")
    if backend == "auto":
        backend = "reference" if general_weights or torch.compiler.is_compiling() else "tiled"
    if backend == "tiled" and general_weights:
        raise ValueError("backend='tiled' cannot run Custom weights: use backend='reference' or 'auto'")
    return {"reference": reference, "tiled": tiled}[backend]


__all__ = ["BACKENDS", "Eligibility", "Kernel", "LogSums", "Places", "Rule", "choose"]

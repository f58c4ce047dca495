"""Kernels: the two log-sums and the count of each anchor's negatives, from anchors, candidates and a rule.

``reference`` and ``tiled`` run on any device, the fused kernel on CUDA devices with Triton.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from hardneg.losses.kernels import reference, tiled
from hardneg.losses.kernels.interface import Eligibility, HalfCopies, LogSums, PairRecord, PairSupport, Rule

Units = Callable[[Tensor, Tensor | None, float, torch.dtype | None, str], tuple[Tensor, Tensor]]
# The loss and its record, which is computed on request; None if the general path must compute this call.
PairLoss = Callable[..., tuple[Tensor, Callable[[], PairRecord]] | None]


class Kernel(Protocol):
    """The functions of a kernel module; the first two are None where plain operations do the same.

    units: unit vectors of both views, and their inner products · pair_loss: the whole loss of a paired batch ·
    pair_support: which calls it serves
    """

    units: Units | None
    pair_loss: PairLoss | None
    pair_support: PairSupport

    def log_sums(
        self, anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor, eligibility: Eligibility, rule: Rule
    ) -> LogSums:
        """The two log-sums and the support size of each anchor's negatives."""

    def positive_sums(
        self,
        anchors: Tensor,
        pool: Tensor,
        scale: Tensor,
        eligibility: Eligibility,
        offset: Tensor,
        half_copies: HalfCopies,
    ) -> tuple[Tensor, Tensor]:
        """Σ softplus(offset − p) and Σ p over each anchor's positives."""


HAS_TRITON = find_spec("triton") is not None

# Plain operations only: autograd can differentiate it any number of times.
REFERENCE: Kernel = reference  # type: ignore[assignment]  # mypy treats a module's functions as constants
TILED: Kernel = tiled  # type: ignore[assignment]


def fused(device: torch.device) -> Kernel:
    """The fused kernel; raises if it cannot run on this device."""
    if not HAS_TRITON:
        raise ValueError("backend='fused' needs Triton: install triton, or use backend='auto'")
    from hardneg.losses.kernels.triton import operators

    if not operators.available(device):
        raise ValueError(
            f"backend='fused' runs on CUDA devices, but the embeddings are on {device}: use backend='auto'"
        )
    return operators  # type: ignore[return-value]


@lru_cache
def runs_fused(device: torch.device) -> bool:
    """True if the fused kernel is the fastest on this device: it needs Triton and a GPU with bfloat16 products."""
    return device.type == "cuda" and HAS_TRITON and torch.cuda.get_device_capability(device) >= (8, 0)

"""Kernels: given anchors, candidates and a rule, the two log-sums and the count of each anchor's negatives."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from hardneg.losses.kernels import reference, tiled
from hardneg.losses.kernels.interface import Eligibility, HalfCopies, LogSums, PairRecord, RowLayout, Rule

BACKENDS = ("auto", "reference", "tiled", "fused")


Units = Callable[[Tensor, Tensor | None, float, torch.dtype | None, str], tuple[Tensor, Tensor]]
Losses = Callable[..., tuple[Tensor, Tensor]]
PairLoss = Callable[..., tuple[Tensor, Callable[[], PairRecord]]]  # the record only if somebody wants it


class Kernel(Protocol):
    """What every kernel module offers; the last three only where they take few launches, elsewhere they are None."""

    units: Units | None
    losses: Losses | None
    pair_loss: PairLoss | None

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


def choose(backend: str, *, general_weights: bool, device: torch.device | None = None) -> Kernel:
    """The kernel that ``backend`` names, for tensors on this device if it is known already.

    ``"auto"`` takes the fused one on a GPU where Triton is installed, else the tiled one, which is faster than the
    reference at every size measured (docs/kernels.md), except where only the reference one will do: general weights,
    inside torch.compile, which fuses the plain operations itself, and inside transforms of torch.func, which know only
    plain operations.
    """
    if backend == "auto":
        if general_weights or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            backend = "reference"
        else:
            backend = "fused" if device is not None and _suits_triton(device) else "tiled"
    if backend in ("tiled", "fused") and general_weights:
        raise ValueError(f"backend={backend!r} cannot run Custom weights: use backend='reference' or 'auto'")
    if backend != "fused" or device is None:
        return {"reference": reference, "tiled": tiled, "fused": tiled}[backend]
    if not _has_triton():
        raise ValueError("backend='fused' needs Triton: install triton, or use backend='auto'")
    from hardneg.losses.kernels.triton import operators

    if not operators.available(device):
        raise ValueError(
            f"backend='fused' runs on CUDA devices, but the embeddings are on {device}: use backend='auto'"
        )
    return operators  # type: ignore[return-value]  # mypy takes a module's functions for constants


@lru_cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@lru_cache
def _suits_triton(device: torch.device) -> bool:
    # Older GPUs multiply no bfloat16 matrices.
    return device.type == "cuda" and _has_triton() and torch.cuda.get_device_capability(device) >= (8, 0)


# Plain operations only: autograd can differentiate it any number of times.
PLAIN: Kernel = choose("reference", general_weights=False)

__all__ = [
    "BACKENDS",
    "PLAIN",
    "Eligibility",
    "HalfCopies",
    "Kernel",
    "LogSums",
    "Losses",
    "PairLoss",
    "PairRecord",
    "RowLayout",
    "Rule",
    "Units",
    "choose",
]  # fmt: skip

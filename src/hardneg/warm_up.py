"""Compile the fused kernels of all presets ahead of their first call, into Triton's cache on disk."""

import inspect
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from hardneg.losses import kernels, presets
from hardneg.losses.infonce import InfoNCE
from hardneg.progress import progress

DTYPES = (torch.float32, torch.bfloat16)
ROWS = 4096  # of a queue or bank, for the presets that need one


@dataclass(frozen=True)
class Warmed:
    """The first call of a preset. seconds: of its forward and backward pass · error: empty if it succeeded."""

    preset: str
    dtype: str
    seconds: float
    error: str = ""


def gpu() -> torch.device:
    """The GPU whose kernels are compiled; raises if there is none that can run them."""
    if not torch.cuda.is_available():
        raise ValueError("--warm compiles kernels for a GPU, and torch finds none: leave it out")
    if find_spec("triton") is None:
        raise ValueError("--warm compiles kernels by Triton, which is not installed: pip install triton")
    device = torch.device("cuda", torch.cuda.current_device())
    if not kernels.runs_fused(device):
        raise ValueError(f"--warm: {torch.cuda.get_device_name(device)} has no bfloat16 and uses no fused kernel")
    return device


def names() -> list[str]:
    """The presets that have fused kernels."""
    found = []
    for name, preset in vars(presets).items():
        made_here = inspect.isfunction(preset) and preset.__module__ == presets.__name__
        if made_here and inspect.signature(preset).return_annotation is InfoNCE and not name.startswith("_"):
            found.append(name)
    return found


def warm_up(batch_size: int = 256, dim: int = 128) -> Iterator[Warmed]:
    """Call each preset once on random embeddings (batch_size, dim) on the GPU, forward and backward, in each dtype.

    An error in one call does not end the others.
    """
    device = gpu()
    calls = [(name, dtype) for dtype in DTYPES for name in names()]
    for number in progress(range(len(calls)), "compiling kernels"):
        name, dtype = calls[number]
        error, start = "", time.perf_counter()
        try:
            _call(name, dtype, device, batch_size, dim)
        except Exception as failure:  # a compiler can raise anything
            error = f"{type(failure).__name__}: {failure}"
        yield Warmed(name, str(dtype).removeprefix("torch."), time.perf_counter() - start, error)


def _call(name: str, dtype: torch.dtype, device: torch.device, batch_size: int, dim: int) -> None:
    """Forward and backward pass of one preset."""
    loss: InfoNCE = getattr(presets, name)().to(device)
    loss.set_progress(1.0)  # the ring of the end of training: at the start it keeps nearly all

    def embeddings(rows: int) -> Tensor:
        return torch.randn(rows, dim, device=device, dtype=dtype)

    arguments: dict[str, Any] = {}
    if loss.supervision != "none":
        arguments["labels"] = torch.arange(batch_size, device=device) % 10
    if loss.in_batch is None:
        arguments["negatives"] = embeddings(ROWS)
    if name == "instance_discrimination":
        arguments["exclude"] = torch.arange(batch_size, device=device) % ROWS
    z1, z2 = embeddings(batch_size).requires_grad_(), embeddings(batch_size).requires_grad_()
    if name == "gist":
        arguments["guide"] = (z1.detach(), z2.detach())
    loss(z1, z2, **arguments).backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)

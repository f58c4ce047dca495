"""How a call is computed: in eager mode or not, on which device, and by which kernel."""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from hardneg.losses import kernels
from hardneg.losses.kernels import Kernel
from hardneg.losses.settings import Settings


def is_eager() -> bool:
    """True outside of `torch.compile` and of the transforms of `torch.func`."""
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())


def check_forward(problem: str) -> None:
    """Raise if the loss is computed again in a backward pass."""
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            f"the loss is recomputed in a backward pass, where {problem}: keep the loss outside of "
            "torch.utils.checkpoint"
        )


def choose_kernel(backend: str, settings: Settings, device: torch.device) -> Kernel:
    """The kernel for tensors on this device; see the argument ``backend`` of `InfoNCE`."""
    if backend == "auto":
        if settings.has_general_weights or not is_eager():
            return kernels.REFERENCE
        backend = "fused" if kernels.runs_fused(device) else "tiled"
    if backend != "reference" and torch._C._are_functorch_transforms_active():
        raise ValueError(f"backend={backend!r} does not work in torch.func: use backend='auto' or 'reference'")
    if backend == "fused":
        return kernels.fused(device)
    return kernels.TILED if backend == "tiled" else kernels.REFERENCE


def computing_on(device: torch.device) -> AbstractContextManager[Any]:
    """A context without autocast, in which ``device`` is the current device if it is a GPU.

    Triton launches its programs on the current GPU, not on the GPU of the tensors.
    """
    compiling = torch.compiler.is_compiling()
    autocast = compiling or torch.is_autocast_enabled(device.type)
    other_gpu = device.type == "cuda" and not compiling and device.index != torch.cuda.current_device()
    if not autocast and not other_gpu:
        return nullcontext()  # a tenth of the time of turning autocast off
    if not other_gpu:
        return torch.autocast(device.type, enabled=False)
    stack = ExitStack()
    stack.enter_context(torch.cuda.device(device))
    if autocast:
        stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack

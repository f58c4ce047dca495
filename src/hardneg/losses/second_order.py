"""Gradients that can be differentiated again, for losses whose own backward pass cannot.

Kernels make gradients by formulas that autograd does not see. Where a graph of the gradient is asked for
(``create_graph=True``: gradient penalties, Hessians, influence functions), the loss is computed once more by plain
operations, from the same inputs, and autograd differentiates that.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], needed: Sequence[bool], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradient of ``function(*inputs)`` in the inputs ``needed``, with a graph; None for the others.

    grad: of the value, of its shape
    """
    with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
        # One alias each: the same tensor given twice, as in loss(z, z), must get two gradients, not twice their sum.
        aliases = [x.view_as(x) if x is not None and need else x for x, need in zip(inputs, needed, strict=True)]
        value = function(*aliases)
        wanted = [x for x, need in zip(aliases, needed, strict=True) if need and x is not None]
        if not wanted or not value.requires_grad:
            return (None,) * len(aliases)
        found = iter(torch.autograd.grad(value, wanted, grad, create_graph=True, allow_unused=True))
    return tuple(next(found) if need and x is not None else None for x, need in zip(aliases, needed, strict=True))


def saveable(tensor: Tensor | None) -> Tensor | None:
    """The tensor, or a copy of an inference tensor, which autograd cannot save."""
    return tensor.clone() if tensor is not None and tensor.is_inference() else tensor


class Traced(torch.autograd.Function):
    """Passes a loss on, and answers for its backward pass.

    plain: computes the loss from ``inputs`` by plain operations; it is used if a graph of the gradient is asked for.
    None if the loss was computed so already · inputs: the tensors it was computed from, or None. If one of them is
    overwritten before the backward pass, that raises: a kernel that computes scores again would give wrong gradients.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, plain: Callable[..., Tensor] | None, *inputs: Tensor | None) -> Tensor:
        ctx.save_for_backward(*map(saveable, inputs))
        ctx.plain = plain
        return loss.clone()  # a view could not be changed in place, as in total += other

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors  # unpacking compares the versions
        if ctx.plain is None or not torch.is_grad_enabled():
            return (grad, None, *(None for _ in inputs))
        return (None, None, *gradients(ctx.plain, inputs, ctx.needs_input_grad[2:], grad))

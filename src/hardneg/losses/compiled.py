"""The short path of the fused kernel inside `torch.compile`: custom operators, one node of the graph for each pass.

Imported while compiling only, because it imports the compiler, which takes seconds. In eager mode an autograd function
calls the same passes: on an AMD EPYC a custom operator with its gradient takes 0.14 ms longer than such a function.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hardneg import checks
from hardneg.losses import paired
from hardneg.losses.inputs import half_precision
from hardneg.losses.kernels import fused, runs_fused
from hardneg.losses.kernels.interface import PairRecord
from hardneg.losses.kernels.triton.paired_loss import (
    Call,
    Given,
    Saved,
    backward_pass,
    forward_pass,
    make_call,
    pair_record,
)

# The numbers of a call are part of `key`, so a graph is compiled for constant settings only; see `InfoNCE._configure`.
SCHEMA = (
    "(Tensor z1, Tensor? z2, Tensor? negatives, Tensor scale, Tensor? labels, Tensor? exclude, "
    "Tensor? negative_mask, str key)"
)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_fused(backend: str, device_type: str) -> bool:
    """Whether tensors on the current device of this type take the fused kernel."""
    if backend == "fused":
        return True
    return backend == "auto" and device_type == "cuda" and runs_fused(torch.device("cuda", torch.cuda.current_device()))


def loss(*arguments: Any) -> tuple[Tensor, list[Tensor]]:
    """The loss of a batch as one node, and its saved tensors, for `record`. arguments: those of SCHEMA"""
    found: list[Tensor] = torch.ops.hardneg.paired_loss(*arguments)
    return found[0], [x.detach() for x in found[1:]]


def record(saved: Sequence[Tensor], *arguments: Any) -> PairRecord:
    """The record of a call, for diagnostics."""
    call, given, _ = _call(*arguments)
    return pair_record(call, given, Saved(*saved))


class Arguments(NamedTuple):
    """Those of the operator, as in SCHEMA."""

    z1: Tensor
    z2: Tensor | None
    negatives: Tensor | None
    scale: Tensor
    labels: Tensor | None
    exclude: Tensor | None
    negative_mask: Tensor | None
    key: str


def _call(*arguments: Any) -> tuple[Call, Given, Tensor | None]:
    """What is computed, from which tensors, and their validity."""
    z1, z2, negatives, scale, labels, exclude, negative_mask, key = Arguments(*arguments)
    settings = paired.KEYS[key]
    plan = paired.plan(settings, fused(z1.device), z1, z2, labels, negatives, exclude, negative_mask)
    assert plan is not None
    return *make_call(plan.eligibility, plan.rule, plan.form, z1, z2, negatives, scale, labels), plan.validity


def _forward(*arguments: Any) -> list[Tensor]:
    # Kernels are launched on the current device.
    with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
        call, given, validity = _call(*arguments)
        result, saved = forward_pass(call, given)
    # Outputs of an operator must not share memory.
    return [checks.poisoned(result, validity), *(x if x.numel() else torch.empty_like(x) for x in saved)]


def _forward_shapes(*arguments: Any) -> list[Tensor]:
    z1, z2, negatives, *_, key = Arguments(*arguments)
    settings = paired.KEYS[key]
    batch, dim = z1.shape
    rows = batch if z2 is None else 2 * batch
    both = z2 is not None and (settings.in_batch == "both" or settings.symmetric)
    anchors = 2 * batch if both else batch
    dtype = half_precision(z1, z1 if z2 is None else z2) or torch.float32
    by_label = settings.supervision in ("positives", "full")
    by_rank = any(part.percentiles() is not None for part in settings.bands)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return z1.new_empty(shape, dtype=dtype)

    saved = Saved(
        units=new(rows, dim, dtype=dtype),
        negatives=new(0) if negatives is None else new(len(negatives), dim, dtype=dtype),
        similarity=new(batch),
        valid=new(),
        memory=new(11, anchors),
        level=new(anchors) if by_label else new(0),
        edges=new(4, anchors) if by_rank else new(0),
    )
    return [new(anchors) if settings.reduction == "none" else new(), *saved]


def _backward(grad: Tensor, saved: Sequence[Tensor], needed: Sequence[bool], *arguments: Any) -> list[Tensor]:
    with torch.cuda.device_of(grad):  # type: ignore[no-untyped-call]
        call, given, validity = _call(*arguments)
        found = backward_pass(call, given, Saved(*saved), checks.poisoned(grad, validity).contiguous(), needed)
    return [grad.new_empty(0) if x is None else x for x in found]


def _backward_shapes(grad: Tensor, saved: Sequence[Tensor], needed: Sequence[bool], *arguments: Any) -> list[Tensor]:
    z1, z2, negatives, scale, *_ = arguments
    return [
        torch.empty_like(z1, memory_format=torch.contiguous_format),
        grad.new_empty(0) if z2 is None else torch.empty_like(z2, memory_format=torch.contiguous_format),
        torch.empty_like(negatives, memory_format=torch.contiguous_format) if needed[2] else grad.new_empty(0),
        torch.empty_like(scale) if needed[3] else grad.new_empty(0),
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, ctx.key = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.number = len(tensors)
    for made in output[1:]:
        ctx.mark_non_differentiable(made)


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    tensors, saved = ctx.saved_tensors[: ctx.number], list(ctx.saved_tensors[ctx.number :])
    needed = list(ctx.needs_input_grad[:4])
    grad = grads[0]
    if grad is None:
        return tuple([None] * (ctx.number + 1))
    found: list[Tensor] = torch.ops.hardneg.paired_loss_backward(grad, saved, needed, *tensors, ctx.key)
    wanted: list[Tensor | None] = [x if need else None for x, need in zip(found, needed, strict=True)]
    return tuple(wanted + [None] * (ctx.number + 1 - len(wanted)))


_operator = torch.library.custom_op("hardneg::paired_loss", _forward, mutates_args=(), schema=SCHEMA + " -> Tensor[]")
_operator.register_fake(_forward_shapes)
_operator.register_autograd(_differentiate, setup_context=_save)
_backward_operator = torch.library.custom_op(
    "hardneg::paired_loss_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor[] saved, bool[] needed, " + SCHEMA[1:] + " -> Tensor[]",
)
_backward_operator.register_fake(_backward_shapes)

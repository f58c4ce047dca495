"""Tensors that autograd functions save for their backward pass."""

from typing import Any


def unchanged(ctx: Any) -> tuple[Any, ...]:
    """The saved tensors of an autograd function; raises if one was overwritten since the forward pass."""
    try:
        found: tuple[Any, ...] = ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RuntimeError(
            "a tensor that the loss was computed from has been modified by an inplace operation before backward(): "
            "call queue.enqueue() and bank.update() after backward(); of other tensors pass a clone()"
        ) from error
    return found

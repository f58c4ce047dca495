"""Running encoders in chunks of a batch, with the gradient of the whole batch (gradient caching, Gao et al. 2021)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hardneg import chunks


@contextmanager
def in_chunks(encoders: Sequence[nn.Module], chunk_size: int) -> Iterator[None]:
    """Let encoders in training mode process at most ``chunk_size`` samples at a time while the context is active.

    The forward pass keeps embeddings only, and the backward pass encodes each chunk again with the same random numbers,
    as `hardneg.cached_step` does; the caller needs no special backward pass. Batch-norm sees one chunk at a time, and
    its running statistics are updated once per chunk.

    Examples:
        >>> encoder = nn.Linear(8, 4)
        >>> with in_chunks([encoder], chunk_size=16):
        ...     encoder(torch.randn(100, 8)).square().sum().backward()
        >>> encoder.weight.grad.shape
        torch.Size([4, 8])
    """
    chunks.warn_about_batch_norm(encoders)
    for encoder in encoders:
        # A bound method, so that a deep copy of the encoder gets its own.
        encoder.forward = MethodType(_forward(chunk_size), encoder)
    try:
        yield
    finally:
        for encoder in encoders:
            del encoder.forward  # the class has its own


def encoders_of(module: nn.Module) -> list[nn.Module]:
    """The encoders among the networks of a method, by the names of their attributes; not its heads.

    Examples:
        >>> method = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("encoder", "key_encoder", "head")})
        >>> method.networks = lambda: list(method.values())
        >>> encoders_of(method) == [method["encoder"], method["key_encoder"]]
        True
    """
    networks = set(module.networks())  # type: ignore[operator]
    return [part for name, part in module.named_modules() if part in networks and "encoder" in name.partition(".")[0]]


def _forward(chunk_size: int) -> Callable[[nn.Module, Tensor], Tensor]:
    def forward(self: nn.Module, inputs: Tensor) -> Tensor:
        encode = type(self).forward
        if not self.training or len(inputs) <= chunk_size:
            return encode(self, inputs)  # type: ignore[no-any-return]
        parts = [part for part, _ in chunks.split_rows(inputs, chunk_size)]
        if not torch.is_grad_enabled():
            return torch.cat([encode(self, part) for part in parts])
        contexts = partial(_contexts, self)
        return torch.cat([checkpoint(encode, self, part, use_reentrant=False, context_fn=contexts) for part in parts])

    return forward


def _contexts(encoder: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of the two forward passes of a chunk: the second one leaves the buffers unchanged."""
    return nullcontext(), chunks.preserve_buffers([encoder], chunks.buffer_versions([encoder]))

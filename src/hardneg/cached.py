"""The exact gradient of a batch too large for its encoder, in chunks (gradient caching, Gao et al. 2021).

The loss needs all embeddings at once, the encoder does not. First pass: encode chunk by chunk and keep only the
embeddings. Then compute the loss and its gradient with respect to the embeddings. Second pass: encode each chunk again,
with the same random numbers, and backpropagate its rows of that gradient. Only the activations of one chunk are stored.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hardneg import checks, chunks

Encoder = Callable[[Any], Tensor]
Context = Callable[[], AbstractContextManager[Any]]

# Largest relative difference allowed between the embeddings of the two passes. Other random numbers give a far larger
# one, other orders of summation a far smaller one.
MAX_DIFFERENCE = 0.05


def cached_step(
    encoder: Encoder | Sequence[Encoder],
    inputs: Any,
    loss: Callable[..., Tensor],
    *,
    chunk_size: int | Sequence[int] = 32,
    split: Callable[[Any, int], Sequence[Any]] | None = None,
    backward: Callable[[Tensor], object] = Tensor.backward,
    no_sync: Context | None = None,
    **arguments: Any,
) -> Tensor:
    """Add the exact gradient of ``loss(encoder(inputs))`` to ``.grad``, with the activations of one chunk at a time.

    It takes 4/3 of the computation of a plain step. Gradient accumulation over small batches gives another gradient,
    because each anchor has fewer negatives. Dropout draws the same masks in both passes. Parameters of the loss, and
    all other leaves that it depends on, get their gradients too. It does not step the optimizer.

    Batch-norm in training mode sees one chunk at a time, which raises a warning: the gradient is exact for chunks
    normalized separately. Its running statistics are updated once per chunk.

    Args:
        encoder: maps a chunk of a view to embeddings, one floating tensor (rows, …); or a tuple with one per view
        inputs: one view, or a tuple of views, each encoded separately. A view is a tensor, or a mapping, tuple or list
            of tensors, with a row per sample; the encoder gets the same structure with some of the rows
        loss: called with the embeddings of all views in order, ``loss(z1, z2)``, and returns one number; any `InfoNCE`
        chunk_size: largest number of rows encoded at once, or one number per view
        split: splits a view of another type, such as a list of texts: (view, chunk_size) → chunks, in order
        backward: replaces ``tensor.backward()``: Lightning's ``self.manual_backward``, or
            ``lambda part: scaler.scale(part).backward()``; called once per chunk
        no_sync: returns a context without communication of gradients, so that they are communicated once, with the last
            chunk; by default that of the DDP modules of the encoder
        arguments: further arguments of the loss: ``labels=``, ``negatives=``

    Returns the loss, detached.

    Examples:
        >>> import torch, hardneg as hn
        >>> encoder = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
        >>> view1, view2 = torch.randn(100, 8), torch.randn(100, 8)
        >>> loss = hn.cached_step(encoder, (view1, view2), hn.hcl(), chunk_size=16)
        >>> loss.shape, encoder[0].weight.grad.shape
        (torch.Size([]), torch.Size([32, 8]))
    """
    if not torch.is_grad_enabled():
        raise ValueError("cached_step computes gradients, which are disabled: call it outside torch.no_grad()")
    views = _views(encoder, inputs, chunk_size, split)
    modules = list(dict.fromkeys(module for view in views for module in chunks.modules_of(view.encoder)))
    chunks.warn_about_batch_norm(modules)
    without_sync = partial(_entered, [no_sync] if no_sync else chunks.no_sync_contexts(modules))

    versions = chunks.buffer_versions(modules)
    with without_sync():
        embeddings = [view.encode() for view in views]
        value = loss(*embeddings, **arguments)
    found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    if found != ():
        raise ValueError(f"loss must return a tensor of one number, got {found}: use reduction='mean' or 'sum'")
    if not value.requires_grad:
        raise ValueError("the loss depends on no parameter that requires a gradient: unfreeze the encoder")
    leaves = _leaves(value, besides=embeddings)
    trained = [z for z in embeddings if z.requires_grad]
    with torch.autocast(value.device.type, enabled=False):
        gradients = iter(torch.autograd.grad(value, trained + leaves, allow_unused=True, materialize_grads=True))
    replays = [
        _Replay(view, *parts)
        for view, z in zip(views, embeddings, strict=True)
        if z.requires_grad
        for parts in zip(
            view.chunks,
            view.states,
            torch.split(z.detach(), view.rows),
            torch.split(next(gradients), view.rows),
            strict=True,
        )
    ]

    last = {id(replay.view.encoder): replay for replay in replays}  # of each encoder
    with chunks.preserve_random_state(), chunks.preserve_buffers(modules, versions):
        with without_sync():
            for replay in replays:
                if replay is not last[id(replay.view.encoder)]:
                    _run_backward([replay.surrogate()], backward)
        # One backward pass for the last chunks and the leaves: DDP communicates when all parameters have gradients.
        surrogates = [replay.surrogate() for replay in last.values()]
        surrogates += [(leaf * gradient).sum() for leaf, gradient in zip(leaves, gradients, strict=True)]
        _run_backward(surrogates, backward)
    return value.detach()


@dataclass
class _View:
    """One view: its encoder, its chunks, and after `encode` the random state before each chunk."""

    encoder: Encoder
    chunks: Sequence[Any]
    expected_rows: Sequence[int] | None  # of each chunk; unknown if split by the caller
    states: list[list[Tensor]] = field(default_factory=list)  # of the generators, before each chunk
    rows: list[int] = field(default_factory=list)  # of the embeddings of each chunk
    trained: bool = False  # True if the embeddings depend on a parameter that requires a gradient

    def encode(self) -> Tensor:
        """The embeddings of all chunks, (B, …): a leaf, which requires a gradient if the encoder is trained."""
        encoded = [self._encode_chunk(index) for index in range(len(self.chunks))]
        self.rows = [len(z) for z in encoded]
        embeddings = torch.cat(encoded)
        # The gradient of the embeddings is not scaled by a GradScaler, and would underflow in half precision.
        embeddings = embeddings.float() if embeddings.dtype == torch.float16 else embeddings
        return embeddings.requires_grad_(self.trained)

    def _encode_chunk(self, index: int) -> Tensor:
        self.states.append(chunks.random_state())
        # With gradients enabled, although the graph is discarded: a compiled encoder then runs the same code in both
        # passes, and z.requires_grad is True if the encoder is trained.
        z = self.encoder(self.chunks[index])
        if not isinstance(z, Tensor) or not z.is_floating_point() or z.dim() == 0:
            what = f"a tensor of {z.dtype}, {tuple(z.shape)}" if isinstance(z, Tensor) else type(z).__name__
            raise ValueError(
                f"encoder must return one floating tensor of embeddings (rows, …), got {what}: wrap it in a "
                "function that returns them, such as lambda tokens: model(**tokens).last_hidden_state[:, 0]"
            )
        if self.expected_rows is not None and len(z) != self.expected_rows[index]:
            raise ValueError(f"encoder must return a row per sample, got {len(z)} for {self.expected_rows[index]}")
        self.trained |= z.requires_grad
        return z.detach()


@dataclass(eq=False)
class _Replay:
    """The second pass of a chunk: embeddings of the first pass and their gradient, (rows, …) each."""

    view: _View
    chunk: Any
    state: list[Tensor]
    embeddings: Tensor
    gradient: Tensor

    def surrogate(self) -> Tensor:
        """A number whose gradient is that of the loss through this chunk: Σ embeddings · their gradient."""
        chunks.set_random_state(self.state)
        z = self.view.encoder(self.chunk)
        validity = None
        if z.numel():
            # NaN and inf are not an error here: a GradScaler expects them.
            difference = (z.detach().to(self.embeddings.dtype) - self.embeddings).abs().max().nan_to_num(0.0)
            validity = checks.values(
                difference <= MAX_DIFFERENCE * self.embeddings.abs().max().nan_to_num(torch.inf),
                "encoder returned different embeddings for a chunk in the second pass, so the gradient would be wrong: "
                "draw random numbers from torch's default generators only, and keep no state between calls",
            )
        with torch.autocast(z.device.type, enabled=False):
            return checks.poisoned((z.to(self.gradient.dtype) * self.gradient).sum(), validity)


def _run_backward(parts: Sequence[Tensor], backward: Callable[[Tensor], object]) -> None:
    # Backward passes run outside autocast, in which cached_step may be called.
    with torch.autocast(parts[0].device.type, enabled=False):
        total = parts[0]
        for part in parts[1:]:
            total = total + part.to(total)
        backward(total)


def _views(encoder: Any, inputs: Any, chunk_size: Any, split: Any) -> list[_View]:
    views = list(inputs) if isinstance(inputs, tuple | list) else [inputs]
    encoders = list(encoder) if isinstance(encoder, tuple | list | nn.ModuleList) else [encoder] * len(views)
    sizes = list(chunk_size) if isinstance(chunk_size, tuple | list) else [chunk_size] * len(views)
    if not views:
        raise ValueError("inputs must hold at least one view, got none")
    for name, given in (("encoder", encoders), ("chunk_size", sizes)):
        if len(given) != len(views):
            raise ValueError(f"{name} must be one, or one per view: got {len(given)} for {len(views)} views")
    sizes = [checks.whole("chunk_size", size) for size in sizes]
    for one in encoders:
        if not callable(one):
            raise ValueError(f"encoder must be a module or a function, got {type(one).__name__}")
    prepared = []
    for one, view, size in zip(encoders, views, sizes, strict=True):
        parts = chunks.split_rows(view, size) if split is None else [(chunk, None) for chunk in split(view, size)]
        if not parts:
            raise ValueError("split returned no chunk: each view must have at least one")
        rows = [count for _, count in parts if count is not None]
        prepared.append(_View(one, [chunk for chunk, _ in parts], rows or None))
    return prepared


def _leaves(value: Tensor, besides: Sequence[Tensor]) -> list[Tensor]:
    """The leaves that a loss depends on, in a fixed order, such as a learnable temperature."""
    excluded = {id(tensor) for tensor in besides}
    found: list[Tensor] = []
    stack: list[Any] = [value.grad_fn]
    seen: set[Any] = {None}
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name().endswith("AccumulateGrad") and id(node.variable) not in excluded:
            found.append(node.variable)
        stack.extend(following for following, _ in node.next_functions)
    return found


@contextmanager
def _entered(contexts: Sequence[Context]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield

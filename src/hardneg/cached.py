"""The gradient of a batch whose encoder does not fit, in chunks and exact (gradient caching, Gao et al. 2021).

The loss needs all embeddings at once, the encoder does not. So: encode chunk by chunk and keep embeddings only; take
the loss and its gradient at the embeddings; encode each chunk again, with the same random numbers, and send its rows of
that gradient back through it. Activations of one chunk are all that is ever held.
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

# A replay that draws other numbers moves embeddings by far more than this, and sums in another order by far less.
REPEATS_TO = 0.05


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
    """The backward pass of ``loss(encoder(inputs))`` with the activations of one chunk: adds to ``.grad``, exactly.

    For one and a third times the computing it gives the gradient of the whole batch, which adding up the gradients of
    small batches does not: their negatives would be fewer. Dropout draws the same masks in both passes. Parameters of
    the loss, and whatever else it was computed from, get their gradients too. Stepping the optimiser is left to you.

    Batch-norm in training mode sees one chunk at a time, as on a device of its own, and says so in a warning: the
    gradient is exact for that network. Its running statistics take up every chunk once.

    Args:
        encoder: a chunk of a view → its embeddings, one floating tensor (rows, …); or a tuple of encoders, one per view
        inputs: one view, or a tuple of views, each encoded by itself. A view is a tensor, or a mapping, tuple or list
            of tensors, with a row per sample; it reaches the encoder as it is, cut by rows
        loss: gets the embeddings of all views in order, ``loss(z1, z2)``, and returns one number; any `InfoNCE`
        chunk_size: most rows that are encoded at once, or one number per view
        split: cuts a view of any other kind, such as a list of texts: (view, chunk_size) → chunks, in order
        backward: takes the place of ``tensor.backward()``: Lightning's ``self.manual_backward``, or
            ``lambda part: scaler.scale(part).backward()``; it is called once per chunk
        no_sync: makes a context in which no gradients go to other processes, so that they are sent once, with the last
            chunk; found by itself where the encoder is or holds a DDP module
        arguments: handed to the loss as they are: ``labels=``, ``negatives=``

    Returns the loss, without a graph.

    Examples:
        >>> import torch, hardneg as hn
        >>> encoder = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
        >>> view1, view2 = torch.randn(100, 8), torch.randn(100, 8)
        >>> loss = hn.cached_step(encoder, (view1, view2), hn.hcl(), chunk_size=16)
        >>> loss.shape, encoder[0].weight.grad.shape
        (torch.Size([]), torch.Size([32, 8]))
    """
    if not torch.is_grad_enabled():
        raise ValueError("cached_step computes gradients, and they are switched off: call it outside torch.no_grad()")
    views = _views(encoder, inputs, chunk_size, split)
    modules = list(dict.fromkeys(module for view in views for module in chunks.modules_of(view.encoder)))
    chunks.warn_of_batch_norm(modules)
    quiet = partial(_entered, [no_sync] if no_sync else chunks.own_no_sync(modules))

    versions = chunks.versions(modules)
    with quiet():
        embeddings = [view.encode() for view in views]
        value = loss(*embeddings, **arguments)
    shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    if shown != ():
        raise ValueError(f"loss must return a tensor of one number, got {shown}: use reduction='mean' or 'sum'")
    if not value.requires_grad:
        raise ValueError("there is nothing to train: the loss came from no parameter that requires a gradient")
    others = _leaves(value, besides=embeddings)
    sought = [z for z in embeddings if z.requires_grad]
    with torch.autocast(value.device.type, enabled=False):
        gradients = torch.autograd.grad(value, sought + others, allow_unused=True, materialize_grads=True)
    found = iter(gradients)
    work = [
        _Work(view, *parts)
        for view, z in zip(views, embeddings, strict=True)
        if z.requires_grad
        for parts in zip(
            view.parts,
            view.states,
            torch.split(z.detach(), view.rows),
            torch.split(next(found), view.rows),
            strict=True,
        )
    ]

    last = {id(piece.view.encoder): piece for piece in work}  # of each encoder: these go back together
    with chunks.random_state_kept(), chunks.buffers_kept(modules, versions):
        with quiet():
            for piece in work:
                if piece is not last[id(piece.view.encoder)]:
                    piece.send_back(backward)
        # One pass that reaches every parameter: what sends gradients to other processes waits for all of them.
        ends = [piece.pull() for piece in last.values()]
        ends += [(leaf * gradient).sum() for leaf, gradient in zip(others, found, strict=True)]
        _back(ends, backward)
    return value.detach()


@dataclass
class _View:
    """One view: its encoder, its chunks, and after `encode` what each chunk began from."""

    encoder: Encoder
    parts: Sequence[Any]  # its chunks
    expected: Sequence[int] | None  # rows of each chunk, where we cut it
    states: list[list[Tensor]] = field(default_factory=list)  # of the generators, before each chunk
    rows: list[int] = field(default_factory=list)  # of the embeddings of each chunk
    trained: bool = False  # whether a gradient at the embeddings is of use

    def encode(self) -> Tensor:
        """The embeddings of all chunks, (B, …): a leaf, which requires a gradient if the encoder can use it."""
        encoded = [self._encode_first(number) for number in range(len(self.parts))]
        self.rows = [len(z) for z in encoded]
        embeddings = torch.cat(encoded)
        # The gradient at the embeddings is taken before a scaler has seen it, and would vanish in half precision.
        embeddings = embeddings.float() if embeddings.dtype == torch.float16 else embeddings
        return embeddings.requires_grad_(self.trained)

    def _encode_first(self, number: int) -> Tensor:
        self.states.append(chunks.random_state())
        # With gradients on, though the graph is dropped on return: both passes then run the same code, which without
        # them a compiled encoder would not, and it shows which encoders are trained.
        z = self.encoder(self.parts[number])
        if not isinstance(z, Tensor) or not z.is_floating_point() or z.dim() == 0:
            what = f"a tensor of {z.dtype}, {tuple(z.shape)}" if isinstance(z, Tensor) else type(z).__name__
            raise ValueError(
                f"encoder must return one floating tensor of embeddings (rows, …), got {what}: wrap it in a "
                "function that picks them, such as lambda tokens: model(**tokens).last_hidden_state[:, 0]"
            )
        if self.expected is not None and len(z) != self.expected[number]:
            raise ValueError(f"encoder must return a row per sample, got {len(z)} for {self.expected[number]}")
        self.trained |= z.requires_grad
        return z.detach()


@dataclass(eq=False)
class _Work:
    """A chunk that is to be encoded again; embeddings as they were, and the gradient at them: (rows, …) each."""

    view: _View
    chunk: Any
    state: list[Tensor]
    embeddings: Tensor
    gradient: Tensor

    def pull(self) -> Tensor:
        """A number whose gradient is that of the loss, as far as it goes through this chunk."""
        chunks.set_random_state(self.state)
        z = self.view.encoder(self.chunk)
        if z.numel():
            # NaN and inf are not ours to judge: a scaler expects some.
            difference = (z.detach().to(self.embeddings.dtype) - self.embeddings).abs().max().nan_to_num(0.0)
            checks.values(
                difference <= REPEATS_TO * self.embeddings.abs().max().nan_to_num(torch.inf),
                "encoder gave a chunk other embeddings when it was encoded again, so the gradient would be wrong: let "
                "it draw random numbers from torch's own generators only, and keep nothing between calls",
            )
        with torch.autocast(z.device.type, enabled=False):
            return (z.to(self.gradient.dtype) * self.gradient).sum()

    def send_back(self, backward: Callable[[Tensor], object]) -> None:
        _back([self.pull()], backward)


def _back(parts: Sequence[Tensor], backward: Callable[[Tensor], object]) -> None:
    # A backward pass belongs outside of autocast, which cached_step may be called in.
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
    for one, size in zip(encoders, sizes, strict=True):
        checks.whole("chunk_size", size)
        if not callable(one):
            raise ValueError(f"encoder must be a module or a function, got {type(one).__name__}")
    made = []
    for one, view, size in zip(encoders, views, sizes, strict=True):
        cut = chunks.cut(view, size) if split is None else [(chunk, None) for chunk in split(view, size)]
        if not cut:
            raise ValueError("split returned no chunk: each view must have at least one")
        rows = [count for _, count in cut if count is not None]
        made.append(_View(one, [chunk for chunk, _ in cut], rows or None))
    return made


def _leaves(value: Tensor, besides: Sequence[Tensor]) -> list[Tensor]:
    """The leaves that a number was computed from, in a fixed order: a learnt temperature, a learnt negative."""
    known = {id(tensor) for tensor in besides}
    found: list[Tensor] = []
    waiting: list[Any] = [value.grad_fn]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name().endswith("AccumulateGrad") and id(node.variable) not in known:
            found.append(node.variable)
        waiting.extend(following for following, _ in node.next_functions)
    return found


@contextmanager
def _entered(contexts: Sequence[Context]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield

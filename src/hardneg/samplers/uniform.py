"""Uniform batches, and what every batch sampler here shares: epochs, shares of processes, and exact resuming."""

from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from hardneg.checks import Fixed, whole
from hardneg.randomness import generator


class UniformBatchSampler(Fixed, Sampler[list[int]]):
    """Batches cut from a fresh permutation in each epoch, for ``DataLoader(batch_sampler=…)``.

    Each iteration is the next epoch, unless `set_epoch` says which. The batch of a step is a function of (seed, epoch,
    step), so all processes agree on it without talking, and each takes its contiguous share.

    Args:
        size: number of samples, N
        batch_size: samples in a batch, B, of all processes together
        seed: of all draws
        drop_last: an epoch has ⌊N/B⌋ full batches; else ⌈N/B⌉, the last of which takes what remains
        rank: which share of each batch is this process's
        processes: how many share it

    Examples:
        >>> sampler = UniformBatchSampler(size=10, batch_size=4, drop_last=False)
        >>> [len(batch) for batch in sampler], len(sampler)
        ([4, 4, 2], 3)
    """

    _first: int  # the step of the first batch in _drawn
    _drawn: "list[array[int]]"  # whole batches of this epoch
    _order: Tensor | None  # (N,) the permutation of this epoch

    def __init__(
        self, size: int, batch_size: int, seed: int = 0, drop_last: bool = True, rank: int = 0, processes: int = 1
    ) -> None:
        check_size(size)
        for name, given in (("batch_size", batch_size), ("processes", processes)):
            whole(name, given)
        whole("rank", rank, at_least=0)
        if rank >= processes:
            raise ValueError(f"rank={rank} must be below processes={processes}")
        if batch_size > size and drop_last:
            raise ValueError(
                f"batch_size={batch_size} is more than the {size} samples: lower it, or pass drop_last=False"
            )
        if batch_size % processes:
            raise ValueError(f"batch_size must be a multiple of the {processes} processes, got {batch_size}")
        if not drop_last and 0 < size % batch_size < processes:
            raise ValueError(
                f"the last batch would have {size % batch_size} samples for {processes} processes: pass drop_last=True"
            )
        self.size, self.batch_size, self.seed, self.drop_last = size, batch_size, seed, drop_last
        self.rank, self.processes = rank, processes
        self.epoch, self._begun = 0, False
        self._before: tuple[int, int, list[array[int]]] | None = None  # epoch, _first and _drawn of the epoch before
        self._following: Mapping[str, Any] | None = None  # what a loaded state holds of the epoch after
        self._rewind()

    def __len__(self) -> int:
        return self.size // self.batch_size if self.drop_last else -(-self.size // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        # Nothing of this runs before the first batch is asked for: a DataLoader may make iterators it never uses.
        if self._begun:
            self._enter(self.epoch + 1)
        self._begun = True
        for batch in list(self._drawn):
            yield self._share(batch)
        while (step := self._first + len(self._drawn)) < len(self):
            batch = array("q", self._draw(step, min(self.batch_size, self.size - step * self.batch_size)))
            self._drawn.append(batch)
            yield self._share(batch)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration this epoch, from its first batch or from where `load_state_dict` left off in it."""
        whole("epoch", epoch, at_least=0)
        if self._begun or epoch != self.epoch:
            self._enter(epoch)

    def set_progress(self, fraction: float) -> None:
        """Move all schedules to the fraction of training done, in [0, 1]; uniform batches have none."""
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction must be in [0, 1], got {fraction!r}: pass steps done / steps in all")

    def refresh(self, embeddings: Tensor) -> None:
        """Take new embeddings, (N, d); uniform batches do not look at them."""

    def state_dict(self, step: int, epoch: int | None = None) -> dict[str, Any]:
        """Everything needed to go on after ``step`` batches of an epoch, in numbers and tensors.

        step: batches that training has used · epoch: of these batches (default: the epoch being drawn). A loader's
        workers draw ahead of training, perhaps on a graph that has since been replaced, perhaps into the next epoch, so
        what was drawn and not used is part of the state.
        """
        whole("step", step, at_least=0)
        at, first, drawn, following = self.epoch, self._first, self._drawn, self._following
        if epoch not in (None, self.epoch):
            if self._before is None or self._before[0] != epoch or epoch != self.epoch - 1:
                raise ValueError(f"epoch={epoch}, but epoch {self.epoch} is being drawn: keep at most one epoch behind")
            at, first, drawn = self._before
            following = {"pending": _tensors(self._drawn), **self._position()}
        if not first <= step <= first + len(drawn):
            raise ValueError(f"step={step}, but batches {first} to {first + len(drawn)} of epoch {at} were drawn")
        return {
            "size": self.size,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "epoch": at,
            "step": step,
            "pending": _tensors(drawn[step - first :]),
            "following": following,
            **self._position(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave: the next iteration goes on from there."""
        for name in ("size", "batch_size", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the state was saved with {name}={state[name]}, this sampler has {getattr(self, name)}: "
                    "build it with the same settings"
                )
        self.epoch, self._begun = state["epoch"], False
        self._before, self._following = None, None
        self._rewind()
        self._first, self._drawn = state["step"], _arrays(state["pending"])
        self._go_to(state)
        self._following = state["following"]
        if state["step"] >= len(self):  # the end of an epoch is the start of the next
            self._enter(self.epoch + 1)

    def _enter(self, epoch: int) -> None:
        """Make ``epoch`` the one to be drawn."""
        self._before = (self.epoch, self._first, self._drawn)
        follows = self._following is not None and epoch == self.epoch + 1
        following, self._following = self._following if follows else None, None
        self.epoch, self._begun = epoch, False
        self._rewind()
        if following is not None:
            self._drawn = _arrays(following["pending"])
            self._go_to(following)

    def _rewind(self) -> None:
        """Forget what was drawn in an epoch."""
        self._first, self._drawn, self._order = 0, [], None

    def _position(self) -> dict[str, Any]:
        """What further draws of this epoch depend on, beside the step."""
        return {}

    def _go_to(self, position: Mapping[str, Any]) -> None:
        """Take back what `_position` gave."""

    def _draw(self, step: int, length: int) -> list[int]:
        """The whole batch of a step of this epoch."""
        if self._order is None:
            self._order = torch.randperm(self.size, generator=generator("cpu", self.seed, self.epoch))
        begin = step * self.batch_size
        batch: list[int] = self._order[begin : begin + length].tolist()
        return batch

    def _share(self, batch: "array[int]") -> list[int]:
        begin, end = (len(batch) * rank // self.processes for rank in (self.rank, self.rank + 1))
        return batch[begin:end].tolist()


def check_size(size: object, at_least: int = 1) -> None:
    """Raise unless ``size`` is a number of samples."""
    if isinstance(size, Sampler):  # Lightning tries to make the sampler anew around one of its own
        raise ValueError(
            "this sampler shares out its batches by rank= and processes= and must not be wrapped: pass Lightning's "
            "Trainer use_distributed_sampler=False"
        )
    whole("size", size, at_least)


def _tensors(batches: "list[array[int]]") -> list[Tensor]:
    return [torch.tensor(batch) for batch in batches]


def _arrays(batches: list[Tensor]) -> "list[array[int]]":
    return [array("q", batch.tolist()) for batch in batches]

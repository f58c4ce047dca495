"""Uniform batches, and the base of all batch samplers: epochs, the shares of processes, and exact resuming."""

from array import array
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from hardneg.checks import Fixed, TensorLike, whole
from hardneg.randomness import generator


class UniformBatchSampler(Fixed, Sampler[list[int]]):
    """Batches cut from a new random permutation in each epoch, for ``DataLoader(batch_sampler=…)``.

    Each iteration is the next epoch, unless `set_epoch` sets it. The batch of a step is a function of (seed, epoch,
    step), so all processes compute the same batch without communication, and each yields its contiguous share.

    Args:
        size: number of samples, N
        batch_size: samples in a batch, B, of all processes together
        seed: of all draws
        drop_last: an epoch has ⌊N/B⌋ full batches; else ⌈N/B⌉, the last of which has the remaining samples
        rank: index of this process, which selects its share of each batch
        processes: number of processes that share each batch

    Examples:
        >>> sampler = UniformBatchSampler(size=10, batch_size=4, drop_last=False)
        >>> [len(batch) for batch in sampler], len(sampler)
        ([4, 4, 2], 3)
    """

    _first: int  # the step of the first batch in _drawn
    _drawn: "list[array[int]]"  # batches of this epoch, of all processes together
    _order: Tensor | None  # (N,) the permutation of this epoch

    def __init__(
        self, size: int, batch_size: int, seed: int = 0, drop_last: bool = True, rank: int = 0, processes: int = 1
    ) -> None:
        size = check_size(size)
        batch_size, processes = whole("batch_size", batch_size), whole("processes", processes)
        rank = whole("rank", rank, at_least=0)
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
        self._previous: tuple[int, int, list[array[int]]] | None = None  # epoch, _first and _drawn of the last epoch
        self._following: Mapping[str, Any] | None = None  # state of the next epoch, from a loaded state
        self._reset_epoch()

    def __len__(self) -> int:
        return self.size // self.batch_size if self.drop_last else -(-self.size // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, so that nothing runs before the first batch: a DataLoader may make iterators it never uses.
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
        """Set the epoch of the next iteration, which starts at its first batch or where `load_state_dict` resumes."""
        epoch = whole("epoch", epoch, at_least=0)
        if self._begun or epoch != self.epoch:
            self._enter(epoch)

    def set_progress(self, fraction: float) -> None:
        """Set the fraction of training done, in [0, 1], for all schedules; uniform batches have none."""
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction must be in [0, 1], got {fraction!r}: pass steps done / total steps")

    def refresh(self, embeddings: TensorLike) -> None:
        """No-op, for interface compatibility: uniform batches do not depend on embeddings."""

    def state_dict(self, step: int, epoch: int | None = None) -> dict[str, Any]:
        """The state needed to resume after ``step`` batches of an epoch, as numbers and tensors.

        step: batches that training has used · epoch: of these batches (default: the epoch being drawn). The workers of
        a loader draw ahead of training, perhaps from a graph that has since been replaced or in the next epoch, so the
        state includes the batches that were drawn and not used.
        """
        step = whole("step", step, at_least=0)
        at, first, drawn, following = self.epoch, self._first, self._drawn, self._following
        if epoch not in (None, self.epoch):
            if self._previous is None or self._previous[0] != epoch or epoch != self.epoch - 1:
                raise ValueError(
                    f"epoch={epoch}, but epoch {self.epoch} is being drawn: pass it, or the previous epoch if that was "
                    "drawn last"
                )
            at, first, drawn = self._previous
            following = {"pending": _tensors(self._drawn), **self._epoch_state()}
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
            **self._epoch_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`; the next iteration resumes there."""
        for name in ("size", "batch_size", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the state was saved with {name}={state[name]}, this sampler has {getattr(self, name)}: "
                    "build it with the same settings"
                )
        self.epoch, self._begun = state["epoch"], False
        self._previous, self._following = None, None
        self._reset_epoch()
        self._first, self._drawn = state["step"], _arrays(state["pending"])
        self._load_epoch_state(state)
        self._following = state["following"]
        if state["step"] >= len(self):  # the end of an epoch is the start of the next
            self._enter(self.epoch + 1)

    def _enter(self, epoch: int) -> None:
        """Start drawing ``epoch``."""
        self._previous = (self.epoch, self._first, self._drawn)
        follows = self._following is not None and epoch == self.epoch + 1
        following, self._following = self._following if follows else None, None
        self.epoch, self._begun = epoch, False
        self._reset_epoch()
        if following is not None:
            self._drawn = _arrays(following["pending"])
            self._load_epoch_state(following)

    def _reset_epoch(self) -> None:
        """Discard the batches drawn in an epoch."""
        self._first, self._drawn, self._order = 0, [], None

    def _epoch_state(self) -> dict[str, Any]:
        """The state, in addition to the step, that further draws of this epoch depend on."""
        return {}

    def _load_epoch_state(self, state: Mapping[str, Any]) -> None:
        """Load a state from `_epoch_state`."""

    def _draw(self, step: int, length: int) -> list[int]:
        """The batch of a step of this epoch, of all processes together."""
        if self._order is None:
            self._order = torch.randperm(self.size, generator=generator("cpu", self.seed, self.epoch))
        begin = step * self.batch_size
        batch: list[int] = self._order[begin : begin + length].tolist()
        return batch

    def _share(self, batch: "array[int]") -> list[int]:
        begin, end = (len(batch) * rank // self.processes for rank in (self.rank, self.rank + 1))
        return batch[begin:end].tolist()


def check_size(size: object, at_least: int = 1) -> int:
    """Raise unless ``size`` is a number of samples; return it."""
    if isinstance(size, Sampler):  # Lightning tries to rebuild the batch sampler around its own sampler
        raise ValueError(
            "this sampler shares its batches between processes by rank= and processes= and cannot wrap a sampler: pass "
            "use_distributed_sampler=False to Lightning's Trainer"
        )
    if isinstance(size, Sized) and getattr(size, "ndim", 1) != 0:  # data, whose values would fill the message
        raise ValueError(f"size must be the number of samples, got a {type(size).__name__}: pass len(data)")
    return whole("size", size, at_least)


def _tensors(batches: "list[array[int]]") -> list[Tensor]:
    return [torch.tensor(batch) for batch in batches]


def _arrays(batches: list[Tensor]) -> "list[array[int]]":
    return [array("q", batch.tolist()) for batch in batches]

"""The base of samplers that compose batches from embeddings, which are replaced during training."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hardneg import checks
from hardneg.checks import TensorLike, whole
from hardneg.randomness import generator, mix
from hardneg.samplers.graph import checked_embeddings
from hardneg.samplers.uniform import UniformBatchSampler, check_size


class RefreshedBatchSampler(UniformBatchSampler):
    """A sampler that composes batches from the embeddings of the last `refresh`; uniform before the first one."""

    _remaining: Tensor | None  # (N,) bool: samples not yet drawn in this epoch, with coverage="once"

    def __init__(
        self,
        size: int,
        batch_size: int,
        coverage: str,
        seed: int,
        drop_last: bool,
        refresh_every: int | None,
        rank: int,
        processes: int,
    ) -> None:
        check_size(size, at_least=2)
        checks.choice("coverage", coverage, ("walk", "once"))
        self.coverage = coverage
        self.refresh_every = None if refresh_every is None else whole("refresh_every", refresh_every)
        self.refreshes, self.steps = 0, 0  # so far
        super().__init__(size, batch_size, seed, drop_last, rank, processes)

    def refresh(self, embeddings: TensorLike) -> None:
        """Compose the batches drawn from now on from these embeddings, (N, d): one row per sample.

        With several processes, every process must call it with the same embeddings.
        """
        embeddings = checked_embeddings(embeddings)
        if len(embeddings) != self.size:
            raise ValueError(f"embeddings must have {self.size} rows, one per sample, got {len(embeddings)}")
        self._set_embeddings(embeddings, mix(self.seed, self.refreshes))
        self.refreshes += 1

    def after_step(self, embeddings: TensorLike | Callable[[], TensorLike | None]) -> bool:
        """Count a training step, and refresh after every ``refresh_every`` of them; return True if it refreshed.

        embeddings: the rows of a memory bank, (N, d), or a function that computes them, called only to refresh; it may
        return None to keep the batches as they are
        """
        if self.refresh_every is None:
            raise ValueError("refresh_every is None: pass the number of steps between refreshes, or call refresh()")
        self.steps += 1
        if self.steps % self.refresh_every != 0:
            return False
        found = embeddings() if callable(embeddings) else embeddings
        if found is None:
            return False
        self.refresh(found)
        return True

    def state_dict(self, step: int, epoch: int | None = None) -> dict[str, Any]:
        return super().state_dict(step, epoch) | {"refreshes": self.refreshes, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.refreshes, self.steps = state["refreshes"], state["steps"]

    def _reset_epoch(self) -> None:
        super()._reset_epoch()
        self._remaining = torch.ones(self.size, dtype=torch.bool) if self.coverage == "once" else None

    def _epoch_state(self) -> dict[str, Any]:
        return {"left": None if self._remaining is None else self._remaining.clone()}

    def _load_epoch_state(self, state: Mapping[str, Any]) -> None:
        if self._remaining is not None and state["left"] is not None:
            self._remaining = state["left"].clone()

    def _draw(self, step: int, length: int) -> list[int]:
        if self.refreshes == 0:
            batch = super()._draw(step, length)
        else:
            batch = self._compose(length, generator("cpu", self.seed, self.epoch, step))
        if self._remaining is not None:
            self._remaining[batch] = False
        return batch

    @abstractmethod
    def _set_embeddings(self, embeddings: Tensor, seed: int) -> None:
        """Store what `_compose` needs of the embeddings, (N, d)."""

    @abstractmethod
    def _compose(self, length: int, generator: torch.Generator) -> list[int]:
        """A batch of ``length`` remaining samples."""

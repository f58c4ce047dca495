"""The batches of a whole run: the epochs of a sampler one after the other, from any step on."""

import time
from array import array
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from hardneg.samplers import KNNBatchSampler, ProximityBatchSampler, UniformBatchSampler
from hardneg.samplers.refreshed import RefreshedBatchSampler
from hardneg.training import objectives
from hardneg.training.recipe import Recipe

SAMPLERS = ("uniform", "proximity", "knn")
AHEAD = 64  # batches that are drawn, made a tensor and copied to the device at a time


class Batches:
    """Indices of every batch of a run, epoch after epoch.

    Args:
        sampler: of the batches of one epoch
        epochs: how often to go through the data

    They come on ``device``, which is the host's until someone sets it.

    Examples:
        >>> batches = Batches(UniformBatchSampler(size=10, batch_size=4), epochs=2)
        >>> len(batches), batches.steps_per_epoch
        (4, 2)
        >>> whole = [index.tolist() for index in batches]
        >>> again = Batches(UniformBatchSampler(size=10, batch_size=4), epochs=2)
        >>> again.go_on_from(batches.place(3))
        >>> [index.tolist() for index in again] == whole[3:]
        True
    """

    def __init__(self, sampler: UniformBatchSampler, epochs: int) -> None:
        self.sampler, self.epochs = sampler, epochs
        self.start, self._begin_at = 0, self.sampler.state_dict(0)
        self.device = torch.device("cpu")
        self.seconds = 0.0  # spent on drawing since someone set it back
        self.drawn: dict[int, list[Tensor]] = {}  # by epoch, of this one and the one before, on the host

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one epoch."""
        return len(self.sampler)

    def __len__(self) -> int:
        return self.epochs * self.steps_per_epoch

    def __iter__(self) -> Iterator[Tensor]:
        # A trainer may ask for an iterator, take a batch, and ask again.
        self.sampler.load_state_dict(self._begin_at)
        # What a refreshed sampler draws depends on the steps before.
        ahead = 1 if isinstance(self.sampler, RefreshedBatchSampler) else AHEAD
        for epoch in range(self.start // self.steps_per_epoch, self.epochs):
            self.sampler.set_epoch(epoch)
            self.drawn = {past: batches for past, batches in self.drawn.items() if past == epoch - 1} | {epoch: []}
            drawn = iter(self.sampler)
            while portion := self._next(drawn, ahead):
                lengths = [len(batch) for batch in portion]
                indices = torch.frombuffer(array("q", chain.from_iterable(portion)), dtype=torch.int64)
                self.drawn[epoch] += indices.split_with_sizes(lengths)
                yield from indices.to(self.device, non_blocking=True).split_with_sizes(lengths)

    def _next(self, drawn: Iterator[list[int]], number: int) -> list[list[int]]:
        """So many more batches, or as many as are left."""
        began = time.perf_counter()
        portion = list(islice(drawn, number))
        self.seconds += time.perf_counter() - began
        return portion

    # Not called state_dict: Lightning would ask for it by itself, and not say after which step.
    def place(self, step: int) -> dict[str, Any]:
        """Everything needed to go on after so many steps of the run."""
        # The end of an epoch is told as such: the sampler may not have begun the next.
        epoch, rest = divmod(step - 1, self.steps_per_epoch) if step > 0 else (0, -1)
        return {"step": step, "of": self._extent(), "sampler": self.sampler.state_dict(rest + 1, epoch)}

    def go_on_from(self, state: Mapping[str, Any]) -> None:
        """Take back what `place` gave; batches of another size, or of other data, are an error."""
        if state["of"] != self._extent() or not 0 <= state["step"] <= len(self):
            raise ValueError(f"it stands at step {state['step']} of {state['of']}, and the run has {self._extent()}")
        self.start, self._begin_at = state["step"], state["sampler"]
        self.sampler.load_state_dict(self._begin_at)

    def _extent(self) -> dict[str, int]:
        """What the batches of a run must agree in to go on where others stopped."""
        return {"samples": self.sampler.size, "batch_size": self.sampler.batch_size, "steps": self.steps_per_epoch}


def sampler(settings: Recipe, size: int, rank: int = 0, processes: int = 1) -> UniformBatchSampler:
    """The sampler that the recipe names, over so many samples."""
    chosen = settings.batches
    if chosen.sampler not in SAMPLERS:
        raise ValueError(f"batches.sampler={chosen.sampler!r} is not known: use one of {', '.join(SAMPLERS)}")
    if settings.trainer.batch_size > size:
        raise ValueError(
            f"trainer.batch_size={settings.trainer.batch_size} is more than the {size} samples to train on: lower it"
        )
    common: dict[str, Any] = {
        "size": size,
        "batch_size": settings.trainer.batch_size,
        "seed": settings.seed,
        "drop_last": settings.batches.drop_last,
        "rank": rank,
        "processes": processes,
    }
    if chosen.sampler == "uniform":
        return UniformBatchSampler(**common)
    common |= {"coverage": chosen.coverage, "refresh_every": chosen.refresh_every}
    if chosen.sampler == "knn":
        return KNNBatchSampler(**common)
    given = chosen.restart
    restart = objectives.schedule("batches.restart", given) if isinstance(given, dict) else given
    return ProximityBatchSampler(
        **common, candidates=chosen.candidates, neighbors=chosen.neighbors, restart=restart, walk=chosen.walk
    )

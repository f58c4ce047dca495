"""The batches of a run: the epochs of a sampler as index tensors on a device; can resume at any batch."""

import time
from array import array
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from hardneg.recipe_section import naming
from hardneg.samplers import ConsecutiveBatchSampler, KNNBatchSampler, ProximityBatchSampler, UniformBatchSampler
from hardneg.samplers.refreshed import RefreshedBatchSampler
from hardneg.training import objectives
from hardneg.training.recipe import Recipe

SAMPLERS = ("uniform", "consecutive", "proximity", "knn")
AHEAD = 64  # batches that are drawn, converted to a tensor and copied to the device at a time


class Batches:
    """The indices of the samples of each batch; every iteration is the next epoch of the sampler.

    Args:
        sampler: of the batches

    The indices are on ``device``, at first the CPU.

    Examples:
        >>> batches = Batches(UniformBatchSampler(size=10, batch_size=4))
        >>> len(batches)
        2
        >>> epochs = [[index.tolist() for index in batches] for _ in range(2)]
        >>> resumed = Batches(UniformBatchSampler(size=10, batch_size=4))
        >>> resumed.resume(batches.state_after(3))
        >>> [index.tolist() for index in resumed] == epochs[1][1:]
        True
    """

    def __init__(self, sampler: UniformBatchSampler) -> None:
        self.sampler = sampler
        self.device = torch.device("cpu")
        self.seconds = 0.0  # spent on drawing since it was last set to 0
        self.drawn: list[Tensor] = []  # the batches of this epoch drawn so far, on the CPU

    def __len__(self) -> int:
        """Batches in one epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Tensor]:
        # The draws of a refreshed sampler depend on previous steps.
        ahead = 1 if isinstance(self.sampler, RefreshedBatchSampler) else AHEAD
        self.drawn = []
        indices = iter(self.sampler)
        while portion := self._next(indices, ahead):
            lengths = [len(batch) for batch in portion]
            joined = torch.frombuffer(array("q", chain.from_iterable(portion)), dtype=torch.int64)
            self.drawn += joined.split_with_sizes(lengths)
            yield from joined.to(self.device, non_blocking=True).split_with_sizes(lengths)

    def _next(self, indices: Iterator[list[int]], number: int) -> list[list[int]]:
        """The next ``number`` batches, or those that are left in the epoch."""
        began = time.perf_counter()
        portion = list(islice(indices, number))
        self.seconds += time.perf_counter() - began
        return portion

    # Not called state_dict: Lightning would call it by itself, without the number of batches used.
    def state_after(self, batches: int) -> dict[str, Any]:
        """Everything needed to resume after this number of batches of the run; all earlier epochs are complete."""
        # After the last batch of an epoch this is still its state: the sampler may not have begun the next one.
        epoch, rest = divmod(batches - 1, len(self)) if batches > 0 else (0, -1)
        return {"step": batches, "of": self._extent(), "sampler": self.sampler.state_dict(rest + 1, epoch)}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_after`; one of other data or another batch size is an error."""
        if state["of"] != self._extent() or state["step"] < 0:
            raise ValueError(f"it is of batch {state['step']} of {state['of']}, but the run has {self._extent()}")
        self.sampler.load_state_dict(state["sampler"])

    def _extent(self) -> dict[str, int]:
        """The sizes that must be equal in a saved state and in the run that resumes it."""
        return {"samples": self.sampler.size, "batch_size": self.sampler.batch_size, "steps": len(self)}


def sampler(settings: Recipe, size: int, rank: int = 0, processes: int = 1) -> UniformBatchSampler:
    """The sampler that the recipe names, over ``size`` samples."""
    chosen = settings.batches
    if chosen.sampler not in SAMPLERS:
        raise ValueError(f"batches.sampler={chosen.sampler!r} is not known: use one of {', '.join(SAMPLERS)}")
    if size < 2:
        raise ValueError(
            f"data.source={settings.data.source} has {size} sample{'s' * (size != 1)} to train on, and a negative is "
            "another sample: give at least 2"
        )
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
    with naming("batches", type(chosen).model_fields), naming("trainer", ["batch_size"]):
        if chosen.sampler == "uniform":
            return UniformBatchSampler(**common)
        if chosen.sampler == "consecutive":
            return ConsecutiveBatchSampler(**common)
        if chosen.refresh_every == 0 and chosen.embeddings == "bank":
            raise ValueError(
                "refresh_every=0 builds the graph before the first step, when the bank holds no embeddings yet: "
                "set embeddings=encode"
            )
        if settings.trainer.epochs == 1 and chosen.embeddings == "bank":
            raise ValueError(
                "embeddings=bank has an embedding of every sample after the first epoch only, and trainer.epochs is 1: "
                "set embeddings=encode"
            )
        common |= {"coverage": chosen.coverage, "refresh_every": chosen.refresh_every or None}
        if chosen.sampler == "knn":
            return KNNBatchSampler(**common)
        given = chosen.restart
        restart = objectives.schedule("batches.restart", given) if isinstance(given, dict) else given
        return ProximityBatchSampler(
            **common, candidates=chosen.candidates, neighbors=chosen.neighbors, restart=restart, walk=chosen.walk
        )

"""The batches of a whole run, each a function of (seed, epoch, step) alone."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hardneg import randomness


class Batches:
    """Indices of every batch of a run, epoch after epoch; begins at ``start``, so that a run resumes in mid-epoch.

    Each epoch is a fresh permutation; what does not fill a batch is left for another epoch. Several processes take
    contiguous parts of the same global batch, without talking.

    Args:
        size: number of samples
        batch_size: of all processes together
        epochs: how often to go through the data
        seed: of the permutations
        rank, processes: which part of each batch this process takes

    Examples:
        >>> batches = Batches(size=10, batch_size=4, epochs=2, seed=0)
        >>> len(batches), batches.steps_per_epoch
        (4, 2)
        >>> whole = [index.tolist() for index in batches]
        >>> batches.start = 3
        >>> [index.tolist() for index in batches] == whole[3:]
        True
    """

    def __init__(self, size: int, batch_size: int, epochs: int, seed: int, rank: int = 0, processes: int = 1) -> None:
        if not 1 <= batch_size <= size:
            raise ValueError(f"batch_size must be from 1 to the number of samples, {size}, got {batch_size}")
        if batch_size % processes:
            raise ValueError(f"batch_size must be a multiple of the {processes} processes, got {batch_size}")
        self.size, self.batch_size, self.epochs, self.seed = size, batch_size, epochs, seed
        self.rank, self.processes = rank, processes
        self.start = 0

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one epoch."""
        return self.size // self.batch_size

    def __len__(self) -> int:
        return self.epochs * self.steps_per_epoch

    def __iter__(self) -> Iterator[Tensor]:
        share = self.batch_size // self.processes
        epoch, order = -1, torch.empty(0)
        for step in range(self.start, len(self)):
            if epoch != step // self.steps_per_epoch:
                epoch = step // self.steps_per_epoch
                order = torch.randperm(self.size, generator=randomness.generator("cpu", self.seed, epoch))
            begin = step % self.steps_per_epoch * self.batch_size + self.rank * share
            yield order[begin : begin + share]

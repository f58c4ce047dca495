"""Batches of consecutive samples, for data whose order matters, such as the sentences of a text."""

import torch

from hardneg.randomness import generator
from hardneg.samplers.uniform import UniformBatchSampler


class ConsecutiveBatchSampler(UniformBatchSampler):
    """Batches of B consecutive samples, in a new random order in each epoch; arguments as `UniformBatchSampler`.

    With ``drop_last`` the first batch of an epoch begins at a random sample, so that all samples are used in the long
    run. Otherwise batches begin at sample 0, and the last one has the remaining samples.

    Examples:
        >>> sampler = ConsecutiveBatchSampler(size=10, batch_size=4, drop_last=False)
        >>> sorted(sampler)
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    def _draw(self, step: int, length: int) -> list[int]:
        full = self.size // self.batch_size
        if self._order is None:
            draws = generator("cpu", self.seed, self.epoch)
            spare = self.size - full * self.batch_size if self.drop_last else 0
            first = int(torch.randint(spare + 1, (), generator=draws))
            self._order = first + self.batch_size * torch.randperm(full, generator=draws)  # (batches,)
        begin = int(self._order[step]) if step < full else full * self.batch_size
        return list(range(begin, begin + length))

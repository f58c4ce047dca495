"""Batches of a random sample and its nearest neighbors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hardneg.matmul import exact_products
from hardneg.samplers.refreshed import RefreshedBatchSampler


class KNNBatchSampler(RefreshedBatchSampler):
    """Batches of a random sample and the B − 1 samples of largest inner product with it.

    These are the hardest batches, with the most false negatives. Uniform until the first `refresh`. The arguments are
    as in `ProximityBatchSampler`. No graph is built: `refresh` copies the embeddings, and the neighbors of the random
    sample are computed when the batch is drawn, on the device of the embeddings.

    Examples:
        >>> sampler = KNNBatchSampler(size=4, batch_size=2)
        >>> sampler.refresh(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]]))
        >>> {tuple(sorted(batch)) for batch in sampler} <= {(0, 1), (2, 3)}
        True
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        coverage: str = "walk",
        seed: int = 0,
        drop_last: bool = True,
        refresh_every: int | None = None,
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        self._embeddings: Tensor | None = None  # (N, d)
        super().__init__(size, batch_size, coverage, seed, drop_last, refresh_every, rank, processes)

    def state_dict(self, step: int, epoch: int | None = None) -> dict[str, Any]:
        return super().state_dict(step, epoch) | {"rows": self._embeddings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._embeddings = state["rows"]

    def _set_embeddings(self, embeddings: Tensor, seed: int) -> None:
        self._embeddings = embeddings.clone()

    def _compose(self, length: int, generator: torch.Generator) -> list[int]:
        assert self._embeddings is not None
        if self._remaining is None:
            # The draw of `WalkGraph.start`, so that both samplers start from the same sample.
            first = int(torch.randint(self.size, (16,), generator=generator)[0])
        else:
            nodes = self._remaining.nonzero()[:, 0]
            first = int(nodes[torch.randint(len(nodes), (), generator=generator)])
        with exact_products(self._embeddings.device):
            scores = self._embeddings @ self._embeddings[first]  # (N,)
            if self._remaining is not None:
                scores.masked_fill_(~self._remaining.to(scores.device), -torch.inf)
            scores[first] = torch.inf
            batch: list[int] = scores.topk(length).indices.tolist()
        return batch

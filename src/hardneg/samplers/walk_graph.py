"""Single random steps on a proximity graph, restricted to the nodes that may still be visited."""

from bisect import bisect_right
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class WalkGraph:
    """A proximity graph for random walks: neighbor lists, step probabilities and a mask of the nodes allowed.

    neighbors: (N, K) integer · weights: (N, K), steps ∝ max(weight, 0), uniform where a row has none above 0 (default:
    uniform steps) · remaining: (N,) bool, the nodes that may still be visited (default: all)

    Examples:
        >>> graph = WalkGraph(torch.tensor([[1, 2], [0, 2], [0, 1]]), remaining=torch.tensor([True, True, False]))
        >>> graph.reachable(0)
        [1]
    """

    def __init__(self, neighbors: Tensor, weights: Tensor | None = None, remaining: Tensor | None = None) -> None:
        self.size, self.degree = neighbors.shape
        self.rows: NDArray[np.int32] = neighbors.detach().cpu().int().contiguous().numpy()
        self.remaining: NDArray[np.bool_] | None = None if remaining is None else remaining.cpu().numpy()
        self._reachable: dict[int, list[int]] = {}
        self.weights: NDArray[np.float32] | None = None  # (N, K) ≥ 0
        self.cumulative: NDArray[np.float32] | None = None  # (N, K), the last column 1
        if weights is not None:
            positive = weights.detach().cpu().float().clamp(min=0).numpy()
            positive[positive.sum(axis=1) == 0] = 1
            sums = positive.cumsum(axis=1, dtype=np.float64)
            self.weights, self.cumulative = positive, (sums / sums[:, -1:]).astype(np.float32)

    @cached_property
    def flat(self) -> memoryview:
        """All rows one after another; Python reads a memoryview twice as fast as an array."""
        return self.rows.reshape(-1).data

    @cached_property
    def flat_cumulative(self) -> memoryview | None:
        """The cumulative step probabilities of all rows one after another."""
        return None if self.cumulative is None else self.cumulative.reshape(-1).data

    def __getstate__(self) -> dict[str, Any]:
        return {name: part for name, part in self.__dict__.items() if not isinstance(part, memoryview)}

    def restricted(self, remaining: Tensor) -> "WalkGraph":
        """The same graph with only the ``remaining`` nodes; shares its arrays."""
        part = object.__new__(WalkGraph)
        part.__dict__.update(self.__dict__, remaining=remaining.cpu().numpy(), _reachable={})
        part.__dict__.pop("nodes", None)
        return part

    @property
    def uniform(self) -> bool:
        """True if a step is a uniform draw from all K neighbors."""
        return self.remaining is None and self.weights is None

    @cached_property
    def nodes(self) -> NDArray[np.int64] | range:
        """The nodes that may still be visited."""
        return range(self.size) if self.remaining is None else self.remaining.nonzero()[0]

    def reachable(self, node: int) -> list[int]:
        """The neighbors that a step from ``node`` can lead to."""
        found = self._reachable.get(node)
        if found is None:
            row = self.rows[node]
            allowed = np.ones(self.degree, dtype=bool) if self.remaining is None else self.remaining[row]
            if self.weights is not None and self.weights[node][allowed].any():
                allowed = allowed & (self.weights[node] > 0)
            found = row[allowed].tolist()
            if self.remaining is not None:  # cached for one batch only: all rows as lists would be large
                self._reachable[node] = found
        return found

    def step(self, node: int, first_draw: float, second_draw: float) -> int | None:
        """A random neighbor by two uniform numbers in [0, 1), or None if no neighbor remains."""
        begin = node * self.degree
        if self.flat_cumulative is None:
            neighbor = self.flat[begin + int(first_draw * self.degree)]
        else:
            neighbor = self.flat[bisect_right(self.flat_cumulative, first_draw, begin, begin + self.degree - 1)]
        if self.remaining is None or self.remaining[neighbor]:
            return int(neighbor)
        # Rejected: draw again among the remaining neighbors. The result has the distribution of the second draw.
        allowed = self.reachable(node)
        if not allowed:
            return None
        if self.weights is None:
            return allowed[int(second_draw * len(allowed))]
        sums = self.weights[node][np.isin(self.rows[node], allowed)].cumsum()
        if sums[-1] == 0:
            return allowed[int(second_draw * len(allowed))]
        return allowed[min(int(np.searchsorted(sums, second_draw * sums[-1], side="right")), len(allowed) - 1)]

    def start(self, visited: dict[int, None], generator: torch.Generator) -> int:
        """A uniform draw from the remaining nodes not in ``visited``; there must be at least one."""
        for position in torch.randint(len(self.nodes), (16,), generator=generator).tolist():
            if (node := int(self.nodes[position])) not in visited:
                return node
        unvisited = [node for node in np.asarray(self.nodes).tolist() if node not in visited]
        return int(unvisited[int(torch.randint(len(unvisited), (), generator=generator))])

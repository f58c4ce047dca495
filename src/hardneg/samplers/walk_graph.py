"""The ground that walks cover: single steps on a proximity graph, of which parts may be gone."""

from bisect import bisect_right
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Terrain:
    """The graph as walks see it: neighbours by index, only those that are left, and how often each is taken.

    neighbors: (N, K) integer · weights: (N, K), steps ∝ max(weight, 0), uniform where a row has none above 0 (default:
    uniform steps) · left: (N,) bool, the nodes that may still be visited (default: all)

    Examples:
        >>> terrain = Terrain(torch.tensor([[1, 2], [0, 2], [0, 1]]), left=torch.tensor([True, True, False]))
        >>> terrain.around(0)
        [1]
    """

    def __init__(self, neighbors: Tensor, weights: Tensor | None = None, left: Tensor | None = None) -> None:
        self.size, self.degree = neighbors.shape
        self.rows: NDArray[np.int32] = neighbors.detach().cpu().int().contiguous().numpy()
        self.left: NDArray[np.bool_] | None = None if left is None else left.cpu().numpy()
        self._around: dict[int, list[int]] = {}
        self.shares: NDArray[np.float32] | None = None
        self.sums: NDArray[np.float32] | None = None
        if weights is not None:
            shares = weights.detach().cpu().float().clamp(min=0).numpy()  # (N, K)
            shares[shares.sum(axis=1) == 0] = 1
            sums = shares.cumsum(axis=1, dtype=np.float64)
            self.shares, self.sums = shares, (sums / sums[:, -1:]).astype(np.float32)

    @cached_property
    def flat(self) -> memoryview:
        """All rows one after another; Python reads a memoryview twice as fast as an array."""
        return self.rows.reshape(-1).data

    @cached_property
    def flat_sums(self) -> memoryview | None:
        """Of each row, the chances to take one of its first 1, 2, … K neighbours."""
        return None if self.sums is None else self.sums.reshape(-1).data

    def __getstate__(self) -> dict[str, Any]:
        return {name: part for name, part in self.__dict__.items() if not isinstance(part, memoryview)}

    def restricted(self, left: Tensor) -> "Terrain":
        """The same graph with only the nodes that are left."""
        part = object.__new__(Terrain)
        part.__dict__.update(self.__dict__, left=left.cpu().numpy(), _around={})
        part.__dict__.pop("nodes", None)
        return part

    @property
    def plain(self) -> bool:
        """Whether every step is a uniform neighbour."""
        return self.left is None and self.shares is None

    @cached_property
    def nodes(self) -> NDArray[np.int64] | range:
        """The nodes that are left."""
        return range(self.size) if self.left is None else self.left.nonzero()[0]

    def around(self, node: int) -> list[int]:
        """Where a step from a node may lead."""
        found = self._around.get(node)
        if found is None:
            row = self.rows[node]
            remain = np.ones(self.degree, dtype=bool) if self.left is None else self.left[row]
            if self.shares is not None and self.shares[node][remain].any():
                remain = remain & (self.shares[node] > 0)
            found = row[remain].tolist()
            if self.left is not None:  # the whole graph as lists would be large; what one batch meets is not
                self._around[node] = found
        return found

    def step(self, node: int, draw: float, spare: float) -> int | None:
        """A random neighbour by two uniform numbers in [0, 1), or None where none is left."""
        begin = node * self.degree
        if self.flat_sums is None:
            arrived = self.flat[begin + int(draw * self.degree)]
        else:
            arrived = self.flat[bisect_right(self.flat_sums, draw, begin, begin + self.degree - 1)]
        if self.left is None or self.left[arrived]:
            return int(arrived)
        # Rejected: draw again, this time among those that are left. Both draws together have the law of the second.
        remain = self.around(node)
        if not remain:
            return None
        if self.shares is None:
            return remain[int(spare * len(remain))]
        sums = self.shares[node][np.isin(self.rows[node], remain)].cumsum()
        if sums[-1] == 0:
            return remain[int(spare * len(remain))]
        return remain[min(int(np.searchsorted(sums, spare * sums[-1], side="right")), len(remain) - 1)]

    def start(self, taken: dict[int, None], generator: torch.Generator) -> int:
        """A uniform node among those left and not yet taken; the caller knows that there is one."""
        for place in torch.randint(len(self.nodes), (16,), generator=generator).tolist():
            if (node := int(self.nodes[place])) not in taken:
                return node
        free = [node for node in np.asarray(self.nodes).tolist() if node not in taken]
        return int(free[int(torch.randint(len(free), (), generator=generator))])

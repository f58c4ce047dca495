"""Batches of samples that are hard to tell apart, found in the whole data set (ProSampler)."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hardneg import checks
from hardneg.checks import whole
from hardneg.losses.schedules import Adaptive, Schedule, Setting, value
from hardneg.matmul import exact_products
from hardneg.randomness import generator, mix
from hardneg.samplers.graph import ProximityGraph, checked_embeddings
from hardneg.samplers.uniform import UniformBatchSampler, check_size
from hardneg.samplers.walk_graph import Terrain
from hardneg.samplers.walks import KINDS, walk

Embeddings = Tensor | Callable[[], Tensor]


class RefreshedBatchSampler(UniformBatchSampler):
    """A sampler that composes batches from embeddings it is given now and then; uniform until it has seen some."""

    _left: Tensor | None  # (N,) bool: samples that this epoch has not drawn yet, where each may be drawn once

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
        if refresh_every is not None:
            whole("refresh_every", refresh_every)
        self.coverage, self.refresh_every = coverage, refresh_every
        self.refreshes, self.steps = 0, 0  # so far
        super().__init__(size, batch_size, seed, drop_last, rank, processes)

    def refresh(self, embeddings: Tensor) -> None:
        """Compose the batches drawn from now on by these embeddings, (N, d): a row per sample.

        Several processes must pass the same rows to agree on their batches.
        """
        embeddings = checked_embeddings(embeddings)
        if len(embeddings) != self.size:
            raise ValueError(f"embeddings must have {self.size} rows, one per sample, got {len(embeddings)}")
        self._learn(embeddings, mix(self.seed, self.refreshes))
        self.refreshes += 1

    def after_step(self, embeddings: Embeddings) -> bool:
        """Count a step of training; every ``refresh_every`` of them refresh, and say so.

        embeddings: the rows of a memory bank, (N, d), or a function that computes them, called only when needed
        """
        if self.refresh_every is None:
            raise ValueError("refresh_every is None: name the steps between refreshes, or call refresh()")
        self.steps += 1
        due = self.steps % self.refresh_every == 0
        if due:
            self.refresh(embeddings() if callable(embeddings) else embeddings)
        return due

    def state_dict(self, step: int, epoch: int | None = None) -> dict[str, Any]:
        return super().state_dict(step, epoch) | {"refreshes": self.refreshes, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.refreshes, self.steps = state["refreshes"], state["steps"]

    def _rewind(self) -> None:
        super()._rewind()
        self._left = torch.ones(self.size, dtype=torch.bool) if self.coverage == "once" else None

    def _position(self) -> dict[str, Any]:
        return {"left": None if self._left is None else self._left.clone()}

    def _go_to(self, position: Mapping[str, Any]) -> None:
        if self._left is not None and position["left"] is not None:
            self._left = position["left"].clone()

    def _draw(self, step: int, length: int) -> list[int]:
        if self.refreshes == 0:
            batch = super()._draw(step, length)
        else:
            batch = self._compose(length, generator("cpu", self.seed, self.epoch, step))
        if self._left is not None:
            self._left[batch] = False
        return batch

    @abstractmethod
    def _learn(self, embeddings: Tensor, seed: int) -> None:
        """Keep of the embeddings what batches are composed from."""

    @abstractmethod
    def _compose(self, length: int, draws: torch.Generator) -> list[int]:
        """A batch of samples that are left."""


class ProximityBatchSampler(RefreshedBatchSampler):
    """Batches met by a walk on the proximity graph: as hard as you like, between uniform and kNN batches (ProSampler).

    Uniform until the first `refresh`. Each iteration is the next epoch, unless `set_epoch` says which; the batch of a
    step is a function of (seed, epoch, step), the graph and the restart probability.

    Args:
        size: number of samples, N
        batch_size: samples in a batch, B, of all processes together
        candidates: M, random others that each sample is offered; more of them make harder batches
        neighbors: K ≤ M, the nearest of them that it is linked to
        restart: α, probability that a move starts from the first sample again; more of it makes harder batches; a
            number or a schedule, moved by `set_progress`
        walk: "restart", "random" (α = 0), "breadth-first" or "depth-first"
        coverage: "walk": a sample may come several times in an epoch, or not at all; "once": each comes exactly once
            (``drop_last`` leaves out N mod B of them), the walks see what is left
        seed: of all draws
        drop_last: an epoch has ⌊N/B⌋ full batches; else ⌈N/B⌉, the last of which takes N mod B samples
        refresh_every: t, steps of training between the refreshes that `after_step` makes
        rank: which share of each batch is this process's
        processes: how many share it
        weighted: take near neighbours more often: with probability ∝ max(inner product, 0)

    Examples:
        >>> sampler = ProximityBatchSampler(size=100, batch_size=10, candidates=50, neighbors=10)
        >>> sampler.refresh(torch.nn.functional.normalize(torch.randn(100, 8)))
        >>> len(sampler), {len(set(batch)) for batch in sampler}
        (10, {10})
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        candidates: int = 1000,
        neighbors: int = 100,
        restart: Setting = 0.1,
        walk: str = "restart",
        coverage: str = "walk",
        seed: int = 0,
        drop_last: bool = True,
        refresh_every: int | None = None,
        rank: int = 0,
        processes: int = 1,
        weighted: bool = False,
    ) -> None:
        whole("candidates", candidates)
        whole("neighbors", neighbors)
        if neighbors > candidates:
            raise ValueError(f"neighbors={neighbors} must be ≤ candidates={candidates}: lower it, or offer more")
        checks.number("restart", restart, at_least=0, at_most=1)
        checks.choice("walk", walk, KINDS)
        if weighted and walk not in ("restart", "random"):
            raise ValueError(f"weighted=True is for walks of random steps, but walk={walk!r}: drop one of them")
        self.candidates, self.neighbors, self.restart = candidates, neighbors, restart
        self.walk, self.weighted, self.progress = walk, weighted, 0.0
        self.graph: ProximityGraph | None = None
        super().__init__(size, batch_size, coverage, seed, drop_last, refresh_every, rank, processes)

    def set_progress(self, fraction: float) -> None:
        """Move the restart probability to the fraction of training done, in [0, 1]."""
        super().set_progress(fraction)
        checks.number("restart", value(self.restart, fraction), at_least=0, at_most=1)
        self.progress = float(fraction)

    def state_dict(self, step: int, epoch: int | None = None) -> dict[str, Any]:
        graph = self.graph
        return super().state_dict(step, epoch) | {
            "progress": self.progress,
            "adaptive": [schedule.state() for schedule in self._adaptive()],
            "neighbors": None if graph is None else graph.neighbors,
            "weights": None if graph is None else graph.weights,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.progress = state["progress"]
        for schedule, memory in zip(self._adaptive(), state["adaptive"], strict=True):
            schedule.load_state(memory)
        self._walk_on(None if state["neighbors"] is None else ProximityGraph(state["neighbors"], state["weights"]))

    def _learn(self, embeddings: Tensor, seed: int) -> None:
        graph = ProximityGraph.build(embeddings, self.candidates, self.neighbors, seed, weights=self.weighted)
        # In 32 bits before it leaves a GPU: the walks want no more, and the copy is half the time of a refresh.
        self._walk_on(ProximityGraph(graph.neighbors.int(), graph.weights).to("cpu"))

    def _walk_on(self, graph: ProximityGraph | None) -> None:
        self.graph = graph
        self._terrain = None if graph is None else Terrain(graph.neighbors, graph.weights)

    def _compose(self, length: int, draws: torch.Generator) -> list[int]:
        assert self._terrain is not None
        terrain = self._terrain if self._left is None else self._terrain.restricted(self._left)
        return walk(terrain, length, draws, self.walk, value(self.restart, self.progress))

    def _adaptive(self) -> list[Adaptive]:
        leaves = self.restart.leaves() if isinstance(self.restart, Schedule) else []
        return [leaf for leaf in leaves if isinstance(leaf, Adaptive)]


class KNNBatchSampler(RefreshedBatchSampler):
    """A random sample and the B − 1 of largest inner product with it: the hardest batches, with most false negatives.

    Uniform until the first `refresh`. Arguments as of `ProximityBatchSampler`. There is no graph: the neighbours of the
    one sample are found when the batch is drawn, where the embeddings are, so `refresh` costs a copy.

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
        self._rows: Tensor | None = None  # (N, d)
        super().__init__(size, batch_size, coverage, seed, drop_last, refresh_every, rank, processes)

    def state_dict(self, step: int, epoch: int | None = None) -> dict[str, Any]:
        return super().state_dict(step, epoch) | {"rows": self._rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._rows = state["rows"]

    def _learn(self, embeddings: Tensor, seed: int) -> None:
        self._rows = embeddings.clone()

    def _compose(self, length: int, draws: torch.Generator) -> list[int]:
        assert self._rows is not None
        if self._left is None:
            first = int(torch.randint(self.size, (16,), generator=draws)[0])  # where a walk would start
        else:
            nodes = self._left.nonzero()[:, 0]
            first = int(nodes[torch.randint(len(nodes), (), generator=draws)])
        with exact_products(self._rows.device):
            scores = self._rows @ self._rows[first]  # (N,)
            if self._left is not None:
                scores.masked_fill_(~self._left.to(scores.device), -torch.inf)
            scores[first] = torch.inf
            batch: list[int] = scores.topk(length).indices.tolist()
        return batch

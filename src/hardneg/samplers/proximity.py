"""Batches of similar samples, drawn by random walks on a graph of the whole data set (ProSampler)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hardneg import checks, distributed
from hardneg.losses.schedules import Adaptive, Schedule, Setting, value
from hardneg.samplers.graph import ProximityGraph, checked_degrees
from hardneg.samplers.refreshed import RefreshedBatchSampler
from hardneg.samplers.walk_graph import WalkGraph
from hardneg.samplers.walks import KINDS, walk


class ProximityBatchSampler(RefreshedBatchSampler):
    """Batches drawn by walks on a proximity graph, of a hardness between uniform and kNN batches (ProSampler).

    Uniform until the first `refresh`. Each iteration is the next epoch, unless `set_epoch` sets it; the batch of a step
    is a function of (seed, epoch, step), the graph and the restart probability.

    Args:
        size: number of samples, N
        batch_size: samples in a batch, B, of all processes together
        candidates: M, random candidates of each sample; more of them make harder batches
        neighbors: K ≤ M, the candidates of largest inner product, to which the sample is linked
        restart: α, probability that a move starts from the first sample again; larger values make harder batches; a
            number or a schedule, moved by `set_progress`
        walk: "restart", "random" (α = 0), "breadth-first" or "depth-first"
        coverage: "walk": a sample may be drawn several times in an epoch, or not at all; "once": each is drawn exactly
            once (except N mod B of them with ``drop_last``), and walks visit the remaining samples only
        seed: of all draws
        drop_last: an epoch has ⌊N/B⌋ full batches; else ⌈N/B⌉, the last of which has N mod B samples
        refresh_every: t, training steps between the refreshes of `after_step`
        rank: index of this process, which selects its share of each batch
        processes: number of processes that share each batch
        weighted: draw steps with probability ∝ max(inner product, 0) instead of uniformly

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
        self.candidates, self.neighbors = checked_degrees(candidates, neighbors)
        self.restart = checks.number("restart", restart, at_least=0, at_most=1)
        checks.choice("walk", walk, KINDS)
        if weighted and walk not in ("restart", "random"):
            raise ValueError(f"weighted=True needs walk='restart' or 'random', got walk={walk!r}")
        self.walk, self.weighted, self.progress = walk, weighted, 0.0
        self.graph: ProximityGraph | None = None
        super().__init__(size, batch_size, coverage, seed, drop_last, refresh_every, rank, processes)

    def set_progress(self, fraction: float) -> None:
        """Set the fraction of training done, in [0, 1], which a scheduled restart probability depends on."""
        super().set_progress(fraction)
        checks.number("restart", value(self.restart, fraction), at_least=0, at_most=1)
        self.progress = float(fraction)

    def state_dict(self, step: int, epoch: int | None = None) -> dict[str, Any]:
        graph = self.graph
        return super().state_dict(step, epoch) | {
            "progress": self.progress,
            "adaptive": [schedule.state() for schedule in self._adaptive_schedules()],
            "neighbors": None if graph is None else graph.neighbors,
            "weights": None if graph is None else graph.weights,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.progress = state["progress"]
        for schedule, saved in zip(self._adaptive_schedules(), state["adaptive"], strict=True):
            schedule.load_state(saved)
        self._set_graph(None if state["neighbors"] is None else ProximityGraph(state["neighbors"], state["weights"]))

    def _set_embeddings(self, embeddings: Tensor, seed: int) -> None:
        # The processes that share the batches also share the work, if they are those of the process group.
        gather = distributed.world_size() == self.processes > 1 and distributed.supports(embeddings.device)
        graph = ProximityGraph.build(
            embeddings, self.candidates, self.neighbors, seed, weights=self.weighted, gather=gather
        )
        self._set_graph(graph.to("cpu"))

    def _set_graph(self, graph: ProximityGraph | None) -> None:
        self.graph = graph
        self._walk_graph = None if graph is None else WalkGraph(graph.neighbors, graph.weights)

    def _compose(self, length: int, generator: torch.Generator) -> list[int]:
        assert self._walk_graph is not None
        graph = self._walk_graph if self._remaining is None else self._walk_graph.restricted(self._remaining)
        return walk(graph, length, generator, self.walk, value(self.restart, self.progress))

    def _adaptive_schedules(self) -> list[Adaptive]:
        leaves = self.restart.leaves() if isinstance(self.restart, Schedule) else []
        return [leaf for leaf in leaves if isinstance(leaf, Adaptive)]

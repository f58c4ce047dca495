"""Samplers in DataLoaders over numbers, so that a batch shows its samples; run in several processes by the tests."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hardneg.samplers import KNNBatchSampler, ProximityBatchSampler, ProximityGraph, UniformBatchSampler, graph

KINDS = ("uniform", "walk", "once", "knn")
SIZE, BATCH = 90, 10


class Numbers(Dataset[int]):
    """Sample i is the number i."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


def embeddings(seed: int = 0) -> Tensor:
    return torch.randn(SIZE, 4, generator=torch.Generator().manual_seed(seed))


def build(kind: str, rank: int = 0, processes: int = 1) -> UniformBatchSampler:
    if kind == "uniform":
        return UniformBatchSampler(SIZE, BATCH, rank=rank, processes=processes)
    if kind == "knn":
        return KNNBatchSampler(SIZE, BATCH, rank=rank, processes=processes)
    return ProximityBatchSampler(
        SIZE, BATCH, candidates=30, neighbors=6, coverage=kind, rank=rank, processes=processes, drop_last=True
    )


def loader(sampler: UniformBatchSampler, workers: int, persistent: bool) -> DataLoader[int]:
    return DataLoader(
        Numbers(),
        batch_sampler=sampler,
        num_workers=workers,
        persistent_workers=persistent,
        multiprocessing_context="fork" if workers else None,
    )


def used(batches: DataLoader[int], sampler: UniformBatchSampler, epochs: int) -> list[list[int]]:
    """The batches of several epochs, with a refresh after each."""
    seen = []
    for epoch in range(epochs):
        seen += [batch.tolist() for batch in batches]
        sampler.refresh(embeddings(epoch))
    return seen


def work(rank: int, folder: str) -> None:
    """One of two processes: store the batches of three epochs, with a refresh after each."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # the batches must not depend on the global generator
    found = {}
    for kind in KINDS:
        sampler = build(kind, rank, 2)
        found[kind] = torch.tensor(used(loader(sampler, 0, False), sampler, 3))
    torch.save(found, Path(folder) / f"{rank}.pt")


GRAPHS: dict[str, dict[str, Any]] = {
    "one tile": {"candidates": 20, "neighbors": 6},
    "shared": {"candidates": 20, "neighbors": 6, "memory": 40_000},
    "shared, weights": {"candidates": 20, "neighbors": 6, "weights": True, "memory": 40_000},
    "independent, weights": {"candidates": 20, "neighbors": 6, "weights": True, "mode": "independent"},
    "all, weights": {"candidates": 699, "neighbors": 6, "weights": True, "memory": 400_000},
}


def build_graph(name: str, dtype: torch.dtype, gather: bool) -> ProximityGraph:
    rows = torch.randn(700, 4, generator=torch.Generator().manual_seed(3), dtype=dtype)
    rows[:20] *= torch.tensor([0.0, -0.0, 0.0, -0.0])  # inner products of both zeros
    return ProximityGraph.build(rows, **GRAPHS[name], gather=gather)


def gather_graphs(rank: int, processes: int, folder: str) -> None:
    """One process of a process group: store graphs, the number of rows it computed, and the batches of a sampler."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=processes)
    rows: list[int] = []
    largest = graph._largest

    def counted(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        rows.append(scores.shape[0] * scores.shape[1])
        return largest(scores, count)

    graph._largest = counted
    found: dict[str, Any] = {}
    for name in GRAPHS:
        for dtype in (torch.float32, torch.float64):
            rows.clear()
            built = build_graph(name, dtype, gather=True)
            found[f"{name} {dtype}"] = {"neighbors": built.neighbors, "weights": built.weights, "rows": sum(rows)}
    sampler = build("walk", rank, processes)
    rows.clear()
    found["batches"] = used(loader(sampler, 0, False), sampler, 2)
    found["rows of the sampler"] = sum(rows)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()

"""Samplers in DataLoaders over numbers, so that a batch shows its samples; run in several processes by the tests."""

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hardneg.samplers import KNNBatchSampler, ProximityBatchSampler, UniformBatchSampler

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

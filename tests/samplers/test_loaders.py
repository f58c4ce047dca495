"""Samplers in a DataLoader and in several processes give the batches of a single process."""

from pathlib import Path

import children
import pytest
import torch
from samplers.sharing import (
    GRAPHS,
    KINDS,
    SIZE,
    build,
    build_graph,
    embeddings,
    gather_graphs,
    loader,
    used,
    work,
)
from torch.utils.data import DataLoader

from hardneg.samplers import UniformBatchSampler


@pytest.mark.parametrize(("kind", "persistent"), [("uniform", True), ("walk", True), ("once", False), ("knn", False)])
def test_a_loader_with_workers_gives_the_batches_of_one_without(kind: str, persistent: bool) -> None:
    alone, with_workers = build(kind), build(kind)
    expected = used(loader(alone, 0, False), alone, 3)
    assert used(loader(with_workers, 2, persistent), with_workers, 3) == expected
    again = build(kind)
    plain = []
    for epoch in range(3):
        plain += list(again)
        again.refresh(embeddings(epoch))
    assert plain == expected


def run(
    batches: DataLoader[int], sampler: UniformBatchSampler, begin: int, end: int, save: Path | None
) -> list[list[int]]:
    """Train from step to step with a refresh every 4 steps, when workers have already drawn some batches."""
    seen: list[list[int]] = []
    step = begin
    while step < end:
        sampler.set_epoch(step // len(sampler))
        for batch in batches:
            seen.append(batch.tolist())
            step += 1
            if step % 4 == 0:
                sampler.refresh(embeddings(step))
            if step == end:
                if save is not None:
                    torch.save(sampler.state_dict((step - 1) % len(sampler) + 1), save)
                return seen
    return seen


@pytest.mark.parametrize(("kind", "stop"), [("walk", 5), ("walk", 9), ("once", 13), ("knn", 6)])
def test_resuming_with_workers_that_drew_ahead_gives_the_batches_of_the_whole_run(
    tmp_path: Path, kind: str, stop: int
) -> None:
    whole = build(kind)
    expected = run(loader(whole, 2, False), whole, 0, 20, None)
    cut = build(kind)
    begun = run(loader(cut, 2, False), cut, 0, stop, tmp_path / "state.pt")
    resumed = build(kind)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert begun + run(loader(resumed, 2, False), resumed, stop, 20, None) == expected


def test_the_shares_of_two_processes_are_the_batches_of_one(tmp_path: Path) -> None:
    children.spawn(work, (str(tmp_path),), 2)
    shares = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for kind in KINDS:
        sampler = build(kind)
        whole = used(loader(sampler, 0, False), sampler, 3)
        assert torch.cat([share[kind] for share in shares], dim=1).tolist() == whole


def test_processes_that_gather_rows_have_the_graph_of_one_bit_for_bit(tmp_path: Path) -> None:
    children.spawn(gather_graphs, (2, str(tmp_path)), 2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for name in GRAPHS:
        for dtype in (torch.float32, torch.float64):
            expected = build_graph(name, dtype, gather=False)
            for rank in ranks:
                found = rank[f"{name} {dtype}"]
                assert torch.equal(found["neighbors"], expected.neighbors), name
                assert (found["weights"] is None) == (expected.weights is None)
                if expected.weights is not None:
                    assert torch.equal(found["weights"].view(torch.uint8), expected.weights.view(torch.uint8)), name
            computed = [rank[f"{name} {dtype}"]["rows"] for rank in ranks]
            assert sum(computed) == 700, name
            assert min(computed) > 0 or name == "one tile", name
    sampler = build("walk")
    whole = used(loader(sampler, 0, False), sampler, 2)
    assert torch.cat([torch.tensor(rank["batches"]) for rank in ranks], dim=1).tolist() == whole
    assert sum(rank["rows of the sampler"] for rank in ranks) == 2 * SIZE

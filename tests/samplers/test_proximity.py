"""Batch samplers: limiting cases of the proximity sampler, coverage, and exact resuming from any step."""

import copy
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.datasets import load_digits
from torch import Tensor

import hardneg as hn
from hardneg.randomness import generator
from hardneg.samplers import (
    KNNBatchSampler,
    ProximityBatchSampler,
    ProximityGraph,
    UniformBatchSampler,
    false_negative_share,
    mean_cosine,
)


def vectors(size: int, dim: int = 5, seed: int = 0) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(size, dim, generator=torch.Generator().manual_seed(seed)))


def proximity(size: int = 60, batch_size: int = 8, refreshed: bool = True, **options: Any) -> ProximityBatchSampler:
    sampler = ProximityBatchSampler(size, batch_size, **({"candidates": 20, "neighbors": 5} | options))
    if refreshed:
        sampler.refresh(vectors(size))
    return sampler


def epochs(sampler: UniformBatchSampler, number: int) -> list[list[list[int]]]:
    return [list(sampler) for _ in range(number)]


# The limits of the method


def test_restart_probability_one_on_the_exact_graph_gives_the_nearest_neighbor_batch() -> None:
    size, batch_size = 100, 12
    embeddings = vectors(size)
    walked = ProximityBatchSampler(size, batch_size, candidates=size - 1, neighbors=batch_size - 1, restart=1.0, seed=3)
    nearest = KNNBatchSampler(size, batch_size, seed=3)
    for sampler in (walked, nearest):
        sampler.refresh(embeddings)
    cosines = embeddings @ embeddings.T
    for one, other in zip(walked, nearest, strict=True):
        assert one[0] == other[0]
        assert set(one) == set(other) == set(cosines[one[0]].topk(batch_size).indices.tolist())


def test_one_candidate_and_no_restart_is_uniform_when_every_batch_has_a_new_graph() -> None:
    size, length = 7, 3
    sampler = ProximityBatchSampler(size, length, candidates=1, neighbors=1, restart=0.0)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(5000):
        sampler.refresh(vectors(size))
        counts[tuple(next(iter(sampler)))] += 1
    assert len(counts) == math.perm(size, length)
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4


def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.nn.functional.normalize(torch.tensor(images)), torch.tensor(labels)


def hardness(sampler: UniformBatchSampler, embeddings: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean cosine of the pairs of an epoch's batches, and the share of false negatives."""
    sampler.refresh(embeddings)
    batches = torch.tensor([batch for _ in range(5) for batch in sampler])
    cosines = [mean_cosine(embeddings[batch]) for batch in batches]
    return sum(cosines) / len(cosines), false_negative_share(labels[batches])


def test_hardness_and_false_negatives_rise_with_candidates_and_with_restarts() -> None:
    embeddings, labels = digits()
    size, batch_size = len(embeddings), 64

    def measured(candidates: int, restart: float) -> tuple[float, float]:
        sampler = ProximityBatchSampler(size, batch_size, candidates=candidates, neighbors=20, restart=restart)
        return hardness(sampler, embeddings, labels)

    uniform = hardness(UniformBatchSampler(size, batch_size), embeddings, labels)
    nearest = hardness(KNNBatchSampler(size, batch_size), embeddings, labels)
    by_candidates = [uniform, *(measured(m, 0.2) for m in (40, 150, 600, 1796))]
    by_restart = [uniform, *(measured(600, alpha) for alpha in (0.0, 0.2, 0.5, 0.9))]
    for row in (by_candidates, by_restart):
        for softer, harder in itertools.pairwise(row):
            assert softer[0] < harder[0], row
            assert softer[1] < harder[1], row
        assert nearest[0] > row[-1][0], "nearest-neighbor batches are the hardest"


# Epochs, lengths, shares


@pytest.mark.parametrize("coverage", ["walk", "once"])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("refreshed", [True, False])
def test_an_epoch_has_exactly_its_length(coverage: str, drop_last: bool, refreshed: bool) -> None:
    sampler = proximity(61, 8, refreshed, coverage=coverage, drop_last=drop_last)
    batches = list(sampler)
    assert len(batches) == len(sampler) == (7 if drop_last else 8)
    assert [len(batch) for batch in batches] == [8] * 7 + [5] * (not drop_last)
    assert all(len(set(batch)) == len(batch) for batch in batches)


@pytest.mark.parametrize("walk", ["restart", "random", "breadth-first", "depth-first", "knn"])
@pytest.mark.parametrize("drop_last", [True, False])
def test_once_visits_every_sample_exactly_once(walk: str, drop_last: bool) -> None:
    if walk == "knn":
        sampler: UniformBatchSampler = KNNBatchSampler(61, 8, coverage="once", drop_last=drop_last)
        sampler.refresh(vectors(61))
    else:
        sampler = proximity(61, 8, coverage="once", walk=walk, drop_last=drop_last)
    for batches in epochs(sampler, 3):
        seen = [index for batch in batches for index in batch]
        assert len(seen) == len(set(seen)) == (56 if drop_last else 61)


def test_once_visits_every_sample_once_if_the_first_refresh_is_within_an_epoch() -> None:
    sampler = proximity(60, 10, refreshed=False, coverage="once")
    batches = iter(sampler)
    seen = [*next(batches), *next(batches)]
    sampler.refresh(vectors(60))
    assert sorted(seen + [index for batch in batches for index in batch]) == list(range(60))


def test_batches_are_uniform_until_the_first_refresh() -> None:
    sampler = proximity(60, 8, refreshed=False)
    uniform = UniformBatchSampler(60, 8)
    assert epochs(sampler, 2) == epochs(uniform, 2)
    assert list(sampler) == list(uniform)
    sampler.refresh(vectors(60))
    assert list(sampler) != list(uniform)


def test_uniform_batches_are_cut_from_one_permutation_an_epoch() -> None:
    for epoch, batches in enumerate(epochs(UniformBatchSampler(50, 8, 4, rank=1, processes=2), 3)):
        order = torch.randperm(50, generator=generator("cpu", 4, epoch)).tolist()
        assert batches == [order[start + 4 : start + 8] for start in range(0, 48, 8)]


def test_iterations_are_epochs_and_set_epoch_sets_the_epoch() -> None:
    sampler = proximity()
    first, second, third = epochs(sampler, 3)
    assert first != second != third
    for epoch, batches in ((2, third), (0, first), (1, second)):
        sampler.set_epoch(epoch)
        sampler.set_epoch(epoch)
        assert list(sampler) == batches
        assert sampler.epoch == epoch
    assert list(sampler) == third
    next(iter(sampler))  # an interrupted epoch counts
    assert sampler.epoch == 3
    iter(sampler)  # an epoch of which no batch was drawn does not
    assert list(proximity(seed=1)) != first


@pytest.mark.parametrize("processes", [2, 3, 4])
@pytest.mark.parametrize("drop_last", [True, False])
def test_the_shares_of_all_processes_are_the_batch(processes: int, drop_last: bool) -> None:
    whole = proximity(59, 12, drop_last=drop_last)
    shares = [proximity(59, 12, drop_last=drop_last, rank=rank, processes=processes) for rank in range(processes)]
    for batch, *parts in zip(whole, *shares, strict=True):
        assert list(itertools.chain(*parts)) == batch
        assert max(map(len, parts)) - min(map(len, parts)) <= (len(batch) < 12)


def test_a_scheduled_restart_moves_with_progress() -> None:
    moving = proximity(restart=hn.Linear(1.0, 0.0))
    for fraction, fixed in ((0.0, 1.0), (1.0, 0.0), (0.5, 0.5)):
        moving.set_progress(fraction)
        moving.set_epoch(0)
        assert list(moving) == list(proximity(restart=fixed))


def test_after_step_refreshes_every_few_steps_and_only_then_computes() -> None:
    sampler = proximity(refreshed=False, refresh_every=3)
    computed: list[int] = []

    def embeddings() -> Tensor:
        computed.append(sampler.steps)
        return vectors(60)

    assert [sampler.after_step(embeddings) for _ in range(7)] == [False, False, True] * 2 + [False]
    assert computed == [3, 6]
    assert [sampler.after_step(vectors(60)) for _ in range(2)] == [False, True]
    assert sampler.refreshes == 3


def test_every_refresh_draws_new_candidates() -> None:
    sampler = proximity()
    assert sampler.graph is not None
    before = sampler.graph.neighbors
    sampler.refresh(vectors(60))
    assert before.tolist() != sampler.graph.neighbors.tolist()


def test_weighted_walks_give_more_similar_batches() -> None:
    embeddings, _ = digits()
    embeddings = embeddings - embeddings.mean(dim=0)  # weights near 0 and below
    cosines = []
    for weighted in (False, True):
        sampler = ProximityBatchSampler(len(embeddings), 64, candidates=300, neighbors=300, weighted=weighted)
        sampler.refresh(embeddings)
        cosines.append(sum(mean_cosine(embeddings[batch]) for batch in sampler))
    assert cosines[0] < cosines[1]


# Resuming

KINDS: dict[str, Any] = {
    "uniform": lambda: UniformBatchSampler(60, 8, drop_last=False),
    "walk": lambda: proximity(refreshed=False, drop_last=False, restart=hn.Linear(0.9, 0.1)),
    "once": lambda: proximity(refreshed=False, drop_last=False, coverage="once"),
    "weighted": lambda: proximity(refreshed=False, weighted=True, coverage="once"),
    "knn": lambda: KNNBatchSampler(60, 8),
    "knn once": lambda: KNNBatchSampler(60, 8, coverage="once"),
}


def train(
    sampler: UniformBatchSampler, ahead: int, refresh_at: set[int], start: int, stop: int, state: Path | None = None
) -> list[list[int]]:
    """Use batches ``start`` to ``stop``, drawn ``ahead`` of their use as by a DataLoader; save the state at the end."""
    used: list[list[int]] = []
    step = start
    while step < stop:
        epoch = step // len(sampler)
        sampler.set_epoch(epoch)
        drawing, ready = iter(sampler), []
        for _ in range(ahead):
            ready += [batch for batch in [next(drawing, None)] if batch is not None]
        while True:
            ready += [batch for batch in [next(drawing, None)] if batch is not None]
            if not ready:
                break
            used.append(ready.pop(0))
            step += 1
            sampler.set_progress(step / 30)
            if step in refresh_at:
                sampler.refresh(vectors(60, seed=step))
            if step == stop:
                if state is not None:
                    torch.save(sampler.state_dict(step - epoch * len(sampler)), state)
                return used
    return used


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ahead", [0, 1, 4, 100])
@pytest.mark.parametrize("stop", [1, 5, 7, 8, 10, 12, 14, 16, 19])
def test_resuming_anywhere_gives_the_batches_of_the_whole_run(tmp_path: Path, kind: str, ahead: int, stop: int) -> None:
    refresh_at = {3, 9, 10, 14, 15}
    whole = train(KINDS[kind](), ahead, refresh_at, 0, 22)
    first = train(KINDS[kind](), ahead, refresh_at, 0, stop, tmp_path / "state.pt")
    resumed = KINDS[kind]()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert first + train(resumed, ahead, refresh_at, stop, 22) == whole


def chained(
    sampler: UniformBatchSampler, ahead: int, start: int, stop: int, state: Path | None = None
) -> list[list[int]]:
    """As `train`, with one loader for all epochs, which also draws batches of the next epoch ahead."""

    def all_epochs() -> Iterator[list[int]]:
        for epoch in range(start // len(sampler), 4):
            sampler.set_epoch(epoch)
            yield from sampler

    drawing, ready, used = all_epochs(), [], []
    for step in range(start, stop):
        while len(ready) <= ahead and (batch := next(drawing, None)) is not None:
            ready.append(batch)
        used.append(ready.pop(0))
        if (step + 1) % 5 == 0:
            sampler.refresh(vectors(60, seed=step))
    if state is not None:
        torch.save(sampler.state_dict(stop % len(sampler), stop // len(sampler)), state)
    return used


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [3, 5, 6, 7, 8, 12, 13])
def test_resuming_is_exact_when_batches_of_the_next_epoch_have_been_drawn(tmp_path: Path, kind: str, stop: int) -> None:
    ahead = 4
    whole = chained(KINDS[kind](), ahead, 0, 20)
    first = chained(KINDS[kind](), ahead, 0, stop, tmp_path / "state.pt")
    resumed = KINDS[kind]()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    again = KINDS[kind]()
    state = resumed.state_dict(stop % len(resumed), stop // len(resumed))
    again.load_state_dict(state)  # a run that is interrupted again before it has used a batch
    assert first + chained(again, ahead, stop, 20) == whole


def test_a_state_can_be_saved_before_the_first_batch_and_again() -> None:
    sampler = proximity(coverage="once")
    batches = list(proximity(coverage="once"))
    other = proximity(coverage="once")
    other.load_state_dict(sampler.state_dict(0))
    third = proximity(coverage="once")
    third.load_state_dict(other.state_dict(0))
    assert list(third) == batches
    drawing = iter(sampler)
    for _ in range(4):
        next(drawing)
    other.load_state_dict(sampler.state_dict(2))
    third.load_state_dict(other.state_dict(3))  # two were pending, one of them has been used
    assert list(third) == batches[3:]
    assert list(drawing) == batches[4:], "saving a state changed the batches"


def test_an_adaptive_restart_is_part_of_the_state() -> None:
    sampler, other = (proximity(restart=hn.Adaptive(0.5, step=0.1)) for _ in range(2))
    for reading in (0.1, 0.2, 0.3):
        sampler.restart.update(reading)  # type: ignore[union-attr]
    other.load_state_dict(sampler.state_dict(0))
    assert list(other) == list(sampler)


def test_a_state_can_be_loaded_with_another_number_of_processes() -> None:
    sampler = proximity(batch_size=12)
    batches = list(proximity(batch_size=12))
    next(iter(sampler))
    half = proximity(batch_size=12, rank=1, processes=2)
    half.load_state_dict(sampler.state_dict(0))
    assert list(half) == [batch[6:] for batch in batches]


@pytest.mark.parametrize("kind", ["walk", "knn"])
def test_numpy_embeddings_and_settings_give_the_batches_of_tensors_and_numbers(kind: str) -> None:
    if kind == "walk":
        expected, sampler = proximity(), proximity(*torch.tensor([60, 8]), refreshed=False, restart=np.float32(0.1))
    else:
        expected, sampler = KNNBatchSampler(60, 8), KNNBatchSampler(np.int64(60), np.int64(8))
        expected.refresh(vectors(60))
    sampler.refresh(vectors(60).numpy())
    assert list(sampler) == list(expected)
    assert type(sampler.state_dict(0)["size"]) is int


def test_samplers_can_be_copied() -> None:
    sampler = proximity(weighted=True)
    next(iter(sampler))
    other = copy.deepcopy(sampler)
    assert list(other) == list(sampler)


# Degenerate and wrong input


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_small_and_degenerate_sets_give_full_epochs(data: st.DataObject) -> None:
    size, batch_size = data.draw(st.integers(2, 15)), data.draw(st.integers(1, 20))
    candidates = data.draw(st.integers(1, 20))
    sampler = ProximityBatchSampler(
        size,
        batch_size,
        candidates,
        neighbors=data.draw(st.integers(1, candidates)),
        restart=data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        walk=data.draw(st.sampled_from(["restart", "random", "breadth-first", "depth-first"])),
        coverage=data.draw(st.sampled_from(["walk", "once"])),
        drop_last=False,
    )
    entries = st.lists(st.sampled_from([0.0, 1.0, -1.0]), min_size=2, max_size=2)  # many duplicates, zero vectors
    for _ in range(2):
        sampler.refresh(torch.tensor(data.draw(st.lists(entries, min_size=size, max_size=size))))
        batches = list(sampler)
        assert sum(map(len, batches)) == size
        assert all(len(set(batch)) == len(batch) for batch in batches)
    assert sampler.graph is not None
    assert isinstance(sampler.graph, ProximityGraph)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 61}, "batch_size=61 is more than the 60 samples: lower it, or pass drop_last=False"),
        ({"batch_size": 0}, "batch_size must be a whole number"),
        ({"size": 1, "batch_size": 1}, "size must be a whole number ≥ 2"),
        ({"size": [0.5] * 60}, r"size must be the number of samples, got a list: pass len\(data\)"),
        ({"neighbors": 21}, "neighbors=21 must be ≤ candidates=20"),
        ({"restart": 1.5}, "restart must be ≥ 0 and ≤ 1"),
        ({"restart": hn.Linear(0.2, -0.1)}, "restart must be"),
        ({"walk": "restarts"}, "did you mean 'restart'"),
        ({"coverage": "ones"}, "did you mean 'once'"),
        ({"refresh_every": 0}, "refresh_every must be"),
        ({"processes": 3}, "batch_size must be a multiple of the 3 processes, got 8"),
        ({"rank": 2, "processes": 2}, "rank=2 must be below processes=2"),
        ({"size": 57, "drop_last": False, "processes": 2}, "1 samples for 2 processes: pass drop_last=True"),
        ({"weighted": True, "walk": "depth-first"}, "walk='depth-first'"),
    ],
)
def test_bad_settings_raise_an_error_that_names_the_fix(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        proximity(**(change | {"refreshed": False}))


def test_bad_embeddings_leave_the_sampler_unchanged() -> None:
    sampler = proximity()
    for embeddings, message in (
        (vectors(59), "60 rows, one per sample, got 59"),
        (vectors(60).masked_fill(torch.eye(60, 5, dtype=torch.bool), torch.nan), "NaN or inf"),
    ):
        with pytest.raises(ValueError, match=message):
            sampler.refresh(embeddings)
    assert sampler.refreshes == 1
    assert list(sampler) == list(proximity())


def test_misuse_of_steps_and_states_raises_an_error_that_names_the_fix() -> None:
    sampler = proximity()
    with pytest.raises(ValueError, match="refresh_every is None"):
        sampler.after_step(vectors(60))
    with pytest.raises(ValueError, match="step=1, but batches 0 to 0 of epoch 0 were drawn"):
        sampler.state_dict(1)
    with pytest.raises(ValueError, match=r"fraction must be in \[0, 1\]"):
        sampler.set_progress(1.1)
    with pytest.raises(ValueError, match="saved with batch_size=8, this sampler has 10"):
        proximity(batch_size=10).load_state_dict(sampler.state_dict(0))

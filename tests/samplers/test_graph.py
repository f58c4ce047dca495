"""Candidates are uniform, a row keeps the nearest, and the graph does not depend on the tiling."""

import math
import sys
from pathlib import Path

import children
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from hardneg.samplers.graph import ProximityGraph
from hardneg.samplers.random_candidates import balanced_lists, independent_lists

MODES = ("shared", "independent")


def vectors(size: int, dim: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(size, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_well_formed(graph: ProximityGraph, size: int, neighbors: int) -> None:
    assert graph.neighbors.shape == (size, neighbors)
    for row, linked in enumerate(graph.neighbors.tolist()):
        assert len(set(linked)) == neighbors, "a repeat"
        assert row not in linked, "a link to itself"
        assert min(linked) >= 0 and max(linked) < size  # noqa: PT018


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("extra", [0, 1, 1000])
def test_all_candidates_give_the_exact_nearest_neighbors(mode: str, extra: int) -> None:
    embeddings = torch.nn.functional.normalize(vectors(150))
    graph = ProximityGraph.build(embeddings, candidates=149 + extra, neighbors=9, mode=mode)
    peer = NearestNeighbors(n_neighbors=10, metric="cosine", algorithm="brute").fit(embeddings.numpy())
    _, expected = peer.kneighbors(embeddings.numpy())
    assert graph.neighbors.tolist() == expected[:, 1:].tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("candidates", [1, 2, 3, 10, 40, 90, 97, 98, 99])
def test_a_row_is_linked_neither_to_itself_nor_twice_to_a_node(mode: str, candidates: int) -> None:
    # As many neighbors as candidates, so that the graph shows every candidate.
    graph = ProximityGraph.build(vectors(100), candidates, candidates, mode=mode)
    assert_well_formed(graph, 100, candidates)


@pytest.mark.parametrize("mode", MODES)
def test_a_row_keeps_its_nearest_candidates_in_descending_order(mode: str) -> None:
    embeddings = vectors(200)
    full = ProximityGraph.build(embeddings, 30, 30, seed=4, mode=mode, weights=True)
    kept = ProximityGraph.build(embeddings, 30, 7, seed=4, mode=mode)
    assert kept.neighbors.tolist() == full.neighbors[:, :7].tolist()
    expected = (embeddings[:, None] * embeddings[full.neighbors.long()]).sum(dim=2)
    assert full.weights is not None
    torch.testing.assert_close(full.weights, expected)
    assert bool((expected.diff(dim=1) <= 1e-12).all())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("candidates", [1, 5, 9])
def test_every_other_node_is_equally_likely_a_candidate(mode: str, candidates: int) -> None:
    size, graphs = 12, 1500
    counts = np.zeros((size, size))
    for seed in range(graphs):
        linked = ProximityGraph.build(vectors(size), candidates, candidates, seed=seed, mode=mode).neighbors.numpy()
        np.add.at(counts, (np.arange(size)[:, None], linked), 1)
    assert np.diag(counts).sum() == 0
    # Counts of a row sum to graphs · M and vary less than independent ones, by the factor of draws without replacement.
    expected = graphs * candidates / (size - 1)
    spread = expected * (1 - candidates / (size - 1)) * (size - 1) / (size - 2)
    statistic = sum(((row[np.arange(size) != i] - expected) ** 2).sum() / spread for i, row in enumerate(counts))
    assert stats.chi2.sf(statistic, size * (size - 2)) > 1e-4


def test_pairs_of_candidates_are_uniform() -> None:
    size = 6
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(3000):
        pair = ProximityGraph.build(vectors(size), 2, 2, seed=seed).neighbors[0].sort().values
        counts[tuple(pair.tolist())] = counts.get(tuple(pair.tolist()), 0) + 1
    assert len(counts) == math.comb(5, 2)
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.data())
def test_balanced_lists_hold_no_repeats_and_every_node_equally_often(size: int, data: st.DataObject) -> None:
    width = data.draw(st.integers(1, size))
    counts = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    lists = torch.cat(list(balanced_lists(size, width, counts, torch.Generator().manual_seed(1))))
    assert lists.shape == (sum(counts), width)
    assert all(len(set(nodes)) == width for nodes in lists.tolist())
    occurrences = lists.flatten().bincount(minlength=size)
    assert int(occurrences.max() - occurrences.min()) <= 1
    at_once = next(balanced_lists(size, width, [sum(counts)], torch.Generator().manual_seed(1)))
    assert lists.tolist() == at_once.tolist(), "the lists depend on how many are drawn at a time"


def test_a_list_that_spans_two_permutations_is_uniform_in_order() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(6000):
        second = tuple(next(balanced_lists(5, 3, [2], torch.Generator().manual_seed(seed)))[1].tolist())
        counts[second] = counts.get(second, 0) + 1
    assert len(counts) == math.perm(5, 3)
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 80), st.data())
def test_independent_lists_hold_distinct_other_nodes(size: int, data: st.DataObject) -> None:
    width = data.draw(st.integers(1, size - 1))
    rows = torch.arange(size)
    drawn = independent_lists(size, width, rows, torch.Generator().manual_seed(0))
    assert drawn.shape == (size, width)
    for row, others in enumerate(drawn.tolist()):
        assert len(set(others)) == width
        assert set(others) <= set(range(size)) - {row}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("candidates", [3, 40, 299])
def test_the_memory_budget_does_not_change_the_graph(mode: str, candidates: int) -> None:
    embeddings = vectors(300)
    graphs = [
        ProximityGraph.build(embeddings, candidates, 3, mode=mode, memory=memory)
        for memory in (40_000, 200_000, 1 << 28)
    ]
    assert graphs[0].neighbors.tolist() == graphs[1].neighbors.tolist() == graphs[2].neighbors.tolist()


def test_graphs_of_equal_seeds_are_equal_and_of_others_are_not() -> None:
    one, same, other = (ProximityGraph.build(vectors(50), 10, 3, seed=seed).neighbors.tolist() for seed in (1, 1, 2))
    assert one == same != other


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 12), st.integers(1, 14), st.data(), st.sampled_from(MODES))
def test_degenerate_embeddings_give_a_valid_graph(size: int, candidates: int, data: st.DataObject, mode: str) -> None:
    neighbors = data.draw(st.integers(1, candidates))
    entries = st.sampled_from([0.0, 1.0, -1.0, 1e-30, 1e15])
    embeddings = torch.tensor(
        data.draw(st.lists(st.lists(entries, min_size=2, max_size=2), min_size=size, max_size=size))
    )
    graph = ProximityGraph.build(embeddings, candidates, neighbors, mode=mode)
    assert_well_formed(graph, size, min(neighbors, size - 1))


def test_half_precision_is_computed_in_float32() -> None:
    embeddings = vectors(60).half()
    graph, expected = (ProximityGraph.build(given, 59, 5) for given in (embeddings, embeddings.float()))
    assert graph.neighbors.tolist() == expected.neighbors.tolist()


@pytest.mark.parametrize("weights", [False, True])
def test_a_graph_is_the_same_after_saving_and_loading(tmp_path: Path, weights: bool) -> None:
    graph = ProximityGraph.build(vectors(40), 10, 4, weights=weights)
    graph.save(tmp_path / "graph.safetensors")
    loaded = ProximityGraph.load(tmp_path / "graph.safetensors")
    assert loaded.neighbors.tolist() == graph.neighbors.tolist()
    assert loaded.neighbors.dtype == graph.neighbors.dtype
    assert (loaded.weights is None) == (not weights)
    if loaded.weights is not None and graph.weights is not None:
        torch.testing.assert_close(loaded.weights, graph.weights, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"neighbors": 11}, "neighbors=11 must be ≤ candidates=10"),
        ({"candidates": 0}, "candidates must be a whole number ≥ 1, got 0"),
        ({"neighbors": 2.5}, "neighbors must be a whole number ≥ 1, got 2.5"),
        ({"mode": "share"}, "did you mean 'shared'"),
        ({"memory": 100}, "memory=100 is too little for one row: give at least"),
        ({"embeddings": torch.ones(1, 4)}, r"N ≥ 2 and d ≥ 1, got \(1, 4\)"),
        ({"embeddings": torch.ones(20)}, r"shape \(N, d\)"),
        ({"embeddings": torch.ones(20, 4, dtype=torch.int64)}, "floating dtype"),
        ({"embeddings": torch.full((20, 4), torch.nan)}, "NaN or inf"),
        ({"embeddings": torch.full((20, 4), -torch.inf)}, "NaN or inf"),
        ({"embeddings": torch.full((20, 4), 1e30)}, "overflow: scale them to unit length"),
        ({"embeddings": [[1.0]]}, r"N ≥ 2 and d ≥ 1, got \(1, 1\)"),
        ({"embeddings": "rows"}, "embeddings must be a tensor, a numpy array or a list of numbers, got str"),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_bad_arguments_raise_an_error_that_names_the_fix(mode: str, change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"embeddings": vectors(20), "candidates": 10, "neighbors": 5, "mode": mode}
    with pytest.raises(ValueError, match=message):
        ProximityGraph.build(**(arguments | change))  # type: ignore[arg-type]


def test_loading_a_file_without_a_graph_raises(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"something": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="holds no proximity graph, but something"):
        ProximityGraph.load(tmp_path / "other.safetensors")


def test_peak_memory_of_the_process_stays_within_the_budget() -> None:
    # All scores together would take 256 MB. A new process, because the peak of this one includes earlier tests.
    code = """
import resource, torch
from hardneg.samplers import ProximityGraph
torch.set_num_threads(1)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
embeddings = torch.randn(8000, 64)
ProximityGraph.build(embeddings[:500], 100, 50)  # memory that libraries allocate at first use
before = peak()
for candidates in (7999, 4000, 100):
    ProximityGraph.build(embeddings, candidates, 50, memory=64 << 20)  # several tiles, so that two at a time show
print(peak() - before)
"""
    output = children.run([sys.executable, "-c", code], check=True).stdout
    assert int(output) < 64 + 8 + 16  # MB: the budget, three graphs and a few numbers per sample, and the allocator


def test_numpy_arrays_give_the_graph_of_the_tensor() -> None:
    embeddings = vectors(40)
    expected = ProximityGraph.build(embeddings, 10, 4, weights=True)
    found = ProximityGraph.build(embeddings.numpy(), np.int64(10), torch.tensor(4), weights=True)  # type: ignore[arg-type]
    assert found.neighbors.tolist() == expected.neighbors.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("candidates", [50, 999])
@pytest.mark.parametrize("mode", MODES)
def test_a_gpu_builds_the_same_graph(candidates: int, mode: str) -> None:
    embeddings = vectors(1000)
    one, other = (ProximityGraph.build(embeddings, candidates, 20, mode=mode, device=d) for d in ("cpu", "cuda"))
    assert one.neighbors.tolist() == other.neighbors.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("candidates", [100, 19_999])
@pytest.mark.parametrize("memory", [1 << 25, 1 << 28])
def test_gpu_temporaries_stay_within_the_budget(candidates: int, memory: int) -> None:
    embeddings = torch.randn(20_000, 64, device="cuda")
    ProximityGraph.build(embeddings[:500], 100, 50)  # memory that libraries allocate at first use
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]  # a reused block can be larger than requested
    graph = ProximityGraph.build(embeddings, candidates, 50, memory=memory)
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    a_few_numbers = 20_000 * 8 * 8
    assert peak - before - graph.neighbors.nbytes < memory + a_few_numbers

"""Walks have the distribution of a plain Python walk, and always end."""

import random
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from hardneg.randomness import generator
from hardneg.samplers import walks
from hardneg.samplers.walk_graph import WalkGraph
from hardneg.samplers.walks import KINDS, uniform_moves, walk


def random_graph(size: int, degree: int, seed: int = 0) -> Tensor:
    """Every row links to distinct others."""
    ranks = torch.rand(size, size, generator=torch.Generator().manual_seed(seed)).fill_diagonal_(2).argsort(dim=1)
    return ranks[:, :degree].int()


def plain_walk(neighbors: list[list[int]], length: int, restart: float, draws: random.Random) -> list[int]:
    """METHODS section 4, one move at a time; for graphs in which every node can be reached."""
    start = node = draws.randrange(len(neighbors))
    visited: list[int] = []
    while True:
        if node not in visited:
            visited.append(node)
        if len(visited) == length:
            return visited
        node = draws.choice(neighbors[start if draws.random() < restart else node])


def plain_depth_first(neighbors: list[list[int]], length: int, _: float, draws: random.Random) -> list[int]:
    visited = [draws.randrange(len(neighbors))]
    path = visited[:]
    while len(visited) < length:
        unvisited = [node for node in neighbors[path[-1]] if node not in visited]
        if not unvisited:
            path.pop()
            continue
        visited.append(draws.choice(unvisited))
        path.append(visited[-1])
    return visited


def plain_breadth_first(neighbors: list[list[int]], length: int, _: float, draws: random.Random) -> list[int]:
    queue = [draws.randrange(len(neighbors))]
    position = 0
    while len(queue) < length:
        row = draws.sample(neighbors[queue[position]], len(neighbors[0]))
        queue += [node for node in row if node not in queue]
        position += 1
    return queue[:length]


def same_distribution(one: Counter[object], other: Counter[object]) -> float:
    """p-value of the hypothesis that two samples have one distribution; rare outcomes are pooled."""
    outcomes = [key for key in one | other if one[key] + other[key] >= 20]
    table = np.array([[counts[key] for key in outcomes] for counts in (one, other)], dtype=float)
    rest = np.array([[sum(counts.values())] for counts in (one, other)]) - table.sum(axis=1, keepdims=True)
    table = np.hstack([table, rest]) if rest.sum() else table
    return float(stats.chi2_contingency(table).pvalue)


PEERS: list[tuple[str, float, Callable[[list[list[int]], int, float, random.Random], list[int]]]] = [
    ("restart", 0.0, plain_walk),
    ("restart", 0.1, plain_walk),
    ("restart", 0.5, plain_walk),
    ("restart", 0.9, plain_walk),
    ("random", 0.7, lambda graph, length, _, draws: plain_walk(graph, length, 0.0, draws)),
    ("depth-first", 0.0, plain_depth_first),
    ("breadth-first", 0.0, plain_breadth_first),
]


@pytest.mark.parametrize(("kind", "restart", "peer"), PEERS)
def test_visits_and_their_order_have_the_distribution_of_the_plain_walk(
    kind: str, restart: float, peer: Callable[[list[list[int]], int, float, random.Random], list[int]]
) -> None:
    neighbors, length, repeats = random_graph(9, 3, seed=2), 4, 6000
    graph, draws, rows = WalkGraph(neighbors), random.Random(0), neighbors.tolist()
    ours = [tuple(walk(graph, length, generator("cpu", 7, i), kind, restart)) for i in range(repeats)]
    theirs = [tuple(peer(rows, length, restart, draws)) for _ in range(repeats)]
    assert same_distribution(Counter(ours), Counter(theirs)) > 1e-4  # whole batches in their order
    visits = [Counter(node for batch in batches for node in batch) for batches in (ours, theirs)]
    assert same_distribution(*visits) > 1e-4
    for place in range(length):
        assert same_distribution(*(Counter(batch[place] for batch in batches) for batches in (ours, theirs))) > 1e-4


@pytest.mark.parametrize("vectorized", [1, 3, 48])
@pytest.mark.parametrize("restart", [0.0, 0.02, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("moves", [1, 2, 50, 700])
def test_vectorized_excursions_visit_the_same_nodes_as_single_moves(
    monkeypatch: pytest.MonkeyPatch, vectorized: int, restart: float, moves: int
) -> None:
    monkeypatch.setattr(walks, "_VECTORIZED", vectorized)
    neighbors, draws = random_graph(40, 5), np.random.default_rng(0)
    restarts, picks = draws.random(moves) < restart, draws.integers(0, 5, moves)
    node, expected = 11, []
    for again, pick in zip(restarts, picks, strict=True):
        node = int(neighbors[3 if again else node, pick])
        expected.append(node)
    assert uniform_moves(WalkGraph(neighbors), 3, 11, restarts, picks) == expected


def test_a_walk_of_several_rounds_of_draws_has_the_same_distribution() -> None:
    # Visiting every node of a ring with chords takes several rounds of draws, each continuing from the last node.
    ring = torch.arange(24)
    neighbors = torch.stack([(ring + 1) % 24, (ring + 5) % 24], dim=1)
    graph, rows, draws = WalkGraph(neighbors), neighbors.tolist(), random.Random(1)
    ours, theirs = (
        Counter((batch[-1] - batch[0]) % 24 for batch in batches)
        for batches in (
            [walk(graph, 24, generator("cpu", 1, i), "random") for i in range(3000)],
            [plain_walk(rows, 24, 0.0, draws) for _ in range(3000)],
        )
    )
    assert same_distribution(ours, theirs) > 1e-4


def test_restart_probability_one_visits_only_neighbors_of_the_start() -> None:
    neighbors = random_graph(50, 9)
    for i in range(20):
        first, *others = walk(WalkGraph(neighbors), 10, generator("cpu", i), restart=1.0)
        assert set(others) == set(neighbors[first].tolist())


def test_breadth_first_visits_all_neighbors_of_a_node_before_those_of_the_next() -> None:
    neighbors = random_graph(60, 7)
    for i in range(20):
        first, *others = walk(WalkGraph(neighbors), 12, generator("cpu", i), "breadth-first")
        assert set(others[:7]) == set(neighbors[first].tolist())
        assert set(others[7:]) <= set(neighbors[others[0]].tolist()) | set(neighbors[others[1]].tolist())


def components(number: int, each: int) -> Tensor:
    """Complete graphs without a link between them."""
    nodes = torch.arange(number * each).view(number, each)
    rows = [torch.cat([component[:i], component[i + 1 :]]) for component in nodes for i in range(each)]
    return torch.stack(rows).int()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("restart", [0.0, 0.1, 0.999999, 1.0])
def test_the_walk_leaves_a_component_only_when_all_its_nodes_are_visited(kind: str, restart: float) -> None:
    graph = WalkGraph(components(10, 6))
    batch = walk(graph, 60, generator("cpu", 0), kind, restart)
    assert sorted(batch) == list(range(60))
    visited = [node // 6 for node in batch]
    assert visited == [component for component in dict.fromkeys(visited) for _ in range(6)]


def test_a_new_start_is_uniform() -> None:
    graph = WalkGraph(components(5, 2))
    third = Counter(walk(graph, 3, generator("cpu", i))[2] for i in range(4000))
    assert stats.chisquare([third[node] for node in range(10)]).pvalue > 1e-4


def test_a_walk_without_restarts_leaves_an_absorbing_set() -> None:
    # From 0 the walk may enter {1, 2} before it has visited 3, which it then cannot reach.
    graph = WalkGraph(torch.tensor([[1, 3], [2, 2], [1, 1], [0, 0]]))
    for i in range(30):
        assert sorted(walk(graph, 4, generator("cpu", i), "random")) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["restart", "random"])
def test_a_walk_that_rarely_finds_a_new_node_continues_from_a_new_start(kind: str) -> None:
    # Nodes at depth 2 exist, but are reached once in a million moves.
    begin = time.perf_counter()
    batch = walk(WalkGraph(random_graph(400, 3)), 300, generator("cpu", 0), kind, restart=0.999999)
    assert len(set(batch)) == 300
    assert time.perf_counter() - begin < 20


@pytest.mark.parametrize("kind", KINDS)
def test_only_remaining_nodes_are_visited(kind: str) -> None:
    neighbors = random_graph(80, 6)
    remaining = torch.rand(80, generator=torch.Generator().manual_seed(3)) < 0.3
    graph = WalkGraph(neighbors).restricted(remaining)
    for i in range(10):
        batch = walk(graph, int(remaining.sum()), generator("cpu", i), kind)
        assert sorted(batch) == remaining.nonzero()[:, 0].tolist()


def test_steps_to_remaining_neighbors_are_uniform_and_dead_ends_lead_to_the_start() -> None:
    neighbors = torch.tensor([[1, 2, 3, 4], [5, 5, 5, 5], [0, 1, 3, 4], [5, 0, 0, 0], [0, 1, 2, 5], [1, 2, 3, 4]])
    remaining = torch.tensor([True, True, False, True, True, False])
    graph = WalkGraph(neighbors, remaining=remaining)
    draws = torch.rand(6000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tolist()
    arrived = Counter(graph.step(0, *pair) for pair in draws)
    assert set(arrived) == {1, 3, 4}
    assert stats.chisquare(list(arrived.values())).pvalue > 1e-4
    assert graph.step(1, 0.3, 0.3) is None
    assert {tuple(sorted(walk(graph, 4, generator("cpu", i)))) for i in range(20)} == {(0, 1, 3, 4)}


def test_weighted_steps_are_proportional_to_the_weights() -> None:
    weights = torch.tensor([[0.5, 0.3, 0.2, -1.0], [-1.0, -2.0, 0.0, -3.0], [1.0, 1.0, 1.0, 1.0], *([[1.0] * 4] * 2)])
    neighbors = torch.tensor([[1, 2, 3, 4], [0, 2, 3, 4], [0, 1, 3, 4], [0, 1, 2, 4], [0, 1, 2, 3]])
    graph = WalkGraph(neighbors, weights)
    draws = torch.rand(8000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).tolist()
    arrived = Counter(graph.step(0, *pair) for pair in draws)
    assert arrived[4] == 0, "a neighbor of negative weight was visited"
    assert stats.chisquare([arrived[1], arrived[2], arrived[3]], [4000, 2400, 1600]).pvalue > 1e-4
    no_weight = Counter(graph.step(1, *pair) for pair in draws)
    assert stats.chisquare([no_weight[node] for node in (0, 2, 3, 4)]).pvalue > 1e-4
    # Without the first neighbor, the others keep their proportion.
    part = graph.restricted(torch.tensor([True, False, True, True, True]))
    arrived = Counter(part.step(0, *pair) for pair in draws)
    assert stats.chisquare([arrived[2], arrived[3]], [4800, 3200]).pvalue > 1e-4
    assert sorted(walk(graph, 5, generator("cpu", 0))) == [0, 1, 2, 3, 4]


def test_equal_weights_have_the_distribution_of_no_weights() -> None:
    neighbors = random_graph(9, 3, seed=2)
    plain, equal = WalkGraph(neighbors), WalkGraph(neighbors, torch.full((9, 3), 0.25))
    batches = [
        Counter(tuple(walk(t, 3, generator("cpu", k, i))) for i in range(4000)) for k, t in enumerate((plain, equal))
    ]
    assert same_distribution(batches[0], batches[1]) > 1e-4


def test_a_depth_first_walk_moves_back_from_a_dead_end() -> None:
    # From 0 to a leaf, back, and to the other leaf; the rest of the graph cannot be reached from 0.
    neighbors = torch.tensor([[1, 2], [0, 0], [0, 0], [4, 5], [5, 3], [3, 4], [7, 8], [8, 6], [6, 7]])
    batches = [walk(WalkGraph(neighbors), 3, generator("cpu", seed), "depth-first") for seed in range(60)]
    from_the_root = [batch for batch in batches if batch[0] == 0]
    assert len(from_the_root) >= 3
    assert {tuple(batch) for batch in from_the_root} == {(0, 1, 2), (0, 2, 1)}


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_graph_gives_length_distinct_remaining_nodes(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 12))
    degree = data.draw(st.integers(1, 4))
    # Rows may hold themselves and repeats, unlike the rows of a ProximityGraph.
    rows = st.lists(st.integers(0, size - 1), min_size=degree, max_size=degree)
    neighbors = torch.tensor(data.draw(st.lists(rows, min_size=size, max_size=size)))
    remaining = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    remaining[data.draw(st.integers(0, size - 1))] = True
    weights = torch.randn(size, degree) if data.draw(st.booleans()) else None
    length = data.draw(st.integers(1, int(remaining.sum())))
    kind, restart = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from([0.0, 0.1, 0.7, 1.0]))
    batch = walk(WalkGraph(neighbors, weights, remaining), length, generator("cpu", 0), kind, restart)
    assert len(batch) == len(set(batch)) == length
    assert all(remaining[node] for node in batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 41}, "length=41, but only 40 nodes remain"),
        ({"length": 0}, "length must be a whole number"),
        ({"kind": "breadth"}, "did you mean 'breadth-first'"),
        ({"restart": 1.1}, "restart must be ≥ 0 and ≤ 1, got 1.1"),
        ({"restart": float("nan")}, "restart must be"),
    ],
)
def test_bad_arguments_raise_an_error_that_names_the_fix(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"length": 4, "generator": generator("cpu", 0)}
    with pytest.raises(ValueError, match=message):
        walk(WalkGraph(random_graph(40, 3)), **(arguments | change))  # type: ignore[arg-type]

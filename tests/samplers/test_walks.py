"""Walks have the law of a plain Python walk, move by move and in distribution, and always end."""

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
from hardneg.samplers.walk_graph import Terrain
from hardneg.samplers.walks import KINDS, resolve, walk


def random_graph(size: int, degree: int, seed: int = 0) -> Tensor:
    """Every row links to distinct others."""
    ranks = torch.rand(size, size, generator=torch.Generator().manual_seed(seed)).fill_diagonal_(2).argsort(dim=1)
    return ranks[:, :degree].int()


def plain_walk(neighbors: list[list[int]], length: int, restart: float, draws: random.Random) -> list[int]:
    """METHODS section 4, one move at a time; for graphs in which everything can be reached."""
    start = node = draws.randrange(len(neighbors))
    met: list[int] = []
    while True:
        if node not in met:
            met.append(node)
        if len(met) == length:
            return met
        node = draws.choice(neighbors[start if draws.random() < restart else node])


def plain_depth_first(neighbors: list[list[int]], length: int, _: float, draws: random.Random) -> list[int]:
    met = [draws.randrange(len(neighbors))]
    path = met[:]
    while len(met) < length:
        fresh = [node for node in neighbors[path[-1]] if node not in met]
        if not fresh:
            path.pop()
            continue
        met.append(draws.choice(fresh))
        path.append(met[-1])
    return met


def plain_breadth_first(neighbors: list[list[int]], length: int, _: float, draws: random.Random) -> list[int]:
    queue = [draws.randrange(len(neighbors))]
    turn = 0
    while len(queue) < length:
        row = draws.sample(neighbors[queue[turn]], len(neighbors[0]))
        queue += [node for node in row if node not in queue]
        turn += 1
    return queue[:length]


def same_law(one: Counter[object], other: Counter[object]) -> float:
    """Probability of a difference as large as this between two samples of one law; rare outcomes are pooled."""
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
def test_visits_and_their_order_have_the_law_of_the_plain_walk(
    kind: str, restart: float, peer: Callable[[list[list[int]], int, float, random.Random], list[int]]
) -> None:
    neighbors, length, repeats = random_graph(9, 3, seed=2), 4, 6000
    terrain, draws, rows = Terrain(neighbors), random.Random(0), neighbors.tolist()
    ours = [tuple(walk(terrain, length, generator("cpu", 7, i), kind, restart)) for i in range(repeats)]
    theirs = [tuple(peer(rows, length, restart, draws)) for _ in range(repeats)]
    assert same_law(Counter(ours), Counter(theirs)) > 1e-4  # whole batches in their order
    visits = [Counter(node for batch in batches for node in batch) for batches in (ours, theirs)]
    assert same_law(*visits) > 1e-4
    for place in range(length):
        assert same_law(*(Counter(batch[place] for batch in batches) for batches in (ours, theirs))) > 1e-4


@pytest.mark.parametrize("together", [1, 3, 48])
@pytest.mark.parametrize("restart", [0.0, 0.02, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("moves", [1, 2, 50, 700])
def test_excursions_at_once_visit_what_one_move_after_another_visits(
    monkeypatch: pytest.MonkeyPatch, together: int, restart: float, moves: int
) -> None:
    monkeypatch.setattr(walks, "_TOGETHER", together)
    neighbors, draws = random_graph(40, 5), np.random.default_rng(0)
    restarts, picks = draws.random(moves) < restart, draws.integers(0, 5, moves)
    node, expected = 11, []
    for again, pick in zip(restarts, picks, strict=True):
        node = int(neighbors[3 if again else node, pick])
        expected.append(node)
    assert resolve(Terrain(neighbors), 3, 11, restarts, picks) == expected


def test_a_walk_that_takes_several_rounds_of_draws_keeps_its_law() -> None:
    # To meet everything on a ring with chords takes many moves, which go on where the last round stood.
    ring = torch.arange(24)
    neighbors = torch.stack([(ring + 1) % 24, (ring + 5) % 24], dim=1)
    terrain, rows, draws = Terrain(neighbors), neighbors.tolist(), random.Random(1)
    ours, theirs = (
        Counter((batch[-1] - batch[0]) % 24 for batch in batches)
        for batches in (
            [walk(terrain, 24, generator("cpu", 1, i), "random") for i in range(3000)],
            [plain_walk(rows, 24, 0.0, draws) for _ in range(3000)],
        )
    )
    assert same_law(ours, theirs) > 1e-4


def test_restarting_always_meets_neighbours_of_the_start_only() -> None:
    neighbors = random_graph(50, 9)
    for i in range(20):
        first, *others = walk(Terrain(neighbors), 10, generator("cpu", i), restart=1.0)
        assert set(others) == set(neighbors[first].tolist())


def test_breadth_first_takes_all_neighbours_before_going_on() -> None:
    neighbors = random_graph(60, 7)
    for i in range(20):
        first, *others = walk(Terrain(neighbors), 12, generator("cpu", i), "breadth-first")
        assert set(others[:7]) == set(neighbors[first].tolist())
        assert set(others[7:]) <= set(neighbors[others[0]].tolist()) | set(neighbors[others[1]].tolist())


def islands(number: int, each: int) -> Tensor:
    """Complete graphs without a link between them."""
    nodes = torch.arange(number * each).view(number, each)
    rows = [torch.cat([island[:i], island[i + 1 :]]) for island in nodes for i in range(each)]
    return torch.stack(rows).int()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("restart", [0.0, 0.1, 0.999999, 1.0])
def test_islands_are_left_when_nothing_new_can_be_reached(kind: str, restart: float) -> None:
    terrain = Terrain(islands(10, 6))
    batch = walk(terrain, 60, generator("cpu", 0), kind, restart)
    assert sorted(batch) == list(range(60))
    homes = [node // 6 for node in batch]
    assert homes == [home for home in dict.fromkeys(homes) for _ in range(6)], "left before it was exhausted"


def test_a_fresh_start_is_uniform() -> None:
    terrain = Terrain(islands(5, 2))
    third = Counter(walk(terrain, 3, generator("cpu", i))[2] for i in range(4000))
    assert stats.chisquare([third[node] for node in range(10)]).pvalue > 1e-4


def test_a_trap_of_the_walk_without_restarts_is_noticed() -> None:
    # From 0 the walk may fall into {1, 2} before it has met 3, which it then cannot reach.
    terrain = Terrain(torch.tensor([[1, 3], [2, 2], [1, 1], [0, 0]]))
    for i in range(30):
        assert sorted(walk(terrain, 4, generator("cpu", i), "random")) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["restart", "random"])
def test_a_walk_that_may_but_hardly_ever_finds_more_is_let_go(kind: str) -> None:
    # Depth 2 exists, but is tried once in a million moves.
    begin = time.perf_counter()
    batch = walk(Terrain(random_graph(400, 3)), 300, generator("cpu", 0), kind, restart=0.999999)
    assert len(set(batch)) == 300
    assert time.perf_counter() - begin < 20


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_left_is_met(kind: str) -> None:
    neighbors = random_graph(80, 6)
    left = torch.rand(80, generator=torch.Generator().manual_seed(3)) < 0.3
    terrain = Terrain(neighbors).restricted(left)
    for i in range(10):
        batch = walk(terrain, int(left.sum()), generator("cpu", i), kind)
        assert sorted(batch) == left.nonzero()[:, 0].tolist()


def test_steps_among_what_is_left_are_uniform_and_dead_ends_lead_back() -> None:
    neighbors = torch.tensor([[1, 2, 3, 4], [5, 5, 5, 5], [0, 1, 3, 4], [5, 0, 0, 0], [0, 1, 2, 5], [1, 2, 3, 4]])
    left = torch.tensor([True, True, False, True, True, False])
    terrain = Terrain(neighbors, left=left)
    draws = torch.rand(6000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tolist()
    arrived = Counter(terrain.step(0, *pair) for pair in draws)
    assert set(arrived) == {1, 3, 4}
    assert stats.chisquare(list(arrived.values())).pvalue > 1e-4
    assert terrain.step(1, 0.3, 0.3) is None
    assert {tuple(sorted(walk(terrain, 4, generator("cpu", i)))) for i in range(20)} == {(0, 1, 3, 4)}


def test_weighted_steps_are_taken_in_proportion() -> None:
    weights = torch.tensor([[0.5, 0.3, 0.2, -1.0], [-1.0, -2.0, 0.0, -3.0], [1.0, 1.0, 1.0, 1.0], *([[1.0] * 4] * 2)])
    neighbors = torch.tensor([[1, 2, 3, 4], [0, 2, 3, 4], [0, 1, 3, 4], [0, 1, 2, 4], [0, 1, 2, 3]])
    terrain = Terrain(neighbors, weights)
    draws = torch.rand(8000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).tolist()
    arrived = Counter(terrain.step(0, *pair) for pair in draws)
    assert arrived[4] == 0, "a negative weight is never taken"
    assert stats.chisquare([arrived[1], arrived[2], arrived[3]], [4000, 2400, 1600]).pvalue > 1e-4
    no_weight = Counter(terrain.step(1, *pair) for pair in draws)
    assert stats.chisquare([no_weight[node] for node in (0, 2, 3, 4)]).pvalue > 1e-4
    # With the first neighbour gone, the others keep their proportion.
    part = terrain.restricted(torch.tensor([True, False, True, True, True]))
    arrived = Counter(part.step(0, *pair) for pair in draws)
    assert stats.chisquare([arrived[2], arrived[3]], [4800, 3200]).pvalue > 1e-4
    assert sorted(walk(terrain, 5, generator("cpu", 0))) == [0, 1, 2, 3, 4]


def test_equal_weights_have_the_law_of_none() -> None:
    neighbors = random_graph(9, 3, seed=2)
    plain, equal = Terrain(neighbors), Terrain(neighbors, torch.full((9, 3), 0.25))
    laws = [
        Counter(tuple(walk(t, 3, generator("cpu", k, i))) for i in range(4000)) for k, t in enumerate((plain, equal))
    ]
    assert same_law(laws[0], laws[1]) > 1e-4


def test_a_depth_first_walk_goes_back_from_a_dead_end() -> None:
    # From 0 to a leaf, back, and on to the other; the rest of the graph cannot be reached from there.
    neighbors = torch.tensor([[1, 2], [0, 0], [0, 0], [4, 5], [5, 3], [3, 4], [7, 8], [8, 6], [6, 7]])
    batches = [walk(Terrain(neighbors), 3, generator("cpu", seed), "depth-first") for seed in range(60)]
    from_the_root = [batch for batch in batches if batch[0] == 0]
    assert len(from_the_root) >= 3
    assert {tuple(batch) for batch in from_the_root} == {(0, 1, 2), (0, 2, 1)}


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_graph_gives_as_many_distinct_nodes_as_asked_for(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 12))
    degree = data.draw(st.integers(1, 4))
    # Rows may even point at themselves and repeat: worse than any graph that is built here.
    rows = st.lists(st.integers(0, size - 1), min_size=degree, max_size=degree)
    neighbors = torch.tensor(data.draw(st.lists(rows, min_size=size, max_size=size)))
    left = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    left[data.draw(st.integers(0, size - 1))] = True
    weights = torch.randn(size, degree) if data.draw(st.booleans()) else None
    length = data.draw(st.integers(1, int(left.sum())))
    kind, restart = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from([0.0, 0.1, 0.7, 1.0]))
    batch = walk(Terrain(neighbors, weights, left), length, generator("cpu", 0), kind, restart)
    assert len(batch) == len(set(batch)) == length
    assert all(left[node] for node in batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 41}, "length=41, but only 40 nodes are left"),
        ({"length": 0}, "length must be a whole number"),
        ({"kind": "breadth"}, "did you mean 'breadth-first'"),
        ({"restart": 1.1}, "restart must be ≥ 0 and ≤ 1, got 1.1"),
        ({"restart": float("nan")}, "restart must be"),
    ],
)
def test_bad_arguments_say_what_to_do(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"length": 4, "generator": generator("cpu", 0)}
    with pytest.raises(ValueError, match=message):
        walk(Terrain(random_graph(40, 3)), **(arguments | change))  # type: ignore[arg-type]

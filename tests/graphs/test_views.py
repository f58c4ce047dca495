"""Views of graphs change the stated share of nodes or edges, reproducibly; subgraphs have GraphCL's distribution."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

pytest.importorskip("torch_geometric", reason='needs pip install "hardneg[graph]"')

from torch_geometric.data import Batch, Data

from hardneg.graphs.data import GraphSet
from hardneg.graphs.views import KINDS, GraphViews
from hardneg.randomness import generator


def graphs(sizes: list[int], density: float = 0.4, seed: int = 0) -> GraphSet:
    draws = torch.Generator().manual_seed(seed)
    made = []
    for number, size in enumerate(sizes):
        pairs = torch.rand(size, size, generator=draws).triu(1).gt(1 - density).nonzero().T
        edges = torch.cat([pairs, pairs.flip(0)], dim=1)
        weights = torch.arange(pairs.shape[1], dtype=torch.float32).repeat(2)
        x = torch.randn(size, 4, generator=draws)
        made.append(Data(x=x, edge_index=edges, edge_attr=weights, y=torch.tensor([number])))
    return GraphSet.of(made)


def seen(kind: str | tuple[str, ...], batch: Any, ratio: float = 0.2, seed: int = 0) -> list[Any]:
    """The second views, one by one."""
    views = GraphViews("identity", kind, ratio)(batch, generator("cpu", 7, seed))
    return views.to_data_list()[batch.num_graphs :]


def edges(graph: Any) -> list[tuple[int, ...]]:
    return sorted(map(tuple, graph.edge_index.T.tolist()))


SIZES = [1, 2, 5, 10, 17, 30]


@pytest.mark.parametrize("kind", KINDS)
def test_a_ratio_of_zero_changes_no_connected_graph(kind: str) -> None:
    whole = graphs([3, 6, 9], density=1.0)
    batch = whole.batch(torch.arange(3))
    for view, original in zip(seen(kind, batch, ratio=0.0), batch.to_data_list(), strict=True):
        assert_close(view.x, original.x)
        assert edges(view) == edges(original)


def test_first_views_come_first_with_their_index() -> None:
    batch = graphs(SIZES).batch(torch.tensor([3, 1, 4]))
    views = GraphViews("identity", "drop_nodes")(batch, generator("cpu", 0))
    assert views.num_graphs == 6
    assert views.index.tolist() == [3, 1, 4, 3, 1, 4]
    assert views.y.tolist() == [3, 1, 4, 3, 1, 4]
    assert_close(views.x[: len(batch.x)], batch.x)
    assert_close(views.edge_index[:, : batch.edge_index.shape[1]], batch.edge_index)


@pytest.mark.parametrize("ratio", [0.2, 0.5, 1.0])
def test_dropping_nodes_leaves_the_induced_subgraph(ratio: float) -> None:
    batch = graphs(SIZES).batch(torch.arange(len(SIZES)))
    for view, original, size in zip(seen("drop_nodes", batch, ratio), batch.to_data_list(), SIZES, strict=True):
        assert len(view.x) == max(size - int(ratio * size + 1e-9), 1)
        kept = [int((original.x == row).all(dim=1).nonzero()) for row in view.x]  # features tell nodes apart
        assert kept == sorted(kept)
        induced = [(kept.index(a), kept.index(b)) for a, b in edges(original) if a in kept and b in kept]
        assert edges(view) == sorted(induced)
        weights = dict(zip(map(tuple, original.edge_index.T.tolist()), original.edge_attr.tolist(), strict=True))
        for (a, b), weight in zip(view.edge_index.T.tolist(), view.edge_attr.tolist(), strict=True):
            assert weights[kept[a], kept[b]] == weight


def test_masked_nodes_have_the_mean_of_their_graph() -> None:
    batch = graphs(SIZES).batch(torch.arange(len(SIZES)))
    for view, original, size in zip(seen("mask_attributes", batch, 0.5), batch.to_data_list(), SIZES, strict=True):
        changed = (view.x != original.x).any(dim=1)
        assert int(changed.sum()) == size // 2
        assert_close(view.x[changed], original.x.mean(dim=0).expand(size // 2, -1))
        assert edges(view) == edges(original)


@pytest.mark.parametrize("density", [0.1, 0.4, 1.0])
def test_perturbed_edges_stay_pairs_in_their_graph(density: float) -> None:
    batch = graphs(SIZES, density).batch(torch.arange(len(SIZES)))
    for view, original in zip(seen("perturb_edges", batch), batch.to_data_list(), strict=True):
        before, after = set(edges(original)), edges(view)
        assert len(set(after)) == len(after)  # none is there twice
        assert {(b, a) for a, b in after} == set(after)
        assert all(a != b and max(a, b) < len(original.x) for a, b in after)
        pairs, moved = len(before) // 2, int(0.2 * (len(before) // 2) + 1e-9)
        assert len(before & set(after)) // 2 >= pairs - moved
        assert pairs - moved <= len(after) // 2 <= pairs
        assert_close(view.x, original.x)
        assert len(view.edge_attr) == len(after)


def described(sizes: list[int]) -> Any:
    """A collated batch whose nodes and edges say in every attribute which ones they are."""
    made = []
    for number, graph in enumerate(graphs(sizes)[n] for n in range(len(sizes))):
        nodes = 100 * number + torch.arange(len(graph.x))
        ends = 100 * number + graph.edge_index  # (2, E)
        made.append(
            Data(
                x=nodes[:, None].float(), edge_index=graph.edge_index, z=nodes,
                pos=nodes[:, None].expand(-1, 3).double(), edge_weight=(1000 * ends[0] + ends[1]).double(), bond=ends.T,
                y=torch.tensor([number]), charge=torch.tensor([[float(number)]]), smiles=f"C{number}",
            )
        )  # fmt: skip
    return Batch.from_data_list(made)


@pytest.mark.parametrize("kind", KINDS)
def test_every_attribute_follows_its_node_or_edge(kind: str) -> None:
    batch = described([9, 2, 17, 1, 12])
    views = GraphViews("identity", kind, ratio=0.4)(batch, generator("cpu", 3))
    originals = batch.to_data_list()
    assert views.num_graphs == 10
    for place, view in enumerate(views.to_data_list()):
        number = place % 5
        assert (int(view.y), float(view.charge), view.smiles) == (number, number, f"C{number}")
        assert_close(view.pos, view.z[:, None].expand(-1, 3).double())
        if kind != "mask_attributes":
            assert_close(view.x, view.z[:, None].float())
        ends = 100 * number + torch.arange(len(originals[number].x))
        assert set(view.z.tolist()) <= set(ends.tolist())
        assert len(view.edge_weight) == len(view.bond) == view.edge_index.shape[1]
        assert_close(view.edge_weight, (1000 * view.bond[:, 0] + view.bond[:, 1]).double())
        there = view.z[view.edge_index].T  # (E, 2)
        same = (there == view.bond).all(dim=1)
        if kind == "perturb_edges" and place >= 5:
            # A pair with new ends keeps what the old one had, each direction its own.
            before = {tuple(pair) for pair in originals[number].bond.tolist()}
            assert {tuple(pair) for pair in view.bond.tolist()} <= before
            new = {tuple(bond): tuple(ends) for bond, ends in zip(view.bond.tolist(), there.tolist(), strict=True)}
            assert all(new[b, a] == new[a, b][::-1] for a, b in new)
            assert bool(same.all()) == (len(originals[number].x) <= 2)
        else:
            assert bool(same.all())


def test_attributes_of_nodes_and_edges_are_distinguished_if_their_numbers_agree() -> None:
    ring = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    graph = Data(x=torch.ones(4, 1), edge_index=ring, z=torch.arange(4), edge_weight=torch.arange(4.0))
    views = GraphViews("identity", "drop_nodes", 0.25)(Batch.from_data_list([graph]), generator("cpu", 0))
    _, view = views.to_data_list()
    assert (len(view.z), len(view.edge_weight)) == (3, 2)
    assert_close(view.z[view.edge_index[0]].float(), view.edge_weight)  # an edge was called after its source


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("face", torch.zeros(3, 1, dtype=torch.int64), "batch.face holds numbers of nodes"),
        ("edge_label_index", torch.zeros(2, 1, dtype=torch.int64), "batch.edge_label_index holds numbers of nodes"),
        ("odd", torch.zeros(7), r"batch.odd has 7 rows, but there are 5 nodes, 4 edges and 2 graphs"),
        ("note", "a string", r"batch.note is a str.*del batch.note"),
    ],
)
def test_attributes_that_views_cannot_carry_are_refused(name: str, value: object, message: str) -> None:
    pair = torch.tensor([[0, 1], [1, 0]])
    batch = Batch.from_data_list([Data(x=torch.ones(n, 1), edge_index=pair) for n in (2, 3)])
    setattr(batch, name, value)
    with pytest.raises(ValueError, match=message):
        GraphViews()(batch, generator("cpu", 0))


def test_self_loops_are_kept() -> None:
    loop = Data(x=torch.ones(3, 1), edge_index=torch.tensor([[0, 1, 2, 1], [0, 2, 1, 1]]))
    batch = GraphSet.of([loop]).batch(torch.tensor([0]))
    for seed in range(20):
        (view,) = seen("perturb_edges", batch, 1.0, seed)
        found = edges(view)
        assert {(0, 0), (1, 1)} <= set(found)
        assert {(b, a) for a, b in found} == set(found)


def test_new_ends_are_uniform_among_pairs() -> None:
    line = Data(x=torch.ones(4, 1), edge_index=torch.tensor([[0, 1], [1, 0]]))
    batch = GraphSet.of([line]).batch(torch.zeros(3000, dtype=torch.int64))
    counts = Counter(edges(view)[0] for view in seen("perturb_edges", batch, 1.0))
    assert set(counts) == set(itertools.combinations(range(4), 2))
    assert all(abs(count - 500) < 5 * (3000 * (1 / 6) * (5 / 6)) ** 0.5 for count in counts.values())


def subgraph_distribution(neighbors: dict[int, set[int]], keep: int) -> dict[frozenset[int], float]:
    """The published growth: a uniform start, then a uniform member of the frontier, over and over."""
    distribution: dict[frozenset[int], float] = {frozenset([start]): 1 / len(neighbors) for start in neighbors}
    for _ in range(keep - 1):
        after: dict[frozenset[int], float] = {}
        for there, chance in distribution.items():
            frontier = set().union(*(neighbors[node] for node in there)) - there
            for node in frontier:
                after[there | {node}] = after.get(there | {node}, 0.0) + chance / len(frontier)
            if not frontier:
                after[there] = after.get(there, 0.0) + chance
        distribution = after
    return distribution


def test_subgraphs_have_the_distribution_of_the_published_loop() -> None:
    # A path of four with a triangle at its end, and a pair apart: few enough to know the distribution exactly.
    pairs = [(0, 1), (1, 2), (2, 3), (3, 4), (2, 4), (5, 6)]
    neighbors = {node: {b for a, b in pairs + [(b, a) for a, b in pairs] if a == node} for node in range(7)}
    distribution = subgraph_distribution(neighbors, keep=4)  # 7 − ⌊0.5 · 7⌋
    index = torch.tensor(pairs).T
    graph = Data(x=torch.eye(7), edge_index=torch.cat([index, index.flip(0)], dim=1))
    draws = 8000
    batch = GraphSet.of([graph]).batch(torch.zeros(draws, dtype=torch.int64))
    found = Counter(frozenset(view.x.argmax(dim=1).tolist()) for view in seen("subgraph", batch, 0.5))
    assert set(found) <= set(distribution)
    for members, chance in distribution.items():
        assert abs(found[members] / draws - chance) < 5 * (chance * (1 - chance) / draws) ** 0.5, members


def test_each_graph_draws_one_of_several_augmentations() -> None:
    batch = graphs([20], density=0.5).batch(torch.zeros(400, dtype=torch.int64))
    kinds: Counter[str] = Counter()
    original = batch.to_data_list()[0]
    for view in seen(("drop_nodes", "mask_attributes", "perturb_edges"), batch):
        if len(view.x) < 20:
            kinds["drop_nodes"] += 1
        elif not torch.equal(view.x, original.x):
            kinds["mask_attributes"] += 1
        else:
            kinds["perturb_edges"] += edges(view) != edges(original)
    assert sum(kinds.values()) == 400
    assert all(90 < count < 180 for count in kinds.values())


@pytest.mark.parametrize("pair", list(itertools.product(KINDS, KINDS)))
def test_views_are_reproducible(pair: tuple[str, str]) -> None:
    batch = graphs(SIZES).batch(torch.arange(len(SIZES)))
    one, other = (GraphViews(*pair)(batch, generator("cpu", 3, 1)) for _ in range(2))
    for name in ("x", "edge_index", "edge_attr", "batch", "ptr", "index"):
        assert_close(one[name], other[name])


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    density=st.sampled_from([0.0, 0.3, 1.0]),
    ratio=st.sampled_from([0.0, 0.2, 0.99, 1.0]),
    first=st.sampled_from(KINDS),
    second=st.sampled_from([*KINDS, KINDS]),
)
def test_degenerate_graphs_keep_a_node_and_valid_edges(
    sizes: list[int], density: float, ratio: float, first: str, second: str | tuple[str, ...]
) -> None:
    batch = graphs(sizes, density).batch(torch.arange(len(sizes)))
    views = GraphViews(first, second, ratio)(batch, generator("cpu", 1))
    counts = views.batch.bincount(minlength=2 * len(sizes)).tolist()
    assert views.num_graphs == 2 * len(sizes)
    for size, count in zip(sizes * 2, counts, strict=True):
        assert min(size, 1) <= count <= size
    if views.edge_index.numel():
        assert int(views.edge_index.max()) < len(views.x)
    assert (views.batch[views.edge_index[0]] == views.batch[views.edge_index[1]]).all()
    assert len(views.to_data_list()) == 2 * len(sizes)


def test_one_view_is_the_first() -> None:
    batch = graphs(SIZES).batch(torch.arange(len(SIZES)))
    one = GraphViews("drop_nodes", "subgraph")(batch, generator("cpu", 3), views=1)
    both = GraphViews("drop_nodes", "subgraph")(batch, generator("cpu", 3))
    assert one.num_graphs == len(SIZES)
    assert_close(one.x, both.x[: len(one.x)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"first": "drop_node"}, "did you mean 'drop_nodes'"),
        ({"second": ()}, "second is empty"),
        ({"first": 3}, "first must be a name or several of identity, .*, got 3"),
        ({"ratio": 1.5}, "ratio must be"),
    ],
)
def test_bad_settings_name_the_argument(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GraphViews(**options)


def test_inputs_that_are_no_batch_are_refused() -> None:
    graph = Data(edge_index=torch.zeros(2, 0, dtype=torch.int64))
    with pytest.raises(ValueError, match="the Data has no x: make one with GraphSet"):
        GraphViews()(graph, generator("cpu", 0))
    with pytest.raises(ValueError, match="the list has no x"):
        GraphViews()([graph], generator("cpu", 0))

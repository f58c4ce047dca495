"""Equivalent nodes are those that color refinement with tuples does not distinguish, and GIN embeds them alike."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch_geometric", reason='needs pip install "hardneg[graph]"')

from hardneg.graphs.data import GraphSet
from hardneg.graphs.equivalent_nodes import equivalent_nodes
from hardneg.graphs.gin import GIN


def random_set(sizes: list[int], density: float, seed: int, directed: bool = False) -> GraphSet:
    """Graphs of these sizes whose nodes have one of two labels."""
    draws = torch.Generator().manual_seed(seed)
    edges, start = [torch.zeros(2, 0, dtype=torch.int64)], 0
    for size in sizes:
        joined = torch.rand(size, size, generator=draws) < density
        joined = joined if directed else joined | joined.T
        edges.append(joined.nonzero().T + start)
        start += size
    ptr = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()])
    labels = torch.randint(2, (start,), generator=draws)
    return GraphSet(torch.nn.functional.one_hot(labels, 2).double(), torch.cat(edges, dim=1), ptr)


def refined(graphs: GraphSet, hops: int) -> list[int]:
    """The first node of each node's color within its graph, colors being nested tuples."""
    owner = [graph for graph, size in enumerate(graphs.ptr.diff().tolist()) for _ in range(size)]
    colors: list[object] = [tuple(row) for row in graphs.x.tolist()]
    for _ in range(hops):
        messages: list[list[object]] = [[] for _ in colors]
        for source, target in graphs.edge_index.T.tolist():
            messages[target].append(colors[source])
        colors = [(own, tuple(sorted(some, key=repr))) for own, some in zip(colors, messages, strict=True)]
    seen: dict[tuple[int, object], int] = {}
    return [seen.setdefault(pair, node) for node, pair in enumerate(zip(owner, colors, strict=True))]


@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    density=st.sampled_from([0.0, 0.15, 0.4, 1.0]),
    hops=st.integers(0, 3),
    directed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equivalent_nodes_agree_with_refinement_by_tuples(
    sizes: list[int], density: float, hops: int, directed: bool, seed: int
) -> None:
    graphs = random_set(sizes, density, seed, directed)
    assert graphs.equivalent_nodes(hops).tolist() == refined(graphs, hops)


@torch.no_grad()
def test_gin_embeds_equivalent_nodes_alike() -> None:
    graphs = random_set([9] * 30, 0.12, seed=0)
    torch.manual_seed(0)
    encoder = GIN(2, width=16, layers=3).double()
    batch = graphs.batch(torch.arange(30), hops=encoder.hops)
    nodes = encoder.nodes(batch)
    torch.testing.assert_close(nodes, nodes[batch.equivalent_index], rtol=1e-12, atol=1e-12)
    assert bool((batch.equivalent_index < torch.arange(len(nodes))).any())


def test_a_batch_renumbers_equivalent_nodes_and_is_split_into_its_graphs() -> None:
    graphs = random_set([4, 0, 5, 3], 0.5, seed=1)
    index = torch.tensor([3, 1, 0, 3])
    batch = graphs.batch(index, hops=2)
    assert torch.equal(batch.batch[batch.equivalent_index], batch.batch)
    for graph in batch.to_data_list():
        alone = graphs.batch(graph.index, hops=2)
        assert torch.equal(graph.equivalent_index, alone.equivalent_index)
    assert getattr(graphs.batch(index), "equivalent_index", None) is None


def test_features_are_compared_as_numbers() -> None:
    x = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [1.0, 0.0], [0.0, 1.0 + 2**-23], [0.0, 1.0]])
    nothing = torch.zeros(2, 0, dtype=torch.int64)
    assert equivalent_nodes(x, nothing, torch.tensor([0, 0, 0, 0, 1]), hops=1).tolist() == [0, 0, 2, 3, 4]


def test_inner_nodes_of_a_long_path_are_equivalent_within_the_hops() -> None:
    """A node of a path is known by its distance to the nearer end, and that as far as hops see."""
    count = 1 << 17
    nodes = torch.arange(count)
    pairs = torch.stack([nodes[:-1], nodes[1:]])
    found = equivalent_nodes(
        torch.ones(count, 1), torch.cat([pairs, pairs.flip(0)], dim=1), torch.zeros_like(nodes), hops=5
    )
    expected = torch.minimum(torch.minimum(nodes, count - 1 - nodes), torch.tensor(5))
    assert torch.equal(found, expected)

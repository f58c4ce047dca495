"""GIN computes the sums over neighbors of its paper, graph by graph and for any order of nodes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

pytest.importorskip("torch_geometric", reason='needs pip install "hardneg[graph]"')

from hardneg.graphs.data import GraphSet
from hardneg.graphs.gin import GIN, Discriminator


def two() -> GraphSet:
    """A triangle with a tail, and a pair; directions of edges both given."""
    pairs = torch.tensor([[0, 1, 2, 2, 4], [1, 2, 0, 3, 5]])
    order = torch.argsort(torch.cat([pairs[0], pairs[1]]) >= 4, stable=True)
    edges = torch.cat([pairs, pairs.flip(0)], dim=1)[:, order]
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    return GraphSet(x, edges, torch.tensor([0, 4, 6]))


def trained(inputs: int = 3) -> GIN:
    """With statistics and scales that are not trivial."""
    torch.manual_seed(1)
    encoder = GIN(inputs, width=5, layers=2)
    for layer in encoder.layers:
        for tensor in (layer.norm.running_mean, layer.norm.weight.data, layer.norm.bias.data):
            nn.init.uniform_(tensor, 0.5, 1.5)
        nn.init.uniform_(layer.norm.running_var, 0.5, 2.0)
    return encoder.eval()


def loop(encoder: GIN, batch: Any) -> Tensor:
    """One node at a time: h' = norm(relu(mlp(h + Σ neighbors))), summed per graph and layer."""
    edges, x = batch.edge_index.T.tolist(), list(batch.x)
    found = [torch.zeros(0)] * batch.num_graphs
    for layer in encoder.layers:
        new = []
        for node in range(len(x)):
            total = x[node] + sum((x[source] for source, target in edges if target == node), torch.zeros_like(x[node]))
            hidden = torch.relu(layer.convolution.nn(total))
            norm = layer.norm
            new.append((hidden - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias)
        x = new
        for graph in range(batch.num_graphs):
            members = [row for row, owner in zip(x, batch.batch.tolist(), strict=True) if owner == graph]
            found[graph] = torch.cat([found[graph], sum(members, torch.zeros(5))])
    return torch.stack(found)


@torch.no_grad()
def test_embeddings_agree_with_a_loop_over_nodes() -> None:
    encoder, batch = trained(), two().batch(torch.tensor([1, 0, 1]))
    assert_close(encoder(batch), loop(encoder, batch))
    assert_close(encoder.pool(encoder.nodes(batch), batch), encoder(batch))


@torch.no_grad()
def test_the_default_is_three_layers_of_32() -> None:
    encoder = GIN(3)
    assert encoder.features == 96
    assert encoder(two().batch(torch.tensor([0, 1]))).shape == (2, 96)
    assert encoder.nodes(two().batch(torch.tensor([0, 1]))).shape == (6, 96)


@torch.no_grad()
def test_the_embedding_of_a_graph_does_not_depend_on_the_batch() -> None:
    encoder, graphs = trained(), two()
    together = encoder(graphs.batch(torch.tensor([0, 1])))
    alone = torch.cat([encoder(graphs.batch(torch.tensor([number]))) for number in range(2)])
    assert_close(together, alone)


@torch.no_grad()
def test_embeddings_do_not_depend_on_the_order_of_nodes() -> None:
    encoder, graphs = trained(), two()
    order = torch.tensor([2, 0, 3, 1, 5, 4])
    moved = GraphSet(graphs.x[order], order.argsort()[graphs.edge_index], graphs.ptr)
    assert_close(encoder(moved.batch(torch.arange(2))), encoder(graphs.batch(torch.arange(2))))


@torch.no_grad()
def test_a_graph_without_nodes_is_embedded_as_zeros_and_edges_are_optional() -> None:
    encoder = trained()
    graphs = GraphSet(torch.ones(1, 3), torch.zeros(2, 0, dtype=torch.int64), torch.tensor([0, 0, 1]))
    embedded = encoder(graphs.batch(torch.arange(2)))
    assert not embedded[0].any()
    assert_close(embedded, loop(encoder, graphs.batch(torch.arange(2))))


def test_training_on_a_single_node_is_refused() -> None:
    batch = GraphSet(torch.ones(1, 3), torch.zeros(2, 0, dtype=torch.int64), torch.tensor([0, 1])).batch(
        torch.arange(1)
    )
    with pytest.raises(ValueError, match="batch has 1 nodes, and batch-norm trains on two or more"):
        GIN(3).train()(batch)


def test_other_features_than_expected_are_refused() -> None:
    with pytest.raises(ValueError, match=r"batch.x must have shape \(nodes, 7\), got \(6, 3\)"):
        GIN(7)(two().batch(torch.arange(2)))
    with pytest.raises(ValueError, match="inputs must be a whole number"):
        GIN(0)


@torch.no_grad()
def test_the_discriminator_is_three_layers_beside_a_shortcut() -> None:
    head, x = Discriminator(4), torch.randn(5, 4)
    hidden = x
    for linear in (module for module in head.block if isinstance(module, nn.Linear)):
        hidden = (hidden @ linear.weight.T + linear.bias).clamp(min=0)
    assert_close(head(x), hidden + x @ head.shortcut.weight.T + head.shortcut.bias)

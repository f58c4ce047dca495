"""GIN: the graph encoder of InfoGraph and GraphCL, small, with concatenated sum-pooling (Xu et al. 2019)."""

from typing import Any

import torch
from torch import Tensor, nn

from hardneg import checks
from hardneg.extras import required


class GIN(nn.Module):
    """Layers of sums over neighbors, each followed by two linear maps, ReLU and batch-norm.

    Called with a PyG batch it returns graph embeddings (G, layers · width): the node embeddings of every layer, summed
    per graph and concatenated. `nodes` returns them before the sum. A graph without nodes is embedded as zeros.

    Args:
        inputs: features of a node, F
        width: of each layer
        layers: number of layers

    Examples:
        >>> from hardneg.graphs.data import GraphSet
        >>> pair = GraphSet(torch.ones(3, 1), torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 2, 3]))
        >>> encoder = GIN(inputs=1)
        >>> encoder(pair.batch(torch.tensor([0, 1]))).shape
        torch.Size([2, 96])
    """

    def __init__(self, inputs: int, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        for name, number in (("inputs", inputs), ("width", width), ("layers", layers)):
            checks.whole(name, number)
        convolution = required("torch_geometric.nn", "graph").GINConv
        sizes = [inputs] + [width] * (layers - 1)
        maps = [nn.Sequential(nn.Linear(size, width), nn.ReLU(), nn.Linear(width, width)) for size in sizes]
        for linear in (module for pair in maps for module in pair if isinstance(module, nn.Linear)):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        self.layers = nn.ModuleList(GINLayer(convolution(each), width) for each in maps)
        self.inputs, self.features = inputs, layers * width
        self.hops = layers  # nodes with equal neighborhoods up to this distance have equal embeddings

    def forward(self, batch: Any) -> Tensor:
        return self.pool(self.nodes(batch), batch)

    def nodes(self, batch: Any) -> Tensor:
        """Node embeddings, (n, layers · width)."""
        x = batch.x
        if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != self.inputs:
            given = tuple(x.shape) if isinstance(x, Tensor) else x
            raise ValueError(
                f"batch.x must have shape (nodes, {self.inputs}), got {given}: build GIN(inputs=…) for these features, "
                "or create features with GraphSet.of(graphs, features='degree')"
            )
        if self.training and len(x) < 2:
            raise ValueError(f"batch has {len(x)} nodes, and batch-norm trains on two or more: join more graphs")
        found = []
        for layer in self.layers:
            x = layer(x, batch.edge_index)  # (n, width)
            found.append(x)
        return torch.cat(found, dim=1)

    def pool(self, nodes: Tensor, batch: Any) -> Tensor:
        """Sums over the nodes of each graph, (G, d), of node embeddings (n, d)."""
        return nodes.new_zeros(batch.num_graphs, nodes.shape[1]).index_add(0, batch.batch, nodes)


class GINLayer(nn.Module):
    """One sum over neighbors, ReLU and batch-norm: (n, F) → (n, width)."""

    def __init__(self, convolution: nn.Module, width: int) -> None:
        super().__init__()
        self.convolution, self.norm = convolution, nn.BatchNorm1d(width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        normed: Tensor = self.norm(torch.relu(self.convolution(x, edge_index)))
        return normed


class Discriminator(nn.Module):
    """InfoGraph's map of an embedding before inner products: three layers plus a linear shortcut, (n, d) → (n, d).

    Examples:
        >>> Discriminator(96)(torch.zeros(5, 96)).shape
        torch.Size([5, 96])
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        steps: list[nn.Module] = []
        for _ in range(3):
            steps += [nn.Linear(features, features), nn.ReLU()]
        self.block, self.shortcut = nn.Sequential(*steps), nn.Linear(features, features)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.block(x) + self.shortcut(x)
        return result

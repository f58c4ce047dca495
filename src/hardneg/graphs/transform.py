"""From a PyG graph to the input of a trained encoder: with the node features that the training set had."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hardneg import checks
from hardneg.extras import required
from hardneg.graphs.data import MOST_DEGREES, GraphSet, features_of_nodes

OWN, CONSTANT, DEGREE, STANDARDIZED = "own", "constant", "degree", "standardized degree"


def describe(graphs: GraphSet) -> dict[str, Any]:
    """Which node features a set has: constant ones, degrees, or its own.

    Examples:
        >>> path, point = torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 2, 3])
        >>> describe(GraphSet(torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]), path, point))
        {'node_features': 'degree'}
    """
    if graphs.node_features == 1 and bool((graphs.x == 1).all()):
        return {"node_features": CONSTANT}
    derived = features_of_nodes(None, graphs.edge_index, len(graphs.x), "degree", graphs.name)
    if derived.shape != graphs.x.shape or not torch.equal(derived, graphs.x):
        return {"node_features": OWN}
    degrees = graphs.edge_index[0].bincount(minlength=len(graphs.x))  # (n,)
    if int(degrees.max()) < MOST_DEGREES:
        return {"node_features": DEGREE}
    std, mean = torch.std_mean(degrees.float())
    return {"node_features": STANDARDIZED, "mean": float(mean), "std": float(std)}


@dataclass(frozen=True)
class GraphTransform:
    """Turns one PyG graph into the input of an encoder: a copy without ``y``, with ``x`` as in the training set.

    Args:
        width: number of features of a node
        described: the node features of the training set, see `describe`; empty if the run does not record them
    """

    width: int
    described: Mapping[str, Any]

    def __call__(self, graph: Any) -> Any:
        if not isinstance(graph, required("torch_geometric.data", "graph").Data):
            raise ValueError(
                f"graph must be a torch_geometric.data.Data, got {type(graph).__name__}: pass several graphs as a list"
            )
        nodes = int(graph.num_nodes or 0)
        checks.integers("edge_index", graph.edge_index, (2, graph.edge_index.shape[-1]), "sources and targets")
        checks.require_in_range("edge_index", graph.edge_index, nodes)
        prepared = copy.copy(graph)
        prepared.y = None
        prepared.x = self._features(graph, nodes)
        return prepared

    def _features(self, graph: Any, nodes: int) -> Tensor:
        """The features of each node, (n, width)."""
        kind = self.described.get("node_features", OWN)
        if kind == CONSTANT:
            return torch.ones(nodes, 1)
        degrees: Tensor = graph.edge_index[0].bincount(minlength=nodes)  # (n,)
        if kind == STANDARDIZED:
            return ((degrees.float() - self._number("mean")) / max(self._number("std"), 1e-6))[:, None]
        if kind == DEGREE:
            if nodes and int(degrees.max()) >= self.width:
                raise ValueError(
                    f"graph has a node of degree {int(degrees.max())}, and the encoder was trained on degrees up to "
                    f"{self.width - 1}: leave the graph out, or train with data.features=constant"
                )
            return torch.nn.functional.one_hot(degrees, self.width).float()
        x = graph.x
        if not isinstance(x, Tensor) or tuple(x.shape) != (nodes, self.width):
            given = tuple(x.shape) if isinstance(x, Tensor) else x
            raise ValueError(f"graph.x must have shape ({nodes}, {self.width}), as in training, got {given}")
        checks.require_finite("graph.x", x.float())
        return x.float()

    def _number(self, key: str) -> float:
        found = self.described.get(key)
        if not isinstance(found, int | float) or not math.isfinite(found):
            raise ValueError(f"{key} of the degrees in environment.json must be a number, got {found!r}: restore it")
        return float(found)

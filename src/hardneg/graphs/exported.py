"""Graph encoders in a form that can be exported: tensors instead of a PyG batch."""

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from hardneg.export_inputs import RaggedEncoder


class GraphTensors(RaggedEncoder):
    """A graph encoder that is called with the tensors of a PyG batch.

    x: (n, F) · edge_index: (2, E) · batch: (n,) the graph of each node · sizes: (G,) the nodes of each graph, which
    are ``batch.ptr.diff()`` · returns features (G, d)

    Examples:
        >>> from hardneg.graphs.gin import GIN
        >>> encoder = GraphTensors(GIN(inputs=1), features=1)
        >>> edges, sizes = torch.tensor([[0, 1], [1, 0]]), torch.tensor([2, 1])
        >>> encoder(torch.ones(3, 1), edges, torch.tensor([0, 0, 1]), sizes).shape
        torch.Size([2, 96])
    """

    dynamic: ClassVar[dict[str, dict[int, str]]] = {
        "x": {0: "nodes"},
        "edge_index": {1: "edges"},
        "batch": {0: "nodes"},
        "sizes": {0: "graphs"},
    }

    def __init__(self, encoder: nn.Module, features: int) -> None:
        super().__init__(encoder)
        self.features = features

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, sizes: Tensor) -> Any:
        ptr = pad(sizes.cumsum(0), (1, 0))  # (G + 1,)
        graphs = SimpleNamespace(x=x, edge_index=edge_index, batch=batch, ptr=ptr, num_graphs=sizes.shape[0])
        try:
            return self.encoder(graphs)
        except AttributeError as error:
            raise ValueError(
                f"the encoder needs more than x, edge_index, batch, ptr and num_graphs of a batch ({error}), which "
                "cannot be exported: use the encoder.safetensors of the run"
            ) from error

    def random(self, samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Graphs of 3, 4, … nodes, with twice as many edges."""
        sizes = torch.arange(3, 3 + samples)  # (G,)
        batch = torch.repeat_interleave(torch.arange(samples), sizes)  # (n,)
        first = (sizes.cumsum(0) - sizes)[batch]  # (n,) the first node of the graph of each node
        edges = [first + (torch.rand(len(batch), generator=generator) * sizes[batch]).long() for _ in range(4)]
        return {
            "x": torch.randn(len(batch), self.features, generator=generator),
            "edge_index": torch.cat(edges).view(2, -1),
            "batch": batch,
            "sizes": sizes,
        }

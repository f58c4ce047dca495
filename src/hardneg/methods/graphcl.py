"""GraphCL: two views of each graph, one encoder, negatives from the batch. Any objective."""

from typing import Any

from torch import Tensor, nn

from hardneg import randomness
from hardneg.graphs.data import GraphSet
from hardneg.graphs.features import extract_graphs
from hardneg.methods.method import NEGATIVES, Method


class GraphMethod(Method):
    """A way of training a graph encoder; what `Method` is to pictures.

    A batch is a PyG batch with ``index`` (and ``y``, if the objective uses labels), or indices alone where ``graphs``
    holds the set.
    """

    graphs: GraphSet | None = None  # moves to the device with training

    def on_fit_start(self) -> None:
        if self.trainer.world_size > 1:
            # Each would draw the same views and see the negatives of its own part alone.
            raise ValueError(f"{self.trainer.world_size} processes, and graphs are trained in one: set devices=1")
        super().on_fit_start()
        if self.graphs is not None:
            self.graphs = self.graphs.to(self.device)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        graphs = self.looked_up(self._resident_graphs(), batch) if isinstance(batch, Tensor) else batch
        if getattr(graphs, "index", None) is None:
            raise ValueError("the batch has no index, the number of each graph in its set: use a GraphSet")
        labels = None
        if self.objective.supervision != "none":
            labels = getattr(graphs, "y", None)
            if labels is None:
                raise ValueError(f"supervision={self.objective.supervision!r} needs labels, and the batch has no y")
        self.objective.set_progress(self.progress)
        return self.loss(graphs, graphs.index, labels)

    def embeddings(self, graphs: GraphSet, batch_size: int = 512) -> Tensor:
        """Features of all graphs by the encoder in evaluation mode, (N, features)."""
        return extract_graphs(self.encoder, graphs, batch_size)

    def looked_up(self, graphs: GraphSet, index: Tensor) -> Any:
        """The batch of these graphs, with what the method needs of them."""
        return graphs.batch(index)

    def _resident_graphs(self) -> GraphSet:
        if self.graphs is None:
            raise ValueError("the batch holds indices only: set module.graphs, or let the loader yield PyG batches")
        return self.graphs


class GraphCL(GraphMethod):
    """Trains an encoder so that two views of a graph agree (You et al. 2020), with any `InfoNCE`.

    Args:
        encoder: PyG batch → (B, features), such as `GIN`; what is kept after training
        head: (B, features) → (B, outputs), thrown away after training
        objective: the loss; `hn.graphcl()` is the authors'
        views: makes views of a PyG batch, as `GraphViews` does
        optimizer, rate, seed: as for `Method`
    """

    def loss(self, seen: Any, index: Tensor, labels: Tensor | None) -> Tensor:
        if self.objective.num_negatives is not None:
            self.objective.generator = randomness.generator(seen.x.device, self.seed, self.step, NEGATIVES)
        assert self.views is not None
        pair = self.views(seen, randomness.generator(seen.x.device, self.seed, self.step))
        self.clock.mark("augmentation")
        z1, z2 = self.head(self.encoder(pair)).chunk(2)
        self.note(index, z1)
        loss: Tensor = self.objective(z1, z2, **self.label_terms(labels))
        return loss


def graph_projection(features: int) -> nn.Sequential:
    """GraphCL's head: two linear maps of the same width.

    Examples:
        >>> import torch
        >>> graph_projection(96)(torch.zeros(2, 96)).shape
        torch.Size([2, 96])
    """
    return nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, features))

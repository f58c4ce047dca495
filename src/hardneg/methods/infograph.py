"""InfoGraph: node embeddings are compared with the graphs of the batch; the JSD objective."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from hardneg.graphs.gin import Discriminator
from hardneg.losses.jsd import JSD
from hardneg.methods.graphcl import GraphMethod
from hardneg.methods.method import Plan


class InfoGraph(GraphMethod):
    """Trains an encoder whose node embeddings identify the graph they belong to (Sun et al. 2020).

    Args:
        encoder: PyG batch → (B, features), with ``nodes(batch)`` → (n, features) and ``pool(nodes, batch)`` → (B,
            features), as `GIN` has them; what is kept after training. If it has ``hops``, the embedding of a node must
            depend on nodes at most that number of edges away: equivalent nodes of a graph are then compared once
        head: (B, features) → (B, outputs) of graphs, discarded after training
        node_head: (n, features) → (n, outputs) of nodes, discarded too; `Discriminator` is the authors' for both
        objective: a `JSD`
        optimizer, rate, seed: as for `Method`
    """

    uses_views = False
    takes_not_negatives = False  # it compares nodes with graphs

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        node_head: nn.Module,
        objective: JSD,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        rate: Callable[[float], float] = lambda progress: 1.0,
        seed: int = 0,
    ) -> None:
        for needed in ("nodes", "pool"):
            if not callable(getattr(encoder, needed, None)):
                raise ValueError(f"encoder has no {needed}(…), and InfoGraph compares nodes with graphs: see GIN")
        super().__init__(encoder, head, objective, None, optimizer, rate, seed)  # type: ignore[arg-type]
        self.node_head = node_head

    @classmethod
    def build(cls, plan: Plan) -> Self:
        encoder = plan.given_encoder or cls.make_encoder(plan.modality, plan.encoder, plan.shape)
        objective = plan.make_loss()
        if not isinstance(objective, JSD):
            raise ValueError("method=infograph compares nodes with graphs: use objective.preset=infograph")
        width = plan.modality.feature_size(encoder, plan.shape)
        heads = Discriminator(width), Discriminator(width)
        return cls(encoder, *heads, objective, plan.optimizer, plan.rate, plan.seed)

    def loss(self, views: Any, index: Tensor, labels: Tensor | None) -> Tensor:
        nodes = self.encoder.nodes(views)  # type: ignore[operator]  # (n, features)
        pooled = self.encoder.pool(nodes, views)  # type: ignore[operator]  # (B, features)
        graphs = self.head(pooled)
        self.record_embeddings(index, pooled)  # the representation that is evaluated, not normalized
        graph_of_node, counts = views.batch, None
        if (first_equivalent := getattr(views, "equivalent_index", None)) is not None:
            # Equivalent nodes have equal embeddings and losses for all weights, so one of them represents all.
            numbers = torch.arange(len(first_equivalent), device=first_equivalent.device)
            first = torch.nonzero(first_equivalent == numbers)[:, 0]
            counts = first_equivalent.bincount(minlength=len(first_equivalent))[first]
            nodes, graph_of_node = nodes[first], graph_of_node[first]
        loss: Tensor = self.objective(self.node_head(nodes), graphs, graph_of_node, labels, counts)
        return loss

    def look_up(self, index: Tensor) -> Any:
        graphs: Any = self.resident()  # a GraphSet
        return graphs.batch(index, hops=getattr(self.encoder, "hops", None))

    def networks(self) -> list[nn.Module]:
        return [self.encoder, self.head, self.node_head]

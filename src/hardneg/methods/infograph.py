"""InfoGraph: nodes recognise their own graph among the others of the batch. The JSD objective."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hardneg.graphs.data import GraphSet
from hardneg.losses.jsd import JSD
from hardneg.methods.graphcl import GraphMethod


class InfoGraph(GraphMethod):
    """Trains an encoder whose node embeddings tell which graph they are of (Sun et al. 2020).

    Args:
        encoder: PyG batch → (B, features), with ``nodes(batch)`` → (n, features) and ``pool(nodes, batch)`` → (B,
            features), as `GIN` has them; what is kept after training. If it has ``hops``, the embedding of a node must
            follow from what is so many edges away: nodes of a graph that cannot differ are then compared once
        head: (B, features) → (B, outputs) of graphs, thrown away after training
        node_head: (n, features) → (n, outputs) of nodes, thrown away too; `Discriminator` is the authors' for both
        objective: a `JSD`
        optimizer, rate, seed: as for `Method`
    """

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

    def loss(self, seen: Any, index: Tensor, labels: Tensor | None) -> Tensor:
        nodes = self.encoder.nodes(seen)  # type: ignore[operator]  # (n, features)
        pooled = self.encoder.pool(nodes, seen)  # type: ignore[operator]  # (B, features)
        graphs = self.head(pooled)
        self.note(index, pooled)  # the representation that is evaluated; heads give no unit vectors either
        owner, counts = seen.batch, None
        if (twin := getattr(seen, "twin_index", None)) is not None:
            # For all weights, twins have one embedding and one loss, and so one gradient: the first stands for all.
            first = torch.nonzero(twin == torch.arange(len(twin), device=twin.device))[:, 0]
            counts = twin.bincount(minlength=len(twin))[first]
            nodes, owner = nodes[first], owner[first]
        loss: Tensor = self.objective(self.node_head(nodes), graphs, owner, labels, counts)
        return loss

    def looked_up(self, graphs: GraphSet, index: Tensor) -> Any:
        return graphs.batch(index, hops=getattr(self.encoder, "hops", None))

    def networks(self) -> list[nn.Module]:
        return [self.encoder, self.head, self.node_head]

"""InfoGraph: nodes recognise their own graph among the others of the batch. The JSD objective."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hardneg.methods.graphcl import GraphMethod
from hardneg.objectives.jsd import JSD


class InfoGraph(GraphMethod):
    """Trains an encoder whose node embeddings tell which graph they are of (Sun et al. 2020).

    Args:
        encoder: PyG batch → (B, features), with ``nodes(batch)`` → (n, features) and ``pool(nodes, batch)`` → (B,
            features), as `GIN` has them; what is kept after training
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
        loss: Tensor = self.objective(self.node_head(nodes), graphs, seen.batch, labels)
        return loss

    def networks(self) -> list[nn.Module]:
        return [self.encoder, self.head, self.node_head]

"""GraphCL: two views of each graph, one encoder, negatives from the batch."""

from typing import Any

from torch import Tensor, nn

from hardneg.methods.method import Method, Plan
from hardneg.methods.simclr import SimCLR, check_in_batch


class GraphMethod(Method):
    """A method on graphs. A batch is a PyG batch with ``index`` (and ``y``), or indices into the resident set."""

    modalities = ("graphs",)

    def embedding_network(self) -> nn.Module:
        """The encoder alone: the representation that is evaluated."""
        return self.encoder

    def unpack(self, batch: Any) -> tuple[Tensor, Any, Tensor | None]:
        """Index (B,), PyG batch and, if the objective uses them, labels (B,)."""
        graphs = self.look_up(batch) if isinstance(batch, Tensor) else batch
        if getattr(graphs, "index", None) is None:
            raise ValueError("the batch has no index, the number of each graph in its set: use a GraphSet")
        labels = None
        if self.objective.supervision != "none":
            labels = getattr(graphs, "y", None)
            if labels is None:
                raise ValueError(f"supervision={self.objective.supervision!r} needs labels, and the batch has no y")
        return graphs.index, graphs, labels


class GraphCL(GraphMethod, SimCLR):
    """Trains an encoder so that two views of a graph agree (You et al. 2020), with any `InfoNCE`.

    Args:
        encoder: PyG batch → (B, features), such as `GIN`; what is kept after training
        head: (B, features) → (B, outputs), discarded after training
        objective: the loss; `hn.graphcl()` is the authors'
        views: makes views of a PyG batch, as `GraphViews` does
        optimizer, rate, seed: as for `Method`
    """

    @classmethod
    def parts(cls, plan: Plan, encoder: nn.Module) -> Any:
        objective = plan.make_infonce()
        check_in_batch(objective)
        head = graph_projection(plan.modality.feature_size(encoder, plan.shape))
        return head, objective, plan.make_views()


def graph_projection(features: int) -> nn.Sequential:
    """GraphCL's head: two linear maps of the same width.

    Examples:
        >>> import torch
        >>> graph_projection(96)(torch.zeros(2, 96)).shape
        torch.Size([2, 96])
    """
    return nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, features))

"""SimCLR: two views of each sample, one encoder, negatives from the batch."""

from typing import Any

from torch import Tensor

from hardneg.losses.infonce import InfoNCE
from hardneg.methods.method import Method, Plan


class SimCLR(Method):
    """Trains an encoder so that two views of a sample agree (Chen et al. 2020), with any `InfoNCE`."""

    def loss(self, views: Any, index: Tensor, labels: Tensor | None) -> Tensor:
        z1, z2 = self.head(self.encoder(views)).chunk(2)  # (B, d) each
        self.record_embeddings(index, z1, z2)
        loss: Tensor = self.objective(z1, z2, **self.label_arguments(labels), **self.id_arguments(index))
        return loss

    @classmethod
    def parts(cls, plan: Plan, encoder: Any) -> Any:
        head, objective, views = super().parts(plan, encoder)
        check_in_batch(objective)
        return head, objective, views


def check_in_batch(objective: InfoNCE) -> None:
    """Raise unless the loss takes negatives from the batch."""
    if objective.in_batch is None:
        raise ValueError(
            "this method takes negatives from the batch only, but the objective has in_batch=None: set "
            "objective.in_batch, or use method=moco or instance_discrimination"
        )

"""Local Aggregation (LA): instance discrimination at first, then close neighbours against the background."""

from typing import Any

import torch
from torch import Tensor

from hardneg import distributed
from hardneg.losses.local_aggregation import Form, LocalAggregation
from hardneg.methods.instance_discrimination import InstanceDiscrimination


class LocalAggregationMethod(InstanceDiscrimination):
    """Trains an encoder so that a picture comes close to its cluster (Zhuang et al. 2019), once there are clusters.

    Until then (``past.after`` steps) it is `InstanceDiscrimination` with the objective, whose temperature serves both.

    Args:
        encoder, head, objective, past, and the options of `Method`
        background: nearest rows of the bank that a picture is compared with
        form: see `hardneg.losses.local_aggregation.LocalAggregation`
    """

    def __init__(self, *parts: Any, background: int = 4096, form: Form = "paper", **options: Any) -> None:
        super().__init__(*parts, **options)
        if self.past.clusters is None or self.past.close != "ignored":
            raise ValueError(
                "Local Aggregation decides itself what close rows are: set memory.clusters, their number, and "
                f"close='ignored', got {self.past.close!r}"
            )
        if self.objective.supervision != "none":
            raise ValueError(f"Local Aggregation uses no labels, got supervision={self.objective.supervision!r}")
        self.aggregation = LocalAggregation(self.objective.temperature, background, form=form)

    def compared(self, z: Tensor, index: Tensor, labels: Tensor | None) -> Tensor:
        clusters = self.past.clusters
        if clusters is None or clusters.fitted_at is None:
            return super().compared(z, index, labels)
        self.aggregation.set_progress(self.progress)
        loss: Tensor = self.aggregation(z, self.past.bank.rows, index, clusters)
        if not self.objective.gather or distributed.world_size() == 1:
            return loss
        # The value of all processes, with the gradient of this one's part: what DDP averages.
        return loss + (distributed.total(loss) / distributed.world_size() - loss).detach()

    @torch.no_grad()
    def diagnostics(self) -> dict[str, float]:
        if self.noted is not None:
            # The objective may not have been asked in this step: let it describe the bank's rows as negatives.
            index, z = self.noted
            super().compared(z, index, None)
        return super().diagnostics()

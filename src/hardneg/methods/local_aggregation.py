"""Local Aggregation (LA): instance discrimination at first, then clusters against the nearest neighbors."""

from typing import Any

import torch
from torch import Tensor

from hardneg import distributed
from hardneg.losses.local_aggregation import Form, LocalAggregation
from hardneg.methods.instance_discrimination import BankSettings, InstanceDiscrimination, make_bank
from hardneg.methods.method import Plan
from hardneg.recipe_section import Count


class LocalAggregationSettings(BankSettings):
    """Settings of Local Aggregation."""

    background: Count = 4096
    """Number of nearest rows that a sample is compared with."""
    form: Form = "paper"
    """The formula of the paper, or that of its authors' code."""


class LocalAggregationMethod(InstanceDiscrimination):
    """Trains an encoder so that a sample comes close to its cluster (Zhuang et al. 2019), once there are clusters.

    Before that (``memory.cluster_after`` steps) it is `InstanceDiscrimination`; both use the objective's temperature.

    Args:
        encoder, head, objective, memory, and the options of `Method`
        background: number of nearest rows of the bank that a sample is compared with
        form: see `hardneg.losses.local_aggregation.LocalAggregation`
    """

    Settings = LocalAggregationSettings
    takes_not_negatives = False  # its background is chosen by distance alone

    def __init__(self, *parts: Any, background: int = 4096, form: Form = "paper", **options: Any) -> None:
        super().__init__(*parts, **options)
        if self.memory.clusters is None or self.memory.close != "ignored":
            raise ValueError(
                "Local Aggregation finds close rows by its own clusters: set memory.clusters, their number, and "
                f"close='ignored', got {self.memory.close!r}"
            )
        if self.objective.supervision != "none":
            raise ValueError(f"Local Aggregation uses no labels, got supervision={self.objective.supervision!r}")
        self.aggregation = LocalAggregation(self.objective.temperature, background, form=form)

    @classmethod
    def memory_arguments(cls, plan: Plan) -> dict[str, Any]:
        settings: LocalAggregationSettings = plan.settings
        return {"memory": make_bank(plan), "background": settings.background, "form": settings.form}

    def compared(self, z: Tensor, index: Tensor, labels: Tensor | None) -> Tensor:
        clusters = self.memory.clusters
        if clusters is None or clusters.fitted_at is None:
            return super().compared(z, index, labels)
        self.aggregation.set_progress(self.progress)
        loss: Tensor = self.aggregation(z, self.memory.bank.rows, index, clusters)
        if not self.objective.gather or distributed.world_size() == 1:
            return loss
        return distributed.total_loss(loss / distributed.world_size())

    @torch.no_grad()
    def diagnostics(self) -> dict[str, float]:
        if self.noted is not None:
            # The objective may not have been computed in this step: describe the bank's rows as negatives.
            index, z = self.noted
            super().compared(z, index, None)
        return super().diagnostics()

"""Instance discrimination (IR): one view of each sample against a memory bank of all samples."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hardneg import randomness
from hardneg.memory import Clusters, MemoryBank
from hardneg.memory.clustered_bank import ClusteredBank
from hardneg.methods.method import Method, Plan
from hardneg.recipe_section import Count, CountOrZero, Fraction, Section


class BankSettings(Section):
    """Settings of a memory bank and of the clusters of its rows."""

    bank: Fraction = 0.5
    """Momentum of the rows."""
    clusters: CountOrZero = 0
    """k of the k-means over the rows; 0 for no clusters."""
    repeats: Count = 1
    """Number of clusterings."""
    cluster_after: CountOrZero = 10
    """Epochs before the first clustering."""
    cluster_every: Count = 1
    """Epochs between two clusterings."""


class InstanceDiscriminationSettings(BankSettings):
    """Settings of instance discrimination and CMC."""

    close: Literal["ignored", "negatives", "positives"] = "ignored"
    """The role of rows of the same cluster: the only ``negatives`` (Cave), further ``positives`` (Ring(+C_i))."""


class InstanceDiscrimination(Method):
    """Trains an encoder so that a view finds its own row of a bank among all rows (Wu et al. 2018).

    The positive is the sample's own row, last updated in the previous epoch. It is never a negative, and is updated
    after the step. IRing uses `hardneg.ring_nce`; IRCave ``close="negatives"``; IRing(+C_i) `hardneg.ring_nce(
    combine_positives="log_of_mean")` and ``close="positives"``.

    Args:
        encoder, head, objective, and the options of `Method`
        memory: the bank, with its clusters if any
    """

    Settings: ClassVar[type[Section]] = InstanceDiscriminationSettings
    views_per_sample = 1

    def __init__(self, *parts: Any, memory: ClusteredBank, **options: Any) -> None:
        super().__init__(*parts, **options)
        if self.objective.in_batch is not None:
            raise ValueError(
                f"negatives come from the bank: give the objective in_batch=None, not {self.objective.in_batch!r}"
            )
        self.memory = memory

    @classmethod
    def loss_defaults(cls, settings: Any) -> dict[str, Any]:
        return bank_loss_defaults(settings)

    @classmethod
    def memory_arguments(cls, plan: Plan) -> dict[str, Any]:
        return {"memory": make_bank(plan)}

    def loss(self, views: Tensor, index: Tensor, labels: Tensor | None) -> Tensor:
        self.memory.refresh(self.step)
        z = self.head(self.encoder(views))  # (B, d)
        self.record_embeddings(index, z)
        return self.compared(z, index, labels)

    def compared(self, z: Tensor, index: Tensor, labels: Tensor | None) -> Tensor:
        """The objective of embeddings (B, d) against the bank."""
        all_labels = None if labels is None else self.known_labels()
        more = self.label_arguments(labels, all_labels) | bank_ids(self, index, self.memory)
        loss: Tensor = self.objective(z, **self.memory.loss_arguments(index, self.step), **more)
        return loss

    def update_memory(self) -> None:
        if self.noted is not None:
            self.memory.bank.update(*self.noted)
        super().update_memory()


def make_bank(plan: Plan, view: int = 0) -> ClusteredBank:
    """The bank of one view of the samples, with its clusters."""
    settings: BankSettings = plan.settings
    seed = randomness.mix(plan.seed, view)
    bank = MemoryBank(plan.count, plan.encoder.outputs, settings.bank, gather=plan.processes > 1, seed=seed)
    clusters = Clusters(settings.clusters, settings.repeats, seed) if settings.clusters > 0 else None
    steps = plan.count // plan.batch_size  # of an epoch
    close = getattr(settings, "close", "ignored")
    return ClusteredBank(bank, clusters, close, settings.cluster_after * steps, settings.cluster_every * steps, seed)


def bank_ids(method: Method, index: Tensor, memory: ClusteredBank) -> dict[str, Tensor]:
    """The id arguments of the objective with the rows of a bank as candidates: the id of a row is its number."""
    found = method.id_arguments(index, memory=True)
    return found | ({"negative_ids": torch.arange(memory.bank.size, device=index.device)} if found else {})


def bank_loss_defaults(settings: Any) -> dict[str, Any]:
    """Defaults of the loss with a bank: no in-batch negatives; several positives are combined as in Ring(+C_i)."""
    several = getattr(settings, "close", "ignored") == "positives"
    return {"in_batch": None, **({"combine_positives": "log_of_mean"} if several else {})}

"""Instance discrimination (IR): one view of each picture against a bank of all. Any objective."""

from typing import Any

from torch import Tensor

from hardneg.memory.clustered_bank import ClusteredBank
from hardneg.methods.method import Method


class InstanceDiscrimination(Method):
    """Trains an encoder so that a view finds its own row of a bank among all rows (Wu et al. 2018).

    The positive is the own row as the last epoch left it; it is never a negative, and it moves when the step is done.
    IRing is this with `hardneg.ring_nce`; IRCave with ``close="negatives"``; IRing(+C_i) with `hardneg.ring_nce(
    combine_positives="log_of_mean")` and ``close="positives"``.

    Args:
        encoder, head, objective, and the options of `Method`
        past: the bank, with its clusters if any
    """

    views_per_image = 1

    def __init__(self, *parts: Any, past: ClusteredBank, **options: Any) -> None:
        super().__init__(*parts, **options)
        if self.objective.in_batch is not None:
            raise ValueError(
                f"negatives are the bank's: give the objective in_batch=None, not {self.objective.in_batch!r}"
            )
        self.past = past

    def loss(self, seen: Tensor, index: Tensor, labels: Tensor | None) -> Tensor:
        self.past.refresh(self.step)
        z = self.head(self.encoder(seen))  # (B, d)
        self.note(index, z)
        return self.compared(z, index, labels)

    def compared(self, z: Tensor, index: Tensor, labels: Tensor | None) -> Tensor:
        """The objective of embeddings (B, d) against the bank."""
        everyones = None if labels is None else self.known_labels()
        arguments = self.past.loss_arguments(index, self.step)
        loss: Tensor = self.objective(z, **arguments, **self.label_terms(labels, everyones))
        return loss

    def remember(self) -> None:
        if self.noted is not None:
            self.past.bank.update(*self.noted)
        super().remember()

"""CMC: two encoders for two views that a picture splits into, each compared with the other's bank. Any objective."""

from typing import Any

from torch import Tensor, nn

from hardneg.images.two_views import TwoHeads, TwoViews
from hardneg.memory.clustered_bank import ClusteredBank
from hardneg.methods.method import Method


class CMC(Method):
    """Trains two encoders so that lightness and colours of a picture find each other (Tian et al. 2020).

    The loss is instance discrimination of the first view against the second's bank, plus the reverse. CMCRing,
    CMCCave and CMCRing(+C_i) are made as for `InstanceDiscrimination`; each bank has its own clusters.

    Args:
        encoder: `TwoViews`, which splits the pictures; they must come in [0, 1]
        head: `TwoHeads`
        objective, and the options of `Method`
        pasts: the banks of the first and the second view, with their clusters if any
    """

    views_per_image = 1
    encoder: TwoViews
    head: TwoHeads

    def __init__(self, *parts: Any, pasts: tuple[ClusteredBank, ClusteredBank], **options: Any) -> None:
        super().__init__(*parts, **options)
        if not isinstance(self.encoder, TwoViews) or not isinstance(self.head, TwoHeads):
            kinds = type(self.encoder).__name__, type(self.head).__name__
            raise ValueError(f"encoder and head must be TwoViews and TwoHeads, got {' and '.join(kinds)}")
        if self.objective.in_batch is not None:
            raise ValueError(
                f"negatives are the banks': give the objective in_batch=None, not {self.objective.in_batch!r}"
            )
        self.pasts = nn.ModuleList(pasts)
        self._second: Tensor | None = None

    def loss(self, seen: Tensor, index: Tensor, labels: Tensor | None) -> Tensor:
        first_past, second_past = self._pasts()
        first, second = self.head.both(*self.encoder.both(seen))  # (B, d) each
        self.note(index, first)
        self._second = second.detach()
        terms = self.label_terms(labels, None if labels is None else self.known_labels())
        loss: Tensor = seen.new_zeros(())
        for z, past in ((first, second_past), (second, first_past)):  # swapped
            past.refresh(self.step)
            loss = loss + self.objective(z, **past.loss_arguments(index, self.step), **terms)
        return loss

    def remember(self) -> None:
        if self.noted is not None and self._second is not None:
            first_past, second_past = self._pasts()
            first_past.bank.update(*self.noted)
            second_past.bank.update(self.noted[0], self._second)
            self._second = None
        super().remember()

    def networks(self) -> list[nn.Module]:
        return [self.encoder.first, self.encoder.second, self.head.first, self.head.second]

    def _pasts(self) -> tuple[ClusteredBank, ClusteredBank]:
        first, second = self.pasts
        assert isinstance(first, ClusteredBank)
        assert isinstance(second, ClusteredBank)
        return first, second

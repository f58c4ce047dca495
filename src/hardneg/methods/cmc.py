"""CMC: an image is split into two views; each has its encoder and is compared with the other's bank."""

from typing import Any

from torch import Tensor, nn

from hardneg.images.two_views import TwoHeads, TwoViews, channels_of, split_of
from hardneg.memory.clustered_bank import ClusteredBank
from hardneg.methods.instance_discrimination import (
    InstanceDiscriminationSettings,
    bank_ids,
    bank_loss_defaults,
    make_bank,
)
from hardneg.methods.method import Method, Plan
from hardneg.modality import EncoderSection, Modality, make_encoder


class CMC(Method):
    """Trains two encoders, of the lightness and of the colors, to match the two views of an image (Tian et al. 2020).

    The loss is instance discrimination of the first view against the second's bank, plus the reverse. CMCRing,
    CMCCave and CMCRing(+C_i) are made as for `InstanceDiscrimination`; each bank has its own clusters.

    Args:
        encoder: `TwoViews`, which splits images in [0, 1]
        head: `TwoHeads`
        objective, and the options of `Method`
        memories: the banks of the first and the second view, with their clusters if any
    """

    Settings = InstanceDiscriminationSettings
    views_per_sample = 1
    encoder: TwoViews
    head: TwoHeads

    def __init__(self, *parts: Any, memories: tuple[ClusteredBank, ClusteredBank], **options: Any) -> None:
        super().__init__(*parts, **options)
        if not isinstance(self.encoder, TwoViews) or not isinstance(self.head, TwoHeads):
            kinds = type(self.encoder).__name__, type(self.head).__name__
            raise ValueError(f"encoder and head must be TwoViews and TwoHeads, got {' and '.join(kinds)}")
        if self.objective.in_batch is not None:
            raise ValueError(
                f"negatives come from the banks: give the objective in_batch=None, not {self.objective.in_batch!r}"
            )
        self.memories = nn.ModuleList(memories)
        self._second: Tensor | None = None

    @classmethod
    def parts(cls, plan: Plan, encoder: nn.Module) -> Any:
        if not isinstance(encoder, TwoViews):
            raise ValueError(f"method=cmc needs an encoder of two views, a TwoViews, got {type(encoder).__name__}")
        heads = [
            (plan.make_head(each, (count, *plan.shape[1:])), plan.modality.feature_size(each, (count, *plan.shape[1:])))
            for each, count in zip((encoder.first, encoder.second), channels_of(encoder.split), strict=True)
        ]
        head = TwoHeads(heads[0][0], heads[1][0], (heads[0][1], heads[1][1]))
        views = plan.make_views()
        if getattr(views, "mean", None) is not None:
            raise ValueError("method=cmc splits images in [0, 1]: leave mean and std out of views.options")
        return head, plan.make_infonce(), views

    @classmethod
    def make_encoder(cls, modality: Modality, section: EncoderSection, shape: tuple[int, ...]) -> nn.Module:
        split = split_of(shape[0])

        def one(channels: int) -> nn.Module:
            # An encoder defined by the user gets the number of channels as an option.
            own = ":" in section.name
            options = {"options": {"channels": channels, **section.options}} if own else {}
            return make_encoder(modality, section.model_copy(update=options), (channels, *shape[1:]))

        first, second = map(one, channels_of(split))
        return TwoViews(first, second, split)

    @classmethod
    def loss_defaults(cls, settings: Any) -> dict[str, Any]:
        return bank_loss_defaults(settings)

    @classmethod
    def memory_arguments(cls, plan: Plan) -> dict[str, Any]:
        return {"memories": (make_bank(plan, view=0), make_bank(plan, view=1))}

    def loss(self, views: Tensor, index: Tensor, labels: Tensor | None) -> Tensor:
        first_memory, second_memory = self._memories()
        first, second = self.head.both(*self.encoder.both(views))  # (B, d) each
        self.record_embeddings(index, first, second)
        self._second = second.detach()
        terms = self.label_arguments(labels, None if labels is None else self.known_labels())
        terms |= bank_ids(self, index, first_memory)
        loss: Tensor = views.new_zeros(())
        for z, memory in ((first, second_memory), (second, first_memory)):  # swapped
            memory.refresh(self.step)
            loss = loss + self.objective(z, **memory.loss_arguments(index, self.step), **terms)
        return loss

    def update_memory(self) -> None:
        if self.noted is not None and self._second is not None:
            first_memory, second_memory = self._memories()
            first_memory.bank.update(*self.noted)
            second_memory.bank.update(self.noted[0], self._second)
            self._second = None
        super().update_memory()

    def networks(self) -> list[nn.Module]:
        return [self.encoder.first, self.encoder.second, self.head.first, self.head.second]

    def _memories(self) -> tuple[ClusteredBank, ClusteredBank]:
        first, second = self.memories
        assert isinstance(first, ClusteredBank)
        assert isinstance(second, ClusteredBank)
        return first, second

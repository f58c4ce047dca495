"""SimCSE: each text is encoded twice with different dropout; negatives from the batch."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from hardneg.methods.method import Method, Plan
from hardneg.methods.simclr import check_in_batch
from hardneg.recipe_section import Section
from hardneg.text.encoders import encode, tokenizer_of
from hardneg.text.text_set import TextSet


class TextMethod(Method):
    """A method on texts. A batch is a tensor of indices into the resident set, or (index, texts)."""

    modalities = ("text",)
    uses_views = False

    def embedding_network(self) -> nn.Module:
        """The encoder alone: the representation that is evaluated."""
        return self.encoder

    def texts(self) -> TextSet:
        """The training set."""
        found = self.resident()
        assert isinstance(found, TextSet)
        return found

    def look_up(self, index: Tensor) -> Any:
        """The tokens of these rows of the training set, which is tokenized in the first call."""
        return self.texts().token_batch(index, tokenizer_of(self.encoder))

    def ids_of(self, rows: Tensor) -> Tensor:
        """The ids of these rows, which equal texts share."""
        same = None if self.samples is None else self.texts().duplicates
        return rows if same is None else same[rows.cpu()].to(rows.device)

    def unpack(self, batch: Any) -> tuple[Tensor, Any, Tensor | None]:
        """Index (B,), tokens and, if the objective uses them, labels (B,) of a batch."""
        index, samples, labels = super().unpack(batch)
        if isinstance(samples, list | tuple) and samples and isinstance(samples[0], str):
            rows = torch.arange(len(samples), device=self.device)
            samples = TextSet(list(samples)).token_batch(rows, tokenizer_of(self.encoder))
        return index, samples, labels


class SimCSESettings(Section):
    """Settings of SimCSE."""

    head: Literal["mlp", "none"] = "mlp"
    """A linear layer with tanh after the encoder, in training only, as in the paper."""


class SimCSE(TextMethod):
    """Trains a text encoder so that two passes of a text with different dropout agree (Gao et al. 2021).

    Equal texts are never negatives of each other.

    Args:
        encoder: `Tokens` → (B, features) with a ``tokenizer``, or a ``SentenceTransformer``; it must have dropout
        head: (B, features) → (B, outputs), discarded after training
        objective: the loss; `hn.simcse()` is the authors'
        views: None
        optimizer, rate, seed: as for `Method`
    """

    Settings = SimCSESettings

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        if not any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in self.encoder.modules()):
            raise ValueError(
                "the encoder has no dropout, so the two views of a text would be equal: set encoder.options.dropout=0.1"
            )
        self.encoder.train()  # pretrained models come in evaluation mode, without dropout

    @classmethod
    def parts(cls, plan: Plan, encoder: nn.Module) -> Any:
        objective = plan.make_infonce()
        check_in_batch(objective)
        width = plan.modality.feature_size(encoder, plan.shape)
        head = nn.Sequential(nn.Linear(width, width), nn.Tanh()) if plan.settings.head == "mlp" else nn.Identity()
        return head, objective, None

    def loss(self, views: Any, index: Tensor, labels: Tensor | None) -> Tensor:
        z1, z2 = self.head(encode(self.encoder, views.repeated(2))).chunk(2)  # (B, d) each
        self.record_embeddings(index, z1, z2)
        arguments = self.label_arguments(labels)
        if self.samples is not None and self.texts().duplicates is not None:
            arguments["ids"] = self.ids_of(index)
        loss: Tensor = self.objective(z1, z2, **arguments | self.id_arguments(index))
        return loss

"""Quick-thoughts: two encoders; the neighbors of a sentence in its text are its positives."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hardneg.methods.method import Plan
from hardneg.methods.simcse import TextMethod
from hardneg.modality import EncoderSection, Modality, make_encoder
from hardneg.text.encoders import TwoEncoders, tokenizer_of
from hardneg.text.tokens import Tokens


class Neighborhood(NamedTuple):
    """Sentences with their neighbors.

    anchors: the sentences of a batch · context: these and their neighbors, each once · rows: (U,) of the context in the
    training set · places: (B, 2) of the sentences before and after each anchor in the context · present: (B, 2) bool,
    False at the ends of a document
    """

    anchors: Tokens
    context: Tokens
    rows: Tensor
    places: Tensor
    present: Tensor


class QuickThoughts(TextMethod):
    """Trains two encoders f and g so that f of a sentence agrees with g of its neighbors (Logeswaran & Lee 2018).

    Scores are inner products f(x)·g(y). The positives of a sentence are the sentences before and after it. Its
    negatives are all other sentences of the batch, and the neighbors of those; never itself, nor an equal text. The
    representation is the concatenation of f and g.

    Batches of consecutive sentences (``batches.sampler=consecutive``) are those of the paper: nearly all neighbors are
    in the batch already. Other samplers work too, and encode up to three times as many sentences.

    Args:
        encoder: `TwoEncoders`
        head: None
        objective: the loss, with ``in_batch=None`` and ``normalize=False``
        views: None
        optimizer, rate, seed: as for `Method`
    """

    encoder: TwoEncoders

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        if not isinstance(self.encoder, TwoEncoders):
            raise ValueError(f"method=quick_thoughts needs TwoEncoders, got {type(self.encoder).__name__}")
        if self.objective.in_batch is not None:
            raise ValueError(
                f"the negatives are sentences that the method passes: give the objective in_batch=None, not "
                f"{self.objective.in_batch!r}"
            )

    @classmethod
    def make_encoder(cls, modality: Modality, section: EncoderSection, shape: tuple[int, ...]) -> nn.Module:
        return TwoEncoders(*(make_encoder(modality, section, shape) for _ in range(2)))

    @classmethod
    def parts(cls, plan: Plan, encoder: nn.Module) -> Any:
        if plan.processes > 1:
            raise ValueError("method=quick_thoughts trains in one process: set trainer.devices=1 and trainer.nodes=1")
        return nn.Identity(), plan.make_infonce(), None

    @classmethod
    def loss_defaults(cls, settings: Any) -> dict[str, Any]:
        return {"in_batch": None, "normalize": False, "temperature": 1.0, "weight_range": 2.0}

    def look_up(self, index: Tensor) -> Neighborhood:
        texts, tokenizer = self.texts(), tokenizer_of(self.encoder)
        around = texts.neighbors(index)  # (B, 2)
        present = around >= 0
        rows = torch.unique(torch.cat([index, around[present]]))  # (U,), ascending
        places = torch.searchsorted(rows, around).clamp(max=len(rows) - 1)
        anchors, context = (texts.token_batch(which, tokenizer) for which in (index, rows))
        return Neighborhood(anchors, context, rows, places, present)

    def loss(self, views: Any, index: Tensor, labels: Tensor | None) -> Tensor:
        if self.objective.supervision != "none":
            raise ValueError("method=quick_thoughts uses no labels: choose an objective with supervision=none")
        anchors, context = self.encoder.first(views.anchors), self.encoder.second(views.context)  # (B, d), (U, d)
        self.record_embeddings(index, anchors)
        own, ids = (self.ids_of(rows) for rows in (index, views.rows))  # (B,), (U,)
        of_positives = ids[views.places].masked_fill(~views.present, -1)  # (B, 2)
        loss: Tensor = self.objective(
            anchors,
            context[views.places],
            positive_mask=views.present,
            negatives=context,
            ids=torch.cat([own[:, None], of_positives], dim=1),
            negative_ids=ids,
            not_negatives=None if self.not_negatives is None else self.not_negatives.of(own, within=False),
        )
        return loss

    def networks(self) -> list[nn.Module]:
        return [self.encoder.first, self.encoder.second]

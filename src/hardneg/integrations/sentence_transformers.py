"""Losses and batches for the trainer of sentence-transformers.

loss = HardNegativeLoss(model, hn.hcl(beta=1.0, tau_plus=0.0, temperature=0.05, in_batch="other"))
args = SentenceTransformerTrainingArguments("out", batch_sampler=ProximityBatches(restart=0.2))
SentenceTransformerTrainer(model, args, train_dataset=data, loss=loss, callbacks=[RefreshCallback()]).train()
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hardneg import checks, distributed, spelling
from hardneg.extras import required
from hardneg.integrations.sentence_batches import ProgressCallback, ProximityBatches, RefreshCallback
from hardneg.integrations.text_columns import Guide, has_tokens, rows_share_ids, token_counts, token_ids
from hardneg.losses.infonce import InfoNCE
from hardneg.losses.presets import simcse
from hardneg.losses.sources import BySource

__all__ = ["CachedHardNegativeLoss", "HardNegativeLoss", "ProgressCallback", "ProximityBatches", "RefreshCallback"]

_CachedLossMixin: Any = required("sentence_transformers.base.losses", "text").CachedLossMixin

Features = Mapping[str, Any]  # of one column, as the tokenizer returns them


@dataclass(frozen=True)
class Texts:
    """What the loss needs of the texts of a batch, besides their embeddings.

    ids: (B, columns), equal for equal texts; None if no text occurs in two rows · present: (B, columns) bool, False
    where a text is empty; None if none is · guide: embeddings of each column by the guide model, (B, e)
    """

    ids: Tensor | None = None
    present: Tensor | None = None
    guide: Sequence[Tensor] | None = None


class HardNegativeLoss(nn.Module):
    """Any `InfoNCE` as the loss of a SentenceTransformerTrainer, in place of MultipleNegativesRankingLoss.

    Data: (anchor, positive) pairs, (anchor, positive, negative) triplets, or n-tuples with several negatives. The
    negatives of an anchor are its own and, unless the loss has ``in_batch=None``, the positives and negatives of the
    other rows. An empty text in a column of negatives is no negative, so rows may have different numbers of them. For a
    hardening by source, the other rows' positives are the source ``"batch"``, the anchor's own negatives ``"own"``, and
    the other rows' negatives ``"others"``. A single column with labels needs a loss with ``supervision``.

    Args:
        model: the SentenceTransformer
        loss: an `InfoNCE`, by default ``hn.simcse(temperature=0.05)``, which is MultipleNegativesRankingLoss
        symmetric: average with the opposite direction, in which positives are compared with all anchors, but not with
            negatives
        mask_duplicates: a text is never a negative of a row that has the same text as anchor or positive; the same
            means the same tokens
        guide: a SentenceTransformer whose scores choose the negatives, for a loss with `hardneg.Guided`, such as
            ``hn.gist()``; it is not trained. Texts are tokenized again if its tokens differ
        gather_across_devices: candidates from all processes, as ``gather=True`` of the loss
        parts: return a mapping of the directions' shares of the loss, which the trainer logs and adds up

    Examples:
        >>> import hardneg as hn
        >>> from hardneg.integrations.sentence_transformers import HardNegativeLoss
        >>> model = torch.nn.Identity()     # a SentenceTransformer
        >>> HardNegativeLoss(model, hn.simcse(0.05)).get_config_dict()["temperature"]
        0.05
    """

    def __init__(
        self,
        model: nn.Module,
        loss: InfoNCE | None = None,
        *,
        symmetric: bool = False,
        mask_duplicates: bool = True,
        guide: nn.Module | None = None,
        gather_across_devices: bool = False,
        parts: bool = False,
        **unknown: Any,
    ) -> None:
        super().__init__()
        _check_arguments(type(self), model, unknown)
        loss = simcse() if loss is None else loss
        if not isinstance(loss, InfoNCE):
            raise ValueError(f"loss must be an hn.InfoNCE or one of its presets, got {type(loss).__name__}")
        if loss.reduction == "none":
            raise ValueError("loss has reduction='none', but training needs one number: use 'mean' or 'sum'")
        self.symmetric = checks.boolean("symmetric", symmetric)
        if self.symmetric and (loss.in_batch != "other" or loss.symmetric):
            raise ValueError(
                f"symmetric=True needs a loss with in_batch='other' and symmetric=False, got {loss.in_batch!r} and "
                f"{loss.symmetric}: set it here or in the loss"
            )
        if _needs_guide(loss) != (guide is not None):
            remedy = "pass guide=SentenceTransformer(…)" if guide is None else "add it to the loss, or leave guide out"
            raise ValueError(f"hn.Guided needs a guide model, and a guide model needs hn.Guided: {remedy}")
        self.model = model
        self.loss = loss
        self.mask_duplicates = checks.boolean("mask_duplicates", mask_duplicates)
        if checks.boolean("gather_across_devices", gather_across_devices):
            loss.gather = True
        self.parts = checks.boolean("parts", parts)
        # In a tuple, because the trainer would optimize the parameters of a submodule.
        self._guide = None if guide is None else (Guide(model, guide),)
        self._empty_length: int | None = None  # tokens of an empty text

    @property
    def gather_across_devices(self) -> bool:
        """Whether candidates come from all processes."""
        return self.loss.gather is not False

    def forward(
        self, sentence_features: Iterable[Features], labels: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        features = list(sentence_features)
        texts = self._texts(features)  # before the model, which changes the features
        found = self._directions(_embed(self.model, features), texts, labels)
        return found if self.parts else _total(found)

    def compute_loss_from_embeddings(self, embeddings: Sequence[Tensor], labels: Tensor | None = None) -> Tensor:
        """The loss of columns of embeddings (B, d), whose texts are not compared."""
        return _total(self._directions(embeddings, Texts(), labels))

    def get_config_dict(self) -> dict[str, Any]:
        """The settings, for the model card."""
        settings = {name: getattr(self.loss, name) for name in self.loss.SETTINGS if name != "generator"}
        plain = {name: given if _is_plain(given) else repr(given) for name, given in settings.items()}
        own = {"symmetric": self.symmetric, "mask_duplicates": self.mask_duplicates}
        return plain | own | {"gather_across_devices": self.gather_across_devices}

    def _texts(self, features: Sequence[Features]) -> Texts:
        ids = present = None
        if self.mask_duplicates and len(features) > 1:
            ids = torch.stack([token_ids(column) for column in features], dim=1)  # (B, columns)
            # All processes must pass ids, or none. Where no text occurs twice, the loss is faster without them.
            if not distributed.gathers(self.loss.gather) and not rows_share_ids(ids):
                ids = None
        if len(features) > 2 and has_tokens(features[2]):
            if self._empty_length is None:
                self._empty_length = int(token_counts(self.model.preprocess([""]))[0])  # type: ignore[operator]
            present = torch.stack([token_counts(column) for column in features], dim=1) > self._empty_length
            present = None if bool(present[:, 2:].all()) else present
        guide = None if self._guide is None else self._guide[0].embed(features)
        return Texts(ids, present, guide)

    def _directions(self, embeddings: Sequence[Tensor], texts: Texts, labels: Tensor | None) -> dict[str, Tensor]:
        """The loss of each direction, or half of it if there are two: they add up to the loss."""
        supervised = {} if self.loss.supervision == "none" else {"labels": labels}
        if supervised and labels is None:
            raise ValueError(
                f"the loss has supervision={self.loss.supervision!r}, and the data set has no labels: add a column "
                "'label' with the number of each row's class"
            )
        if len(embeddings) == 1:
            return {"loss": self.loss(embeddings[0], guide=texts.guide, **supervised)}
        anchors, positives = embeddings[:2]
        ids = None if texts.ids is None else texts.ids[:, :2]
        backward = {}
        if self.symmetric:
            flipped = None if ids is None else ids.flip(1)
            guide = None if texts.guide is None else (texts.guide[1], texts.guide[0])
            backward["doc_to_query"] = self.loss(positives, anchors, ids=flipped, guide=guide, **supervised) / 2
        given = {} if len(embeddings) == 2 else self._negatives(embeddings, texts)
        guide = None if texts.guide is None else (texts.guide[0], texts.guide[1])
        forward = self.loss(anchors, positives, ids=ids, guide=guide, **supervised, **given)
        return {"query_to_doc": forward / 2 if self.symmetric else forward} | backward

    def _negatives(self, embeddings: Sequence[Tensor], texts: Texts) -> dict[str, Any]:
        """The arguments of the loss for explicit negatives."""
        if self.loss.symmetric:
            raise ValueError(
                "a loss with symmetric=True would compare positives with the negatives, too: pass symmetric=True to "
                "HardNegativeLoss instead"
            )
        rows = torch.stack(tuple(embeddings[2:]), dim=1)  # (B, n, d)
        parts = {"negatives": rows}  # (B, n, …) each
        if texts.ids is not None:
            parts["negative_ids"] = texts.ids[:, 2:].contiguous()
        if texts.guide is not None:
            parts["negative_guide"] = torch.stack(tuple(texts.guide[2:]), dim=1)
        if self.loss.supervision != "none":
            parts["negative_labels"] = torch.full_like(rows[:, :, 0], -1, dtype=torch.long)
        present = None if texts.present is None else texts.present[:, 2:]  # (B, n)
        by_source = isinstance(self.loss.hardening, BySource)
        if self.loss.in_batch is None:
            own = parts if present is None else parts | {"negative_mask": present}
            return {key: {"own": part} for key, part in own.items()} if by_source else own
        if not by_source:  # an anchor's own negatives are among those of all rows
            return {key: part.flatten(0, 1) if present is None else part[present] for key, part in parts.items()}
        if present is not None and self.gather_across_devices:
            raise ValueError(
                "empty negatives cannot be gathered with a hardening by source: give every row the same number of "
                "negatives, or use one hardening"
            )
        return _own_and_others(parts, present)


class CachedHardNegativeLoss(_CachedLossMixin, HardNegativeLoss):  # type: ignore[misc]
    """`HardNegativeLoss` for large batches: the same gradient with the activations of one mini-batch at a time.

    In place of CachedMultipleNegativesRankingLoss. Each mini-batch is encoded twice, with the same dropout; the loss
    itself takes memory linear in the batch.

    Args:
        model: as in `HardNegativeLoss`
        loss: as there
        symmetric: as there
        mask_duplicates: as there
        guide: as there
        gather_across_devices: as there
        mini_batch_size: texts that are encoded at once
        mini_batch_num_tokens: if given, tokens that are encoded at once instead
        show_progress_bar: of the mini-batches
    """

    def __init__(
        self,
        model: nn.Module,
        loss: InfoNCE | None = None,
        *,
        symmetric: bool = False,
        mask_duplicates: bool = True,
        guide: nn.Module | None = None,
        gather_across_devices: bool = False,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        show_progress_bar: bool = False,
        **unknown: Any,
    ) -> None:
        options: dict[str, Any] = {"mask_duplicates": mask_duplicates, "gather_across_devices": gather_across_devices}
        HardNegativeLoss.__init__(self, model, loss, symmetric=symmetric, guide=guide, **options, **unknown)
        if any(isinstance(part, nn.EmbeddingBag) for part in model.modules()):  # its texts have no rows
            raise ValueError(
                "the texts of a model with static embeddings (EmbeddingBag) cannot be split into mini-batches: use "
                "HardNegativeLoss"
            )
        self.mini_batch_size = checks.whole("mini_batch_size", mini_batch_size)
        self.mini_batch_num_tokens = (
            None if mini_batch_num_tokens is None else checks.whole("mini_batch_num_tokens", mini_batch_num_tokens)
        )
        self.show_progress_bar = checks.boolean("show_progress_bar", show_progress_bar)
        self._gradients: list[Tensor] = []  # of the parameters of the loss, from its last calculation

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        features = list(sentence_features)
        parameters = self._parameters_of_loss()
        if parameters and "calculate_loss" in vars(self):  # replaced by MatryoshkaLoss, which weights the dimensions
            raise ValueError(
                "a learnable temperature would get wrong gradients in MatryoshkaLoss with cached gradients: use a "
                "number, or HardNegativeLoss"
            )
        # What goes in as labels comes back as labels of `calculate_loss`.
        loss: Tensor = self.forward_cached(features, (self._texts(features), labels))  # type: ignore[operator]
        if parameters and loss.requires_grad:
            gradients = self._gradients
            loss.register_hook(lambda grad: _accumulate(parameters, gradients, grad))  # type: ignore[no-untyped-call]
        return loss

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: tuple[Texts, Tensor | None], *, with_backward: bool = False
    ) -> Tensor:
        """The loss of the embeddings of each column's mini-batches; with_backward: also set their gradients."""
        texts, given_labels = labels
        loss = _total(self._directions([torch.cat(column) for column in reps], texts, given_labels))
        if not with_backward:
            return loss
        leaves, parameters = [part for column in reps for part in column], self._parameters_of_loss()
        # Not loss.backward(): the gradients of the loss's parameters must be scaled as the trainer scales the loss.
        found = torch.autograd.grad(loss, leaves + parameters, allow_unused=True, materialize_grads=True)
        for leaf, gradient in zip(leaves, found, strict=False):
            leaf.grad = gradient
        self._gradients = list(found[len(leaves) :])
        return loss.detach()

    def get_config_dict(self) -> dict[str, Any]:
        own = {"mini_batch_size": self.mini_batch_size, "mini_batch_num_tokens": self.mini_batch_num_tokens}
        return super().get_config_dict() | own

    def _parameters_of_loss(self) -> list[Tensor]:
        return [parameter for parameter in self.loss.parameters() if parameter.requires_grad]


def _embed(model: nn.Module, features: list[Features]) -> list[Tensor]:
    """The embeddings of each column, (B, d); columns of candidates are encoded together where that is possible."""
    merged = required("sentence_transformers.base.losses.merged_forward", "text")
    try:
        columns: list[Tensor] = merged.embed_columns(model, features)
    except KeyError as error:
        if error.args != ("sentence_embedding",):
            raise
        raise ValueError("the model returns no sentence_embedding: add a Pooling module to it") from error
    return columns


def _own_and_others(parts: Mapping[str, Tensor], present: Tensor | None) -> dict[str, dict[str, Tensor]]:
    """The arguments of a loss in which an anchor's own negatives and those of other rows are two sources.

    parts: arguments for the negatives of all rows, (B, n, …) each · present: (B, n) bool, or None for all
    """
    batch, number = parts["negatives"].shape[:2]
    found = {key: {"own": part, "others": part.flatten(0, 1)} for key, part in parts.items()}
    rows = torch.arange(batch * number, device=parts["negatives"].device)
    found["exclude"] = {"others": rows.view(batch, number)}
    if present is not None:
        found["negative_mask"] = {"own": present, "others": present.flatten().expand(batch, -1)}
    return found


def _check_arguments(made: type, model: object, unknown: Mapping[str, Any]) -> None:
    """Raise if the model is missing, or for an argument that only the loss of sentence-transformers has."""
    if isinstance(model, InfoNCE):
        raise TypeError(f"{made.__name__} takes the model before the loss: {made.__name__}(model, loss)")
    for name, given in unknown.items():
        remedy = spelling.nearest(name, inspect.signature(made).parameters)
        hint = f"did you mean {remedy}?" if remedy else "settings of the loss belong to the loss"
        if name == "scale":
            hint = f"it is 1 / temperature of the loss: pass hn.simcse(1 / {given})"
        raise TypeError(f"{made.__name__}() has no argument {name!r}: {hint}")


def _needs_guide(loss: InfoNCE) -> bool:
    by_source = loss.hardening.values() if isinstance(loss.hardening, BySource) else [loss.hardening]
    return any(part.needs_guide for hardening in by_source for part in hardening)


def _total(parts: Mapping[str, Tensor]) -> Tensor:
    first, *others = parts.values()
    return sum(others, start=first)


def _accumulate(parameters: Sequence[Tensor], gradients: Sequence[Tensor], factor: Tensor) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        scaled = gradient * factor.to(gradient)
        parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled


def _is_plain(given: object) -> bool:
    return given is None or isinstance(given, bool | int | float | str)

"""The callback that measures losses and embeddings at chosen epochs, for the report."""

import time
from typing import Any

import lightning as L
import torch
from torch import Tensor

from hardneg.diagnostics.class_means import class_means
from hardneg.diagnostics.estimates import Estimate, alignment_estimate, uniformity_estimate
from hardneg.diagnostics.gradient_shares import check_form, shares_of_last_call
from hardneg.diagnostics.hubs import hubs
from hardneg.diagnostics.loss_ordering import loss_ordering
from hardneg.losses.hardening import Exponential
from hardneg.losses.infonce import InfoNCE
from hardneg.methods.method import Method
from hardneg.randomness import generator
from hardneg.training.recipe import Recipe

SAMPLES = 2000  # of the training set that are encoded
ANCHORS = 256  # instances of a batch whose losses are compared
GRADIENTS = 64  # anchors whose gradients are divided by negative
LARGEST = 10  # negatives with the largest gradients
NEAREST = 10  # k of the hubs
TILT = Exponential(1.0)  # of H-UCL and H-SCL, the same in all runs, so that they can be compared


class EmbeddingDiagnostics(L.Callback):
    """Measures the last batch and a part of the training set every ``trainer.insight_every`` epochs.

    The loss acts on the outputs of the head, so the four losses, Assumption 1, gradient shares, alignment, uniformity
    and the class means of theory are of the last batch's, as the loss got them. Hubs and the class geometry of the
    representation are of the encoder's outputs for 2,000 training samples, the same in every run on these data. All
    labels are those of the training set. The first process measures for all.

    Args:
        settings: the recipe
        train_set: the samples

    ``epoch_metrics`` holds the result for `MetricsWriter`; intervals of 95 % are under the key with ``_interval``.
    Runs before `MemoryUpdate`, which drops the embeddings.
    """

    def __init__(self, settings: Recipe, train_set: Any) -> None:
        self.settings, self.train_set = settings, train_set
        self.epoch_metrics: dict[str, Any] = {}
        self._part: Any = None  # the samples that are encoded

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Method)
        if not trainer.is_last_batch:
            return
        self.epoch_metrics = {}
        if not self._is_due(trainer) or not trainer.is_global_zero:
            return
        pl_module.clock.mark("network")
        began = time.perf_counter()
        found = {**self._of_batch(pl_module), **self._of_encoder(pl_module)}
        if found:
            self.epoch_metrics = {"insight": {**found, "insight_seconds": round(time.perf_counter() - began, 6)}}
        pl_module.clock.restart()  # this is not part of a step

    def _is_due(self, trainer: L.Trainer) -> bool:
        every, epoch = self.settings.trainer.insight_every, trainer.current_epoch + 1
        return every > 0 and (epoch == 1 or epoch % every == 0 or epoch == trainer.max_epochs)

    @torch.no_grad()
    def _of_batch(self, module: Method) -> dict[str, Any]:
        """Of the embeddings that the loss got in the last batch."""
        if module.noted is None or len(module.noted[1]) < 2 or not bool(module.noted[1].isfinite().all()):
            return {}
        (index, z1), z2 = module.noted, module.noted_positives
        found: dict[str, Any] = _flat(uniformity=uniformity_estimate(z1))
        labels = None if self.train_set.labels is None else self.train_set.labels[index.cpu()].to(z1.device)
        if labels is not None and bool((labels >= 0).any()):
            geometry = class_means(z1, labels)
            found |= _flat(head_spread=geometry.spread, head_deviation=geometry.deviation)
        if z2 is not None and z2.shape == z1.shape:
            found |= _flat(alignment=alignment_estimate(z1, z2))
        if isinstance(module.objective, InfoNCE) and module.objective.normalize:
            found |= self._of_loss(module.objective, z1, z2, labels)
        return found

    def _of_loss(self, objective: InfoNCE, z1: Tensor, z2: Tensor | None, labels: Tensor | None) -> dict[str, Any]:
        """The four losses, Assumption 1, and the gradient's share of the largest and of false negatives."""
        found: dict[str, Any] = {}
        size = len(z1)
        if labels is not None and z2 is not None and z2.shape == z1.shape:
            chosen = None if size <= ANCHORS else torch.randperm(size, generator=generator("cpu", size))[:ANCHORS]
            ordering = loss_ordering(
                z1, z2, labels, temperature=objective.last_call().temperature, hardening=TILT, anchors=chosen
            )
            if ordering is not None:
                found |= _flat(**{name: number for name, number in ordering._asdict().items() if name != "anchors"})
        try:
            check_form(objective)
        except ValueError:  # a loss whose gradient is not a multiple of one sum
            return found
        rows = torch.randperm(size, generator=generator("cpu", size))[:GRADIENTS]
        shares = shares_of_last_call(objective, rows)
        found |= _flat(gradient_largest=shares.of_largest(LARGEST))
        columns = shares.signed.shape[1]
        # The candidates are those of the batch: both views, or the other one. A queue or other processes add more.
        both = objective.in_batch == "both" and z2 is not None
        if labels is not None and objective.in_batch is not None and columns == (2 * size if both else size):
            known = labels.cpu()
            same = (known[rows, None] == known) & (known[rows, None] >= 0)  # (n, B)
            found |= _flat(gradient_false=shares.of(same.repeat(1, columns // size)))
        return found

    def _of_encoder(self, module: Method) -> dict[str, Any]:
        """Of the encoder's outputs for a part of the training set."""
        kind = self.settings.kind
        if self._part is None:
            size = len(self.train_set)
            rows = torch.randperm(size, generator=generator("cpu", size))[:SAMPLES].sort().values
            self._part = kind.sample(self.train_set, rows)
        if len(self._part) < 2:
            return {}
        with torch.no_grad(), module.trainer.precision_plugin.forward_context():
            workers = getattr(self.settings.data, "workers", 0)
            features = kind.embed(module.encoder, self._part, module.views, workers)
        if not bool(features.isfinite().all()):
            return {}
        labels, population = self._part.labels, len(self.train_set)
        nearest = hubs(features, min(NEAREST, len(features) - 1))
        found = _flat(hub_skewness=nearest.skewness, hub_unused=nearest.unused, hub_largest=int(nearest.counts.max()))
        if labels is not None and bool((labels >= 0).any()):
            geometry = class_means(features, labels, centered=True, population=population)
            found |= _flat(
                class_spread=geometry.spread, class_deviation=geometry.deviation, class_nearest=geometry.nearest
            )
        return {"samples": len(features), **found}


def _flat(**found: Estimate | float | None) -> dict[str, Any]:
    """Numbers by name as JSON; an estimate also has its interval. What is None is left out."""
    flat: dict[str, Any] = {}
    for name, number in found.items():
        if isinstance(number, Estimate):
            flat[name] = number.value
            if abs(number.low) < float("inf") and abs(number.high) < float("inf"):
                flat[f"{name}_interval"] = [number.low, number.high]
        elif number is not None:
            flat[name] = number
    return flat

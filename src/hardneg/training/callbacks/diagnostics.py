"""The callback that describes the negatives and the batches of an epoch."""

import math
import warnings
from collections.abc import Mapping
from itertools import chain
from typing import Any

import lightning as L

from hardneg.losses.hardening import Ring
from hardneg.methods.method import Method
from hardneg.samplers import cosine_histogram, false_negative_share, mean_cosine
from hardneg.training.batches import Batches
from hardneg.training.callbacks.sampler_refresh import Refresh

COLLAPSED = 0.95  # mean cosine of a batch; of the settings in results/evidence only rings that learned nothing had more
_RING = "; a ring that leaves out the closest negatives can be the cause, try objective.upper=1"


class Diagnostics(L.Callback):
    """Describes the objective's negatives in the last full batch of an epoch, and the batches of the whole epoch.

    Args:
        batches: the batches of the run
        train_set: the samples; with labels, the share of false negatives is counted
        refresh: of the batch sampler, if it has one

    ``epoch_metrics`` holds the result for `MetricsWriter`. Runs before `MemoryUpdate`, which drops the embeddings.
    """

    def __init__(self, batches: Batches, train_set: Any, refresh: Refresh | None = None) -> None:
        self.batches, self.train_set, self.refresh = batches, train_set, refresh
        self.epoch_metrics: dict[str, Any] = {}
        self.batches_done = 0  # of this epoch, by this process
        self.earlier = {"batches": 0, "false_negatives": 0.0}  # of this epoch, before a resume
        self.described: dict[str, Any] | None = None  # the last full batch of this epoch

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Method)
        self.batches_done += 1
        if self.earlier["batches"] + self.batches_done == self._last_full:
            self.described = {"objective": pl_module.diagnostics(), "batches": _cosines(pl_module)}
        if trainer.is_last_batch:
            found = self.described or {"objective": pl_module.diagnostics(), "batches": _cosines(pl_module)}
            self.epoch_metrics = {**found, "batches": self._batch_metrics() | found["batches"]}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Method)
        cosine = self.epoch_metrics.get("batches", {}).get("mean_cosine", 0.0)
        if cosine > COLLAPSED and trainer.is_global_zero:
            warnings.warn(
                f"the embeddings have collapsed: the mean cosine of two samples of the last batch is {cosine:.3f}"
                f"{_RING if _has_ring(pl_module.objective) else ''}",
                stacklevel=2,
            )

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.batches_done, self.earlier, self.described = 0, {"batches": 0, "false_negatives": 0.0}, None

    @property
    def _last_full(self) -> int:
        """The number of the last batch that is not smaller than others: a smaller one has fewer negatives."""
        sampler, number = self.batches.sampler, len(self.batches)
        short = not sampler.drop_last and sampler.size % sampler.batch_size != 0
        return number - 1 if short and number > 1 else number

    def state_dict(self) -> dict[str, Any]:
        return {
            "batches": self.earlier["batches"] + self.batches_done,
            "false_negatives": self._false_negatives(),
            "described": self.described,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.earlier = {name: state_dict[name] for name in ("batches", "false_negatives")}
        self.batches_done, self.described = 0, state_dict.get("described")

    def _batch_metrics(self) -> dict[str, Any]:
        found: dict[str, Any] = {"sampling_seconds": round(self.batches.seconds, 6)}
        self.batches.seconds = 0.0
        if self.refresh is not None:
            found["graph_seconds"], self.refresh.seconds = round(self.refresh.seconds, 6), 0.0
            found["encoding_seconds"], self.refresh.encoding_seconds = round(self.refresh.encoding_seconds, 6), 0.0
        if self.train_set.labels is not None:
            found["false_negatives"] = self._false_negatives() / (self.earlier["batches"] + self.batches_done)
        return found

    def _false_negatives(self) -> float:
        """The sum over the batches of this epoch of their shares of false negatives."""
        labels = self.train_set.labels
        if labels is None:
            return 0.0
        used = self.batches.drawn[: self.batches_done]  # the rest was drawn ahead
        shares = [false_negative_share(labels[batch]) for batch in used]
        return self.earlier["false_negatives"] + sum(share for share in shares if not math.isnan(share))


def _has_ring(objective: Any) -> bool:
    hardening = getattr(objective, "hardening", ())  # other objectives have none
    parts = chain.from_iterable(hardening.values()) if isinstance(hardening, Mapping) else hardening
    return any(isinstance(part, Ring) for part in parts)


def _cosines(module: Method) -> dict[str, Any]:
    """Mean and histogram of the cosines of a batch."""
    if module.noted is None or len(module.noted[1]) < 2:
        return {}
    embeddings = module.noted[1].float()
    return {"mean_cosine": mean_cosine(embeddings), "cosines": cosine_histogram(embeddings, bins=20)[0].tolist()}

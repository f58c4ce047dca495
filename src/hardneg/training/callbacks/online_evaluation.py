"""The callback that measures kNN accuracy during training."""

import warnings
from typing import Any

import lightning as L
import torch

from hardneg.evaluation import knn_accuracy
from hardneg.methods.method import Method
from hardneg.training.recipe import Recipe


class OnlineEvaluation(L.Callback):
    """Measures weighted kNN accuracy every ``trainer.knn_every`` epochs and after the last one.

    The accuracy on the test set is only reported. Adaptive schedules observe the accuracy on the validation part.
    The first process measures for all.

    Args:
        settings: the recipe
        train_set: the samples whose labels are the neighbors' votes
        validation: the part of the training set that adaptive schedules observe, if the objective has any
        data: passed as an object instead of ``data.source``
    """

    def __init__(
        self,
        settings: Recipe,
        train_set: Any,
        validation: Any = None,
        data: Any = None,
    ) -> None:
        self.settings, self.train_set, self.validation, self.data = settings, train_set, validation, data
        self.test_set: Any = None
        self.epoch_metrics: dict[str, Any] = {}

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Method)
        self.epoch_metrics = {}
        epoch, every = trainer.current_epoch + 1, self.settings.trainer.knn_every
        if every == 0 or (epoch % every and epoch != trainer.max_epochs):
            return
        measured = self._accuracies(pl_module) if trainer.is_global_zero else {}
        self.epoch_metrics = trainer.strategy.broadcast(measured)
        if self.validation is not None:
            pl_module.objective.observe(accuracy=self.epoch_metrics["validation_knn"])

    def _accuracies(self, module: Method) -> dict[str, float | None]:
        found = {"knn": self._knn(module, self._test_set())}
        if self.validation is not None:
            found["validation_knn"] = self._knn(module, self.validation)
        return found

    def _test_set(self) -> Any:
        """The set that ``knn`` is reported on, if there are labels."""
        kind = self.settings.kind
        if self.train_set.labels is None or not kind.has_test_set:
            return None
        if self.test_set is None:
            try:
                self.test_set = kind.load_test(self.settings.data, self.train_set, given=self.data)
            except (ValueError, FileNotFoundError) as error:
                warnings.warn(f"no online kNN: {error}", stacklevel=2)
        return self.test_set

    def _knn(self, module: Method, queries: Any) -> float | None:
        """Weighted kNN accuracy on a set, with the labels of the training set."""
        if queries is None:
            return None
        kind, workers = self.settings.kind, getattr(self.settings.data, "workers", 0)
        with torch.autocast(module.device.type, torch.bfloat16, enabled="bf16" in self.settings.trainer.precision):
            train, test = (
                kind.labeled(kind.embed(module.encoder, part, module.views, workers), part)
                for part in (self.train_set, queries)
            )
        return knn_accuracy(*train, *test) if len(train[1]) and len(test[1]) else None

"""The callback that measures kNN accuracy during training."""

import warnings
from typing import Any

import lightning as L
import torch

from hardneg.evaluation import knn_accuracy
from hardneg.graphs.data import GraphSet
from hardneg.images import ImageSet, StreamedImages, load_split
from hardneg.images.features import extract_set
from hardneg.images.splits import comparable
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
    """

    def __init__(
        self,
        settings: Recipe,
        train_set: ImageSet | StreamedImages | GraphSet,
        validation: ImageSet | StreamedImages | None = None,
    ) -> None:
        self.settings, self.train_set, self.validation = settings, train_set, validation
        self.test_set: ImageSet | StreamedImages | None = None
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

    def _test_set(self) -> ImageSet | StreamedImages | None:
        """The set that ``knn`` is reported on, if there are labels."""
        if self.train_set.labels is None or isinstance(self.train_set, GraphSet):
            return None
        data = self.settings.data
        if self.test_set is None:
            try:
                shape, division = self.train_set.shape, self.train_set.division
                found = load_split(data.source, "test", data.size, channels=shape[0], division=division)
                self.test_set = comparable(self.train_set, found)
            except (ValueError, FileNotFoundError) as error:
                warnings.warn(f"no online kNN: {error}", stacklevel=2)
        return self.test_set

    def _knn(self, module: Method, queries: ImageSet | StreamedImages | None) -> float | None:
        """Weighted kNN accuracy on a set, with the labels of the training set."""
        if queries is None or isinstance(self.train_set, GraphSet):
            return None
        prepare, workers = getattr(module.views, "plain", None), self.settings.data.workers
        with torch.autocast(module.device.type, torch.bfloat16, enabled="bf16" in self.settings.trainer.precision):
            train, test = (
                extract_set(module.encoder, part, prepare=prepare, workers=workers)
                for part in (self.train_set, queries)
            )
        return knn_accuracy(*train, *test) if len(train[1]) and len(test[1]) else None

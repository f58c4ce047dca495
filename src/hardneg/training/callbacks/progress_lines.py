"""Callbacks that describe a run in plain lines: its plan before the first step, and its progress for log files."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import lightning as L

from hardneg.training.batches import Batches
from hardneg.training.callbacks.checkpoints import Checkpoints
from hardneg.training.callbacks.metrics_writer import MetricsWriter
from hardneg.training.recipe import Recipe

C = TypeVar("C", bound=L.Callback)
FIRST, EVERY = 10.0, 30.0  # seconds to the first line, and between two lines
FEW_STEPS = 4  # of an epoch: with fewer, a smaller batch is suggested


class Plan(L.Callback):
    """Prints the numbers of samples and steps, the encoder and the device of a run before its first step.

    Args:
        say: prints a line
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        run = _callback(trainer, Checkpoints)
        self.say(steps_of(run.settings, run.batches))
        if (listed := getattr(pl_module, "not_negatives", None)) is not None:
            self.say(f"{_counted(listed.count, 'pair')} of {run.settings.data.not_negatives}: never negatives")
        chosen = run.settings.trainer
        length = _counted(chosen.epochs, "epoch")
        if trainer.global_step:
            length += f", resumed in epoch {trainer.current_epoch + 1:,}"
        self.say(f"encoder {run.settings.encoder.name} on {pl_module.device}, precision {chosen.precision}, {length}")


def steps_of(settings: Recipe, batches: Batches) -> str:
    """The samples, the batch size, the steps of an epoch and the samples left out, and a better batch size."""
    size, batch_size, steps = batches.sampler.size, batches.sampler.batch_size, len(batches)
    text = f"{size:,} {settings.kind.unit}, batch size {batch_size:,}: {_counted(steps, 'step')} per epoch"
    if settings.batches.sampler != "uniform":  # whose epochs may repeat samples
        return text
    left = size - steps * batch_size if settings.batches.drop_last else 0
    text += f", {left:,} left out of each" if left else ""
    smaller = 1 << max(size // FEW_STEPS, 2).bit_length() - 1
    if left * FEW_STEPS > size and smaller < batch_size:
        text += f" (trainer.batch_size={smaller}: {_counted(size // smaller, 'step')}, {size % smaller:,} left out)"
    return text


class ProgressLines(L.Callback):
    """Prints a line of progress every half minute, for logs: where a progress bar cannot be shown.

    Args:
        say: prints a line
        name: of the run, if there are several
    """

    def __init__(self, say: Callable[[str], None], name: str = "") -> None:
        self.say, self.name = say, name
        self._facts = LastEpoch()
        self._began = self._due = 0.0  # times
        self._first = 0  # the step at which this process began

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._began, self._first = time.monotonic(), trainer.global_step
        self._due = self._began + FIRST

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        if now < self._due or not trainer.is_global_zero:
            return
        self._due = now + EVERY
        done, total = trainer.global_step, int(trainer.estimated_stepping_batches)
        left = (now - self._began) / max(done - self._first, 1) * (total - done)
        parts = [
            *([self.name] if self.name else []),
            f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}",
            f"step {done}/{total}",
            self._facts.text(trainer) or f"loss {_loss_so_far(trainer):.3f}",
            f"{timedelta(seconds=round(left))} left",
        ]
        self.say(" · ".join(parts))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._facts.text(trainer)  # an accuracy that is measured now and then must not be missed


class LastEpoch:
    """The metrics of the last epoch as text: reading the loss of every step would make an accelerator wait."""

    def __init__(self) -> None:
        self._knn: float | None = None  # the last accuracy measured

    def text(self, trainer: L.Trainer) -> str:
        """Loss, kNN accuracy if known, and samples per second; empty in the first epoch."""
        writers = (each for each in trainer.callbacks if isinstance(each, MetricsWriter))  # type: ignore[attr-defined]
        line = next((writer.last for writer in writers), {})
        if not line:
            return ""
        self._knn = line.get("knn", self._knn)
        accuracy = [] if self._knn is None else [f"kNN {100 * self._knn:.1f} %"]
        return " · ".join([f"loss {line['loss']:.3f}", *accuracy, f"{line['samples_per_second']:,.0f} samples/s"])


def _loss_so_far(trainer: L.Trainer) -> float:
    """The mean loss of the batches of this epoch."""
    writer = _callback(trainer, MetricsWriter)
    return float("nan") if writer.losses is None else float(writer.losses) / max(writer.batches, 1)


def _callback(trainer: L.Trainer, kind: type[C]) -> C:
    """The callback of a run of this class."""
    return next(each for each in trainer.callbacks if isinstance(each, kind))  # type: ignore[attr-defined]


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"

"""The callback that writes one line of metrics per epoch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import lightning as L
import torch
from torch import Tensor

from hardneg.matmul import precise_dtype
from hardneg.methods.method import Method
from hardneg.training import run_folder


class MetricSource(Protocol):
    """A callback whose metrics of the epoch are known before `MetricsWriter.on_train_epoch_end`."""

    epoch_metrics: dict[str, Any]


class MetricsWriter(L.Callback):
    """Writes a line per epoch to ``metrics.jsonl`` and passes its numbers to Lightning's callbacks and loggers.

    They get the numbers under the keys of the file, those within a group as ``batches/mean_cosine``. The losses are
    summed on the device and read once per epoch. A line is written after the checkpoint of its epoch, and the
    checkpoint contains it, so that nothing is lost if the process is killed in between.

    Args:
        folder: of the run
        batch_size: samples per batch, of all processes together
        sources: callbacks that measure more, called before this one
    """

    def __init__(self, folder: Path, batch_size: int, sources: Sequence[MetricSource] = ()) -> None:
        self.folder, self.batch_size, self.sources = folder, batch_size, sources
        self.last: dict[str, Any] = {}  # the last line
        self.losses: Tensor | None = None  # (): sum over the batches of this epoch
        self.batches = 0  # of this epoch
        self.resumed_at = 0  # of these, before this process started
        self._step = 0  # of the checkpoint that is resumed
        self._pending = False  # whether the last line is to be written

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._step = checkpoint["global_step"]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero and (self.folder / run_folder.METRICS).exists():
            self._restore()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write_pending(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write_pending(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Method)
        loss = outputs["loss"].detach()
        if trainer.accumulate_grad_batches > 1:
            loss = loss * trainer.accumulate_grad_batches  # Lightning divides by it
        if pl_module.objective.observes_loss:
            pl_module.objective.observe(loss=float(loss))
        self.losses = running_sum(self.losses, loss)
        self.batches += 1

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Method)
        if not trainer.is_last_batch:  # a callback stopped the epoch
            return
        assert self.losses is not None
        seconds = pl_module.clock.read()
        measured = (self.batches - self.resumed_at) * self.batch_size  # samples since this process started
        line: dict[str, Any] = {
            "epoch": trainer.current_epoch + 1,
            "step": trainer.global_step,
            "loss": float(self.losses) / self.batches,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "seconds": {name: round(spent, 6) for name, spent in seconds.items()},
            "samples_per_second": round(measured / max(sum(seconds.values()), 1e-9), 1),
        }
        for source in self.sources:
            line |= source.epoch_metrics
        self.losses, self.batches, self.resumed_at = None, 0, 0
        self.last, self._pending = line, True
        _log(trainer, numbers(line))

    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": 0.0 if self.losses is None else float(self.losses),
            "batches": self.batches,
            "last": self.last,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = torch.tensor(state_dict["losses"], dtype=torch.float64)
        self.batches = self.resumed_at = state_dict["batches"]
        self.last = state_dict["last"]

    def _write_pending(self, trainer: L.Trainer) -> None:
        if self._pending and trainer.is_global_zero:
            with (self.folder / run_folder.METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.last) + "\n")
        self._pending = False

    def _restore(self) -> None:
        """Remove lines written after the checkpoint that is resumed, and add the checkpoint's own if it is missing."""
        kept = [line for line in run_folder.metrics(self.folder) if line["step"] <= self._step]
        if self.last and (not kept or kept[-1]["step"] < self.last["step"]):
            kept.append(self.last)
        run_folder.write(self.folder / run_folder.METRICS, "".join(json.dumps(line) + "\n" for line in kept))


def _log(trainer: L.Trainer, values: dict[str, float]) -> None:
    """Pass the numbers of the first process to the callbacks of all and to the loggers."""
    # LightningModule.log would take about 10 ms of CPU for these, a tenth of a short epoch.
    if trainer.world_size > 1:
        values = trainer.strategy.broadcast(values)
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
    for logger in trainer.loggers:
        logger.log_metrics({**values, "epoch": trainer.current_epoch}, step=trainer.global_step)
        logger.save()


def numbers(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics by name, without epoch and step, which every logger adds itself.

    Examples:
        >>> numbers({"epoch": 1, "loss": 2.5, "knn": None, "batches": {"mean_cosine": 0.1, "cosines": [3, 4]}})
        {'loss': 2.5, 'batches/mean_cosine': 0.1}
    """
    found: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, dict):
            found |= {f"{key}/{name}": number for name, number in numbers(value).items()}
        elif isinstance(value, int | float) and key not in ("epoch", "step"):
            found[key] = float(value)
    return found


def running_sum(total: Tensor | None, loss: Tensor) -> Tensor:
    """The sum of losses so far, () on the device of the losses; ``total`` is on the CPU after a checkpoint was read."""
    if total is None or total.device != loss.device:
        before = 0.0 if total is None else float(total)
        total = torch.tensor(before, dtype=precise_dtype(loss.device), device=loss.device)
    return total.add_(loss)

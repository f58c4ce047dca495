"""The callback that writes the checkpoint of a run."""

import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint

from hardneg import checks
from hardneg.methods.method import Method
from hardneg.training import run_folder
from hardneg.training.batches import Batches
from hardneg.training.recipe import Recipe, tree_of


class Checkpoints(Checkpoint):
    """Writes ``last.ckpt`` after every epoch, every ``trainer.save_every`` optimizer steps, and when training stops.

    The file is replaced atomically, so that a killed process leaves the old file or the new one. Weights with NaN or
    inf are an error and leave the old file. It must be the last callback: the checkpoint then contains the changes of
    the others.

    Args:
        settings: the recipe
        folder: of the run
        batches: the batches of the run, whose position is saved
    """

    def __init__(self, settings: Recipe, folder: Path, batches: Batches) -> None:
        self.settings, self.folder, self.batches = settings, folder, batches
        self.run: str | None = None  # the id of the run

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self.run = run_folder.read_json(self.folder / run_folder.ENVIRONMENT).get("run")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every = self.settings.trainer.save_every
        due = trainer.should_stop or (every > 0 and trainer.global_step % every == 0)
        # A checkpoint holds no accumulated gradients, and the last batch is saved with the end of its epoch.
        if due and (batch_idx + 1) % trainer.accumulate_grad_batches == 0 and not trainer.is_last_batch:
            self._save(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_last_batch:  # else a callback stopped the epoch, and it continues from its last batch
            self._save(trainer, pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["batches"] = self.batches.state_after(trainer.fit_loop.total_batch_idx + 1)
        checkpoint["run"] = self.run
        checkpoint["recipe"] = json.dumps(tree_of(self.settings))

    def _save(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(module, Method)
        if not _is_finite(module):
            raise checks.NonFiniteError(f"weights hold NaN or inf after step {trainer.global_step}")
        fresh = self.folder / run_folder.NEXT
        trainer.save_checkpoint(fresh, weights_only=False)  # with the state of the optimizer
        if trainer.is_global_zero:
            os.replace(fresh, self.folder / run_folder.CHECKPOINT)
            # From now on a missing checkpoint is an error.
            (self.folder / run_folder.METRICS).touch()
        module.clock.restart()  # evaluation and checkpoint are not part of a step


def _is_finite(module: Method) -> bool:
    """Whether no weight and no running statistic of the networks is NaN or inf."""
    tensors = (*module.parameters(), *(buffer for network in module.networks() for buffer in network.buffers()))
    finite = [tensor.detach().isfinite().all() for tensor in tensors if tensor.is_floating_point()]
    return bool(torch.stack(finite).all()) if finite else True

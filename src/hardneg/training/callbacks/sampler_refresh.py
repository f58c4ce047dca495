"""The callback that gives a batch sampler new embeddings as training goes on."""

import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor

from hardneg import distributed
from hardneg.samplers.refreshed import RefreshedBatchSampler


class Refresh(L.Callback):
    """Moves a sampler's schedules with training, and refreshes it every ``refresh_every`` steps.

    Any LightningModule and any loader will do. The sampler belongs to the run: pass Lightning's Trainer
    ``use_distributed_sampler=False``, or it replaces the sampler in several processes.

    Args:
        sampler: `ProximityBatchSampler` or `KNNBatchSampler`, made with ``refresh_every``
        embeddings: gives the embeddings of all samples, (N, d), when it is called; of several processes, the first
            one's are taken by all
    """

    def __init__(self, sampler: RefreshedBatchSampler, embeddings: Callable[[], Tensor]) -> None:
        self.sampler, self.embeddings = sampler, embeddings
        self.seconds = 0.0  # spent on embeddings and graphs since someone set it back
        self._steps: float = 1  # of the whole training

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._steps = trainer.estimated_stepping_batches

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.sampler.set_progress(min(trainer.global_step / self._steps, 1.0))
        clock = getattr(pl_module, "clock", None)
        if clock is not None:
            clock.mark("network")
        began = time.perf_counter()
        if self.sampler.after_step(self._agreed):
            self.seconds += time.perf_counter() - began
            if clock is not None:
                clock.mark("graph")

    def _agreed(self) -> Tensor:
        rows = self.embeddings()
        if distributed.world_size() > 1:
            # Running statistics differ between processes, and one bit can change a neighbour.
            rows = rows.clone(memory_format=torch.contiguous_format)
            torch.distributed.broadcast(rows, 0)
        return rows

"""The callback that seeds every training batch."""

from typing import Any

import lightning as L
import torch

from hardneg import randomness


class StepSeeding(L.Callback):
    """Seeds torch's global generators before each batch with a function of (seed, batch number, process).

    Dropout and other layers that draw from the global generators then repeat exactly after a resume.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        batches_done = trainer.fit_loop.total_batch_idx
        _seed(randomness.mix(self.seed, batches_done, trainer.global_rank), pl_module.device)


def _seed(seed: int, device: torch.device) -> None:
    """Seed the global generators that a step on this device may draw from."""
    # torch.manual_seed would seed every kind of device, and for each that was never used it stores the call with a
    # stack trace: half a millisecond of every step, and memory that is never freed.
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)  # of the current device, which Lightning has set

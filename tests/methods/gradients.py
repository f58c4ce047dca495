"""A callback that keeps every gradient of a run, for comparing runs with one another."""

from typing import Any

import lightning as L
import torch
from torch import Tensor


class Gradients(L.Callback):
    """Writes the gradients of all steps, and the state at the end, to a file beside the run: ``<run>.<rank>``."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.steps: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        weights = pl_module.named_parameters()
        self.steps.append({name: weight.grad.clone() for name, weight in weights if weight.grad is not None})

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        found = {"gradients": self.steps, "state": pl_module.state_dict()}
        torch.save(found, f"{self.run}.{trainer.global_rank}")

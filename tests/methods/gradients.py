"""Callbacks that record views and gradients of a run, for comparing runs with one another."""

from typing import Any

import lightning as L
import torch
from torch import Tensor


class Gradients(L.Callback):
    """Writes the gradients of all steps and the final state to a file beside the run: ``<run>.<rank>``."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.steps: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        weights = pl_module.named_parameters()
        self.steps.append({name: weight.grad.clone() for name, weight in weights if weight.grad is not None})

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        found = {"gradients": self.steps, "state": pl_module.state_dict()}
        torch.save(found, f"{self.run}.{trainer.global_rank}")


class FirstStep(L.Callback):
    """Writes weights, views, gradients and diagnostics of the first step on graphs to ``<run>.<rank>``."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.found: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.found["weights"] = {name: tensor.clone() for name, tensor in pl_module.state_dict().items()}
        make_views: Any = pl_module.make_views

        def record(*arguments: Any) -> Any:
            views = make_views(*arguments)
            self.found.setdefault("views", {name: getattr(views, name) for name in ("x", "edge_index", "batch")})
            return views

        pl_module.make_views = record  # type: ignore[assignment]

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        weights = pl_module.named_parameters()
        if "gradients" not in self.found:
            self.found["gradients"] = {name: w.grad.clone() for name, w in weights if w.grad is not None}
            self.found["support"] = pl_module.diagnostics()["support"]  # type: ignore[operator]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        torch.save(self.found, f"{self.run}.{trainer.global_rank}")

"""The callback that marks where the data and the network part of a step end."""

from typing import Any

import lightning as L

from hardneg.methods.method import Method


class StepTiming(L.Callback):
    """Marks the module's step timer: loading up to the start of a batch is ``data``, the rest of it ``network``.

    `MetricsWriter` reads the timer at the end of an epoch.
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Method)
        pl_module.clock.on_gpu = pl_module.device.type == "cuda"

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Method)
        pl_module.clock.mark("data")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Method)
        pl_module.clock.mark("network")

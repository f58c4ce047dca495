"""The callback that updates the memory of a method after each batch."""

from typing import Any

import lightning as L

from hardneg.methods.method import Method


class MemoryUpdate(L.Callback):
    """Updates the method's memory (queue, bank, momentum encoder) before a checkpoint of the step is written.

    Lightning calls the module's own hook only after all callbacks, and so after a checkpoint.
    """

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Method)
        pl_module.update_memory()

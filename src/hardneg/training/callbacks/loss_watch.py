"""The callback that stops a run whose loss is NaN or infinite."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from hardneg import checks

WINDOW = 32  # steps whose losses are read together on an accelerator


class DivergedError(checks.NonFiniteError):
    """The loss, the embeddings or the weights of a run became NaN or infinite."""

    exit_code = 1  # of the command line: the run failed, the input was valid


class LossWatch(L.Callback):
    """Raises `DivergedError` if the loss of a step is NaN or infinite.

    On a CPU it reads every loss. Reading from a GPU would wait for it: there the losses of a window of steps are copied
    to the host while training continues, and read a window later, and at the last batch of an epoch.

    ``position`` is the step and the epoch, counted from 1, of the last batch that was started, or of the bad loss.
    """

    def __init__(self) -> None:
        self.position = (1, 1)
        self._window: Tensor | None = None  # (WINDOW,) losses on the device
        self._positions: list[tuple[int, int]] = []  # of the losses in the window
        self._copied: tuple[Tensor, list[tuple[int, int]], torch.cuda.Event | None] | None = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.position = (trainer.global_step + 1, trainer.current_epoch + 1)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs["loss"].detach()
        if not checks.on_accelerator(loss.device):
            self._check(loss[None], [self.position])
            return
        if self._window is None:
            self._window = torch.zeros(WINDOW, dtype=loss.dtype, device=loss.device)
        self._window[len(self._positions)] = loss
        self._positions.append(self.position)
        if len(self._positions) == WINDOW:
            self._read_copied()
            self._copy()
        if trainer.is_last_batch:  # the metrics of the epoch are read now, too
            self._read_all()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._read_all()  # also if the epoch was stopped before its last batch

    def cause(self, error: Exception) -> Exception:
        """The `DivergedError` of a bad loss that was not read yet, which must have come first; else the error."""
        if not isinstance(error, DivergedError):
            try:
                self._read_all()
            except DivergedError as earlier:
                return earlier
        return error

    def _read_all(self) -> None:
        self._read_copied()
        if self._positions:
            self._copy()
            self._read_copied()

    def _copy(self) -> None:
        """Begin to copy the window to the host."""
        assert self._window is not None
        event, losses = None, self._window[: len(self._positions)]
        if losses.device.type == "cuda":
            copied = torch.empty(len(losses), dtype=losses.dtype, pin_memory=True)
            copied.copy_(losses, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        else:
            copied = losses.to("cpu", copy=True)
        self._copied, self._positions = (copied, self._positions, event), []

    def _read_copied(self) -> None:
        if self._copied is None:
            return
        (losses, positions, event), self._copied = self._copied, None
        if event is not None:
            event.synchronize()  # it was recorded a window ago: there is nothing to wait for
        self._check(losses, positions)

    def _check(self, losses: Tensor, positions: list[tuple[int, int]]) -> None:
        """Raise at the first loss (n,) on the host that is not finite."""
        for loss, position in zip(losses.tolist(), positions, strict=True):
            if not -torch.inf < loss < torch.inf:
                self.position = position
                raise DivergedError(f"the loss is {loss}")

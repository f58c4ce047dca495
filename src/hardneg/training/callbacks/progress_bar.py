"""The callback that shows a run as a progress bar: steps done, loss, kNN accuracy, images per second, time left."""

import time
from typing import Any

import lightning as L
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from hardneg.printable import printable
from hardneg.training.callbacks.progress_lines import LastEpoch

REFRESH = 0.1  # seconds between two updates of a bar


def bars(console: Console) -> Progress:
    """An empty stack of bars; disabled where the console is not a terminal."""
    return Progress(
        _Name(),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


class _Name(ProgressColumn):
    """The name of a bar as plain text: a name may contain markup."""

    def render(self, task: Task) -> Text:
        return Text(printable(task.description))


class Bar(L.Callback):
    """One bar of a stack, updated by the steps of a run.

    Args:
        progress: the stack
        name: of the run
    """

    def __init__(self, progress: Progress, name: str) -> None:
        self.progress, self.name = progress, name
        self.task: Any = None
        self._facts = LastEpoch()
        self._due = 0.0  # time of the next update

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        total, done = trainer.estimated_stepping_batches, trainer.global_step
        self.task = self.progress.add_task(self.name, total=total, completed=done, facts="")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + REFRESH
        self.progress.update(self.task, completed=trainer.global_step, facts=self._facts.text(trainer))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.progress.remove_task(self.task)

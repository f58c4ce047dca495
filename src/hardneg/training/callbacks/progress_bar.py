"""A progress bar for runs: how far, loss, kNN, pictures per second, time left."""

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
from hardneg.training.callbacks.keeper import Keeper

REFRESH = 0.1  # seconds between two moves of a bar; more often nobody sees


def bars(console: Console) -> Progress:
    """An empty stack of bars; it shows nothing where the console is no terminal."""
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
    """What a bar stands for, as text: a name may hold markup."""

    def render(self, task: Task) -> Text:
        return Text(printable(task.description))


class Bar(L.Callback):
    """One bar among others, moved by the steps of a run.

    Args:
        progress: the stack it belongs to
        name: of the run
    """

    def __init__(self, progress: Progress, name: str) -> None:
        self.progress, self.name = progress, name
        self.task: Any = None
        self._due = 0.0  # when to move next

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        total, done = trainer.estimated_stepping_batches, trainer.global_step
        self.task = self.progress.add_task(self.name, total=total, completed=done, facts="")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + REFRESH
        self.progress.update(self.task, completed=trainer.global_step, facts=_facts(trainer))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.progress.remove_task(self.task)


def _facts(trainer: L.Trainer) -> str:
    """What the last epoch showed: reading the loss of every step would make an accelerator wait."""
    keeper = next((callback for callback in trainer.callbacks if isinstance(callback, Keeper)), None)  # type: ignore[attr-defined]
    if keeper is None or not keeper.last:
        return ""
    facts = [f"loss {keeper.last['loss']:.3f}"]
    if keeper.last_knn is not None:
        facts.append(f"kNN {100 * keeper.last_knn:.1f} %")
    return " · ".join([*facts, f"{keeper.last['images_per_second']:,.0f} img/s"])

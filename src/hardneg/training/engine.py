"""Creating the Lightning trainer and the callbacks of a run, fitting, and explaining failures."""

import errno
import logging
import os
import shlex
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.profilers import PassThroughProfiler

from hardneg import checks
from hardneg.methods.method import Method
from hardneg.methods.split_norm import SplitBatchNorm
from hardneg.training import loggers, run_folder
from hardneg.training.batches import Batches
from hardneg.training.callbacks.checkpoints import Checkpoints
from hardneg.training.callbacks.diagnostics import Diagnostics
from hardneg.training.callbacks.embedding_diagnostics import EmbeddingDiagnostics
from hardneg.training.callbacks.loss_watch import DivergedError, LossWatch
from hardneg.training.callbacks.memory_update import MemoryUpdate
from hardneg.training.callbacks.metrics_writer import MetricsWriter
from hardneg.training.callbacks.online_evaluation import OnlineEvaluation
from hardneg.training.callbacks.resumed_learning_rate import ResumedLearningRate
from hardneg.training.callbacks.sampler_refresh import Refresh
from hardneg.training.callbacks.step_seeding import StepSeeding
from hardneg.training.callbacks.step_timing import StepTiming
from hardneg.training.chunked_encoders import encoders_of, in_chunks
from hardneg.training.recipe import Recipe, needs_trust, tree_of


def create_trainer(
    settings: Recipe, folder: Path, callbacks: Sequence[L.Callback] = (), user_loggers: Sequence[Logger] = ()
) -> L.Trainer:
    """The Lightning trainer that the recipe describes; a missing accelerator or logger package is an error.

    folder: of the run, the default output folder of callbacks
    """
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    chosen = settings.trainer
    assert chosen.precision != "auto"  # see `build.with_precision`
    if chosen.logger is not None:
        loggers.check(chosen.logger)
    processes = chosen.devices * chosen.nodes
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) != processes:
        # Each process would otherwise train alone, all in one folder.
        raise ValueError(
            f"torchrun started {os.environ['WORLD_SIZE']} processes, but trainer.devices={chosen.devices} and "
            f"trainer.nodes={chosen.nodes} make {processes}: set them to its --nproc-per-node and --nnodes"
        )
    try:
        trainer = L.Trainer(
            accelerator=chosen.accelerator,
            devices=chosen.devices,
            num_nodes=chosen.nodes,
            strategy="ddp" if processes > 1 else "auto",
            precision=chosen.precision,
            gradient_clip_val=settings.optimizer.clip,
            accumulate_grad_batches=chosen.accumulate,
            sync_batchnorm=chosen.sync_batchnorm,
            max_epochs=chosen.epochs,
            callbacks=list(callbacks),
            use_distributed_sampler=False,
            enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
            enable_model_summary=False,
            enable_progress_bar=False,
            logger=list(user_loggers) or False,
            default_root_dir=folder,
            num_sanity_val_steps=0,
            plugins=[_PlainFiles()],
            profiler=_Untimed(),
            deterministic="warn" if chosen.accelerator == "cpu" else None,
        )
    except (L.fabric.utilities.exceptions.MisconfigurationException, RuntimeError, ValueError, ImportError) as error:
        setting = f"trainer.accelerator={chosen.accelerator}, devices={chosen.devices}, precision={chosen.precision}"
        raise ValueError(f"{setting} is not available here: {str(error).splitlines()[0]}") from error
    cores = os.cpu_count() or chosen.devices
    if trainer.strategy.root_device.type == "cpu" and chosen.devices > cores:  # Lightning counts other devices only
        raise ValueError(
            f"trainer.devices={chosen.devices}: on a CPU each is a process, and this machine has {cores} cores: use at "
            f"most {cores}"
        )
    return trainer


def check_method(settings: Recipe, module: Method, device: torch.device) -> None:
    """Raise if the method or the device cannot do what the recipe's trainer settings say."""
    chosen = settings.trainer
    if not chosen.sync_batchnorm or chosen.devices * chosen.nodes == 1:
        return
    if device.type == "cpu":
        raise ValueError("trainer.sync_batchnorm=true needs GPUs, and this run is on CPUs: set it to false")
    if any(isinstance(layer, SplitBatchNorm) for layer in module.modules()):
        raise ValueError(
            "trainer.sync_batchnorm=true would undo memory.split, which normalizes parts of a batch separately: set "
            "memory.split=1, or sync_batchnorm=false"
        )


@dataclass
class RunCallbacks:
    """The callbacks of a run, in the order in which Lightning calls them.

    Those that measure come before the user's callbacks, so that these find the metrics of the epoch in
    ``trainer.callback_metrics``. Those that change the state of the run come after them, and `Checkpoints` is the last.
    """

    losses: LossWatch
    evaluation: OnlineEvaluation
    metrics: MetricsWriter
    refresh: Refresh | None
    diagnostics: Diagnostics
    embeddings: EmbeddingDiagnostics
    seeding: StepSeeding
    checkpoints: Checkpoints

    @property
    def stateful(self) -> list[L.Callback]:
        """The callbacks whose state a checkpoint must hold."""
        return [self.metrics, self.diagnostics]

    def add_to(self, trainer: L.Trainer) -> None:
        """Add them before and after the trainer's own callbacks."""
        users: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        writers = [callback for callback in users if isinstance(callback, Checkpoint)]
        others = [callback for callback in users if not isinstance(callback, Checkpoint)]
        refresh = [] if self.refresh is None else [self.refresh]
        updates = [*refresh, self.diagnostics, self.embeddings, MemoryUpdate(), StepTiming(), self.seeding]
        trainer.callbacks = [  # type: ignore[attr-defined]
            ResumedLearningRate(), self.losses, self.evaluation, self.metrics, *others, *updates, *writers,
            self.checkpoints,
        ]  # fmt: skip


def create_callbacks(
    settings: Recipe,
    folder: Path,
    batches: Batches,
    train_set: Any,
    refresh: Refresh | None = None,
    validation: Any = None,
    data: Any = None,
) -> RunCallbacks:
    """The callbacks of a run in a folder.

    refresh: of the batch sampler, if it has one · validation: the part of the training set that adaptive schedules
    observe, if the objective has any · data: passed as an object instead of ``data.source``
    """
    evaluation = OnlineEvaluation(settings, train_set, validation, data)
    diagnostics = Diagnostics(batches, train_set, refresh)
    embeddings = EmbeddingDiagnostics(settings, train_set)
    return RunCallbacks(
        LossWatch(),
        evaluation,
        MetricsWriter(folder, settings.trainer.batch_size, [diagnostics, evaluation, embeddings]),
        refresh,
        diagnostics,
        embeddings,
        StepSeeding(settings.seed),
        Checkpoints(settings, folder, batches),
    )


class _PlainFiles(TorchCheckpointIO):
    """Writes a checkpoint directly to its path: Lightning's default writes to the system's temporary folder first."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        try:
            with Path(path).open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
        except RuntimeError as error:  # torch.save raises it after an OSError, such as that of a full disk
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


class _Untimed(PassThroughProfiler):
    """Measures nothing, at no cost: Lightning's default opens a context around each of thirty calls per step."""

    _nothing = nullcontext()

    def profile(self, action_name: str) -> AbstractContextManager[None]:  # type: ignore[override]
        return self._nothing


def fit(
    trainer: L.Trainer, module: Method, loader: Any, settings: Recipe, folder: Path, resume_from: Path | None
) -> None:
    """Train from the checkpoint, or from the start; Ctrl-C raises KeyboardInterrupt."""
    if settings.trainer.logger is not None:
        # Other processes, which may not see the folder, log nothing.
        logger = loggers.create(settings.trainer.logger, folder) if trainer.is_global_zero else DummyLogger()
        trainer.loggers = [*trainer.loggers, logger]
    for each in trainer.loggers:
        each.log_hyperparams(tree_of(settings))
    trainer.log_every_n_steps = min(trainer.log_every_n_steps, len(loader))  # type: ignore[attr-defined]
    size = getattr(settings.trainer, "chunk_size", None)
    with nullcontext() if size is None else in_chunks(encoders_of(module), size), warnings.catch_warnings():
        # The loader continues after the batch of the checkpoint, which Lightning cannot see.
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
        warnings.filterwarnings("ignore", ".*LeafSpec.*")
        start = None if resume_from is None else str(resume_from)
        try:
            trainer.fit(module, loader, ckpt_path=start, weights_only=True)
        except SystemExit:  # raised by Lightning after Ctrl-C
            if not trainer.interrupted:
                raise
    if trainer.interrupted:
        raise KeyboardInterrupt(
            f"stopped at step {trainer.global_step}; resume with: {resume_command(settings, folder)}"
        )


class RunError(ValueError):
    """A run stopped for a reason outside its recipe, such as a full disk."""

    exit_code = 1  # of the command line: the run failed, the input was valid


def explain(error: Exception, settings: Recipe, folder: Path, losses: LossWatch) -> None:
    """Raise the error of a run again, with the step, what to do, and the command that resumes the run.

    An error that is not expected is returned from, with the command as the last line of its traceback.
    """
    again, kept = resume_command(settings, folder), ""
    if (folder / run_folder.CHECKPOINT).exists():
        kept = f"{folder} keeps the checkpoint of step {run_folder.checkpoint(folder)['global_step']}"
    if isinstance(error, OSError | MemoryError | torch.OutOfMemoryError):
        step, epoch = losses.position
        message = f"training stopped at step {step}, in epoch {epoch} ({_reason(error)}): {_remedy(error)}"
        raise RunError(message + f". {kept}; resume with: {again}" * bool(kept)) from error
    if not isinstance(error, ValueError):
        if kept:
            error.add_note(f"{kept}; resume with: {again}")
        return
    kind, message = ValueError, str(error)
    if isinstance(error, checks.NonFiniteError):
        error, kind = losses.cause(error), DivergedError
        step, epoch = losses.position
        message = (
            f"training diverged at step {step}, in epoch {epoch} ({error}): lower optimizer.lr, or set optimizer.clip"
        )
    if kept:
        message += (
            f". {kept}; {again} takes the same steps again, so for other settings choose another folder, or remove "
            "this one"
        )
    raise kind(message) from error


def resume_command(settings: Recipe, folder: Path) -> str:
    """The command that resumes the run in a folder."""
    return f"hardneg train --resume {shlex.quote(str(folder))}" + " --trust" * needs_trust(settings)


def _reason(error: Exception) -> str:
    """The first sentence of an error; that of an accelerator without memory has ten lines."""
    return " ".join(str(error).split()).partition(". ")[0] or type(error).__name__


def _remedy(error: Exception) -> str:
    if not isinstance(error, OSError):
        return "free memory; if that is not enough, begin another run with a smaller trainer.batch_size"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "make room on the disk"
    return "check the disk and the permissions of the folder"

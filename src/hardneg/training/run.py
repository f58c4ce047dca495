"""Runs: a folder with a recipe, its metrics and checkpoints, that can be killed at any moment and goes on exactly.

Every draw is a function of (seed, step), so a checkpoint needs no random state: weights, optimiser and the number of
steps done say it all. To Lightning a run is one long epoch whose loader begins at the step where the checkpoint was
taken; our epochs are counted from the steps.
"""

import json
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor, nn

from hardneg.data.graphs import GraphSet
from hardneg.objectives.infonce import InfoNCE
from hardneg.training import build, files, graphs, recipe
from hardneg.training.batches import Batches, sampler
from hardneg.training.keeper import Keeper
from hardneg.training.recipe import Recipe


@dataclass(frozen=True)
class Result:
    """A finished run: its folder, its trained encoder and the last line of its metrics."""

    folder: Path
    encoder: nn.Module
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Loaded:
    """A run read from its folder: its recipe, its encoder, and what makes pictures (uint8) into the encoder's input.

    shape: (C, H, W) of a picture, or (features,) of a node of a graph, which needs no preparing
    """

    folder: Path
    settings: Recipe
    encoder: nn.Module
    prepare: Callable[[Tensor], Tensor] | None
    shape: tuple[int, ...]


def train(settings: Recipe, folder: str | Path, resume: bool = False, callbacks: Sequence[L.Callback] = ()) -> Result:
    """Run a recipe in a folder, or take up again what was begun there.

    Nothing is written before recipe, data and device have proved sound.

    Args:
        settings: the recipe; ignored when there is something to resume
        folder: of the run; nothing is written elsewhere
        resume: go on from the folder's last checkpoint
        callbacks: of Lightning's, beside our own
    """
    folder = Path(folder)
    if resume and not files.is_run(folder):
        missing = files.ENVIRONMENT if (folder / files.RECIPE).exists() else files.RECIPE
        raise ValueError(f"{folder} holds no run to resume: {missing} is missing")
    if resume:
        settings = recipe.load(folder / files.RECIPE)
        _take_threads(folder)
    trainer = _trainer(settings, callbacks)
    if trainer.is_global_zero and not resume:  # the other processes find what the first one wrote
        _check_free(folder)
    train_set = build.data(settings)
    module = build.method(settings, train_set, trainer.world_size)
    chosen = sampler(settings, len(train_set), trainer.global_rank, trainer.world_size)
    batches = Batches(chosen, settings.trainer.epochs)
    refresh = build.refresh(batches, module, train_set, settings, trainer.world_size)
    # Weights and two moments of them, in the old checkpoint and in the new one; and room for the rest.
    weights = sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())
    files.check_space(folder, 6 * weights + (16 << 20))
    module._optimizer(module)  # bad settings are refused now
    if isinstance(module.objective, InfoNCE):
        module.objective.check_device(trainer.strategy.root_device)
    keeper = Keeper(settings, folder, batches, train_set, refresh)
    # The keeper comes last: what it saves is then complete.
    trainer.callbacks += [keeper] if refresh is None else [refresh, keeper]  # type: ignore[attr-defined]
    if trainer.is_global_zero:
        folder.mkdir(parents=True, exist_ok=True)
    with files.alone(folder) if trainer.is_global_zero else nullcontext():
        if trainer.is_global_zero:
            _begin(settings, folder, resume, trainer.world_size)
        _fit(trainer, module, build.loader(batches, train_set, settings), folder / files.CHECKPOINT, resume)
        if trainer.is_global_zero:
            shape = (train_set.node_features,) if isinstance(train_set, GraphSet) else train_set.shape
            _write_encoder(module.encoder, folder, shape)
    return Result(folder, module.encoder, keeper.last)


def _check_free(folder: Path) -> None:
    if files.is_run(folder):
        raise ValueError(f"{folder} holds a run already: resume it, or choose another folder")
    if not files.is_free(folder):
        raise ValueError(f"{folder} exists and is no run: choose another folder")


def _begin(settings: Recipe, folder: Path, resume: bool, processes: int) -> None:
    """Write what the run is, or that it goes on."""
    environment = files.environment(processes=processes)
    if not resume:
        _check_free(folder)  # again, as another process may have been here while the data were read
        files.write_json(folder / files.ENVIRONMENT, environment)
        files.write(folder / files.RECIPE, recipe.dump(settings))  # last: it makes the folder a run
        return
    if (folder / files.ENCODER).exists():
        return
    # Figures of an unfinished run would pass for those of the finished one.
    (folder / files.EVALUATION).unlink(missing_ok=True)
    first = json.loads((folder / files.ENVIRONMENT).read_text(encoding="utf-8"))
    first.setdefault("resumed", []).append(environment)
    files.write_json(folder / files.ENVIRONMENT, first)


def load_run(folder: str | Path) -> Loaded:
    """The recipe and the encoder of a run: the finished one, or as it was at the last checkpoint."""
    folder = Path(folder)
    if not (folder / files.RECIPE).exists():
        raise ValueError(f"{folder} is no run: {files.RECIPE} is missing")
    settings = recipe.load(folder / files.RECIPE)
    if (folder / files.ENCODER).exists():
        from safetensors import safe_open

        with safe_open(folder / files.ENCODER, "pt") as file:
            shape = tuple(int(side) for side in file.metadata()["shape"].split(","))
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    elif (folder / files.CHECKPOINT).exists():
        saved = torch.load(folder / files.CHECKPOINT, map_location="cpu", weights_only=True)["state_dict"]
        weights = {name[8:]: tensor for name, tensor in saved.items() if name.startswith("encoder.")}
        train_set = build.data(settings)
        shape = (train_set.node_features,) if isinstance(train_set, GraphSet) else train_set.shape
    else:
        raise ValueError(f"{folder} holds no weights yet: resume it until its first epoch is done")
    pictures = len(shape) == 3
    encoder = build.encoder_of(settings, shape[0], shape[-1]) if pictures else graphs.encoder_of(settings, shape[0])
    try:
        encoder.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{folder}: the weights do not fit encoder {settings.encoder.name!r}: {error}") from error
    prepare = build.views_of(settings, shape[-1]).plain if pictures else None
    return Loaded(folder, settings, encoder.eval(), prepare, shape)


def _trainer(settings: Recipe, callbacks: Sequence[L.Callback]) -> L.Trainer:
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    chosen = settings.trainer
    processes = chosen.devices * chosen.nodes
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) != processes:
        # Each process would otherwise train alone, all in one folder.
        raise ValueError(
            f"torchrun started {os.environ['WORLD_SIZE']} processes, but trainer.devices={chosen.devices} and "
            f"trainer.nodes={chosen.nodes} make {processes}: set them to its --nproc-per-node and --nnodes"
        )
    try:
        return L.Trainer(
            accelerator=chosen.accelerator,
            devices=chosen.devices,
            num_nodes=chosen.nodes,
            strategy="ddp" if processes > 1 else "auto",
            precision=chosen.precision,  # type: ignore[arg-type]
            gradient_clip_val=settings.optimizer.clip,
            max_epochs=1,  # ours are counted from the steps
            callbacks=list(callbacks),
            use_distributed_sampler=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            logger=False,
            num_sanity_val_steps=0,
            plugins=[_PlainFiles()],
            profiler=_Untimed(),
            deterministic="warn" if chosen.accelerator == "cpu" else None,
        )
    except (L.fabric.utilities.exceptions.MisconfigurationException, RuntimeError, ValueError, ImportError) as error:
        asked = f"trainer.accelerator={chosen.accelerator}, devices={chosen.devices}, precision={chosen.precision}"
        raise ValueError(f"{asked} cannot be had here: {str(error).splitlines()[0]}") from error


class _PlainFiles(TorchCheckpointIO):
    """Writes a checkpoint where it is told to: Lightning's own way goes through the system's temporary folder."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        with Path(path).open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())


class _Untimed(PassThroughProfiler):
    """Measures nothing, at no cost: Lightning's own still opens a context around each of thirty calls a step."""

    _nothing = nullcontext()

    def profile(self, action_name: str) -> AbstractContextManager[None]:  # type: ignore[override]
        return self._nothing


def _fit(trainer: L.Trainer, module: L.LightningModule, loader: Any, checkpoint: Path, resume: bool) -> None:
    with warnings.catch_warnings():
        # Our loader begins where the checkpoint was taken, which Lightning cannot see.
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
        warnings.filterwarnings("ignore", ".*LeafSpec.*")
        start = str(checkpoint) if resume and checkpoint.exists() else None
        try:
            trainer.fit(module, loader, ckpt_path=start, weights_only=True)
        except SystemExit:  # Lightning's answer to Ctrl-C
            if not trainer.interrupted:
                raise
    if trainer.interrupted:
        raise KeyboardInterrupt(f"stopped at step {trainer.global_step}; resume the run in {checkpoint.parent}")


def _take_threads(folder: Path) -> None:
    """Use as many threads as when the run was begun: sums then have the same last bits."""
    file = folder / files.ENVIRONMENT
    threads = json.loads(file.read_text(encoding="utf-8")).get("threads") if file.exists() else None
    if threads is not None:
        torch.set_num_threads(threads)


def _write_encoder(encoder: nn.Module, folder: Path, shape: tuple[int, ...]) -> None:
    from safetensors.torch import save

    weights = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in encoder.state_dict().items()
        if isinstance(tensor, Tensor)
    }
    files.write_bytes(folder / files.ENCODER, save(weights, {"shape": ",".join(map(str, shape))}))

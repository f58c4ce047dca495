"""Runs: a folder with a recipe, its metrics and checkpoints, that can be killed at any moment and goes on exactly.

Every draw is a function of (seed, step), so a checkpoint needs no random state: weights, optimiser and the number of
steps done say it all.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn

from hardneg.division import Division, difference, read_division
from hardneg.graphs.data import GraphSet
from hardneg.losses.infonce import InfoNCE
from hardneg.training import build, engine, graphs, recipe, run_folder, run_state, validation
from hardneg.training.batches import Batches, sampler
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

    shape: (C, H, W) of a picture, or (features,) of a node of a graph, which needs no preparing · division: what it was
    trained on, and what was held out
    """

    folder: Path
    settings: Recipe
    encoder: nn.Module
    prepare: Callable[[Tensor], Tensor] | None
    shape: tuple[int, ...]
    division: Division


def train(
    settings: Recipe | None,
    folder: str | Path,
    resume: bool = False,
    callbacks: Sequence[L.Callback] = (),
    *,
    loggers: Sequence[Logger] = (),
    epochs: int | None = None,
    trust: bool = False,
) -> Result:
    """Run a recipe in a folder, or take up again what was begun there.

    Nothing is written before recipe, data and device have proved sound, and what fails before its first checkpoint
    leaves nothing.

    Args:
        settings: the recipe; ignored when resuming, and may then be None
        folder: of the run; nothing is written elsewhere
        resume: go on from the folder's last checkpoint
        callbacks: Lightning callbacks of your own
        loggers: Lightning loggers of your own; they get the numbers of ``metrics.jsonl``, once per epoch
        epochs: when resuming, train to this many epochs instead of the recipe's; schedules and the learning rate follow
            the new length from then on. A finished run continues
        trust: when resuming, allow an encoder that the folder names as ``module:callable``; ``settings`` are trusted
    """
    folder = Path(folder)
    if resume and not run_folder.is_run(folder):
        missing = run_folder.ENVIRONMENT if (folder / run_folder.RECIPE).exists() else run_folder.RECIPE
        raise ValueError(f"{folder} holds no run to resume: {missing} is missing")
    point = run_state.ResumePoint()
    if resume:
        run_folder.check_regular(folder)
        settings = run_state.with_epochs(recipe.load(folder / run_folder.RECIPE), epochs)
        recipe.check_trust(settings, folder, trust)
        run_folder.check_links(folder)
        build.check_source(settings, folder)
        run_state.use_recorded_threads(folder)
    elif epochs is not None:
        raise ValueError(f"epochs={epochs} extends a run: pass resume=True, or set trainer.epochs in the recipe")
    elif settings is None:
        raise ValueError("settings=None starts no run: pass a recipe, or resume=True")
    else:
        settings = build.resolved(settings)
    trainer = engine.create_trainer(settings, folder, callbacks, loggers)
    if trainer.is_global_zero and not resume:  # the other processes find what the first one wrote
        run_state.check_free(folder)
    whole = build.data(settings)
    division = whole.division or Division()
    if resume:
        check_division(settings, folder, division)
    train_set, held_out = validation.divide(settings, whole)
    if not isinstance(train_set, GraphSet):
        _check_memory(settings, train_set.shape, trainer)
    try:
        module = build.method(settings, train_set, trainer.world_size)
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise ValueError(f"the networks and the memory of this recipe cannot be made: {error}") from error
    engine.check_method(settings, module, trainer.strategy.root_device)
    chosen = sampler(settings, len(train_set), trainer.global_rank, trainer.world_size)
    batches = Batches(chosen)
    refresh = build.refresh(batches, module, train_set, settings, trainer.world_size)
    # Weights and two moments of them, in the old checkpoint and in the new one; and room for the rest.
    weights = sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())
    run_folder.check_space(folder, 6 * weights + (16 << 20))
    module._optimizer(module)  # bad settings are refused now
    if isinstance(module.objective, InfoNCE):
        module.objective.check_device(trainer.strategy.root_device)
    ours = engine.create_callbacks(settings, folder, batches, train_set, refresh, held_out)
    ours.add_to(trainer)
    loader = build.loader(batches, train_set, settings)
    if loader is batches:  # the workers of any other loader need indices on the CPU
        batches.device = trainer.strategy.root_device
    stated = validation.stated(settings, train_set, held_out)
    if resume:
        run_state.check_recorded(folder, stated)
        point = run_state.resume_point(folder, settings, module, ours.stateful, batches, epochs)
    with ExitStack() as held:
        if trainer.is_global_zero:
            held.enter_context(run_folder.create_folder(folder))
            held.enter_context(run_folder.lock_run(folder))
            if resume:
                processes = trainer.world_size
                run_state.record_resume(settings, folder, processes, stated, epochs=epochs, finished=point.finished)
            else:
                run_state.start(settings, folder, trainer.world_size, division, stated)
        try:
            engine.fit(trainer, module, loader, settings, folder, point.checkpoint)
        except Exception as error:
            if trainer.is_global_zero:
                if not resume:
                    run_folder.discard(folder)
                engine.explain(error, folder)
            raise
        if trainer.is_global_zero:
            shape = (train_set.node_features,) if isinstance(train_set, GraphSet) else train_set.shape
            run_state.write_encoder(module.encoder, folder, shape)
    return Result(folder, module.encoder, ours.metrics.last)


def _check_memory(settings: Recipe, shape: tuple[int, int, int], trainer: L.Trainer) -> None:
    """Raise if the views of one batch are larger than the memory of the device."""
    device, side = trainer.strategy.root_device, build.views_of(settings, shape[-1]).size
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        return
    needed = 2 * settings.trainer.batch_size // trainer.world_size * 4 * shape[0] * side * side  # float32
    if needed > memory:
        raise ValueError(
            f"the views of trainer.batch_size={settings.trainer.batch_size} images of {side}x{side} need "
            f"{needed / 1e9:,.0f} GB, and {device} has {memory / 1e9:,.0f} GB: lower it, or the size of the images"
        )


def check_division(settings: Recipe, folder: Path, division: Division, remedy: str = "begin a new run") -> None:
    """Raise if the data are not those that the run was begun with: held-out images might be trained on."""
    recorded = read_division(folder / run_folder.SPLIT)
    source = settings.data.source
    if told := difference(recorded, division):
        raise ValueError(f"{source} {told} in {folder}: restore it, or {remedy}")
    if recorded.test == Division.UNKNOWN and division.test == Division.HELD_OUT:
        raise ValueError(f"{folder} does not record which images of {source} it held out: {remedy}")


def load_run(folder: str | Path, *, trust: bool = False) -> Loaded:
    """The recipe and the encoder of a run: the finished one, or as it was at the last checkpoint.

    trust: allow an encoder that the folder names as ``module:callable``, which is code to run
    """
    folder = Path(folder)
    if not (folder / run_folder.RECIPE).exists():
        raise ValueError(f"{folder} is no run: {run_folder.RECIPE} is missing")
    run_folder.check_regular(folder)
    settings = recipe.load(folder / run_folder.RECIPE)
    recipe.check_trust(settings, folder, trust)
    origin = folder / (run_folder.ENCODER if (folder / run_folder.ENCODER).exists() else run_folder.CHECKPOINT)
    if (folder / run_folder.ENCODER).exists():
        from safetensors import safe_open

        try:
            with safe_open(folder / run_folder.ENCODER, "pt") as file:
                shape = tuple(int(side) for side in file.metadata()["shape"].split(","))
                if len(shape) not in (1, 3) or min(shape) < 1 or max(shape) >= 1 << 31:
                    raise ValueError(f"shape {shape}")
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        except Exception as error:  # of safetensors' own, or of metadata that are not ours
            raise ValueError(
                f"{folder / run_folder.ENCODER} cannot be read as the encoder of a run ({error!r}): remove it and "
                "resume the run, which writes it again"
            ) from error
    elif (folder / run_folder.CHECKPOINT).exists():
        saved = run_folder.checkpoint(folder)["state_dict"]
        weights = {name[8:]: tensor for name, tensor in saved.items() if name.startswith("encoder.")}
        build.check_source(settings, folder)
        train_set = build.data(settings)
        shape = (train_set.node_features,) if isinstance(train_set, GraphSet) else train_set.shape
    else:
        raise ValueError(f"{folder} holds no weights yet: resume it until its first epoch is done")
    pictures = len(shape) == 3

    def encoder_of() -> nn.Module:
        return build.encoder_of(settings, shape[0], shape[-1]) if pictures else graphs.encoder_of(settings, shape[0])

    try:
        if ":" not in settings.encoder.name:
            with torch.device("meta"):  # a shape that does not fit the weights must not take memory
                encoder_of().load_state_dict(weights, assign=True)
        encoder = encoder_of()
        encoder.load_state_dict(weights)
    except (RuntimeError, MemoryError, OverflowError, ZeroDivisionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{origin}: the weights do not fit encoder {settings.encoder.name!r}: {reason}") from error
    prepare = build.views_of(settings, shape[-1]).plain if pictures else None
    return Loaded(folder, settings, encoder.eval(), prepare, shape, read_division(folder / run_folder.SPLIT))

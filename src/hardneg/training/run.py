"""Runs: a folder with a recipe, its metrics and checkpoints; a run can be killed at any time and resumes exactly.

Every draw is a function of (seed, step), so a checkpoint needs no random state: it holds the weights, the optimizer
state and the number of steps done.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from torch import nn

from hardneg.division import Division, difference, read_division
from hardneg.losses.infonce import InfoNCE
from hardneg.methods.method import Method
from hardneg.training import build, engine, recipe, run_folder, run_state, validation_split
from hardneg.training.batches import Batches, sampler
from hardneg.training.recipe import Recipe


@dataclass(frozen=True)
class Result:
    """A finished run: its folder, its trained encoder and the last line of its metrics.

    already_finished: whether it was resumed with no step left to train
    """

    folder: Path
    encoder: nn.Module
    metrics: dict[str, Any]
    already_finished: bool = False


def train(
    settings: Recipe | None,
    folder: str | Path,
    resume: bool = False,
    callbacks: Sequence[L.Callback] = (),
    *,
    loggers: Sequence[Logger] = (),
    epochs: int | None = None,
    trust: bool = False,
    data: Any = None,
    views: Any = None,
    encoder: nn.Module | None = None,
) -> Result:
    """Run a recipe in a folder, or resume the run there.

    Nothing is written before a forward pass of a few samples has succeeded, and a run that fails before its first
    checkpoint leaves no folder.

    Args:
        settings: the recipe; ignored when resuming, and may then be None
        folder: of the run; nothing is written elsewhere
        resume: continue from the folder's last checkpoint
        callbacks: further Lightning callbacks
        loggers: further Lightning loggers; they get the numbers of ``metrics.jsonl``, once per epoch
        epochs: when resuming, the total number of epochs instead of the recipe's; schedules and the learning rate use
            the new number from then on. A finished run continues
        trust: when resuming, allow code that the folder names as ``module:callable``; ``settings`` are trusted
        data: samples to train on instead of ``data.source``: a set, a mapping from split to set, or a function of the
            split
        views: makes views of a batch instead of ``views``, as `ImageViews` does
        encoder: a module to train instead of ``encoder.name``
    """
    given = build.Given(data, views, encoder)
    folder = Path(folder)
    if resume and not run_folder.is_run(folder):
        begun = (folder / run_folder.RECIPE).exists()
        reason = f"{run_folder.ENVIRONMENT} is missing" if begun else run_folder.run_near(folder)
        raise ValueError(f"{folder} holds no run to resume: {reason}")
    point = run_state.ResumePoint()
    if resume:
        run_folder.check_regular(folder)
        settings = build.with_precision(run_state.with_epochs(recipe.load(folder / run_folder.RECIPE), epochs))
        recipe.check_trust(settings, folder, trust)
        run_folder.check_links(folder)
        build.check_source(settings, folder)
        run_state.use_recorded_threads(folder)
    elif epochs is not None:
        raise ValueError(f"epochs={epochs} extends a run: pass resume=True, or set trainer.epochs in the recipe")
    elif settings is None:
        raise ValueError("settings=None starts no run: pass a recipe, or resume=True")
    else:
        settings = build.resolved(given.recorded(settings))
    trainer = engine.create_trainer(settings, folder, callbacks, loggers)
    if trainer.is_global_zero and not resume:  # the other processes may find files of the first one
        run_state.check_free(folder)
    whole = build.data(settings, given)
    division = whole.division or Division()
    if resume:
        check_division(settings, folder, division)
    pairs = build.not_negatives(settings, whole)
    taken = validation_split.held_out_rows(settings, whole)
    train_set, held_out = validation_split.divide(whole, taken)
    if not resume and trainer.is_global_zero:
        build.warn_if_few(settings, len(train_set))
    settings = settings.with_batch_size(build.auto_batch_size(len(train_set), trainer.world_size))
    shape = settings.kind.shape(train_set)
    try:
        module = build.method(settings, train_set, trainer.world_size, given)
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise ValueError(f"the networks and the memory of this recipe cannot be created: {error}") from error
    if pairs is not None:
        module.leave_out(validation_split.of_rest(pairs, taken))
    engine.check_method(settings, module, trainer.strategy.root_device)
    chosen = sampler(settings, len(train_set), trainer.global_rank, trainer.world_size)
    batches = Batches(chosen)
    _check_memory(settings, module, shape, trainer)
    dim = build.dry_run(settings, module, train_set)
    refresh = build.refresh(batches, module, train_set, settings, trainer.world_size, dim)
    build.compile_networks(settings, module)
    # Weights and two moments of them, in the old checkpoint and in the new one; and space for the rest.
    weights = sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())
    run_folder.check_space(folder, 6 * weights + (16 << 20))
    module._optimizer(module)  # bad settings raise here
    if isinstance(module.objective, InfoNCE):
        module.objective.check_device(trainer.strategy.root_device)
    callbacks_of_run = engine.create_callbacks(settings, folder, batches, train_set, refresh, held_out, data)
    callbacks_of_run.add_to(trainer)
    loader = build.loader(batches, train_set, settings)
    if loader is batches:  # the workers of any other loader need indices on the CPU
        batches.device = trainer.strategy.root_device
    stated = validation_split.stated(settings, train_set, held_out) | build.stated_pairs(pairs)
    if resume:
        run_state.check_recorded(folder, stated)
        point = run_state.resume_point(folder, settings, module, callbacks_of_run.stateful, batches, epochs)
    with ExitStack() as held:
        if trainer.is_global_zero:
            held.enter_context(run_folder.create_folder(folder))
            held.enter_context(run_folder.lock_run(folder))
            if resume:
                processes = trainer.world_size
                run_state.record_resume(settings, folder, processes, stated, epochs=epochs, finished=point.finished)
            else:
                recorded = settings.kind.recorded(settings.data, whole)
                run_state.start(settings, folder, trainer.world_size, division, stated, recorded)
        try:
            engine.fit(trainer, module, loader, settings, folder, point.checkpoint)
            if trainer.is_global_zero:
                run_state.write_encoder(module.encoder, folder, shape)
        except Exception as error:
            if trainer.is_global_zero:
                if not resume:
                    run_folder.discard(folder)
                engine.explain(error, settings, folder, callbacks_of_run.losses)
            raise
    return Result(folder, module.encoder, callbacks_of_run.metrics.last, point.finished)


def _check_memory(settings: Recipe, module: Method, shape: tuple[int, ...], trainer: L.Trainer) -> None:
    """Raise if the views of one batch are larger than the memory of the device."""
    device, batch_size = trainer.strategy.root_device, settings.trainer.batch_size
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        return
    needed = settings.kind.view_bytes(module.views, shape, batch_size // trainer.world_size)
    if needed > memory:
        raise ValueError(
            f"the views of trainer.batch_size={batch_size} samples need {needed / 1e9:,.0f} GB, and {device} has "
            f"{memory / 1e9:,.0f} GB: lower it, or the size of the views"
        )


def check_division(settings: Recipe, folder: Path, division: Division, remedy: str = "begin a new run") -> None:
    """Raise if the data are not those that the run was started with: held-out samples might be trained on."""
    recorded = read_division(folder / run_folder.SPLIT)
    source = settings.data.source
    if change := difference(recorded, division):
        raise ValueError(f"{source} {change} in {folder}: restore it, or {remedy}")
    if recorded.test == Division.UNKNOWN and division.test == Division.HELD_OUT:
        raise ValueError(f"{folder} does not record which images of {source} it held out: {remedy}")

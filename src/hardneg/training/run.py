"""Runs: a folder with a recipe, its metrics and checkpoints, that can be killed at any moment and goes on exactly.

Every draw is a function of (seed, step), so a checkpoint needs no random state: weights, optimiser and the number of
steps done say it all. To Lightning a run is one long epoch whose loader begins at the step where the checkpoint was
taken; our epochs are counted from the steps.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn

from hardneg.division import Division, difference, read_division
from hardneg.losses.infonce import InfoNCE
from hardneg.methods.method import Method
from hardneg.training import build, engine, recipe, run_folder, validation
from hardneg.training.batches import Batches, sampler
from hardneg.training.callbacks.keeper import Keeper
from hardneg.training.recipe import Recipe


@dataclass(frozen=True)
class Result:
    """A finished run: its folder, its trained encoder and the last line of its metrics."""

    folder: Path
    encoder: nn.Module
    metrics: dict[str, Any]


def train(
    settings: Recipe,
    folder: str | Path,
    resume: bool = False,
    callbacks: Sequence[L.Callback] = (),
    *,
    trust: bool = False,
    data: Any = None,
    views: Any = None,
    encoder: nn.Module | None = None,
) -> Result:
    """Run a recipe in a folder, or resume the run there.

    Nothing is written before a forward pass of a few samples has succeeded, and a run that fails before its first
    checkpoint leaves no folder.

    Args:
        settings: the recipe; ignored when resuming
        folder: of the run; nothing is written elsewhere
        resume: go on from the folder's last checkpoint
        callbacks: of Lightning's, beside our own
        trust: when resuming, allow code that the folder names as ``module:callable``; ``settings`` are trusted
        data: samples to train on instead of ``data.source``: a set, a mapping from split to set, or a function of the
            split
        views: makes views of a batch instead of ``views``, as `ImageViews` does
        encoder: a module to train instead of ``encoder.name``
    """
    given = build.Given(data, views, encoder)
    folder = Path(folder)
    if resume and not run_folder.is_run(folder):
        missing = run_folder.ENVIRONMENT if (folder / run_folder.RECIPE).exists() else run_folder.RECIPE
        raise ValueError(f"{folder} holds no run to resume: {missing} is missing")
    resume_from: Path | None = None
    if resume:
        run_folder.check_regular(folder)
        settings = recipe.load(folder / run_folder.RECIPE)
        recipe.check_trust(settings, folder, trust)
        run_folder.check_links(folder)
        build.check_source(settings, folder)
        engine.use_recorded_threads(folder)
    else:
        settings = build.resolved(given.recorded(settings))
    trainer = engine.create_trainer(settings, callbacks)
    if trainer.is_global_zero and not resume:  # the other processes find what the first one wrote
        engine.check_free(folder)
    whole = build.data(settings, given)
    division = whole.division or Division()
    if resume:
        check_division(settings, folder, division)
    train_set, held_out = validation.divide(settings, whole)
    shape = settings.kind.shape(train_set)
    try:
        module = build.method(settings, train_set, trainer.world_size, given)
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise ValueError(f"the networks and the memory of this recipe cannot be made: {error}") from error
    chosen = sampler(settings, len(train_set), trainer.global_rank, trainer.world_size)
    batches = Batches(chosen, settings.trainer.epochs)
    _check_memory(settings, module, shape, trainer)
    dim = build.dry_run(settings, module, train_set)
    refresh = build.refresh(batches, module, train_set, settings, trainer.world_size, dim)
    build.compile_networks(settings, module)
    # Weights and two moments of them, in the old checkpoint and in the new one; and room for the rest.
    weights = sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())
    run_folder.check_space(folder, 6 * weights + (16 << 20))
    module._optimizer(module)  # bad settings are refused now
    if isinstance(module.objective, InfoNCE):
        module.objective.check_device(trainer.strategy.root_device)
    keeper = Keeper(settings, folder, batches, train_set, refresh, held_out, data)
    stated = validation.stated(settings, train_set, held_out)
    if resume:
        engine.check_begun(folder, stated)
        resume_from = engine.checked_checkpoint(folder, module, keeper, batches)
    # The keeper comes last: what it saves is then complete.
    trainer.callbacks += [keeper] if refresh is None else [refresh, keeper]  # type: ignore[attr-defined]
    with ExitStack() as held:
        if trainer.is_global_zero:
            held.enter_context(run_folder.made(folder))
            held.enter_context(run_folder.alone(folder))
            engine.begin(settings, folder, resume, trainer.world_size, division, stated)
        try:
            engine.fit(trainer, module, build.loader(batches, train_set, settings), folder, resume_from)
        except Exception as error:
            if trainer.is_global_zero:
                if not resume:
                    run_folder.discard(folder)
                engine.explain(error, folder)
            raise
        if trainer.is_global_zero:
            engine.write_encoder(module.encoder, folder, shape)
    return Result(folder, module.encoder, keeper.last)


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
    """Raise if the data are not those that the run was begun with: held-out images might be trained on."""
    recorded = read_division(folder / run_folder.SPLIT)
    source = settings.data.source
    if told := difference(recorded, division):
        raise ValueError(f"{source} {told} in {folder}: restore it, or {remedy}")
    if recorded.test == Division.UNKNOWN and division.test == Division.HELD_OUT:
        raise ValueError(f"{folder} does not record which images of {source} it held out: {remedy}")

"""Runs: a folder with a recipe, its metrics and checkpoints, that can be killed at any moment and goes on exactly.

Every draw is a function of (seed, step), so a checkpoint needs no random state: weights, optimiser and the number of
steps done say it all. To Lightning a run is one long epoch whose loader begins at the step where the checkpoint was
taken; our epochs are counted from the steps.
"""

import json
import logging
import os
import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor, nn

from hardneg import checks
from hardneg.division import Division, difference, read_division
from hardneg.graphs.data import GraphSet
from hardneg.losses.infonce import InfoNCE
from hardneg.methods.method import Method
from hardneg.training import build, graphs, recipe, run_folder, validation
from hardneg.training.batches import Batches, sampler
from hardneg.training.callbacks.keeper import Keeper
from hardneg.training.recipe import Recipe

# Settings that a run may be resumed with other values of: they change nothing that it computes.
MAY_CHANGE = ("about", "data.source", "data.workers", "trainer.accelerator", "trainer.devices", "trainer.nodes",
              "trainer.save_every")  # fmt: skip

MAX_THREADS = 4096  # more than any machine has; the system could not start many more


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
    settings: Recipe,
    folder: str | Path,
    resume: bool = False,
    callbacks: Sequence[L.Callback] = (),
    *,
    trust: bool = False,
) -> Result:
    """Run a recipe in a folder, or take up again what was begun there.

    Nothing is written before recipe, data and device have proved sound, and what fails before its first checkpoint
    leaves nothing.

    Args:
        settings: the recipe; ignored when resuming
        folder: of the run; nothing is written elsewhere
        resume: go on from the folder's last checkpoint
        callbacks: of Lightning's, beside our own
        trust: when resuming, allow an encoder that the folder names as ``module:callable``; ``settings`` are trusted
    """
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
        _take_threads(folder)
    else:
        settings = build.resolved(settings)
    trainer = _trainer(settings, callbacks)
    if trainer.is_global_zero and not resume:  # the other processes find what the first one wrote
        _check_free(folder)
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
    chosen = sampler(settings, len(train_set), trainer.global_rank, trainer.world_size)
    batches = Batches(chosen, settings.trainer.epochs)
    refresh = build.refresh(batches, module, train_set, settings, trainer.world_size)
    # Weights and two moments of them, in the old checkpoint and in the new one; and room for the rest.
    weights = sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())
    run_folder.check_space(folder, 6 * weights + (16 << 20))
    module._optimizer(module)  # bad settings are refused now
    if isinstance(module.objective, InfoNCE):
        module.objective.check_device(trainer.strategy.root_device)
    keeper = Keeper(settings, folder, batches, train_set, refresh, held_out)
    stated = validation.stated(settings, train_set, held_out)
    if resume:
        _check_begun(folder, stated)
        resume_from = _checked_checkpoint(folder, module, keeper, batches)
    # The keeper comes last: what it saves is then complete.
    trainer.callbacks += [keeper] if refresh is None else [refresh, keeper]  # type: ignore[attr-defined]
    with ExitStack() as held:
        if trainer.is_global_zero:
            held.enter_context(run_folder.made(folder))
            held.enter_context(run_folder.alone(folder))
            _begin(settings, folder, resume, trainer.world_size, division, stated)
        try:
            _fit(trainer, module, build.loader(batches, train_set, settings), folder, resume_from)
        except Exception as error:
            if trainer.is_global_zero:
                if not resume:
                    run_folder.discard(folder)
                _explain(error, folder)
            raise
        if trainer.is_global_zero:
            shape = (train_set.node_features,) if isinstance(train_set, GraphSet) else train_set.shape
            _write_encoder(module.encoder, folder, shape)
    return Result(folder, module.encoder, keeper.last)


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


def _check_free(folder: Path) -> None:
    if run_folder.is_free(folder):
        return
    if run_folder.is_run(folder):
        raise ValueError(f"{folder} holds a run already: resume it, choose another folder, or remove this one")
    raise ValueError(f"{folder} exists and is no run: choose another folder")


def check_division(settings: Recipe, folder: Path, division: Division, remedy: str = "begin a new run") -> None:
    """Raise if the data are not those that the run was begun with: held-out images might be trained on."""
    recorded = read_division(folder / run_folder.SPLIT)
    source = settings.data.source
    if told := difference(recorded, division):
        raise ValueError(f"{source} {told} in {folder}: restore it, or {remedy}")
    if recorded.test == Division.UNKNOWN and division.test == Division.HELD_OUT:
        raise ValueError(f"{folder} does not record which images of {source} it held out: {remedy}")


def _check_begun(folder: Path, stated: dict[str, int] | None) -> None:
    """Raise if what the run wrote cannot be gone on with, before anything is changed."""
    environment = run_folder.read_json(folder / run_folder.ENVIRONMENT)
    if not isinstance(environment.get("resumed", []), list):
        raise ValueError(f"{folder / run_folder.ENVIRONMENT}: resumed must be a list: put the file back as it was")
    run_folder.metrics(folder)
    begun = environment.get("validation")
    if begun != stated:
        raise ValueError(
            f"{folder} was begun with the validation part {begun}, and its data now give {stated}: "
            "put the data back as they were, or begin anew in another folder"
        )


def _checked_checkpoint(folder: Path, module: Method, keeper: Keeper, batches: Batches) -> Path | None:
    """The checkpoint to go on from, read and tried before anything is written; None if there was none yet."""
    file = folder / run_folder.CHECKPOINT
    # The metrics file is made with the first checkpoint.
    if not file.exists() and not (folder / run_folder.METRICS).exists():
        warnings.warn(f"{folder} holds no checkpoint yet: it begins with epoch 1", stacklevel=3)
        return None
    saved = run_folder.checkpoint(folder)
    if saved.get("run") != run_folder.read_json(folder / run_folder.ENVIRONMENT).get("run"):
        raise ValueError(f"{file} is the checkpoint of another run: {run_folder.remedy(folder)}")
    try:
        module.load_state_dict(saved["state_dict"])
        module._optimizer(module).load_state_dict(saved["optimizer_states"][0])
        _ = saved["lr_schedulers"][0], saved["loops"]["fit_loop"]  # Lightning's own
        changed = recipe.differences(json.loads(saved["recipe"]), keeper.settings)
        keeper.load_state_dict(saved["callbacks"][keeper.state_key])
        batches.go_on_from(saved["batches"])
    except Exception as error:  # as many kinds as there are ways not to fit
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(
            f"{file} does not fit the run's recipe and data ({reason}): {run_folder.remedy(folder)}"
        ) from error
    if changed := [name for name in changed if name not in MAY_CHANGE]:
        raise ValueError(
            f"{folder / run_folder.RECIPE} was changed in {', '.join(changed)} since {file} was written: undo the "
            f"change, or begin anew with hardneg train {folder / run_folder.RECIPE} --run ANOTHER_FOLDER"
        )
    return file


def _explain(error: Exception, folder: Path) -> None:
    """Raise a failure again that the user can mend, with what to do about it."""
    if not isinstance(error, ValueError):
        return
    message = str(error)
    if isinstance(error, checks.NonFiniteError):
        message = f"training diverged ({error}): lower optimizer.lr, or set optimizer.clip"
    if (folder / run_folder.CHECKPOINT).exists():
        step = run_folder.checkpoint(folder)["global_step"]
        message += (
            f". {folder} keeps the checkpoint of step {step}; resuming takes the same steps again, so for other "
            "settings choose another folder, or remove this one"
        )
    raise ValueError(message) from error


def _begin(
    settings: Recipe, folder: Path, resume: bool, processes: int, division: Division, stated: dict[str, int] | None
) -> None:
    """Write what the run is, or that it goes on; ``stated``: its validation part."""
    environment = run_folder.environment(processes=processes, **({} if stated is None else {"validation": stated}))
    if not resume:
        _check_free(folder)  # again, as another process may have been here while the data were read
        # The name of this run, by which its checkpoints are known.
        run_folder.write_json(folder / run_folder.ENVIRONMENT, {"run": uuid.uuid4().hex, **environment})
        run_folder.write_json(folder / run_folder.SPLIT, asdict(division))
        run_folder.write(folder / run_folder.RECIPE, recipe.dump(settings))  # last: it makes the folder a run
        return
    if (folder / run_folder.ENCODER).exists():
        return
    # Figures of an unfinished run would pass for those of the finished one.
    (folder / run_folder.EVALUATION).unlink(missing_ok=True)
    first = run_folder.read_json(folder / run_folder.ENVIRONMENT)
    first.setdefault("resumed", []).append(environment)
    run_folder.write_json(folder / run_folder.ENVIRONMENT, first)


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


def _fit(trainer: L.Trainer, module: Method, loader: Any, folder: Path, resume_from: Path | None) -> None:
    with warnings.catch_warnings():
        # Our loader begins where the checkpoint was taken, which Lightning cannot see.
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
        warnings.filterwarnings("ignore", ".*LeafSpec.*")
        start = None if resume_from is None else str(resume_from)
        try:
            trainer.fit(module, loader, ckpt_path=start, weights_only=True)
        except SystemExit:  # Lightning's answer to Ctrl-C
            if not trainer.interrupted:
                raise
    if trainer.interrupted:
        raise KeyboardInterrupt(f"stopped at step {trainer.global_step}; resume the run in {folder}")


def _take_threads(folder: Path) -> None:
    """Use as many threads as when the run was begun: sums then have the same last bits."""
    file = folder / run_folder.ENVIRONMENT
    threads = run_folder.read_json(file).get("threads") if file.exists() else None
    if threads is not None:
        if type(threads) is not int or not 1 <= threads <= MAX_THREADS:
            raise ValueError(
                f"{file}: threads must be a whole number from 1 to {MAX_THREADS}, got {str(threads)[:50]!r}: "
                "put the file back as it was"
            )
        torch.set_num_threads(threads)


def _write_encoder(encoder: nn.Module, folder: Path, shape: tuple[int, ...]) -> None:
    from safetensors.torch import save

    weights = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in encoder.state_dict().items()
        if isinstance(tensor, Tensor)
    }
    run_folder.write_bytes(folder / run_folder.ENCODER, save(weights, {"shape": ",".join(map(str, shape))}))

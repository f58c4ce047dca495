"""Creating the Lightning trainer of a run, fitting, and continuing from a checkpoint."""

import json
import logging
import os
import uuid
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor, nn

from hardneg import checks
from hardneg.division import Division
from hardneg.methods.method import Method
from hardneg.training import recipe, run_folder
from hardneg.training.batches import Batches
from hardneg.training.callbacks.keeper import Keeper
from hardneg.training.recipe import Recipe

# Settings that a run may be resumed with other values of: they change nothing that it computes.
MAY_CHANGE = ("about", "data.source", "data.workers", "trainer.accelerator", "trainer.devices", "trainer.nodes",
              "trainer.save_every")  # fmt: skip

MAX_THREADS = 4096  # more than any machine has; the system could not start many more


def create_trainer(settings: Recipe, callbacks: Sequence[L.Callback]) -> L.Trainer:
    """The Lightning trainer that the recipe describes; an accelerator that is not there is an error."""
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


def fit(trainer: L.Trainer, module: Method, loader: Any, folder: Path, resume_from: Path | None) -> None:
    """Train from the checkpoint, or from the start; Ctrl-C raises KeyboardInterrupt."""
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


def check_free(folder: Path) -> None:
    """Raise if a new run may not be written to this folder."""
    if run_folder.is_free(folder):
        return
    if run_folder.is_run(folder):
        raise ValueError(f"{folder} holds a run already: resume it, choose another folder, or remove this one")
    raise ValueError(f"{folder} exists and is no run: choose another folder")


def check_begun(folder: Path, stated: dict[str, int] | None) -> None:
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


def checked_checkpoint(folder: Path, module: Method, keeper: Keeper, batches: Batches) -> Path | None:
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


def explain(error: Exception, folder: Path) -> None:
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


def begin(
    settings: Recipe, folder: Path, resume: bool, processes: int, division: Division, stated: dict[str, int] | None
) -> None:
    """Write what the run is, or that it goes on; ``stated``: its validation part."""
    environment = run_folder.environment(processes=processes, **({} if stated is None else {"validation": stated}))
    if not resume:
        check_free(folder)  # again, as another process may have been here while the data were read
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


def use_recorded_threads(folder: Path) -> None:
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


def write_encoder(encoder: nn.Module, folder: Path, shape: tuple[int, ...]) -> None:
    """Write the weights of the encoder, with the shape of its input."""
    from safetensors.torch import save

    weights = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in encoder.state_dict().items()
        if isinstance(tensor, Tensor)
    }
    run_folder.write_bytes(folder / run_folder.ENCODER, save(weights, {"shape": ",".join(map(str, shape))}))

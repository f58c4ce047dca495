"""Starting a run in its folder, and checking that a run can be resumed."""

import json
import shlex
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from hardneg import checks
from hardneg.division import Division
from hardneg.methods.method import Method
from hardneg.training import recipe, run_folder
from hardneg.training.batches import Batches
from hardneg.training.recipe import Recipe

# Settings that may differ when a run is resumed: they do not change what it computes.
MAY_CHANGE = ("about", "data.source", "data.not_negatives", "data.workers", "trainer.accelerator", "trainer.devices",
              "trainer.nodes", "trainer.save_every", "trainer.insight_every", "trainer.logger")  # fmt: skip

MAX_THREADS = 4096  # more than any machine has; the system could not start many more


def check_free(folder: Path) -> None:
    """Raise if a new run may not be written to this folder."""
    if run_folder.is_free(folder):
        return
    if run_folder.is_run(folder):
        raise ValueError(
            f"{folder} holds a run already: resume it with hardneg train --resume {shlex.quote(str(folder))}, choose "
            "another folder, or remove this one"
        )
    raise ValueError(f"{folder} exists and is not a run: choose another folder")


def start(
    settings: Recipe,
    folder: Path,
    processes: int,
    division: Division,
    stated: dict[str, Any],
    recorded: dict[str, Any],
) -> None:
    """Write environment, split and recipe of a new run.

    stated: of its validation part and its pairs that are not negatives · recorded: of its training set, see
    `Modality.recorded`
    """
    check_free(folder)  # again, because another process may have written here while the data were read
    environment = run_folder.environment(processes=processes, **stated) | (
        {run_folder.RECORDED: recorded} if recorded else {}
    )
    # The id of this run, which its checkpoints contain.
    run_folder.write_json(folder / run_folder.ENVIRONMENT, {"run": uuid.uuid4().hex, **environment})
    run_folder.write_json(folder / run_folder.SPLIT, asdict(division))
    run_folder.write(folder / run_folder.RECIPE, recipe.dump(settings))  # last: it makes the folder a run


def record_resume(
    settings: Recipe,
    folder: Path,
    processes: int,
    stated: dict[str, Any],
    *,
    epochs: int | None,
    finished: bool,
) -> None:
    """Record in the environment file of a run that it is resumed, with this process's environment.

    stated: as for `start` · epochs: the new number of epochs, if one is given; also written to the recipe ·
    finished: whether no step is left; a finished run with an encoder is not changed
    """
    if finished and (folder / run_folder.ENCODER).exists():
        return
    recorded = run_folder.read_json(folder / run_folder.ENVIRONMENT)
    added = run_folder.environment(processes=processes, **stated) | ({} if epochs is None else {"epochs": epochs})
    recorded.setdefault("resumed", []).append(added)
    run_folder.write_json(folder / run_folder.ENVIRONMENT, recorded)
    if epochs is not None:
        run_folder.write(folder / run_folder.RECIPE, recipe.dump(settings))
    # Otherwise these results would be taken for those of the resumed run.
    for name in (run_folder.EVALUATION, run_folder.ENCODER):
        (folder / name).unlink(missing_ok=True)


def with_epochs(settings: Recipe, epochs: int | None) -> Recipe:
    """The recipe with another number of epochs, if one is given."""
    if epochs is None:
        return settings
    checks.whole("trainer.epochs", epochs)
    trainer = settings.trainer.model_copy(update={"epochs": epochs})
    return settings.model_copy(update={"trainer": trainer})


def check_recorded(folder: Path, stated: dict[str, Any]) -> None:
    """Raise if the run's files do not allow resuming, before anything is changed. stated: as for `start`, now"""
    environment = run_folder.read_json(folder / run_folder.ENVIRONMENT)
    if str(environment.get("hardneg", "")).startswith("0.1."):
        raise ValueError(
            f"{folder} was started by hardneg {environment['hardneg']}, whose checkpoints cannot be resumed here: "
            "resume it with that version, or train again"
        )
    resumed = environment.get("resumed", [])
    if not isinstance(resumed, list) or not all(isinstance(entry, dict) for entry in resumed):
        raise ValueError(f"{folder / run_folder.ENVIRONMENT}: resumed must be a list of objects: restore the file")
    run_folder.metrics(folder)
    recorded, validation = environment.get("validation"), stated.get("validation")
    if recorded != validation:
        raise ValueError(
            f"{folder} was begun with the validation part {recorded}, and its data now give {validation}: "
            "restore the data, or start again in another folder"
        )
    recorded, pairs = environment.get("not_negatives"), stated.get("not_negatives")
    if recorded != pairs:
        then, now = (entry.get("pairs", 0) if isinstance(entry, dict) else 0 for entry in (recorded, pairs))
        raise ValueError(
            f"data.not_negatives has changed since {folder} was begun ({then} pairs then, {now} now"
            f"{', but other ones' * (then == now)}): restore the file, or start again in another folder"
        )


@dataclass(frozen=True)
class ResumePoint:
    """Where a run is resumed. checkpoint: None if there is none yet · finished: whether no step is left."""

    checkpoint: Path | None = None
    finished: bool = False


def resume_point(
    folder: Path,
    settings: Recipe,
    module: Method,
    callbacks: Sequence[L.Callback],
    batches: Batches,
    epochs: int | None = None,
) -> ResumePoint:
    """The checkpoint to resume from, loaded into the parts of the run as a check.

    callbacks: those whose state must be in the checkpoint · epochs: the new number of epochs, if one is given
    """
    file = folder / run_folder.CHECKPOINT
    # The metrics file is made with the first checkpoint.
    if not file.exists() and not (folder / run_folder.METRICS).exists():
        warnings.warn(f"{folder} holds no checkpoint yet: it begins with epoch 1", stacklevel=3)
        return ResumePoint()
    saved, environment = run_folder.checkpoint(folder), run_folder.read_json(folder / run_folder.ENVIRONMENT)
    if saved.get("run") != environment.get("run"):
        raise ValueError(f"{file} is the checkpoint of another run: {run_folder.remedy(folder)}")
    try:
        module.load_state_dict(saved["state_dict"])
        module._optimizer(module).load_state_dict(saved["optimizer_states"][0])
        _ = saved["lr_schedulers"][0], saved["loops"]["fit_loop"]  # Lightning's own
        changed = recipe.differences(json.loads(saved["recipe"]), settings)
        for callback in callbacks:
            callback.load_state_dict(saved["callbacks"][callback.state_key])
        batches.resume(saved["batches"])
        done = int(saved["batches"]["step"])
    except Exception as error:  # a state that does not fit raises nearly anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(
            f"{file} does not fit the run's recipe and data ({reason}): {run_folder.remedy(folder)}"
        ) from error
    extended = [epochs, *(entry.get("epochs") for entry in environment.get("resumed", []))]
    may_change = (*MAY_CHANGE, "trainer.epochs") if settings.trainer.epochs in extended else MAY_CHANGE
    if changed := [name for name in changed if name not in may_change]:
        raise ValueError(
            f"{folder / run_folder.RECIPE} was changed in {', '.join(changed)} since {file} was written: undo the "
            f"change, or start again with hardneg train {folder / run_folder.RECIPE} --run ANOTHER_FOLDER"
        )
    total = settings.trainer.epochs * len(batches)
    if done > total:
        raise ValueError(
            f"trainer.epochs={settings.trainer.epochs} is less than the {done / len(batches):g} epochs that {folder} "
            "has done: give a larger number"
        )
    return ResumePoint(file, finished=done == total)


def use_recorded_threads(folder: Path) -> None:
    """Use as many threads as when the run was begun: sums then have the same last bits."""
    file = folder / run_folder.ENVIRONMENT
    threads = run_folder.read_json(file).get("threads") if file.exists() else None
    if threads is not None:
        if type(threads) is not int or not 1 <= threads <= MAX_THREADS:
            raise ValueError(
                f"{file}: threads must be a whole number from 1 to {MAX_THREADS}, got {str(threads)[:50]!r}: "
                "restore the file"
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

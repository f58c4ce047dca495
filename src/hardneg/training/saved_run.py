"""Reading a run from its folder: the recipe, the trained encoder and how the data were divided."""

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hardneg import methods
from hardneg.division import Division, read_division
from hardneg.training import build, recipe, run_folder
from hardneg.training.recipe import Recipe


@dataclass(frozen=True)
class Loaded:
    """A run read from its folder.

    settings: the recipe · encoder: in evaluation mode · views: the views of training, which also prepare a sample for
    the encoder; None if the method makes none · shape: of one sample · division: what the run was trained on, and what
    was held out · recorded: by `Modality.recorded` · finished: False if the encoder is that of the last checkpoint
    """

    folder: Path
    settings: Recipe
    encoder: nn.Module
    views: Any
    shape: tuple[int, ...]
    division: Division
    recorded: Mapping[str, Any]
    finished: bool

    def warn_if_unfinished(self) -> None:
        """Warn that the encoder is not that of a finished run."""
        if not self.finished:
            warnings.warn(f"{self.folder} is unfinished: this is the encoder of its last checkpoint", stacklevel=3)

    @property
    def prepare(self) -> Callable[[Tensor], Tensor] | None:
        """The function that converts samples to the encoder's input, or None."""
        return getattr(self.views, "plain", None)


def load_run(
    folder: str | Path,
    *,
    trust: bool = False,
    data: Any = None,
    views: Any = None,
    encoder: nn.Module | None = None,
    code: Collection[str] = recipe.CODE,
) -> Loaded:
    """The recipe and the encoder of a run; of an unfinished run, the encoder of the last checkpoint.

    trust: allow code that the folder names as ``module:callable`` · data, views, encoder: what was given to `train` as
    an object; the encoder takes the weights of the run · code: the keys of the recipe whose code the caller uses, and
    which therefore needs trust
    """
    folder = Path(folder)
    if not (folder / run_folder.RECIPE).exists():
        raise ValueError(f"{folder} is not a run: {run_folder.run_near(folder)}")
    run_folder.check_regular(folder)
    settings = recipe.load(folder / run_folder.RECIPE)
    origin = folder / (run_folder.ENCODER if (folder / run_folder.ENCODER).exists() else run_folder.CHECKPOINT)
    finished = origin.name == run_folder.ENCODER
    # Without the file of the encoder, the shape of a sample is that of the data.
    recipe.check_trust(settings, folder, trust, code if finished else {*code, "data.source"})
    if finished:
        from safetensors import safe_open

        try:
            with safe_open(folder / run_folder.ENCODER, "pt") as file:
                shape = tuple(int(side) for side in file.metadata()["shape"].split(","))
                settings.kind.check_shape(shape)
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except Exception as error:  # raised by safetensors, or by metadata that hardneg did not write
            raise ValueError(
                f"{folder / run_folder.ENCODER} cannot be read as the encoder of a run ({error!r}): remove it and "
                "resume the run, which writes it again"
            ) from error
    elif (folder / run_folder.CHECKPOINT).exists():
        saved = run_folder.checkpoint(folder)["state_dict"]
        weights = {name[8:]: tensor for name, tensor in saved.items() if name.startswith("encoder.")}
        build.check_source(settings, folder)
        shape = settings.kind.shape(build.data(settings, build.Given(data)))
    else:
        raise ValueError(f"{folder} holds no weights yet: resume it until its first epoch is done")
    owner = methods.get(settings.method)

    def make_encoder() -> nn.Module:
        return owner.make_encoder(settings.kind, settings.encoder, shape)

    try:
        if encoder is None:
            if ":" not in settings.encoder.name:
                with torch.device("meta"):  # a shape that does not fit the weights must not take memory
                    make_encoder().load_state_dict(weights, assign=True)
            encoder = make_encoder()
        encoder.load_state_dict(weights)
    except (ValueError, RuntimeError, MemoryError, OverflowError, ZeroDivisionError) as error:
        if isinstance(error, ValueError) and ":" in settings.encoder.name:
            raise  # the user's code could not be imported or called
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{origin}: the weights do not fit encoder {settings.encoder.name!r}: {reason}") from error
    if views is None and owner.uses_views:
        views = settings.kind.views(settings.views, shape)
    return Loaded(
        folder,
        settings,
        encoder.eval(),
        views,
        shape,
        division=read_division(folder / run_folder.SPLIT),
        recorded=_recorded(folder),
        finished=finished,
    )


def _recorded(folder: Path) -> dict[str, Any]:
    """What the run recorded of its training set; see `Modality.recorded`."""
    file = folder / run_folder.ENVIRONMENT
    found = run_folder.read_json(file).get(run_folder.RECORDED, {}) if file.exists() else {}
    if not isinstance(found, dict):
        raise ValueError(f"{file}: {run_folder.RECORDED} must be an object: restore the file")
    return found

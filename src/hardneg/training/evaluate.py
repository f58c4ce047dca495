"""Judging runs: on the data they were trained on, or carried over to others."""

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hardneg.division import Division, difference
from hardneg.evaluation import DEFAULT_METRICS, EvaluationResult, evaluate_features
from hardneg.images import ImageSet, StreamedImages, load_split
from hardneg.images.features import extract_set
from hardneg.images.splits import comparable
from hardneg.training import build, graphs, run_folder
from hardneg.training.recipe import Recipe
from hardneg.training.run import Loaded, load_run

TRANSFER = "transfer.json"


def evaluate(
    folder: str | Path,
    source: str | None = None,
    size: int | None = None,
    metrics: Sequence[str] = DEFAULT_METRICS,
    *,
    trust: bool = False,
) -> EvaluationResult:
    """The accuracies of a run's encoder, written with their notes to its ``evaluation.json``.

    folder: of the run · source: other data to carry the frozen encoder over to, written to ``transfer.json`` instead;
    images that the run held out remain the test images of a copy of its data ·
    size: side of its pictures (default: as in training) · metrics: see `hardneg.evaluation.DEFAULT_METRICS` ·
    trust: allow an encoder that the folder names as ``module:callable``
    """
    run = load_run(folder, trust=trust)
    run_folder.check_links(run.folder)
    if source is None:
        build.check_source(run.settings, run.folder)
    if len(run.shape) == 1:
        found = _of_graphs(run, source)
        _save(run.folder, run_folder.EVALUATION, found.to_json())
        return found
    own = run.settings.data.source
    same = source is None
    source = own if source is None else source
    division = run.division if source == own or Path(source).resolve() == Path(own).resolve() else None
    side = size if size is not None else run.settings.data.size if same else run.shape[-1]
    known, asked = _parts(source, side, run.shape[0], division)
    if division is None and _holds_copies(run, known, asked):
        known, asked = _parts(source, side, run.shape[0], run.division)
    encoder = run.encoder.to(_device(run.settings))
    found = of_encoder(encoder, known, asked, run.prepare, metrics, run.settings.data.workers)
    if same:
        _save(run.folder, run_folder.EVALUATION, found.to_json())
        return found
    with _transfer_held(run.folder):
        file = run.folder / TRANSFER
        before: dict[str, Any] = run_folder.read_json(file) if file.exists() else {}
        _save(run.folder, TRANSFER, {**before, source: found.to_json()})
    return found


def _parts(
    source: str, side: int | None, channels: int, division: Division | None
) -> tuple[ImageSet | StreamedImages, ImageSet | StreamedImages]:
    """The train and the test part of a source."""
    train = load_split(source, "train", side, labels=True, channels=channels, division=division)
    return train, load_split(source, "test", side, labels=True, channels=channels, division=division)


def _holds_copies(run: Loaded, known: ImageSet | StreamedImages, asked: ImageSet | StreamedImages) -> bool:
    """Whether what would be divided holds images that the run held out: the rest of it may have been trained on.

    A source that has these images in a test part of its own keeps it; a warning says if others are among them.
    """
    held_out = torch.tensor(run.division.held_out, dtype=torch.int64)
    inside = [
        torch.isin(part.ids, held_out)
        if isinstance(part, ImageSet) and part.ids is not None
        else torch.zeros(0, dtype=torch.bool)
        for part in (known, asked)
    ]
    found = int(inside[1].sum())
    if bool(inside[0].any()) or (found and (known.division or Division()).test == Division.HELD_OUT):
        return True
    if 0 < found < len(asked):
        warnings.warn(
            f"{len(asked) - found} of the {len(asked)} images of {asked.name} were not held out by the run, and it may "
            "have been trained on them",
            stacklevel=3,
        )
    return False


def _transfer_held(folder: Path) -> AbstractContextManager[None]:
    """Makes other processes wait that add to the transfer file, where there is one to write."""
    writes = (folder / run_folder.ENCODER).exists() and os.access(folder, os.W_OK)
    return run_folder.locked(folder / "transfer.lock") if writes else nullcontext()


def _of_graphs(run: Loaded, source: str | None) -> EvaluationResult:
    if source is not None:
        raise ValueError(f"{source}: a graph encoder knows the node features of its own set only")
    found = graphs.load(run.settings)
    if told := difference(run.division, found.division):
        warnings.warn(f"{run.settings.data.source} {told}", stacklevel=3)
    return graphs.judge(run.encoder, found, run.settings.seed)


def _save(folder: Path, name: str, found: dict[str, Any]) -> None:
    """Write figures into the folder of a finished run, if that can be."""
    if not (folder / run_folder.ENCODER).exists():
        warnings.warn(f"{folder} is unfinished: judged as it was at its last checkpoint, not saved", stacklevel=3)
        return
    try:
        run_folder.write_json(folder / name, found)
    except OSError as error:
        warnings.warn(f"the figures could not be saved: {error}", stacklevel=3)


def of_encoder(
    encoder: nn.Module,
    known: ImageSet | StreamedImages,
    asked: ImageSet | StreamedImages,
    prepare: Callable[[Tensor], Tensor] | None = None,
    metrics: Sequence[str] = DEFAULT_METRICS,
    workers: int = 0,
) -> EvaluationResult:
    """The accuracies of an encoder that knows the labels of one set and is asked for those of another."""
    asked = comparable(known, asked)
    features = [extract_set(encoder, part, prepare=prepare, workers=workers) for part in (known, asked)]
    return evaluate_features(*features[0], *features[1], metrics)


def untrained(settings: Recipe, known: ImageSet, asked: ImageSet) -> EvaluationResult:
    """The accuracies of the recipe's encoder before its first step."""
    module = build.method(settings, known)
    return of_encoder(module.encoder, known, asked, build.views_of(settings, known.shape[-1]).plain)


def raw(known: ImageSet, asked: ImageSet) -> EvaluationResult:
    """The accuracies of the pixels themselves."""
    return of_encoder(nn.Flatten(), known, asked)


def _device(settings: Recipe) -> str:
    return "cuda" if torch.cuda.is_available() and settings.trainer.accelerator != "cpu" else "cpu"

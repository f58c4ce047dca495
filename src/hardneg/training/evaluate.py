"""Judging runs: on the data they were trained on, or carried over to others."""

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hardneg.data import ImageSet, StreamedImages, load_split
from hardneg.evaluation import METRICS, Accuracies, extract_set, judge
from hardneg.training import build, files, graphs
from hardneg.training.recipe import Recipe
from hardneg.training.run import Loaded, load_run

TRANSFER = "transfer.json"


def evaluate(
    folder: str | Path, source: str | None = None, size: int | None = None, metrics: Sequence[str] = tuple(METRICS)
) -> Accuracies:
    """The accuracies of a run's encoder, written with their notes to its ``evaluation.json``.

    folder: of the run · source: other data to carry the frozen encoder over to, written to ``transfer.json`` instead ·
    size: side of its pictures (default: as in training) · metrics: see `hardneg.evaluation.METRICS`
    """
    run = load_run(folder)
    if len(run.shape) == 1:
        found = _of_graphs(run, source)
        _save(run.folder, files.EVALUATION, found.to_json())
        return found
    same = source is None
    source = run.settings.data.source if source is None else source
    side = size if size is not None else run.settings.data.size if same else run.shape[-1]
    known, asked = (load_split(source, part, side, labels=True, channels=run.shape[0]) for part in ("train", "test"))
    encoder = run.encoder.to(_device(run.settings))
    found = of_encoder(encoder, known, asked, run.prepare, metrics, run.settings.data.workers)
    if same:
        _save(run.folder, files.EVALUATION, found.to_json())
        return found
    file = run.folder / TRANSFER
    before: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    _save(run.folder, TRANSFER, {**before, source: found.to_json()})
    return found


def _of_graphs(run: Loaded, source: str | None) -> Accuracies:
    if source is not None:
        raise ValueError(f"{source}: a graph encoder knows the node features of its own set only")
    return graphs.judge(run.encoder, graphs.load(run.settings), run.settings.seed)


def _save(folder: Path, name: str, found: dict[str, Any]) -> None:
    """Write figures into the folder of a finished run, if that can be."""
    if not (folder / files.ENCODER).exists():
        warnings.warn(f"{folder} is unfinished: judged as it was at its last checkpoint, not saved", stacklevel=3)
        return
    try:
        files.write_json(folder / name, found)
    except OSError as error:
        warnings.warn(f"the figures could not be saved: {error}", stacklevel=3)


def of_encoder(
    encoder: nn.Module,
    known: ImageSet | StreamedImages,
    asked: ImageSet | StreamedImages,
    prepare: Callable[[Tensor], Tensor] | None = None,
    metrics: Sequence[str] = tuple(METRICS),
    workers: int = 0,
) -> Accuracies:
    """The accuracies of an encoder that knows the labels of one set and is asked for those of another."""
    features = [extract_set(encoder, part, prepare=prepare, workers=workers) for part in (known, asked)]
    return judge(*features[0], *features[1], metrics)


def untrained(settings: Recipe, known: ImageSet, asked: ImageSet) -> Accuracies:
    """The accuracies of the recipe's encoder before its first step."""
    module = build.method(settings, known)
    return of_encoder(module.encoder, known, asked, build.views_of(settings, known.shape[-1]).plain)


def raw(known: ImageSet, asked: ImageSet) -> Accuracies:
    """The accuracies of the pixels themselves."""
    return of_encoder(nn.Flatten(), known, asked)


def _device(settings: Recipe) -> str:
    return "cuda" if torch.cuda.is_available() and settings.trainer.accelerator != "cpu" else "cpu"

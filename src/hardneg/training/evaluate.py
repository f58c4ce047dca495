"""Evaluating runs: on the data they were trained on, or transferred to others."""

import os
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hardneg import callables
from hardneg.evaluation import EvaluationResult, Metric, get_metric, metric_from
from hardneg.modality import EvaluationRequest
from hardneg.training import build, run_folder
from hardneg.training.recipe import Recipe
from hardneg.training.saved_run import load_run

TRANSFER = "transfer.json"


def evaluate(
    folder: str | Path,
    source: str | None = None,
    size: int | None = None,
    metrics: Sequence[str | Metric] | None = None,
    *,
    trust: bool = False,
    data: Any = None,
    views: Any = None,
    encoder: nn.Module | None = None,
) -> EvaluationResult:
    """The metrics of a run's encoder, written with their notes to its ``evaluation.json``.

    folder: of the run · source: other data to transfer the frozen encoder to, written to ``transfer.json`` instead;
    images that the run held out remain the test images of a copy of its data · size: side of the images of another
    source (default: as in training) · metrics: names, ``package.module:callable`` or `Metric` objects, by default those
    of the recipe · trust: allow code that the folder names as ``module:callable`` · data, views, encoder: what was
    given to `train` as an object
    """
    run = load_run(folder, trust=trust, data=data, views=views, encoder=encoder)
    run_folder.check_links(run.folder)
    settings = run.settings
    own = settings.data.source
    if source is None:
        build.check_source(settings, run.folder)
    request = EvaluationRequest(
        data=settings.data if source is None else settings.kind.Data(source=source),
        shape=run.shape,
        division=run.division,
        views=run.views,
        named=source is not None,
        own=source is None or source == own or Path(source).resolve() == Path(own).resolve(),
        size=size,
        metrics=_metrics(settings.evaluation.metrics if metrics is None else metrics),
        seed=settings.seed,
        given=data if source is None else None,
    )
    network = run.encoder.to(_device(settings))
    found = settings.kind.evaluate(network, request, getattr(settings.data, "workers", 0))
    if source is None:
        _save(run.folder, run_folder.EVALUATION, found.to_json())
        return found
    with _locked_transfer(run.folder):
        file = run.folder / TRANSFER
        before: dict[str, Any] = run_folder.read_json(file) if file.exists() else {}
        _save(run.folder, TRANSFER, {**before, source: found.to_json()})
    return found


def _metrics(given: Sequence[str | Metric] | None) -> list[Metric] | None:
    """Metrics by name, as ``package.module:callable``, or as objects; None for those of the modality."""
    if given is None:
        return None
    return [
        metric_from(each) if isinstance(each, str) and callables.is_name(each) else get_metric(each) for each in given
    ]


def _locked_transfer(folder: Path) -> AbstractContextManager[None]:
    """A lock on the transfer file, for which other processes wait, if the file can be written."""
    writes = (folder / run_folder.ENCODER).exists() and os.access(folder, os.W_OK)
    return run_folder.locked(folder / "transfer.lock") if writes else nullcontext()


def _save(folder: Path, name: str, found: dict[str, Any]) -> None:
    """Write results into the folder of a finished run, if that is possible."""
    if not (folder / run_folder.ENCODER).exists():
        warnings.warn(f"{folder} is unfinished: evaluated at its last checkpoint, not saved", stacklevel=3)
        return
    try:
        run_folder.write_json(folder / name, found)
    except OSError as error:
        warnings.warn(f"the results could not be saved: {error}", stacklevel=3)


def untrained(settings: Recipe, metrics: Sequence[str | Metric] | None = None) -> EvaluationResult:
    """The metrics of the recipe's encoder before its first step; metrics: None for all that fit."""
    train_set = build.data(settings)
    module = build.method(settings, train_set)
    return _of_module(settings, module.encoder.to(_device(settings)), train_set, module.views, metrics)


def raw(settings: Recipe) -> EvaluationResult:
    """The metrics of the samples themselves, flattened."""
    return _of_module(settings, nn.Flatten(), build.data(settings), None)


def _of_module(
    settings: Recipe, encoder: nn.Module, train_set: Any, views: Any, metrics: Sequence[str | Metric] | None = None
) -> EvaluationResult:
    kind, division = settings.kind, train_set.division
    request = EvaluationRequest(settings.data, kind.shape(train_set), division, views, metrics=_metrics(metrics))
    return kind.evaluate(encoder, request)


def _device(settings: Recipe) -> str:
    return "cuda" if torch.cuda.is_available() and settings.trainer.accelerator != "cpu" else "cpu"

"""Samples of the training split of a run, embedded with its encoder."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hardneg.insight.explorer.embedded import Embedded, Id, checked_id
from hardneg.insight.samples import Thumbnails
from hardneg.losses.infonce import InfoNCE
from hardneg.losses.temperature import Learnable
from hardneg.randomness import generator

_BATCH = 256
USABLE = "The pairs are of the training split: a run of the same data reads the file."
NOTE = (
    "The features are the outputs of the encoder. In training most losses compare the outputs of a projection head, "
    "which is not kept: weights and losses there differ."
)

RANDOM_VIEW = "The positive of an anchor is a random view of it."


@dataclass(frozen=True)
class RunSamples:
    """The samples of a run, its loss if the page can show it, and the name of its data."""

    samples: Embedded
    loss: InfoNCE | None
    name: str


def load_training_samples(folder: Path, count: int, seed: int = 0, trust: bool = False) -> RunSamples:
    """Embed up to ``count`` samples of a run's training split, and a random view of each as its positive.

    Runs on the same data get the same samples. trust: allow code that the folder names as ``module:callable``
    """
    # Imported by name: training needs Lightning, which the rest of the explorer does not.
    run: Any = import_module("hardneg.training.saved_run").load_run(folder, trust=trust)
    build: Any = import_module("hardneg.training.build")
    build.check_source(run.settings, folder)
    kind = run.settings.kind
    train = build.data(run.settings)
    rows = torch.randperm(len(train), generator=generator("cpu", len(train), seed))[:count].sort().values  # (n,)
    part = kind.sample(train, rows)
    broken = getattr(getattr(train, "broken", None), "flags", None)
    if broken is not None and bool(broken[rows].any()):  # a broken sample is replaced by another one: leave it out
        rows = rows[~broken[rows]]
        part = kind.sample(train, rows)
    features = kind.embed(run.encoder, part, run.views).float().cpu()
    shown = Thumbnails(kind, part)
    texts = [str(shown[row]) for row in range(len(shown))] if isinstance(shown[0], str) else None
    labels = part.labels if part.labels is not None and bool((part.labels >= 0).any()) else None
    positives = _views(run, kind, part, features)
    loss = build.loss(run.settings)
    by_pairs = import_module("hardneg.methods").get(run.settings.method).takes_not_negatives
    samples = Embedded(
        features,
        _ids(train, rows),
        None if labels is None else labels.cpu().clamp(min=-1),
        list(part.classes) if labels is not None else (),
        texts,
        None if texts is not None else shown,
        positives,
        first=folder.name,
        unit=kind.unit,
        total=len(train),
        usable=USABLE,
        # Ids of a column name the same samples in any data; row numbers do so only in these.
        fingerprint="" if train.division is None or kind.sample_ids(train) is not None else train.division.fingerprint,
        notes=[NOTE, *([] if positives is None else [RANDOM_VIEW]), *_loss_notes(loss, run.settings.method, by_pairs)],
    )
    return RunSamples(samples, loss if isinstance(loss, InfoNCE) else None, str(train.name))


def _loss_notes(loss: Any, method: str, by_pairs: bool) -> list[str]:
    """What the settings of the page cannot tell of the loss of a run. by_pairs: whether it compares single samples"""
    notes = []
    if not isinstance(loss, InfoNCE):
        notes.append(f"The page does not show the run's loss, {type(loss).__name__}: setting A is not the run's.")
    elif isinstance(loss.temperature, Learnable):
        notes.append("The run learned its temperature: setting A has the value at its start.")
    if not by_pairs:
        notes.append(
            f"The run's method, {method}, does not compare samples one by one: its weights are others, and only other "
            "methods can leave out the marked pairs."
        )
    return notes


def _ids(train: Any, rows: Tensor) -> Sequence[Id]:
    """The ids of the data set if it has an id column, else the row numbers in the training split."""
    given = getattr(train, "sample_ids", None)
    return rows.tolist() if given is None else [checked_id(given[row]) for row in rows.tolist()]


@torch.no_grad()
def _views(run: Any, kind: Any, part: Any, features: Tensor) -> Tensor | None:
    """Features of a random view of each sample; None if the method makes none, or the encoder does not take it."""
    resident = kind.resident(part)
    if run.views is None or resident is None:
        return None
    encoder: nn.Module = run.encoder
    device = next(iter(encoder.parameters()), features).device
    try:
        found = [
            encoder(run.views(resident.batch(index), generator("cpu", 0, number), views=1).to(device)).float().cpu()
            for number, index in enumerate(torch.split(torch.arange(len(features)), _BATCH))
        ]
        joined = torch.cat(found)
    except (RuntimeError, TypeError, ValueError, AttributeError):  # such as views of two networks
        return None
    return joined if joined.shape == features.shape and bool(joined.isfinite().all()) else None

"""Samples with their embeddings, as the explorer shows them."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardneg import checks
from hardneg.checks import TensorLike
from hardneg.evaluation.alignment import checked_embeddings
from hardneg.insight.samples import Images
from hardneg.printable import printable
from hardneg.randomness import generator

Id = int | str
_WHOLE = re.compile("0|-?[1-9][0-9]{0,99}")  # a whole number as a label file states it


@dataclass(frozen=True)
class Embedded:
    """Samples with embeddings, and whatever is known of them; all of one length N.

    Args:
        features: (N, d), floating-point, of the first checkpoint.
        ids: of each sample, as ``data.not_negatives`` names it.
        labels: (N,) int64, −1 where unknown; None without labels.
        classes: the name of each label.
        texts: shown as text.
        images: (C, H, W) uint8 each; thumbnails are made of them.
        positives: (N, d) a second view of each sample.
        checkpoints: further features by name, such as of other epochs or runs.
        checkpoint_positives: second views by the same names, as far as they are known.
        guide: (N, d') features of a stronger model.
        first: the name of ``features`` among the checkpoints.
        checkpoint_word: what a checkpoint is called on the page.
        unit: what a sample is.
        total: number of samples before a random subset was taken.
        usable: what the marked pairs can be used for, a sentence.
        fingerprint: of the data whose row numbers the ids are; training on other data then refuses the marked pairs.
        notes: further sentences for the top of the page.
    """

    features: Tensor
    ids: Sequence[Id]
    labels: Tensor | None = None
    classes: Sequence[str] = ()
    texts: Sequence[str] | None = None
    images: Images | None = None
    positives: Tensor | None = None
    checkpoints: Mapping[str, Tensor] = field(default_factory=dict)
    checkpoint_positives: Mapping[str, Tensor] = field(default_factory=dict)
    guide: Tensor | None = None
    first: str = "given"
    checkpoint_word: str = "checkpoint"
    unit: str = "samples"
    total: int = 0
    usable: str = ""
    fingerprint: str = ""
    notes: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.features)

    def subset(self, count: int, seed: int = 0) -> "Embedded":
        """A random part of at most ``count`` samples, in their order."""
        if len(self) <= count:
            return replace(self, total=self.total or len(self))
        rows = torch.randperm(len(self), generator=generator("cpu", seed))[:count].sort().values  # (count,)
        chosen: list[int] = rows.tolist()

        def part(rows_of: Tensor | None) -> Tensor | None:
            return None if rows_of is None else rows_of[rows]

        return replace(
            self,
            features=self.features[rows],
            ids=[self.ids[row] for row in chosen],
            labels=part(self.labels),
            texts=None if self.texts is None else [self.texts[row] for row in chosen],
            images=None if self.images is None else _Selected(self.images, chosen),
            positives=part(self.positives),
            checkpoints={name: given[rows] for name, given in self.checkpoints.items()},
            checkpoint_positives={name: given[rows] for name, given in self.checkpoint_positives.items()},
            guide=part(self.guide),
            total=self.total or len(self),
        )


class _Selected:
    """Some images of a sequence."""

    def __init__(self, images: Images, rows: Sequence[int]) -> None:
        self.images, self.rows = images, rows

    def __getitem__(self, index: int) -> Tensor | str:
        return self.images[self.rows[index]]

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class GivenSamples:
    """Samples as they are given, by the arguments of `write_explorer`.

    Examples:
        >>> GivenSamples(torch.eye(2), labels=["cat", "dog"]).checked().classes
        ['cat', 'dog']
    """

    features: TensorLike
    labels: TensorLike | Sequence[Any] | None = None
    classes: Sequence[str] = ()
    texts: Sequence[str] | None = None
    images: Images | NDArray[Any] | None = None
    ids: Sequence[Id] | None = None
    positives: TensorLike | None = None
    checkpoints: Mapping[str, TensorLike] | None = None
    guide: TensorLike | None = None

    def checked(self) -> Embedded:
        """The samples, after a check of everything that is known of them."""
        rows, _ = checked_embeddings("features", self.features)
        count, texts, shown = len(rows), self.texts, self.images
        if count < 2:
            raise ValueError(f"features must hold at least 2 samples, got {count}")
        numbers, names = (None, list(self.classes)) if self.labels is None else class_numbers(self.labels, self.classes)
        ids: list[Id] = list(range(count)) if self.ids is None else [checked_id(each) for each in self.ids]
        if isinstance(shown, Tensor | np.ndarray):
            shown = image_tensor(shown)
        for name, given in (("labels", numbers), ("texts", texts), ("images", shown), ("ids", ids)):
            if given is not None and len(given) != count:
                raise ValueError(
                    f"{name} has {len(given)} entries, but features {count} rows: give one for each sample"
                )
        if len(set(map(str, ids))) < count:  # files of pairs do not tell 7 from "7"
            twice = next(each for each, number in Counter(map(str, ids)).items() if number > 1)
            raise ValueError(f"ids holds {printable(twice)} twice: give each sample an id of its own")
        for number, text in enumerate(texts or ()):
            if not isinstance(text, str):
                raise ValueError(f"texts[{number}] must be a text, got {type(text).__name__}")
        further = {
            name: _same_rows(f"checkpoints[{name!r}]", given, count) for name, given in (self.checkpoints or {}).items()
        }
        second = None if self.positives is None else _same_rows("positives", self.positives, count)
        if second is not None and second.shape != rows.shape:
            raise ValueError(
                f"positives must have the shape {tuple(rows.shape)} of features, got {tuple(second.shape)}: "
                "embed a second view of each sample with the same encoder"
            )
        return Embedded(
            rows.detach().cpu(),
            ids,
            numbers,
            names,
            None if texts is None else list(texts),
            shown,
            second,
            further,
            guide=None if self.guide is None else _same_rows("guide", self.guide, count),
            unit="images" if shown is not None else "texts" if texts is not None else "samples",
        )


def class_numbers(labels: TensorLike | Sequence[Any], classes: Sequence[str] = ()) -> tuple[Tensor, list[str]]:
    """Labels as numbers (N,) from 0, −1 where unknown, and the name of each.

    labels: whole numbers, negative where unknown, or texts, empty where unknown · classes: names of the numbers

    Examples:
        >>> class_numbers(["b", "", "a"])
        (tensor([ 1, -1,  0]), ['a', 'b'])
        >>> class_numbers([3, -1, 7], ["zero", "one", "two", "three"])
        (tensor([ 0, -1,  1]), ['three', '7'])
    """
    values = labels.tolist() if isinstance(labels, Tensor | np.ndarray) else list(labels)
    found: list[int | str | None] = []
    for position, value in enumerate(values):
        if value is None or value == "" or value != value:
            found.append(None)
        elif isinstance(value, str):
            found.append(value)
        elif isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0:  # not ±inf
            found.append(int(value) if value >= 0 else None)
        else:
            raise ValueError(f"labels[{position}] must be a whole number or a text, got {value!r}")
    # Texts such as "007" stay texts: as numbers, they would be one class with "7".
    if all(isinstance(value, str) and _WHOLE.fullmatch(value) for value in found if value is not None):
        found = [None if value is None or str(value).startswith("-") else int(value) for value in found]
    kinds = {type(value) for value in found if value is not None}
    if len(kinds) > 1:
        raise ValueError("labels mixes numbers and texts: give one kind")
    known = sorted({value for value in found if value is not None})
    number = {value: position for position, value in enumerate(known)}
    names = [str(classes[value]) if isinstance(value, int) and value < len(classes) else str(value) for value in known]
    return torch.tensor([-1 if value is None else number[value] for value in found], dtype=torch.int64), names


def image_tensor(images: Tensor | NDArray[Any]) -> Tensor:
    """Images (N, H, W), (N, H, W, C) or (N, C, H, W), uint8, as (N, C, H, W).

    Examples:
        >>> image_tensor(np.zeros((2, 8, 8, 3), np.uint8)).shape
        torch.Size([2, 3, 8, 8])
    """
    given = checks.as_tensor("images", images)
    if given.dtype != torch.uint8 or given.dim() not in (3, 4) or 0 in given.shape:
        raise ValueError(
            f"images must be uint8 of shape (N, H, W), (N, H, W, C) or (N, C, H, W), got {given.dtype} of shape "
            f"{tuple(given.shape)}: convert them to 0…255"
        )
    if given.dim() == 3:
        return given[:, None]
    return given if given.shape[1] in (1, 3) and given.shape[3] not in (1, 3) else given.permute(0, 3, 1, 2)


def _same_rows(name: str, given: TensorLike, count: int) -> Tensor:
    rows, _ = checked_embeddings(name, given)
    if len(rows) != count:
        raise ValueError(f"{name} has {len(rows)} rows, but features {count}: give the same samples in the same order")
    return rows.detach().cpu()


def checked_id(given: Any) -> Id:
    """An id as a Python number or text."""
    if isinstance(given, np.generic | Tensor) and given.ndim == 0:
        given = given.item()
    if isinstance(given, bool) or not isinstance(given, int | str):
        raise ValueError(f"ids must hold whole numbers or texts, got {given!r}")
    return given

"""What a trained encoder sees: pictures, their features, and the cosines between them."""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hardneg.evaluation.features import random_ranks
from hardneg.extras import required
from hardneg.insight.diagnostics import (
    MOST,
    Histograms,
    cosine_histograms,
    hardest_false_share,
    hardest_negatives,
)
from hardneg.insight.runs import Group
from hardneg.losses.inputs import normalized
from hardneg.modality import Modality
from hardneg.randomness import generator

ANCHORS, NEGATIVES = 6, 8  # rows of the gallery and pictures in each
POINTS = 400  # samples drawn in the plane
_LOSSLESS = 40  # pixels: up to this side a picture is kept as it is
_THUMBNAIL = 56  # pixels: of the longer side of a larger one


class Pictures(Protocol):
    """Pictures (C, H, W) uint8, one by one: a tensor of them, or what draws them when asked."""

    def __getitem__(self, place: int, /) -> Tensor: ...


class Sight(NamedTuple):
    """Pictures (n, C, H, W) uint8, labels (n,) or None, the names of the labels, and features (n, d)."""

    images: Pictures
    labels: Tensor | None
    classes: Sequence[str]
    features: Tensor


Look = Callable[[Path], Sight]


@dataclass(frozen=True)
class Picture:
    """A picture as a data URI, its class if known, and its cosine with the anchor; same: whether it has its class."""

    uri: str
    label: str | None
    cosine: float = 1.0
    same: bool = False


class Plane(NamedTuple):
    """points: (x, y) of some samples · styles: the number of each one's class, −1 if unknown · shares: of the variance,
    that each axis shows · classes: their names."""

    points: list[tuple[float, float]]
    styles: list[int]
    shares: tuple[float, float]
    classes: list[str]


@dataclass(frozen=True)
class Evidence:
    """seed: of the run looked at · pictures: how many · histograms, share, chance: None without labels.

    share: of the hardest negatives, those of the anchor's class · chance: that share among all others ·
    gallery: each anchor with its hardest negatives · plane: where some of the samples lie
    """

    seed: int
    pictures: int
    histograms: Histograms | None
    share: float | None
    chance: float | None
    gallery: list[tuple[Picture, list[Picture]]]
    plane: Plane


def look_at_test_set(folder: Path, trust: bool = False) -> Sight:
    """The run's encoder on up to 2,000 pictures of its test set, the same ones for every run.

    Where nothing has a label there is no test set, and the pictures are those of training. trust: allow an encoder that
    the folder names as ``module:callable``
    """
    # By name: the engine needs Lightning, which the rest of the page does without.
    loaded: Any = import_module("hardneg.training.saved_run").load_run(folder, trust=trust)
    import_module("hardneg.training.build").check_source(loaded.settings, folder)
    kind = loaded.settings.kind
    samples = kind.load_shown(loaded.settings.data, loaded.shape, loaded.division)
    rows = torch.randperm(len(samples), generator=generator("cpu", len(samples)))[:MOST].sort().values  # (n,)
    part = samples.subset(rows)
    features = kind.embed(loaded.encoder, part, loaded.views).cpu()
    if (broken := getattr(part, "broken", None)) is not None:  # unreadable samples were replaced by others of the set
        readable = (~broken.flags).nonzero()[:, 0]
        part, features = part.subset(readable), features[readable]
    return Sight(Thumbnails(kind, part), part.labels, part.classes, features)


class Thumbnails:
    """Images of the samples of a set, drawn when they are read."""

    def __init__(self, kind: Modality, samples: Any) -> None:
        self.kind, self.samples = kind, samples

    def __getitem__(self, row: int) -> Tensor:
        return self.kind.thumbnail(self.samples, row)


def gather(group: Group, look: Look = look_at_test_set) -> Evidence | str:
    """What the first run of the group that can be looked at shows, or why none can."""
    reasons: list[str] = []
    for run in group.runs:
        # Data, weights or a library may be gone in as many ways as there are sources: the rest of the page stands.
        try:
            return examine(look(run.folder), run.seed)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
    return f"the pictures or weights of this run cannot be read ({reasons[0]})" if reasons else "it has no runs"


def examine(sight: Sight, seed: int = 0) -> Evidence:
    """Histograms and gallery of what was seen."""
    images, labels, classes, features = sight
    known = None if labels is None or not bool((labels >= 0).any()) else labels
    k = min(NEGATIVES, len(features) - 1)
    if k < 1:
        raise ValueError(f"the test set must hold at least 2 pictures, got {len(features)}")
    anchors = _anchors(known, len(features))  # (A,)
    hardest = hardest_negatives(features, anchors, k)

    def picture(row: int, anchor: int, cosine: float) -> Picture:
        label = None if known is None or known[row] < 0 else int(known[row])
        name = None if label is None else str(classes[label]) if label < len(classes) else str(label)
        same = known is not None and label is not None and label == int(known[anchor]) and row != anchor
        return Picture(data_uri(images[row]), name, cosine, same)

    gallery = [
        (picture(anchor, anchor, 1.0), [picture(row, anchor, cos) for row, cos in zip(rows, cosines, strict=True)])
        for anchor, rows, cosines in zip(
            anchors.tolist(), hardest.indices.tolist(), hardest.cosines.tolist(), strict=True
        )
    ]
    enough = known is not None and int((known >= 0).sum()) > k
    histograms = cosine_histograms(features, known) if known is not None else None
    share = hardest_false_share(features, known, k) if known is not None and enough else None
    chance = hardest_false_share(features, known) if known is not None and enough else None
    return Evidence(seed, len(features), histograms, share, chance, gallery, _plane(features, known, classes))


def _plane(features: Tensor, labels: Tensor | None, classes: Sequence[str]) -> Plane:
    """Some samples on the two first principal components of the features, scaled to unit length."""
    rows = torch.randperm(len(features), generator=generator("cpu", len(features)))[:POINTS]
    unit = normalized(features.cpu().double())
    centred = unit - unit.mean(dim=0)
    _, lengths, directions = torch.linalg.svd(centred, full_matrices=False)
    wanted = directions[:2] if len(directions) > 1 else torch.cat([directions, torch.zeros_like(directions)])
    points = (centred[rows] @ wanted.T).tolist()
    shares = [*(lengths.square() / lengths.square().sum().clamp(min=1e-30)).tolist(), 0.0]
    numbers = [-1] * len(rows) if labels is None else labels.cpu()[rows].tolist()
    present = sorted({number for number in numbers if number >= 0})
    names = [str(classes[number]) if number < len(classes) else str(number) for number in present]
    styles = [present.index(number) if number >= 0 else -1 for number in numbers]
    return Plane([(x, y) for x, y in points], styles, (shares[0], shares[1]), names)


def _anchors(labels: Tensor | None, samples: int) -> Tensor:
    """Anchors (A,) drawn by seed, of different classes where there are labels; the same for every encoder."""
    if labels is None:
        return torch.randperm(samples, generator=generator("cpu", samples))[:ANCHORS]
    rows = (labels >= 0).nonzero()[:, 0].cpu()
    classes, targets = torch.unique(labels.cpu()[rows], return_inverse=True)
    one_each = rows[random_ranks(targets, samples) == 0]  # (C,)
    one_each = one_each[labels.cpu()[one_each].argsort()]
    chosen = torch.randperm(len(classes), generator=generator("cpu", samples))[:ANCHORS].sort().values
    return one_each[chosen]


def data_uri(image: Tensor) -> str:
    """A picture (C, H, W) uint8 as a PNG in a data URI: as it is if small, else a thumbnail of 128 colours.

    Examples:
        >>> data_uri(torch.zeros(1, 8, 8, dtype=torch.uint8))[:22]
        'data:image/png;base64,'
    """
    image_module = required("PIL.Image", "train")
    # Other numbers of channels have no colours to show: their mean is a picture too.
    pixels = image.permute(1, 2, 0) if len(image) == 3 else image.float().mean(dim=0).round().to(torch.uint8)
    picture = image_module.fromarray(pixels.contiguous().cpu().numpy())
    if max(picture.size) > _LOSSLESS:
        picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
        picture = picture.quantize(128)
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")

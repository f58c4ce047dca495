"""Samples of a run with their embeddings: histograms, hardest negatives and a 2-D projection for the report."""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hardneg.diagnostics.class_means import class_means
from hardneg.diagnostics.hubs import hubs
from hardneg.evaluation.features import random_ranks
from hardneg.extras import required
from hardneg.insight.diagnostics import (
    MAX_SAMPLES,
    Histograms,
    cosine_histograms,
    hardest_false_share,
    hardest_negatives,
)
from hardneg.insight.runs import Group
from hardneg.losses.inputs import normalized
from hardneg.modality import Modality
from hardneg.randomness import generator

ANCHORS, NEGATIVES, SAME_CLASS = 6, 6, 3  # anchors in the gallery, and their neighbors of other and of their own class
CLASSES = 20  # whose cosines are shown one by one
HUBS, NEAREST = 6, 10  # hubs in the report, and the number of most similar samples that make a hub
HARDEST = 8  # most similar samples, of which the share of false negatives is given
POINTS = 400  # samples in the 2-D projection
_LOSSLESS = 40  # pixels: images up to this side are stored unchanged
_CHARACTERS = 300  # of a text
_THUMBNAIL = 56  # pixels: the longer side of larger images


class Images(Protocol):
    """A sequence of images (C, H, W) uint8 or texts: a tensor, or an object that makes them on access."""

    def __getitem__(self, index: int, /) -> Tensor | str: ...
    def __len__(self) -> int: ...


class EncodedSamples(NamedTuple):
    """Images (n, C, H, W) uint8, labels (n,) or None, the name of each class, features (n, d), and what a sample is."""

    images: Images
    labels: Tensor | None
    classes: Sequence[str]
    features: Tensor
    unit: str = "samples"


LoadSamples = Callable[[Path], EncodedSamples]


@dataclass(frozen=True)
class Thumbnail:
    """A sample of the gallery.

    uri: its image as a data URI, empty for a text · label: name of its class, None if unknown · cosine: with the
    anchor, 1 for an anchor · text: of a sample that is a text
    """

    uri: str
    label: str | None
    cosine: float = 1.0
    text: str = ""


@dataclass(frozen=True)
class Neighbors:
    """An anchor of the gallery and the samples with the highest cosines, in this order.

    negatives: of other classes; all samples if the anchor's class is not known · same_class: of the anchor's class,
    which are false negatives of a loss without labels
    """

    anchor: Thumbnail
    negatives: list[Thumbnail]
    same_class: list[Thumbnail]


class Projection(NamedTuple):
    """Samples on the first two principal components.

    points: (x, y) of each sample · styles: index of its class in ``classes``, −1 if unknown · variance_shares: share of
    the variance on each axis · classes: their names
    """

    points: list[tuple[float, float]]
    styles: list[int]
    variance_shares: tuple[float, float]
    classes: list[str]


class ClassGeometry(NamedTuple):
    """Angles between the centered means of classes, and the spread around them.

    classes: names, in the order of ``cosines`` · cosines: of each pair of class means, empty if there are more than
    `CLASSES` · target: −1/(C − 1) · spread: mean of ‖z − class mean‖² · deviation: mean of |cosine − target| · nearest:
    the two classes with the highest cosine, and it
    """

    classes: list[str]
    cosines: list[list[float]]
    target: float
    spread: float
    deviation: float
    nearest: tuple[str, str, float]


class HubSample(NamedTuple):
    """A hub. anchors: number of those that it is near to · different: of another class, None without labels."""

    thumbnail: Thumbnail
    anchors: int
    different: int | None


class HubSummary(NamedTuple):
    """How often samples are among the k nearest of others; see `hardneg.insight.Hubs`. shown: the largest hubs."""

    k: int
    skewness: float
    unused: float
    shown: list[HubSample]


@dataclass(frozen=True)
class EmbeddingSummary:
    """The results of one run's embeddings that the report shows.

    seed: of the run · samples: number of samples · unit: what they are, as "images" · histograms: of
    cosines · hardest_same_share: share of same-class samples among the `HARDEST` most similar ones of each
    sample · all_same_share: the same share among all other samples · gallery: some anchors with their
    neighbors · projection: to two dimensions · geometry: angles between classes · hubs: samples that are hard negatives
    of many

    The histograms, both shares and the geometry are None if there are no or too few labels.
    """

    seed: int
    samples: int
    unit: str
    histograms: Histograms | None
    hardest_same_share: float | None
    all_same_share: float | None
    gallery: list[Neighbors]
    projection: Projection
    geometry: ClassGeometry | None = None
    hubs: HubSummary | None = None


def load_test_samples(folder: Path, trust: bool = False) -> EncodedSamples:
    """Encode up to 2,000 samples of a run's test set with its encoder; every run on the same data gets the same ones.

    Data without labels have no test set: samples of the training set are used. trust: allow an encoder that the folder
    names as ``module:callable``
    """
    # Imported by name: training needs Lightning, which the rest of the report does not.
    run: Any = import_module("hardneg.training.saved_run").load_run(folder, trust=trust)
    import_module("hardneg.training.build").check_source(run.settings, folder)
    kind = run.settings.kind
    samples = kind.load_shown(run.settings.data, run.shape, run.division)
    rows = torch.randperm(len(samples), generator=generator("cpu", len(samples)))[:MAX_SAMPLES].sort().values  # (n,)
    part = kind.sample(samples, rows)
    features = kind.embed(run.encoder, part, run.views).cpu()
    return EncodedSamples(Thumbnails(kind, part), part.labels, part.classes, features, kind.unit)


class Thumbnails:
    """Images or texts of the samples of a set, made when they are read."""

    def __init__(self, kind: Modality, samples: Any) -> None:
        self.kind, self.samples = kind, samples

    def __getitem__(self, row: int) -> Tensor | str:
        text = self.kind.caption(self.samples, row)
        return self.kind.thumbnail(self.samples, row) if text is None else text

    def __len__(self) -> int:
        return len(self.samples)


def summarize_group(group: Group, load_samples: LoadSamples = load_test_samples) -> EmbeddingSummary | str:
    """Summarize the embeddings of the first run of a group whose samples can be loaded; else return the reason."""
    reasons: list[str] = []
    for run in group.runs:
        # Data, weights or a library can be missing in many ways; the rest of the report does not need them.
        try:
            return summarize(load_samples(run.folder), run.seed)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
    return f"the data or weights of this run cannot be read ({reasons[0]})" if reasons else "the group has no runs"


def summarize(samples: EncodedSamples, seed: int = 0) -> EmbeddingSummary:
    """Compute histograms, hardest negatives and the 2-D projection of encoded samples; seed: of the run."""
    features, given_labels = samples.features, samples.labels
    labels = None if given_labels is None or not bool((given_labels >= 0).any()) else given_labels
    if len(features) < 2:
        raise ValueError(f"the test set must hold at least 2 {samples.unit}, got {len(features)}")
    histograms = hardest_share = all_share = None
    if labels is not None:
        histograms = cosine_histograms(features, labels)
        if int((labels >= 0).sum()) > HARDEST:
            hardest_share = hardest_false_share(features, labels, HARDEST)
            all_share = hardest_false_share(features, labels)
    return EmbeddingSummary(
        seed,
        len(features),
        samples.unit,
        histograms,
        hardest_share,
        all_share,
        _gallery(samples, labels),
        _project(features, labels, samples.classes),
        None if labels is None else _geometry(features, labels, samples.classes),
        _hubs(samples, labels),
    )


def _gallery(samples: EncodedSamples, labels: Tensor | None) -> list[Neighbors]:
    """Some anchors, each with its most similar samples of other classes and of its own."""
    anchors = _choose_anchors(labels, len(samples.features))  # (A,)
    ranked = hardest_negatives(samples.features, anchors, len(samples.features) - 1)  # (A, n − 1)
    known = torch.full((len(samples.features),), -1) if labels is None else labels.cpu()  # (n,)

    def thumbnail(row: int, cosine: float) -> Thumbnail:
        return _thumbnail(samples, row, int(known[row]), cosine)

    gallery = []
    for anchor, rows, cosines in zip(anchors.tolist(), ranked.indices.cpu(), ranked.cosines.cpu(), strict=True):
        own, others = known[anchor], known[rows]
        # A sample without a label may be of the anchor's class: it is shown only if no class is known.
        different = (others != own) & (others >= 0) if own >= 0 else torch.ones_like(rows, dtype=torch.bool)
        shown = [
            [thumbnail(row, cosine) for row, cosine in zip(rows[part].tolist(), cosines[part].tolist(), strict=True)]
            for part in (different.nonzero()[:NEGATIVES, 0], (~different & (others == own)).nonzero()[:SAME_CLASS, 0])
        ]
        gallery.append(Neighbors(thumbnail(anchor, 1.0), shown[0], shown[1]))
    return gallery


def _thumbnail(samples: EncodedSamples, row: int, label: int, cosine: float = 1.0) -> Thumbnail:
    """One sample, small. label: its class, −1 if unknown"""
    given, shown = None if label < 0 else _class_name(samples.classes, label), samples.images[row]
    if isinstance(shown, str):
        short = shown if len(shown) <= _CHARACTERS else f"{shown[:_CHARACTERS]}…"
        return Thumbnail("", given, cosine, short)
    return Thumbnail(data_uri(shown), given, cosine)


def _class_name(classes: Sequence[str], label: int) -> str:
    return str(classes[label]) if label < len(classes) else str(label)


def _geometry(features: Tensor, labels: Tensor, classes: Sequence[str]) -> ClassGeometry | None:
    """The angles between class means; None with a single class."""
    found = class_means(features, labels, centered=True)
    if found.target is None or found.deviation is None:
        return None
    cosines = found.cosines().cpu()  # (C, C)
    pairs = cosines.clone().fill_diagonal_(-torch.inf)
    one, other = divmod(int(pairs.argmax()), len(pairs))
    names = [_class_name(classes, label) for label in found.labels.tolist()]
    nearest = names[one], names[other], float(cosines[one, other])
    shown = cosines.tolist() if len(names) <= CLASSES else []
    return ClassGeometry(names, shown, found.target, found.spread.value, found.deviation, nearest)


def _hubs(samples: EncodedSamples, labels: Tensor | None) -> HubSummary | None:
    """The samples that are most often among the nearest of others; None for few samples."""
    if len(samples.features) <= 2 * NEAREST:
        return None
    found = hubs(samples.features, NEAREST, labels)
    known = torch.full((len(samples.features),), -1) if labels is None else labels.cpu()
    shown = [
        HubSample(
            _thumbnail(samples, row, int(known[row])),
            int(found.counts[row]),
            None if found.different is None or int(known[row]) < 0 else int(found.different[row]),
        )
        for row in found.order[:HUBS].tolist()
    ]
    return HubSummary(NEAREST, found.skewness, found.unused, shown)


def _project(features: Tensor, labels: Tensor | None, classes: Sequence[str]) -> Projection:
    """Project some samples to the first two principal components of the normalized features."""
    rows = torch.randperm(len(features), generator=generator("cpu", len(features)))[:POINTS]
    unit = normalized(features.cpu().double())
    centered = unit - unit.mean(dim=0)
    _, singular_values, directions = torch.linalg.svd(centered, full_matrices=False)
    axes = directions[:2] if len(directions) > 1 else torch.cat([directions, torch.zeros_like(directions)])
    points = (centered[rows] @ axes.T).tolist()
    variances = singular_values.square()
    shares = [*(variances / variances.sum().clamp(min=1e-30)).tolist(), 0.0]
    numbers = [-1] * len(rows) if labels is None else labels.cpu()[rows].tolist()
    present = sorted({number for number in numbers if number >= 0})
    names = [_class_name(classes, number) for number in present]
    styles = [present.index(number) if number >= 0 else -1 for number in numbers]
    return Projection([(x, y) for x, y in points], styles, (shares[0], shares[1]), names)


def _choose_anchors(labels: Tensor | None, samples: int) -> Tensor:
    """Anchors (A,), of different classes if there are labels; the same ones for every encoder."""
    if labels is None:
        return torch.randperm(samples, generator=generator("cpu", samples))[:ANCHORS]
    rows = (labels >= 0).nonzero()[:, 0].cpu()
    classes, targets = torch.unique(labels.cpu()[rows], return_inverse=True)
    one_per_class = rows[random_ranks(targets, samples) == 0]  # (C,)
    one_per_class = one_per_class[labels.cpu()[one_per_class].argsort()]
    chosen = torch.randperm(len(classes), generator=generator("cpu", samples))[:ANCHORS].sort().values
    return one_per_class[chosen]


def data_uri(image: Tensor) -> str:
    """Encode an image (C, H, W) uint8 as a PNG in a data URI: unchanged if small, else 56 pixels with 128 colors.

    Examples:
        >>> data_uri(torch.zeros(1, 8, 8, dtype=torch.uint8))[:22]
        'data:image/png;base64,'
    """
    image_module = required("PIL.Image", "train")
    # Only 3 channels are colors; of any other number the mean is shown.
    pixels = image.permute(1, 2, 0) if len(image) == 3 else image.float().mean(dim=0).round().to(torch.uint8)
    drawn = image_module.fromarray(pixels.contiguous().cpu().numpy())
    if max(drawn.size) > _LOSSLESS:
        drawn.thumbnail((_THUMBNAIL, _THUMBNAIL))
        drawn = drawn.quantize(128)
    file = io.BytesIO()
    drawn.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")

"""What the explorer's page holds of the samples: features as base64, thumbnails, texts and a map, within a size."""

import base64
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hardneg.insight.explorer.embedded import Embedded, Id
from hardneg.insight.samples import Images, data_uri
from hardneg.insight.suspects import suspected_false_negatives
from hardneg.losses.inputs import normalized
from hardneg.printable import printable
from hardneg.randomness import generator

_SIDES = (None, 40, 28, 20)  # pixels of a thumbnail: as `data_uri` makes it, or smaller
_LENGTHS = (300, 150, 80, 40)  # characters of a text
_NAME = 100  # characters of the name of a class
_FEW = 16  # directions that are found more exactly, because they are shown
_PILOT = 40  # thumbnails from which the size of all is estimated
_SMALL = 1024  # samples or dimensions up to which principal components are exact


class Packed(NamedTuple):
    """Features as the page stores them: base64 texts, their dtype and width, and how they differ from those given."""

    texts: list[str]
    dtype: str
    dim: int
    note: str


def pack(features: Sequence[Tensor], bytes_allowed: int) -> Packed:
    """Unit vectors as base64: float32 if that fits, else float16, else float16 in fewer dimensions.

    features: (N, d) each; the widths may differ, narrower ones are filled with zeros · bytes_allowed: of all texts

    Examples:
        >>> pack([torch.eye(2)], 1000).dtype, pack([torch.randn(100, 64)], 10_000).dim
        ('float32', 37)
    """
    width = max(given.shape[1] for given in features)
    numbers = bytes_allowed * 3 // 4 // sum(len(given) for given in features)  # bytes of a row
    dtype = "float32" if 4 * width <= numbers else "float16"
    dim = width if 2 * width <= numbers else max(2, numbers // 2)
    texts, worst = [], 0.0
    for given in features:
        unit = normalized(given.double())
        kept = _reduced(unit, dim)
        # Unit length again: what the page computes are cosines, and float16 has the best resolution below 1.
        rows = normalized(kept).to(torch.float32 if dtype == "float32" else torch.float16)
        worst = max(worst, _largest_change(unit, rows))
        filled = torch.nn.functional.pad(rows, (0, dim - rows.shape[1]))
        little = filled.numpy().astype("<f4" if dtype == "float32" else "<f2")
        texts.append(base64.b64encode(np.ascontiguousarray(little).tobytes()).decode("ascii"))
    if dim < width:
        note = f"The features are reduced from {width} to {dim} dimensions and rounded to float16"
    elif dtype == "float16":
        note = "The features are rounded to float16"
    else:
        return Packed(texts, dtype, dim, "")
    note += f": cosines differ by up to {worst:.1g} (of 1,000 random pairs). All numbers are of the stored features."
    return Packed(texts, dtype, dim, note)


def unpack(text: str, dtype: str, dim: int) -> Tensor:
    """The features (N, dim) that the page reads from a text of `pack`, float64."""
    rows = np.frombuffer(base64.b64decode(text), "<f4" if dtype == "float32" else "<f2")
    return torch.from_numpy(rows.astype(np.float64)).reshape(-1, dim)


def _reduced(unit: Tensor, dim: int) -> Tensor:
    """The rows in the subspace of ``dim`` dimensions that holds most of their squared length."""
    if unit.shape[1] <= dim:
        return unit
    return unit @ _leading_directions(unit, dim)


def _leading_directions(rows: Tensor, count: int) -> Tensor:
    """Orthonormal directions (d, count) of the largest sums of squares, the largest first."""
    if len(rows) <= min(_SMALL, rows.shape[1]):
        directions: Tensor = torch.linalg.svd(rows, full_matrices=False).Vh.T
        return directions[:, :count]
    if rows.shape[1] <= _SMALL:
        exact: Tensor = torch.linalg.eigh(rows.T @ rows).eigenvectors.flip(1)
        return exact[:, :count]
    # Subspace iteration: the eigenvectors of a large matrix take minutes.
    basis = torch.randn(
        rows.shape[1], min(count + 8, *rows.shape), dtype=rows.dtype, generator=generator("cpu", len(rows))
    )
    for _ in range(12 if count <= _FEW else 3):
        basis = torch.linalg.qr(rows.T @ (rows @ torch.linalg.qr(basis).Q)).Q
    inside = rows @ basis  # (N, count + 8)
    turned: Tensor = basis @ torch.linalg.eigh(inside.T @ inside).eigenvectors.flip(1)
    return turned[:, :count]


def _largest_change(unit: Tensor, rows: Tensor) -> float:
    one, other = torch.randint(len(unit), (2, 1000), generator=generator("cpu", len(unit)))
    stored = normalized(rows.double())
    return float(((unit[one] * unit[other]).sum(1) - (stored[one] * stored[other]).sum(1)).abs().max())


def principal_map(features: Tensor) -> tuple[Tensor, list[float]]:
    """The samples on the first two principal components, (N, 2), and each one's share of the variance."""
    unit = normalized(features.double())
    centered = unit - unit.mean(dim=0)
    axes = _leading_directions(centered, 2)
    if axes.shape[1] < 2:
        axes = torch.nn.functional.pad(axes, (0, 2 - axes.shape[1]))
    points = centered @ axes  # (N, 2)
    shares = points.square().sum(dim=0) / centered.square().sum().clamp(min=1e-30)
    return points, shares.tolist()


def page_data(
    samples: Embedded, settings: Sequence[dict[str, Any]], positive: float, suspects: int, bytes_allowed: int
) -> dict[str, Any]:
    """What the script of the page reads, as JSON.

    settings: of A and of B · positive: cosine of a positive that is not given · suspects: pairs to review, at most
    """
    second = samples.checkpoint_positives
    every = [(samples.first, samples.features, samples.positives)]
    every += [(name, features, second.get(name)) for name, features in samples.checkpoints.items()]
    share = 0.4 if samples.images is not None else 0.55 if samples.texts is not None else 0.8
    packed = pack([features for _, features, _ in every], int(share * bytes_allowed))
    checkpoints = [
        {"name": printable(name), "features": text, "positives": _cosines(features, positives)}
        for (name, features, positives), text in zip(every, packed.texts, strict=True)
    ]
    points, shares = principal_map(samples.features)
    notes = [*samples.notes, *([packed.note] if packed.note else [])]
    if samples.total > len(samples):
        notes.append(
            f"Of {samples.total:,} {samples.unit}, {len(samples):,} are shown, drawn at random: an anchor is compared "
            "with these only."
        )
    if samples.positives is None:
        notes.append(
            f"No second view is given: the positive's cosine is {positive:g} for every anchor, until you move its "
            "slider."
        )
    return {
        "count": len(samples),
        "dim": packed.dim,
        "dtype": packed.dtype,
        "unit": samples.unit,
        "checkpoints": checkpoints,
        "checkpointWord": samples.checkpoint_word,
        "positive": positive,
        "labels": None if samples.labels is None else samples.labels.tolist(),
        "classes": [_cut(printable(str(name)), _NAME) for name in samples.classes],
        "ids": [id_json(each) for each in samples.ids],
        "thumbnails": None if samples.images is None else _thumbnails(samples.images, int(0.45 * bytes_allowed)),
        "texts": None if samples.texts is None else _short_texts(samples.texts, int(0.3 * bytes_allowed)),
        "map": [[round(x, 4), round(y, 4)] for x, y in points.tolist()],
        "mapCaption": (
            f"First two principal components ({100 * shares[0]:.0f} % and {100 * shares[1]:.0f} % of the variance), "
            "colored by label. Large points: negatives of large weight under A. Click to choose an anchor."
        ),
        "order": torch.randperm(len(samples), generator=generator("cpu", len(samples))).tolist(),
        "suspects": _suspects(samples, suspects),
        "setting": settings[0],
        "settingB": settings[1],
        "usable": samples.usable,
        "fingerprint": samples.fingerprint,
        "notes": [printable(note) for note in notes],
    }


def _cosines(features: Tensor, positives: Tensor | None) -> list[float] | None:
    """The cosine of each sample with its positive, which is all that a loss needs of the positive."""
    if positives is None:
        return None
    return (normalized(features.double()) * normalized(positives.double())).sum(dim=1).clamp(-1, 1).tolist()


def id_json(given: Id) -> str:
    """An id as JSON text: whole numbers beyond 2⁵³ stay exact in the page."""
    return json.dumps(given)


def _suspects(samples: Embedded, count: int) -> list[list[Any]]:
    """Pairs to review: of all samples, and of those with different labels, alternating."""
    found = [suspected_false_negatives(samples.features, None, samples.guide, count=count)]
    if samples.labels is not None:
        found.append(suspected_false_negatives(samples.features, samples.labels, samples.guide, count=count // 2 or 1))
    rows: dict[tuple[int, int], list[Any]] = {}
    for each in found[::-1]:
        for (one, other), score, reason in zip(each.pairs.tolist(), each.scores.tolist(), each.reasons, strict=True):
            rows.setdefault((one, other), [one, other, round(score, 4), reason])
    return sorted(rows.values(), key=lambda row: (-row[2], row[0], row[1]))


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}…"


def _short_texts(texts: Sequence[str], bytes_allowed: int) -> list[str]:
    for length in _LENGTHS:
        cut = [_cut(text, length) for text in map(printable, texts)]
        if sum(len(json.dumps(text)) for text in cut) <= bytes_allowed:
            break
    return cut


def _thumbnails(images: Images, bytes_allowed: int) -> list[str]:
    chosen = range(0, len(images), max(1, len(images) // _PILOT))
    for side in _SIDES:
        size = sum(len(_thumbnail(images[row], side)) for row in chosen) / len(chosen)
        if size * len(images) <= 0.95 * bytes_allowed:
            break
    return [_thumbnail(images[row], side) for row in range(len(images))]


def _thumbnail(image: Tensor | str, side: int | None) -> str:
    if isinstance(image, str):
        raise ValueError("images must hold images (C, H, W): pass texts as texts")
    if image.dtype != torch.uint8 or image.dim() != 3:
        raise ValueError(
            f"images must hold uint8 of shape (C, H, W), got {image.dtype} of shape {tuple(image.shape)}: convert them "
            "to 0…255"
        )
    if side is not None and max(image.shape[1:]) > side:
        factor = side / max(image.shape[1:])
        height, width = (max(1, round(length * factor)) for length in image.shape[1:])
        image = torch.nn.functional.adaptive_avg_pool2d(image.float(), (height, width)).round().to(torch.uint8)
    return data_uri(image)

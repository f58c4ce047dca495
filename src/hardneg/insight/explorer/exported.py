"""The explorer's samples as a parquet table, for other viewers."""

from pathlib import Path
from typing import Any

import torch

from hardneg.diagnostics.neighbors import nearest_others
from hardneg.extras import required
from hardneg.insight.explorer.embedded import Embedded
from hardneg.insight.explorer.settings import neighbor_weights
from hardneg.insight.explorer.stored import principal_map
from hardneg.losses.inputs import normalized

NEIGHBORS = 20


def export_table(samples: Embedded, setting: dict[str, Any], positive: float, to: Path, k: int = NEIGHBORS) -> Path:
    """Write a parquet file with one row for each sample; returns its path.

    Columns: ``id`` · ``label`` (its name, null if unknown) · ``x``, ``y`` on the map · ``neighbors`` (ids of the k
    nearest, nearest first) · ``cosines`` · ``weights`` (of the neighbors under ``setting``, with all other samples as
    candidates; 0 where it leaves one out) · ``text``, if there are texts. positive: cosine of positives if not given
    """
    arrow, parquet = required("pyarrow", "data"), required("pyarrow.parquet", "data")
    k = min(k, len(samples) - 1)
    unit = normalized(samples.features.double())
    near, cosines = nearest_others(unit, k)  # (N, k) each
    best = torch.full((len(unit),), positive, dtype=torch.float64)
    if samples.positives is not None:
        best = (unit * normalized(samples.positives.double())).sum(dim=1)
    weights = neighbor_weights(unit, near, best, samples.labels, setting)
    points, _ = principal_map(samples.features)
    numbers = [-1] * len(samples) if samples.labels is None else samples.labels.tolist()
    names = [_encodable(str(name)) for name in samples.classes]
    ids: list[Any] = list(samples.ids)
    if not all(isinstance(each, int) and abs(each) < 1 << 63 for each in ids):  # a column has one type
        ids = [_encodable(str(each)) for each in ids]
    columns: dict[str, Any] = {
        "id": ids,
        "label": [None if n < 0 else names[n] if n < len(names) else str(n) for n in numbers],
        "x": points[:, 0].tolist(),
        "y": points[:, 1].tolist(),
        "neighbors": [[ids[other] for other in row] for row in near.tolist()],
        "cosines": cosines.tolist(),
        "weights": weights.tolist(),
    }
    types = {"label": arrow.string()}
    if samples.texts is not None:
        columns["text"] = list(map(_encodable, samples.texts))
    table = arrow.table({name: arrow.array(values, types.get(name)) for name, values in columns.items()})
    to.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, to)
    return to


def _encodable(text: str) -> str:
    """The text, with lone surrogates as escape sequences: parquet holds UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()

"""The sections of the report, one file each: a function from the contents of a report to a `Part`, or to None if
there is nothing to show."""

from collections.abc import Callable

from hardneg.insight.contents import Contents, Part
from hardneg.insight.parts.alignment_uniformity import alignment_uniformity
from hardneg.insight.parts.class_geometry import class_geometry
from hardneg.insight.parts.curves import curves
from hardneg.insight.parts.explorer import explorer
from hardneg.insight.parts.false_negatives import false_negatives
from hardneg.insight.parts.gallery import gallery
from hardneg.insight.parts.histograms import histograms
from hardneg.insight.parts.hubs import hubs
from hardneg.insight.parts.loss_ordering import loss_ordering
from hardneg.insight.parts.metric_table import metric_table
from hardneg.insight.parts.projection import projection
from hardneg.insight.parts.provenance import provenance
from hardneg.insight.parts.step_time import step_time

PARTS: tuple[Callable[[Contents], Part | None], ...] = (
    metric_table,
    curves,
    false_negatives,
    alignment_uniformity,
    loss_ordering,
    histograms,
    class_geometry,
    projection,
    gallery,
    hubs,
    explorer,
    step_time,
    provenance,
)

__all__ = [
    "PARTS",
    "alignment_uniformity",
    "class_geometry",
    "curves",
    "explorer",
    "false_negatives",
    "gallery",
    "histograms",
    "hubs",
    "loss_ordering",
    "metric_table",
    "projection",
    "provenance",
    "step_time",
]

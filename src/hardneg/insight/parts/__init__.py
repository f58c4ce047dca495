"""The sections of the report, one file each: a function from the contents of a report to a `Part`."""

from collections.abc import Callable

from hardneg.insight.contents import Contents, Part
from hardneg.insight.parts.curves import curves
from hardneg.insight.parts.explorer import explorer
from hardneg.insight.parts.gallery import gallery
from hardneg.insight.parts.histograms import histograms
from hardneg.insight.parts.metric_table import metric_table
from hardneg.insight.parts.projection import projection
from hardneg.insight.parts.provenance import provenance
from hardneg.insight.parts.step_time import step_time

PARTS: tuple[Callable[[Contents], Part], ...] = (
    metric_table,
    curves,
    histograms,
    projection,
    gallery,
    explorer,
    step_time,
    provenance,
)

__all__ = [
    "PARTS",
    "curves",
    "explorer",
    "gallery",
    "histograms",
    "metric_table",
    "projection",
    "provenance",
    "step_time",
]

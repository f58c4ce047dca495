"""The parts of the page, one file each: a function from the contents of a report to a `Part`."""

from collections.abc import Callable

from hardneg.insight.contents import Contents, Part
from hardneg.insight.parts.curves import curves
from hardneg.insight.parts.gallery import gallery
from hardneg.insight.parts.histograms import histograms
from hardneg.insight.parts.metric_table import comparison
from hardneg.insight.parts.plane import plane
from hardneg.insight.parts.provenance import provenance
from hardneg.insight.parts.step_time import time

PARTS: tuple[Callable[[Contents], Part], ...] = (comparison, curves, histograms, plane, gallery, time, provenance)

__all__ = ["PARTS", "comparison", "curves", "gallery", "histograms", "plane", "provenance", "time"]

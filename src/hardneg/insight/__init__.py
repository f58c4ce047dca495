"""Diagnostics of embeddings, and `hardneg.insight.report`, which compares runs on one HTML page."""

from hardneg.evaluation.alignment import alignment, uniformity
from hardneg.insight.diagnostics import (
    Hardest,
    Histograms,
    cosine_histograms,
    hardest_false_share,
    hardest_negatives,
)

__all__ = [
    "Hardest",
    "Histograms",
    "alignment",
    "cosine_histograms",
    "hardest_false_share",
    "hardest_negatives",
    "uniformity",
]

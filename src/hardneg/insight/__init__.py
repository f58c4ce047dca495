"""Diagnostics of embeddings, and `hardneg.insight.report`, which compares runs on one HTML page."""

from hardneg.insight.diagnostics import (
    Hardest,
    Histograms,
    alignment,
    cosine_histograms,
    hardest_false_share,
    hardest_negatives,
    uniformity,
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

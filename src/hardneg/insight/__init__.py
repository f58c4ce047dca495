"""What the negatives did: numbers about embeddings, and `hardneg.insight.report`, which puts runs on one page."""

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

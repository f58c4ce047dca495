"""Diagnostics of embeddings, and `hardneg.insight.report`, which compares runs on one HTML page."""

from hardneg.diagnostics.class_means import ClassMeans, class_means
from hardneg.diagnostics.estimates import (
    Estimate,
    alignment_estimate,
    mean_estimate,
    share_estimate,
    uniformity_estimate,
)
from hardneg.diagnostics.gradient_shares import GradientShares, gradient_shares
from hardneg.diagnostics.hubs import Hubs, hubs
from hardneg.diagnostics.loss_ordering import AnchorLosses, LossOrdering, anchor_losses, loss_ordering
from hardneg.diagnostics.neighbors import Hardest
from hardneg.diagnostics.step_cost import StepCost, step_cost
from hardneg.evaluation.alignment import alignment, uniformity
from hardneg.insight.diagnostics import (
    Histograms,
    cosine_histograms,
    hardest_false_share,
    hardest_negatives,
)

__all__ = [
    "AnchorLosses",
    "ClassMeans",
    "Estimate",
    "GradientShares",
    "Hardest",
    "Histograms",
    "Hubs",
    "LossOrdering",
    "StepCost",
    "alignment",
    "alignment_estimate",
    "anchor_losses",
    "class_means",
    "cosine_histograms",
    "gradient_shares",
    "hardest_false_share",
    "hardest_negatives",
    "hubs",
    "loss_ordering",
    "mean_estimate",
    "share_estimate",
    "step_cost",
    "uniformity",
    "uniformity_estimate",
]

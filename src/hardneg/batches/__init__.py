"""Who meets in a batch: uniform, nearest neighbours, or a walk on a proximity graph in between."""

from hardneg.batches.graph import ProximityGraph
from hardneg.batches.hardness import cosine_histogram, false_negative_share, mean_cosine
from hardneg.batches.samplers import KNNBatchSampler, ProximityBatchSampler
from hardneg.batches.uniform import UniformBatchSampler

__all__ = [
    "KNNBatchSampler",
    "ProximityBatchSampler",
    "ProximityGraph",
    "UniformBatchSampler",
    "cosine_histogram",
    "false_negative_share",
    "mean_cosine",
]

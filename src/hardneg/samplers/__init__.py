"""Who meets in a batch: uniform, nearest neighbours, or a walk on a proximity graph in between."""

from hardneg.samplers.batch_statistics import cosine_histogram, false_negative_share, mean_cosine
from hardneg.samplers.graph import ProximityGraph
from hardneg.samplers.proximity import KNNBatchSampler, ProximityBatchSampler
from hardneg.samplers.uniform import UniformBatchSampler

__all__ = [
    "KNNBatchSampler",
    "ProximityBatchSampler",
    "ProximityGraph",
    "UniformBatchSampler",
    "cosine_histogram",
    "false_negative_share",
    "mean_cosine",
]

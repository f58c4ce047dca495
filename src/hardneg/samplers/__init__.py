"""Batch samplers: uniform, consecutive and nearest-neighbor batches, and walks on a proximity graph."""

from hardneg.samplers.batch_statistics import cosine_histogram, false_negative_share, mean_cosine
from hardneg.samplers.consecutive import ConsecutiveBatchSampler
from hardneg.samplers.graph import ProximityGraph
from hardneg.samplers.knn import KNNBatchSampler
from hardneg.samplers.proximity import ProximityBatchSampler
from hardneg.samplers.uniform import UniformBatchSampler

__all__ = [
    "ConsecutiveBatchSampler",
    "KNNBatchSampler",
    "ProximityBatchSampler",
    "ProximityGraph",
    "UniformBatchSampler",
    "cosine_histogram",
    "false_negative_share",
    "mean_cosine",
]

"""The public names of hardneg, which `import hardneg` exports."""

from hardneg.cached import cached_step
from hardneg.evaluation import few_label_accuracy, knn_accuracy, linear_probe
from hardneg.insight import alignment, uniformity
from hardneg.losses.hardening import BelowPositive, Custom, Exponential, Hardening, Ring, Threshold, Uniform
from hardneg.losses.infonce import InfoNCE
from hardneg.losses.jsd import JSD
from hardneg.losses.local_aggregation import LocalAggregation
from hardneg.losses.presets import (
    clip,
    debiased,
    decoupled,
    graphcl,
    hcl,
    hscl,
    hscl_threshold,
    instance_discrimination,
    moco,
    ring_nce,
    scl,
    simclr,
    simcse,
    supcon,
)
from hardneg.losses.schedules import Adaptive, Constant, HardnessAnneal, Linear, RingAnneal, Schedule, Steps
from hardneg.losses.temperature import Learnable
from hardneg.memory import Clusters, MemoryBank, Queue
from hardneg.mining import Mined, mine
from hardneg.samplers import (
    KNNBatchSampler,
    ProximityBatchSampler,
    ProximityGraph,
    UniformBatchSampler,
    false_negative_share,
)

__all__ = [
    "JSD",
    "Adaptive",
    "BelowPositive",
    "Clusters",
    "Constant",
    "Custom",
    "Exponential",
    "Hardening",
    "HardnessAnneal",
    "InfoNCE",
    "KNNBatchSampler",
    "Learnable",
    "Linear",
    "LocalAggregation",
    "MemoryBank",
    "Mined",
    "ProximityBatchSampler",
    "ProximityGraph",
    "Queue",
    "Ring",
    "RingAnneal",
    "Schedule",
    "Steps",
    "Threshold",
    "Uniform",
    "UniformBatchSampler",
    "alignment",
    "cached_step",
    "clip",
    "debiased",
    "decoupled",
    "false_negative_share",
    "few_label_accuracy",
    "graphcl",
    "hcl",
    "hscl",
    "hscl_threshold",
    "instance_discrimination",
    "knn_accuracy",
    "linear_probe",
    "mine",
    "moco",
    "ring_nce",
    "scl",
    "simclr",
    "simcse",
    "supcon",
    "uniformity",
]

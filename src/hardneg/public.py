"""The public names of hardneg, which `import hardneg` exports."""

from hardneg.cached import cached_step
from hardneg.evaluation import few_label_accuracy, knn_accuracy, linear_probe
from hardneg.insight import alignment, uniformity
from hardneg.losses.hardening import BelowPositive, Custom, Exponential, Guided, Hardening, Ring, Threshold, Uniform
from hardneg.losses.infonce import InfoNCE
from hardneg.losses.jsd import JSD
from hardneg.losses.local_aggregation import LocalAggregation
from hardneg.losses.presets import (
    clip,
    debiased,
    decoupled,
    embedding_gemma,
    gist,
    graphcl,
    gte,
    hardness,
    hcl,
    hscl,
    hscl_threshold,
    instance_discrimination,
    llave,
    moco,
    qwen3_embedding,
    ring_nce,
    scl,
    simclr,
    simcse,
    supcon,
)
from hardneg.losses.schedules import Adaptive, Constant, HardnessAnneal, Linear, RingAnneal, Schedule, Steps
from hardneg.losses.temperature import Learnable
from hardneg.memory import Clusters, MemoryBank, Queue
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
    "Guided",
    "Hardening",
    "HardnessAnneal",
    "InfoNCE",
    "KNNBatchSampler",
    "Learnable",
    "Linear",
    "LocalAggregation",
    "MemoryBank",
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
    "embedding_gemma",
    "false_negative_share",
    "few_label_accuracy",
    "gist",
    "graphcl",
    "gte",
    "hardness",
    "hcl",
    "hscl",
    "hscl_threshold",
    "instance_discrimination",
    "knn_accuracy",
    "linear_probe",
    "llave",
    "moco",
    "qwen3_embedding",
    "ring_nce",
    "scl",
    "simclr",
    "simcse",
    "supcon",
    "uniformity",
]

"""The public names of hardneg, which `import hardneg` exports."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from hardneg.cached import cached_step
from hardneg.evaluation import few_label_accuracy, knn_accuracy, linear_probe
from hardneg.extras import required
from hardneg.insight import alignment, uniformity
from hardneg.losses.effective_share import EffectiveShare
from hardneg.losses.hardening import BelowPositive, Custom, Exponential, Guided, Hardening, Ring, Threshold, Uniform
from hardneg.losses.infonce import InfoNCE
from hardneg.losses.jsd import JSD
from hardneg.losses.local_aggregation import LocalAggregation
from hardneg.losses.presets import (
    auto,
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
from hardneg.mining import Mined, mine
from hardneg.not_negatives import read_not_negatives
from hardneg.samplers import (
    KNNBatchSampler,
    ProximityBatchSampler,
    ProximityGraph,
    UniformBatchSampler,
    false_negative_share,
)

if TYPE_CHECKING:
    from hardneg.training.trained_encoder import TrainedEncoder


def load_encoder(
    run: str | Path, *, trust: bool = False, data: Any = None, views: Any = None, encoder: nn.Module | None = None
) -> "TrainedEncoder":
    """The trained encoder of a run, in evaluation mode, ready to embed raw samples of any modality.

    Weights are read from safetensors, or of an unfinished run, with a warning, from its last checkpoint, without
    pickle.

    Args:
        run: the folder
        trust: allow code that the folder names as ``module:callable``
        data: what was given to `hardneg.training.run.train` as an object
        views: likewise
        encoder: likewise

    Returns:
        A callable: ``encoder(sample)`` returns features (d,), ``encoder([sample, …])`` (N, d). A sample is a path, a
        PIL image or a uint8 array for images, a ``torch_geometric.data.Data`` for graphs. ``encoder.module`` is the
        network, ``encoder.transform`` turns one sample into its input.
    """
    required("lightning", "train")  # which reading a recipe needs
    from hardneg.training import trained_encoder

    return trained_encoder.load_encoder(run, trust=trust, data=data, views=views, encoder=encoder)


__all__ = [
    "JSD",
    "Adaptive",
    "BelowPositive",
    "Clusters",
    "Constant",
    "Custom",
    "EffectiveShare",
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
    "auto",
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
    "load_encoder",
    "mine",
    "moco",
    "qwen3_embedding",
    "read_not_negatives",
    "ring_nce",
    "scl",
    "simclr",
    "simcse",
    "supcon",
    "uniformity",
]

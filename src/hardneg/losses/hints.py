"""Warnings about calls that are valid, but rarely what is meant. A loss gives each of them once."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from hardneg import distributed
from hardneg.losses.schedules import Adaptive, Constant, Schedule
from hardneg.losses.sources import GIVEN, SourceTensors, argument

UNMOVED_CALLS = 100  # calls in training without `set_progress` after which a loss with schedules warns

ALONE = (
    "a batch of one row has no negatives, so its loss is 0 and trains nothing: use larger batches, leave out a last "
    "batch of one (drop_last=True), or pass negatives="
)


def local_negatives() -> str | None:
    """A warning for a loss with ``gather=False`` if there are several processes and gradients are computed."""
    processes = distributed.world_size()
    if processes == 1 or not torch.is_grad_enabled():
        return None
    return (
        f"gather=False with {processes} processes: each takes negatives from its own batch only. Set gather=True for "
        "those of all processes. If this is meant: warnings.filterwarnings('ignore', 'gather=False')"
    )


def single_class(labels: Tensor) -> str | None:
    """A warning if all labels (B,) of a batch on the CPU are the same; elsewhere reading them would synchronize."""
    if labels.device.type != "cpu" or len(labels) < 2:
        return None
    lowest, highest = (int(label) for label in torch.aminmax(labels))
    if lowest != highest or lowest == -1:
        return None
    return (
        f"all {len(labels)} labels are {lowest}, so the batch has no negatives of another class: shuffle the data, or "
        "draw each batch from several classes"
    )


def no_positives(labels: Tensor) -> str | None:
    """A warning if no two known labels (B,) of a batch of one view on the CPU are the same."""
    if labels.device.type != "cpu":
        return None
    known = labels[labels >= 0]
    if len(known) < 2 or len(torch.unique(known)) < len(known):
        return None
    return (
        f"all {len(known)} known labels differ, so no row has a positive and the loss is 0: draw several samples of "
        "each class, or pass a second view as z2"
    )


def no_labels(negative_labels: SourceTensors) -> str | None:
    """A warning if all labels of a queue or bank on the CPU are −1."""
    sources = negative_labels if isinstance(negative_labels, Mapping) else {GIVEN: negative_labels}
    for name, labels in sources.items():
        if labels.device.type == "cpu" and labels.numel() and int(labels.max()) == -1:
            return (
                f"no row of {argument('negatives', name)} has a label, so all {labels.numel()} are negatives, also "
                "those of the anchor's class: pass them to the queue, queue.enqueue(keys, labels)"
            )
    return None


def unmoved_schedule(schedules: Iterable[Schedule]) -> str | None:
    """A warning for a loss whose progress was never set, if its schedules depend on it."""
    for leaf in (leaf for schedule in schedules for leaf in schedule.leaves()):
        if not isinstance(leaf, Adaptive | Constant):
            return (
                f"set_progress was never called in {UNMOVED_CALLS} training steps, so {leaf!r} stays at its start: "
                "call loss.set_progress(steps done / total steps) in every step"
            )
    return None

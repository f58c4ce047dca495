"""Cost of a training step: drawing the batch, refreshing the sampler, and training (ProSampler table 11)."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hardneg.evaluation.metrics import is_number

_TRAINING = ("augmentation", "network")


class StepCost(NamedTuple):
    """Seconds per step, means over the steps of a run.

    sampling: drawing the batch · encoding, graph: of a sampler's refresh, encoding the training set and building the
    graph, divided by the steps between two refreshes · training: views, forward and backward pass and optimizer ·
    steps: number of steps
    """

    sampling: float
    encoding: float
    graph: float
    training: float
    steps: int

    @property
    def choosing(self) -> float:
        """Seconds per step for the choice of batches: everything but training."""
        return self.sampling + self.encoding + self.graph


def step_cost(metrics: Sequence[Mapping[str, Any]]) -> StepCost | None:
    """The cost of a step from the lines of a run's ``metrics.jsonl``; None without times.

    The training time is without the first epoch if there are more, which includes compilation and cold caches. The
    other times are of all epochs: a sampler may be refreshed in the first one only.

    Examples:
        >>> line = {"step": 10, "seconds": {"data": 0.1, "network": 2.0}, "batches": {"sampling_seconds": 0.05}}
        >>> step_cost([line])
        StepCost(sampling=0.005, encoding=0.0, graph=0.0, training=0.2, steps=10)
    """
    lines = [line for line in metrics if isinstance(line.get("seconds"), Mapping) and is_number(line.get("step"))]
    steps = int(lines[-1]["step"]) if lines else 0
    if steps < 1:
        return None
    later = lines[1:] or lines
    later_steps = steps - (int(lines[0]["step"]) if len(lines) > 1 else 0)
    training = sum(_number(line["seconds"].get(phase)) for line in later for phase in _TRAINING)
    batches = [line["batches"] for line in lines if isinstance(line.get("batches"), Mapping)]
    sampling, encoding, refresh = (
        sum(_number(batch.get(f"{name}_seconds")) for batch in batches) for name in ("sampling", "encoding", "graph")
    )
    return StepCost(
        sampling / steps, encoding / steps, max(refresh - encoding, 0.0) / steps, training / max(later_steps, 1), steps
    )


def _number(found: object) -> float:
    return float(found) if isinstance(found, int | float) and is_number(found) else 0.0

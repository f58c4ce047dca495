"""MoCo v3: keys of a momentum encoder, a predictor for the queries, negatives from the batch."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from hardneg import checks, heads
from hardneg.losses.schedules import value
from hardneg.losses.temperature import Learnable
from hardneg.methods.method import Method, Plan
from hardneg.methods.momentum import follow, momentum_copy
from hardneg.recipe_section import Fraction, Section


class MoCoV3Settings(Section):
    """Settings of MoCo v3."""

    momentum: Fraction = 0.999
    """m of the key encoder at the start; it rises to 1 along a cosine."""


class MoCoV3(Method):
    """Trains an encoder so that a view predicts the key of the other view among those of the batch (Chen et al. 2021).

    Both views are queries and both are keys. There is no queue: candidates are the other samples' keys, of all
    processes if the objective gathers. The loss is the sum of both directions times twice the temperature, which makes
    its gradient, and so the best learning rate, nearly the same for every temperature.

    Args:
        encoder, head, objective, and the options of `Method`
        predictor: (B, outputs) → (B, outputs), on the query side only
        momentum: m of the key encoder at the start; it rises to 1 along a cosine
    """

    Settings = MoCoV3Settings

    def __init__(self, *parts: Any, predictor: nn.Module, momentum: float = 0.99, **options: Any) -> None:
        super().__init__(*parts, **options)
        if self.objective.in_batch != "other" or self.objective.symmetric:
            raise ValueError(
                "MoCo v3 itself compares queries with the other view's keys in both directions: give the objective "
                f"in_batch='other' and symmetric=False, got {self.objective.in_batch!r}, {self.objective.symmetric!r}"
            )
        checks.number("momentum", momentum, at_least=0, at_most=1)
        self.predictor, self.momentum = predictor, momentum
        self.key_encoder, self.key_head = momentum_copy(self.encoder), momentum_copy(self.head)

    @classmethod
    def loss_defaults(cls, settings: Any) -> dict[str, Any]:
        return {"in_batch": "other"}

    @classmethod
    def memory_arguments(cls, plan: Plan) -> dict[str, Any]:
        outputs = plan.encoder.outputs
        predictor = heads.projection(outputs, plan.encoder.hidden, outputs, plan.encoder.norm)
        return {"predictor": predictor, "momentum": plan.settings.momentum}

    def loss(self, views: Tensor, index: Tensor, labels: Tensor | None) -> Tensor:
        first, second = self.predictor(self.head(self.encoder(views))).chunk(2)  # (B, d) each
        with torch.no_grad():
            first_keys, second_keys = self.key_head(self.key_encoder(views)).chunk(2)
        self.record_embeddings(index, first, second_keys)
        more = self.label_arguments(labels) | self.id_arguments(index)
        loss: Tensor = self.objective(first, second_keys, **more) + self.objective(second, first_keys, **more)
        return 2 * self._temperature() * loss

    def update_memory(self) -> None:
        if self.noted is not None:
            momentum = annealed(self.momentum, self.progress)
            follow(self.key_encoder, self.encoder, momentum)
            follow(self.key_head, self.head, momentum)
        super().update_memory()

    def networks(self) -> list[nn.Module]:
        return [*super().networks(), self.predictor, self.key_encoder, self.key_head]

    def _temperature(self) -> float | Tensor:
        temperature = self.objective.temperature
        if isinstance(temperature, Learnable):
            # A constant factor: the loss must not be reduced through it.
            return temperature().detach()  # type: ignore[no-any-return]
        return value(temperature, self.objective.progress)


def annealed(momentum: float, progress: float) -> float:
    """The momentum when the fraction ``progress`` of training is done: along a cosine to 1.

    Examples:
        >>> [round(annealed(0.99, p), 4) for p in (0.0, 0.5, 1.0)]
        [0.99, 0.995, 1.0]
    """
    return 1 - (1 - momentum) * (1 + math.cos(math.pi * progress)) / 2

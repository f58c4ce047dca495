"""Optimizers and learning-rate schedules by name."""

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hardneg import checks

if TYPE_CHECKING:
    from hardneg.training.recipe import Recipe


class LARS(Optimizer):
    """Momentum SGD with the step of each weight matrix scaled to its norm (You et al. 2017), as SimCLR uses it.

    Biases and norm weights (fewer than two dimensions) take plain momentum steps without decay. PyTorch has no LARS.

    Args:
        params: parameters
        lr: learning rate
        momentum: of the running step
        weight_decay: added to the gradient of matrices
        trust: the trust coefficient η

    Examples:
        >>> weight = nn.Parameter(torch.ones(2, 2))
        >>> optimizer = LARS([weight], lr=1.0)
        >>> weight.sum().backward(); optimizer.step()
        >>> bool((weight < 1).all())
        True
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.3,
        momentum: float = 0.9,
        weight_decay: float = 1e-6,
        trust: float = 1e-3,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; ``closure`` recomputes the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            # All weights in one call: with one call per weight, a GPU waits for hundreds of launches.
            matrices = [weight for weight in group["params"] if weight.grad is not None and weight.dim() > 1]
            others = [weight for weight in group["params"] if weight.grad is not None and weight.dim() <= 1]
            updates = [*_adapted(matrices, group["weight_decay"], group["trust"]), *(other.grad for other in others)]
            if not updates:
                continue
            momenta = [self._momentum(weight) for weight in (*matrices, *others)]
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, updates)
            torch._foreach_add_([*matrices, *others], momenta, alpha=-group["lr"])
        return loss

    def _momentum(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight)
        momentum: Tensor = state["momentum"]
        return momentum


def _adapted(matrices: list[Tensor], decay: float, trust: float) -> list[Tensor]:
    """The decayed gradient of each matrix, scaled to the norm of the matrix times the trust coefficient."""
    if not matrices:
        return []
    gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
    decayed = torch._foreach_add(gradients, matrices, alpha=decay)
    norm, gradient_norm = (torch.stack(torch._foreach_norm(tensors)) for tensors in (matrices, decayed))  # (matrices,)
    ratio = torch.where((norm > 0) & (gradient_norm > 0), trust * norm / gradient_norm, 1.0)
    torch._foreach_mul_(decayed, ratio.unbind())
    return list(decayed)


OPTIMIZERS = ("adam", "adamw", "sgd", "lars")
SCHEDULES = ("constant", "linear", "cosine", "step")


def build(
    name: str,
    modules: Iterable[nn.Module],
    lr: float,
    weight_decay: float,
    momentum: float = 0.9,
    *,
    scaled_and_clipped: bool = False,
) -> Optimizer:
    """The optimizer of this name over all trainable parameters of the modules.

    scaled_and_clipped: whether gradients are scaled (float16) and clipped. A fused optimizer would unscale them only
    after they were clipped, which Lightning refuses
    """
    checks.choice("optimizer", name, OPTIMIZERS)
    weights = [weight for module in modules for weight in module.parameters() if weight.requires_grad]
    if name == "lars":
        return LARS(weights, lr=lr, weight_decay=weight_decay, momentum=momentum)
    if name == "sgd":
        return torch.optim.SGD(weights, lr=lr, weight_decay=weight_decay, momentum=momentum)
    fused = all(weight.is_cuda for weight in weights) and not scaled_and_clipped  # one launch for all weights
    kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
    return kind(weights, lr=lr, weight_decay=weight_decay, fused=fused or None)


def learning_rate(
    schedule: str, warmup: float = 0.0, drops: tuple[float, ...] = (), factor: float = 0.1
) -> Callable[[float], float]:
    """The factor of the learning rate as a function of the fraction of training done.

    schedule: ``"constant"``, ``"linear"`` or ``"cosine"`` (to 0), or ``"step"`` (times ``factor`` at each of
    ``drops``) · warmup: fraction of training over which it rises linearly from 0

    Examples:
        >>> [round(learning_rate("cosine", warmup=0.1)(p), 3) for p in (0.05, 0.1, 0.55, 1.0)]
        [0.5, 1.0, 0.5, 0.0]
    """
    checks.choice("schedule", schedule, SCHEDULES)

    def at(progress: float) -> float:
        if progress < warmup:
            return progress / warmup
        if schedule == "cosine" and warmup < 1:
            return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))
        if schedule == "linear" and warmup < 1:
            return (1 - progress) / (1 - warmup)
        if schedule == "step":
            return factor ** sum(progress >= drop for drop in drops)
        return 1.0

    return at


def of_recipe(settings: "Recipe") -> tuple[Callable[[nn.Module], Optimizer], Callable[[float], float]]:
    """The function that creates the optimizer of a method, and the factor of its learning rate, from a recipe."""
    chosen, epochs = settings.optimizer, settings.trainer.epochs
    clipped = settings.trainer.precision == "16-mixed" and chosen.clip is not None

    def optimizer(module: nn.Module) -> Optimizer:
        return build(chosen.name, [module], chosen.lr, chosen.weight_decay, chosen.momentum, scaled_and_clipped=clipped)

    drops = tuple(drop / epochs for drop in chosen.drops)
    return optimizer, learning_rate(chosen.schedule, chosen.warmup / epochs, drops)

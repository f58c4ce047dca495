"""A method outside of a run: built from a recipe for some digits, and moved step by step by hand."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from hardneg.images import ImageSet, load_split
from hardneg.methods.method import Method
from hardneg.training import build, recipe

SIZE = 48


@dataclass
class Place:
    """What a method asks of its trainer."""

    global_step: int = 0
    world_size: int = 1

    @property
    def fit_loop(self) -> SimpleNamespace:
        return SimpleNamespace(total_batch_idx=self.global_step)


def digits(size: int = SIZE) -> ImageSet:
    """The first few."""
    found = load_split("digits", "train", labels=True)
    assert isinstance(found, ImageSet)
    return found.subset(list(range(size)))


def made(name: str, *overrides: str, size: int = SIZE) -> Method:
    """The method of a digits recipe, at its first step of a hundred."""
    settings = recipe.load(recipe.find(f"digits-{name}"), ["trainer.batch_size=16", *overrides])
    module = build.method(settings, digits(size))
    module._trainer = Place()  # type: ignore[assignment]
    module.total_steps = 100
    return module.train()


def loss(module: Method, index: Tensor) -> Tensor:
    """The loss of some pictures; neither backward nor remembered."""
    return module.training_step(index, 0)


def step(module: Method, index: Tensor, rate: float = 0.1) -> float:
    """One whole step of plain gradient descent; returns its loss."""
    value = loss(module, index)
    module.zero_grad()
    torch.autograd.backward(value)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.grad is not None:
                weight.sub_(rate * weight.grad)
    assert isinstance(module._trainer, Place)
    module._trainer.global_step += 1
    module.remember()
    return value.item()


def look(module: Method, index: torch.Tensor) -> torch.Tensor:
    """The views of these samples at step 0."""
    views: torch.Tensor = module.make_views(module.look_up(index), len(index), index.device, 0)
    return views

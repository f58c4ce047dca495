"""A method outside of a run: built from a recipe for a few digits, and trained step by step."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from hardneg.images import ImageSet, load_split
from hardneg.methods.method import Method
from hardneg.training import build, recipe

SIZE = 48


@dataclass
class FakeTrainer:
    """The attributes of a trainer that a method reads."""

    global_step: int = 0
    world_size: int = 1

    @property
    def fit_loop(self) -> SimpleNamespace:
        return SimpleNamespace(total_batch_idx=self.global_step)


def digits(size: int = SIZE) -> ImageSet:
    """The first digits of the training set."""
    found = load_split("digits", "train", labels=True)
    assert isinstance(found, ImageSet)
    return found.subset(list(range(size)))


def made(name: str, *overrides: str, size: int = SIZE) -> Method:
    """The method of a digits recipe, before the first of 100 steps."""
    settings = recipe.load(recipe.find(f"digits-{name}"), ["trainer.batch_size=16", *overrides])
    module = build.method(settings, digits(size))
    module._trainer = FakeTrainer()  # type: ignore[assignment]
    module.total_steps = 100
    return module.train()


def loss(module: Method, index: Tensor) -> Tensor:
    """The loss of a batch, without backward pass and memory update."""
    return module.training_step(index, 0)


def step(module: Method, index: Tensor, rate: float = 0.1) -> float:
    """One step of gradient descent with its memory update; returns the loss."""
    value = loss(module, index)
    module.zero_grad()
    torch.autograd.backward(value)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.grad is not None:
                weight.sub_(rate * weight.grad)
    assert isinstance(module._trainer, FakeTrainer)
    module._trainer.global_step += 1
    module.update_memory()
    return value.item()


def first_views(module: Method, index: Tensor) -> Tensor:
    """The views of these samples at step 0."""
    views: Tensor = module.make_views(module.look_up(index), len(index), index.device, 0)
    return views

"""The validation part of the training set: what an adaptive schedule observes. Test labels never reach training."""

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from hardneg.evaluation.features import random_ranks
from hardneg.training.recipe import Recipe

SHARE = 0.1  # of every class of the training set
DRAW = 4  # the counter of the draw that chooses them


def held_out_rows(settings: Recipe, train_set: Any) -> Tensor | None:
    """Which samples are the validation part, (N,) bool; None if no schedule observes accuracy.

    A tenth of every class, at least one sample of a class of two or more, drawn by the recipe's seed. Samples without a
    label stay in the first part. Raises if an adaptive schedule could not move before the last step.
    """
    schedules = settings.make_loss().accuracy_schedules
    if not schedules:
        return None
    needs = "objective.anneal=accuracy needs"
    if not settings.kind.has_test_set:
        raise ValueError(f"{needs} online kNN, which {settings.kind.unit} do not have: use anneal=linear, step or loss")
    if train_set.labels is None:
        raise ValueError(f"{needs} labels, and {train_set.name} has none: use anneal=linear, step or loss")
    chosen = settings.trainer
    readings = (chosen.epochs - 1) // chosen.knn_every if chosen.knn_every else 0  # that come before the last epoch
    if readings < 2:
        raise ValueError(
            f"{needs} two readings of online kNN before the last epoch, and trainer.epochs={chosen.epochs} with "
            f"trainer.knn_every={chosen.knn_every} gives {readings}: set trainer.knn_every=1, or train longer"
        )
    labeled = (train_set.labels >= 0).nonzero()[:, 0]  # (n,)
    _, targets, counts = torch.unique(train_set.labels[labeled], return_inverse=True, return_counts=True)
    held = (SHARE * counts).round().long().clamp(min=1).minimum(counts - 1)  # (classes,)
    if int((held > 0).sum()) < 2:
        raise ValueError(
            f"{needs} two classes with two samples each to validate on, and {train_set.name} has "
            f"{int((held > 0).sum())}: use anneal=linear, step or loss"
        )
    taken = torch.zeros(len(train_set), dtype=torch.bool)
    taken[labeled] = random_ranks(targets, settings.seed, DRAW) < held[targets]
    warnings.warn(
        f"objective.anneal=accuracy observes kNN on {int(taken.sum())} of the {len(train_set)} training samples "
        f"(seed {settings.seed}), which are not trained on",
        stacklevel=3,
    )
    needed = max(math.ceil(round((part.current - part.minimum) / part.step, 6)) for part in schedules)
    if readings - 1 < needed:
        warnings.warn(
            f"objective.anneal=accuracy can move {readings - 1}x with trainer.epochs={chosen.epochs} and "
            f"trainer.knn_every={chosen.knn_every}, and needs {needed} moves to reach its end",
            stacklevel=3,
        )
    return taken


def divide(train_set: Any, taken: Tensor | None) -> tuple[Any, Any]:
    """The training and the validation part of a set; the whole set and None if nothing is taken, (N,) bool."""
    if taken is None:
        return train_set, None
    rest, held_out = (train_set.subset(part.nonzero()[:, 0]) for part in (~taken, taken))
    return rest, held_out


def of_rest(pairs: Tensor, taken: Tensor | None) -> Tensor:
    """Pairs of rows (P, 2) of the whole set as rows of the rest, without those of a validation sample.

    Examples:
        >>> of_rest(torch.tensor([[0, 2], [1, 2]]), torch.tensor([False, True, False])).tolist()
        [[0, 1]]
    """
    if taken is None:
        return pairs
    rows = (~taken).cumsum(0) - 1
    return rows[pairs[~taken[pairs].any(dim=1)]]


def stated(settings: Recipe, train_set: Any, held_out: Any) -> dict[str, Any]:
    """The record of the validation part for the run folder, empty without one; ``train_set`` is the rest."""
    if held_out is None:
        return {}
    size = len(train_set) + len(held_out)
    return {"validation": {"samples": len(held_out), "of": size, "seed": settings.seed}}

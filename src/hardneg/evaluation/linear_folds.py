"""The linear probe of all folds of a set, fitted together: a fit of one fold alone keeps a GPU waiting for launches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hardneg import checks
from hardneg.evaluation.features import share_equal
from hardneg.evaluation.linear import Parts, held_out, mean_and_std, minimize, predicted_classes, standardized
from hardneg.matmul import exact_products, where_precise

COEFFICIENTS = 1 << 22  # of all problems that are fitted together: L-BFGS stores twenty tensors of that size


@dataclass(frozen=True)
class FoldResult:
    """Accuracy of a fold, in [0, 1], with the penalty chosen for it; converged: whether all of its fits have."""

    accuracy: float
    penalty: float
    converged: bool


def probe_folds(
    features: Tensor,
    targets: Tensor,
    fold_of: Tensor,
    penalties: Sequence[float],
    seeds: Sequence[int],
    validation: float = 0.2,
    steps: int = 500,
) -> list[FoldResult]:
    """`linear_probe` with each fold as the test set and the others as the training set.

    features: (N, d) · targets: (N,) class indices; every class is in two folds or more · fold_of: (N,) the fold of each
    sample · penalties, validation, steps: as for `linear_probe` · seeds: of the held-out samples, one per fold
    """
    if len(penalties) == 0:
        raise ValueError("penalties is empty: give at least one number > 0")
    given = {checks.number("penalties", penalty, above=0, below=float("inf")) for penalty in penalties}
    grid = sorted(map(float, given), reverse=True)  # the first of equal accuracies is then the largest penalty
    features, targets, fold_of = map(where_precise, (features, targets, fold_of))
    dtype = torch.promote_types(torch.float32, features.dtype)
    size = len(grid) * (int(targets.max()) + 1) * (features.shape[1] + 1)  # coefficients of a fold
    folds = torch.split(torch.arange(len(seeds), device=targets.device), max(1, COEFFICIENTS // size))
    with exact_products(features.device):
        # Of all samples, so that coordinates have a common scale; the standardization of each fold is in `Parts`.
        inputs = standardized(features, *mean_and_std(features), dtype)  # (N, d)
        found = []
        for some in folds:
            train = fold_of != some[:, None]  # (F, N)
            held = torch.zeros_like(train)
            if len(grid) > 1:
                for row, fold in enumerate(some.tolist()):
                    held[row, train[row]] = held_out(targets[train[row]], validation, seeds[fold])
            found += _probe(inputs, targets, train, held, grid, steps)
    return found


def _probe(
    inputs: Tensor, targets: Tensor, train: Tensor, held: Tensor, grid: list[float], steps: int
) -> list[FoldResult]:
    """The results of F folds. train: (F, N) their training sets · held: (F, N) samples that choose the penalties."""
    folds, classes = len(train), int(targets.max()) + 1
    moments = zip(*(mean_and_std(inputs[rows]) for rows in train), strict=True)
    mean, std = (torch.stack(part).to(inputs.dtype) for part in moments)  # (F, d) each
    whole = Parts(train.to(inputs.dtype), mean, std)
    each = torch.arange(folds, device=inputs.device)
    problem = each.repeat_interleave(len(grid))  # (P,) the fold of each problem, P = F · penalties
    fitted = Parts((train & ~held).to(inputs.dtype), mean, std).select(problem)
    start = inputs.new_zeros(len(problem), classes, inputs.shape[1] + 1)
    solutions, converged, _ = minimize(inputs, targets, grid * folds, start, steps, fitted)
    best = [0] * folds
    reached = converged.view(folds, -1).all(dim=1)  # (F,)
    if len(grid) > 1:
        predicted = predicted_classes(inputs, fitted.on_inputs(solutions)).view(folds, len(grid), -1)  # (F, P/F, N)
        for fold, rows in enumerate(held):
            accuracies = [share_equal(row[rows], targets[rows]) for row in predicted[fold]]
            best[fold] = accuracies.index(max(accuracies))
        start = solutions.view(folds, len(grid), *solutions.shape[1:])[each, best]
        solutions, converged, _ = minimize(inputs, targets, [grid[index] for index in best], start, steps, whole)
        reached = reached & converged
    predicted = predicted_classes(inputs, whole.on_inputs(solutions))  # (F, N)
    return [
        FoldResult(share_equal(row[~rows], targets[~rows]), grid[index], bool(done))
        for row, rows, index, done in zip(predicted, train, best, reached, strict=True)
    ]

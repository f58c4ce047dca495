"""Linear probe of frozen features: multinomial logistic regression, solved for all penalties in one batch.

For each penalty λ, with x the standardized features of N samples and y their classes, minimize

    F(W, b) = 1/N Σ_n −log softmax(W x_n + b)[y_n]  +  λ/2 · ‖W‖²            (the bias b is not penalized)

which is scikit-learn's ``LogisticRegression(C=1 / (N λ))`` divided by its C·N.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hardneg import checks
from hardneg.checks import TensorLike, whole
from hardneg.evaluation.features import (
    checked_features,
    checked_labels,
    class_indices,
    random_ranks,
    share_equal,
)
from hardneg.matmul import exact_products, row_blocks, where_precise

PENALTIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
# F is λ-strongly convex in W, so that F − min F ≤ ‖∇F‖²/(2λ): a fit has converged when this is below TOLERANCE · F.
TOLERANCE = 1e-4
BIAS_CURVATURE = 1e-3  # upper bound of λ in this test: above it, the unpenalized bias has the lowest curvature
MEMORY = 10  # pairs stored by L-BFGS
BACKTRACKS = 20  # maximum number of step lengths tried in one iteration
SUFFICIENT = 1e-4  # required share of the decrease predicted by the slope (Armijo)


class Parts(NamedTuple):
    """Problems that are fitted to parts of the same inputs, each standardized by itself, such as the folds of a set.

    rows: (P, N) 1 for the samples of a problem, else 0 · mean, std: (P, d), subtracted and divided by
    """

    rows: Tensor
    mean: Tensor
    std: Tensor

    def select(self, problems: Tensor) -> "Parts":
        """The parts of these problems (n,)."""
        return Parts(self.rows[problems], self.mean[problems], self.std[problems])

    def on_inputs(self, point: Tensor) -> Tensor:
        """Coefficients (P, C, d + 1) of the standardized inputs, as coefficients of the inputs themselves."""
        weight = point[..., :-1] / self.std[:, None]
        bias = point[..., -1] - (weight * self.mean[:, None]).sum(dim=2)
        return torch.cat([weight, bias[..., None]], dim=2)

    def gradient(self, gradient: Tensor) -> Tensor:
        """The gradient in ``point`` from that in ``on_inputs(point)``, both (P, C, d + 1)."""
        weight, bias = gradient[..., :-1], gradient[..., -1:]
        return torch.cat([(weight - bias * self.mean[:, None]) / self.std[:, None], bias], dim=2)


@dataclass(frozen=True, eq=False)
class LinearResult:
    """The result of a linear probe.

    accuracy: on the test set, in [0, 1] · penalty: the chosen λ · validation_accuracies: by penalty; empty for a single
    penalty · converged: whether all fits are within 1e-4 of their minimum (relative) · note: which fits have not
    converged; empty if all have · weight: (C, d) · bias: (C,) · mean, std: (d,) float64, of the training features; std
    is 1 for a constant feature · classes: (C,) label of each row of ``weight``, ascending

    Tensors are on the device of the features, or on the host if that device has no float64.

    The predicted label of a feature vector x is ``classes[argmax(weight @ ((x − mean) / std) + bias)]``.
    """

    accuracy: float
    penalty: float
    validation_accuracies: dict[float, float]
    converged: bool
    note: str
    weight: Tensor
    bias: Tensor
    mean: Tensor
    std: Tensor
    classes: Tensor


def linear_probe(
    train_features: TensorLike,
    train_labels: TensorLike,
    test_features: TensorLike,
    test_labels: TensorLike,
    penalties: Sequence[float] = PENALTIES,
    validation: float = 0.2,
    seed: int = 0,
    steps: int = 500,
) -> LinearResult:
    """Fit multinomial logistic regression to frozen features; the L2 penalty is chosen on held-out training samples.

    train_features: (N, d) tensor or numpy array; features are standardized with their mean and standard deviation ·
    train_labels: (N,) integers · test_features: (T, d) · test_labels: (T,); a label that is not in the training set
    counts as an error · penalties: values of λ to choose from; of equal validation accuracies the largest λ is chosen,
    and a single λ is used without validation · validation: share of each class held out to choose λ; the final fit uses
    all training samples · seed: of that split · steps: maximum number of iterations of a fit; see ``converged`` and
    ``note`` of the result

    Examples:
        >>> features, labels = torch.eye(2).repeat(10, 1), torch.tensor([3, 7]).repeat(10)
        >>> result = linear_probe(features, labels, features, labels)
        >>> result.accuracy, result.converged
        (1.0, True)
    """
    train, train_labels, test, dtype = checked_features(train_features, train_labels, test_features)
    test_labels = checked_labels("test_labels", test_labels, test, "test_features")
    if len(penalties) == 0:
        raise ValueError("penalties is empty: give at least one number > 0")
    given = {checks.number("penalties", penalty, above=0, below=float("inf")) for penalty in penalties}
    validation = checks.number("validation", validation, above=0, below=1)
    steps = whole("steps", steps)
    train, train_labels, test, test_labels = map(where_precise, (train, train_labels, test, test_labels))
    grid = sorted(map(float, given), reverse=True)  # the first of equal accuracies is then the largest penalty
    with exact_products(train.device):
        classes, targets = class_indices(train_labels)
        held = held_out(targets, validation, seed) if len(grid) > 1 else torch.zeros_like(targets, dtype=torch.bool)
        order = held.int().argsort(stable=True)  # held-out samples last, so that both parts are views
        fitted = len(targets) - int(held.sum())
        mean, std = mean_and_std(train)
        inputs, targets = standardized(train, mean, std, dtype, order), targets[order]  # (N, d), (N,)

        start = inputs.new_zeros(len(grid), len(classes), inputs.shape[1] + 1)  # (P, C, d + 1)
        solutions, converged, iterations = minimize(inputs[:fitted], targets[:fitted], grid, start, steps)
        accuracies, best, candidates_converged = [], 0, converged[:0]
        if len(grid) > 1:
            accuracies = [share_equal(row, targets[fitted:]) for row in predicted_classes(inputs[fitted:], solutions)]
            best = accuracies.index(max(accuracies))
            candidates_converged, candidate_iterations = converged, iterations
            solutions, converged, iterations = minimize(
                inputs, targets, [grid[best]], solutions[best : best + 1], steps
            )
            iterations = iterations if not bool(converged.all()) else candidate_iterations[~candidates_converged]
        predicted = classes[predicted_classes(standardized(test, mean, std, dtype), solutions)[0]]  # (T,)
    return LinearResult(
        accuracy=share_equal(predicted, test_labels),
        penalty=grid[best],
        validation_accuracies=dict(zip(grid, accuracies, strict=False)),
        converged=bool(converged.all() and candidates_converged.all()),
        note=convergence_note(bool(converged.all()), candidates_converged, best, iterations),
        weight=solutions[0, :, :-1].contiguous(),
        bias=solutions[0, :, -1].contiguous(),
        mean=mean,
        std=std,
        classes=classes,
    )


def convergence_note(final: bool, candidates: Tensor, chosen: int, iterations: Tensor) -> str:
    """Describe which fits have not converged; empty if all have.

    final: whether the final fit has converged · candidates: (P,) whether the fit of each candidate penalty has ·
    chosen: its index · iterations: of the fits that have not
    """
    if final and bool(candidates.all()):
        return ""
    note = f"not converged after {int(iterations.max()):,} iterations"
    if final:
        failed = int((~candidates).sum())
        note += f" for {failed} of {len(candidates)} candidate penalties"
        # See `results.is_minor`.
        converged = "the final fit has converged"
        note += f"; {converged}" if bool(candidates[chosen]) else f", also for the chosen one ({converged})"
    return note


def minimize(
    inputs: Tensor,
    targets: Tensor,
    penalties: Sequence[float],
    start: Tensor,
    steps: int,
    parts: Parts | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Minimize F for all penalties together, by L-BFGS with one step length per penalty.

    inputs: (N, d) · targets: (N,) class indices · penalties: P numbers · start: (P, C, d + 1), the bias last · steps:
    maximum number of iterations · parts: the samples of each problem; None if each has all · returns the solutions
    (P, C, d + 1), whether each has converged (P,) and its number of iterations (P,)

    A fit is removed from the batch when it has converged, or when rounding hides any further decrease.
    """
    penalty = torch.tensor(penalties, dtype=inputs.dtype, device=inputs.device)  # (P,)
    solutions, converged = start.clone(), torch.zeros(len(penalties), dtype=torch.bool, device=inputs.device)
    unsolved = torch.arange(len(penalties), device=inputs.device)
    point, scale = start, torch.ones_like(penalty, dtype=torch.float64)
    value, gradient = objective(inputs, targets, point, penalty, parts)
    pairs: list[tuple[Tensor, Tensor, Tensor]] = []
    rejected, iterations = torch.zeros_like(converged), torch.zeros_like(unsolved)
    for step in range(steps + 1):
        solutions[unsolved], iterations[unsolved] = point, step
        solved = _dot(gradient, gradient) <= 2 * penalty.clamp(max=BIAS_CURVATURE) * TOLERANCE * value  # (P,)
        converged[unsolved] = solved
        keep = (~solved & ~rejected).nonzero()[:, 0]
        if len(keep) == 0 or step == steps:
            break
        if len(keep) < len(unsolved):
            unsolved, penalty, point, scale, value, gradient = (
                tensor[keep] for tensor in (unsolved, penalty, point, scale, value, gradient)
            )
            pairs = [(move[keep], change[keep], curvature[keep]) for move, change, curvature in pairs]
            parts = None if parts is None else parts.select(keep)

        before = point, gradient
        direction = _direction(gradient, pairs, scale)
        evaluate = partial(objective, inputs, targets, penalty=penalty, parts=parts)
        point, value, gradient, rejected = _line_search(evaluate, point, value, gradient, direction)
        move, change = point - before[0], gradient - before[1]
        curvature, squares = _dot(move, change), _dot(change, change)
        # F is convex, so that the curvature is zero only by rounding; such a pair is stored as zeros.
        useful = curvature > torch.finfo(inputs.dtype).eps * (squares * _dot(move, move)).sqrt()
        move, change = (tensor * _per_problem(useful, tensor) for tensor in (move, change))
        scale = torch.where(useful, curvature / squares, scale)
        pairs = [*pairs, (move, change, torch.where(useful, curvature, 1.0))][-MEMORY:]
    return solutions, converged, iterations


def objective(
    inputs: Tensor, targets: Tensor, point: Tensor, penalty: Tensor, parts: Parts | None = None
) -> tuple[Tensor, Tensor]:
    """F and its gradient for P problems on the same data, or on parts of it.

    inputs: (N, d) · targets: (N,) · point: (P, C, d + 1), the bias last · penalty: (P,) · parts: the samples of each
    problem · returns (P,) float64 and (P, C, d + 1)
    """
    problems, classes, _ = point.shape
    applied = point if parts is None else parts.on_inputs(point)
    weight, bias = applied[..., :-1].flatten(0, 1), applied[..., -1].flatten()  # (P · C, d), (P · C,)
    value = torch.zeros(problems, dtype=torch.float64, device=inputs.device)
    gradient = torch.zeros_like(point)
    for block in row_blocks(len(inputs), problems * classes):
        # One product for all problems: (R, d) by (d, P · C).
        logs = torch.addmm(bias, inputs[block], weight.T).view(-1, problems, classes).log_softmax(dim=2)  # (R, P, C)
        target_columns = targets[block, None, None].expand(-1, problems, 1)  # (R, P, 1)
        target_logs = logs.gather(2, target_columns)
        # For a well-fitted sample 1 − p is only rounding error; the sum of the other probabilities is accurate.
        residual = logs.exp_().scatter_(2, target_columns, 0)
        rest = residual.sum(dim=2, keepdim=True)  # (R, P, 1)
        residual = residual.scatter_(2, target_columns, -rest)  # softmax − one-hot, (R, P, C)
        losses = torch.where(rest < 0.5, -torch.log1p(-rest), -target_logs)
        if parts is not None:
            own = parts.rows[:, block].T[..., None]  # (R, P, 1)
            losses, residual = losses * own, residual.mul_(own)
        residual = residual.flatten(1)  # (R, P · C)
        value += losses[..., 0].sum(dim=0, dtype=torch.float64)
        gradient[..., :-1] += (residual.T @ inputs[block]).view(problems, classes, -1)
        gradient[..., -1] += residual.sum(dim=0).view(problems, classes)
    if parts is None:
        value, gradient = value / len(inputs), gradient.div_(len(inputs))
    else:
        sizes = parts.rows.sum(dim=1, dtype=torch.float64)  # (P,)
        value, gradient = value / sizes, parts.gradient(gradient) / _per_problem(sizes, gradient)
    gradient[..., :-1] += _per_problem(penalty, point) * point[..., :-1]
    squares = point[..., :-1].square().sum(dim=(1, 2), dtype=torch.float64)
    return value + penalty / 2 * squares, gradient


def _line_search(
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]],
    point: Tensor,
    value: Tensor,
    gradient: Tensor,
    direction: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Backtracking line search along the direction of each problem, until F has decreased sufficiently (Armijo).

    evaluate: F and its gradient at a point · returns the new points, their values and gradients, and which problems had
    no sufficient step (P,) and stay
    """
    slope = _dot(direction, gradient)  # (P,)
    length = torch.ones_like(slope)
    rounding = 10 * torch.finfo(point.dtype).eps * value  # differences of F below this are rounding errors
    for _ in range(BACKTRACKS):
        trial = point + _per_problem(length, direction) * direction
        trial_value, trial_gradient = evaluate(trial)
        gain = trial_value - value
        rejected = ~((gain <= SUFFICIENT * length * slope + rounding) & (slope < 0))  # NaN is rejected as well
        if not bool(rejected.any()):
            break
        # Minimum of the parabola through the old value, its slope and the new value.
        share = -slope * length / (2 * (gain - slope * length))
        length = torch.where(rejected, length * share.nan_to_num(0.1).clamp(0.1, 0.5), length)
    stay = _per_problem(rejected, point)
    return (
        torch.where(stay, point, trial),
        torch.where(rejected, value, trial_value),
        torch.where(stay, gradient, trial_gradient),
        rejected,
    )


def _direction(gradient: Tensor, pairs: list[tuple[Tensor, Tensor, Tensor]], scale: Tensor) -> Tensor:
    """−H ∇F with the L-BFGS approximation H of the inverse Hessian, by the two-loop recursion, (P, C, d + 1)."""
    direction = -gradient
    shares = []
    for move, change, curvature in reversed(pairs):
        shares.append(_dot(move, direction) / curvature)  # (P,)
        direction -= _per_problem(shares[-1], change) * change
    direction *= _per_problem(scale, direction)
    for (move, change, curvature), share in zip(pairs, reversed(shares), strict=True):
        direction += _per_problem(share - _dot(change, direction) / curvature, move) * move
    return direction


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """Inner product of each problem's tensors, (P,) float64."""
    return (one * other).sum(dim=(1, 2), dtype=torch.float64)


def _per_problem(numbers: Tensor, like: Tensor) -> Tensor:
    """Reshape numbers (P,) so that they broadcast with ``like`` (P, …)."""
    numbers = numbers if numbers.dtype == torch.bool else numbers.to(like.dtype)
    return numbers.view(-1, *[1] * (like.dim() - 1))


def predicted_classes(inputs: Tensor, solutions: Tensor) -> Tensor:
    """The most probable class of inputs (T, d) under solutions (P, C, d + 1), as indices (P, T)."""
    problems, classes, _ = solutions.shape
    weight, bias = solutions[..., :-1].flatten(0, 1), solutions[..., -1].flatten()
    predicted = [
        torch.addmm(bias, inputs[block], weight.T).view(-1, problems, classes).argmax(dim=2)
        for block in row_blocks(len(inputs), problems * classes)
    ]
    return torch.cat(predicted).T


def held_out(targets: Tensor, share: float, seed: int) -> Tensor:
    """Mask (N,) of the held-out samples: a share of each class, rounded, but never a whole class."""
    counts = targets.bincount()
    held = random_ranks(targets, seed) < (counts * share).round().clamp(max=counts - 1)[targets]
    if not bool(held.any()):
        raise ValueError(
            f"validation={share} holds out no sample, since no class has more than {int(counts.max())}: "
            "give more samples, a larger share, or a single penalty"
        )
    return held


def mean_and_std(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each feature, (d,) float64; the deviation of a constant feature is set to 1."""
    blocks = row_blocks(features.shape[1], len(features))  # of columns here
    moments = [torch.std_mean(features[:, block].double(), dim=0, correction=0) for block in blocks]
    std, mean = (torch.cat(part) for part in zip(*moments, strict=True))
    return mean, std.masked_fill(std == 0, 1)


def standardized(
    features: Tensor, mean: Tensor, std: Tensor, dtype: torch.dtype, order: Tensor | None = None
) -> Tensor:
    """(features − mean)/std, (N, d), with the rows in the given order (N,)."""
    inputs = torch.empty_like(features, dtype=dtype)
    for block in row_blocks(*features.shape):
        part = features[block] if order is None else features[order[block]]
        inputs[block] = (part.double() - mean) / std
    return inputs

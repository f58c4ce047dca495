"""Cross-validated accuracy of an SVM on frozen features, which is the protocol of the graph papers."""

import math
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hardneg import checks
from hardneg.checks import TensorLike
from hardneg.extras import required
from hardneg.randomness import mix

PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3)
STEPS = 1_000_000  # maximum number of iterations: a linear SVM on unscaled features may not terminate otherwise

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SVMResult:
    """Accuracies of all folds, with the chosen penalties and convergence."""

    accuracies: Floats  # (repeats, folds), each in [0, 1]
    penalties: Floats  # (repeats, folds): the C chosen on each training part
    unconverged: int  # folds whose final SVM has not converged
    unconverged_choices: int  # folds where an SVM of the choice of C has not converged

    @property
    def note(self) -> str:
        """Which folds have not converged; empty if all have."""
        limit, folds = f"not converged after {STEPS:,} iterations", self.accuracies.size
        if self.unconverged:
            return f"{limit} in {self.unconverged} of {folds} folds"
        if self.unconverged_choices:
            choices = f"{limit} for some candidate penalties in {self.unconverged_choices} of {folds} folds"
            return f"{choices}; the final fits have converged"
        return ""

    @property
    def mean(self) -> float:
        """Mean accuracy over all folds and repeats."""
        return float(self.accuracies.mean())

    @property
    def std_of_repeats(self) -> float:
        """Standard deviation (n − 1) of the means of the repeats, which differ by their folds; 0 for one repeat."""
        means = self.accuracies.mean(axis=1)
        return float(means.std(ddof=1)) if len(means) > 1 else 0.0

    @property
    def std_of_folds(self) -> float:
        """Standard deviation (n) over folds, mean over repeats: the larger number that some papers report."""
        return float(self.accuracies.std(axis=1).mean())

    def __str__(self) -> str:
        repeats, folds = self.accuracies.shape
        spread = f"± {100 * self.std_of_repeats:.2f} (std of {repeats} repeats of {folds} folds)"
        if repeats == 1:
            spread = f"± {100 * self.std_of_folds:.2f} (std of {folds} folds)"
        return f"{100 * self.mean:.2f} {spread}" + (f", {self.note}" if self.note else "")


def svm_accuracy(
    features: TensorLike,
    labels: TensorLike,
    kernel: str = "rbf",
    penalties: Sequence[float] = PENALTIES,
    folds: int = 10,
    inner_folds: int = 5,
    repeats: int = 1,
    standardize: bool = False,
    gamma: str = "scale",
    seed: int = 0,
    jobs: int | None = None,
) -> SVMResult:
    """Cross-validate an SVM whose penalty C is chosen by an inner cross-validation on each training part.

    features: (N, d) tensor or numpy array · labels: (N,), −1 = unknown, left out · kernel: ``"rbf"`` or ``"linear"`` ·
    penalties: values of C to choose from; of equal accuracies the smallest is chosen · folds: stratified, each tested
    once · inner_folds: stratified, of the training part · repeats: with different folds · standardize: scale each
    feature to mean 0 and variance 1 over the training part; the papers do not · gamma: of the RBF kernel, ``"scale"``,
    1/(d · variance) of the training part, or ``"auto"``, 1/d, scikit-learn's default before 0.22 (2019) · seed: of the
    folds · jobs: number of threads (default: all cores of the process)

    Kernels are computed once for all penalties. The test fold is not used for any choice.

    Examples:
        >>> features, labels = torch.eye(2).repeat(20, 1), torch.tensor([0, 1]).repeat(20)
        >>> print(svm_accuracy(features, labels))
        100.00 ± 0.00 (std of 10 folds)
    """
    x, y = _checked(features, labels, folds, inner_folds)
    checks.choice("kernel", kernel, ("rbf", "linear"))
    checks.choice("gamma", gamma, ("scale", "auto"))
    repeats, jobs = checks.whole("repeats", repeats), None if jobs is None else checks.whole("jobs", jobs)
    if len(penalties) == 0:
        raise ValueError("penalties is empty: give at least one value of C")
    grid = sorted(checks.number("penalties", penalty, above=0, below=math.inf) for penalty in penalties)

    stratified = required("sklearn.model_selection", "graph").StratifiedKFold
    problems = []
    for repeat in range(repeats):
        outer = stratified(folds, shuffle=True, random_state=mix(seed, repeat) % 2**32)
        for fold, (train, test) in enumerate(outer.split(x, y)):
            inner = stratified(inner_folds, shuffle=True, random_state=mix(seed, repeat, fold) % 2**32)
            problems.append((train, test, list(inner.split(train, y[train]))))

    def solve(problem: tuple[Integers, Integers, list[tuple[Integers, Integers]]]) -> tuple[float, float, bool, bool]:
        train, test, parts = problem
        best, choice_converged = grid[0], True
        if len(grid) > 1:
            found = [
                _accuracies(x, y, train[fit], train[validate], kernel, gamma, grid, standardize)
                for fit, validate in parts
            ]
            choice_converged = all(converged for _, converged in found)
            best = grid[int(np.argmax(np.mean([row for row, _ in found], axis=0)))]
        (accuracy,), converged = _accuracies(x, y, train, test, kernel, gamma, [best], standardize)
        return accuracy, best, converged, choice_converged

    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    # Threads suffice: the solver releases the GIL.
    with warnings.catch_warnings(), ThreadPoolExecutor(jobs or available) as pool:
        warnings.simplefilter("ignore", required("sklearn.exceptions", "graph").ConvergenceWarning)  # see note
        solved = list(pool.map(solve, problems))
    accuracies, best, *converged = (np.array(column) for column in zip(*solved, strict=True))
    shape = repeats, folds
    unconverged = (int((~column).sum()) for column in converged)
    return SVMResult(accuracies.reshape(shape), best.reshape(shape), *unconverged)


def _accuracies(
    x: Floats,
    y: Integers,
    train: Integers,
    test: Integers,
    kernel: str,
    gamma: str,
    penalties: Sequence[float],
    standardize: bool,
) -> tuple[list[float], bool]:
    """Accuracy on the test rows of an SVM fitted to the train rows, for each penalty, and whether all converged."""
    fit, held_out = x[train], x[test]
    if standardize:
        mean, std = fit.mean(axis=0), fit.std(axis=0)
        std[std == 0] = 1
        fit, held_out = (fit - mean) / std, (held_out - mean) / std
    train_kernel, test_kernel = fit @ fit.T, held_out @ fit.T  # (n, n), (t, n)
    if kernel == "rbf":
        variance = float(fit.var()) if gamma == "scale" else 1.0
        width = 1 / (fit.shape[1] * variance) if variance > 0 else 1.0
        squares = (fit**2).sum(axis=1)
        train_kernel = np.exp(-width * np.maximum(squares[:, None] - 2 * train_kernel + squares, 0))
        test_kernel = np.exp(-width * np.maximum((held_out**2).sum(axis=1)[:, None] - 2 * test_kernel + squares, 0))
    svc = required("sklearn.svm", "graph").SVC
    accuracies, converged = [], True
    for penalty in penalties:
        trained = svc(C=penalty, kernel="precomputed", max_iter=STEPS)
        trained.fit(train_kernel, y[train])
        converged &= bool(np.max(trained.n_iter_) < STEPS)
        accuracies.append(float((trained.predict(test_kernel) == y[test]).mean()))
    return accuracies, converged


def _checked(given: TensorLike, labels: TensorLike, folds: int, inner_folds: int) -> tuple[Floats, Integers]:
    """Features (n, d) and class indices (n,) of the labeled samples."""
    features = checks.floating("features", checks.as_tensor("features", given))
    if features.dim() != 2 or 0 in features.shape:
        raise ValueError(f"features must have shape (N, d) with N, d ≥ 1, got {tuple(features.shape)}")
    checked_labels = checks.as_tensor("labels", labels)
    checked_labels = checks.integers("labels", checked_labels, (len(features),), "one per row of features")
    for name, number in (("folds", folds), ("inner_folds", inner_folds)):
        checks.whole(name, number, at_least=2)
    x, y = features.detach().cpu().double(), checked_labels.cpu()
    if not bool(torch.isfinite(x).all()):
        raise ValueError("features holds NaN or inf: look for a diverged encoder")
    x, y = x[y >= 0], y[y >= 0]
    classes, targets = torch.unique(y, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"labels must hold two classes or more, got {classes.tolist()}: add another class")
    fewest = int(targets.bincount().min())
    # A fold holds at most ⌈n/folds⌉ of a class, and each inner fold needs one of the rest.
    if fewest < folds or fewest - math.ceil(fewest / folds) < inner_folds:
        raise ValueError(
            f"the smallest class has {fewest} samples, too few for folds={folds} and inner_folds={inner_folds}: "
            "lower them, or leave that class out"
        )
    return x.numpy(), targets.numpy()

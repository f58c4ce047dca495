"""A support vector machine on frozen features, judged by cross-validation: the protocol of the graph papers."""

import math
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hardneg import checks
from hardneg.randomness import mix

PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3)
STEPS = 1_000_000  # of the solver: a linear machine on raw sums may otherwise never end

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SVMResult:
    """Accuracies of all folds, and what became of them."""

    accuracies: Floats  # (repeats, folds), each in [0, 1]
    penalties: Floats  # (repeats, folds): C as chosen within each training part
    unconverged: int  # final machines that ran out of steps
    unconverged_choices: int  # folds whose penalty was chosen by machines of which some ran out of steps

    @property
    def note(self) -> str:
        """What did not converge, in words; empty if everything did."""
        limit, folds = f"not converged after {STEPS:,} iterations", self.accuracies.size
        if self.unconverged:
            return f"{limit} in {self.unconverged} of {folds} folds"
        if self.unconverged_choices:
            chosen = f"{limit} for some penalties tried in {self.unconverged_choices} of {folds} folds"
            return f"{chosen}; the machines with the chosen ones have converged"
        return ""

    @property
    def mean(self) -> float:
        """Over all folds and repeats."""
        return float(self.accuracies.mean())

    @property
    def std_of_repeats(self) -> float:
        """Deviation of the repeats' means, n − 1 below: what another split into folds would change; 0 of one."""
        means = self.accuracies.mean(axis=1)
        return float(means.std(ddof=1)) if len(means) > 1 else 0.0

    @property
    def std_of_folds(self) -> float:
        """Mean over repeats of the deviation among their folds, n below: the larger figure that some papers print."""
        return float(self.accuracies.std(axis=1).mean())

    def __str__(self) -> str:
        repeats, folds = self.accuracies.shape
        spread = f"± {100 * self.std_of_repeats:.2f} (std of {repeats} repeats of {folds} folds)"
        if repeats == 1:
            spread = f"± {100 * self.std_of_folds:.2f} (std of {folds} folds)"
        return f"{100 * self.mean:.2f} {spread}" + (f", {self.note}" if self.note else "")


def svm_accuracy(
    features: Tensor,
    labels: Tensor,
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
    """Cross-validated accuracy of a support vector machine whose penalty is chosen within each training part.

    features: (N, d) · labels: (N,), −1 = unknown, left out · kernel: ``"rbf"`` or ``"linear"`` · penalties: values of C
    to choose from; of equally good ones the smallest · folds: stratified, each tested once · inner_folds: stratified,
    of the training part alone · repeats: with other folds · standardize: bring each feature to mean 0 and variance 1
    over the training part; the papers do not · gamma: of the RBF kernel, ``"scale"``, 1/(d · variance) of what it is
    trained on, or ``"auto"``, 1/d, which was scikit-learn's default until 0.22 of 2019 · seed: of the folds · jobs:
    threads, by default as many as the process may use

    Kernels are computed once for all penalties. The test fold takes no part in any choice.

    Examples:
        >>> features, labels = torch.eye(2).repeat(20, 1), torch.tensor([0, 1]).repeat(20)
        >>> print(svm_accuracy(features, labels))
        100.00 ± 0.00 (std of 10 folds)
    """
    x, y = _checked(features, labels, folds, inner_folds)
    checks.choice("kernel", kernel, ("rbf", "linear"))
    checks.choice("gamma", gamma, ("scale", "auto"))
    for name, number in (("repeats", repeats), ("jobs", jobs if jobs is not None else 1)):
        checks.whole(name, number)
    if len(penalties) == 0:
        raise ValueError("penalties is empty: give at least one value of C")
    for penalty in penalties:
        checks.number("penalties", penalty, above=0, below=math.inf)

    stratified = _sklearn("sklearn.model_selection").StratifiedKFold
    problems = []
    for repeat in range(repeats):
        outer = stratified(folds, shuffle=True, random_state=mix(seed, repeat) % 2**32)
        for fold, (train, test) in enumerate(outer.split(x, y)):
            inner = stratified(inner_folds, shuffle=True, random_state=mix(seed, repeat, fold) % 2**32)
            problems.append((train, test, list(inner.split(train, y[train]))))

    def solve(problem: tuple[Integers, Integers, list[tuple[Integers, Integers]]]) -> tuple[float, float, bool, bool]:
        train, test, parts = problem
        best, chosen = sorted(penalties)[0], True
        if len(penalties) > 1:
            found = [
                _scores(x, y, train[fit], train[judge], kernel, gamma, sorted(penalties), standardize)
                for fit, judge in parts
            ]
            chosen = all(converged for _, converged in found)
            best = sorted(penalties)[int(np.argmax(np.mean([row for row, _ in found], axis=0)))]
        (accuracy,), converged = _scores(x, y, train, test, kernel, gamma, [best], standardize)
        return accuracy, best, converged, chosen

    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    # Threads suffice: the solver lets go of the interpreter's lock.
    with warnings.catch_warnings(), ThreadPoolExecutor(jobs or available) as pool:
        warnings.simplefilter("ignore", _sklearn("sklearn.exceptions").ConvergenceWarning)  # the result tells it
        solved = list(pool.map(solve, problems))
    accuracies, best, *converged = (np.array(column) for column in zip(*solved, strict=True))
    shape = repeats, folds
    unconverged = (int((~column).sum()) for column in converged)
    return SVMResult(accuracies.reshape(shape), best.reshape(shape), *unconverged)


def _scores(
    x: Floats,
    y: Integers,
    train: Integers,
    test: Integers,
    kernel: str,
    gamma: str,
    penalties: Sequence[float],
    standardize: bool,
) -> tuple[list[float], bool]:
    """Accuracy on the test rows of a machine trained on the others, for each penalty; whether all converged."""
    fit, judge = x[train], x[test]
    if standardize:
        mean, std = fit.mean(axis=0), fit.std(axis=0)
        std[std == 0] = 1
        fit, judge = (fit - mean) / std, (judge - mean) / std
    among, across = fit @ fit.T, judge @ fit.T  # (n, n), (t, n)
    if kernel == "rbf":
        variance = float(fit.var()) if gamma == "scale" else 1.0
        width = 1 / (fit.shape[1] * variance) if variance > 0 else 1.0
        squares = (fit**2).sum(axis=1)
        among = np.exp(-width * np.maximum(squares[:, None] - 2 * among + squares, 0))
        across = np.exp(-width * np.maximum((judge**2).sum(axis=1)[:, None] - 2 * across + squares, 0))
    machine = _sklearn("sklearn.svm").SVC
    accuracies, converged = [], True
    for penalty in penalties:
        trained = machine(C=penalty, kernel="precomputed", max_iter=STEPS)
        trained.fit(among, y[train])
        converged &= bool(np.max(trained.n_iter_) < STEPS)
        accuracies.append(float((trained.predict(across) == y[test]).mean()))
    return accuracies, converged


def _checked(features: Tensor, labels: Tensor, folds: int, inner_folds: int) -> tuple[Floats, Integers]:
    checks.floating("features", features)
    if features.dim() != 2 or 0 in features.shape:
        raise ValueError(f"features must have shape (N, d) with N, d ≥ 1, got {tuple(features.shape)}")
    labels = checks.integers("labels", labels, (len(features),), "one per row of features")
    for name, number in (("folds", folds), ("inner_folds", inner_folds)):
        checks.whole(name, number, at_least=2)
    x, y = features.detach().cpu().double(), labels.cpu()
    if not bool(torch.isfinite(x).all()):
        raise ValueError("features holds NaN or inf: look for a diverged encoder")
    x, y = x[y >= 0], y[y >= 0]
    classes, targets = torch.unique(y, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"labels must name two classes or more, got {classes.tolist()}: nothing is to be told apart")
    fewest = int(targets.bincount().min())
    # A fold takes at most ⌈n/folds⌉ of a class, and each inner fold needs one of the rest.
    if fewest < folds or fewest - math.ceil(fewest / folds) < inner_folds:
        raise ValueError(
            f"the smallest class has {fewest} samples, too few for folds={folds} and inner_folds={inner_folds}: "
            "lower them, or leave that class out"
        )
    return x.numpy(), targets.numpy()


def _sklearn(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(
            f'svm_accuracy needs scikit-learn, which cannot be imported ({error}): pip install "hardneg[graph]"'
        ) from error

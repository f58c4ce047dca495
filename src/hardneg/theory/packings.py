"""Packings of class vectors on the sphere: HCL's problem 7 beside the problem of Tammes."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardneg import checks
from hardneg.extras import required

Vectors = NDArray[np.float64]
# Squared distances of the best packings in three dimensions, by their known angles (Schütte, van der Waerden 1951).
TAMMES_3D = {
    4: 8 / 3,
    5: 2.0,
    6: 2.0,
    7: 2 - 2 * math.cos(math.radians(77.8695421)),
    8: 2 - 2 * math.cos(math.radians(74.8584922)),
    9: 2 - 2 * math.cos(math.radians(70.5287794)),
    12: 2 - 2 * math.cos(math.radians(63.4349488)),
}


def squared_distances(vectors: Vectors) -> Vectors:
    """Squared distances of unit vectors (C, d), (C, C), with infinity on the diagonal."""
    distances: Vectors = 2 - 2 * vectors @ vectors.T
    np.fill_diagonal(distances, np.inf)
    return distances


def average_nearest(vectors: Vectors, prior: Vectors | None = None) -> float:
    """Σ ρ(c)·min_{c'} ‖v_c − v_c'‖² (HCL eq. 7). vectors: (C, d), of unit length · prior: ρ (C,), default uniform.

    Examples:
        >>> average_nearest(np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]))
        2.0
    """
    nearest = squared_distances(vectors).min(axis=1)
    return float(nearest.mean() if prior is None else (prior * nearest).sum())


def smallest_distance(vectors: Vectors) -> float:
    """The smallest squared distance, which Tammes' problem maximizes."""
    return float(squared_distances(vectors).min())


def best_packing(
    classes: int, dim: int, average: bool, starts: int = 20, seed: int = 0, prior: Vectors | None = None
) -> Vectors:
    """Unit vectors (C, d) that maximize `average_nearest`, or `smallest_distance` if not average.

    starts: random starting points of the local optimizer; the best result is returned · prior: ρ (C,), with average

    The nearest distance of each class is a variable s_c with s_c ≤ ‖v_c − v_c'‖², which makes the problem smooth.

    Examples:
        >>> round(smallest_distance(best_packing(4, 3, average=False, starts=3)), 6)
        2.666667
    """
    classes, dim = checks.whole("classes", classes, at_least=2), checks.whole("dim", dim, at_least=2)
    starts = checks.whole("starts", starts)
    random = np.random.default_rng([seed, classes, dim, average])
    best, best_value = None, -math.inf
    for _ in range(starts):
        start = random.standard_normal((classes, dim))
        vectors = _local_optimum(start / np.linalg.norm(start, axis=1, keepdims=True), average, prior)
        value = average_nearest(vectors, prior) if average else smallest_distance(vectors)
        if value > best_value + 1e-12:
            best, best_value = vectors, value
    assert best is not None
    return best


def _local_optimum(start: Vectors, average: bool, prior: Vectors | None) -> Vectors:
    classes, dim = start.shape
    size = classes * dim
    count = classes if average else 1  # number of distances that are maximized
    weights = np.full(count, 1 / count) if prior is None else prior
    first, second = np.triu_indices(classes, 1)
    # Each pair bounds the distance of both its classes.
    rows = np.concatenate([first, second]) if average else np.zeros(len(first), dtype=int)
    i, j = (np.concatenate([first, second]), np.concatenate([second, first])) if average else (first, second)

    def vectors(x: Vectors) -> Vectors:
        return x[:size].reshape(classes, dim)

    def slack(x: Vectors) -> Vectors:
        v = vectors(x)
        out: Vectors = 2 - 2 * (v[i] * v[j]).sum(1) - x[size:][rows]
        return out

    def slack_jacobian(x: Vectors) -> Vectors:
        v = vectors(x)
        jacobian = np.zeros((len(i), size + count))
        pairs = np.arange(len(i))
        for axis in range(dim):
            jacobian[pairs, i * dim + axis] = -2 * v[j, axis]
            jacobian[pairs, j * dim + axis] = -2 * v[i, axis]
        jacobian[pairs, size + rows] = -1
        return jacobian

    def norms(x: Vectors) -> Vectors:
        out: Vectors = (vectors(x) ** 2).sum(1) - 1
        return out

    def norms_jacobian(x: Vectors) -> Vectors:
        jacobian = np.zeros((classes, size + count))
        for axis in range(dim):
            jacobian[np.arange(classes), np.arange(classes) * dim + axis] = 2 * x[np.arange(classes) * dim + axis]
        return jacobian

    nearest = squared_distances(start).min(axis=1)
    x0 = np.concatenate([start.ravel(), nearest if average else [nearest.min()]])
    gradient = np.concatenate([np.zeros(size), -weights])
    solved: Any = required("scipy.optimize", "train").minimize(
        lambda x: -float(weights @ x[size:]),
        x0,
        jac=lambda x: gradient,
        method="SLSQP",
        constraints=(
            {"type": "ineq", "fun": slack, "jac": slack_jacobian},
            {"type": "eq", "fun": norms, "jac": norms_jacobian},
        ),
        options={"maxiter": 300, "ftol": 1e-14},
    )
    found = vectors(solved.x)
    out: Vectors = found / np.linalg.norm(found, axis=1, keepdims=True)
    return out

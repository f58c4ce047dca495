"""Does the number of negatives hurt? The population loss over class vectors, for any number k and class distribution.

Lemma 1, the theorem for balanced classes and the conjecture of Awasthi, Dikkala and Kamath (2022), beside the
collision–coverage bound. The classes are disjoint and the temperature is 1. A negative of class c' occurs n_c' times
among the k drawn ones, so that the loss of class vectors v is E_c E_n log(1 + Σ n_c'·e^{v_c·(v_c' − v_c)}), n
multinomial.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from hardneg import checks
from hardneg.losses.infonce import InfoNCE
from hardneg.randomness import generator
from hardneg.theory.minimize import minimized
from hardneg.theory.result import Chart, Finding, Line, verdict_of

PAPER = "Awasthi et al. 2022, Do More Negative Samples Necessarily Hurt in Contrastive Learning?"
_EXACT = 60_000  # outcomes of the multinomial that are enumerated; beyond, they are sampled
_SAMPLED = 20_000


@dataclass(frozen=True)
class Negatives:
    """Class counts of k negatives: outcomes (m, C) with their probabilities (m,); exact unless sampled."""

    counts: Tensor
    probabilities: Tensor
    exact: bool


def negatives(prior: Sequence[float], k: int, seed: int = 0) -> Negatives:
    """The class counts of k negatives drawn from the prior: all outcomes, or a sample if they are too many.

    Examples:
        >>> drawn = negatives((0.5, 0.5), 2)
        >>> drawn.counts.tolist(), drawn.probabilities.round(decimals=6).tolist()
        ([[0.0, 2.0], [1.0, 1.0], [2.0, 0.0]], [0.25, 0.5, 0.25])
    """
    k, weights = checks.whole("k", k), torch.tensor(prior, dtype=torch.float64)
    if len(prior) < 2 or not (weights > 0).all() or abs(float(weights.sum()) - 1) > 1e-6:
        raise ValueError(f"prior must be two or more probabilities > 0 with sum 1, got {tuple(prior)}")
    if math.comb(k + len(prior) - 1, len(prior) - 1) <= _EXACT:
        counts = _compositions(k, len(prior))
        log = math.lgamma(k + 1) - torch.lgamma(counts + 1).sum(1) + torch.xlogy(counts, weights).sum(1)
        return Negatives(counts, log.exp(), True)
    draws = torch.multinomial(weights, _SAMPLED * k, replacement=True, generator=generator("cpu", seed, k))
    counts = torch.nn.functional.one_hot(draws.view(_SAMPLED, k), len(prior)).sum(1).double()
    return Negatives(counts, torch.full((_SAMPLED,), 1 / _SAMPLED, dtype=torch.float64), False)


@lru_cache(maxsize=32)
def _compositions(total: int, parts: int) -> Tensor:
    """All ways to write a number as an ordered sum of so many numbers ≥ 0, (m, parts)."""
    if parts == 1:
        return torch.tensor([[float(total)]], dtype=torch.float64)
    blocks = []
    for first in range(total + 1):
        rest = _compositions(total - first, parts - 1)
        blocks.append(torch.cat([torch.full((len(rest), 1), float(first), dtype=torch.float64), rest], dim=1))
    return torch.cat(blocks)


def population_loss(vectors: Tensor, prior: Sequence[float], drawn: Negatives) -> Tensor:
    """The contrastive loss of unit class vectors (C, d) with the negatives of `negatives`; differentiable."""
    ratios = torch.exp(vectors @ vectors.T - 1)  # e^{v_c·v_c' − 1}, (C, C)
    losses = torch.log1p(drawn.counts @ ratios)  # (m, C)
    return drawn.probabilities @ losses @ torch.tensor(prior, dtype=torch.float64)


def sampled_loss(vectors: Tensor, prior: Sequence[float], k: int, samples: int, seed: int) -> tuple[float, float]:
    """The same loss by `InfoNCE` with k drawn negatives, and its standard error. prior: multiples of 1/60."""
    copies = [round(60 * share) for share in prior]
    pool = torch.repeat_interleave(vectors, torch.tensor(copies), dim=0)  # (60, d), classes as often as they are likely
    anchors = pool.repeat(-(-samples // len(pool)), 1)
    loss = InfoNCE(1.0, in_batch=None, num_negatives=k, backend="reference", reduction="none",
                   generator=generator("cpu", seed, k, 4))  # fmt: skip
    values = loss(anchors, anchors, negatives=pool)
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


def minimizer(
    prior: Sequence[float], k: int, dim: int, starts: int = 3, seed: int = 0, first: Sequence[Tensor] = ()
) -> tuple[Tensor, float]:
    """Unit class vectors (C, d) of least population loss, and that loss.

    starts: number of random starting points · first: further ones, each (C, d)
    """
    drawn = negatives(prior, k, seed)
    return _minimize(lambda v: population_loss(v, prior, drawn), (len(prior), dim), starts, seed, first)


def downstream_loss(vectors: Tensor, prior: Sequence[float], starts: int = 3, seed: int = 0) -> float:
    """L_sup: the least logistic loss of a linear classifier with unit weights w_c on the class vectors (C, d).

    Examples:
        >>> v = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
        >>> round(downstream_loss(v, (0.5, 0.5)), 6), round(math.log(1 + math.exp(-2)), 6)
        (0.126928, 0.126928)
    """
    weights = torch.tensor(prior, dtype=torch.float64)

    def loss(w: Tensor) -> Tensor:
        return -torch.log_softmax(vectors @ w.T, dim=1).diagonal() @ weights

    return _minimize(loss, tuple(vectors.shape), starts, seed, [vectors])[1]


def _minimize(
    loss: Callable[[Tensor], Tensor], shape: tuple[int, ...], starts: int, seed: int, first: Sequence[Tensor] = ()
) -> tuple[Tensor, float]:
    """The best of several local minima over rows of unit length. first: starting points in addition to random ones"""
    draws = generator("cpu", seed, 5)
    points = [torch.randn(shape, generator=draws, dtype=torch.float64) for _ in range(starts)]
    best: tuple[Tensor, float] | None = None
    for start in [*first, *points]:
        free = minimized(lambda rows: loss(torch.nn.functional.normalize(rows, dim=1)), start)
        found = torch.nn.functional.normalize(free, dim=1)
        value = float(loss(found))
        if best is None or value < best[1]:
            best = found, value
    assert best is not None
    return best


def sample_loss(points: Tensor, labels: Tensor, drawn: Negatives) -> Tensor:
    """The population loss of samples (n, d), equally likely, whose positive is a sample of the class; differentiable.

    drawn: counts of the samples, instead of classes, among the negatives
    """
    scores = points @ points.T  # (n, n)
    ratios = torch.exp(scores[:, None, :] - scores[:, :, None])  # anchor, positive, negative
    losses = torch.log1p(torch.einsum("mn,ijn->mij", drawn.counts, ratios))
    same = (labels[:, None] == labels).double()
    return torch.einsum("m,mij,ij->", drawn.probabilities, losses, same / same.sum(1, keepdim=True)) / len(points)


def lemma_1(trials: int = 100, ks: Sequence[int] = (1, 2, 4), seed: int = 0) -> Finding:
    """Optimal embeddings do not distinguish samples of a class: the step of the proof, and the minimizers.

    trials: random embeddings of three classes with two samples each · ks: numbers of negatives

    Examples:
        >>> lemma_1(trials=10, ks=(1,)).verdict
        'holds'
    """
    trials, labels = checks.whole("trials", trials), torch.tensor([0, 0, 1, 1, 2, 2])
    uniform, classes = (1 / 6,) * 6, (1 / 3,) * 3
    draws = generator("cpu", seed, 6)
    rows = []
    for k in ks:
        drawn = negatives(uniform, k)
        broken, least = 0, math.inf
        for _ in range(trials):
            points = torch.nn.functional.normalize(torch.randn(6, 2, generator=draws, dtype=torch.float64), dim=1)
            before = float(sample_loss(points, labels, drawn))
            # Both samples of class 0 become the same one of them, averaged over which.
            after = sum(float(sample_loss(torch.cat([points[[x, x]], points[2:]]), labels, drawn)) for x in (0, 1)) / 2
            broken += after >= before
            least = min(least, before - after)
        found, value = _minimize(lambda v, drawn=drawn: sample_loss(v, labels, drawn), (6, 2), 3, seed)  # type: ignore[misc]
        spread = float((found[0::2] - found[1::2]).norm(dim=1).max())
        rows.append((k, trials, broken, least, spread, value, minimizer(classes, k, 2, seed=seed)[1]))
    collapsed = all(row[4] < 1e-4 and abs(row[5] - row[6]) < 1e-8 for row in rows)
    return Finding(
        name="Lemma 1",
        statement="The optimal embedding does not distinguish samples of a class, for any k.",
        source=PAPER,
        verdict=verdict_of(collapsed and not any(row[2] for row in rows)),
        found=(
            f"Merging the samples of a class lowers the loss on average in all but {sum(row[2] for row in rows)} of "
            f"{trials * len(rows)} random embeddings. In the minimizers two samples of a class are at most "
            f"{max(row[4] for row in rows):.0e} apart, and the loss is that of the best class vectors."
        ),
        numbers={"violations": sum(row[2] for row in rows), "largest_spread": max(row[4] for row in rows)},
        columns=("k", "embeddings", "not lower", "least drop", "spread", "loss", "class vectors"),
        rows=tuple(rows),
    )


def simplex_deviation(vectors: Tensor) -> float:
    """The largest difference of the Gram matrix of unit vectors (C, d) from that of a simplex ETF, −1/(C − 1)."""
    classes = len(vectors)
    target = torch.full((classes, classes), -1 / (classes - 1), dtype=torch.float64).fill_diagonal_(1)
    return float((vectors @ vectors.T - target).abs().max())


def collision_coverage(classes: int, k: int) -> float:
    """η^k/k with η = 1 + 1/(C − 1): the growth of the collision–coverage coefficient.

    Examples:
        >>> [round(collision_coverage(4, k), 2) for k in (1, 3, 64)]
        [1.33, 0.79, 1548457.07]
    """
    return (1 + 1 / (classes - 1)) ** k / k


def balanced_classes(
    cases: Sequence[tuple[int, int]] = ((3, 2), (4, 3), (4, 6), (5, 4)),
    ks: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    seed: int = 0,
    deviation: Callable[[Tensor], float] = simplex_deviation,
) -> Finding:
    """Balanced classes: the minimizer is a simplex ETF for every k, so that the downstream loss does not rise.

    cases: (C, d) with d ≥ C − 1 · ks: increasing numbers of negatives · deviation: of class vectors from the ETF

    Examples:
        >>> balanced_classes(cases=((3, 2),), ks=(1, 8)).verdict
        'holds'
    """
    rows, library = [], 0.0
    for classes, dim in cases:
        prior = (1 / classes,) * classes
        for k in ks:
            vectors, value = minimizer(prior, k, dim, 2, seed)
            mean, error = sampled_loss(vectors, prior, k, 3000, seed)
            exact = negatives(prior, k, seed).exact
            library = max(library, abs(mean - value) / error)
            rows.append((classes, dim, k, value, deviation(vectors), downstream_loss(vectors, prior, 1, seed),
                         collision_coverage(classes, k), exact))  # fmt: skip
    # Sampled outcomes are not quite symmetric in the classes.
    simplex = all(row[4] < (1e-4 if row[7] else 0.05) for row in rows)
    steady = all(
        after[5] <= before[5] + (1e-6 if after[7] else 1e-3)
        for before, after in pairwise(rows)
        if before[:2] == after[:2]
    )
    shown = [row for row in rows if row[:2] == rows[-1][:2]]
    return Finding(
        name="Balanced classes",
        statement="For balanced classes and d ≥ C − 1 the minimizer is a simplex ETF for every k.",
        source=PAPER,
        verdict=verdict_of(simplex and steady),
        found=(
            f"In {len(rows)} cases cosines differ from −1/(C − 1) by at most {max(r[4] for r in rows if r[7]):.0e}, "
            "and the downstream loss is the same for every k, while the collision–coverage coefficient η^k/k rises "
            f"to {max(row[6] for row in rows):.0e}."
        ),
        numbers={
            "largest_deviation": max(row[4] for row in rows if row[7]),
            "library_deviation_in_standard_errors": library,
            "largest_coefficient": max(row[6] for row in rows),
        },
        columns=("C", "d", "k", "loss", "from ETF", "downstream", "η^k/k", "exact"),
        rows=tuple(rows),
        chart=Chart(
            "number k of negatives",
            "log10, relative to k = 1",
            "The downstream loss of the minimizer does not depend on k, while the coefficient of the "
            "collision–coverage "
            "bound falls at first and then grows exponentially",
            (
                Line("downstream loss", [r[2] for r in shown], [math.log10(r[5] / shown[0][5]) for r in shown]),
                Line("bound's coefficient", [r[2] for r in shown], [math.log10(r[6] / shown[0][6]) for r in shown]),
            ),
        ),
    )


def unbalanced_classes(
    priors: Sequence[Sequence[float]] = ((0.5, 0.3, 0.2), (0.8, 0.1, 0.1), (0.9, 0.05, 0.05), (0.7, 0.1, 0.1, 0.1)),
    random: int = 14,
    ks: Sequence[int] = (1, 2, 4, 8, 16, 32),
    seed: int = 0,
    downstream: Callable[[Tensor, Sequence[float]], float] = downstream_loss,
) -> Finding:
    """Unbalanced classes: the conjecture that the downstream loss of the minimizer does not rise with k, by simulation.

    priors: class distributions, besides ``random`` random ones of three or four classes; d = C − 1 · ks: increasing ·
    downstream: the loss, of class vectors and prior

    Examples:
        >>> unbalanced_classes(priors=((0.6, 0.3, 0.1),), random=0, ks=(1, 8)).verdict
        'not refuted'
    """
    draws = generator("cpu", seed, 7)
    given = [tuple(prior) for prior in priors]
    for number in range(random):
        weights = torch.rand(3 + number % 2, generator=draws, dtype=torch.float64) ** 2 + 0.02
        given.append(tuple((weights / weights.sum()).tolist()))
    rows: list[tuple[str | float, ...]] = []
    rises, largest = 0, -math.inf
    for prior in given:
        minimizers = [minimizer(prior, k, len(prior) - 1, 3, seed)[0] for k in ks]
        losses = [downstream(vectors, prior) for vectors in minimizers]
        if any(after > before + 1e-6 for before, after in pairwise(losses)):
            # One of them may be a local minimum: search again from those of every k, and from more random points.
            minimizers = [minimizer(prior, k, len(prior) - 1, 20, seed, minimizers)[0] for k in ks]
            losses = [downstream(vectors, prior) for vectors in minimizers]
        steps = [after - before for before, after in pairwise(losses)]
        rises += any(step > 1e-6 for step in steps)
        largest = max(largest, *steps)
        rows.append((" ".join(f"{share:.2f}" for share in prior), *losses))
    return Finding(
        name="Unbalanced classes",
        statement="For any class distribution the downstream loss of the minimizer does not rise with k (conjecture).",
        source=PAPER,
        verdict="does not hold as printed" if rises else "not refuted",
        found=(
            f"In {rises} of {len(given)} class distributions the downstream loss rises somewhere between k = {ks[0]} "
            f"and k = {ks[-1]}; the largest step is {largest:+.1e}."
        ),
        numbers={"distributions": len(given), "rises": rises, "largest_step": largest},
        columns=("prior", *(f"k = {k}" for k in ks)),
        rows=tuple(rows),
    )

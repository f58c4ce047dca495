"""Conditional noise-contrastive estimation: when it bounds mutual information, and when it lowers the variance.

Theorems 3.1 and 3.2 of Wu et al. (2021), their Table 5, and bands of Ring that the theorems do not cover. On finite
sets every expectation is a sum, so the inequalities are compared without sampling error.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from hardneg import checks
from hardneg.losses.hardening import Ring
from hardneg.losses.infonce import InfoNCE
from hardneg.randomness import generator
from hardneg.theory.minimize import minimized
from hardneg.theory.result import Chart, Finding, Line, verdict_of

PAPER = "Wu et al. 2021, Conditional Negative Sampling"
CORRELATION = 0.2  # of the toy: covariance .4, variances 2
_TOLERANCE = 1e-9  # of float64 sums, and of the optimizer at a maximum


def above_mean(exponentials: Tensor, mean: Tensor) -> Tensor:
    """The condition of Theorem 3.1: e^f exceeds c = E_p e^f. Both broadcast; returns bool."""
    return exponentials > mean


def gaussian_information(correlation: float = CORRELATION) -> float:
    """Mutual information of two Gaussians of this correlation, in nats.

    Examples:
        >>> round(gaussian_information(0.2), 5)
        0.02041
    """
    return -0.5 * math.log(1 - correlation**2)


def gaussian_table(atoms: int, correlation: float = CORRELATION) -> tuple[Tensor, Tensor]:
    """Two correlated Gaussians on equally probable atoms: the atoms (n,) and their joint probabilities (n, n).

    An atom is the mean of a standard Gaussian within its quantile range. Both marginals are uniform.

    Examples:
        >>> atoms, joint = gaussian_table(50)
        >>> bool(torch.allclose(joint.sum(0), torch.full((50,), 1 / 50, dtype=torch.float64)))
        True
    """
    atoms = checks.whole("atoms", atoms, at_least=4)
    correlation = checks.number("correlation", correlation, above=-1, below=1)
    edges = torch.special.ndtri(torch.arange(1, atoms, dtype=torch.float64) / atoms)
    density = torch.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
    density = torch.cat([density.new_zeros(1), density, density.new_zeros(1)])
    points = atoms * (density[:-1] - density[1:])  # (n,)
    u, v = points[:, None], points[None]
    log_ratio = (correlation * u * v - correlation**2 * (u**2 + v**2) / 2) / (1 - correlation**2)
    joint = torch.exp(log_ratio)
    for _ in range(100):  # Sinkhorn: uniform marginals, exactly
        joint = joint / (joint.sum(1, keepdim=True) * atoms)
        joint = joint / (joint.sum(0, keepdim=True) * atoms)
    return points, joint


def information(joint: Tensor) -> float:
    """Mutual information of a table of joint probabilities (n, m), in nats."""
    independent = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True)
    return float(torch.xlogy(joint, joint / independent).sum())


def conditional_estimate(scores: Tensor, joint: Tensor, lower: float = 0.0, upper: float = 1.0) -> Tensor:
    """CNCE with infinitely many negatives from a band of percentiles of each anchor's scores; [0, 1] is NCE.

    scores: f (n, n), anchors × candidates · joint: (n, n) with uniform marginals. It is E f − E log E_q e^f, computed
    by `InfoNCE`: the decoupled form with Q = 1 is log E_q e^f − f.
    """
    loss = InfoNCE(
        temperature=1.0,
        hardening=Ring(lower, upper),
        positive_in_denominator=False,
        negative_count=1.0,
        backend="reference",
    )
    positive = (joint / joint.sum(1, keepdim=True) * scores).sum(1, keepdim=True)  # (n, 1): linear in the positive
    return -loss.from_scores(positive, scores)


def train_critic(points: Tensor, joint: Tensor, lower: float, upper: float, degree: int) -> tuple[float, Tensor]:
    """Maximize CNCE over polynomial critics f(u, v): the value and f (n, n).

    degree: of the polynomial in each of u and v. For upper = 1 the objective is concave in the coefficients (the
    log-sum over the largest entries is a maximum of convex functions), so the maximum found is the global one.
    """
    u, v = points[:, None].expand_as(joint), points[None].expand_as(joint)
    features = torch.stack([u**i * v**j for i in range(degree + 1) for j in range(1, degree + 1)], dim=-1)
    features = features / features.flatten(0, 1).std(dim=0)  # (n, n, D)
    start = torch.zeros(features.shape[-1], dtype=torch.float64)
    start[degree] = CORRELATION  # u·v
    found = minimized(lambda weights: -conditional_estimate(features @ weights, joint, lower, upper), start, 150)
    scores = features @ found
    return float(conditional_estimate(scores, joint, lower, upper)), scores


def theorem_3_1(
    trials: int = 2000, seed: int = 0, condition: Callable[[Tensor, Tensor], Tensor] = above_mean
) -> Finding:
    """L_CNCE ≤ L_NCE ≤ I on random finite joint distributions, by enumeration of all draws of two negatives.

    trials: number of distributions, critics and sets B · condition: which values e^f may be in B, given c = E_p e^f

    Examples:
        >>> theorem_3_1(trials=50).verdict
        'holds'
    """
    trials = checks.whole("trials", trials)
    draws = generator("cpu", seed, 31)
    anchors, values = 3, 6
    joint = torch.rand(trials, anchors, values, generator=draws, dtype=torch.float64) ** 3
    joint = joint / joint.sum(1, keepdim=True) / values  # p(v) is uniform
    scores = 2 * torch.randn(trials, anchors, values, generator=draws, dtype=torch.float64)
    e = scores.exp()
    chosen = torch.rand(e.shape, generator=draws, dtype=torch.float64) < 0.5
    allowed = condition(e, e.mean(-1, keepdim=True))
    # Some subset of what the condition allows; all of it where the subset drawn is empty.
    support = torch.where((chosen & allowed).any(-1, keepdim=True), chosen & allowed, allowed)
    any_subset = torch.where(chosen.any(-1, keepdim=True), chosen, torch.ones_like(chosen))

    def estimate(kept: Tensor) -> Tensor:
        weights = kept / kept.sum(-1, keepdim=True)  # q(v|u), (T, U, V)
        total = e[..., :, None, None] + e[..., None, :, None] + e[..., None, None, :]  # positive and two negatives
        inner = (total / 3).log() * weights[..., None, :, None] * weights[..., None, None, :]
        return (joint * (scores - inner.sum((-1, -2)))).sum((-1, -2))  # (T,)

    nce, cnce, free = (estimate(kept) for kept in (torch.ones_like(e), support, any_subset))
    mutual = torch.tensor([information(table) for table in joint], dtype=torch.float64)
    broken = int((cnce > nce + _TOLERANCE).sum())
    broken_nce = int((nce > mutual + _TOLERANCE).sum())
    free_order, free_bound = int((free > nce + _TOLERANCE).sum()), int((free > mutual + _TOLERANCE).sum())
    widest = int(support.sum((-1, -2)).argmax())  # one negative alone would leave nothing to draw
    deviation = _library_deviation(scores[widest], joint[widest], support[widest], float(cnce[widest]), seed)
    return Finding(
        name="Theorem 3.1",
        statement="L_CNCE ≤ L_NCE ≤ I(U;V) if every value e^f in the band exceeds c = E_p e^f.",
        source=PAPER,
        verdict=verdict_of(broken == 0 and broken_nce == 0),
        found=(
            f"In {trials} random models with B above c, L_CNCE exceeds L_NCE {broken} times and L_NCE exceeds I "
            f"{broken_nce} times. With arbitrary subsets instead, L_CNCE exceeds L_NCE {free_order} times and I "
            f"{free_bound} times."
        ),
        numbers={
            "violations": broken,
            "nce_above_information": broken_nce,
            "violations_without_condition": free_order,
            "above_information_without_condition": free_bound,
            "smallest_slack": float((nce - cnce).min()),
            "library_deviation_in_standard_errors": deviation,
        },
        columns=("band", "models", "CNCE > NCE", "NCE > I", "CNCE > I"),
        rows=(
            ("above c", trials, broken, broken_nce, int((cnce > mutual + _TOLERANCE).sum())),
            ("any subset", trials, free_order, broken_nce, free_bound),
        ),
    )


def _library_deviation(scores: Tensor, joint: Tensor, support: Tensor, exact: float, seed: int) -> float:
    """The sampled estimate of `InfoNCE` with two drawn negatives less the enumerated one, in standard errors."""
    anchors, values = scores.shape
    repeats = 2000
    loss = InfoNCE(temperature=1.0, num_negatives=2, reduction="none", generator=generator("cpu", seed, 32))
    rows = torch.arange(anchors).repeat_interleave(values * repeats)
    pairs = torch.arange(values).repeat_interleave(repeats).repeat(anchors)
    sampled = loss.from_scores(scores[rows, pairs][:, None], scores[rows], support[rows])
    estimate = math.log(3) - sampled.view(anchors, values, repeats)  # log of e^f over the mean of three terms
    error = (joint**2 * estimate.var(dim=-1) / repeats).sum().sqrt().clamp(min=1e-12)
    return float(((joint * estimate.mean(dim=-1)).sum() - exact) / error)


def table_5(
    lower: Sequence[float] = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95), atoms: int = 100, degree: int = 3, seed: int = 0
) -> Finding:
    """The Gaussian toy: a critic trained for each lower percentile, against NCE and the mutual information.

    lower: values of w_l · atoms: of each variable · degree: of the critics' polynomials

    Examples:
        >>> table_5(lower=(0.5,), atoms=40, degree=1).verdict
        'holds'
    """
    points, joint = gaussian_table(atoms)
    mutual = information(joint)
    optimal = (joint * atoms**2).log()
    best, _ = train_critic(points, joint, 0.0, 1.0, degree)
    rows: list[tuple[float, ...]] = [(0.0, best, best, mutual, 0.0)]
    for share in lower:
        value, scores = train_critic(points, joint, share, 1.0, degree)
        same = float(conditional_estimate(scores, joint))
        ordered = optimal.sort(dim=1).values[:, math.floor(share * atoms + 1e-9)]  # the lowest score of the band
        met = float(above_mean(ordered.exp(), optimal.exp().mean(dim=1)).double().mean())
        rows.append((share, value, same, mutual, met))
    ordered_pairs = all(row[1] <= row[2] + _TOLERANCE and row[2] <= row[3] + _TOLERANCE for row in rows)
    falls = all(after[1] <= before[1] + _TOLERANCE for before, after in pairwise(rows))
    return Finding(
        name="Table 5",
        statement="On the Gaussian toy CNCE is below NCE, below I = .02041, and falls as w_l rises.",
        source=PAPER,
        verdict=verdict_of(ordered_pairs and falls),
        found=(
            f"NCE reaches {best:.5f} of I = {mutual:.5f} (continuous: {gaussian_information():.5f}); CNCE falls to "
            f"{abs(rows[-1][1]):.5f} at w_l = {rows[-1][0]:g}. At w_l = {rows[1][0]:g} the condition of Theorem 3.1 "
            f"holds for {rows[1][4]:.0%} of the anchors, yet the order holds for every band [w_l, 1]: its scores "
            "dominate those of p stochastically, which is enough."
        ),
        numbers={
            "information": mutual,
            "information_closed_form": gaussian_information(),
            "nce": best,
            **{f"cnce_{round(100 * row[0])}": row[1] for row in rows[1:]},
        },
        columns=("w_l", "CNCE", "NCE, same critic", "I", "anchors with band > c"),
        rows=tuple(rows),
        chart=Chart(
            "lower percentile of the band",
            "nats",
            "CNCE with a critic trained for each band falls with the lower percentile, below the mutual information",
            (
                Line("CNCE, band [w_l, 1]", [row[0] for row in rows], [row[1] for row in rows]),
                Line("I(U;V)", [row[0] for row in rows], [row[3] for row in rows]),
            ),
        ),
    )


def ring_from_zero(upper: Sequence[float] = (1.0, 0.99, 0.95, 0.9, 0.75), atoms: int = 100, seed: int = 0) -> Finding:
    """Bands that begin at the lowest scores, such as [0, .9], with which Ring's annealing begins.

    Examples:
        >>> ring_from_zero(upper=(0.9,), atoms=40).verdict
        'does not hold as printed'
    """
    points, joint = gaussian_table(atoms)
    mutual, optimal = information(joint), (joint * atoms**2).log()
    rows = []
    for share in upper:
        fixed = float(conditional_estimate(optimal, joint, 0.0, share))
        trained, _ = train_critic(points, joint, 0.0, share, 1)
        rows.append((share, fixed, trained, mutual, fixed > mutual + _TOLERANCE or trained > mutual + _TOLERANCE))
    shown = min(rows, key=lambda row: abs(row[0] - 0.9))  # where Ring's annealing begins
    highest = optimal.argsort(dim=1).argsort(dim=1) >= math.floor(shown[0] * atoms + 1e-9)
    unbounded = float(conditional_estimate(100 * highest.double(), joint, 0.0, shown[0]))
    return Finding(
        name="Bands from 0",
        statement="CNCE with a band of percentiles [w_l, w_u] bounds I(U;V) from below.",
        source=PAPER,
        verdict=verdict_of(not any(row[-1] for row in rows)),
        found=(
            f"For [0, {shown[0]:g}] the critic that is optimal for NCE gives {shown[1]:.4f} and a bilinear critic "
            f"trained for the band {shown[2]:.4f}, against I = {mutual:.4f}. A band that leaves out the highest "
            f"scores bounds nothing: a critic that is 100 on them and 0 below gives {unbounded:.1f}. Theorem 3.1 "
            "excludes such bands."
        ),
        numbers={
            "information": mutual,
            "step_critic": unbounded,
            **{f"optimal_critic_{round(100 * row[0])}": row[1] for row in rows},
            **{f"trained_critic_{round(100 * row[0])}": row[2] for row in rows},
        },
        columns=("w_u", "optimal critic of NCE", "trained critic", "I", "above I"),
        rows=tuple(rows),
    )


def theorem_3_2(trials: int = 4000, seed: int = 0, condition: Callable[[Tensor, Tensor], Tensor] = torch.le) -> Finding:
    """Var_q Z ≤ Var_p Z if Var_q Z ≤ Var_q̃ Z, by enumeration, for one and two negatives and two readings of q̃.

    trials: number of models · condition: on Var_q and Var_q̃

    Examples:
        >>> theorem_3_2(trials=200).numbers["one negative: violations"]
        0.0
    """
    trials = checks.whole("trials", trials)
    draws = generator("cpu", seed, 33)
    values = 7
    e = torch.exp(3 * torch.rand(trials, 1, generator=draws, dtype=torch.float64) *
                  torch.randn(trials, values, generator=draws, dtype=torch.float64))  # fmt: skip
    positive = torch.exp(torch.randn(trials, 1, 1, generator=draws, dtype=torch.float64))
    chosen = torch.rand(e.shape, generator=draws, dtype=torch.float64) < 0.7
    allowed = above_mean(e, e.mean(-1, keepdim=True))
    inside = torch.where((chosen & allowed).any(-1, keepdim=True), chosen & allowed, allowed)  # S_B
    in_pair = inside[:, :, None] & inside[:, None, :]
    one = -((positive + e[:, :, None]) / 2).log()  # Z − f, with one negative: (T, V, 1)
    two = -((positive + e[:, :, None] + e[:, None, :]) / 3).log()  # (T, V, V)
    outside_pair = ~inside[:, :, None] & ~inside[:, None, :]
    cases = {
        "one negative": (one, inside[:, :, None], ~inside[:, :, None]),
        "two, q̃: not both in S_B": (two, in_pair, ~in_pair),
        "two, q̃: both outside S_B": (two, in_pair, outside_pair),
    }
    rows: list[tuple[str, int, int, int, float]] = []
    numbers: dict[str, float] = {}
    for name, (z, kept, rest) in cases.items():
        whole, q, other = (_variance(z, mask) for mask in (torch.ones_like(kept), kept, rest))
        met = condition(q, other)
        larger = q > whole + _TOLERANCE
        count = [int(part.sum()) for part in (met, met & larger, ~met & larger)]
        ratio = float((q / whole)[larger].max()) if larger.any() else 0.0
        rows.append((name, count[0], count[1], count[2], ratio))
        numbers.update({f"{name}: condition": float(count[0]), f"{name}: violations": float(count[1]),
                        f"{name}: larger without condition": float(count[2])})  # fmt: skip
    sound, literal = rows[0][2] == rows[1][2] == 0, rows[2][2] == 0
    return Finding(
        name="Theorem 3.2",
        statement="Negatives from q instead of p lower the variance of Z if Var_q Z ≤ Var_q̃ Z.",
        source=PAPER,
        verdict=verdict_of(sound and literal, sound),
        found=(
            f"Where the condition is met, the variance rises in {rows[0][2]} models with one negative and in "
            f"{rows[1][2] + rows[2][2]} with two. Without the condition it rises in {rows[0][3]} of {trials} models "
            f"with one negative, by a factor of up to {rows[0][4]:.3g}."
        ),
        numbers=numbers,
        columns=("negatives", "condition met", "then Var_q > Var_p", "else Var_q > Var_p", "largest ratio"),
        rows=tuple(rows),
    )


def _variance(values: Tensor, mask: Tensor) -> Tensor:
    """Variance over the uniform distribution on the mask, of each trial, (T,)."""
    weights = mask / mask.sum((-1, -2), keepdim=True).clamp(min=1)
    mean = (weights * values).sum((-1, -2), keepdim=True)
    return (weights * (values - mean) ** 2).sum((-1, -2))

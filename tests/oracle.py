"""A slow float64 oracle of the objective, written from METHODS.md alone and sharing no code with the library."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

UNKNOWN = -1  # this label equals no other, itself included
GIVEN = -1  # the instance number of given negatives, which belong to no instance of the batch


class Result(NamedTuple):
    """The losses of one call, anchor by anchor and reduced."""

    losses: list[float]
    valid: list[bool]
    floored: list[bool]
    support: list[list[int]]
    mean: float
    total: float
    negatives: list[list[float]]  # scores of the support
    positives: list[list[float]]  # scores
    log_weights: list[list[tuple[list[float], list[float]]]]  # of the support and of the positives, for each source
    factor: float  # by which scores are rescaled inside the weights
    shares: list[list[float]]  # the support's weights in Q G, up to a factor


class Sample(NamedTuple):
    """One embedding with its instance, view and label."""

    vector: list[float]
    instance: int
    view: int
    label: int
    source: str = "batch"
    id: int = UNKNOWN


class Anchor(NamedTuple):
    """One anchor with the scores of its positives and of every column, and the columns that may be negatives."""

    positives: list[float]
    scores: list[float]
    sources: list[str]  # of the columns
    eligible: list[int]
    counted: list[int]  # the columns before labels and bands


def log_sum_exp(values: Sequence[float]) -> float:
    """Return log(sum(exp(values))), which is -inf for no values."""
    largest = max(values, default=-math.inf)
    if largest == -math.inf:
        return -math.inf  # otherwise -inf - -inf below would be NaN
    return largest + math.log(math.fsum(math.exp(value - largest) for value in values))


def log_difference(a: float, b: float) -> float:
    """Return log(exp(a) - exp(b)), or -inf where the difference is not positive."""
    if a <= b:
        return -math.inf
    return a + math.log(-math.expm1(b - a))


def log_or_minus_inf(value: float) -> float:
    """Return log(value) with log(0) = -inf."""
    return math.log(value) if value > 0 else -math.inf


def to_vector(row: Any, normalize: bool) -> list[float]:
    """Return a row as floats, of unit length if ``normalize``; a zero vector stays zero."""
    values = [float(x) for x in row]
    length = math.sqrt(math.fsum(x * x for x in values))
    return [x / length for x in values] if normalize and length > 0 else values


def same_label(a: Sample, b: Sample) -> bool:
    """Return whether two samples have the same known label."""
    return a.label != UNKNOWN and a.label == b.label


def ring(scores: list[float], eligible: list[int], lower: float, upper: float) -> set[int]:
    """Return the columns that lie between two percentiles of the eligible ones, by rank."""
    ranked = sorted(eligible, key=lambda column: (scores[column], column))
    start = math.floor(lower * len(ranked) + 1e-9)
    end = max(math.floor(upper * len(ranked) + 1e-9), start + 1)
    return set(ranked[start:end])


def log_generalized_mean(log_weights: list[float], scores: list[float]) -> float:
    """Return log(sum(w e^s) / sum(w)), the form of both R and P, or -inf if all weights are zero."""
    log_weight_sum = log_sum_exp(log_weights)
    if log_weight_sum == -math.inf:
        return -math.inf
    return log_sum_exp([w + s for w, s in zip(log_weights, scores, strict=True)]) - log_weight_sum


def drawn(seed: int, call: int, anchors: int, k: int) -> np.ndarray:
    """The random integers of one call, (anchors, k): SplitMix64 of seed, call, anchor and column in turn."""
    mask = (1 << 64) - 1

    def mixed(state: int) -> int:
        state = (state + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    key = mixed(mixed(seed + 0x9E3779B97F4A7C15) + call)
    return np.array([[mixed(mixed(key + i) + j) >> 2 for j in range(k)] for i in range(anchors)], dtype=np.int64)


def log_debiased(
    w_neg: list[float],
    s_neg: list[float],
    w_pos: list[float],
    p: list[float],
    tau: float,
    debias: str,
    floor: float,
    normalize_weights: bool = True,
) -> tuple[float, bool]:
    """Return log G and whether it was floored, from log-weights and scores of the negatives and the positives."""
    if not normalize_weights:  # the sum of the weights is replaced by the number of negatives
        return log_sum_exp([w + s for w, s in zip(w_neg, s_neg, strict=True)]) - math.log(len(s_neg)), False
    log_r = log_generalized_mean(w_neg, s_neg)
    if tau == 0:
        return log_r, False
    log_p = log_generalized_mean(w_pos, p)
    log_tau = math.log(tau)
    if debias == "hcl":
        log_g = log_difference(log_r, log_tau + log_p) - math.log1p(-tau)
    elif debias == "exact":
        log_z = log_sum_exp(w_neg) - math.log(len(w_neg))
        log_z_pos = log_sum_exp(w_pos) - math.log(len(w_pos))
        denominator = log_difference(log_z, log_tau + log_z_pos)
        if denominator == -math.inf:
            return floor, True
        log_g = log_difference(log_z + log_r, log_tau + log_z_pos + log_p) - denominator
    else:
        raise ValueError(f"debias={debias!r}")
    return (floor, True) if log_g <= floor else (log_g, False)


def anchor_loss(p: list[float], log_qg: float, combine: str, positive_in_denominator: bool) -> float:
    """Return the loss of one anchor with positive scores p and log(Q G)."""
    if combine not in ("mean_of_logs", "log_of_mean", "log_of_sum", "in_denominator"):
        raise ValueError(f"combine_positives={combine!r}")
    if combine in ("log_of_mean", "log_of_sum"):
        log_p = log_sum_exp(p) - (math.log(len(p)) if combine == "log_of_mean" else 0.0)
        return log_sum_exp([log_p, log_qg]) - log_p if positive_in_denominator else log_qg - log_p
    terms = []
    for score in p:
        if not positive_in_denominator:
            terms.append(log_qg - score)
        elif combine == "in_denominator":
            terms.append(log_sum_exp([*p, log_qg]) - score)
        else:
            terms.append(log_sum_exp([0.0, log_qg - score]))  # = log(1 + Q G e^-p)
    return math.fsum(terms) / len(terms)


def log_weight(s: float, hardening: dict[str, Any], factor: float) -> float:
    """Return the log-weight of a score, which is rescaled by the factor."""
    eta = hardening.get("eta")
    return hardening.get("beta", 0.0) * (s * factor) if eta is None else log_or_minus_inf(eta(s * factor))


def band(s: list[float], p: list[float], eligible: list[int], hardening: dict[str, Any], factor: float) -> list[int]:
    """Return the eligible columns that the bands keep and whose weight is not zero."""
    # All rings rank the same eligible columns: percentiles come before other bands, and bands intersect.
    kept_by_rings = [ring(s, eligible, lower, upper) for lower, upper in hardening.get("rings", ())]
    threshold, below = hardening.get("tau_threshold"), hardening.get("below")
    low = -math.inf if threshold is None else log_or_minus_inf(threshold)
    high = math.inf
    if below is not None:
        kind, amount = below
        # Without a positive there is no bound; the anchor is invalid in any case.
        hardest = max(p, default=-math.inf)
        if hardest == -math.inf:
            high = -math.inf
        elif kind in ("margin", "relative"):
            high = hardest - (amount if kind == "margin" else (1 - amount) * abs(hardest))
        else:
            raise ValueError(f"below={below!r}")
    return [
        column
        for column in eligible
        if all(column in kept for kept in kept_by_rings)
        and low <= s[column] <= high
        and log_weight(s[column], hardening, factor) > -math.inf
    ]


def info_nce(
    z1: np.ndarray,
    z2: np.ndarray | None = None,
    *,
    labels: np.ndarray | None = None,
    negatives: Any = None,
    exclude: Any = None,
    negative_labels: Any = None,
    negative_mask: Any = None,
    negative_ids: Any = None,
    ids: np.ndarray | None = None,
    not_negatives: np.ndarray | None = None,
    by_source: dict[str, dict[str, Any]] | None = None,
    temperature: float = 0.5,
    beta: float = 0.0,
    eta: Callable[[float], float] | None = None,
    tau_threshold: float | None = None,
    rings: Sequence[tuple[float, float]] = (),
    below: tuple[str, float] | None = None,
    class_prior: float = 0.0,
    debias: str = "hcl",
    in_batch: str | None = "both",
    symmetric: bool = False,
    supervision: str = "none",
    combine_positives: str = "mean_of_logs",
    average: str = "anchors",
    negative_count: str | float = "support",
    positive_in_denominator: bool = True,
    draws: np.ndarray | None = None,
    weight_range: float | None = None,
    normalize: bool = True,
    constants: Result | None = None,
    grad_through_weights: bool = True,
    normalize_weights: bool = True,
) -> Result:
    """Compute the objective of METHODS.md section 1 anchor by anchor.

    negatives, exclude, negative_labels, negative_mask, negative_ids: arrays, or mappings of them by source · by_source:
    beta, eta, tau_threshold, rings and below of each source, where each is a distribution of its own
    constants: an earlier result with the same support, from which quantities without gradient are copied: the factor of
    weight_range and, without grad_through_weights, all weights. Differences of values then agree with the gradient.
    """
    size = len(z1)
    if in_batch not in ("both", "other", None) or supervision not in ("none", "positives", "negatives", "full"):
        raise ValueError(f"in_batch={in_batch!r}, supervision={supervision!r}")
    if symmetric and (in_batch != "other" or z2 is None or z2.ndim != 2):
        raise ValueError('symmetric needs in_batch="other" and z2 of shape (B, d)')

    # The samples of the batch: z1 is view 0, the views of z2 are 1, 2, ... in view-major order.
    def sample(row: Any, instance: int, view: int) -> Sample:
        label = UNKNOWN if labels is None else int(labels[instance])
        own = UNKNOWN if ids is None else int(ids[instance] if ids.ndim == 1 else ids[instance, view])
        return Sample(to_vector(row, normalize), instance, view, label, "batch", own)

    first = [sample(z1[i], i, 0) for i in range(size)]
    others: list[Sample] = []
    if z2 is not None:
        views = z2[:, None, :] if z2.ndim == 2 else z2
        others = [sample(views[i, m], i, m + 1) for m in range(views.shape[1]) for i in range(size)]

    # Each direction: its anchors, its in-batch candidate columns, and the pool its positives come from.
    directions: list[tuple[list[Sample], list[Sample], list[Sample]]]
    if in_batch == "both":
        two_views = z2 is not None and z2.ndim == 2
        directions = [(first + others if two_views else first, first + others, first + others)]
    elif in_batch == "other":
        directions = [(first, others, others)]
        if symmetric:
            directions.append((others, first, first))
    else:
        directions = [(first, [], first if z2 is None else others)]

    def of_sources(argument: Any) -> dict[str, np.ndarray]:
        return argument if isinstance(argument, dict) else {} if argument is None else {"given": argument}

    def given_negatives(i: int) -> list[Sample]:
        found = []
        for source, rows in of_sources(negatives).items():
            numbers = []
            for argument in (negative_labels, negative_ids):
                known = of_sources(argument).get(source)
                if known is None:
                    known = np.full(rows.shape[-2], UNKNOWN)
                numbers.append(known if known.ndim == 1 else known[i])
            found += [
                Sample(to_vector(row, normalize), GIVEN, n, int(numbers[0][n]), source, int(numbers[1][n]))
                for n, row in enumerate(rows if rows.ndim == 2 else rows[i])
            ]
        return found

    given = [given_negatives(i) for i in range(size)]

    def left_out(i: int, row: Sample) -> bool:
        """Return whether a given row is excluded for instance i."""
        excluded, mask = of_sources(exclude).get(row.source), of_sources(negative_mask).get(row.source)
        return (excluded is not None and row.view in np.atleast_1d(excluded[i])) or (
            mask is not None and not mask[i, row.view]
        )

    ids_of = [{sample.id for sample in (*first, *others) if sample.instance == i} for i in range(size)]
    pairs = set() if not_negatives is None else {(int(a), int(b)) for a, b in not_negatives}

    def same_thing(query: Sample, other: Sample) -> bool:
        """Return whether the ids say that a candidate is no negative."""
        if other.id == UNKNOWN:
            return False
        return other.id in ids_of[query.instance] or (query.id, other.id) in pairs or (other.id, query.id) in pairs

    def score(a: Sample, b: Sample) -> float:
        # fsum is exact up to one rounding, so equal pairs of vectors tie exactly and ties go by index.
        return math.fsum(x * y for x, y in zip(a.vector, b.vector, strict=True)) / temperature

    anchors: list[Anchor] = []
    for queries, batch_columns, pool in directions:
        for query in queries:
            i = query.instance
            positive_scores = []
            for other in pool:
                is_itself = other.instance == i and other.view == query.view
                by_label = supervision in ("positives", "full") and same_label(query, other)
                if not is_itself and (other.instance == i or by_label):
                    positive_scores.append(score(query, other))
            for other in given[i]:
                if supervision in ("positives", "full") and same_label(query, other) and not left_out(i, other):
                    positive_scores.append(score(query, other))
            columns = batch_columns + given[i]
            eligible, counted = [], []
            for column, other in enumerate(columns):
                if other.instance == i or (other.instance == GIVEN and left_out(i, other)):
                    continue
                if same_thing(query, other):
                    continue
                counted.append(column)
                if supervision in ("negatives", "full") and same_label(query, other):
                    continue
                eligible.append(column)
            scores = [score(query, other) for other in columns]
            anchors.append(Anchor(positive_scores, scores, [other.source for other in columns], eligible, counted))

    # weight_range rescales the scores inside the weights only, by one factor for the whole call.
    factor = 1.0
    if weight_range is not None:
        largest = max((abs(a.scores[j]) for a in anchors for j in a.eligible), default=0.0)
        factor = weight_range / largest if largest > 0 else 1.0
    if constants is not None:
        factor = constants.factor

    log_floor = -1 / temperature if normalize else math.log(np.finfo(np.float64).tiny)
    single = {"beta": beta, "eta": eta, "tau_threshold": tau_threshold, "rings": rings, "below": below}
    names = sorted({"batch", *of_sources(negatives)})
    # Each distribution: the sources of its candidates, its hardening and its class prior.
    distributions: list[tuple[list[str], dict[str, Any], float]] = [(names, single, class_prior)]
    if by_source is not None:
        distributions = [([name], by_source.get(name, {}), class_prior * (name == "batch")) for name in names]

    losses, valid, floored, supports = [], [], [], []
    negative_scores: list[list[float]] = []
    log_weights: list[list[tuple[list[float], list[float]]]] = []
    shares: list[list[float]] = []
    for number, anchor in enumerate(anchors):
        p, s = anchor.positives, anchor.scores
        totals, was_floored = [], False
        for collected in (supports, negative_scores, log_weights, shares):
            collected.append([])
        for order, (own_sources, hardening, prior) in enumerate(distributions):
            eligible = [column for column in anchor.eligible if anchor.sources[column] in own_sources]
            support = band(s, p, eligible, hardening, factor)
            if draws is not None and support:
                support = [support[int(draw) % len(support)] for draw in draws[number]]
            s_neg = [s[column] for column in support]
            w_neg = [log_weight(value, hardening, factor) for value in s_neg]
            w_pos = [log_weight(value, hardening, factor) for value in p]
            if constants is not None and not grad_through_weights:
                w_neg, w_pos = constants.log_weights[number][order]
            supports[-1] += support
            negative_scores[-1] += s_neg
            log_weights[-1].append((w_neg, w_pos))
            if not support:
                continue
            shares[-1] += [math.exp(w - log_sum_exp(w_neg)) * len(support) for w in w_neg]
            if not p:
                continue
            log_g, floor_reached = log_debiased(w_neg, s_neg, w_pos, p, prior, debias, log_floor, normalize_weights)
            was_floored |= floor_reached
            before = sum(anchor.sources[column] in own_sources for column in anchor.counted)
            counts = {"support": len(support), "batch": before}
            count = counts[negative_count] if isinstance(negative_count, str) else negative_count
            totals.append(log_or_minus_inf(count) + log_g)

        valid.append(bool(supports[-1]) and bool(p))
        floored.append(was_floored)
        losses.append(
            anchor_loss(p, log_sum_exp(totals), combine_positives, positive_in_denominator) if totals else 0.0
        )

    if average not in ("anchors", "pairs"):
        raise ValueError(f"average={average!r}")
    total, divisor = 0.0, 0
    for anchor, loss, ok in zip(anchors, losses, valid, strict=True):
        if ok:
            weight = len(anchor.positives) if average == "pairs" else 1
            total += weight * loss
            divisor += weight
    mean = total / divisor if divisor else 0.0
    positives = [anchor.positives for anchor in anchors]
    return Result(
        losses, valid, floored, supports, mean, total, negative_scores, positives, log_weights, factor, shares
    )

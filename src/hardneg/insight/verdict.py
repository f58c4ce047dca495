"""What a comparison found, in sentences: which rows differ significantly from the baseline, and in which metrics."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hardneg.evaluation.metrics import MetricFormat
from hardneg.insight.significance import difference, significant_best

Rows = Mapping[str, Mapping[str, Sequence[float]]]  # values of the seeds by row and metric


def verdict(
    rows: Rows, metrics: Mapping[str, MetricFormat], baseline: str, shown: Callable[[str], str] = str
) -> list[str]:
    """Sentences on the differences of all rows from the baseline; none if there is nothing to compare.

    rows: values by row and metric · metrics: the columns · baseline: a row · shown: how a name or title is written

    Examples:
        >>> rows = {"a": {"knn": [0.8, 0.81, 0.82]}, "b": {"knn": [0.9, 0.91, 0.92]}, "c": {"knn": [0.81, 0.82, 0.8]}}
        >>> verdict(rows, {"knn": MetricFormat("kNN")}, "a")
        ['b beats a in kNN.', 'c does not differ from a by more than the noise between seeds.', ...]
    """
    base = rows.get(baseline, {})
    outcomes: dict[_Outcome, list[str]] = {}
    for name, row in rows.items():
        if name != baseline and (outcome := _outcome(row, base, metrics)).metrics:
            outcomes.setdefault(outcome, []).append(name)
    if not outcomes:
        return []
    if all(len(values) < 2 for row in rows.values() for values in row.values()):
        return ["Each row has one seed, so that no difference can be told from noise: train at least 3 seeds of each."]
    # The largest findings first, and the rows without a difference last.
    order = sorted(outcomes, key=lambda found: (not found.better + found.worse, -len(found.better), len(found.worse)))
    sentences = [_sentence(outcomes[outcome], outcome, metrics, baseline, shown) for outcome in order]
    return [*sentences, *_best(rows, metrics, shown)]


class _Outcome(NamedTuple):
    """The metrics in which a row is significantly better and worse than the baseline, and how many both have."""

    better: tuple[str, ...]
    worse: tuple[str, ...]
    metrics: int


def _outcome(
    row: Mapping[str, Sequence[float]], base: Mapping[str, Sequence[float]], metrics: Mapping[str, MetricFormat]
) -> _Outcome:
    common = [metric for metric in metrics if row.get(metric) and base.get(metric)]
    changes = {metric: difference(row[metric], base[metric]) for metric in common}
    found = {metric: metrics[metric].improves(c.mean) for metric, c in changes.items() if c.significant}
    better, worse = (tuple(metric for metric, improved in found.items() if improved is kind) for kind in (True, False))
    return _Outcome(better, worse, len(common))


def _sentence(
    names: Sequence[str],
    outcome: _Outcome,
    metrics: Mapping[str, MetricFormat],
    baseline: str,
    shown: Callable[[str], str],
) -> str:
    one, who, base = len(names) == 1, joined([shown(name) for name in names]), shown(baseline)

    def within(chosen: Sequence[str]) -> str:
        titles = joined([shown(metrics[metric].title) for metric in chosen])
        if outcome.metrics == 1:
            return titles
        whole = len(chosen) == outcome.metrics
        return "every metric" if whole else f"{len(chosen)} of {outcome.metrics} metrics ({titles})"

    if outcome.better and outcome.worse:
        better, worse = within(outcome.better), within(outcome.worse)
        return f"{who} {'is' if one else 'are'} better than {base} in {better} and worse in {worse}."
    if outcome.better:
        return f"{who} {'beats' if one else 'beat'} {base} in {within(outcome.better)}."
    if outcome.worse:
        return f"{who} {'is' if one else 'are'} worse than {base} in {within(outcome.worse)}."
    return f"{who} {'does' if one else 'do'} not differ from {base} by more than the noise between seeds."


def _best(rows: Rows, metrics: Mapping[str, MetricFormat], shown: Callable[[str], str]) -> list[str]:
    """Sentences on the rows that are significantly better than all others, of three rows or more."""
    if len(rows) < 3:
        return []
    found: dict[str, list[str]] = {}
    for metric, format in metrics.items():
        best = significant_best({name: row.get(metric, ()) for name, row in rows.items()}, format.better)
        if best is not None:
            found.setdefault(best, []).append(shown(format.title))
    return [
        f"{shown(name)} is significantly better than all others in "
        f"{'every metric' if len(titles) == len(metrics) > 1 else joined(titles)}."
        for name, titles in found.items()
    ]


def joined(texts: Sequence[str]) -> str:
    """The texts as an enumeration.

    Examples:
        >>> joined(["a"]), joined(["a", "b"]), joined(["a", "b", "c"])
        ('a', 'a and b', 'a, b and c')
    """
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)

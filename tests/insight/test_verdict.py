"""The verdict of a comparison agrees with scipy's Welch test, whichever rows and metrics there are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hardneg.evaluation import MetricFormat
from hardneg.insight.verdict import verdict

METRICS = {"knn": MetricFormat("kNN"), "linear": MetricFormat("linear probe"), "error": MetricFormat("error", "lower")}
BASE = {"knn": [0.80, 0.81, 0.82], "linear": [0.60, 0.61, 0.62], "error": [0.30, 0.31, 0.32]}
UP = {"knn": [0.90, 0.91, 0.92], "linear": [0.70, 0.71, 0.72], "error": [0.10, 0.11, 0.12]}
DOWN = {"knn": [0.70, 0.71, 0.72], "linear": [0.50, 0.51, 0.52], "error": [0.50, 0.51, 0.52]}
SAME = {"knn": [0.81, 0.82, 0.80], "linear": [0.61, 0.60, 0.62], "error": [0.31, 0.30, 0.32]}
MIXED = {"knn": [0.90, 0.91, 0.92], "linear": [0.50, 0.51, 0.52], "error": [0.30, 0.31, 0.32]}


def test_every_kind_of_outcome_has_a_sentence() -> None:
    rows = {"base": BASE, "one": UP, "two": UP, "bad": DOWN, "same": SAME, "mixed": MIXED}
    assert verdict(rows, METRICS, "base") == [
        "one and two beat base in every metric.",
        "mixed is better than base in 1 of 3 metrics (kNN) and worse in 1 of 3 metrics (linear probe).",
        "bad is worse than base in every metric.",
        "same does not differ from base by more than the noise between seeds.",
    ]
    assert verdict({"base": BASE, "one": UP, "same": SAME}, METRICS, "base")[-1] == (
        "one is significantly better than all others in every metric."
    )
    assert verdict({"base": BASE, "one": UP}, {"knn": METRICS["knn"]}, "base") == ["one beats base in kNN."]


def test_there_is_no_verdict_on_a_single_row_or_without_common_metrics() -> None:
    assert verdict({"base": BASE}, METRICS, "base") == []
    assert verdict({"base": BASE, "other": {}}, METRICS, "base") == []
    assert verdict({"one": UP}, METRICS, "missing") == []


def test_single_seeds_cannot_be_told_from_noise() -> None:
    (sentence,) = verdict({"base": {"knn": [0.1]}, "one": {"knn": [0.9]}}, METRICS, "base")
    assert "one seed" in sentence
    assert verdict({"base": {"knn": [0.1]}, "one": {"knn": [0.9, 0.91, 0.92]}}, METRICS, "base") == [
        "one beats base in kNN."
    ]


def test_names_and_titles_are_written_as_asked() -> None:
    found = verdict({"<b>": BASE, "<i>": UP}, METRICS, "<b>", lambda text: text.replace("<", "&lt;"))
    assert found == ["&lt;i> beats &lt;b> in every metric."]


seeds = st.lists(st.floats(0, 1), min_size=2, max_size=5).filter(lambda values: max(values) - min(values) > 1e-3)


@given(seeds, seeds)
def test_the_verdict_is_that_of_scipy(base: list[float], other: list[float]) -> None:
    (sentence,) = verdict({"base": {"knn": base}, "row": {"knn": other}}, {"knn": METRICS["knn"]}, "base")
    test = stats.ttest_ind(other, base, equal_var=False)
    if test.pvalue == pytest.approx(0.05, abs=1e-6):
        return
    kind = "not differ" if test.pvalue > 0.05 else "beats" if test.statistic > 0 else "is worse"
    assert kind in sentence

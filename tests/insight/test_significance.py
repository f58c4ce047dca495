"""Differences, standard errors and significance equal those of scipy's t-tests."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from hardneg.insight.significance import difference, significant_best

fractions = st.lists(st.floats(0, 1).map(lambda value: round(value, 6)), min_size=2, max_size=6)


@given(fractions, fractions)
def test_significance_equals_welchs_test_of_scipy(values: list[float], baseline: list[float]) -> None:
    assume(len({*values}) > 1 and len({*baseline}) > 1)
    peer = stats.ttest_ind(values, baseline, equal_var=False)
    found = difference(values, baseline)
    assert found.error is not None
    if math.isfinite(peer.statistic):
        assert found.mean / found.error == pytest.approx(peer.statistic, rel=1e-6, abs=1e-9)
        assume(abs(peer.pvalue - 0.05) > 1e-9)
        assert found.significant == (peer.pvalue < 0.05)


@pytest.mark.parametrize("one", [0.75, 0.9, 0.99])
def test_a_single_value_is_tested_with_the_standard_deviation_of_the_other_side(one: float) -> None:
    many = [0.9, 0.92, 0.91]
    peer = stats.ttest_ind([one], many)  # Student's test: one variance for both
    for found, sign in ((difference([one], many), 1), (difference(many, [one]), -1)):
        assert found.error is not None
        assert sign * found.mean / found.error == pytest.approx(peer.statistic)
        assert found.significant == (peer.pvalue < 0.05)


def test_one_value_on_each_side_has_no_standard_error_and_no_significance() -> None:
    assert difference([0.9], [0.1]) == (pytest.approx(0.8), None, False)
    assert significant_best({"a": [0.9], "b": [0.1]}) is None


def test_equal_seeds_make_every_difference_significant_except_rounding() -> None:
    assert difference([0.9, 0.9], [0.8, 0.8]).significant
    assert not difference([0.9, 0.9], [0.9, 0.9]).significant
    assert not difference([0.1 + 0.2] * 3, [0.3] * 3).significant


def test_the_best_row_must_differ_significantly_from_every_other() -> None:
    high, near, low = [0.95, 0.951, 0.952], [0.949, 0.951, 0.952], [0.5, 0.51, 0.52]
    assert significant_best({"high": high, "low": low}) == "high"
    assert significant_best({"high": high, "near": near, "low": low}) is None
    assert significant_best({"high": high, "empty": []}) is None
    assert significant_best({}) is None


def test_the_best_row_of_a_metric_where_lower_is_better_is_the_lowest() -> None:
    high, middle, low = [0.95, 0.951, 0.952], [0.7, 0.71, 0.72], [0.5, 0.51, 0.52]
    rows = {"high": high, "middle": middle, "low": low}
    assert significant_best(rows, "lower") == "low"
    assert significant_best({**rows, "near": [0.49, 0.51, 0.53]}, "lower") is None


def test_empty_values_are_an_error() -> None:
    with pytest.raises(ValueError, match="values and baseline must not be empty, got 0 and 1"):
        difference([], [0.5])

"""Differences, their errors and their clearness are those of scipy's t-tests."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from hardneg.insight.significance import clear_best, difference

fractions = st.lists(st.floats(0, 1).map(lambda value: round(value, 6)), min_size=2, max_size=6)


@given(fractions, fractions)
def test_clear_is_what_welchs_test_says(values: list[float], baseline: list[float]) -> None:
    assume(len({*values}) > 1 and len({*baseline}) > 1)
    peer = stats.ttest_ind(values, baseline, equal_var=False)
    found = difference(values, baseline)
    assert found.error is not None
    if math.isfinite(peer.statistic):
        assert found.mean / found.error == pytest.approx(peer.statistic, rel=1e-6, abs=1e-9)
        assume(abs(peer.pvalue - 0.05) > 1e-9)
        assert found.clear == (peer.pvalue < 0.05)


@pytest.mark.parametrize("one", [0.75, 0.9, 0.99])
def test_a_single_value_lends_the_spread_of_the_other_side(one: float) -> None:
    many = [0.9, 0.92, 0.91]
    peer = stats.ttest_ind([one], many)  # Student's: one spread for both
    for found, sign in ((difference([one], many), 1), (difference(many, [one]), -1)):
        assert found.error is not None
        assert sign * found.mean / found.error == pytest.approx(peer.statistic)
        assert found.clear == (peer.pvalue < 0.05)


def test_without_any_spread_there_is_no_error_and_nothing_is_clear() -> None:
    assert difference([0.9], [0.1]) == (pytest.approx(0.8), None, False)
    assert clear_best({"a": [0.9], "b": [0.1]}) is None


def test_seeds_that_agree_exactly_make_any_difference_clear_but_not_none() -> None:
    assert difference([0.9, 0.9], [0.8, 0.8]).clear
    assert not difference([0.9, 0.9], [0.9, 0.9]).clear
    assert not difference([0.1 + 0.2] * 3, [0.3] * 3).clear


def test_the_best_must_be_clear_of_every_other() -> None:
    high, near, low = [0.95, 0.951, 0.952], [0.949, 0.951, 0.952], [0.5, 0.51, 0.52]
    assert clear_best({"high": high, "low": low}) == "high"
    assert clear_best({"high": high, "near": near, "low": low}) is None
    assert clear_best({"high": high, "empty": []}) is None
    assert clear_best({}) is None


def test_nothing_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="values and baseline must not be empty, got 0 and 1"):
        difference([], [0.5])

"""H-SCL: expectations against loops, and verdicts that follow the numbers."""

import math

import pytest
import torch

from hardneg.losses.hardening import Exponential, Threshold
from hardneg.theory import hscl


def model(seed: int, by_threshold: bool = False) -> hscl.Model:
    drawn = hscl.random_model(9, 3, 3, 0.5, torch.Generator().manual_seed(seed))
    hardening = Threshold(tau=0.9) if by_threshold else Exponential(1.3)
    return hscl.Model(drawn.z, drawn.positive, drawn.labels, 0.7, hardening)


@pytest.mark.parametrize("by_threshold", [False, True])
@pytest.mark.parametrize("supervised", [False, True])
def test_losses_are_the_papers_formula(by_threshold: bool, supervised: bool) -> None:
    given = model(3, by_threshold)
    found = given.loss(supervised)
    for i in range(len(given.z)):
        total = weight = 0.0
        for j in range(len(given.z)):
            g = float(given.z[i] @ given.z[j]) / given.temperature
            eta = float(math.exp(g) >= 0.9) if by_threshold else math.exp(1.3 * g)
            if not supervised or given.labels[i] != given.labels[j]:
                total, weight = total + eta * math.exp(g), weight + eta
        p = float(given.z[i] @ given.positive[i]) / given.temperature
        assert float(found[i]) == pytest.approx(math.log(1 + math.exp(-p) * total / weight), rel=1e-12)


def test_the_unsupervised_mean_lies_between_the_other_two() -> None:
    given = model(5)
    same = given.labels[:, None] == given.labels
    whole, collision, other = (given.expectation(mask) for mask in (same | ~same, same, ~same))
    assert ((whole - collision) * (whole - other) <= 0).all()


def test_proposition_2_is_judged_in_fractions() -> None:
    assert hscl.proposition_2(30).verdict == "holds"
    assert hscl.proposition_2(30, parts=lambda other, same: other).verdict == "does not hold as printed"


def test_lemma_1_needs_its_assumption() -> None:
    found = hscl.lemma_1(8)
    assert found.verdict == "holds"
    assert 0 < sum(row[3] for row in found.rows) < sum(row[1] for row in found.rows)  # models with and without it
    assert found.numbers["library_deviation"] < 1e-12
    always = hscl.lemma_1(8, assumption=lambda given: torch.ones(len(given.z), dtype=torch.bool))
    assert always.verdict == "does not hold as printed"


def test_counterexample_is_verified_with_50_digits() -> None:
    found = hscl.counterexample(attempts=4000)
    assert found is not None
    precise = hscl.precise_losses(found)
    assert precise[0] > precise[1]
    for value, supervised in zip(precise, (True, False), strict=True):
        assert float(value) == pytest.approx(float(found.loss(supervised).mean()), abs=1e-13)
    assert not hscl.assumption_1(found).all()


def test_without_a_counterexample_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hscl.assumption_1_is_needed(attempts=4000).verdict == "holds"
    monkeypatch.setattr(hscl, "counterexample", lambda seed, attempts: None)
    assert hscl.assumption_1_is_needed(attempts=5).verdict == "not refuted"
    given = hscl.random_model(6, 2, 2, 6.0, torch.Generator().manual_seed(0))  # separated classes: no counterexample
    given = hscl.Model(given.z, given.positive, given.labels, 0.5, Exponential(1.0))
    monkeypatch.setattr(hscl, "counterexample", lambda seed, attempts: given)
    assert hscl.assumption_1_is_needed(attempts=5).verdict == "not refuted"


@pytest.mark.parametrize("call", [hscl.proposition_2, hscl.lemma_1, lambda n: hscl.counterexample(attempts=n)])
def test_bad_arguments_are_named(call: object) -> None:
    with pytest.raises(ValueError, match=r"(trials|attempts) must be a whole number ≥ 1, got 0"):
        call(0)  # type: ignore[operator]

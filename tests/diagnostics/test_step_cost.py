"""The cost of a step is the time of its parts over the steps of the run."""

import pytest

from hardneg.insight import StepCost, step_cost


def line(step: int, network: float, **batches: float) -> dict[str, object]:
    seconds = {"data": 1.0, "augmentation": 0.5, "network": network, "graph": 9.0}
    return {"step": step, "seconds": seconds, "batches": batches}


def test_training_is_without_the_first_epoch_and_the_rest_with_it() -> None:
    lines = [
        line(10, 100.0, sampling_seconds=0.2, graph_seconds=3.0, encoding_seconds=2.0),
        line(20, 2.0, sampling_seconds=0.1),
        line(30, 4.0, sampling_seconds=0.3, graph_seconds=3.0, encoding_seconds=2.5),
    ]
    found = step_cost(lines)
    assert found == pytest.approx(StepCost(0.6 / 30, 4.5 / 30, 1.5 / 30, 7.0 / 20, 30))
    assert found is not None
    assert found.choosing == pytest.approx(6.6 / 30)


@pytest.mark.parametrize("lines", [[], [{}], [{"step": 0, "seconds": {}}], [{"step": 3, "seconds": "x"}]])
def test_lines_without_times_have_no_cost(lines: list[dict[str, object]]) -> None:
    assert step_cost(lines) is None


def test_values_that_are_not_numbers_count_as_none() -> None:
    found = step_cost([{"step": 4, "seconds": {"network": "slow"}, "batches": {"sampling_seconds": None}}])
    assert found == StepCost(0.0, 0.0, 0.0, 0.0, 4)

"""Consecutive batches: every batch is a run of samples, and an epoch holds each sample at most once."""

import pytest

from hardneg.samplers import ConsecutiveBatchSampler


@pytest.mark.parametrize("size", [12, 14, 4])
def test_batches_are_runs_of_samples_that_do_not_overlap(size: int) -> None:
    sampler = ConsecutiveBatchSampler(size, 4)
    firsts = set()
    for _ in range(40):
        batches = list(sampler)
        assert len(batches) == len(sampler) == size // 4
        assert all(batch == list(range(batch[0], batch[0] + 4)) for batch in batches)
        rows = [row for batch in batches for row in batch]
        assert len(set(rows)) == len(rows)
        assert min(rows) >= 0
        assert max(rows) < size
        firsts.add(min(rows))
    assert firsts == set(range(size % 4 + 1))  # every beginning occurs, so every sample is used


def test_an_epoch_is_in_random_order_and_resumes_at_any_batch() -> None:
    sampler = ConsecutiveBatchSampler(40, 4, seed=3)
    epochs = [list(sampler) for _ in range(3)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])
    other = ConsecutiveBatchSampler(40, 4, seed=3)
    started = iter(other)
    for _ in range(4):
        next(started)
    resumed = ConsecutiveBatchSampler(40, 4, seed=3)
    resumed.load_state_dict(other.state_dict(4))
    assert list(resumed) == epochs[0][4:]


def test_processes_share_a_batch() -> None:
    whole, *shares = (ConsecutiveBatchSampler(14, 4, rank=r, processes=p) for r, p in ((0, 1), (0, 2), (1, 2)))
    for batch, one, other in zip(whole, *shares, strict=True):
        assert batch == one + other

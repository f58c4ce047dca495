"""With gather=True, gloo processes have the queue, the bank and the MoCo gradients of a single process."""

from typing import Any

import pytest
import torch
from memory import processes
from torch.testing import assert_close

SIZES = [pytest.param([2, 0, 6], id="one without rows"), pytest.param([3, 5], id="uneven", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=SIZES)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], Any]:
    return request.param, processes.launch(request.param, tmp_path_factory.mktemp("memory"))


def test_processes_have_the_queue_of_one_process(found: tuple[list[int], Any]) -> None:
    single = processes.queue_states(slice(0, processes.ROWS), gather=False)
    for rank in found[1]:
        for name, tensor in single.items():
            assert torch.equal(rank["queue"][name], tensor), name


def test_processes_have_the_bank_of_one_process(found: tuple[list[int], Any]) -> None:
    single = processes.bank_states(slice(0, processes.ROWS), gather=False)
    for rank in found[1]:
        assert torch.equal(rank["bank"]["rows"], single["rows"])


def test_processes_have_the_gradients_of_one_process(found: tuple[list[int], Any]) -> None:
    sizes, ranks = found
    if 0 in sizes:
        pytest.skip("a loss needs a row")
    single = processes.moco_gradients(slice(0, processes.ROWS), gather=False)
    assert single[1:].abs().amax(dim=(1, 2)).min() > 1e-3  # at first the queue is empty
    averaged = torch.stack([rank["gradients"] for rank in ranks]).mean(dim=0)  # as DDP averages
    assert_close(averaged, single, rtol=1e-6, atol=1e-9)

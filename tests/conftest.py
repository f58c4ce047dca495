"""Every test draws the same numbers every time, so that a red test means a change; `make test-all` draws afresh."""

import os
import zlib

import pytest
import torch
from hypothesis import settings

FRESH = bool(os.environ.get("HARDNEG_FRESH_EXAMPLES"))
settings.register_profile("steady", derandomize=True, database=None, deadline=None)  # a busy machine is no error
settings.register_profile("fresh", deadline=None)
settings.load_profile("fresh" if FRESH else "steady")

# Tests run side by side, and threads that wait for each other cost more than they give on work this small.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # in the processes that tests start, too


@pytest.fixture(autouse=True)
def _same_numbers(request: pytest.FixtureRequest) -> None:
    """The global generator begins where the name of the test says, whatever ran before in this process."""
    if not FRESH:
        torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))

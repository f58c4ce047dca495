"""Every test draws the same numbers every time, so that a red test means a change; `make test-all` draws afresh."""

import os
import zlib

import pytest
import torch
from hypothesis import settings

FRESH = bool(os.environ.get("HARDNEG_FRESH_EXAMPLES"))
settings.register_profile("steady", derandomize=True, database=None)
settings.register_profile("fresh")
settings.load_profile("fresh" if FRESH else "steady")


@pytest.fixture(autouse=True)
def _same_numbers(request: pytest.FixtureRequest) -> None:
    """The global generator begins where the name of the test says, whatever ran before in this process."""
    if not FRESH:
        torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))

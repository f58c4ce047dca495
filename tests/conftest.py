"""Every test draws the same numbers every time, so that a red test means a change; `make test-all` draws afresh."""

import os
import subprocess
import zlib
from collections.abc import Generator
from pathlib import Path

import children
import psutil
import pytest
import torch
from hypothesis import settings

FRESH = bool(os.environ.get("HARDNEG_FRESH_EXAMPLES"))
settings.register_profile("steady", derandomize=True, database=None, deadline=None)  # a busy machine is no error
settings.register_profile("fresh", deadline=None)
settings.load_profile("fresh" if FRESH else "steady")
BEFORE = pytest.StashKey[set[psutil.Process]]()
children.adopt_orphans()

# Tests run side by side, and threads that wait for each other cost more than they give on work this small.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # in the processes that tests start, too


@pytest.fixture(autouse=True)
def _same_numbers(request: pytest.FixtureRequest) -> None:
    """The global generator begins where the name of the test says, whatever ran before in this process."""
    if not FRESH:
        torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def _same_environment() -> Generator[None]:
    """Environment variables that a test or a library sets are gone after it, so that no later test depends on them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new working directory for commands; what they change of this process is undone after the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Remember which processes were there before the test."""
    item.stash[BEFORE] = set(children.tree(os.getpid()))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """When a limit of time ends a test, its processes end, too; else they would go on beside the other tests."""
    report = yield
    error = None if call.excinfo is None else call.excinfo.value
    if isinstance(error, subprocess.TimeoutExpired) or (error is not None and "Timeout (>" in str(error)):
        children.kill_all([process for process in children.tree(os.getpid()) if process not in item.stash[BEFORE]])
    return report

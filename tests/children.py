"""Subprocesses of tests: each has a time limit, and its own subprocesses end with it."""

import contextlib
import ctypes
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch.multiprocessing as mp

LIMIT = 300.0  # seconds


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants, so that it can find and kill them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def run(
    command: Sequence[str], limit: float = LIMIT, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` with output captured as UTF-8; at the limit the process and its descendants are killed."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8", "errors": "replace"}
    started = subprocess.Popen(command, **pipes, **options)  # type: ignore[call-overload]
    try:
        out, err = started.communicate(timeout=limit)
    except BaseException as error:  # also the time limit of the test
        kill(started.pid)
        out, err = started.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise AssertionError(f"{command} took more than {limit} s:\n{out}\n{err}") from error
        raise
    assert not check or started.returncode == 0, f"{command} ended with {started.returncode}:\n{out}\n{err}"
    return subprocess.CompletedProcess(command, started.returncode, out, err)


def spawn(work: Callable[..., None], args: tuple[Any, ...], processes: int, limit: float = LIMIT) -> None:
    """As ``torch.multiprocessing.spawn``; at the limit all processes are killed."""
    context = mp.spawn(work, args=args, nprocs=processes, join=False)  # type: ignore[attr-defined]
    deadline = time.monotonic() + limit
    try:
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                raise AssertionError(f"{processes} processes of {work.__module__}.{work.__name__} took over {limit} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                kill(process.pid)


def kill(pid: int) -> None:
    """Kill a process and its descendants, also those in other sessions, such as the workers of ``torchrun``."""
    kill_all(tree(pid))


def tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants; empty if it has ended."""
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_all(processes: list[psutil.Process]) -> None:
    """Kill processes, and wait until they have ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def wait(rank: int) -> None:
    """Sleep for ten minutes except on rank 0, for the test of `spawn`."""
    time.sleep(600 * rank)

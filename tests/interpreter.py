"""Runs functions in a process that interprets Triton: the interpreter must be chosen before Triton is imported."""

import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any


@contextmanager
def process(interpret: bool) -> Iterator[Callable[..., Any]]:
    """Yields a function that calls functions of importable modules in a new process.

    interpret: whether Triton is interpreted there
    """
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=choose, initargs=(interpret,)) as pool:
        # Pickled here, because torch's queues would pass tensors in shared memory.
        yield lambda function, *given: pickle.loads(
            pool.submit(_call, pickle.dumps((function, given))).result(timeout=300)
        )


def choose(interpret: bool) -> None:
    """Choose whether this process interprets Triton; called before Triton is imported."""
    os.environ["TRITON_INTERPRET"] = str(int(interpret))


def _call(packed: bytes) -> bytes:
    function, given = pickle.loads(packed)
    return pickle.dumps(function(*given))

"""Triton without a GPU, in a process of its own: the interpreter must be chosen before Triton is first imported."""

import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any


@contextmanager
def process(interpret: bool) -> Iterator[Callable[..., Any]]:
    """Gives a way to call functions of importable modules in a new process, which interprets Triton or does not."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=choose, initargs=(interpret,)) as pool:
        # Pickled here, because a queue would move tensors by shared memory.
        yield lambda function, *given: pickle.loads(
            pool.submit(_call, pickle.dumps((function, given))).result(timeout=300)
        )


def choose(interpret: bool) -> None:
    """Interpret Triton in this process, or do not; to be called before it is imported."""
    os.environ["TRITON_INTERPRET"] = str(int(interpret))


def _call(packed: bytes) -> bytes:
    function, given = pickle.loads(packed)
    return pickle.dumps(function(*given))

"""Runs functions in a process that interprets Triton: the interpreter must be chosen before Triton is imported."""

import os
import pickle
import platform
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib import import_module
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
    """Choose whether this process interprets Triton; called before Triton and numpy are imported."""
    os.environ["TRITON_INTERPRET"] = str(int(interpret))
    # The interpreter multiplies by numpy. On some processors OpenBLAS rounds ⟨a, b⟩ and ⟨b, a⟩ differently, other than
    # the products of an H200. Its routines for the oldest processors do not.
    if interpret and platform.machine() in ("x86_64", "AMD64"):
        os.environ["OPENBLAS_CORETYPE"] = "Prescott"


def compiled(module: str, kernel: str, types: dict[str, Any], constants: dict[str, Any]) -> str:
    """PTX of a kernel for compute capability 9.0, in a process that does not interpret. types: of arguments by name"""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(import_module(module), kernel)
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    positions = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=positions)
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False}).asm["ptx"])


def _call(packed: bytes) -> bytes:
    function, given = pickle.loads(packed)
    return pickle.dumps(function(*given))

"""Triton without a GPU, in a process of its own: the interpreter must be chosen before Triton is first imported."""

import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

from torch import Tensor

from hardneg.views.images import ImageViews


@contextmanager
def process(interpret: bool) -> Iterator[Callable[..., Any]]:
    """Gives a way to call functions of importable modules in a new process, which interprets Triton or does not."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_begin, initargs=(interpret,)) as pool:
        # Pickled here, because a queue would move tensors by shared memory.
        yield lambda function, *given: pickle.loads(
            pool.submit(_call, pickle.dumps((function, given))).result(timeout=300)
        )


def _begin(interpret: bool) -> None:
    os.environ["TRITON_INTERPRET"] = str(int(interpret))


def _call(packed: bytes) -> bytes:
    function, given = pickle.loads(packed)
    return pickle.dumps(function(*given))


def make_views(
    views: ImageViews, images: Tensor, uniform: Tensor, seed: int, first: int, channels_last: bool
) -> Tensor:
    """The fused views."""
    from hardneg.views import fused

    return fused.make_views(views, images, uniform, seed, first, channels_last)


def compiled(kernel: str, types: dict[str, str], constants: dict[str, Any]) -> str:
    """The assembly of a kernel of `hardneg.views.programs` for an H100 or H200; types of arguments by name."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hardneg.views import programs

    function = getattr(programs, kernel)
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=places)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    return str(made.asm["ptx"])

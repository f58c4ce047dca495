"""The fused kernel inside `torch.compile`. Imported there only: it imports the compiler, which takes seconds."""

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def uncompiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function outside of compiled graphs, which cannot contain these kernels."""
    return function(*args, **kwargs)

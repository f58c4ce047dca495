"""Calls outside of compiled graphs. Imported while compiling only: it imports the compiler, which takes seconds."""

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def uncompiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function outside of compiled graphs."""
    return function(*args, **kwargs)

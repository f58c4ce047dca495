"""The half-precision search, to be called in a process of `interpreter.process`."""

from typing import Any
from unittest.mock import patch

from torch import Tensor


def searched(
    queries: Tensor, corpus: Tensor, depth: int, tile: int, constants: dict[str, Any]
) -> tuple[Tensor, Tensor, list[int]]:
    """Keys, whether each query is unproven, and the documents collected for each query and tile.

    constants: of the module
    """
    from hardneg.mining import half_precision

    counts: list[int] = []
    launch = half_precision.launch_tiled

    def counted(program: Any, arguments: dict[str, Any], *rest: Any) -> None:
        launch(program, arguments, *rest)
        counts.extend(arguments["counts"].tolist())

    tiles = [(first, corpus[first : first + tile]) for first in range(0, len(corpus), tile)]
    with patch.multiple(half_precision, launch_tiled=counted, **constants):
        keys, unproven = half_precision.best(queries, tiles, depth)
    return keys, unproven, counts

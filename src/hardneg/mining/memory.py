"""The memory budget of a search: how many queries and documents are handled at a time."""

import re

from hardneg import checks
from hardneg.matmul import row_blocks

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_LARGEST_TILE = 1 << 23  # bytes of documents: larger tiles are not faster
_LARGEST_SCORES = 1 << 24  # bytes of their scores, likewise
_GPU_TILE = 1 << 20  # documents: the more, the fewer of their scores enter the result
_LARGEST_BLOCK = 1 << 16  # queries; a block is also what a resumed command does not repeat
CANDIDATE = 40  # bytes of one candidate of one query: its key, what faiss returns for a tile, and its index
# Numbers that PyTorch handles in one thread. On a CPU, work outside of matrix products is done in such pieces: they
# stay in the cache, and no thread waits for another.
PIECE = 1 << 15


def checked_memory(given: object) -> int:
    """A number of bytes, or a text such as "512MiB".

    Examples:
        >>> checked_memory("1.5GiB")
        1610612736
    """
    if isinstance(given, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", given.strip())
        if match is None or match[2] not in _UNITS:
            raise ValueError(
                f"memory={given!r} is not a size: write a number and one of {', '.join(filter(None, _UNITS))}"
            )
        return int(float(match[1]) * _UNITS[match[2]])
    return checks.whole("memory", given)


def tile_size(memory: int, dim: int) -> int:
    """Documents per tile: a twelfth of the memory, because the next one is read while this one is there."""
    return max(1, min(memory // 12, _LARGEST_TILE) // (4 * dim))


def score_rows(memory: int, tile: int) -> int:
    """Queries per tile of scores: their scores with temporaries take a quarter of the memory."""
    return max(1, min(memory // 4, _LARGEST_SCORES) // (8 * tile))


def on_gpu(free: int, dim: int) -> tuple[int, int]:
    """Documents and queries per tile on a GPU with so many free bytes: scores with temporaries take a quarter."""
    tile = max(1, min(_GPU_TILE, free // 16 // (4 * dim)))
    return tile, max(1, free // 4 // (16 * tile))


def pieces(rows: int, columns: int) -> list[slice]:
    """Rows in pieces of at most `PIECE` numbers.

    Examples:
        >>> pieces(3, 1 << 14)
        [slice(0, 2, None), slice(2, 4, None)]
    """
    return row_blocks(rows, columns, max(1, PIECE // columns))


def block_size(memory: int, dim: int, depth: int) -> int:
    """Queries per block: their embeddings and candidates take a quarter of the memory."""
    each = 4 * dim + CANDIDATE * depth
    if each > memory // 4:
        raise ValueError(
            f"memory={memory} is too little for {depth} candidates per query: give at least {4 * each} bytes, "
            "or a smaller rank_range"
        )
    return min(_LARGEST_BLOCK, memory // 4 // each)

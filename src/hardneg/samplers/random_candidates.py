"""Random candidates of each node, uniform and without repeats: shared by a block of rows, or drawn for each row."""

from collections.abc import Iterator

import torch
from torch import Tensor


def balanced_lists(size: int, width: int, counts: list[int], generator: torch.Generator) -> Iterator[Tensor]:
    """Lists of ``width`` distinct nodes; all nodes are in the same number of lists, or in one more.

    size: nodes, N ≥ width · counts: number of lists to yield at a time · generator: on the CPU, so that the lists are
    the same for every device · yields (count, width) int64 for each of ``counts``

    The lists are cut from a stream of random permutations, whose distribution is symmetric in the nodes. Each single
    list is therefore a uniform draw without replacement, in uniform order.

    Examples:
        >>> first, second = balanced_lists(4, 3, [2, 2], torch.Generator().manual_seed(0))
        >>> torch.cat([first, second]).flatten().bincount()
        tensor([3, 3, 3, 3])
    """
    stream = torch.empty(0, dtype=torch.int64)
    for count in counts:
        pieces, length = [stream], len(stream)
        while length < count * width:
            begun = length % width  # entries of the incomplete list: all of the last permutation, as N ≥ width
            used = pieces[-1][len(pieces[-1]) - begun :]
            pieces.append(_permutation(size, used, width - begun, generator))
            length += size
        stream = torch.cat(pieces)
        yield stream[: count * width].view(count, width)
        stream = stream[count * width :]


def _permutation(size: int, used: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """A random permutation (N,) whose first ``length`` entries are none of the ``used`` nodes."""
    order = torch.randperm(size, generator=generator)
    if len(used) == 0:
        return order
    unused = torch.ones(size, dtype=torch.bool)
    unused[used] = False
    first = torch.zeros(size, dtype=torch.bool)
    first[unused[order].nonzero()[:length, 0]] = True
    return torch.cat([order[first], order[~first]])


def independent_lists(size: int, width: int, rows: Tensor, generator: torch.Generator) -> Tensor:
    """For each of ``rows`` an independent uniform draw of ``width`` other nodes without repeats: (R, width) int64.

    Examples:
        >>> independent_lists(3, 2, torch.tensor([1]), torch.Generator().manual_seed(0)).sort().values
        tensor([[0, 2]])
    """
    others = size - 1
    if 4 * width > others:
        drawn = torch.rand(len(rows), others, generator=generator).argsort(dim=1)[:, :width]
    else:
        drawn = torch.randint(others, (len(rows), width + width // 2 + 16), generator=generator)
        # The first M distinct values of independent draws are a draw without replacement.
        values, order = drawn.sort(dim=1, stable=True)
        repeated = torch.zeros_like(drawn, dtype=torch.bool)
        repeated[:, 1:] = values[:, 1:] == values[:, :-1]
        distinct = torch.empty_like(repeated).scatter_(1, order, ~repeated)
        rank = distinct.cumsum(dim=1)
        too_few = rank[:, -1] < width
        if bool(too_few.any()):  # rare: redraw all rows
            return independent_lists(size, width, rows, generator)
        drawn = drawn[distinct & (rank <= width)].view(len(rows), width)
    return drawn + (drawn >= rows[:, None])  # skip the row itself

"""Who is offered to whom: uniform candidates without repeats, dealt from permutations or drawn row by row."""

from collections.abc import Iterator

import torch
from torch import Tensor


def deal(size: int, width: int, hands: list[int], generator: torch.Generator) -> Iterator[Tensor]:
    """Hands of ``width`` distinct nodes, such that all nodes are in equally many hands, give or take one.

    size: nodes, N ≥ width · hands: how many to deal at each turn · generator: on the CPU, so that every device is dealt
    the same · yields (hands, width) int64, one tensor per turn

    The hands are cut from one stream of permutations. Nothing in it knows the name of a node, so every hand taken by
    itself is a uniform draw without replacement, in uniform order.

    Examples:
        >>> first, second = deal(4, 3, [2, 2], torch.Generator().manual_seed(0))
        >>> torch.cat([first, second]).flatten().bincount()
        tensor([3, 3, 3, 3])
    """
    stream = torch.empty(0, dtype=torch.int64)
    for turn in hands:
        pieces, length = [stream], len(stream)
        while length < turn * width:
            begun = length % width  # cards in the hand that is not yet full: all of the last permutation, as N ≥ width
            held = pieces[-1][len(pieces[-1]) - begun :]
            pieces.append(_permutation_without_first(size, held, width - begun, generator))
            length += size
        stream = torch.cat(pieces)
        yield stream[: turn * width].view(turn, width)
        stream = stream[turn * width :]


def _permutation_without_first(size: int, held: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """A random permutation (N,) whose first ``length`` entries avoid the ``held`` ones."""
    order = torch.randperm(size, generator=generator)
    if len(held) == 0:
        return order
    free = torch.ones(size, dtype=torch.bool)
    free[held] = False
    first = torch.zeros(size, dtype=torch.bool)
    first[free[order].nonzero()[:length, 0]] = True
    return torch.cat([order[first], order[~first]])


def draw_rows(size: int, width: int, rows: Tensor, generator: torch.Generator) -> Tensor:
    """For each of ``rows`` an independent uniform draw of ``width`` other nodes without repeats: (R, width) int64.

    Examples:
        >>> draw_rows(3, 2, torch.tensor([1]), torch.Generator().manual_seed(0)).sort().values
        tensor([[0, 2]])
    """
    others = size - 1
    if 4 * width > others:
        drawn = torch.rand(len(rows), others, generator=generator).argsort(dim=1)[:, :width]
    else:
        drawn = torch.randint(others, (len(rows), width + width // 2 + 16), generator=generator)
        # The first M distinct ones of independent draws are a draw without replacement.
        values, order = drawn.sort(dim=1, stable=True)
        repeated = torch.zeros_like(drawn, dtype=torch.bool)
        repeated[:, 1:] = values[:, 1:] == values[:, :-1]
        fresh = torch.empty_like(repeated).scatter_(1, order, ~repeated)
        place = fresh.cumsum(dim=1)
        short = place[:, -1] < width
        if bool(short.any()):  # all rows again, so that no row's luck decides how it is drawn
            return draw_rows(size, width, rows, generator)
        drawn = drawn[fresh & (place <= width)].view(len(rows), width)
    return drawn + (drawn >= rows[:, None])  # step over oneself

"""Walks on a proximity graph that collect the samples of one batch (ProSampler, Algorithm 3 and appendix F.6).

All end: where nothing new can be reached they go on from a fresh start, uniform among the nodes not yet collected.
"""

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from hardneg import checks
from hardneg.checks import whole
from hardneg.samplers.walk_graph import Terrain

KINDS = ("restart", "random", "breadth-first", "depth-first")
# Walking on in numpy pays while so many excursions are under way at once; fewer are faster one move at a time.
_TOGETHER = 48
# A walk that takes more moves than this per sample of the batch is let go, though it might still find something.
_PATIENCE = 200


def walk(
    terrain: Terrain, length: int, generator: torch.Generator, kind: str = "restart", restart: float = 0.1
) -> list[int]:
    """``length`` distinct nodes in the order in which the walk meets them.

    terrain: where to walk · length: B, at most as many as are left · generator: of all draws, on the CPU · kind:
    "restart": each move starts from the first node with probability ``restart``, else from the current one, and goes to
    a random neighbour; "random": the same without restarts; "breadth-first": all neighbours of the first node, then
    those of each in turn, neighbours in random order; "depth-first": to a random neighbour not yet met, back where
    there is none · restart: α in [0, 1]; at 1 only neighbours of the start are met

    On a terrain where some nodes are gone, a move goes to a neighbour that is left; where none is, back to the start.

    Examples:
        >>> ring = Terrain(torch.tensor([[1], [2], [3], [0]]))
        >>> first, *others = walk(ring, 4, torch.Generator().manual_seed(0), "random")
        >>> [(node - first) % 4 for node in others]
        [1, 2, 3]
    """
    checks.choice("kind", kind, KINDS)
    checks.number("restart", restart, at_least=0, at_most=1)
    whole("length", length)
    if length > len(terrain.nodes):
        raise ValueError(f"length={length}, but only {len(terrain.nodes)} nodes are left: ask for fewer")
    explore: Callable[[dict[int, None], int], None]
    if kind == "breadth-first":

        def explore(taken: dict[int, None], start: int) -> None:
            _breadth_first(terrain, taken, start, length, generator)
    elif kind == "depth-first":

        def explore(taken: dict[int, None], start: int) -> None:
            _depth_first(terrain, taken, start, length, generator)
    else:
        chance, patience = restart if kind == "restart" else 0.0, _PATIENCE * length

        def explore(taken: dict[int, None], start: int) -> None:
            nonlocal patience
            patience = _restarting(terrain, taken, start, length, generator, chance, patience)

    taken: dict[int, None] = {}  # in the order of insertion
    while len(taken) < length:
        explore(taken, terrain.start(taken, generator))
    return list(islice(taken, length))


def _restarting(
    terrain: Terrain,
    taken: dict[int, None],
    start: int,
    length: int,
    generator: torch.Generator,
    restart: float,
    patience: int,
) -> int:
    """Walk from ``start`` until enough is taken, nothing more can be met, or more than ``patience`` moves were made.

    Returns the patience for the next start: half after it ran out, so that all starts of a batch together end.
    """
    # After a teleport little may be in reach, so the first look around is short.
    moves = (length * 5 // 4 if not taken else 8) + 16
    taken[start] = None
    node, made = start, 0
    while len(taken) < length:
        before = len(taken)
        draws = torch.rand(2 if terrain.plain else 3, moves, generator=generator, dtype=torch.float64).numpy()
        restarts = draws[0] < restart
        if terrain.plain:
            visits = resolve(terrain, start, node, restarts, (draws[1] * terrain.degree).astype(np.int64))
        else:
            visits = _move_by_move(terrain, start, node, restarts, draws[1], draws[2])
        taken.update(dict.fromkeys(visits))
        node = visits[-1]
        found = len(taken) - before
        made += moves
        if 4 * found < moves:  # few are new: perhaps none are left to meet, else they take many moves
            if _stuck(terrain, taken, start, node, restart):
                return patience
            moves = min(2 * moves, 1 << 16, patience)
        if made > patience:
            return patience // 2
    return patience


def resolve(
    terrain: Terrain, start: int, node: int, restarts: NDArray[np.bool_], picks: NDArray[np.int64]
) -> list[int]:
    """Nodes visited by the walk that stands at ``node``: move t leaves ``start`` if ``restarts[t]``, else where it is.

    picks: (T,) which neighbour each move takes · returns T nodes

    Restarts cut the walk into excursions that do not depend on each other, so all make their t-th move at once.
    """
    view, degree = terrain.flat, terrain.degree
    if np.count_nonzero(restarts) < 2 * _TOGETHER:  # to sort them costs as much as they gain
        found: list[int] = []
        for again, step in zip(restarts.tolist(), picks.tolist(), strict=True):
            node = view[(start if again else node) * degree + step]
            found.append(node)
        return found
    begins = restarts.nonzero()[0]
    if begins[0] > 0:
        begins = np.concatenate([np.zeros(1, dtype=begins.dtype), begins])
    lengths = np.diff(begins, append=len(picks))
    order = np.argsort(-lengths, kind="stable")  # the longest first: those under way are always the first few
    begins, lengths = begins[order], lengths[order]
    at = np.where(restarts[begins], start, node)
    visits = np.empty(len(picks), dtype=np.int64)
    flat, depth = terrain.rows.reshape(-1), 0
    # How many excursions are longer than 0, 1, 2, …
    underway = len(lengths) - np.searchsorted(lengths[::-1], np.arange(lengths[0] + 1), side="right")
    while underway[depth] >= _TOGETHER:
        number = underway[depth]
        moves = begins[:number] + depth
        at = flat.take(at[:number] * degree + picks[moves]).astype(np.int64)
        visits[moves] = at
        depth += 1
    found = visits.tolist()
    # The few long ones end move by move.
    few, steps = slice(0, underway[depth]), picks.data
    for begin, length, here in zip(begins[few].tolist(), lengths[few].tolist(), at[few].tolist(), strict=True):
        for move in range(begin + depth, begin + length):
            here = view[here * degree + steps[move]]
            found[move] = here
    return found


def _move_by_move(
    terrain: Terrain,
    start: int,
    node: int,
    restarts: NDArray[np.bool_],
    draws: NDArray[np.float64],
    spares: NDArray[np.float64],
) -> list[int]:
    """The same on a terrain with gaps or weights: a move from where no neighbour is left leads to ``start``."""
    visits = []
    for again, draw, spare in zip(restarts.tolist(), draws.tolist(), spares.tolist(), strict=True):
        arrived = terrain.step(start if again else node, draw, spare)
        node = start if arrived is None else arrived
        visits.append(node)
    return visits


def _stuck(terrain: Terrain, taken: dict[int, None], start: int, node: int, restart: float) -> bool:
    """Whether the walk can never meet a node that is not yet taken."""
    if restart == 1:
        return all(neighbor in taken for neighbor in terrain.around(start))
    waiting = [start if restart > 0 else node]
    seen = set(waiting)
    while waiting:
        neighbors = terrain.around(waiting.pop())
        for neighbor in neighbors or [start]:  # from a dead end the walk goes back to its start
            if neighbor not in taken:
                return False
            if neighbor not in seen:
                seen.add(neighbor)
                waiting.append(neighbor)
    return True


def _breadth_first(
    terrain: Terrain, taken: dict[int, None], start: int, length: int, generator: torch.Generator
) -> None:
    """Take the neighbours of ``start``, then those of each node taken since, in turn."""
    taken[start] = None
    queue, turn = [start], 0  # turn: whose neighbours come next
    while turn < len(queue) and len(taken) < length:
        # As many rows as may be needed; the order of visits is that of one row after another.
        rows = queue[turn : turn + max(1, (length - len(taken)) // terrain.degree)]
        turn += len(rows)
        ranks = torch.rand(len(rows), terrain.degree, generator=generator).argsort(dim=1).numpy()
        shuffled = np.take_along_axis(terrain.rows[rows], ranks, axis=1).reshape(-1)
        if terrain.left is not None:
            shuffled = shuffled[terrain.left[shuffled]]
        fresh = [node for node in dict.fromkeys(shuffled.tolist()) if node not in taken]
        taken.update(dict.fromkeys(fresh))
        queue += fresh


def _depth_first(terrain: Terrain, taken: dict[int, None], start: int, length: int, generator: torch.Generator) -> None:
    """Go to a random neighbour not yet taken; where there is none, go back one step and try again."""
    draws = _uniform(generator, length)
    taken[start] = None
    path = [start]
    while path and len(taken) < length:
        node: int | None = None
        for _ in range(3):  # most neighbours are new, so a few guesses nearly always do
            guess = terrain.flat[path[-1] * terrain.degree + int(next(draws) * terrain.degree)]
            if guess not in taken and (terrain.left is None or terrain.left[guess]):
                node = guess
                break
        else:
            fresh = [neighbor for neighbor in terrain.around(path[-1]) if neighbor not in taken]
            node = fresh[int(next(draws) * len(fresh))] if fresh else None
        if node is None:
            path.pop()
        else:
            taken[node] = None
            path.append(node)


def _uniform(generator: torch.Generator, number: int) -> Iterator[float]:
    """Uniform numbers without end, drawn ``number`` at a time."""
    while True:
        yield from torch.rand(number, generator=generator, dtype=torch.float64).tolist()

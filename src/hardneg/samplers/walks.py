"""Random walks on a proximity graph that select the samples of one batch (ProSampler, Algorithm 3 and appendix F.6).

Every walk terminates: if no new node can be reached, it continues from a new start, uniform among the unvisited nodes.
"""

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from hardneg import checks
from hardneg.samplers.walk_graph import WalkGraph

KINDS = ("restart", "random", "breadth-first", "depth-first")
# Minimum number of excursions to advance in one numpy call; below it, single moves in Python are faster.
_VECTORIZED = 48
# Moves per sample of the batch after which the walk continues from a new start, although it might reach more.
_MAX_MOVES = 200


def walk(
    graph: WalkGraph, length: int, generator: torch.Generator, kind: str = "restart", restart: float = 0.1
) -> list[int]:
    """The first ``length`` distinct nodes of a random walk, in the order of their first visit.

    graph: to walk on · length: B, at most the number of remaining nodes · generator: of all draws, on the CPU · kind:
    "restart": each move starts from the first node with probability ``restart``, else from the current one, and leads
    to a random neighbor; "random": the same without restarts; "breadth-first": all neighbors of the first node, then
    those of each in turn, neighbors in random order; "depth-first": to a random unvisited neighbor, back if there is
    none · restart: α in [0, 1]; at 1 only neighbors of the start are visited

    If the graph is restricted to remaining nodes, a move leads to a remaining neighbor, or to the start if a node has
    none.

    Examples:
        >>> ring = WalkGraph(torch.tensor([[1], [2], [3], [0]]))
        >>> first, *others = walk(ring, 4, torch.Generator().manual_seed(0), "random")
        >>> [(node - first) % 4 for node in others]
        [1, 2, 3]
    """
    checks.choice("kind", kind, KINDS)
    restart = checks.number("restart", restart, at_least=0, at_most=1)
    length = checks.whole("length", length)
    if length > len(graph.nodes):
        raise ValueError(f"length={length}, but only {len(graph.nodes)} nodes remain: lower length")
    explore: Callable[[dict[int, None], int], None]
    if kind == "breadth-first":

        def explore(visited: dict[int, None], start: int) -> None:
            _breadth_first(graph, visited, start, length, generator)
    elif kind == "depth-first":

        def explore(visited: dict[int, None], start: int) -> None:
            _depth_first(graph, visited, start, length, generator)
    else:
        probability, max_moves = restart if kind == "restart" else 0.0, _MAX_MOVES * length

        def explore(visited: dict[int, None], start: int) -> None:
            nonlocal max_moves
            max_moves = _restarting(graph, visited, start, length, generator, probability, max_moves)

    visited: dict[int, None] = {}  # in the order of insertion
    while len(visited) < length:
        explore(visited, graph.start(visited, generator))
    return list(islice(visited, length))


def _restarting(
    graph: WalkGraph,
    visited: dict[int, None],
    start: int,
    length: int,
    generator: torch.Generator,
    restart: float,
    max_moves: int,
) -> int:
    """Walk from ``start`` until ``length`` nodes are visited, none can be reached, or ``max_moves`` moves were made.

    Returns the limit of moves for the next start. It is halved when it was exceeded, which bounds the moves of a batch.
    """
    # From a later start few new nodes may be reachable, so the first round of draws is short.
    moves = (length * 5 // 4 if not visited else 8) + 16
    visited[start] = None
    node, made = start, 0
    while len(visited) < length:
        before = len(visited)
        draws = torch.rand(2 if graph.uniform else 3, moves, generator=generator, dtype=torch.float64).numpy()
        restarts = draws[0] < restart
        if graph.uniform:
            path = uniform_moves(graph, start, node, restarts, (draws[1] * graph.degree).astype(np.int64))
        else:
            path = _single_moves(graph, start, node, restarts, draws[1], draws[2])
        visited.update(dict.fromkeys(path))
        node = path[-1]
        found = len(visited) - before
        made += moves
        if 4 * found < moves:  # few nodes are new: either none can be reached, or more moves are needed
            if _exhausted(graph, visited, start, node, restart):
                return max_moves
            moves = min(2 * moves, 1 << 16, max_moves)
        if made > max_moves:
            return max_moves // 2
    return max_moves


def uniform_moves(
    graph: WalkGraph, start: int, node: int, restarts: NDArray[np.bool_], picks: NDArray[np.int64]
) -> list[int]:
    """The T nodes visited by a walk at ``node``: move t leaves ``start`` if ``restarts[t]``, else the current node.

    picks: (T,) index of the neighbor that each move leads to

    Restarts divide the walk into independent excursions, so the t-th moves of all excursions are computed together.
    """
    view, degree = graph.flat, graph.degree
    if np.count_nonzero(restarts) < 2 * _VECTORIZED:  # sorting the excursions would cost as much as it saves
        path: list[int] = []
        for restarted, pick in zip(restarts.tolist(), picks.tolist(), strict=True):
            node = view[(start if restarted else node) * degree + pick]
            path.append(node)
        return path
    begins = restarts.nonzero()[0]
    if begins[0] > 0:
        begins = np.concatenate([np.zeros(1, dtype=begins.dtype), begins])
    lengths = np.diff(begins, append=len(picks))
    order = np.argsort(-lengths, kind="stable")  # longest first: the unfinished excursions are always a prefix
    begins, lengths = begins[order], lengths[order]
    current = np.where(restarts[begins], start, node)
    visits = np.empty(len(picks), dtype=np.int64)
    flat, depth = graph.rows.reshape(-1), 0
    # Number of excursions longer than 0, 1, 2, … moves.
    unfinished = len(lengths) - np.searchsorted(lengths[::-1], np.arange(lengths[0] + 1), side="right")
    while unfinished[depth] >= _VECTORIZED:
        number = unfinished[depth]
        moves = begins[:number] + depth
        current = flat.take(current[:number] * degree + picks[moves]).astype(np.int64)
        visits[moves] = current
        depth += 1
    path = visits.tolist()
    # The few longest excursions are completed one move at a time.
    rest, steps = slice(0, unfinished[depth]), picks.data
    for begin, length, here in zip(begins[rest].tolist(), lengths[rest].tolist(), current[rest].tolist(), strict=True):
        for move in range(begin + depth, begin + length):
            here = view[here * degree + steps[move]]
            path[move] = here
    return path


def _single_moves(
    graph: WalkGraph,
    start: int,
    node: int,
    restarts: NDArray[np.bool_],
    first_draws: NDArray[np.float64],
    second_draws: NDArray[np.float64],
) -> list[int]:
    """As `uniform_moves` for weighted or restricted graphs; a node without remaining neighbors leads to ``start``."""
    path = []
    for restarted, first, second in zip(restarts.tolist(), first_draws.tolist(), second_draws.tolist(), strict=True):
        neighbor = graph.step(start if restarted else node, first, second)
        node = start if neighbor is None else neighbor
        path.append(node)
    return path


def _exhausted(graph: WalkGraph, visited: dict[int, None], start: int, node: int, restart: float) -> bool:
    """True if the walk cannot reach any unvisited node."""
    if restart == 1:
        return all(neighbor in visited for neighbor in graph.reachable(start))
    stack = [start if restart > 0 else node]
    seen = set(stack)
    while stack:
        neighbors = graph.reachable(stack.pop())
        for neighbor in neighbors or [start]:  # a dead end leads back to the start
            if neighbor not in visited:
                return False
            if neighbor not in seen:
                seen.add(neighbor)
                stack.append(neighbor)
    return True


def _breadth_first(
    graph: WalkGraph, visited: dict[int, None], start: int, length: int, generator: torch.Generator
) -> None:
    """Visit the neighbors of ``start``, then those of each node visited since, in order."""
    visited[start] = None
    queue, position = [start], 0  # position: of the next node whose neighbors are visited
    while position < len(queue) and len(visited) < length:
        # Several rows together, as many as may be needed; nodes are visited in the order of the rows.
        rows = queue[position : position + max(1, (length - len(visited)) // graph.degree)]
        position += len(rows)
        ranks = torch.rand(len(rows), graph.degree, generator=generator).argsort(dim=1).numpy()
        shuffled = np.take_along_axis(graph.rows[rows], ranks, axis=1).reshape(-1)
        if graph.remaining is not None:
            shuffled = shuffled[graph.remaining[shuffled]]
        unvisited = [node for node in dict.fromkeys(shuffled.tolist()) if node not in visited]
        visited.update(dict.fromkeys(unvisited))
        queue += unvisited


def _depth_first(
    graph: WalkGraph, visited: dict[int, None], start: int, length: int, generator: torch.Generator
) -> None:
    """Move to a random unvisited neighbor; if there is none, move back one node and try again."""
    draws = _uniform_draws(generator, length)
    visited[start] = None
    path = [start]
    while path and len(visited) < length:
        node: int | None = None
        for _ in range(3):  # most neighbors are unvisited, so rejection sampling nearly always succeeds
            drawn = graph.flat[path[-1] * graph.degree + int(next(draws) * graph.degree)]
            if drawn not in visited and (graph.remaining is None or graph.remaining[drawn]):
                node = drawn
                break
        else:
            unvisited = [neighbor for neighbor in graph.reachable(path[-1]) if neighbor not in visited]
            node = unvisited[int(next(draws) * len(unvisited))] if unvisited else None
        if node is None:
            path.pop()
        else:
            visited[node] = None
            path.append(node)


def _uniform_draws(generator: torch.Generator, count: int) -> Iterator[float]:
    """An endless stream of uniform numbers in [0, 1), drawn ``count`` at a time."""
    while True:
        yield from torch.rand(count, generator=generator, dtype=torch.float64).tolist()

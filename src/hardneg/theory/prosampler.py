"""Batches from a proximity graph: how similar neighbors are, and how far walks with restarts go.

Propositions 1 and 2 of Yang et al. (2022), ProSampler, against exact probabilities and the library's own graph and
walks.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hardneg import checks
from hardneg.extras import required
from hardneg.randomness import generator
from hardneg.samplers.graph import ProximityGraph
from hardneg.samplers.walk_graph import WalkGraph
from hardneg.samplers.walks import uniform_moves, walk
from hardneg.theory.result import Chart, Finding, Line, verdict_of

PAPER = "Yang et al. 2022, ProSampler (batch sampling for contrastive learning)"
Matrix = NDArray[np.float64]
_TOLERANCE = 1e-12


def printed_similarity(share: float, candidates: int, neighbors: int) -> float:
    """(1 − p^M)^K, p = 1 − S/N: the lower bound of Proposition 1 as printed."""
    return (1 - (1 - share) ** candidates) ** neighbors


def exact_similarity(share: float, candidates: int, neighbors: int) -> float:
    """P(Bin(M, S/N) ≥ K): all K neighbors are similar if and only if K of the M candidates are.

    share: S/N · candidates: M, drawn with replacement · neighbors: K

    Examples:
        >>> f"{exact_similarity(0.05, 1000, 100):.1e}"
        '8.4e-11'
    """
    return float(required("scipy.stats", "train").binom.sf(neighbors - 1, candidates, share))


def exact_similarity_without_replacement(similar: int, others: int, candidates: int, neighbors: int) -> float:
    """P(Hypergeometric ≥ K): M of the N − 1 other samples are drawn without replacement, S of which are similar."""
    return float(required("scipy.stats", "train").hypergeom.sf(neighbors - 1, others, similar, candidates))


def _by_integers(similar: int, others: int, candidates: int, neighbors: int) -> float:
    """The same probability from binomial coefficients, in integers."""
    ways = sum(
        math.comb(similar, hits) * math.comb(others - similar, candidates - hits)
        for hits in range(neighbors, min(similar, candidates) + 1)
        if candidates - hits <= others - similar
    )
    return float(ways / math.comb(others, candidates))


def proposition_1(
    cases: Sequence[tuple[float, int, int]] = (
        (0.05, 1000, 1),
        (0.05, 1000, 10),
        (0.05, 1000, 50),
        (0.05, 1000, 100),
        (0.1, 1000, 100),
        (0.2, 1000, 100),
        (0.1, 500, 100),
        (0.3, 300, 100),
    ),
    group: int = 31,
    groups: int = 8,
    seeds: int = 40,
    seed: int = 0,
    bound: Callable[[float, int, int], float] = printed_similarity,
) -> Finding:
    """The probability that all neighbors in the proximity graph are similar, against the printed lower bound.

    cases: (S/N, M, K) · group, groups: of identical samples in the library's graph, whose frequency is compared ·
    seeds: number of graphs · bound: the printed one

    Examples:
        >>> proposition_1(seeds=4).verdict
        'does not hold as printed'
    """
    seeds = checks.whole("seeds", seeds)
    grid = [
        (s, m, k) for s in (0.01, 0.05, 0.2, 0.5, 0.9) for m in (5, 20, 100, 1000) for k in (1, 2, 5, 20, 100) if k <= m
    ]
    pairs = [(bound(*case), exact_similarity(*case)) for case in grid]
    below = sum(exact < given - _TOLERANCE for given, exact in pairs)
    above = sum(exact > given + _TOLERANCE for given, exact in pairs)
    rows = [(share, m, k, bound(share, m, k), exact_similarity(share, m, k)) for share, m, k in cases]
    library = _library_frequency(group, groups, seeds, seed)
    worst = max(rows, key=lambda row: row[3] - row[4])
    reading = ": the printed value is an upper bound" if below and not above else ""
    shares = [number / 200 for number in range(1, 61)]
    return Finding(
        name="Proposition 1",
        statement="All K neighbors are similar with probability ≳ (1 − p^M)^K, p = 1 − S/N.",
        source=PAPER,
        verdict=verdict_of(below == 0),
        found=(
            f"The probability is P(Bin(M, S/N) ≥ K). In {below} of {len(grid)} cases it is below the printed bound, "
            f"and in {above} above{reading}. For S/N = "
            f"{worst[0]:g}, M = {worst[1]}, K = {worst[2]} it is {worst[4]:.1e} against {worst[3]:.4f}. The library's "
            f"graph agrees with the exact form, {library['frequency']:.4f} against {library['hypergeometric']:.4f} "
            f"({library['deviation']:+.1f} standard errors)."
        ),
        numbers={"below_printed": below, "above_printed": above, "cases": len(grid), **library},
        columns=("S/N", "M", "K", "printed", "exact"),
        rows=tuple(rows),
        chart=Chart(
            "share S/N of similar samples",
            "probability",
            "For M = 1000 and K = 100 the exact probability that all neighbors are similar rises near S/N = 0.1; the "
            "printed bound is close to 1 from 0.01 on",
            (
                Line("exact", shares, [exact_similarity(share, 1000, 100) for share in shares]),
                Line("printed bound", shares, [printed_similarity(share, 1000, 100) for share in shares]),
            ),
        ),
    )  # fmt: skip


def _library_frequency(group: int, groups: int, seeds: int, seed: int) -> dict[str, float]:
    """How often all neighbors of a sample are of its group in `ProximityGraph`, and the exact probability.

    Samples of a group are identical and those of different groups orthogonal, so the S = group − 1 others of a group
    are the similar ones.
    """
    size = group * groups
    labels = torch.arange(size) // group
    embeddings = torch.nn.functional.one_hot(labels).float()
    candidates, neighbors = size // 3, group // 3
    means = []
    for number in range(seeds):
        graph = ProximityGraph.build(embeddings, candidates, neighbors, seed=seed + number, mode="independent")
        means.append(float((labels[graph.neighbors.long()] == labels[:, None]).all(dim=1).double().mean()))
    exact = exact_similarity_without_replacement(group - 1, size - 1, candidates, neighbors)
    frequency = float(np.mean(means))
    # Rows are independent draws in this mode.
    error = math.sqrt(exact * (1 - exact) / (size * seeds))
    return {
        "frequency": frequency,
        "hypergeometric": exact,
        "hypergeometric_by_integers": _by_integers(group - 1, size - 1, candidates, neighbors),
        "printed_for_the_graph": printed_similarity((group - 1) / (size - 1), candidates, neighbors),
        "deviation": (frequency - exact) / error,
    }


def conductance(adjacency: Matrix, inside: NDArray[np.bool_]) -> float:
    """Edges that leave a set, divided by the smaller of the volumes of the set and of its complement.

    Examples:
        >>> path = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
        >>> conductance(path, np.array([True, False, False]))
        1.0
    """
    degrees = adjacency.sum(1)
    leaving = adjacency[inside][:, ~inside].sum()
    return float(leaving / min(degrees[inside].sum(), degrees[~inside].sum()))


def stationary(adjacency: Matrix, restart: float, lazy: bool) -> Matrix:
    """p_u of walks with restarts from every node u, in rows (n, n): p_u = α·1_u + (1 − α)·M·p_u."""
    restart = checks.number("restart", restart, above=0, at_most=1)
    if (adjacency.sum(1) == 0).any():
        raise ValueError("adjacency has a node without neighbors: remove it")
    step = adjacency / adjacency.sum(1, keepdims=True)
    if lazy:
        step = (np.eye(len(step)) + step) / 2
    solved: Matrix = np.linalg.solve((np.eye(len(step)) - (1 - restart) * step).T, restart * np.eye(len(step))).T
    return solved


def printed_escape(restart: float, conductance: float) -> float:
    """(1 − α)/(2α)·Φ(S), the bound of Proposition 2."""
    return (1 - restart) / (2 * restart) * conductance


def proposition_2(
    graphs: int = 40,
    nodes: int = 8,
    restarts: Sequence[float] = (0.05, 0.1, 0.2, 0.5, 0.9),
    seed: int = 0,
    bound: Callable[[float, float], float] = printed_escape,
) -> Finding:
    """The probability that a walk with restarts is outside of S, over all sets S of many small graphs.

    graphs: random connected graphs, to which a barbell, a path, a star and a cycle are added · nodes: of each; all
    2^nodes sets are tried · restarts: values of α · bound: of α and Φ(S)

    Examples:
        >>> proposition_2(graphs=2, nodes=6).verdict
        'holds with a correction'
    """
    names = ("lazy, from each u ∈ S", "lazy, averaged over S by degree", "plain, averaged over S by degree",
             "plain, averaged, bound doubled")  # fmt: skip
    worst = dict.fromkeys(names, 0.0)
    broken = dict.fromkeys(names, 0)
    checked = 0
    tables = [*_graphs(graphs, nodes, seed)]
    for adjacency in tables:
        degrees = adjacency.sum(1)
        for restart in restarts:
            lazy, plain = (stationary(adjacency, restart, kind) for kind in (True, False))
            for code in range(1, 2 ** len(adjacency) - 1):
                inside = (code >> np.arange(len(adjacency)) & 1).astype(bool)
                limit = bound(restart, conductance(adjacency, inside))
                weights = degrees[inside] / degrees[inside].sum()
                from_each = lazy[inside][:, ~inside].sum(1)
                averaged = float(weights @ plain[inside][:, ~inside].sum(1))
                ratios = (
                    from_each.max() / limit,
                    weights @ from_each / limit,
                    averaged / limit,
                    averaged / (2 * limit),
                )
                checked += 1
                for name, ratio in zip(names, ratios, strict=True):
                    worst[name] = max(worst[name], float(ratio))
                    broken[name] += bool(ratio > 1 + 1e-9)
    barbell, half = _barbell(10), np.arange(20) < 10
    bridge = float(stationary(barbell, 0.1, True)[9, ~half].sum())
    limit = bound(0.1, conductance(barbell, half))
    printed = broken[names[0]] == 0 and bridge <= limit
    corrected = broken[names[1]] == 0 and broken[names[3]] == 0
    return Finding(
        name="Proposition 2",
        statement="A lazy walk with restarts from u ∈ S is outside S with probability ≤ (1 − α)/(2α)·Φ(S).",
        source=PAPER,
        verdict=verdict_of(printed, corrected),
        found=(
            f"Over {checked} sets of {len(tables)} graphs it fails for single starts (by a factor of up to "
            f"{worst[names[0]]:.2f}; at the bridge of two 10-cliques {bridge:.3f} against {limit:.4f}), and holds "
            f"averaged over S by degree (at most {worst[names[1]]:.3f} of the bound). The plain walk, which the "
            f"sampler makes, obeys (1 − α)/α·Φ(S) (at most {worst[names[3]]:.3f} of it), not half of that "
            f"({worst[names[2]]:.3f})."
        ),
        numbers={
            **{f"{name}: largest ratio": worst[name] for name in names},
            **{f"{name}: violations": broken[name] for name in names},
            "bridge": bridge,
            "bridge_bound": limit,
        },
        columns=("walk and start", "sets", "above the bound", "largest ratio to it"),
        rows=tuple((name, checked, broken[name], worst[name]) for name in names),
    )


def locality_of_walks(
    restarts: Sequence[float] = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9),
    moves: int = 2000,
    batches: int = 300,
    seed: int = 0,
) -> Finding:
    """The library's walks on a ring in which each node has six neighbors: how often they leave an arc S of 12 nodes.

    A move of the library's walk leads to a neighbor also after a restart, so its bound is Φ(S)/α. restarts: increasing
    values of α · moves: from each node of S · batches: of 10 distinct nodes, from a random start

    Examples:
        >>> locality_of_walks(restarts=(0.1, 0.9), moves=200, batches=100).verdict
        'holds'
    """
    size, arc = 60, 12
    offsets = torch.tensor([-3, -2, -1, 1, 2, 3])
    neighbors = (torch.arange(size)[:, None] + offsets) % size
    graph = WalkGraph(neighbors)
    adjacency = np.zeros((size, size))
    adjacency[np.arange(size)[:, None], neighbors.numpy()] = 1
    inside = np.arange(size) < arc
    phi = conductance(adjacency, inside)
    rows, deviations = [], []
    for restart in restarts:
        after_move = stationary(adjacency, restart, False) @ adjacency / len(offsets)  # one more move, (n, n)
        exact = float(after_move[inside][:, ~inside].sum(1).mean())
        outside = []
        for start in range(arc):
            draws = torch.rand(
                2, moves, generator=generator("cpu", seed, start, round(1000 * restart)), dtype=torch.float64
            )
            picks = (draws[1] * len(offsets)).long().numpy()
            path = uniform_moves(graph, start, start, (draws[0] < restart).numpy(), picks)
            outside.append(~inside[path])
        # Excursions between restarts are independent: blocks of 20/α moves are nearly so.
        block = min(round(20 / restart), moves // 2)
        blocks = np.concatenate([np.resize(each, (moves // block, block)).mean(1) for each in outside])
        error = float(blocks.std() / math.sqrt(len(blocks)))
        share = float(np.mean(outside))
        deviations.append((share - exact) / max(error, 1e-9))
        distances = []
        for number in range(batches):
            nodes = np.array(walk(graph, 10, generator("cpu", seed, number, 7), "restart", restart))
            distances.append(float(np.mean(np.minimum((nodes - nodes[0]) % size, (nodes[0] - nodes) % size))))
        rows.append((restart, share, error, exact, min(phi / restart, 1.0), float(np.mean(distances))))
    bounded = all(row[3] <= row[4] + _TOLERANCE for row in rows)
    local = rows[-1][5] < rows[0][5] and rows[-1][3] < rows[0][3]
    agrees = max(map(abs, deviations)) < 5
    return Finding(
        name="Locality of walks",
        statement="Higher α keeps a batch near its first node.",
        source=PAPER,
        verdict=verdict_of(bounded and local and agrees),
        found=(
            f"The share of moves outside S falls from {rows[0][1]:.3f} at α = {rows[0][0]:g} to {rows[-1][1]:.3f} at "
            f"α = {rows[-1][0]:g}, as computed exactly (largest deviation {max(map(abs, deviations)):.1f} standard "
            f"errors) and below Φ(S)/α; the nodes of a batch of 10 are {rows[0][5]:.2f} and {rows[-1][5]:.2f} steps "
            "from the first."
        ),
        numbers={
            "conductance": phi,
            "largest_deviation_in_standard_errors": max(map(abs, deviations)),
            "first_share": rows[0][1],
            "last_share": rows[-1][1],
        },
        columns=("α", "moves outside S", "± s.e.", "exact", "Φ/α", "steps, batch"),
        rows=tuple(rows),
    )


def _barbell(clique: int) -> Matrix:
    """Two cliques joined by one edge."""
    adjacency = np.kron(np.eye(2), np.ones((clique, clique))) - np.eye(2 * clique)
    adjacency[clique - 1, clique] = adjacency[clique, clique - 1] = 1
    return adjacency


def _graphs(count: int, nodes: int, seed: int) -> Iterator[Matrix]:
    """Undirected connected graphs: a barbell, a path, a star, a cycle, and random ones."""
    path = np.diag(np.ones(nodes - 1), 1)
    star = np.zeros((nodes, nodes))
    star[0, 1:] = 1
    cycle = path.copy()
    cycle[0, -1] = 1
    yield _barbell(nodes // 2)
    for upper in (path, star, cycle):
        yield upper + upper.T
    random = np.random.default_rng([seed, nodes])
    for _ in range(count):
        upper = np.triu(random.random((nodes, nodes)) < random.uniform(0.1, 0.7), 1).astype(float)
        order = random.permutation(nodes)
        tree = np.zeros_like(upper)
        for position in range(1, nodes):  # a random tree, so that every node can be reached
            tree[order[position], order[random.integers(position)]] = 1
        yield np.minimum(upper + upper.T + tree + tree.T, 1.0)

"""ProSampler: probabilities against enumeration and simulation, and verdicts that follow the numbers."""

import itertools
import math

import numpy as np
import pytest

from hardneg.theory import prosampler


def test_probabilities_agree_with_enumeration() -> None:
    similar, others, candidates, neighbors = 3, 8, 4, 2
    draws = list(itertools.combinations(range(others), candidates))
    hits = sum(sum(node < similar for node in draw) >= neighbors for draw in draws) / len(draws)
    assert prosampler.exact_similarity_without_replacement(similar, others, candidates, neighbors) == pytest.approx(
        hits
    )
    assert prosampler._by_integers(similar, others, candidates, neighbors) == pytest.approx(hits)
    tuples = list(itertools.product(range(others), repeat=candidates))
    share = sum(sum(node < similar for node in draw) >= neighbors for draw in tuples) / len(tuples)
    assert prosampler.exact_similarity(similar / others, candidates, neighbors) == pytest.approx(share)


def test_the_papers_setting_is_far_below_its_bound() -> None:
    assert prosampler.exact_similarity(0.05, 1000, 100) == pytest.approx(8.41e-11, rel=1e-2)
    assert prosampler.printed_similarity(0.05, 1000, 100) == pytest.approx(1.0, abs=1e-15)
    exact = sum(math.comb(1000, k) * 5**k * 95 ** (1000 - k) for k in range(100, 1001)) / 100**1000
    assert prosampler.exact_similarity(0.05, 1000, 100) == pytest.approx(exact, rel=1e-9)


def test_proposition_1_is_judged_by_the_exact_probability() -> None:
    found = prosampler.proposition_1(seeds=8)
    assert found.verdict == "does not hold as printed"
    assert found.numbers["above_printed"] == 0
    assert abs(found.numbers["deviation"]) < 4.5
    assert found.numbers["hypergeometric"] == pytest.approx(found.numbers["hypergeometric_by_integers"], rel=1e-9)
    assert (
        prosampler.proposition_1(seeds=1, bound=lambda *case: 0.9 * prosampler.exact_similarity(*case)).verdict
        == "holds"
    )


def test_stationary_distribution_agrees_with_iteration_and_simulation() -> None:
    adjacency = prosampler._barbell(3)
    for lazy in (True, False):
        found = prosampler.stationary(adjacency, 0.3, lazy)
        np.testing.assert_allclose(found.sum(1), 1)
        step = adjacency / adjacency.sum(1, keepdims=True)
        step = (np.eye(6) + step) / 2 if lazy else step
        p = np.eye(6)[2]
        for _ in range(200):
            p = 0.3 * np.eye(6)[2] + 0.7 * p @ step
        np.testing.assert_allclose(found[2], p, atol=1e-12)
    random, node, visits = np.random.default_rng(0), 2, np.zeros(6)
    for _ in range(20_000):
        node = 2 if random.random() < 0.3 else int(random.choice(6, p=adjacency[node] / adjacency[node].sum()))
        visits[node] += 1
    np.testing.assert_allclose(visits / visits.sum(), prosampler.stationary(adjacency, 0.3, False)[2], atol=0.015)


def test_conductance_counts_edges() -> None:
    adjacency = prosampler._barbell(4)
    inside = np.arange(8) < 4
    edges = sum(adjacency[i, j] for i in range(4) for j in range(4, 8))
    volume = sum(adjacency[i, j] for i in range(4) for j in range(8))
    assert edges == 1
    assert prosampler.conductance(adjacency, inside) == pytest.approx(1 / volume)


def test_graphs_are_undirected_and_connected() -> None:
    graphs = list(prosampler._graphs(6, 6, 0))
    assert len({graph.tobytes() for graph in graphs}) == len(graphs) == 10
    for graph in graphs:
        assert (graph == graph.T).all()
        assert not graph.diagonal().any()
        assert (np.linalg.matrix_power(np.eye(6) + graph, 6) > 0).all()


def test_proposition_2_is_judged_by_its_bound() -> None:
    small = {"graphs": 3, "nodes": 6, "restarts": (0.2, 0.9)}
    found = prosampler.proposition_2(**small)  # type: ignore[arg-type]
    assert found.verdict == "holds with a correction"
    assert found.numbers["plain, averaged over S by degree: violations"] > 0
    tight = prosampler.proposition_2(**small, bound=lambda a, phi: 0.4 * prosampler.printed_escape(a, phi))  # type: ignore[arg-type]
    assert tight.verdict == "does not hold as printed"
    loose = prosampler.proposition_2(**small, bound=lambda a, phi: 9 * prosampler.printed_escape(a, phi))  # type: ignore[arg-type]
    assert loose.verdict == "holds"


def test_walks_of_the_library_follow_the_exact_law(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"restarts": (0.2, 0.8), "moves": 1500, "batches": 80}
    assert prosampler.locality_of_walks(**arguments).verdict == "holds"  # type: ignore[arg-type]
    actual = prosampler.stationary
    monkeypatch.setattr(prosampler, "stationary", lambda adjacency, restart, lazy: actual(adjacency, restart / 2, lazy))
    assert prosampler.locality_of_walks(**arguments).verdict == "does not hold as printed"  # type: ignore[arg-type]


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="restart must be > 0 and ≤ 1, got 0"):
        prosampler.stationary(prosampler._barbell(3), 0.0, False)
    with pytest.raises(ValueError, match="a node without neighbors"):
        prosampler.stationary(np.zeros((2, 2)), 0.5, False)
    with pytest.raises(ValueError, match="seeds must be"):
        prosampler.proposition_1(seeds=0)

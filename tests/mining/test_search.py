"""Exact search against a sort of all scores, with many equal ones."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hardneg.mining import search
from hardneg.mining.keys import unpacked
from hardneg.mining.search import Hidden, Searcher
from hardneg.mining.vectors import Vectors


def signs(seed: int, rows: int, dim: int = 16) -> Tensor:
    """Unit vectors of entries ± ¼, whose inner products are exact and often equal."""
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(2, (rows, dim), generator=draws).float().sub(0.5).div(2)


def ranked(scores: list[float], left_out: set[int], limit: float) -> list[tuple[float, int]]:
    """The documents at or below a limit, the highest score first, of equal ones the lowest index."""
    kept = [(-score, index) for index, score in enumerate(scores) if index not in left_out and score <= limit]
    return [(-score, index) for score, index in sorted(kept)]


@pytest.mark.parametrize("with_faiss", [True, False])
def test_the_best_are_those_of_a_sort_in_any_tiles(with_faiss: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if with_faiss:
        pytest.importorskip("faiss")
    else:
        monkeypatch.setattr(search, "_faiss", lambda: None)
    reached: Counter[str] = Counter()

    @settings(max_examples=100)
    @given(
        st.integers(0, 10**6),
        st.tuples(st.integers(1, 9), st.integers(1, 60)),
        st.tuples(st.integers(1, 12), st.integers(1, 12)),
        st.integers(1, 12),
        st.booleans(),
    )
    def check(seed: int, shape: tuple[int, int], tile: tuple[int, int], depth: int, below: bool) -> None:
        queries, corpus = signs(seed, shape[0]), signs(seed + 1, shape[1])
        depth = min(depth, shape[1])
        draw = np.random.default_rng(seed)
        pairs = np.argwhere(draw.random(shape) < 0.2) if below else np.empty((0, 2), np.int64)
        limits = torch.from_numpy(draw.choice([-0.25, 0.0, 0.25, 0.5], (shape[0], 2))).float()
        limits = limits.sort(dim=1, descending=True).values
        searcher = Searcher(Vectors("corpus", corpus), *tile, device="cpu")
        if below:
            hidden = Hidden.of(*torch.from_numpy(pairs).unbind(dim=1))
            keys, above = searcher.best_below(queries, depth, hidden, limits)
        else:
            keys, above = searcher.best(queries, depth), None
        found_scores, found = unpacked(keys)
        for row, query in enumerate(queries.tolist()):
            scores = [sum(a * b for a, b in zip(query, document, strict=True)) for document in corpus.tolist()]
            left_out = {int(document) for number, document in pairs if number == row}
            expected = ranked(scores, left_out, float(limits[row, -1]) if below else np.inf)
            wanted = expected[:depth]
            assert found[row, : len(wanted)].tolist() == [index for _, index in wanted]
            assert found_scores[row, : len(wanted)].tolist() == [score for score, _ in wanted]
            assert (found[row, len(wanted) :] == -1).all()
            if above is not None:
                others = [score for index, score in enumerate(scores) if index not in left_out]
                assert above[row].tolist() == [sum(s > limit for s in others) for limit in limits[row].tolist()]
            ties = len(expected) > depth and expected[depth - 1][0] == expected[depth][0]
            reached["ties at the last place" + " below a limit" * below] += ties
            reached["fewer than asked"] += len(wanted) < depth

    check()
    assert min(reached["ties at the last place"], reached["ties at the last place below a limit"]) >= 15
    assert reached["fewer than asked"] >= 15


def test_equal_embeddings_are_searched_in_full_by_index() -> None:
    # All scores are equal, so that every heap may hold the wrong documents.
    corpus = torch.ones(1000, 8)
    keys = Searcher(Vectors("corpus", corpus), 64, 16, "cpu").best(torch.ones(40, 8) / 8**0.5, 10)
    assert unpacked(keys)[1].tolist() == [list(range(10))] * 40

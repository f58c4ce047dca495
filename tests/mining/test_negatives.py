"""`hn.mine` against a loop over all documents in float64, on random inputs with many equal scores."""

import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mining import loop

import hardneg as hn
from hardneg.mining.positives import Lists

Case = tuple[np.ndarray, np.ndarray, list[list[int]]]


def exact_case(seed: int, queries: int = 7, documents: int = 60) -> Case:
    """Rows of 16 signs: their cosines are multiples of 1/8 without rounding errors, and many are equal.

    Some documents are copies of others, some of other length, and some are zero; a query has up to three positives.
    """
    draw = np.random.default_rng(seed)
    corpus = draw.choice([-1.0, 1.0], size=(documents, 16)).astype(np.float32)
    copied = draw.choice(documents, size=documents // 5, replace=False)
    corpus[copied] = corpus[draw.choice(documents, size=len(copied))] * draw.choice([1, 2], size=(len(copied), 1))
    corpus[draw.choice(documents, size=2)] = 0
    rows = draw.choice([-1.0, 1.0], size=(queries, 16)).astype(np.float32)
    positives = [draw.choice(documents, size=draw.integers(1, 4), replace=False).tolist() for _ in range(queries)]
    near = draw.random(queries) < 0.5  # else the positive ranks in the middle of the corpus
    rows[near] = np.sign(corpus[[some[0] for some in positives]][near] + 0.5 * rows[near])
    return rows, corpus, positives


def mine(case: Case, count: int, **options: Any) -> hn.Mined:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of queries with too few
        return hn.mine(*case, num_negatives=count, **options)


def agrees(found: hn.Mined, expected: loop.Expected) -> bool:
    """Raise unless negatives, numbers and reasons are the same; returns whether a candidate was dropped."""
    assert [[i for i in row if i >= 0] for row in found.indices.tolist()] == expected.negatives
    assert found.dropped == expected.dropped
    for query, listed in enumerate(expected.candidates):
        shown = [(document, rule) for document, _, rule in found.dropped_of(query)]
        places = [listed.index(each) for each in shown]
        assert places == sorted(places)
        # Only candidates above the limits may be counted without being listed.
        assert {rule for each in listed if (rule := each[1]) and each not in shown} <= {
            "BelowPositive",
            "max_score",
            "Threshold",
        }
    return bool(expected.dropped)


RULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({"hardening": hn.Uniform()}, {}),
    "relative": ({}, {"relative": 0.95}),
    "margin": ({"hardening": hn.BelowPositive(margin=0.25)}, {"margin": 0.25}),
    "max_score": ({"hardening": hn.Uniform(), "max_score": 0.25}, {"max_score": 0.25}),
    "threshold": ({"hardening": hn.Threshold(cosine=0.125)}, {"threshold": 0.125}),
    "ring": ({"hardening": hn.Ring(0.5, 0.9)}, {"ring": (0.5, 0.9)}),
    "limits that exclude each other": (
        {"hardening": (hn.BelowPositive(margin=0.25), hn.Threshold(cosine=0.5))},
        {"margin": 0.25, "threshold": 0.5},
    ),
    "all": (
        {
            "hardening": (hn.BelowPositive(margin=0.125), hn.Ring(0.3, 0.97), hn.Threshold(cosine=-0.25)),
            "max_score": 0.5,
        },
        {"margin": 0.125, "ring": (0.3, 0.97), "threshold": -0.25, "max_score": 0.5},
    ),
}


@pytest.mark.parametrize("rules", RULES)
def test_negatives_and_reasons_are_those_of_the_loop(rules: str) -> None:
    options, expected_options = RULES[rules]
    reached: Counter[str] = Counter()

    @settings(max_examples=12)
    @given(
        st.integers(0, 10**6),
        st.integers(1, 8),
        st.sampled_from([(0, None), (3, None), (0, 20), (2, 30), (50, None)]),
        st.sampled_from(["2GiB", 60_000]),
    )
    def check(seed: int, count: int, rank_range: tuple[int, int | None], memory: str | int) -> None:
        case = exact_case(seed)
        expected = loop.mined(*case, count, rank_range=rank_range, **expected_options)
        found = mine(case, count, rank_range=rank_range, memory=memory, **options)
        reached["dropped"] += agrees(found, expected)
        reached["short"] += any(len(row) < count for row in expected.negatives)
        reached["kept"] += any(expected.negatives)

    check()
    assert reached["kept"] >= (1 if rules == "limits that exclude each other" else 7)
    assert reached["dropped"] >= 5


@pytest.mark.parametrize("seed", range(5))
def test_a_guide_drops_what_it_scores_above_the_lowest_positive(seed: int) -> None:
    case = exact_case(seed)
    other_queries, other_corpus, _ = exact_case(seed + 100)
    guides = loop.cosines(other_queries, other_corpus)
    expected = loop.mined(*case, 5, relative=0.95, guide=lambda query, document: guides[query][document])
    found = mine(case, 5, guide=(other_queries, other_corpus))
    assert agrees(found, expected)
    assert expected.dropped["guide"] > 0


def test_candidates_above_a_limit_are_counted_once_if_a_guide_refuses_most_of_the_others() -> None:
    queries, corpus, positives = exact_case(0, queries=3, documents=900)
    draw = np.random.default_rng(0)
    scores = np.where(draw.random(900) < 0.01, 0.1, 0.9)  # of the guide, for every query
    scores[np.concatenate(positives)] = 0.5
    guide = np.tile([[1.0, 0.0]], (3, 1)), np.stack([scores, np.sqrt(1 - scores**2)], axis=1)
    expected = loop.mined(queries, corpus, positives, 5, max_score=0.0, guide=lambda _, document: scores[document])
    found = mine((queries, corpus, positives), 5, hardening=hn.Uniform(), max_score=0.0, guide=guide)
    assert min(map(len, expected.negatives)) > 0
    assert expected.dropped["guide"] > 500
    assert [[i for i in row if i >= 0] for row in found.indices.tolist()] == expected.negatives
    assert found.dropped == expected.dropped


def test_positives_may_be_arrays_and_tensors_of_each_query() -> None:
    queries, corpus, positives = exact_case(0)
    expected = mine((queries, corpus, positives), 3)
    for kind in (np.array, torch.tensor):
        assert torch.equal(mine((queries, corpus, [kind(some) for some in positives]), 3).indices, expected.indices)
    single = mine((queries, corpus, [some[:1] for some in positives]), 3)
    assert torch.equal(mine((queries, corpus, [np.array(some[0]) for some in positives]), 3).indices, single.indices)


def test_a_query_with_more_copies_of_its_positive_than_are_ranked_at_first() -> None:
    queries, corpus, _ = exact_case(3, documents=200)
    corpus[:150] = corpus[0]
    case = queries, corpus, [[0]] * 7
    found = mine(case, 4, memory=100_000)
    assert agrees(found, loop.mined(*case, 4, relative=0.95))
    assert found.dropped["duplicate"] == 7 * 149


def test_scores_are_cosines_of_unnormalized_embeddings_in_any_precision() -> None:
    draw = np.random.default_rng(0)
    queries, corpus = draw.standard_normal((5, 12)) * 1e200, draw.standard_normal((40, 12)) * 1e-20
    expected = np.array(loop.cosines(queries / 1e200, corpus / 1e-20))
    found = hn.mine(queries, corpus, [[0]] * 5, num_negatives=6, hardening=hn.Uniform())
    for row, scores in enumerate(found.scores):
        np.testing.assert_allclose(scores, np.sort(np.delete(expected[row], 0))[::-1][:6], atol=2e-7)
    halves = torch.from_numpy(queries / 1e200).bfloat16(), torch.from_numpy(corpus / 1e-20).half()
    assert hn.mine(*halves, [[0]] * 5, num_negatives=6, hardening=hn.Uniform()).scores.dtype == torch.float32


def test_equal_scores_are_ranked_by_index_without_faiss_too(monkeypatch: pytest.MonkeyPatch) -> None:
    case = exact_case(5)
    with_faiss = mine(case, 8, memory=60_000)
    monkeypatch.setattr("hardneg.mining.search._faiss", lambda: None)
    without = mine(case, 8, memory=60_000)
    assert torch.equal(with_faiss.indices, without.indices)
    assert torch.equal(with_faiss.scores, without.scores)


def test_a_draw_follows_the_weights_of_the_tilt_among_the_kept() -> None:
    corpus = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    queries = torch.tensor([[1.0, 0.0]]).expand(20_000, 2)
    options = {"num_negatives": 1, "sample": True, "hardening": (hn.Exponential(2.0), hn.BelowPositive(margin=0.25))}
    found = hn.mine(queries, corpus, torch.zeros(20_000, dtype=torch.long), **options)
    share = found.indices[:, 0].bincount(minlength=5) / 20_000
    weights = torch.tensor([0.0, 0.0, *(np.exp(2 * score) for score in (0.6, 0.0, -1.0))])
    torch.testing.assert_close(share, (weights / weights.sum()).float(), atol=0.015, rtol=0)
    again = hn.mine(queries, corpus, torch.zeros(20_000, dtype=torch.long), memory="1MiB", **options)
    other = hn.mine(queries, corpus, torch.zeros(20_000, dtype=torch.long), seed=1, **options)
    assert torch.equal(found.indices, again.indices)
    assert not torch.equal(found.indices, other.indices)


def test_a_draw_stays_inside_the_ring_and_has_no_repetitions() -> None:
    case = exact_case(11, documents=100)
    found = mine(case, 6, hardening=hn.Ring(0.7, 0.9), rank_range=(5, 85), sample=True)
    inside = loop.mined(*case, 1000, ring=(0.7, 0.9), rank_range=(5, 85)).negatives
    for row, allowed in zip(found.indices.tolist(), inside, strict=True):
        assert len(set(row)) == 6
        assert set(row) <= set(allowed)


def test_custom_weights_of_zero_drop_candidates_of_a_draw() -> None:
    case = exact_case(12)
    found = mine(case, 50, hardening=hn.Custom(lambda score: (score > 0.2).float()), sample=True)
    for row, scores in zip(found.indices, loop.cosines(*case[:2]), strict=True):
        assert all(scores[index] > 0.2 for index in row[row >= 0].tolist())
    assert found.dropped["Custom"] > 0


def test_too_few_negatives_are_said() -> None:
    case = exact_case(1)
    with pytest.warns(UserWarning, match="7 of 7 queries have fewer than 30 negatives"):
        found = hn.mine(*case, num_negatives=30, hardening=hn.Threshold(cosine=0.5))
    assert len(found.short) == 7
    assert (found.indices[:, -1] == -1).all()
    assert (found.scores[:, -1] == -torch.inf).all()


EYE = np.eye(4, dtype=np.float32)
NAN = np.array([[1.0, 0.0, 0.0, 0.0], [0.0, np.nan, 0.0, 0.0]], np.float32)
MISTAKES: list[tuple[dict[str, Any], str]] = [
    (
        {"corpus": EYE[:1], "positives": [0, 0]},
        "num_negatives=1, but the corpus has 0 documents that are not positives",
    ),
    ({"num_negatives": 4}, "num_negatives=4, but the corpus has 3 documents"),
    ({"positives": [0, -1]}, "query 1 has no positives, with which BelowPositive compares"),
    ({"positives": [0, 4]}, "positives of query 1 must be indices from 0 to 3, or −1 for none, got 4"),
    ({"positives": [0]}, "positives has 1 rows, but there are 2 queries"),
    ({"positives": ["a", "b"]}, "positives of query 0 is a text, but the corpus is not"),
    ({"positives": np.array([0.0, 1.0])}, "positives must be integers"),
    ({"positives": 3}, "positives must be indices"),
    ({"positives": [0, None]}, "positives of query 1 must be indices from 0 to 3, or −1 for none, got None"),
    ({"positives": [0.0, 1.0]}, "positives of query 0 must be indices from 0 to 3, or −1 for none, got 0.0"),
    ({"corpus": NAN, "positives": [0, 1]}, "corpus holds NaN or inf"),
    ({"queries": NAN, "positives": [0, 1]}, "queries holds NaN or inf in row 1"),
    ({"corpus": np.eye(4)[:, :3]}, "queries have d = 4, but the corpus 3"),
    ({"corpus": np.eye(4, dtype=int)}, "corpus must hold floating-point numbers, got int64"),
    ({"corpus": np.zeros(4)}, r"corpus must have shape \(N, d\)"),
    ({"corpus": []}, "corpus is empty"),
    ({"queries": ["a", "b"], "corpus": [], "model": len}, "corpus is empty"),
    ({"corpus": "no.npy"}, "corpus='no.npy' does not exist"),
    ({"num_negatives": 0}, "num_negatives must be a whole number ≥ 1"),
    ({"rank_range": (2, 2)}, "holds 0 candidates, fewer than num_negatives=1"),
    ({"rank_range": 3}, "rank_range must be"),
    ({"hardening": hn.Exponential(1.0)}, "sample=False keeps the best: pass sample=True"),
    ({"hardening": hn.Ring(hn.Linear(0.1, 0.5), 0.9)}, "has a schedule"),
    ({"hardening": hn.Guided(margin=0.1)}, "is for losses: give hn.mine guide="),
    ({"seed": 1 << 63, "sample": True}, "seed must be below 2⁶³"),
    ({"hardening": {"batch": hn.Uniform()}}, "hardening by source is for losses"),
    ({"hardening": 0.95}, "hardening must be a Hardening"),
    ({"hardening": (hn.Exponential(1.0), hn.Exponential(2.0)), "sample": True}, "at most one tilt"),
    ({"max_score": 2}, "max_score must be"),
    ({"memory": "2 gigs"}, "memory='2 gigs' is not a size"),
    ({"memory": 100}, "memory=100 is too little"),
    ({"engine": "rai"}, "did you mean 'ray'"),
    ({"model": len}, "model= is for texts"),
    ({"guide": len}, "guide scores pairs of texts"),
    ({"guide": (EYE, EYE)}, r"guide must have shapes \(2, d\) and \(4, d\)"),
    ({"queries": ["a", "b"]}, "queries are texts, but the corpus embeddings"),
    ({"queries": ["a", "b"], "corpus": ["c", "d"]}, "pass model="),
]


@pytest.mark.parametrize(("change", "message"), MISTAKES, ids=[message[:40] for _, message in MISTAKES])
def test_a_mistake_is_named_in_one_line(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"queries": EYE[:2], "corpus": EYE, "positives": [0, 1], "num_negatives": 1, **change}
    with pytest.raises(ValueError, match=message) as raised:
        hn.mine(**arguments)
    assert "\n" not in str(raised.value)


def test_positives_may_be_padded_lists_or_repeated() -> None:
    for positives in (torch.tensor([[0, -1], [1, 2]]), [[0], [1, 2]], np.array([[0, 0], [2, 1]]), [[0, -1], (1, 2, 1)]):
        found = hn.mine(EYE[:2], EYE, positives, num_negatives=1, hardening=hn.Uniform())
        assert found.indices.tolist() == [[1], [0]]
        assert found.positives.sizes.tolist() == [1, 2]


def test_a_copy_up_to_rounding_is_a_duplicate_and_a_near_text_is_not() -> None:
    draw = np.random.default_rng(4)
    corpus = draw.standard_normal((300, 64)).astype(np.float32)
    corpus[200] = 3 * corpus[7] * (1 + 3e-7 * draw.standard_normal(64))
    corpus[201] = corpus[7] * (1 + 1e-3 * draw.standard_normal(64))
    found = hn.mine(corpus[7:8], corpus, [7], num_negatives=1, hardening=hn.Uniform())
    assert found.dropped == {"duplicate": 1}
    assert found.indices.tolist() == [[201]]


def test_lists_keep_the_order_of_their_pairs() -> None:
    lists = Lists.of(np.array([2, 0, 2, 2]), np.array([9, 4, 1, 9]), 3)
    assert (lists.offsets.tolist(), lists.items.tolist()) == ([0, 1, 1, 3], [4, 9, 1])
    assert lists.part(1, 3).items.tolist() == [9, 1]

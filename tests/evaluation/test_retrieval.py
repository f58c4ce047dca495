"""Retrieval: a plain loop over ranked lists, and scikit-learn's nDCG."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hardneg.evaluation import evaluate_texts, get_metric
from hardneg.evaluation.metrics import columns
from hardneg.evaluation.retrieval import retrieval_scores


def loop(queries: Tensor, corpus: Tensor, grades: dict[tuple[int, int], int], k: int) -> tuple[float, float, float]:
    """nDCG, recall and MRR from ranked lists, one query at a time."""
    found = []
    for query in sorted({query for (query, _), grade in grades.items() if grade > 0}):
        cosines = torch.cosine_similarity(queries[query].double()[None], corpus.double()).tolist()
        ranked = sorted(range(len(corpus)), key=lambda text: -cosines[text])[:k]
        gains = [grades.get((query, text), 0) for text in ranked]
        ideal = sorted((grade for (asked, _), grade in grades.items() if asked == query), reverse=True)[:k]
        dcg, best = (sum(gain / math.log2(2 + rank) for rank, gain in enumerate(each)) for each in (gains, ideal))
        relevant = sum(grade > 0 for (asked, _), grade in grades.items() if asked == query)
        first = next((1 / (rank + 1) for rank, gain in enumerate(gains) if gain > 0), 0.0)
        found.append((dcg / best, sum(gain > 0 for gain in gains) / relevant, first))
    return tuple(sum(column) / len(found) for column in zip(*found, strict=True))  # type: ignore[return-value]


@given(seed=st.integers(0, 10_000), k=st.integers(1, 12))
def test_scores_equal_a_loop_over_ranked_lists(seed: int, k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    queries, corpus = torch.randn(5, 4, generator=generator), torch.randn(9, 4, generator=generator)
    table = torch.randint(-2, 4, (5, 9), generator=generator).clamp(min=0)
    table[0, 0] = 2
    grades = {(query, text): int(table[query, text]) for query in range(5) for text in range(9)}
    judgements = torch.tensor([[query, text, grade] for (query, text), grade in grades.items()])
    found = retrieval_scores(queries, corpus, judgements, k)
    assert found == pytest.approx(loop(queries, corpus, grades, k), abs=1e-12)


def test_ndcg_agrees_with_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    queries, corpus = torch.randn(6, 4), torch.randn(20, 4)
    table = torch.randint(0, 4, (6, 20))
    judgements = torch.tensor([[query, text, int(table[query, text])] for query in range(6) for text in range(20)])
    cosines = torch.cosine_similarity(queries[:, None].double(), corpus.double(), dim=2)
    wanted = metrics.ndcg_score(table.numpy(), cosines.numpy(), k=10)
    assert retrieval_scores(queries, corpus, judgements).ndcg == pytest.approx(wanted, abs=1e-9)


def test_metrics_of_every_k_are_in_the_registry() -> None:
    texts = {"q": [1.0, 0.0], "good": [0.9, 0.1], "bad": [0.0, 1.0]}

    def encode(given):  # type: ignore[no-untyped-def]
        return torch.tensor([texts[text] for text in given])

    triple = ["q"], ["bad", "good"], [[0, 0, 1]]
    found = evaluate_texts(encode, ["ndcg_10", "recall_1", "recall_2", "mrr_5"], retrieval=triple)
    assert found == {"ndcg_10": pytest.approx(1 / math.log2(3)), "recall_1": 0.0, "recall_2": 1.0, "mrr_5": 0.5}
    assert found.format("recall_2").title == get_metric("recall_2").title == "recall@2"
    assert [*columns({"a": {"recall_20": [0.1], "recall_3": [0.1], "knn": [0.1]}})] == ["knn", "recall_3", "recall_20"]


@pytest.mark.parametrize(
    ("judgements", "message"),
    [
        ([[0, 9, 1]], "out of range"),
        ([[3, 0, 1]], "out of range"),
        ([[0, 0, -1]], "≥ 0"),
        ([[0, 0, 0]], "no relevant text"),
        ([[0, 0, 1], [0, 0, 2]], "twice"),
        ([[0, 0]], "judgements"),
    ],
)
def test_bad_judgements_are_refused(judgements: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        retrieval_scores(torch.eye(3), torch.eye(3), judgements)


def test_an_empty_corpus_is_refused() -> None:
    with pytest.raises(ValueError, match=r"corpus must have shape \(N, d\) with N ≥ 1, got \(0,\)"):
        retrieval_scores(torch.eye(3), torch.empty(0), [[0, 0, 1]])

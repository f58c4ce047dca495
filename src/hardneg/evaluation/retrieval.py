"""Retrieval: how well the nearest texts of a corpus answer queries, by relevance judgements."""

from typing import NamedTuple

import torch
from torch import Tensor

from hardneg import checks
from hardneg.checks import TensorLike
from hardneg.losses.inputs import normalized
from hardneg.matmul import row_blocks


class RetrievalScores(NamedTuple):
    """Means over the queries that have a relevant text, each in [0, 1]."""

    ndcg: float
    recall: float
    mrr: float


def retrieval_scores(queries: TensorLike, corpus: TensorLike, judgements: TensorLike, k: int = 10) -> RetrievalScores:
    """nDCG@k, recall@k and MRR@k of the k texts with the highest cosine.

    queries: (Q, d) · corpus: (N, d) · judgements: (J, 3) integers: row of the query, row of the text, and its
    relevance, 0 for none; texts that are not judged are not relevant. The gain of a text is its relevance, discounted
    by log₂(1 + rank), as in trec_eval.

    Examples:
        >>> retrieval_scores(torch.eye(2), torch.eye(2), [[0, 0, 1], [1, 0, 1]], k=2)
        RetrievalScores(ndcg=0.815..., recall=1.0, mrr=0.75)
    """
    asked, texts = checks.as_tensor("queries", queries), checks.as_tensor("corpus", corpus)
    for name, tensor in (("queries", asked), ("corpus", texts)):
        if tensor.dim() != 2 or len(tensor) == 0:
            raise ValueError(f"{name} must have shape (N, d) with N ≥ 1, got {tuple(tensor.shape)}")
        checks.require_finite(name, checks.floating(name, tensor))
    asked, texts = normalized(asked.double()), normalized(texts.double().to(asked.device))
    if asked.shape[1] != texts.shape[1]:
        raise ValueError(f"corpus must have d = {asked.shape[1]} as queries, got {texts.shape[1]}: use one encoder")
    k = min(checks.whole("k", k), len(texts))
    relevance = _relevance(checks.as_tensor("judgements", judgements), len(asked), len(texts)).to(asked.device)
    rows = torch.unique(relevance.indices()[0])  # queries with a relevant text
    discount = 1 / torch.arange(2, k + 2, device=asked.device).double().log2()  # (k,)
    sums = torch.zeros(3, dtype=torch.float64, device=asked.device)
    for block in row_blocks(len(rows), len(texts)):
        part = rows[block]
        grades = relevance.index_select(0, part).to_dense()  # (R, N)
        nearest = (asked[part] @ texts.T).topk(k, dim=1).indices  # (R, k)
        gains = grades.gather(1, nearest)
        best = grades.topk(k, dim=1).values
        hits = gains > 0
        first = hits.double().argmax(dim=1).double() + 1
        sums += torch.stack(
            [
                ((gains * discount).sum(1) / (best * discount).sum(1)).sum(),
                (hits.sum(1).double() / (grades > 0).sum(1)).sum(),
                torch.where(hits.any(1), 1 / first, 0.0).sum(),
            ]
        )
    return RetrievalScores(*(sums / len(rows)).tolist())


def _relevance(judgements: Tensor, queries: int, texts: int) -> Tensor:
    """The relevance of each text for each query as a sparse matrix (Q, N)."""
    judgements = checks.integers("judgements", judgements, (len(judgements), 3), "query, text, relevance")
    checks.require_in_range("judgements[:, 0]", judgements[:, 0], queries)
    checks.require_in_range("judgements[:, 1]", judgements[:, 1], texts)
    checks.require(judgements[:, 2] >= 0, "judgements[:, 2] must be ≥ 0, where 0 is not relevant")
    relevant = judgements[judgements[:, 2] > 0]
    if len(relevant) == 0:
        raise ValueError("judgements name no relevant text: give at least one with a relevance above 0")
    if len(torch.unique(relevant[:, :2], dim=0)) < len(relevant):
        raise ValueError("judgements name a pair of query and text twice: give each pair once")
    return torch.sparse_coo_tensor(
        relevant[:, :2].T, relevant[:, 2].double(), (queries, texts), check_invariants=True
    ).coalesce()

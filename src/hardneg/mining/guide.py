"""The filter by a guide: candidates that another model scores above the query's lowest positive are dropped."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hardneg.mining.positives import Lists
from hardneg.mining.vectors import Vectors, open_vectors

_PAIRS = 4096  # that are scored in one call


class Guide(Protocol):
    """Scores pairs of a query and a document."""

    def scores(self, queries: Tensor, documents: Tensor) -> Tensor:
        """Scores (P,) of queries and documents by number, (P,) each."""


class EmbeddingGuide:
    """Cosines of the embeddings of another model."""

    def __init__(self, queries: Vectors, corpus: Vectors) -> None:
        self.queries, self.corpus = queries, corpus

    def scores(self, queries: Tensor, documents: Tensor) -> Tensor:
        parts = [
            (self.queries.take_unit(some.numpy()) * self.corpus.take_unit(others.numpy())).sum(dim=1)
            for some, others in zip(torch.split(queries, _PAIRS), torch.split(documents, _PAIRS), strict=True)
        ]
        return torch.cat(parts)


class PairGuide:
    """A function of pairs of texts, such as the ``predict`` of a cross-encoder."""

    def __init__(self, function: Callable[[list[tuple[str, str]]], Any], queries: Sequence[str], corpus: Sequence[str]):
        self.function, self.queries, self.corpus = function, queries, corpus

    def scores(self, queries: Tensor, documents: Tensor) -> Tensor:
        found = []
        for some, others in zip(torch.split(queries, _PAIRS), torch.split(documents, _PAIRS), strict=True):
            pairs = [(self.queries[a], self.corpus[b]) for a, b in zip(some.tolist(), others.tolist(), strict=True)]
            scores = torch.as_tensor(np.asarray(self.function(pairs), np.float32))
            if scores.shape != (len(pairs),) or not bool(scores.isfinite().all()):
                raise ValueError(
                    f"guide must return a finite score for each of {len(pairs)} pairs, got shape {tuple(scores.shape)}"
                )
            found.append(scores)
        return torch.cat(found)


def checked_guide(
    given: object, texts: tuple[Sequence[str], Sequence[str]] | None, queries: int, documents: int
) -> Guide | None:
    """A guide from embeddings (queries, corpus) of another model, a cross-encoder, or a function of pairs of texts."""
    if given is None:
        return None
    if isinstance(given, tuple):
        if len(given) != 2:
            raise ValueError(f"guide as embeddings must be (queries, corpus), got {len(given)} parts")
        parts = [open_vectors(name, part) for name, part in zip(("guide[0]", "guide[1]"), given, strict=True)]
        if (len(parts[0]), len(parts[1])) != (queries, documents) or parts[0].shape[1] != parts[1].shape[1]:
            raise ValueError(
                f"guide must have shapes ({queries}, d) and ({documents}, d), got {parts[0].shape} and {parts[1].shape}"
            )
        return EmbeddingGuide(*parts)
    function = getattr(given, "predict", given)
    if not callable(function):
        raise ValueError(f"guide must be a function of pairs, a cross-encoder or (queries, corpus), got {given!r}")
    if texts is None:
        raise ValueError("guide scores pairs of texts, but queries and corpus are embeddings: give its own embeddings")
    return PairGuide(function, *texts)


def lowest_scores(guide: Guide, positives: Lists, first: int) -> Tensor:
    """The guide's score of the lowest positive of each query. first: number of the first query"""
    queries = torch.from_numpy(positives.queries())
    scores = guide.scores(queries + first, torch.from_numpy(positives.items))
    return lowest(positives, scores)


def lowest(positives: Lists, scores: Tensor) -> Tensor:
    """The lowest score of each query's positives; inf without any. scores: (P,) of all positives"""
    found = torch.full((len(positives),), torch.inf)
    return found.scatter_reduce(0, torch.from_numpy(positives.queries()), scores, "amin")

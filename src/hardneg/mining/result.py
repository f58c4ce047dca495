"""The result of mining: negatives, their scores, and what was dropped by which rule."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardneg import checks
from hardneg.mining.files import replaced
from hardneg.mining.formats import FORMATS, check_place, write_rows
from hardneg.mining.positives import Lists
from hardneg.mining.selection import Dropped

Scored = list[tuple[int, float]]  # documents with their scores


@dataclass(frozen=True)
class Mined:
    """Hard negatives of each query.

    Args:
        indices: (Q, k) documents, best-ranked first, −1 where too few are left.
        scores: (Q, k) their cosines, −inf where there is none.
        dropped: number of dropped candidates by rule.
        positives: documents that are the positives of each query.
        positive_scores: (P,) cosines of these, in their order.
        rules: names of the rules, to which ``dropped_candidates.rule`` refers.
        dropped_candidates: up to 100 candidates of each query that were ranked and dropped, best first.
        texts: of the queries and of the corpus; None if embeddings were given.
        recall: the share of the best documents that an approximate index found; None for the exact search.
    """

    indices: Tensor
    scores: Tensor
    dropped: dict[str, int]
    positives: Lists = field(repr=False)
    positive_scores: Tensor = field(repr=False)
    rules: tuple[str, ...] = field(repr=False)
    dropped_candidates: Dropped = field(repr=False)
    texts: tuple[Sequence[str], Sequence[str]] | None = field(default=None, repr=False)
    recall: float | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def short(self) -> Tensor:
        """The queries (S,) with fewer negatives than asked for."""
        return (self.indices[:, -1] < 0).nonzero()[:, 0]

    def query(self, number: int) -> str | int:
        """The text of a query, or its number if there are no texts."""
        return number if self.texts is None else self.texts[0][number]

    def document(self, index: int) -> str | int:
        """The text of a document, or its index if there are no texts."""
        return index if self.texts is None else self.texts[1][index]

    def queries_with_scores(self) -> Iterator[tuple[int, Scored, Scored]]:
        """The number of each query, its positives and its negatives, with their scores."""
        for query in range(len(self)):
            some = slice(self.positives.offsets[query], self.positives.offsets[query + 1])
            items, scores = self.positives.items[some].tolist(), self.positive_scores[some].tolist()
            kept = self.indices[query] >= 0
            negatives = zip(self.indices[query][kept].tolist(), self.scores[query][kept].tolist(), strict=True)
            yield query, list(zip(items, scores, strict=True)), list(negatives)

    def dropped_of(self, query: int) -> list[tuple[int, float, str]]:
        """The dropped candidates of one query, best first: index, cosine and the rule that dropped it."""
        listed = self.dropped_candidates
        start, stop = torch.searchsorted(listed.query, torch.tensor([query, query + 1])).tolist()
        rows = zip(listed.document[start:stop], listed.score[start:stop], listed.rule[start:stop], strict=True)
        return [(int(document), float(score), self.rules[int(rule)]) for document, score, rule in rows]

    def rows(self, format: str = "triplet", scores: bool = False) -> Iterator[dict[str, Any]]:
        """Rows of a training set, as `save` writes them; ``datasets.Dataset.from_list(list(...))`` takes them.

        format: "triplet", "n-tuple", "labeled-pair" or "labeled-list", the formats of sentence-transformers · scores:
        add the cosines, in the last two formats instead of the labels
        """
        checks.choice("format", format, [*FORMATS])
        return FORMATS[format](self, checks.boolean("scores", scores))

    def save(self, path: str | Path, format: str = "triplet", scores: bool = False) -> int:
        """Write `rows` to a .jsonl, .parquet or .csv file, which appears when it is complete; returns their number."""
        return write_rows(self.rows(format, scores), Path(path))

    def save_dropped(self, path: str | Path) -> int:
        """Write the dropped candidates of each query with score and rule, as `save` does; returns their number."""
        rows = (
            {"anchor": self.query(query), "document": self.document(document), "score": score, "rule": rule}
            for query in range(len(self))
            for document, score, rule in self.dropped_of(query)
        )
        return write_rows(rows, Path(path))

    def write_page(self, path: str | Path, queries: int = 50) -> Path:
        """Write an HTML page: numbers, histograms, some queries with negatives and dropped candidates, and hubs.

        queries: how many are shown, spread evenly over all
        """
        from hardneg.mining.page import html  # imports what draws the charts

        check_place(Path(path))
        with replaced(Path(path)) as file:
            file.write(html(self, checks.whole("queries", queries)).encode(errors="backslashreplace"))
        return Path(path)

    def hubs(self, count: int = 10) -> list[tuple[int, int]]:
        """The documents that are a negative of most queries, with the number of these queries."""
        documents, numbers = np.unique(self.indices[self.indices >= 0].numpy(), return_counts=True)
        order = np.argsort(-numbers, kind="stable")[:count]
        return list(zip(documents[order].tolist(), numbers[order].tolist(), strict=True))

    def summary(self) -> dict[str, Any]:
        """Numbers of queries, negatives and dropped candidates, quartiles of the cosines, and recall of an index."""
        found = self.scores[self.indices >= 0]
        recall = {} if self.recall is None else {"recall": self.recall}
        return recall | {
            "queries": len(self),
            "negatives": len(found),
            "queries_with_too_few": len(self.short),
            "dropped": self.dropped,
            "positive_cosines": _quartiles(self.positive_scores),
            "negative_cosines": _quartiles(found),
        }


def _quartiles(scores: Tensor) -> dict[str, float]:
    """Minimum, quartiles and maximum; empty without scores."""
    if not len(scores):
        return {}
    names = ("min", "25 %", "median", "75 %", "max")
    return dict(zip(names, np.quantile(scores.numpy(), [0, 0.25, 0.5, 0.75, 1]).tolist(), strict=True))

"""Mining written as a loop over all documents in float64: the definition that the search is compared with."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Expected:
    """Negatives of each query, number of dropped candidates by rule, and the dropped candidates of each query."""

    negatives: list[list[int]]
    dropped: dict[str, int]
    candidates: list[list[tuple[int, str]]]


def cosines(queries: np.ndarray, corpus: np.ndarray) -> list[list[float]]:
    """Cosines by plain sums; 0 for a zero vector."""
    found = []
    for query in queries.astype(np.float64):
        row = []
        for document in corpus.astype(np.float64):
            lengths = math.sqrt(math.fsum(query**2)) * math.sqrt(math.fsum(document**2))
            row.append(math.fsum(query * document) / lengths if lengths else 0.0)
        found.append(row)
    return found


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two rows have the same direction."""
    lengths = np.linalg.norm(one) * np.linalg.norm(other)
    return bool(one @ other >= lengths * (1 - 1e-12)) if lengths else bool(not one.any() and not other.any())


def mined(
    queries: np.ndarray,
    corpus: np.ndarray,
    positives: list[list[int]],
    count: int,
    *,
    margin: float | None = None,
    relative: float | None = None,
    ring: tuple[float, float] | None = None,
    threshold: float | None = None,
    rank_range: tuple[int, int | None] = (0, None),
    max_score: float | None = None,
    guide: Any = None,
) -> Expected:
    """The best-ranked documents that the rules keep, one candidate after another."""
    expected = Expected([], {}, [])

    def drop(listed: list[tuple[int, str]], document: int, rule: str) -> None:
        expected.dropped[rule] = expected.dropped.get(rule, 0) + 1
        listed.append((document, rule))

    for query, scores in enumerate(cosines(queries, corpus)):
        copies = {d for d in range(len(corpus)) for p in positives[query] if same(corpus[d], corpus[p])}
        copies -= set(positives[query])
        if copies:
            expected.dropped["duplicate"] = expected.dropped.get("duplicate", 0) + len(copies)
        rest = [d for d in range(len(corpus)) if d not in copies and d not in positives[query]]
        ranked = sorted(rest, key=lambda d: (-scores[d], d))
        start, stop = rank_range[0], len(ranked) if rank_range[1] is None else min(rank_range[1], len(ranked))
        begin, end = start, stop
        if ring is not None and stop > start:
            number = stop - start
            low = math.floor(ring[0] * number + 1e-9)
            high = max(math.floor(ring[1] * number + 1e-9), low + 1)
            begin, end = start + number - high, start + number - low
        lowest = min((scores[p] for p in positives[query]), default=math.inf)
        kept: list[int] = []
        listed: list[tuple[int, str]] = []
        for rank, document in enumerate(ranked[: max(end, 0)] if stop > start else ranked):
            score = scores[document]
            if rank < start:
                drop(listed, document, "rank_range")
            elif rank < begin:
                drop(listed, document, "Ring")
            elif (margin is not None and score > lowest - margin) or (
                relative is not None and score > lowest - (1 - relative) * abs(lowest)
            ):
                drop(listed, document, "BelowPositive")
            elif max_score is not None and score > max_score:
                drop(listed, document, "max_score")
            elif threshold is not None and score < threshold:
                drop(listed, document, "Threshold")
            elif guide is not None and guide(query, document) > min(guide(query, p) for p in positives[query]):
                drop(listed, document, "guide")
            else:
                kept.append(document)
            if len(kept) == count:
                break
        expected.negatives.append(kept)
        expected.candidates.append(listed)
    return expected

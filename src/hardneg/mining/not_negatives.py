"""Documents that the user says are no negatives of a query: from a file, or as pairs."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hardneg import checks
from hardneg.matmul import row_blocks
from hardneg.mining.positives import Ints, Lists
from hardneg.mining.texts import is_texts, places
from hardneg.mining.vectors import open_vectors
from hardneg.not_negatives import checked, read_pairs, shown, whole_number

NONE: Ints = np.empty((2, 0), np.int64)


def checked_pairs(given: Any, queries: Any, corpus: Any) -> Ints:
    """The pairs (2, P) of a query and a document that are no negatives; of a set with itself, in both directions.

    given: a file, (P, 2) integers, or a sequence of pairs; numbers are rows, texts are those of the query and the
    document, with all their copies · queries, corpus: as for `hardneg.mine`
    """
    if given is None:
        return NONE
    find_query, find_document = _finder("query", "queries", queries), _finder("document", "corpus", corpus)
    one_set = is_one_set(queries, corpus)
    found: tuple[list[int], list[int]] = [], []
    for place, (a, b) in _entries(given):
        try:
            if one_set and checked(a) == checked(b):
                raise ValueError(f"a and b are the same, {shown(a)}: a pair needs two")
            for query, document in ((a, b), (b, a)) if one_set else ((a, b),):
                for row in find_query(query):
                    some = find_document(document)
                    found[0].extend([row] * len(some))
                    found[1].extend(some)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
    return np.array(found, np.int64)


def left_out(pairs: Ints, positives: Lists, duplicates: Lists, documents: int) -> Lists:
    """The documents of each query that pairs (2, P) leave out, besides its positives and duplicates of these."""
    size = np.int64(documents)
    known = [lists.queries() * size + lists.items for lists in (positives, duplicates)]
    new = ~np.isin(pairs[0] * size + pairs[1], np.concatenate(known))
    return Lists.of(pairs[0][new], pairs[1][new], len(positives))


def is_one_set(queries: Any, corpus: Any) -> bool:
    """Whether queries and corpus are the same set: one object, one file, or equal texts or embeddings."""
    if queries is corpus:
        return True
    if isinstance(queries, str | Path) and isinstance(corpus, str | Path):
        return Path(queries).resolve() == Path(corpus).resolve()
    if is_texts(queries) and is_texts(corpus):
        return len(queries) == len(corpus) and all(one == other for one, other in zip(queries, corpus, strict=True))
    if all(isinstance(some, Tensor | np.ndarray) for some in (queries, corpus)) and queries.shape == corpus.shape:
        one, other = open_vectors("queries", queries), open_vectors("corpus", corpus)
        blocks = row_blocks(*one.shape)  # of arrays that need not fit in memory
        return all(bool((one.read(b.start, b.stop).cpu() == other.read(b.start, b.stop).cpu()).all()) for b in blocks)
    return False


def _entries(given: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Where each pair is, and its two values."""
    if isinstance(given, str | Path):
        path = Path(given).expanduser()
        for place, values in read_pairs(path):
            yield f"{path}, {place}", values
        return
    rows = given
    if isinstance(given, Tensor | np.ndarray):
        count = len(given) if given.ndim else 0
        rows = checks.integers(
            "not_negatives", checks.as_tensor("not_negatives", given), (count, 2), "a query and a document"
        ).tolist()
    if not isinstance(rows, Sequence):
        raise ValueError(f"not_negatives must be a file or pairs (query, document), got {type(given).__name__}")
    for number, row in enumerate(rows):
        if isinstance(row, str) or not isinstance(row, Sequence) or len(row) != 2:
            raise ValueError(f"not_negatives[{number}] must be a pair (query, document), got {shown(row)}")
        yield f"not_negatives[{number}]", (row[0], row[1])


def _finder(kind: str, name: str, some: Any) -> Callable[[Any], list[int]]:
    """The function from a value to the rows of the queries or of the corpus that it names."""
    by_text = places(some) if is_texts(some) else None
    count = len(some) if is_texts(some) else len(open_vectors(name, some))

    def find(value: Any) -> list[int]:
        if by_text is not None and isinstance(value, str):
            if value not in by_text:
                raise ValueError(f"{shown(value)} is not the text of a {kind}: copy it exactly, or give its row number")
            return by_text[value]
        row = whole_number(value, "embeddings have no texts")
        if row >= count:
            raise ValueError(f"there is no {kind} {row}: they are numbered from 0 to {count - 1}")
        return [row]

    return find

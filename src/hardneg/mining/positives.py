"""The positives of each query, and the documents that are the same as one of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardneg import checks
from hardneg.matmul import row_blocks
from hardneg.mining.vectors import Vectors
from hardneg.randomness import generator

Ints = NDArray[np.int64]
_ANGLE = 1e-5  # radians; vectors that are closer are the same: encoders round float32 to about 1e-6


@dataclass(frozen=True)
class Lists:
    """A list of documents for each query: those of query i are ``items[offsets[i]:offsets[i + 1]]``."""

    offsets: Ints
    items: Ints

    @staticmethod
    def of(queries: Ints, items: Ints, count: int) -> "Lists":
        """The lists of ``count`` queries from pairs, without repetitions, in the order of the pairs."""
        first = np.unique(np.stack([queries, items]), axis=1, return_index=True)[1]
        first.sort()
        order = first[np.argsort(queries[first], kind="stable")]
        sizes = np.bincount(queries[order], minlength=count)
        return Lists(np.concatenate([[0], sizes.cumsum()]), items[order])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def queries(self) -> Ints:
        """The query of each item."""
        return np.repeat(np.arange(len(self)), self.sizes)

    @property
    def sizes(self) -> Ints:
        """The length of each list."""
        return np.diff(self.offsets)

    def part(self, start: int, stop: int) -> "Lists":
        """The lists of the queries from ``start`` up to ``stop``."""
        offsets = self.offsets[start : stop + 1]
        return Lists(offsets - offsets[0], self.items[offsets[0] : offsets[-1]])


def checked_positives(given: object, queries: int, documents: int, texts: Mapping[str, list[int]] | None) -> Lists:
    """The positives of each query. texts: the documents with each text, if the corpus consists of texts."""
    if isinstance(given, Tensor | np.ndarray):
        matrix = checks.as_tensor("positives", given).cpu()
        rows: Sequence[object] = (matrix[:, None] if matrix.dim() == 1 else matrix).tolist()
        if matrix.is_floating_point() or matrix.dtype == torch.bool or matrix.dim() > 2:
            raise ValueError(
                f"positives must be integers of shape (Q,) or (Q, P), got {matrix.dtype} {tuple(matrix.shape)}"
            )
    elif isinstance(given, Sequence) and not isinstance(given, str):
        rows = given
    else:
        raise ValueError(
            f"positives must be indices (Q,) or (Q, P), or a list for each query, got {type(given).__name__}"
        )
    if len(rows) != queries:
        raise ValueError(f"positives has {len(rows)} rows, but there are {queries} queries: give one row for each")
    found_queries, found = [], []
    for query, row in enumerate(rows):
        items = row.tolist() if isinstance(row, Tensor | np.ndarray) else row
        for item in items if isinstance(items, Iterable) and not isinstance(items, str) else [items]:
            index = _text_index(item, query, texts) if isinstance(item, str) else _checked_index(item, query, documents)
            if index >= 0:
                found_queries.append(query)
                found.append(index)
    return Lists.of(np.array(found_queries, np.int64), np.array(found, np.int64), queries)


def _text_index(text: str, query: int, texts: Mapping[str, list[int]] | None) -> int:
    if texts is None:
        raise ValueError(f"positives of query {query} is a text, but the corpus is not: give its index in the corpus")
    if text not in texts:
        raise ValueError(f"a positive of query {query} is not in the corpus: {text[:60]!r}; add it there")
    return texts[text][0]


def _checked_index(given: object, query: int, documents: int) -> int:
    if not isinstance(given, int | np.integer) or isinstance(given, bool) or not -1 <= given < documents:
        raise ValueError(
            f"positives of query {query} must be indices from 0 to {documents - 1}, or −1 for none, got {given!r}"
        )
    return int(given)


def duplicates(positives: Lists, corpus: Vectors, tile: int, texts: Mapping[str, list[int]] | None) -> Lists:
    """The documents with the text or the embedding of one of a query's positives, without the positives themselves."""
    wanted = np.unique(positives.items)
    pairs = [_same_embedding(corpus, wanted, tile)]
    if texts is not None:
        number = {int(document): place for place, document in enumerate(wanted)}
        copies = [group for group in texts.values() if len(group) > 1]
        groups = [(number[one], group) for group in copies for one in group if one in number]
        pairs += [np.array([[place] * len(group), group]) for place, group in groups]
    place, document = np.concatenate(pairs, axis=1)
    other = document != wanted[place]
    same = Lists.of(place[other], document[other], len(wanted))
    # From lists for each positive to lists for each query.
    rows = positives.queries()
    choice, position = _expanded(same, np.searchsorted(wanted, positives.items))
    found_queries, found = rows[choice], same.items[position]
    # A copy of one positive may be another positive.
    size = np.int64(len(corpus))
    new = ~np.isin(found_queries * size + found, rows * size + positives.items)
    return Lists.of(found_queries[new], found[new], len(positives))


def _same_embedding(corpus: Vectors, wanted: Ints, tile: int) -> Ints:
    """Pairs (2, P) of the place of a document in ``wanted`` and a document with the same direction.

    Two random projections of all documents find the few pairs whose distances are computed.
    """
    directions = torch.randn(corpus.shape[1], 2, generator=generator("cpu", 0))
    reach = _ANGLE * float(directions.norm(dim=0).amax())
    blocks = row_blocks(len(wanted), corpus.shape[1], tile)
    parts = [(corpus.take_unit(wanted[block]) @ directions).numpy() for block in blocks]
    projected = np.concatenate(parts or [np.empty((0, 2), np.float32)])
    # Documents with equal projections are compared once.
    known, first, group = np.unique(projected, axis=0, return_index=True, return_inverse=True)
    found = [np.empty((2, 0), np.int64)]
    for start in range(0, len(corpus), tile) if len(wanted) else ():
        rows = corpus.unit(start, start + tile)
        place, document = _near(known, (rows @ directions).numpy(), reach)
        same = np.zeros(len(place), bool)
        for pairs in row_blocks(len(place), corpus.shape[1], tile):
            others = corpus.take_unit(wanted[first[place[pairs]]])
            same[pairs] = ((rows[torch.from_numpy(document[pairs])] - others).norm(dim=1) <= _ANGLE).numpy()
        found.append(np.stack([place[same], start + document[same]]))
    places, documents = np.concatenate(found, axis=1)
    members = Lists.of(group.reshape(-1), np.arange(len(wanted)), len(known))
    rows_of, positions = _expanded(members, places)
    return np.stack([members.items[positions], documents[rows_of]])


def _near(known: NDArray[np.float32], points: NDArray[np.float32], reach: float) -> tuple[Ints, Ints]:
    """Pairs of a row of ``known`` (K, 2), sorted, and of ``points`` (T, 2) that are within reach in both columns."""
    first = np.searchsorted(known[:, 0], points[:, 0] - reach)
    sizes = np.searchsorted(known[:, 0], points[:, 0] + reach, side="right") - first
    point = np.repeat(np.arange(len(points)), sizes)
    place = np.repeat(first - (sizes.cumsum() - sizes), sizes) + np.arange(sizes.sum())
    close = np.abs(known[place, 1] - points[point, 1]) <= reach
    return place[close], point[close]


def _expanded(lists: Lists, chosen: Ints) -> tuple[Ints, Ints]:
    """For chosen lists, with repetitions: the number of the choice, and the position of each item of its list."""
    sizes = lists.sizes[chosen]
    number = np.repeat(np.arange(len(chosen)), sizes)
    first = lists.offsets[chosen] - (sizes.cumsum() - sizes)
    return number, (np.repeat(first, sizes) + np.arange(len(number))).astype(np.int64)

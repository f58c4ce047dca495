"""Sets of texts: in memory, or read on access if they do not fit."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hardneg import checks
from hardneg.division import Division, fingerprint
from hardneg.text.tokens import Tokenizer, Tokens, TokenSet, tokenize

_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)]*\s+(?=[\"'“‘(]*[A-Z])")


@dataclass(frozen=True, eq=False)
class TextSet:
    """Texts with optional labels, in the order of their documents.

    Args:
        texts: a list, or a sequence that reads a text on access; slices are lists.
        labels: (N,) int64, −1 where unknown; None if there are none.
        classes: the name of each label; empty without labels.
        name: of the set, in messages.
        starts: (D,) the first row of each document, ascending from 0; None if the set is one document.
        max_length: tokens of a text that are used; None for as many as the encoder takes.
        sample_ids: (N,) the column ``id`` of a table, by which files of pairs name a text; None for row numbers.

    Examples:
        >>> texts = TextSet(["One.", "Two.", "Three."], starts=torch.tensor([0, 2]))
        >>> len(texts), texts.neighbors(torch.tensor([1])).tolist()
        (3, [[0, -1]])
    """

    texts: Sequence[str]
    labels: Tensor | None = None
    classes: tuple[str, ...] = ()
    name: str = "texts"
    starts: Tensor | None = None
    max_length: int | None = None
    sample_ids: Sequence[Any] | None = None
    _tokens: dict[int, tuple[Tokenizer, TokenSet]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.texts, str):
            raise ValueError("texts must be a list of texts, got one text: put it into a list")
        if len(self.texts) == 0:
            raise ValueError(f"{self.name} holds no texts: give at least one")
        if self.labels is not None:
            checks.integers("labels", self.labels, (len(self.texts),), "one per text")
            highest = int(self.labels.max())
            if int(self.labels.min()) < -1 or highest >= len(self.classes):
                raise ValueError(f"labels must be −1 or below the {len(self.classes)} classes, got {highest}")
        if self.starts is not None:
            rises = len(self.starts) > 0 and int(self.starts[0]) == 0 and bool((self.starts.diff() > 0).all())
            if not rises or int(self.starts[-1]) >= len(self.texts):
                raise ValueError(f"starts must rise from 0 to below {len(self.texts)}, the number of texts")

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[int, str]:
        """The index and the text of a row."""
        row = range(len(self))[index]
        return row, self.texts[row]

    @property
    def in_memory(self) -> bool:
        """False if texts are read on access; their tokens are not stored either."""
        return isinstance(self.texts, list | tuple)

    @cached_property
    def division(self) -> Division:
        """Texts are tested by folds over the whole set, or on other sets."""
        content = hashlib.blake2b(digest_size=16)
        for text in self.texts if self.in_memory else [self.name, str(len(self))]:
            content.update(text.encode("utf-8", "surrogatepass") + b"\n")
        return Division(Division.FOLDS, len(self), fingerprint(self.labels, self.starts, names=content.hexdigest()))

    @cached_property
    def duplicates(self) -> Tensor | None:
        """Ids (N,) that equal texts share; None if no two are equal, or if the texts are not in memory."""
        if not self.in_memory:
            return None
        first: dict[str, int] = {}
        ids = torch.tensor([first.setdefault(text, row) for row, text in enumerate(self.texts)])
        return ids if len(first) < len(self) else None

    def subset(self, indices: Tensor | Sequence[int]) -> "TextSet":
        """The texts of these rows, in this order, each a document of its own."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        checks.require_in_range("indices", rows, len(self))
        texts = [self.texts[row] for row in rows.tolist()]
        labels = None if self.labels is None else self.labels[rows]
        ids = None if self.sample_ids is None else [self.sample_ids[row] for row in rows.tolist()]
        starts = torch.arange(len(rows))
        return replace(self, texts=texts, labels=labels, starts=starts, sample_ids=ids, _tokens={})

    def to(self, device: torch.device | str) -> "TextSet":
        """The same set: its tokens are copied to the device of the encoder."""
        return self

    def batch(self, index: Tensor) -> list[str]:
        """The texts of these rows."""
        return [self.texts[row] for row in index.tolist()]

    def neighbors(self, index: Tensor) -> Tensor:
        """The rows before and after each row, (B, 2); −1 where its document begins or ends."""
        starts = torch.zeros(1, dtype=torch.int64) if self.starts is None else self.starts
        starts = starts.to(index.device)
        document = torch.searchsorted(starts, index, right=True) - 1  # (B,)
        ends = torch.cat([starts[1:], starts.new_tensor([len(self)])])[document]
        before = torch.where(index > starts[document], index - 1, -1)
        after = torch.where(index + 1 < ends, index + 1, -1)
        return torch.stack([before, after], dim=1)

    def tokens(self, tokenizer: Tokenizer) -> TokenSet:
        """The tokens of all texts, computed in the first call with this tokenizer."""
        if id(tokenizer) not in self._tokens:
            self._tokens[id(tokenizer)] = tokenizer, tokenize(self.texts, tokenizer, self.max_length)
        return self._tokens[id(tokenizer)][1]

    def token_batch(self, index: Tensor, tokenizer: Tokenizer) -> Tokens:
        """The tokens of these rows (B,), on the device of ``index``."""
        if not self.in_memory:
            limit = tokenizer.max_length if self.max_length is None else self.max_length
            rows = torch.arange(len(index))
            return tokenize(self.batch(index), tokenizer, limit).batch(rows).to(index.device)
        tokens = self.tokens(tokenizer)
        if tokens.ids.device != index.device:
            tokens = tokens.to(index.device)
            self._tokens[id(tokenizer)] = tokenizer, tokens
        return tokens.batch(index)


def sentences(paragraph: str) -> list[str]:
    """Split a paragraph into sentences, after ``.``, ``!`` or ``?`` before a capital letter.

    Examples:
        >>> sentences("He came. Did she? “Yes!” they said.")
        ['He came.', 'Did she?', '“Yes!” they said.']
    """
    found, begin = [], 0
    text = " ".join(paragraph.split())
    for end in _SENTENCE_END.finditer(text):
        found.append(text[begin : end.end()].strip())
        begin = end.end()
    return [*found, text[begin:]] if text[begin:] else found

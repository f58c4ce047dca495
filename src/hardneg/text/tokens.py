"""Tokens of texts: a whole set is tokenized once into one tensor, and batches are padded to their longest text."""

import re
import warnings
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hardneg import checks
from hardneg.progress import progress

CHUNK = 4096  # texts tokenized at a time
_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")


class Tokens(NamedTuple):
    """Token ids (B, L) int64 of a batch of texts, and their mask (B, L) bool, False at padding."""

    ids: Tensor
    mask: Tensor

    def to(self, device: torch.device | str) -> "Tokens":
        """The same tokens on another device."""
        return Tokens(self.ids.to(device), self.mask.to(device))

    def repeated(self, times: int) -> "Tokens":
        """The batch ``times`` times, one after the other."""
        return Tokens(self.ids.repeat(times, 1), self.mask.repeat(times, 1))


class Tokenizer(Protocol):
    """Maps texts to lists of token ids, at least one of each text.

    pad: the id at padding · max_length: tokens of a text that the encoder takes
    """

    @property
    def pad(self) -> int: ...
    @property
    def max_length(self) -> int: ...
    def __call__(self, texts: Sequence[str], max_length: int) -> tuple[list[list[int]], int]:
        """The ids of each text, cut after ``max_length`` tokens, and the number of texts that were cut."""


class WordHashes:
    """Words and punctuation in lower case, each as a 31-bit hash: needs no vocabulary and knows every word.

    max_length: words of a text that are used

    Examples:
        >>> ids, cut = WordHashes()(["A word, a WORD.", ""], 3)
        >>> [len(each) for each in ids], ids[0][0] == ids[1][0], cut
        ([3, 1], False, 1)
    """

    pad = 0

    def __init__(self, max_length: int = 128) -> None:
        self.max_length = checks.whole("max_length", max_length)

    def __call__(self, texts: Sequence[str], max_length: int) -> tuple[list[list[int]], int]:
        words = [_WORD.findall(text.lower()) for text in texts]
        # A text without words is one empty word.
        return [[_hash(word) for word in each[:max_length] or [""]] for each in words], sum(
            len(each) > max_length for each in words
        )


def _hash(word: str) -> int:
    return zlib.crc32(word.encode("utf-8", "surrogatepass")) >> 1


class PretrainedTokenizer:
    """A tokenizer of ``transformers`` behind the interface `Tokenizer`."""

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length
        self.pad: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0

    def __call__(self, texts: Sequence[str], max_length: int) -> tuple[list[list[int]], int]:
        marks = self.tokenizer.num_special_tokens_to_add()
        if max_length <= marks:  # the tokenizer would not cut at all
            raise ValueError(f"max_length={max_length} holds the {marks} marks of this tokenizer only: raise it")
        # Surrogates, which stand for bytes that are not UTF-8, are no text for the tokenizer.
        plain = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        found = self.tokenizer(
            plain, truncation=True, max_length=max_length, return_attention_mask=False, return_token_type_ids=False
        )
        encodings = found.encodings or ()
        cut = sum(bool(encoding.overflowing) for encoding in encodings)
        return [ids or [self.pad] for ids in found["input_ids"]], cut


class TokenSet:
    """The tokens of a whole set in one tensor, from which a batch is selected without a loop over texts.

    Args:
        ids: (T,) int32, text after text
        ptr: (N + 1,) int64, the first token of each text, and T
        pad: id at padding

    Examples:
        >>> tokens = TokenSet(torch.tensor([5, 6, 7], dtype=torch.int32), torch.tensor([0, 1, 3]))
        >>> tokens.batch(torch.tensor([1, 0])).ids.tolist()
        [[6, 7], [5, 0]]
    """

    def __init__(self, ids: Tensor, ptr: Tensor, pad: int = 0) -> None:
        self.ids, self.ptr, self.pad = ids, ptr, pad

    def __len__(self) -> int:
        return len(self.ptr) - 1

    @property
    def lengths(self) -> Tensor:
        """Tokens of each text, (N,)."""
        return self.ptr.diff()

    def to(self, device: torch.device | str) -> "TokenSet":
        """The same tokens on another device."""
        if self.ids.device == torch.device(device):
            return self
        return TokenSet(self.ids.to(device), self.ptr.to(device), self.pad)

    def batch(self, index: Tensor) -> Tokens:
        """The texts of these rows (B,), padded to the longest of them."""
        starts = self.ptr[index]
        lengths = self.ptr[index + 1] - starts  # (B,)
        column = torch.arange(int(lengths.max()), device=self.ids.device)  # (L,)
        mask = column < lengths[:, None]  # (B, L)
        ids = self.ids[(starts[:, None] + column).clamp(max=len(self.ids) - 1)].long()
        return Tokens(ids.masked_fill(~mask, self.pad), mask)


def tokenize(texts: Sequence[str], tokenizer: Tokenizer, max_length: int | None = None) -> TokenSet:
    """The tokens of all texts.

    max_length: tokens of a text that are used, at most those that the encoder takes. If it is None, a warning tells
    how many texts are longer than that.

    Examples:
        >>> tokenize(["one", "one two"], WordHashes()).lengths
        tensor([1, 2])
    """
    limit = tokenizer.max_length if max_length is None else min(max_length, tokenizer.max_length)
    parts, lengths, cut = [torch.empty(0, dtype=torch.int32)], [0], 0
    for start in progress(range(0, len(texts), CHUNK), "tokenizing"):
        ids, longer = tokenizer(texts[start : start + CHUNK], limit)
        lengths += map(len, ids)
        parts.append(torch.tensor([number for each in ids for number in each], dtype=torch.int32))
        cut += longer
    if cut and max_length is None:
        warnings.warn(
            f"{cut} of {len(texts)} texts are longer than the {limit} tokens that the encoder takes: the rest of them "
            "is left out",
            stacklevel=3,
        )
    return TokenSet(torch.cat(parts), torch.tensor(lengths).cumsum(0), tokenizer.pad)

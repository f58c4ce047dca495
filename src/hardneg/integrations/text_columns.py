"""Tokenized columns of texts: ids by which equal texts are found, numbers of tokens, and embeddings by a guide."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hardneg.randomness import integers


def token_ids(features: Mapping[str, Any]) -> Tensor:
    """An id ≥ 0 of each text, (B,): a hash of its tokens, in which padding on either side does not count.

    features: of one column, with "input_ids" (B, L), and "attention_mask" if texts are padded; of static embeddings,
    "input_ids" (T,) of all texts, and "offsets" (B,) of their first tokens. Two texts with different tokens have the
    same id with a probability of about 2⁻⁶².

    Examples:
        >>> ids = token_ids({
        ...     "input_ids": torch.tensor([[7, 8, 0], [0, 7, 8], [8, 7, 0]]),
        ...     "attention_mask": torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 0]]),
        ... })
        >>> bool(ids[0] == ids[1]), bool(ids[0] == ids[2])
        (True, False)
    """
    tokens, mask = _tokens(features)
    position = mask.cumsum(dim=1)  # from the first token that is not padding
    factors = _factors(1 << tokens.shape[1].bit_length(), tokens.device)[position]  # (B, L)
    # A sum of products with random numbers; int64 arithmetic wraps around.
    return ((tokens + 1) * mask * factors).sum(dim=1) & ((1 << 63) - 1)


def token_counts(features: Mapping[str, Any]) -> Tensor:
    """The number of tokens of each text of one column, (B,), without padding."""
    return _tokens(features)[1].sum(dim=1)


def rows_share_ids(ids: Tensor) -> bool:
    """Whether ids (B, columns) may occur in two rows: the first two columns may be equal within a row.

    Equal ids within the other columns of one row count as if they were in two rows; the loss is right either way.
    """
    pairs = (ids[:, 0] == ids[:, 1]).sum() if ids.shape[1] > 1 else 0
    ordered = ids.flatten().sort().values
    return bool((ordered[1:] == ordered[:-1]).sum() > pairs)


class Guide:
    """A model that embeds texts which were tokenized for another model.

    model: whose tokens the texts have · guide: the SentenceTransformer that embeds them, without gradient
    """

    def __init__(self, model: Any, guide: Any) -> None:
        self.guide = guide.eval()
        self.tokenizer = model.tokenizer
        same = model.tokenizer.get_vocab() == guide.tokenizer.get_vocab()
        self.shares_tokens = same and guide.max_seq_length >= model.max_seq_length

    @torch.no_grad()
    def embed(self, columns: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """The embeddings of each column, (B, e). columns: features of the other model"""
        found = []
        for column in columns:
            tokens, _ = _tokens(column)
            if "offsets" in column:
                raise ValueError(
                    "a guide needs tokens in rows (B, L), which static embeddings do not have: leave it out"
                )
            self.guide.to(tokens.device)  # no-op if it is there
            features = dict(column)  # a copy: models add their outputs to the features
            if not self.shares_tokens:
                features = self.guide.preprocess(self.tokenizer.batch_decode(tokens, skip_special_tokens=True))
                for key, part in features.items():
                    features[key] = part.to(tokens.device) if isinstance(part, Tensor) else part
            found.append(self.guide(features)["sentence_embedding"])
        return found


def has_tokens(features: Mapping[str, Any]) -> bool:
    """Whether the tokens of each text of a column are known: not of images, nor of texts joined to one sequence."""
    tokens = features.get("input_ids")
    rows = isinstance(tokens, Tensor) and tokens.dim() == (1 if "offsets" in features else 2)
    return rows and "cu_seq_lens_q" not in features


def _tokens(features: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The tokens (B, L), and 1 where there is one and 0 for padding."""
    if not has_tokens(features):
        raise ValueError(
            "texts are compared by their tokens, which these inputs do not have: pass mask_duplicates=False, and no "
            "guide"
        )
    tokens: Tensor = features["input_ids"].long()
    if "offsets" in features:
        return _rows(tokens, features["offsets"])
    mask = features.get("attention_mask")
    mask = mask if isinstance(mask, Tensor) and mask.shape == tokens.shape else torch.ones_like(tokens)
    return tokens, mask.long()


def _rows(tokens: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """As `_tokens`, from the tokens (T,) of all texts, as of static embeddings, and the first one of each text."""
    sizes = torch.cat([offsets, offsets.new_tensor([len(tokens)])]).diff()
    mask = torch.arange(int(sizes.max()), device=tokens.device) < sizes[:, None]
    return tokens.new_zeros(mask.shape).masked_scatter(mask, tokens), mask.long()


@lru_cache(maxsize=64)
def _factors(number: int, device: torch.device) -> Tensor:
    """Odd random numbers, (number,), the same on every device."""
    rows = torch.arange(number, device=device)
    return integers(rows.new_zeros(2), rows, 1)[:, 0] * 2 + 1

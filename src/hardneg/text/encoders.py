"""Text encoders that are trained from scratch, and the two functions by which any text encoder is used."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from hardneg import checks
from hardneg.text.pretrained import PretrainedEncoder, load_tokenizer, located
from hardneg.text.tokens import PretrainedTokenizer, Tokenizer, Tokens, WordHashes

_PRIME = (1 << 31) - 1
_FACTORS = (1_103_515_245, 1_664_525_897)  # of the two hash functions


class HashEmbedding(nn.Module):
    """Word vectors without a vocabulary: a word is the sum of two rows of one table, chosen by two hash functions.

    Two words have the same vector only if both rows agree (Svenstrup et al. 2017, hash embeddings without weights).

    Args:
        rows: of the table
        dim: of a word vector

    Examples:
        >>> HashEmbedding(1000, 8)(torch.tensor([[3, 4, 3]])).shape
        torch.Size([1, 3, 8])
    """

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, dim)

    def forward(self, ids: Tensor) -> Tensor:
        """Vectors (B, L, d) of the words with these hashes (B, L), each below 2³¹."""
        rows = [(ids * factor + shift) % _PRIME % self.table.num_embeddings for shift, factor in enumerate(_FACTORS)]
        found: Tensor = (self.table(rows[0]) + self.table(rows[1])) * 0.5**0.5
        return found


def _words(tokenizer: str | None, rows: int, dim: int, max_length: int) -> tuple[nn.Module, Tokenizer]:
    """Word vectors and the tokenizer for them: words by hash, or the pieces of a pretrained tokenizer."""
    if tokenizer is None:
        return HashEmbedding(rows, dim), WordHashes(max_length)
    loaded = load_tokenizer(tokenizer)
    return nn.Embedding(len(loaded), dim), PretrainedTokenizer(loaded, max_length)


class GRUEncoder(nn.Module):
    """A GRU over word vectors; the features are its last states (Logeswaran & Lee 2018, quick-thoughts).

    Args:
        width: number of features; half of them of each direction if bidirectional
        word_dim: of a word vector
        words: rows of the table of word vectors; see `HashEmbedding`
        bidirectional: read the text in both directions
        dropout: of the word vectors
        max_length: words of a text that are used
        tokenizer: a folder or name of a pretrained tokenizer, whose pieces are used instead of words

    Examples:
        >>> encoder = GRUEncoder(width=16, word_dim=8, words=100)
        >>> encoder(Tokens(torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool))).shape
        torch.Size([2, 16])
    """

    def __init__(
        self,
        width: int = 1200,
        word_dim: int = 620,
        words: int = 65_536,
        bidirectional: bool = True,
        dropout: float = 0.0,
        max_length: int = 128,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__()
        checks.whole("width", width, at_least=2 if bidirectional else 1)
        if bidirectional and width % 2:
            raise ValueError(f"width must be even for two directions, got {width}")
        self.features = width
        self.words, self.tokenizer = _words(tokenizer, words, word_dim, max_length)
        self.dropout = nn.Dropout(dropout)
        hidden = width // 2 if bidirectional else width
        self.gru = nn.GRU(word_dim, hidden, batch_first=True, bidirectional=bidirectional)

    def forward(self, tokens: Tokens) -> Tensor:
        """Features (B, width) of a batch."""
        vectors = self.dropout(self.words(tokens.ids))  # (B, L, word_dim)
        lengths = tokens.mask.sum(dim=1).cpu()
        packed = pack_padded_sequence(vectors, lengths, batch_first=True, enforce_sorted=False)
        states = self.gru(packed)[1]  # (directions, B, hidden)
        found: Tensor = states.transpose(0, 1).flatten(1)
        return found


class TransformerEncoder(nn.Module):
    """A small transformer over word vectors; the features are the mean over the words.

    Args:
        width: number of features
        layers: of the transformer
        heads: of each layer
        words: rows of the table of word vectors; see `HashEmbedding`
        dropout: in all layers
        max_length: words of a text that are used
        tokenizer: a folder or name of a pretrained tokenizer, whose pieces are used instead of words

    Examples:
        >>> encoder = TransformerEncoder(width=16, words=100)
        >>> encoder(Tokens(torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool))).shape
        torch.Size([2, 16])
    """

    def __init__(
        self,
        width: int = 128,
        layers: int = 2,
        heads: int = 4,
        words: int = 65_536,
        dropout: float = 0.1,
        max_length: int = 128,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__()
        if checks.whole("width", width) % checks.whole("heads", heads):
            raise ValueError(f"width={width} must be a multiple of heads={heads}")
        self.features = width
        self.words, self.tokenizer = _words(tokenizer, words, width, max_length)
        self.positions = nn.Embedding(max_length, width)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, tokens: Tokens) -> Tensor:
        """Features (B, width) of a batch."""
        place = torch.arange(tokens.ids.shape[1], device=tokens.ids.device)
        vectors = self.dropout(self.words(tokens.ids) + self.positions(place))  # (B, L, width)
        return mean_over_tokens(self.layers(vectors, src_key_padding_mask=~tokens.mask), tokens.mask)


class TwoEncoders(nn.Module):
    """Two encoders with the same tokenizer, whose features are concatenated, as quick-thoughts uses them.

    Args:
        first: `Tokens` → (B, features)
        second: the same, of other weights
    """

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    @property
    def tokenizer(self) -> Tokenizer:
        """That of the first encoder."""
        return tokenizer_of(self.first)

    def forward(self, tokens: Tokens) -> Tensor:
        """Features of both encoders, (B, features of the first + features of the second)."""
        return torch.cat([encode(self.first, tokens), encode(self.second, tokens)], dim=1)


def mean_over_tokens(states: Tensor, mask: Tensor) -> Tensor:
    """The mean (B, d) of states (B, L, d) where the mask (B, L) is True."""
    weight = mask.unsqueeze(2).to(states.dtype)
    return (states * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1)


ENCODERS: dict[str, Callable[..., nn.Module]] = {"gru": GRUEncoder, "transformer": TransformerEncoder}


def build(name: str, pooling: str | None, options: dict[str, Any]) -> nn.Module:
    """The encoder of this name: one that is trained from scratch, or a pretrained model by folder or name."""
    try:
        if name not in ENCODERS:
            located(name)  # a missing folder is an error before wrong options are
            return PretrainedEncoder(name, pooling, **options)
        if pooling is not None:
            raise ValueError(f"encoder.pooling={pooling} is for pretrained models: leave it out for {name}")
        return ENCODERS[name](**options)
    except TypeError as error:
        reason = str(error).rpartition("() ")[2]
        raise ValueError(
            f"encoder.options of encoder.name={name!r}: {reason}; encoder.options={{}} removes those of the recipe"
        ) from error


def tokenizer_of(encoder: nn.Module) -> Tokenizer:
    """The tokenizer of an encoder of this package, or of a ``SentenceTransformer``."""
    found: Any = getattr(encoder, "tokenizer", None)
    if found is None:
        raise ValueError(
            f"{type(encoder).__name__} has no tokenizer: give an encoder with an attribute tokenizer, or a "
            "SentenceTransformer"
        )
    if hasattr(found, "max_length"):
        tokenizer: Tokenizer = found
        return tokenizer
    # One object per encoder: a set keeps its tokens by the identity of the tokenizer.
    if not hasattr(encoder, "_hardneg_tokenizer"):
        length = getattr(encoder, "max_seq_length", None) or min(found.model_max_length, 512)
        object.__setattr__(encoder, "_hardneg_tokenizer", PretrainedTokenizer(found, length))
    wrapped: Tokenizer = encoder._hardneg_tokenizer  # type: ignore[assignment]
    return wrapped


def encode(encoder: nn.Module, tokens: Tokens) -> Tensor:
    """Features (B, d) of a batch, by an encoder of this package or a ``SentenceTransformer``."""
    if not hasattr(encoder, "max_seq_length"):
        features: Tensor = encoder(tokens)
        return features
    found = encoder({"input_ids": tokens.ids, "attention_mask": tokens.mask.long()})
    features = found["sentence_embedding"]
    return features

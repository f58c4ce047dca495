"""A random SentenceTransformer small enough for tests, and texts for it."""

from collections.abc import Sequence
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(40)]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def tiny_model(
    folder: Path, dropout: float = 0.0, words: Sequence[str] | None = None, seed: int = 0
) -> SentenceTransformer:
    """Two layers of width 16 with mean pooling, saved in and loaded from ``folder``. words: in order of their tokens"""
    tokens = {word: number for number, word in enumerate([*SPECIAL, *(WORDS if words is None else words)])}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", tokens["[CLS]"]), ("[SEP]", tokens["[SEP]"])]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=12, **names).save_pretrained(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(tokens),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    BertModel(config).save_pretrained(folder)
    transformer = Transformer(str(folder))
    return SentenceTransformer(modules=[transformer, Pooling(transformer.get_embedding_dimension())], device="cpu")


def sentences(number: int, seed: int = 0, longest: int = 6) -> list[str]:
    """Texts of random words, all different."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, None] = {}
    while len(found) < number:
        length = int(torch.randint(2, longest + 1, (), generator=generator))
        chosen = torch.randint(len(WORDS), (length,), generator=generator).tolist()
        found[" ".join(WORDS[index] for index in chosen)] = None
    return list(found)

"""Features of whole sets of texts."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hardneg.evaluation.features import evaluating
from hardneg.text.encoders import encode, tokenizer_of
from hardneg.text.text_set import TextSet
from hardneg.text.tokens import tokenize

PORTION = 65_536  # texts that are sorted by length and encoded at a time


@torch.no_grad()
def extract_texts(encoder: nn.Module, texts: TextSet, batch_size: int = 256) -> Tensor:
    """Features (N, d) float32 of every text of a set, in evaluation mode, on the device of the encoder.

    Texts are encoded in the order of their length, so that batches hold little padding.

    encoder: as `encode` takes it · batch_size: texts per batch
    """
    tokenizer = tokenizer_of(encoder)
    device = next(iter(encoder.parameters()), torch.empty(0)).device
    parts: list[Tensor] = []
    with evaluating(encoder):
        for start in range(0, len(texts), PORTION):
            rows = torch.arange(start, min(start + PORTION, len(texts)))
            if texts.in_memory:
                tokens = texts.tokens(tokenizer)
            else:
                tokens, rows = tokenize(texts.texts[start : start + PORTION], tokenizer, texts.max_length), rows - start
            order = tokens.lengths[rows.to(tokens.ptr.device)].cpu().argsort(stable=True)
            batches = [
                encode(encoder, tokens.batch(part.to(tokens.ptr.device)).to(device)).float()
                for part in torch.split(rows[order], batch_size)
            ]
            parts.append(torch.cat(batches)[order.argsort().to(device)])
    return torch.cat(parts)


def encode_with(encoder: nn.Module) -> Callable[[Sequence[str]], Tensor]:
    """The function that maps a list of texts to their features (N, d)."""
    return lambda texts: extract_texts(encoder, TextSet(list(texts)))

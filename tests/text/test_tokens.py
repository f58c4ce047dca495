"""Tokens: batches equal the texts one by one, whatever their lengths."""

import re
import zlib

import pytest
import torch

from hardneg.text.text_set import TextSet
from hardneg.text.tokens import WordHashes, tokenize

TEXTS = ["one", "One two, three!", "", "naïve café", "a " * 40, "it's"]


def test_words_are_hashed_in_lower_case_one_by_one() -> None:
    found = tokenize(TEXTS, WordHashes(), 8)
    for row, text in enumerate(TEXTS):
        words = [word for word in re.split(r"([^\w\s’']|\s)", text.lower()) if word.strip()][:8] or [""]
        wanted = [zlib.crc32(word.encode()) >> 1 for word in words]
        assert found.ids[found.ptr[row] : found.ptr[row + 1]].tolist() == wanted


def test_a_batch_is_padded_to_its_longest_text_in_the_order_of_the_index() -> None:
    tokens = tokenize(TEXTS, WordHashes(), 8)
    index = torch.tensor([3, 0, 1, 2])
    batch = tokens.batch(index)
    assert batch.ids.shape == batch.mask.shape == (4, 5)  # "one two , three !"
    assert batch.mask.sum(dim=1).tolist() == [2, 1, 5, 1]
    for row, number in enumerate(index.tolist()):
        alone = tokens.ids[tokens.ptr[number] : tokens.ptr[number + 1]]
        assert batch.ids[row][batch.mask[row]].tolist() == alone.tolist()
    assert bool((batch.ids[~batch.mask] == 0).all())


def test_texts_that_are_too_long_are_cut_with_a_warning_unless_the_user_set_the_length() -> None:
    with pytest.warns(UserWarning, match="1 of 6 texts are longer than the 16 tokens"):
        assert int(tokenize(TEXTS, WordHashes(16)).lengths.max()) == 16
    assert int(tokenize(TEXTS, WordHashes(16), 4).lengths.max()) == 4


def test_a_set_is_tokenized_once_and_streamed_texts_give_the_same_batches() -> None:
    from hardneg.text.files import StreamedTexts

    calls = []

    class Counted(WordHashes):
        def __call__(self, texts, max_length):  # type: ignore[no-untyped-def]
            calls.append(len(texts))
            return super().__call__(texts, max_length)

    tokenizer, index = Counted(), torch.tensor([4, 1])
    held, streamed = TextSet(TEXTS), TextSet(StreamedTexts(len(TEXTS), lambda row: TEXTS[row]))
    for _ in range(3):
        one = held.token_batch(index, tokenizer)
    assert calls == [len(TEXTS)]
    other = streamed.token_batch(index, tokenizer)
    assert calls == [len(TEXTS), 2]
    assert torch.equal(one.ids, other.ids)
    assert torch.equal(one.mask, other.mask)

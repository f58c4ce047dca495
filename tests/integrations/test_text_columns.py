"""Ids of tokenized texts, against tuples of their tokens."""

import pytest
import torch
from torch import Tensor

from hardneg.integrations.text_columns import rows_share_ids, token_counts, token_ids


def padded(rows: list[list[int]], width: int, left: bool) -> dict[str, Tensor]:
    """Tokens with padding of any value on one side."""
    tokens, mask = torch.randint(50, (len(rows), width)), torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        tokens[number, place], mask[number, place] = torch.tensor(row, dtype=torch.long), 1
    return {"input_ids": tokens, "attention_mask": mask}


def test_ids_are_equal_exactly_if_the_tokens_are() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, (int(n),), generator=generator).tolist() for n in torch.randint(5, (400,))]
    features = padded(rows, 9, left=False)
    ids = torch.cat([token_ids(features), token_ids(padded(rows, 17, left=True))])
    texts = torch.tensor([hash(tuple(row)) for row in rows * 2])
    assert bool(((ids[:, None] == ids) == (texts[:, None] == texts)).all())
    assert 50 < len(ids.unique()) == len({tuple(row) for row in rows}) < 400
    assert int(ids.min()) >= 0
    assert token_counts(features).tolist() == [len(row) for row in rows]


def test_ids_of_static_embeddings_are_those_of_rows() -> None:
    rows = [[1, 2], [], [3], [1, 2], [2, 1, 4], []]
    features = {
        "input_ids": torch.tensor([token for row in rows for token in row]),
        "offsets": torch.tensor([0, 2, 2, 3, 5, 8]),
    }
    assert torch.equal(token_ids(features), token_ids(padded(rows, 3, left=False)))
    assert token_counts(features).tolist() == [2, 0, 1, 2, 3, 0]
    empty = {"input_ids": torch.tensor([], dtype=torch.long), "offsets": torch.tensor([0])}
    assert token_counts(empty).tolist() == [0]


def test_without_a_mask_every_token_counts() -> None:
    tokens = torch.tensor([[1, 2, 0], [1, 2, 3]])
    mask = torch.ones_like(tokens)
    assert bool((token_ids({"input_ids": tokens}) == token_ids({"input_ids": tokens, "attention_mask": mask})).all())


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([[1, 2], [3, 4]], False),
        ([[1, 1], [3, 3]], False),  # anchor and positive are equal, as in SimCSE
        ([[1, 2], [1, 4]], True),
        ([[1, 2], [3, 2]], True),
        ([[1, 2], [2, 4]], True),
        ([[1, 1], [1, 1]], True),
        ([[1, 2, 5], [3, 4, 2]], True),
        ([[1, 2, 2], [3, 4, 5]], True),
        ([[1, 2, 6], [3, 4, 5]], False),
        ([[1], [1]], True),
    ],
)
def test_rows_that_share_ids_are_found(ids: list[list[int]], expected: bool) -> None:
    assert rows_share_ids(torch.tensor(ids)) is expected

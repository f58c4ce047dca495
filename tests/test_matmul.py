"""Selection of columns against a stable sort."""

import pytest
import torch
from torch import Tensor

from hardneg.matmul import largest_columns


def expected(scores: Tensor, k: int) -> Tensor:
    """The first k columns of a stable sort, in ascending order."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values


@pytest.mark.parametrize("distinct", [2, 40, 10**6])
@pytest.mark.parametrize("columns", [1, 7, 16, 100, 257, 1000, 4099])
def test_the_largest_columns_are_those_of_a_stable_sort(columns: int, distinct: int) -> None:
    # Few distinct scores make ties at the last place; from 16 · (k + 1) columns on, groups of columns are compared.
    scores = torch.randint(-distinct, distinct, (50, columns)).float()
    scores[::7, : columns // 2] = -torch.inf
    for k in {1, 2, 5, columns // 3, columns} - {0}:
        if k <= columns:
            assert torch.equal(largest_columns(scores, k).sort(dim=1).values, expected(scores, k))


def test_a_row_of_equal_scores_gives_the_first_columns() -> None:
    assert largest_columns(torch.zeros(3, 5000), 4).tolist() == [[0, 1, 2, 3]] * 3


def test_scores_that_are_not_a_number_are_the_largest() -> None:
    scores = torch.zeros(1, 1000)
    scores[0, 321] = torch.nan
    scores[0, 123] = 1.0
    assert sorted(largest_columns(scores, 2)[0].tolist()) == [123, 321]


def test_a_slice_of_columns_is_selected_from_without_a_copy() -> None:
    scores = torch.randn(20, 3000)
    assert torch.equal(largest_columns(scores[:, 5:2005], 3).sort(dim=1).values, expected(scores[:, 5:2005], 3))


def test_no_rows_give_no_columns() -> None:
    assert largest_columns(torch.zeros(0, 1000), 3).shape == (0, 3)


def test_nan_counts_as_the_largest_score_also_where_others_are_tied() -> None:
    nan = torch.nan
    scores = torch.tensor([[1.0, nan, 1.0, nan, 0.0], [1.0, nan, 2.0, 1.0, 1.0], [nan] * 5])
    found = largest_columns(scores, 3).sort(dim=1).values
    assert found[:2].tolist() == [[0, 1, 3], [0, 1, 2]]
    assert len(set(found[2].tolist())) == 3

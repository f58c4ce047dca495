"""Products against float64, and the selection of columns against a stable sort."""

import pytest
import torch
from torch import Tensor

import hardneg as hn
from hardneg import matmul
from hardneg.matmul import largest_columns, multiply


@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(300, 200, 100), (257, 33, 129), (1, 5, 7), (64, 1, 3), (0, 4, 2)])
def test_a_product_is_that_of_float64_by_either_library(
    onednn: bool, dtype: torch.dtype, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if onednn and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this PyTorch has no oneDNN")
    rows, dim, columns = shape
    calls = []
    routine = torch.ops.mkldnn._linear_pointwise if onednn else None
    monkeypatch.setattr(matmul, "ONEDNN_PRODUCTS", 1)
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda: onednn)
    monkeypatch.setattr(
        torch.ops.mkldnn, "_linear_pointwise", lambda *given: calls.append(given) or routine(*given), raising=False
    )
    wide = torch.randn(rows, dim + 9, dtype=dtype)
    for left in (wide[:, :dim], torch.randn(dim, rows, dtype=dtype).t()):  # neither is contiguous
        for right in (torch.randn(columns, dim, dtype=dtype), torch.randn(dim, columns, dtype=dtype).t()):
            exact = left.double() @ right.double().T
            room = dim * 2.0 ** (-22 if dtype == torch.float32 else -50) * (1 + dim**0.5)
            whole = torch.full((rows + 2, columns + 3), torch.nan, dtype=dtype)
            out = whole[1:-1, 2:-1]
            multiply(left, right, out, 0.5, any_size=True)  # what was there does not matter
            assert torch.allclose(out.double(), 0.5 * exact, rtol=0, atol=room)
            multiply(left, right, out, add=True, any_size=True)
            assert torch.allclose(out.double(), 1.5 * exact, rtol=0, atol=2 * room)
            assert whole.isnan().sum() == whole.numel() - out.numel()
    assert bool(calls) == (onednn and dtype == torch.float32)


def test_few_sizes_are_multiplied_by_onednn_so_that_its_routines_stay_few() -> None:
    def suits(batch: int) -> bool:
        return matmul._suits_onednn(2 * batch, 128, 2 * batch)

    assert all(suits(batch) for batch in (256, 320, 384, 512, 800, 1024, 4096))
    assert not suits(32)  # too small
    assert sum(map(suits, range(200, 1000))) < 40
    assert sum(matmul._suits_onednn(64, 128, keys) for keys in range(256, 65_537, 256)) < 110  # of a queue that fills


def test_a_compiled_loss_in_tiles_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda: True)
    loss = torch.compile(hn.hcl(backend="tiled"), fullgraph=True, backend="eager")
    z1, z2 = torch.randn(2, 256, 64)
    assert torch.allclose(loss(z1, z2), hn.hcl()(z1, z2), rtol=1e-5)


def test_products_with_nan_are_nan_where_they_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "ONEDNN_PRODUCTS", 1)
    left, right = torch.ones(3, 4), torch.ones(2, 4)
    left[1, 2] = torch.nan
    out = torch.empty(3, 2)
    multiply(left, right, out)
    assert out.isnan().tolist() == [[False] * 2, [True] * 2, [False] * 2]


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

"""The nearest other samples of features with many equal cosines, in each diagnostic that uses them."""

from collections import Counter

import pytest
import torch
from cases import check_reached
from largest_tensor import LargestTensor
from torch import Tensor

import hardneg.matmul as products_module
from hardneg.diagnostics.neighbors import nearest_others
from hardneg.insight import hardest_negatives, hubs
from hardneg.insight.suspects import suspected_false_negatives


def ties(seed: int, size: int = 30) -> Tensor:
    """Signed axes of 3 dimensions, times powers of 2, and zero vectors: every cosine is exactly −1, 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    axes = torch.cat([torch.eye(3), -torch.eye(3), torch.zeros(1, 3)])
    scales = 2.0 ** torch.randint(-3, 4, (size, 1), generator=generator)
    return axes[torch.randint(7, (size,), generator=generator)] * scales


@pytest.mark.parametrize("tile", [None, 70])
def test_all_diagnostics_take_the_first_of_equal_cosines(tile: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if tile is not None:
        monkeypatch.setattr(products_module, "TILE", tile)
    reached: Counter[str] = Counter()
    for seed in range(12):
        features, k = ties(seed), (1, 4, 29)[seed % 3]
        signs = features.sign().int().tolist()
        cosines = [[sum(a * b for a, b in zip(one, other, strict=True)) for other in signs] for one in signs]
        ranked = [sorted((j for j in range(30) if j != i), key=lambda j, i=i: (-cosines[i][j], j)) for i in range(30)]
        near = [row[:k] for row in ranked]
        found = hardest_negatives(features, torch.arange(30), k)
        assert found.indices.tolist() == near
        assert found.cosines.tolist() == [[cosines[i][j] for j in row] for i, row in enumerate(near)]
        assert torch.equal(nearest_others(features, k, torch.tensor([7, 7, 2])).indices, found.indices[[7, 7, 2]])
        assert hubs(features, k).counts.tolist() == [sum(j in row for row in near) for j in range(30)]
        pairs = suspected_false_negatives(features, k=k, count=1000).pairs.tolist()
        assert sorted(map(tuple, pairs)) == sorted({(min(i, j), max(i, j)) for i, row in enumerate(near) for j in row})
        for own, row in zip(cosines, ranked, strict=True):
            reached["equal within k"] += k > 1 and own[row[0]] == own[row[1]]
            reached["equal beyond k"] += k < 29 and own[row[k - 1]] == own[row[k]]
    check_reached(reached, {"equal within k": 200, "equal beyond k": 150})


def test_no_matrix_of_all_pairs_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products_module, "TILE", 400 * 5)
    features = torch.randn(400, 3)
    with LargestTensor() as watched:
        nearest_others(features, k=4)
    assert watched.elements <= 400 * 5


def test_more_neighbors_than_other_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match="k=3, but an anchor has only 2 other samples: lower k"):
        nearest_others(torch.eye(3), 3)

"""Suspected false negatives against a plain loop, and on data whose false negatives are known."""

from collections import Counter

import numpy as np
import pytest
import torch
from cases import check_reached
from torch import Tensor

from hardneg.insight import suspects
from hardneg.insight.suspects import suspected_false_negatives


def loop(features: Tensor, labels: list[int] | None, guide: Tensor | None, k: int) -> dict[tuple[int, int], float]:
    """The scores of all considered pairs, from the definition, in float64."""

    def cosines(rows: Tensor) -> np.ndarray:
        unit = np.array([row / max(np.linalg.norm(row), 1e-300) for row in rows.double().numpy()])
        return np.array([[float(one @ other) for other in unit] for one in unit])

    n, k = len(features), min(k, len(features) - 1)
    cosine = cosines(features)
    near = [sorted((j for j in range(n) if j != i), key=lambda j: (-cosine[i][j], j))[:k] for i in range(n)]
    found = {}
    for i in range(n):
        for j in range(i + 1, n):
            if not (j in near[i] or i in near[j]):
                continue
            if labels is not None and labels[i] == labels[j] >= 0:
                continue
            evidence = [above(cosine, i, j)]
            one, other = {i, *near[i]}, {j, *near[j]}
            evidence.append(len(one & other) / len(one | other))
            if labels is not None:
                votes = [sum(labels[m] == labels[b] >= 0 for m in near[a]) for a, b in ((i, j), (j, i))]
                evidence.append(max(votes) / k)
            if guide is not None:
                evidence.append(above(cosines(guide), i, j))
            found[i, j] = sum(evidence) / len(evidence)
    return found


def above(cosine: np.ndarray, i: int, j: int) -> float:
    n = len(cosine)
    mean = (cosine.sum() - np.trace(cosine)) / (n * (n - 1))
    return float(np.clip((cosine[i][j] - mean) / max(1 - mean, 1e-12), 0, 1))


@pytest.mark.parametrize("tile", [64, 1 << 23])
def test_the_scores_are_those_of_a_plain_loop(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "_TILE", tile)
    reached: Counter[str] = Counter()
    for seed in range(6):
        torch.manual_seed(seed)
        features = torch.randn(14, 5, dtype=torch.float64) + 0.5
        labels = torch.randint(-1, 3, (14,)) if seed % 3 else None
        guide = torch.randn(14, 7, dtype=torch.float64) if seed % 2 else None
        found = suspected_false_negatives(features, labels, guide, k=3)
        expected = loop(features, None if labels is None else labels.tolist(), guide, 3)
        pairs = [tuple(pair) for pair in found.pairs.tolist()]
        assert set(pairs) == set(expected)
        np.testing.assert_allclose(found.scores, [expected[pair] for pair in pairs], atol=1e-12)
        assert found.scores.tolist() == sorted(found.scores.tolist(), reverse=True)
        assert len(found.reasons) == len(pairs)
        reached["labels"] += labels is not None and max(expected.values()) > 0.3
        reached["guide"] += guide is not None
        reached["neither"] += guide is None and labels is None
    check_reached(reached, {"labels": 4, "guide": 3, "neither": 1})


def test_a_wrong_label_is_the_first_suspect() -> None:
    torch.manual_seed(0)
    centers = torch.eye(8)[:3] * 4
    labels = torch.arange(60) % 3
    features = centers[labels] + 0.3 * torch.randn(60, 8)
    given = labels.clone()
    given[7] = 2  # its class is 1
    found = suspected_false_negatives(features, given, count=10)
    assert 7 in found.pairs[0].tolist()
    assert bool((found.pairs == 7).any(dim=1).float().mean() > 0.8)
    assert "have the other's label" in found.reasons[0]


def test_a_guide_moves_the_pairs_it_finds_similar_to_the_front() -> None:
    torch.manual_seed(0)
    features = torch.randn(40, 6)
    guide = torch.randn(40, 6)
    plain = suspected_false_negatives(features, count=400)
    a, b = plain.pairs[len(plain.pairs) // 2].tolist()
    guide[b] = guide[a]
    guided = suspected_false_negatives(features, guide=guide, count=400)
    assert guided.pairs.tolist().index([a, b]) < plain.pairs.tolist().index([a, b]) / 2


@pytest.mark.parametrize("features", [torch.ones(5, 3), torch.zeros(5, 3), torch.eye(2)])
def test_degenerate_embeddings_have_finite_scores(features: Tensor) -> None:
    found = suspected_false_negatives(features)
    assert len(found.pairs) == len(features) * (len(features) - 1) // 2
    assert bool(((found.scores >= 0) & (found.scores <= 1)).all())


def test_no_pair_is_left_if_all_have_one_label() -> None:
    found = suspected_false_negatives(torch.randn(5, 3), torch.zeros(5, dtype=torch.int64))
    assert found.pairs.shape == (0, 2)
    assert found.reasons == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"features": torch.ones(1, 3)}, "at least 2 samples"),
        ({"features": torch.full((3, 3), torch.nan)}, "features"),
        ({"features": torch.ones(3, 3), "labels": torch.zeros(2, dtype=torch.int64)}, "labels"),
        ({"features": torch.ones(3, 3), "guide": torch.ones(2, 3)}, "guide has 2 rows"),
        ({"features": torch.ones(3, 3), "k": 0}, "k must be"),
        ({"features": torch.ones(3, 3), "count": 1.5}, "count must be"),
    ],
)
def test_bad_input_is_an_error_that_names_it(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        suspected_false_negatives(**arguments)  # type: ignore[arg-type]

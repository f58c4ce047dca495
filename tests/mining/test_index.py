"""Mining with an approximate index: what it finds is scored exactly, and the rules are those of the exact search."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hardneg as hn

DRAW = np.random.default_rng(0)
CORPUS = DRAW.standard_normal((4000, 24)).astype(np.float32)
QUERIES = CORPUS[:80] + 0.8 * DRAW.standard_normal((80, 24)).astype(np.float32)
POSITIVES = np.arange(80)
UNIT = CORPUS / np.linalg.norm(CORPUS, axis=1, keepdims=True)
Find = Callable[[np.ndarray, int], np.ndarray]


def exact(queries: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-(queries @ UNIT.T), axis=1, kind="stable")[:, :k]


def part_of(share: float) -> Find:
    """Finds the best of some documents only, and −1 where there are no more."""
    known = np.flatnonzero(np.random.default_rng(1).random(len(CORPUS)) < share)

    def find(queries: np.ndarray, k: int) -> np.ndarray:
        found = np.full((len(queries), k), -1)
        best = known[np.argsort(-(queries @ UNIT[known].T), axis=1)][:, :k]
        found[:, : best.shape[1]] = best
        return found

    return find


def mine(**options: Any) -> hn.Mined:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of queries with too few
        return hn.mine(QUERIES, CORPUS, POSITIVES, num_negatives=6, **options)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"hardening": hn.BelowPositive(relative=0.5)},
    {"hardening": (hn.BelowPositive(margin=0.3), hn.Threshold(cosine=0.2)), "max_score": 0.3},
    {"hardening": hn.Ring(0.9, 0.95)},
    {"hardening": hn.Exponential(5.0), "sample": True, "rank_range": (5, 200)},
    {"hardening": hn.Uniform(), "max_score": 0.1, "memory": "300KB"},
    {"not_negatives": [(query, query + 1) for query in range(80)]},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_an_index_that_finds_everything_gives_the_result_of_the_exact_search(options: dict[str, Any]) -> None:
    expected, found = mine(**options), mine(index=exact, **options)
    assert found.recall == 1.0
    assert torch.equal(found.indices, expected.indices)
    assert torch.allclose(found.scores, expected.scores, atol=1e-6)
    assert found.dropped == expected.dropped
    assert bool((expected.indices >= 0).any())


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[1], OPTIONS[2], OPTIONS[5]])
@pytest.mark.parametrize("share", [0.5, 0.01])
def test_an_index_of_some_documents_gives_what_the_rules_keep_of_these(options: dict[str, Any], share: float) -> None:
    find = part_of(share)
    known = find(np.ones((1, 24), np.float32), len(CORPUS))[0]
    known = np.sort(known[known >= 0])
    among = np.unique(np.concatenate([known, POSITIVES]))  # the exact search needs the positives
    number = {int(document): place for place, document in enumerate(among)}
    not_found = [number[int(p)] for p in POSITIVES if p not in set(known.tolist())]
    given = {name: value for name, value in options.items() if name != "not_negatives"}
    left_out = [(query, document) for query in range(80) for document in not_found if document != number[query]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        expected = hn.mine(
            QUERIES,
            CORPUS[among],
            [[number[int(p)]] for p in POSITIVES],
            num_negatives=6,
            not_negatives=left_out,
            **given,
        )
    found = mine(index=find, **options)
    assert found.recall == pytest.approx(share, abs=0.1)
    assert torch.equal(found.indices, torch.where(expected.indices >= 0, torch.from_numpy(among)[expected.indices], -1))
    assert bool((found.indices >= 0).any())


def test_an_index_of_faiss(tmp_path: Path) -> None:
    faiss = pytest.importorskip("faiss")
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(24), 24, 64, faiss.METRIC_INNER_PRODUCT)
    index.train(UNIT)
    index.add(UNIT)
    index.nprobe = 4
    found, expected = mine(index=index), mine()
    wanted = [{*row} for row in expected.indices.tolist()]
    share = np.mean([len({*row} & some) / 6 for row, some in zip(found.indices.tolist(), wanted, strict=True)])
    assert found.recall is not None
    assert 0.2 < found.recall < 0.95
    assert abs(found.recall - share) < 0.25
    assert found.summary()["recall"] == found.recall
    assert "recall of the index" in found.write_page(tmp_path / "page.html").read_text(encoding="utf-8")
    index.nprobe = 64
    assert mine(index=index).recall == 1.0


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (3, "index must be an index of faiss or a function"),
        (lambda queries, k: exact(queries, k)[:, 1:], "index must return integers of shape"),
        (lambda queries, k: exact(queries, k) * 1.0, "index must return integers of shape"),
        (lambda queries, k: exact(queries, k) + 1, "index must return numbers from 0 to 3999"),
    ],
)
def test_what_is_not_an_index(index: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mine(index=index, rank_range=(0, 4000), hardening=hn.Ring(0.0, 0.5))


def test_an_index_of_another_corpus() -> None:
    faiss = pytest.importorskip("faiss")
    index = faiss.IndexFlatIP(24)
    index.add(UNIT[:100])
    with pytest.raises(ValueError, match="index has ntotal=100, but the corpus 4000"):
        mine(index=index)
    with pytest.raises(ValueError, match='searched in this process: use engine="local"'):
        mine(index=index, engine="ray")


def test_repeated_documents_of_an_index_are_one() -> None:
    expected = mine()
    found = mine(index=lambda queries, k: exact(queries, k).repeat(2, axis=1)[:, :k])
    kept = found.indices >= 0
    assert bool(kept.any())
    for row, wanted in zip(found.indices.tolist(), expected.indices.tolist(), strict=True):
        some = [document for document in row if document >= 0]
        assert some == wanted[: len(some)]

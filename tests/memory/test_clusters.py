"""Clusters are as good as scikit-learn's and deterministic, and close neighbors equal a loop."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory.sizes import Largest
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits
from torch import Tensor
from torch.testing import assert_close

import hardneg as hn
from hardneg import checks, matmul
from hardneg.memory import Clusters, MemoryBank, kmeans

FAISS = pytest.param("faiss", marks=pytest.mark.skipif(not kmeans.faiss_is_installed(), reason="faiss is missing"))
BACKENDS = [FAISS, "torch"]


def blobs(centers: int, size: int, spread: float, seed: int = 0, dim: int = 16) -> Tensor:
    """Unit vectors around random directions."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(centers, dim, generator=generator)
    which = torch.arange(size) % centers
    rows = torch.nn.functional.normalize(means)[which] + spread * torch.randn(size, dim, generator=generator)
    return torch.nn.functional.normalize(rows)


def inertia(rows: Tensor, assigned: Tensor) -> float:
    """Σ ‖row − mean of its cluster‖²."""
    total = 0.0
    for cluster in assigned.unique():
        members = rows[assigned == cluster].double()
        total += float((members - members.mean(dim=0)).square().sum())
    return total


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("centers", "k", "spread"), [(8, 8, 0.05), (8, 20, 0.2), (60, 60, 0.1), (100, 50, 0.3)])
def test_inertia_is_at_most_5_percent_above_sklearns(backend: str, centers: int, k: int, spread: float) -> None:
    rows = blobs(centers, 2000, spread)
    peer = KMeans(k, n_init=3, random_state=0).fit(rows.numpy())
    ours = inertia(rows, Clusters(k, backend=backend).fit(rows).assignments[0])
    assert ours <= 1.05 * inertia(rows, torch.from_numpy(peer.labels_))


@pytest.mark.parametrize("backend", BACKENDS)
def test_clusters_of_digits_are_mostly_of_one_class(backend: str) -> None:
    images, labels = load_digits(return_X_y=True)
    assigned = Clusters(10, backend=backend).fit(torch.tensor(images)).assignments[0].numpy()
    purity = sum(np.bincount(labels[assigned == cluster]).max() for cluster in range(10)) / len(labels)
    assert purity > 0.7  # scikit-learn's KMeans has 0.79 on the same rows


@pytest.mark.parametrize("backend", BACKENDS)
def test_clusters_depend_on_rows_seed_and_step_alone(backend: str) -> None:
    rows = blobs(30, 600, 0.5)
    torch.manual_seed(1)
    one = Clusters(12, repeats=2, backend=backend).fit(rows)
    torch.manual_seed(2)
    other = Clusters(12, repeats=2, backend=backend).fit(rows.clone())
    assert torch.equal(one.assignments, other.assignments)
    assert one.assignments.shape == (2, 600)
    assert not torch.equal(one.assignments[0], one.assignments[1])
    for changed in (Clusters(12, 2, seed=1, backend=backend).fit(rows), Clusters(12, 2, backend=backend).fit(rows, 1)):
        assert not torch.equal(one.assignments, changed.assignments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_clusters_do_not_depend_on_the_length_of_rows(backend: str) -> None:
    rows = blobs(10, 300, 0.3)
    factors = 2.0 ** (torch.arange(300) % 20 - 10)  # exact in floating point
    clusters = Clusters(10, backend=backend)
    expected = clusters.fit(rows).assignments
    assert torch.equal(clusters.fit(rows * factors[:, None]).assignments, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_floating_dtypes_give_the_same_clusters(backend: str, dtype: torch.dtype) -> None:
    rows = blobs(6, 300, 0.05)
    expected = Clusters(6, backend=backend).fit(rows).same(torch.arange(300))
    assert torch.equal(Clusters(6, backend=backend).fit(rows.to(dtype)).same(torch.arange(300)), expected)


@pytest.mark.parametrize("tile", [1, 200, 1000])
def test_clusters_do_not_depend_on_the_tile_size(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = blobs(30, 100, 0.5).double()
    clusters = Clusters(12, repeats=2, iterations=5, backend="torch")
    expected = clusters.fit(rows).assignments
    monkeypatch.setattr(matmul, "TILE", tile)
    assert torch.equal(clusters.fit(rows).assignments, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_clusters_are_filled(backend: str) -> None:
    rows = blobs(5, 200, 0.05)
    equal = rows[:1].expand(5, -1).contiguous()  # four of the five clusters are empty at first
    run = kmeans.by_torch if backend == "torch" else kmeans.by_faiss
    assert len(run(rows, equal, 20).unique()) == 5


def test_as_many_clusters_as_rows_have_one_row_each() -> None:
    rows = blobs(7, 40, 0.5)
    assert len(Clusters(40, backend="torch").fit(rows).assignments[0].unique()) == 40


def test_initial_centroids_are_distinct_rows_of_all_blobs() -> None:
    rows = blobs(20, 2000, 0.02)
    drawn = kmeans.initial_centroids(rows, 20, (0,))
    which = (drawn @ rows[:20].T).argmax(dim=1)
    assert len(which.unique()) == 20  # uniform draws would hit about 13 of the 20 blobs
    assert len(kmeans.initial_centroids(rows[:50], 50, (0,)).unique(dim=0)) == 50


@settings(max_examples=30, deadline=None)
@given(
    points=st.lists(st.sampled_from([(0.0, 0.0), (1.0, 0.0), (-1.0, 0.0), (0.0, 2.0), (3.0, 3.0)]), min_size=1),
    k=st.integers(1, 6),
    backend=st.sampled_from(["torch", "auto"]),
)
def test_degenerate_rows_are_clustered(points: list[tuple[float, float]], k: int, backend: str) -> None:
    rows, k = torch.tensor(points), min(k, len(points))
    clusters = Clusters(k, repeats=2, backend=backend).fit(rows)
    assert clusters.assignments.shape == (2, len(rows))
    assert int(clusters.assignments.min()) >= 0
    assert int(clusters.assignments.max()) < k
    idx = torch.arange(len(rows))
    assert clusters.same(idx).diagonal().all()
    for row, members in zip(idx.tolist(), clusters.members(idx).tolist(), strict=True):
        assert row in members


def assigned(table: list[list[int]], k: int) -> Clusters:
    """Clusters with these assignments, (repeats, N)."""
    clusters = Clusters(k, repeats=len(table))
    state = {"assignments": torch.tensor(table, dtype=torch.int32), "_extra_state": torch.tensor([k, 0])}
    clusters.load_state_dict(state)
    return clusters


@settings(max_examples=80, deadline=None)
@given(data=st.data(), repeats=st.integers(1, 3), size=st.integers(1, 9))
def test_close_neighbors_equal_a_loop(data: st.DataObject, repeats: int, size: int) -> None:
    lists = st.lists(st.integers(0, 3), min_size=size, max_size=size)
    table = data.draw(st.lists(lists, min_size=repeats, max_size=repeats))
    idx = data.draw(st.lists(st.integers(0, size - 1), max_size=5))
    clusters, query = assigned(table, 4), torch.tensor(idx).long()
    close = [[j for j in range(size) if any(row[i] == row[j] for row in table)] for i in idx]
    width = max(map(len, close), default=0)
    assert clusters.members(query).tolist() == [found + [-1] * (width - len(found)) for found in close]
    assert clusters.same(query).tolist() == [[j in found for j in range(size)] for found in close]
    among = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4))
    expected = [[j in found for j in among] for found in close]
    assert clusters.same(query, torch.tensor(among)).tolist() == expected
    assert clusters.same(query, torch.tensor(among).expand(len(idx), -1)).tolist() == expected


def test_numpy_arrays_and_lists_are_clustered_and_queried_as_tensors() -> None:
    rows, idx = blobs(5, 60, 0.5), torch.tensor([3, 40])
    expected = Clusters(5, backend="torch").fit(rows)
    clusters = Clusters(np.int64(5), backend="torch").fit(rows.numpy())  # type: ignore[arg-type]
    assert torch.equal(clusters.assignments, expected.assignments)
    assert torch.equal(clusters.members(idx.numpy()), expected.members(idx))
    assert torch.equal(clusters.same([3, 40], np.array([1, 2, 3])), expected.same(idx, torch.tensor([1, 2, 3])))


def test_temporaries_are_smaller_than_all_pairs_of_rows_and_centroids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "TILE", 1 << 12)
    rows, idx = blobs(20, 2000, 0.3, dim=4), torch.tensor([5, 80, 7])
    clusters = Clusters(30, iterations=2, backend="torch")
    with Largest(rows) as largest:
        clusters.fit(rows)
        clusters.same(idx)
        clusters.members(idx)
    assert largest.elements <= 2000 * 4  # the rows; all pairs of rows and centroids would be 60,000


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_cave_uses_negatives_of_the_same_cluster_only(backend: str) -> None:
    bank = MemoryBank(30, 4, dtype=torch.float64)
    clusters, idx = Clusters(4, backend="torch").fit(bank.rows), torch.tensor([2, 17])
    z = torch.randn(2, 4, dtype=torch.float64)
    loss = hn.instance_discrimination(backend=backend, reduction="none")
    found = loss(z, bank[idx], negatives=bank.rows, negative_mask=clusters.same(idx), exclude=idx)
    for row, own in enumerate(idx.tolist()):
        unit = torch.nn.functional.normalize(z[row], dim=0)
        peers = [j for j in range(30) if clusters.assignments[0, j] == clusters.assignments[0, own] and j != own]
        scores = torch.stack([unit @ bank.rows[j] for j in [own, *peers]]) / 0.07
        assert_close(found[row], torch.logsumexp(scores, 0) - scores[0])


def test_refresh_clusters_every_n_steps() -> None:
    rows, clusters = blobs(5, 60, 0.5), Clusters(5, backend="torch")
    done = [step for step in range(12) if clusters.refresh(rows, step, every=5)]
    assert done == [0, 5, 10]
    late = Clusters(5, backend="torch")
    assert [step for step in range(3, 12) if late.refresh(rows, step, every=5)] == [3, 8]


def test_a_resumed_run_has_the_same_clusters_and_refreshes_at_the_same_steps(tmp_path: Path) -> None:
    rows = blobs(20, 80, 0.5)
    whole = Clusters(8, repeats=2, backend="torch").fit(rows, step=4)
    torch.save(torch.nn.Sequential(whole).state_dict(), tmp_path / "clusters")
    resumed = Clusters(8, repeats=2, backend="torch")
    torch.nn.Sequential(resumed).load_state_dict(torch.load(tmp_path / "clusters", weights_only=True))
    idx = torch.arange(80)
    assert torch.equal(whole.members(idx), resumed.members(idx))
    for clusters in (whole, resumed):
        assert [step for step in range(5, 16) if clusters.refresh(rows, step, every=7)] == [11]
    assert torch.equal(whole.assignments, resumed.assignments)
    assert torch.equal(whole.members(idx), resumed.members(idx))


def test_clusters_without_a_fit_are_saved_and_loaded_as_such() -> None:
    clusters = Clusters(3)
    clusters.load_state_dict(Clusters(3).state_dict())
    assert clusters.fitted_at is None


def test_loading_clusters_of_other_settings_raises() -> None:
    state = Clusters(3, repeats=2, backend="torch").fit(torch.eye(5)).state_dict()
    with pytest.raises(ValueError, match=r"k=3, but k=4 here: build Clusters\(k=3\)"):
        Clusters(4, repeats=2).load_state_dict(state)
    with pytest.raises(RuntimeError, match="size mismatch for assignments"):
        Clusters(3).load_state_dict(state)


def test_auto_is_torch_if_faiss_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kmeans, "faiss_is_installed", lambda: False)
    rows = blobs(30, 300, 0.5)
    expected = Clusters(12, backend="torch").fit(rows).assignments
    assert torch.equal(Clusters(12).fit(rows).assignments, expected)
    with pytest.raises(ImportError, match=r'pip install "hardneg\[mine\]", or choose backend="torch"'):
        Clusters(12, backend="faiss")


FITTED = Clusters(2, backend="torch").fit(torch.eye(4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Clusters(0), "k must be a whole number ≥ 1, got 0"),
        (lambda: Clusters(2, repeats=0), "repeats must be a whole number"),
        (lambda: Clusters(2, iterations=0), "iterations must be a whole number"),
        (lambda: Clusters(2, backend="fais"), "did you mean 'faiss'"),
        (lambda: Clusters(5).fit(torch.eye(4)), "k=5 clusters need at least as many rows, got 4: lower k"),
        (lambda: Clusters(2).fit(torch.eye(4)[0]), r"rows must have shape \(N, d\), got \(4,\)"),
        (lambda: Clusters(2).fit(torch.eye(4) / 0), "rows holds NaN or inf"),
        (lambda: Clusters(2).fit(torch.eye(4).long()), "rows must have a floating dtype"),
        (lambda: Clusters(2).same(torch.tensor([0])), r"no clusters yet: call fit\(bank.rows\) first"),
        (lambda: FITTED.same(torch.tensor([4])), "idx must hold indices from 0 to 3"),
        (lambda: FITTED.members(torch.tensor([[0]])), "idx must have shape"),
        (lambda: FITTED.same(torch.tensor([0]), torch.tensor([-1])), "among must hold indices from 0 to 3"),
        (lambda: FITTED.same(torch.tensor([0]), torch.tensor([[1], [2]])), r"among must have shape \(M,\) or \(1, M\)"),
        (lambda: FITTED.refresh(torch.eye(4), 1, every=0), "every must be a whole number"),
    ],
)
def test_errors_name_the_argument_and_the_fix(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as an accelerator."""
    monkeypatch.setattr(checks, "on_accelerator", lambda device: True)


@pytest.mark.parametrize("bad", [4, -1, 1 << 40])
@pytest.mark.parametrize("repeats", [1, 2])
def test_an_index_out_of_range_on_an_accelerator_has_no_close_neighbors(
    bad: int, repeats: int, accelerator: None
) -> None:
    clusters = Clusters(k=2, repeats=repeats, backend="torch").fit(torch.eye(4))
    idx = torch.tensor([0, bad])
    assert clusters.same(torch.tensor([0, 1])).any(dim=1).all()
    assert not clusters.same(idx).any()
    assert not clusters.same(torch.tensor([0]), among=idx).any()
    assert (clusters.members(idx) == -1).all()
    assert (clusters.members(torch.tensor([0, 3])) >= 0).any(dim=1).all()

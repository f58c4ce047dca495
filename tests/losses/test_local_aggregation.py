"""Local aggregation is the paper's formula, or the published code's, for any dtype, device and tiling of the bank."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory.sizes import Largest
from torch import Tensor
from torch.testing import assert_close

import hardneg as hn
from hardneg import matmul
from hardneg.losses.local_aggregation import LocalAggregation
from hardneg.memory import Clusters, MemoryBank

FORMS = ["paper", "published"]


def loop(
    z: Tensor, rows: Tensor, idx: Tensor, clusters: Clusters, temperature: float, background: int, form: str
) -> Tensor:
    """METHODS section 3, one anchor at a time; differentiable in z."""

    def unit(vector: Tensor) -> Tensor:
        return vector / vector.norm() if vector.any() else vector

    losses = []
    for anchor, own in zip(z, idx.tolist(), strict=True):
        cosines = [torch.dot(unit(anchor), unit(row)) for row in rows]
        others = sorted((j for j in range(len(rows)) if j != own), key=lambda j: (-float(cosines[j].detach()), j))
        near = [own, *others[: background - 1]]
        close = [j for j in range(len(rows)) if any(c[j] == c[own] for c in clusters.assignments.tolist())]
        terms = [torch.exp(cosine / temperature) for cosine in cosines]
        if form == "paper":
            ratio = (sum(terms[j] for j in close) / len(close)) / (sum(terms[j] for j in near) / len(near))
        else:
            ratio = sum(terms[j] for j in near if j in close) / sum(terms[j] for j in near)
        losses.append(-torch.log(torch.as_tensor(ratio)))
    return torch.stack(losses)


def case(size: int = 40, batch: int = 6, k: int = 5, repeats: int = 2) -> tuple[Tensor, Tensor, Tensor, Clusters]:
    """Embeddings, rows, own indices (one of them twice) and clusters, in float64."""
    generator = torch.Generator().manual_seed(size + batch)
    bank = MemoryBank(size, 8, dtype=torch.float64)
    idx = torch.randint(size, (batch,), generator=generator)
    idx[-1] = idx[0]
    z = 3 * torch.randn(batch, 8, generator=generator, dtype=torch.float64) + bank[idx]
    return z, bank.rows, idx, Clusters(k, repeats, backend="torch").fit(bank.rows)


def assigned(table: list[list[int]]) -> Clusters:
    """Clusters given by hand, (repeats, N)."""
    k = 1 + max(map(max, table))
    clusters = Clusters(k, repeats=len(table))
    state = {"assignments": torch.tensor(table, dtype=torch.int32), "_extra_state": torch.tensor([k, 0])}
    clusters.load_state_dict(state)
    return clusters


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("background", [1, 2, 10, 39, 40, 4096])
@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_loss_and_gradient_agree_with_a_loop(form: str, background: int, temperature: float) -> None:
    z, rows, idx, clusters = case()
    z_loss, z_loop = z.clone().requires_grad_(), z.clone().requires_grad_()
    found = LocalAggregation(temperature, background, form=form, reduction="none")(z_loss, rows, idx, clusters)
    expected = loop(z_loop, rows, idx, clusters, temperature, background, form)
    assert_close(found, expected)
    upstream = torch.linspace(-1, 2, len(z), dtype=torch.float64)
    found.backward(upstream)
    expected.backward(upstream)
    assert_close(z_loss.grad, z_loop.grad)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_gradient_agrees_with_finite_differences(form: str, reduction: str) -> None:
    z, rows, idx, clusters = case()
    loss = LocalAggregation(0.2, 12, form=form, reduction=reduction)
    assert torch.autograd.gradcheck(lambda z: loss(z, rows, idx, clusters), z.requires_grad_())


@pytest.mark.parametrize("form", FORMS)
def test_a_learnable_temperature_has_its_gradient(form: str) -> None:
    z, rows, idx, clusters = case()
    loss = LocalAggregation(hn.Learnable(0.2), 12, form=form).double()
    loss(z, rows, idx, clusters).backward()
    assert isinstance(loss.temperature, hn.Learnable)
    found = loss.temperature.log_value.grad
    step = 1e-5
    values = [LocalAggregation(0.2 * math.exp(e), 12, form=form)(z, rows, idx, clusters) for e in (-step, step)]
    assert found is not None
    assert found.item() == pytest.approx(float(values[1] - values[0]) / (2 * step), rel=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_reductions_agree(form: str) -> None:
    arguments = case()
    each = LocalAggregation(background=12, form=form, reduction="none")(*arguments)
    assert each.shape == (6,)
    assert_close(LocalAggregation(background=12, form=form)(*arguments), each.mean())
    assert_close(LocalAggregation(background=12, form=form, reduction="sum")(*arguments), each.sum())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tile", [1, 6 * 7, 6 * 33])
def test_tiling_changes_nothing(form: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    z, rows, idx, clusters = case()
    rows[20:] = rows[:20]  # every row twice: the choice among equals must not depend on tiles
    results = []
    for tiles in (matmul.TILE, tile):
        monkeypatch.setattr(matmul, "TILE", tiles)
        anchors = z.clone().requires_grad_()
        LocalAggregation(background=11, form=form)(anchors, rows, idx, clusters).backward()
        results.append(anchors.grad)
    assert_close(results[0], results[1])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_memory_is_linear_in_the_background(form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    z, rows, idx, clusters = case(size=2000, batch=50, k=200, repeats=1)
    clusters.members(idx)  # the lists are made once
    monkeypatch.setattr(matmul, "TILE", 1 << 12)
    z, rows = z.requires_grad_(), rows.to(dtype)
    with Largest(rows) as largest:
        LocalAggregation(background=100, form=form)(z, rows, idx, clusters).backward()
    # Background and a tile; all rows would be 100,000, and copies of the background 40,000.
    assert largest.elements <= 50 * 100 + (1 << 12)


@pytest.mark.parametrize("form", FORMS)
def test_of_equally_near_rows_the_first_are_the_background(form: str) -> None:
    rows = torch.eye(2, dtype=torch.float64)[torch.tensor([0, 1, 1, 1, 1])]
    z, idx = torch.tensor([[1.0, 1.0]], dtype=torch.float64), torch.tensor([3])
    clusters = assigned([[0, 0, 1, 0, 1]])
    found = LocalAggregation(0.5, 3, form=form, reduction="none")(z, rows, idx, clusters)
    # All cosines are equal, so only counts matter: B = {3, 0, 1} and C = {0, 1, 3}.
    assert_close(found, torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize("form", FORMS)
def test_a_cluster_of_one_is_instance_discrimination_against_the_background(form: str) -> None:
    z, rows, idx, _ = case()
    alone = assigned([list(range(40))])
    found = LocalAggregation(0.2, 40, form=form, reduction="none")(z, rows, idx, alone)
    peer = hn.instance_discrimination(0.2, reduction="none")(z, rows[idx], negatives=rows, exclude=idx)
    # The paper's form divides the background by its size.
    assert_close(found, peer - (math.log(40) if form == "paper" else 0))


@pytest.mark.parametrize("form", FORMS)
def test_one_cluster_with_all_rows_as_background_is_zero(form: str) -> None:
    z, rows, idx, _ = case()
    z.requires_grad_()
    loss = LocalAggregation(0.2, 4096, form=form)(z, rows, idx, assigned([[0] * 40]))
    loss.backward()
    assert_close(loss, torch.zeros_like(loss), atol=1e-12, rtol=0)
    assert_close(z.grad, torch.zeros_like(z), atol=1e-12, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_the_own_row_is_in_both_sets_at_any_distance(form: str) -> None:
    rows = torch.tensor([[-1.0, 0.0], [1.0, 0.1], [1.0, -0.1], [0.9, 0.3]], dtype=torch.float64)
    z, idx = torch.tensor([[1.0, 0.0]], dtype=torch.float64, requires_grad=True), torch.tensor([0])
    clusters = assigned([[0, 1, 1, 1]])  # without the own row, the published intersection would be empty
    found = LocalAggregation(0.3, 2, form=form, reduction="none")(z, rows, idx, clusters)
    assert_close(found, loop(z, rows, idx, clusters, 0.3, 2, form))
    assert found.isfinite().all()
    only = LocalAggregation(0.3, 1, form=form, reduction="none")(z, rows, idx, clusters)
    assert_close(only, torch.zeros_like(only))


def test_the_published_form_counts_close_rows_only_within_the_background() -> None:
    z, rows, idx, clusters = case()
    paper, published = (LocalAggregation(0.2, 5, form=form, reduction="none")(z, rows, idx, clusters) for form in FORMS)
    assert (published >= 0).all()  # a share of the background
    assert not torch.allclose(paper, published)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_is_computed_in_float32(form: str, dtype: torch.dtype) -> None:
    z, rows, idx, clusters = case()
    z, rows = z.to(dtype), rows.to(dtype)
    grads = []
    for anchors, bank in ((z.clone(), rows), (z.double(), rows.double())):
        anchors.requires_grad_()
        loss = LocalAggregation(0.2, 12, form=form)(anchors, bank, idx, clusters)
        loss.backward()
        grads.append((loss.detach().double(), anchors.grad))
    assert grads[0][0].item() == pytest.approx(grads[1][0].item(), rel=1e-5, abs=1e-6)
    assert_close(grads[0][1], grads[1][1].to(dtype))
    full = LocalAggregation(0.2, 12, form=form)(z.float(), rows, idx, clusters)
    assert full.dtype == torch.float32


@pytest.mark.parametrize("form", FORMS)
def test_low_temperatures_are_finite(form: str) -> None:
    z, rows, idx, clusters = case()
    anchors = z.float().requires_grad_()
    found = LocalAggregation(1e-3, 12, form=form, reduction="none")(anchors, rows.float(), idx, clusters)
    found.sum().backward()
    assert_close(
        found.double(),
        LocalAggregation(1e-3, 12, form=form, reduction="none")(z, rows, idx, clusters),
        rtol=1e-3,
        atol=1e-3,
    )
    assert anchors.grad is not None
    assert anchors.grad.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_autocast_does_not_change_the_loss(form: str) -> None:
    z, rows, idx, clusters = case()
    loss = LocalAggregation(0.2, 12, form=form)
    expected = loss(z.float(), rows.float(), idx, clusters)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(loss(z.float(), rows.float(), idx, clusters), expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_zero_embedding_has_the_loss_of_equal_scores_and_no_gradient(form: str) -> None:
    _, rows, idx, clusters = case()
    z = torch.zeros(6, 8, dtype=torch.float64, requires_grad=True)
    found = LocalAggregation(0.2, 40, form=form, reduction="none")(z, rows, idx, clusters)
    found.sum().backward()
    share = clusters.same(idx).double().mean(dim=1)
    assert_close(found, torch.zeros(6).double() if form == "paper" else -share.log())
    assert z.grad is not None
    assert not z.grad.any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_updating_the_bank_between_loss_and_backward_raises(form: str, dtype: torch.dtype) -> None:
    bank, idx = MemoryBank(20, 4, dtype=dtype), torch.tensor([3, 9])
    clusters = Clusters(3, backend="torch").fit(bank.rows)
    z = torch.randn(2, 4, requires_grad=True)
    loss = LocalAggregation(form=form)(z, bank.rows, idx, clusters)
    bank.update(idx, z)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_training_with_it_contracts_the_clusters() -> None:
    rows = torch.nn.functional.normalize(torch.randn(60, 8, generator=torch.Generator().manual_seed(0)))
    clusters, idx = assigned([[j % 3 for j in range(60)]]), torch.arange(60)
    bank = MemoryBank(60, 8, momentum=0.5)
    bank.rows.copy_(rows)
    z = rows.clone().requires_grad_()
    optimizer = torch.optim.SGD([z], lr=3.0)
    loss = LocalAggregation(0.3, 60)

    def spread() -> float:
        unit = torch.nn.functional.normalize(z.detach())
        return sum(float(1 - unit[c::3].mean(dim=0).square().sum()) for c in range(3))

    before = spread()
    for _ in range(100):
        optimizer.zero_grad()
        loss(z, bank.rows, idx, clusters).backward()
        optimizer.step()
        bank.update(idx, z)
    assert spread() < 0.5 * before


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("on_host", [False, True])
def test_an_accelerator_agrees_with_the_cpu(form: str, on_host: bool) -> None:
    z, rows, idx, clusters = case()
    loss = LocalAggregation(0.2, 12, form=form)
    bank = MemoryBank(40, 8, dtype=torch.float64, on_host=on_host)
    grads = []
    for device in ("cpu", "cuda"):
        bank, clusters, anchors = bank.to(device), clusters.to(device), z.detach().to(device).requires_grad_()
        loss(anchors, bank.rows, idx.to(device), clusters).backward()
        assert anchors.grad is not None
        grads.append(anchors.grad.cpu())
        bank.update(idx.to(device), torch.zeros_like(anchors))
        assert_close(bank[idx.to(device)].cpu(), rows[idx])
    assert_close(grads[0], grads[1])


def test_a_scheduled_temperature_moves_and_is_saved() -> None:
    arguments = case()
    loss = LocalAggregation(hn.Linear(0.5, 0.1), background=12)
    assert_close(loss(*arguments), LocalAggregation(0.5, 12)(*arguments))
    loss.set_progress(1.0)
    assert_close(loss(*arguments), LocalAggregation(0.1, 12)(*arguments))
    resumed = LocalAggregation(hn.Linear(0.5, 0.1), background=12)
    resumed.load_state_dict(copy.deepcopy(loss.state_dict()))
    assert_close(resumed(*arguments), loss(*arguments))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.integers(1, 7), background=st.integers(1, 9), form=st.sampled_from(FORMS))
def test_degenerate_banks_agree_with_the_loop(data: st.DataObject, size: int, background: int, form: str) -> None:
    point = st.sampled_from([(0.0, 0.0), (1.0, 0.0), (-2.0, 0.0), (0.0, 1.0), (0.0, -1e-20)])
    points = data.draw(st.lists(point, min_size=size, max_size=size))
    table = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=size, max_size=size), min_size=1, max_size=2))
    idx = torch.tensor(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=3)))
    z = torch.tensor(data.draw(st.lists(point, min_size=len(idx), max_size=len(idx))), dtype=torch.float64)
    rows, clusters = torch.tensor(points, dtype=torch.float64), assigned(table)
    z.requires_grad_()
    found = LocalAggregation(0.5, background, form=form, reduction="none")(z, rows, idx, clusters)
    assert_close(found, loop(z.detach(), rows, idx, clusters, 0.5, background, form))
    found.sum().backward()
    assert z.grad is not None
    assert z.grad.isfinite().all()


Z, ROWS, IDX = torch.eye(4)[:2], torch.eye(4), torch.tensor([0, 1])
FITTED = Clusters(2, backend="torch").fit(ROWS)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LocalAggregation(0), "temperature must be > 0"),
        (lambda: LocalAggregation(hn.Adaptive()), "temperature takes no Adaptive schedule"),
        (lambda: LocalAggregation(background=0), "background must be a whole number ≥ 1, got 0"),
        (lambda: LocalAggregation(form="publishd"), "did you mean 'published'"),
        (lambda: LocalAggregation(reduction="avg"), "reduction='avg'"),
        (lambda: LocalAggregation().set_progress(2), r"fraction must be in \[0, 1\], got 2"),
        (lambda: LocalAggregation()(Z[0], ROWS, IDX, FITTED), r"z must have shape \(B, d\)"),
        (lambda: LocalAggregation()(Z[:0], ROWS, IDX[:0], FITTED), r"z must have shape \(B, d\)"),
        (lambda: LocalAggregation()(Z, ROWS[:, :3], IDX, FITTED), r"rows must have shape \(N, 4\), got \(4, 3\)"),
        (lambda: LocalAggregation()(Z, ROWS[:3], IDX, FITTED), "clusters are of 4 rows, but there are 3: call fit"),
        (lambda: LocalAggregation()(Z, ROWS, IDX, Clusters(2)), "clusters are of 0 rows, but there are 4: call fit"),
        (lambda: LocalAggregation()(Z, ROWS, IDX, None), "clusters must be a Clusters, got NoneType"),
        (lambda: LocalAggregation()(Z, ROWS, IDX[:1], FITTED), r"idx must have shape \(2,\)"),
        (lambda: LocalAggregation()(Z, ROWS, IDX + 3, FITTED), "idx must hold indices from 0 to 3"),
        (lambda: LocalAggregation()(Z / 0, ROWS, IDX, FITTED), "z holds NaN or inf"),
        (lambda: LocalAggregation()(Z, ROWS / 0, IDX, FITTED), "rows holds NaN or inf"),
        (lambda: LocalAggregation()(Z, ROWS.to("meta"), IDX, FITTED), "rows are on meta, but z on cpu"),
    ],
)
def test_invalid_arguments_raise_with_the_fix(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()

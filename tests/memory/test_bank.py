"""Updates of the bank equal a loop over the batch, in any dtype, and change no other row."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory.sizes import Largest
from torch import Tensor
from torch.testing import assert_close

import hardneg as hn
from hardneg import checks
from hardneg.memory import MemoryBank


def loop(rows: Tensor, idx: list[int], z: Tensor, momentum: float) -> Tensor:
    """One instance after another in float64; of several occurrences only the last counts."""
    rows, z = rows.double().clone(), z.double()
    for instance, embedding in {i: z[b] for b, i in enumerate(idx)}.items():
        moved = momentum * rows[instance] + (1 - momentum) * embedding / embedding.norm()
        rows[instance] = moved / moved.norm()
    return rows


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.99, 1.0])
def test_updates_equal_the_loop(momentum: float) -> None:
    bank = MemoryBank(20, 6, momentum, dtype=torch.float64)
    for idx in ([3, 14, 15], [3, 3, 9, 3, 14], list(range(20)), [7]):
        z = 5 * torch.randn(len(idx), 6, dtype=torch.float64)
        expected = loop(bank.rows, idx, z, momentum)
        bank.update(torch.tensor(idx), z)
        assert_close(bank.rows, expected)


@settings(max_examples=60, deadline=None)
@given(idx=st.lists(st.integers(0, 4), max_size=12), seed=st.integers(0, 99))
def test_of_several_occurrences_of_an_instance_the_last_is_used(idx: list[int], seed: int) -> None:
    z = torch.randn(len(idx), 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    bank = MemoryBank(5, 3, dtype=torch.float64)
    expected = loop(bank.rows, idx, z, 0.5)
    bank.update(torch.tensor(idx).long(), z)
    assert_close(bank.rows, expected)


def test_an_update_changes_no_other_row() -> None:
    bank = MemoryBank(50, 8, dtype=torch.float16)
    before = bank.rows.clone()
    bank.update(torch.tensor([3, 40]), torch.randn(2, 8))
    changed = (bank.rows != before).any(dim=1).nonzero()[:, 0].tolist()
    assert changed == [3, 40]


def test_temporaries_of_lookup_and_update_have_the_size_of_the_batch() -> None:
    bank, idx, z = MemoryBank(5000, 8), torch.tensor([3, 40, 3]), torch.randn(3, 8)
    with Largest(bank.rows) as largest:
        _ = bank[idx]
        bank.update(idx, z)
    assert 0 < largest.elements <= 3 * 8


def test_momentum_zero_replaces_rows_and_one_keeps_them() -> None:
    z, idx = torch.randn(4, 8), torch.tensor([0, 2, 4, 6])
    replaced, frozen = MemoryBank(8, 8, momentum=0), MemoryBank(8, 8, momentum=1)
    before = frozen.rows.clone()
    replaced.update(idx, z)
    frozen.update(idx, z)
    assert_close(replaced[idx], torch.nn.functional.normalize(z))
    assert_close(frozen.rows, before)


def test_initial_rows_are_unit_vectors_that_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    one = MemoryBank(3000, 16)
    torch.manual_seed(2)
    assert torch.equal(one.rows, MemoryBank(3000, 16).rows)
    assert not torch.equal(one.rows, MemoryBank(3000, 16, seed=1).rows)
    assert_close(one.rows.norm(dim=1), torch.ones(3000))
    # Uniform on the sphere: mean 0, and covariance 1/d of the identity.
    assert_close(one.rows.mean(dim=0), torch.zeros(16), atol=4 / (3000 * 16) ** 0.5, rtol=0)
    assert_close(one.rows.T @ one.rows / 3000, torch.eye(16) / 16, atol=0.01, rtol=0)


def test_initial_rows_of_a_large_bank_differ_between_blocks() -> None:
    rows = MemoryBank((1 << 16) + 5, 2).rows
    assert not torch.equal(rows[:5], rows[1 << 16 :])


def test_lookup_copies_and_takes_any_shape() -> None:
    bank = MemoryBank(10, 4)
    idx = torch.tensor([[1, 2, 3], [3, 2, 1]])
    found = bank[idx]
    assert found.shape == (2, 3, 4)
    assert torch.equal(found[0].flip(0), found[1])
    before = bank.rows.clone()
    found.zero_()
    assert torch.equal(bank.rows, before)
    assert bank[torch.tensor(3)].shape == (4,)
    assert bank[idx[:0]].shape == (0, 3, 4)


@pytest.mark.parametrize("convert", [Tensor.numpy, Tensor.tolist])
def test_numpy_arrays_and_lists_are_looked_up_and_updated_as_tensors(convert: Any) -> None:
    expected, bank = MemoryBank(10, 4, 0.25), MemoryBank(np.int64(10), torch.tensor(4), np.float32(0.25))  # type: ignore[arg-type]
    idx, z = torch.tensor([1, 5]), torch.randn(2, 4)
    expected.update(idx, z)
    bank.update(convert(idx), convert(z))
    assert torch.equal(bank.rows, expected.rows)
    assert torch.equal(bank[convert(idx)], expected[idx])


def test_half_precision_rows_are_computed_in_float32() -> None:
    small, exact = MemoryBank(10, 8, dtype=torch.float16), MemoryBank(10, 8, dtype=torch.float64)
    exact.rows.copy_(small.rows)
    idx, z = torch.tensor([1, 5]), (1000 * torch.randn(2, 8)).half()  # the squares overflow float16
    for bank in (small, exact):
        bank.update(idx, z)
    assert small[idx].dtype == torch.float16
    assert_close(small.rows, exact.rows.half())


def test_rows_on_the_host_are_not_moved() -> None:
    bank = MemoryBank(10, 4, on_host=True)
    before = bank.rows
    moved = torch.nn.ModuleDict({"bank": bank}).to("meta").double()["bank"]
    assert moved.rows is before
    assert MemoryBank(10, 4).double().rows.dtype == torch.float64


def test_a_row_that_would_become_zero_is_not_changed() -> None:
    bank = MemoryBank(3, 4, dtype=torch.float64)
    before = bank.rows.clone()
    bank.update(torch.tensor([0, 1]), torch.stack([-before[0], before[1]]))
    assert_close(bank.rows, before)
    replacing = MemoryBank(3, 4, momentum=0)
    before = replacing.rows.clone()
    replacing.update(torch.tensor([2]), torch.zeros(1, 4))
    assert torch.equal(replacing.rows, before)


def test_rows_updated_with_embeddings_that_require_gradients_require_none() -> None:
    bank = MemoryBank(5, 4)
    bank.update(torch.tensor([1]), torch.randn(1, 4, requires_grad=True))
    assert not bank.rows.requires_grad


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_updating_between_loss_and_backward_raises(backend: str, dtype: torch.dtype) -> None:
    bank, idx = MemoryBank(20, 4, dtype=dtype), torch.tensor([3, 9])
    z = torch.randn(2, 4, requires_grad=True)
    loss = hn.instance_discrimination(backend=backend)(z, bank[idx], negatives=bank.rows, exclude=idx)
    bank.update(idx, z)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation .* bank.update\(\) after backward"):
        loss.backward()


def test_a_bank_as_negatives_is_its_rows() -> None:
    bank, idx, z = MemoryBank(20, 4), torch.tensor([3, 9]), torch.randn(2, 4)
    loss = hn.instance_discrimination(reduction="none")
    expected = loss(z, bank[idx], negatives=bank.rows, exclude=idx)
    assert torch.equal(loss(z, bank[idx], negatives=bank, exclude=idx), expected)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_the_row_of_the_instance_is_its_positive_and_not_a_negative(backend: str) -> None:
    bank, idx = MemoryBank(20, 4, dtype=torch.float64), torch.tensor([3, 9])
    z = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    loss = hn.instance_discrimination(backend=backend, reduction="none")
    found = loss(z, bank[idx], negatives=bank.rows, exclude=idx)
    scores = torch.nn.functional.normalize(z) @ bank.rows.T / 0.07
    assert_close(found, torch.nn.functional.cross_entropy(scores, idx, reduction="none"))
    found.sum().backward()
    bank.update(idx, z)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_resumed_bank_continues_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = MemoryBank(10, 4, dtype=dtype)
    whole.update(torch.tensor([1, 2, 1]), torch.randn(3, 4))
    torch.save(whole.state_dict(), tmp_path / "bank")
    resumed = MemoryBank(10, 4, dtype=dtype, seed=5)
    resumed.load_state_dict(torch.load(tmp_path / "bank", weights_only=True))
    z = torch.randn(3, 4)
    for bank in (whole, resumed):
        bank.update(torch.tensor([2, 7, 2]), z)
    assert torch.equal(whole.rows, resumed.rows)


def test_loading_a_bank_of_another_size_raises_an_error_that_names_the_fix() -> None:
    state = torch.nn.Sequential(MemoryBank(8, 2)).state_dict()
    with pytest.raises(RuntimeError, match=r"the state of 0 holds size=8, dim=2, .*MemoryBank\(size=8, dim=2\)"):
        torch.nn.Sequential(MemoryBank(9, 2)).load_state_dict(state)


Z = torch.eye(4)[:2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MemoryBank(0, 4), "size must be a whole number ≥ 1, got 0"),
        (lambda: MemoryBank(4, 4, momentum=1.5), "momentum must be ≥ 0 and ≤ 1, got 1.5"),
        (lambda: MemoryBank(4, 4, momentum=hn.Linear(0, 1)), "momentum must be a number"),
        (lambda: MemoryBank(4, 4, dtype=torch.long), "dtype must be floating"),
        (lambda: MemoryBank(4, 4)[torch.tensor([4])], "idx must hold indices from 0 to 3"),
        (lambda: MemoryBank(4, 4)[torch.tensor([-1])], "idx must hold indices from 0 to 3"),
        (lambda: MemoryBank(4, 4)[torch.tensor([True])], "idx must have an integer dtype"),
        (lambda: MemoryBank(4, 4)[2], "idx must be a tensor, a numpy array or a list of numbers, got int"),
        (lambda: MemoryBank(4, 4).update(torch.tensor([0]), Z), r"idx must have shape \(2,\)"),
        (lambda: MemoryBank(4, 4).update(torch.tensor([0, 4]), Z), "idx must hold indices from 0 to 3"),
        (lambda: MemoryBank(4, 4).update(torch.tensor([0, 1]), Z[:, :3]), r"z must have shape \(B, 4\), got \(2, 3\)"),
        (lambda: MemoryBank(4, 4).update(torch.tensor([0, 1]), Z / 0), "z holds NaN or inf"),
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
def test_an_index_out_of_range_on_an_accelerator_gives_nan_rows_and_no_update(bad: int, accelerator: None) -> None:
    bank = MemoryBank(4, 4, momentum=0.5)
    before, idx = bank.rows.clone(), torch.tensor([3, bad, 0])
    assert bank[idx].isnan().all()
    assert bank[idx].shape == (3, 4)
    bank.update(idx, torch.randn(3, 4))
    assert torch.equal(bank.rows, before)
    assert torch.equal(bank[torch.tensor([3, 0])], before[[3, 0]])


def test_a_nan_embedding_on_an_accelerator_makes_its_own_row_nan(accelerator: None) -> None:
    bank, z = MemoryBank(4, 4), torch.randn(2, 4)
    z[1, 2] = torch.inf
    bank.update(torch.tensor([0, 2]), z)
    assert bank.rows.isnan().all(dim=1).tolist() == [False, False, True, False]
    assert bank.rows[[0, 1, 3]].isfinite().all()
    loss = hn.instance_discrimination()(torch.randn(1, 4), bank[[0]], negatives=bank.rows, exclude=torch.tensor([0]))
    assert loss.isnan()


def test_updates_on_an_accelerator_are_those_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for on_accelerator in (False, True):
        monkeypatch.setattr(checks, "on_accelerator", lambda device, answer=on_accelerator: answer)
        bank = MemoryBank(5, 4)
        bank.update(torch.tensor([3, 0, 3]), torch.arange(12.0).reshape(3, 4))
        found.append(bank.rows)
    assert torch.equal(*found)

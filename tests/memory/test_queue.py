"""The queue equals a deque of unit vectors for all batch sizes, and after it is saved and loaded."""

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

import hardneg as hn
from hardneg import checks
from hardneg.memory import Queue


def direction(number: int) -> Tensor:
    """A unit vector that identifies a key."""
    angle = torch.tensor(0.01 * number, dtype=torch.float64)
    return torch.stack([angle.cos(), angle.sin()]).float()


def fill(queue: Queue, batches: list[int], start: int = 0) -> int:
    """Enqueue keys numbered from ``start`` in batches of these sizes; returns the next number."""
    for batch in batches:
        numbers = range(start, start + batch)
        keys = torch.stack([direction(n) for n in numbers]) if batch else torch.zeros(0, 2)
        queue.enqueue(3 * keys, labels=torch.tensor(list(numbers)).long() % 5, ids=torch.tensor(list(numbers)).long())
        start += batch
    return start


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 12), batches=st.lists(st.integers(0, 30), max_size=6))
def test_queue_keeps_every_key_when_the_batch_does_not_divide_it(size: int, batches: list[int]) -> None:
    queue = Queue(size, 2)
    number = fill(queue, batches)
    expected = deque(range(number), maxlen=size)
    assert sorted(queue.ids.tolist()) == list(expected)
    assert len(queue) == len(queue.keys) == len(queue.labels) == len(expected)
    # As for single keys, key number n is in slot n mod size.
    for slot, key, label in zip(queue.ids.tolist(), queue.keys, queue.labels.tolist(), strict=True):
        assert queue.ids.tolist().index(slot) == slot % size
        assert label == slot % 5
        assert_close(key, direction(slot))


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 9), batches=st.lists(st.integers(0, 20), max_size=5))
def test_batches_and_single_keys_give_the_same_queue(size: int, batches: list[int]) -> None:
    batched, single = Queue(size, 2), Queue(size, 2)
    fill(batched, batches)
    fill(single, [1] * sum(batches))
    for name, tensor in batched.state_dict().items():
        assert torch.equal(tensor, single.state_dict()[name]), name


def test_a_half_filled_queue_has_only_the_enqueued_keys() -> None:
    queue = Queue(8, 2)
    assert queue.keys.shape == (0, 2)
    fill(queue, [3])
    assert queue.keys.shape == (3, 2)
    assert queue.ids.tolist() == [0, 1, 2]
    z = torch.randn(4, 2)
    assert_close(hn.moco()(z, z, negatives=queue.keys), hn.moco()(z, z, negatives=queue.keys.clone()))


def test_an_empty_queue_gives_no_loss_and_no_gradient() -> None:
    z = torch.randn(4, 2, requires_grad=True)
    loss = hn.moco()(z, z.detach(), negatives=Queue(8, 2).keys)
    loss.backward()
    assert loss.item() == 0
    assert z.grad is not None
    assert not z.grad.any()


def test_keys_labels_and_ids_are_views() -> None:
    queue = Queue(8, 2)
    fill(queue, [5])
    for view, store in (
        (queue.keys, queue.key_store),
        (queue.labels, queue.label_store),
        (queue.ids, queue.id_store),
    ):
        assert view.data_ptr() == store.data_ptr()


def test_keys_are_unit_vectors_without_gradient() -> None:
    keys = (1e-3 * torch.randn(5, 4)).requires_grad_()
    queue = Queue(8, 4)
    queue.enqueue(keys)
    assert not queue.keys.requires_grad
    assert_close(queue.keys, torch.nn.functional.normalize(keys.detach()))


def test_a_zero_key_stays_zero() -> None:
    queue = Queue(2, 3)
    queue.enqueue(torch.zeros(1, 3))
    assert not queue.keys.any()


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("given_as", [torch.float16, torch.float32, torch.float64])
def test_keys_are_normalized_before_they_are_rounded(stored: torch.dtype, given_as: torch.dtype) -> None:
    keys = torch.randn(6, 16).to(given_as) * 500  # the squares overflow float16
    queue = Queue(8, 16, dtype=stored)
    queue.enqueue(keys)
    assert queue.keys.dtype == stored
    precise = torch.promote_types(torch.float32, given_as)
    assert_close(queue.keys, torch.nn.functional.normalize(keys.to(precise)).to(stored))


def test_labels_and_ids_are_unknown_unless_given() -> None:
    queue = Queue(4, 2)
    queue.enqueue(torch.eye(2), labels=torch.tensor([3, -1]))
    queue.enqueue(torch.eye(2), ids=torch.tensor([5, 6]).int())
    assert queue.labels.tolist() == [3, -1, -1, -1]
    assert queue.ids.tolist() == [-1, -1, 5, 6]


@pytest.mark.parametrize("convert", [Tensor.numpy, Tensor.tolist])
def test_numpy_arrays_and_lists_are_enqueued_as_tensors(convert: Any) -> None:
    keys, labels, ids = torch.randn(3, 2), torch.tensor([3, -1, 4]), torch.tensor([5, 6, 7])
    expected, queue = Queue(4, 2), Queue(np.int64(4), np.int32(2))  # type: ignore[arg-type]
    expected.enqueue(keys, labels, ids)
    queue.enqueue(convert(keys), convert(labels), convert(ids))
    for name, tensor in expected.state_dict().items():
        assert torch.equal(queue.state_dict()[name], tensor), name
    assert torch.equal(queue.same_instance(convert(ids[:2])), expected.same_instance(ids[:2]))


def test_an_overwritten_key_loses_its_label_and_id() -> None:
    queue = Queue(2, 2)
    queue.enqueue(torch.eye(2), labels=torch.tensor([3, 4]), ids=torch.tensor([5, 6]))
    queue.enqueue(torch.eye(2)[:1])
    assert queue.labels.tolist() == [-1, 4]
    assert queue.ids.tolist() == [-1, 6]


@settings(max_examples=50, deadline=None)
@given(stored=st.lists(st.integers(-1, 4), max_size=10), queried=st.lists(st.integers(-1, 4), max_size=5))
def test_same_instance_equals_a_loop(stored: list[int], queried: list[int]) -> None:
    queue = Queue(6, 2)
    queue.enqueue(torch.ones(len(stored), 2), ids=torch.tensor(stored).long())
    mask = queue.same_instance(torch.tensor(queried).long())
    expected = [[own == other != -1 for other in queue.ids.tolist()] for own in queried]
    assert mask.shape == (len(queried), len(queue))
    assert mask.tolist() == expected


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_same_instance_keys_can_be_excluded(backend: str) -> None:
    queue = Queue(12, 4)
    queue.enqueue(torch.randn(12, 4), ids=torch.arange(12) % 3)
    z, ids = torch.randn(2, 4), torch.tensor([0, 2])
    loss = hn.moco(backend=backend, reduction="none")
    found = loss(z, -z, negatives=queue.keys, negative_mask=~queue.same_instance(ids))
    for row, instance in enumerate(ids.tolist()):
        others = queue.keys[queue.ids != instance]
        assert_close(found[row : row + 1], loss(z[row : row + 1], -z[row : row + 1], negatives=others))


@pytest.mark.parametrize("batches", [[3], [8], [5, 6], [30]])
@pytest.mark.parametrize("file_format", ["torch", "safetensors"])
def test_a_resumed_queue_continues_exactly(batches: list[int], file_format: str, tmp_path: Path) -> None:
    whole, first = Queue(8, 2), Queue(8, 2)
    number = fill(whole, batches)
    fill(first, batches)
    assert all(isinstance(entry, Tensor) for entry in first.state_dict().values())
    if file_format == "torch":
        torch.save(first.state_dict(), tmp_path / "queue")
        state = torch.load(tmp_path / "queue", weights_only=True)
    else:
        save_file(first.state_dict(), tmp_path / "queue")
        state = load_file(tmp_path / "queue")
    resumed = Queue(8, 2)
    resumed.load_state_dict(state)
    for queue in (whole, resumed):
        fill(queue, [3, 4], start=number)
    assert whole.ids.tolist() == resumed.ids.tolist()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_loading_a_queue_of_another_size_raises_an_error_that_names_the_fix() -> None:
    model = torch.nn.ModuleDict({"queue": Queue(8, 2)})
    with pytest.raises(RuntimeError, match=r"the state of queue holds size=8, dim=2, .* build it with Queue\(size=8"):
        torch.nn.ModuleDict({"queue": Queue(6, 2)}).load_state_dict(model.state_dict())


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("filled", [4, 8])
def test_enqueueing_between_loss_and_backward_raises(backend: str, dtype: torch.dtype, filled: int) -> None:
    queue = Queue(8, 4, dtype=dtype)
    queue.enqueue(torch.randn(filled, 4))
    z = torch.randn(3, 4, requires_grad=True)
    loss = hn.moco(backend=backend)(z, torch.randn(3, 4), negatives=queue.keys)
    queue.enqueue(torch.randn(1, 4))
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation .* call queue.enqueue\(\) and .* after"):
        loss.backward()


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_enqueueing_after_backward_raises_no_error(backend: str) -> None:
    queue = Queue(8, 4)
    for _ in range(4):
        z = torch.randn(3, 4, requires_grad=True)
        hn.moco(backend=backend)(z, torch.randn(3, 4), negatives=queue.keys).backward()
        queue.enqueue(torch.randn(3, 4))
    assert len(queue) == 8


@pytest.mark.parametrize("preset", [hn.moco, hn.simclr, hn.ring_nce])
def test_a_queue_as_negatives_is_its_keys(preset: Any) -> None:
    queue, loss = Queue(12, 4), preset(reduction="none")
    queue.enqueue(torch.randn(9, 4), labels=torch.arange(9), ids=torch.arange(9))
    z1, z2 = torch.randn(2, 5, 4)
    expected = loss(z1, z2, negatives=queue.keys)
    assert torch.equal(loss(z1, z2, negatives=queue), expected)
    assert torch.equal(loss(z1, z2, negatives={"past": queue}), loss(z1, z2, negatives={"past": queue.keys}))


@pytest.mark.parametrize("by_name", [False, True])
def test_the_labels_and_ids_of_a_queue_are_used_where_the_call_has_them(by_name: bool) -> None:
    queue, loss = Queue(12, 4), hn.supcon(reduction="none")
    queue.enqueue(torch.randn(9, 4), labels=torch.arange(9) % 4, ids=torch.arange(9))
    z, labels, ids = torch.randn(5, 4), torch.arange(5) % 3, torch.arange(5)

    def given(tensor: Any) -> Any:
        return {"past": tensor} if by_name else tensor

    keys, stored = given(queue.keys), {"negative_labels": given(queue.labels)}
    expected = loss(z, labels=labels, negatives=keys, **stored)
    assert torch.equal(loss(z, labels=labels, negatives=given(queue)), expected)
    with_ids = loss(z, labels=labels, negatives=keys, **stored, ids=ids, negative_ids=given(queue.ids))
    assert torch.equal(loss(z, labels=labels, negatives=given(queue), ids=ids), with_ids)
    assert not torch.equal(with_ids, expected)
    unknown = given(torch.full((9,), -1))
    expected = loss(z, labels=labels, negatives=keys, negative_labels=unknown)
    assert torch.equal(loss(z, labels=labels, negatives=given(queue), negative_labels=unknown), expected)


def test_a_queue_is_taken_beside_tensors_and_banks_under_their_names() -> None:
    queue, bank, mined = Queue(12, 4), hn.MemoryBank(7, 4), torch.randn(5, 2, 4)
    queue.enqueue(torch.randn(9, 4))
    z1, z2 = torch.randn(2, 5, 4)
    loss = hn.InfoNCE(hardening={"queue": hn.Exponential(1.0), "bank": hn.Ring(0.2, 0.9)})
    expected = loss(z1, z2, negatives={"mined": mined, "queue": queue.keys, "bank": bank.rows})
    assert torch.equal(loss(z1, z2, negatives={"mined": mined, "queue": queue, "bank": bank}), expected)


def test_a_compiled_loss_takes_a_queue_without_a_graph_break() -> None:
    queue, loss = Queue(12, 4), hn.moco()
    queue.enqueue(torch.randn(9, 4))
    z1, z2 = torch.randn(2, 5, 4)
    compiled = torch.compile(lambda a, b: loss(a, b, negatives=queue), fullgraph=True, backend="eager")
    assert_close(compiled(z1, z2), loss(z1, z2, negatives=queue.keys))


KEYS = torch.eye(2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Queue(0, 2), "size must be a whole number ≥ 1, got 0"),
        (lambda: Queue(4, 2.0), "dim must be a whole number ≥ 1, got 2.0"),
        (lambda: Queue(4, 2, dtype=torch.int8), "dtype must be floating, got torch.int8"),
        (lambda: Queue(4, 2).enqueue(torch.eye(3)), r"keys must have shape \(B, 2\), got \(3, 3\)"),
        (lambda: Queue(4, 2).enqueue(KEYS.long()), "keys must have a floating dtype"),
        (lambda: Queue(4, 2).enqueue(KEYS / 0), "keys holds NaN or inf"),
        (lambda: Queue(4, 2).enqueue(KEYS, labels=torch.tensor([1])), r"labels must have shape \(2,\)"),
        (lambda: Queue(4, 2).enqueue(KEYS, ids=torch.tensor([1, -2])), "ids must be ≥ −1"),
        (lambda: Queue(4, 2).enqueue(KEYS, ids=torch.tensor([1.0, 2.0])), "ids must have an integer dtype"),
        (lambda: Queue(4, 2).same_instance("1"), "ids must be a tensor, a numpy array or a list of numbers, got str"),
        (lambda: Queue(4, 2).same_instance(torch.ones(1, 1).long()), "ids must have shape"),
    ],
)
def test_errors_name_the_argument_and_the_fix(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_batch_that_raises_an_error_leaves_the_queue_unchanged() -> None:
    queue = Queue(4, 2)
    fill(queue, [3])
    before = {name: tensor.clone() for name, tensor in queue.state_dict().items()}
    with pytest.raises(ValueError, match="ids must be"):
        queue.enqueue(KEYS, ids=torch.tensor([1, -2]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in queue.state_dict().items())


def test_a_queue_is_true_even_when_empty() -> None:
    assert Queue(4, 2)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as an accelerator."""
    monkeypatch.setattr(checks, "on_accelerator", lambda device: True)


def test_nan_keys_and_bad_labels_on_an_accelerator_make_the_loss_nan(accelerator: None) -> None:
    keys, labels = torch.randn(3, 2), torch.tensor([0, 1, 2])
    spoiled = keys.clone()
    spoiled[1, 0] = torch.nan
    loss = hn.InfoNCE(in_batch=None, supervision="negatives")
    for stored, stored_labels, is_nan in (
        (keys, labels, False),
        (spoiled, labels, True),
        (keys, labels - 2, True),
    ):
        queue = Queue(4, 2)
        queue.enqueue(stored, labels=stored_labels)
        arguments = {"negatives": queue.keys, "negative_labels": queue.labels, "labels": torch.tensor([5])}
        assert bool(loss(torch.ones(1, 2), torch.ones(1, 2), **arguments).isnan()) is is_nan

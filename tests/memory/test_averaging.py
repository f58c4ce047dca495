"""A memory is not averaged with the weights of its model (EMA, SWA), and is saved and moved as buffers are."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from hardneg.memory import Clusters, MemoryBank, Queue


class Model(nn.Module):
    """An encoder with batch-norm, and all memories."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.queue, self.bank = Queue(4, 2), MemoryBank(5, 2)
        self.clusters = Clusters(2, backend="torch")

    def train_step(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        z = self.encoder(torch.randn(3, 2, generator=generator)).detach()
        with torch.no_grad():
            self.encoder[0].weight += 1
        self.queue.enqueue(z, labels=torch.arange(3) + step, ids=100 * step + torch.arange(3))
        self.bank.update(torch.tensor([step % 5, (step + 2) % 5, (step + 4) % 5]), z)
        self.clusters.fit(self.bank.rows, step)

    def memory(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.state_dict().items() if not name.startswith("encoder")}


AVERAGES: dict[str, dict[str, Any]] = {
    "swa": {},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "ema, one tensor at a time": {"avg_fn": get_ema_avg_fn(0.9)},
}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("use_buffers", [True, False])
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_averaging_a_model_leaves_its_memory_as_it_was_copied(
    average: str, use_buffers: bool, steps_before: int
) -> None:
    model = Model()
    for step in range(steps_before):
        model.train_step(step)
    averaged = AveragedModel(model, use_buffers=use_buffers, **AVERAGES[average])
    before = model.memory()
    weights = []
    for step in range(steps_before, steps_before + 5):
        model.train_step(step)
        averaged.update_parameters(model)
        weights.append(model.encoder[0].weight.detach().clone())
    assert_equal(averaged.module.memory(), before)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in model.memory().items())
    if average == "swa":
        torch.testing.assert_close(averaged.module.encoder[0].weight, torch.stack(weights).mean(dim=0))


def test_the_state_of_an_averaged_model_is_saved_and_loaded() -> None:
    model = Model()
    averaged = AveragedModel(model, use_buffers=True, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(4):
        model.train_step(step)
        averaged.update_parameters(model)
    resumed = AveragedModel(Model(), use_buffers=True, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    resumed.load_state_dict(averaged.state_dict())
    model.train_step(4)
    for one in (averaged, resumed):
        one.update_parameters(model)
        one.module.train_step(5)  # the memory of a copy can be used on its own
    assert_equal(averaged.state_dict(), resumed.state_dict())


def test_a_deep_copy_has_its_own_memory() -> None:
    model = Model()
    model.train_step(0)
    other = copy.deepcopy(model)
    before = other.memory()
    model.train_step(1)
    assert_equal(other.memory(), before)
    other.load_state_dict(model.state_dict())
    assert_equal(other.memory(), model.memory())


def test_memories_are_moved_and_converted_with_the_model_and_listed_in_no_buffers() -> None:
    model = Model()
    model.train_step(0)
    assert all(name.startswith("encoder") for name, _ in model.named_buffers())
    model.double()
    assert model.queue.keys.dtype == model.bank.rows.dtype == torch.float64
    assert model.queue.ids.dtype == torch.int64
    model.to("meta")
    assert model.queue.keys.is_meta
    assert model.bank.rows.is_meta
    assert model.clusters.assignments.is_meta


def test_loading_reports_missing_and_unexpected_memory() -> None:
    state = Model().state_dict()
    del state["queue.label_store"]
    state["bank.columns"] = torch.ones(1)
    with pytest.raises(RuntimeError) as error:
        Model().load_state_dict(state)
    assert 'Missing key(s) in state_dict: "queue.label_store"' in str(error.value)
    assert 'Unexpected key(s) in state_dict: "bank.columns"' in str(error.value)

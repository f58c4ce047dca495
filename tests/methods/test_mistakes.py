"""Mistakes of published code, each ruled out by a test."""

import pytest
import torch
from methods import steps
from torch import Tensor
from torch.testing import assert_close

from hardneg.methods.cmc import CMC
from hardneg.methods.instance_discrimination import InstanceDiscrimination
from hardneg.methods.method import Method
from hardneg.methods.moco import MoCo
from hardneg.methods.moco_v3 import MoCoV3

BATCHES = torch.arange(48).view(3, 16)


def moco(*overrides: str) -> MoCo:
    module = steps.made("moco", "memory.queue=40", "memory.split=4", *overrides)
    assert isinstance(module, MoCo)
    return module


def ir(*overrides: str) -> InstanceDiscrimination:
    module = steps.made("ir", *overrides)
    assert isinstance(module, InstanceDiscrimination)
    return module


def recorded_calls(module: Method, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """The arguments of every call of the objective from now on."""
    calls: list[dict[str, Tensor]] = []
    forward = module.objective.forward

    def record(z1: Tensor, z2: Tensor | None = None, **rest: Tensor) -> Tensor:
        calls.append({"z1": z1, "z2": z2, **{name: tensor.clone() for name, tensor in rest.items()}})  # type: ignore[dict-item]
        return forward(z1, z2, **rest)

    monkeypatch.setattr(module.objective, "forward", record)
    return calls


def unit(vectors: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vectors.detach(), dim=-1)


def test_keys_are_enqueued_after_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a positive would be its own negative."""
    module = moco()
    calls = recorded_calls(module, monkeypatch)
    for batch in BATCHES:
        steps.step(module, batch)
    for number, call in enumerate(calls):
        assert len(call["negatives"]) == min(16 * number, 40)
        if number:
            assert (unit(call["z2"]) @ call["negatives"].T).max() < 1 - 1e-6
    # After the step, the newest keys of the queue are the positives of the last call.
    newest = torch.cat([module.queue.keys[32:], module.queue.keys[:8]])
    assert_close(newest, unit(calls[-1]["z2"]))


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_overwriting_the_queue_before_the_backward_pass_raises(backend: str) -> None:
    module = moco(f"objective.backend={backend}")
    for batch in BATCHES:
        steps.step(module, batch)
    loss = steps.loss(module, BATCHES[0])
    module.update_memory()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("name", ["ir", "cmc", "la"])
def test_overwriting_the_bank_before_the_backward_pass_raises(name: str, backend: str) -> None:
    module = steps.made(name, "memory.clusters=4", "memory.cluster_after=0", f"objective.backend={backend}")
    loss = steps.loss(module, BATCHES[0])
    module.update_memory()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_queue_keeps_the_last_keys_when_the_batch_does_not_divide_it() -> None:
    """40 rows, batches of 16: after five batches the queue holds the last 40 instances, each once."""
    module = moco()
    order = torch.cat([BATCHES, BATCHES]).flatten()[:80]
    for batch in order.view(5, 16):
        steps.step(module, batch)
    assert len(module.queue) == 40
    assert sorted(module.queue.ids.tolist()) == sorted(order[40:].tolist())


def test_a_second_memory_update_of_one_batch_changes_nothing() -> None:
    module = moco()
    steps.step(module, BATCHES[0])
    queue, slow = module.queue.keys.clone(), [weight.clone() for weight in module.key_encoder.parameters()]
    module.update_memory()
    assert torch.equal(module.queue.keys, queue)
    for before, weight in zip(slow, module.key_encoder.parameters(), strict=True):
        assert torch.equal(before, weight)


def test_keys_of_the_same_instance_are_no_negatives(monkeypatch: pytest.MonkeyPatch) -> None:
    module = moco()
    steps.step(module, BATCHES[0])
    calls = recorded_calls(module, monkeypatch)
    mixed = torch.cat([BATCHES[0, 8:], BATCHES[1, :8]])
    steps.step(module, mixed)
    expected = mixed[:, None] != BATCHES[0]
    assert torch.equal(calls[0]["negative_mask"], expected)


@pytest.mark.parametrize("close", ["ignored", "negatives", "positives"])
def test_the_bank_row_of_the_anchor_is_no_negative(close: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a negative it would be the hardest of all; replacing it changes nothing."""
    module = ir("memory.clusters=4", "memory.cluster_after=0", f"memory.close={close}")
    calls = recorded_calls(module, monkeypatch)
    steps.step(module, BATCHES[0])
    for anchor in range(16):
        call = {name: tensor[[anchor]] for name, tensor in calls[0].items() if name != "negatives"}
        before = module.objective.forward(negatives=calls[0]["negatives"], **call)
        negatives = calls[0]["negatives"].clone()
        negatives[BATCHES[0, anchor]] = unit(call["z1"][0])
        assert torch.equal(module.objective.forward(negatives=negatives, **call), before)


def test_the_positive_is_read_before_the_bank_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive is the row as it was before this step, not the view that is being compared."""
    module = ir("memory.bank=0.0")
    before = module.memory.bank.rows.clone()
    calls = recorded_calls(module, monkeypatch)
    steps.step(module, BATCHES[0])
    assert torch.equal(calls[0]["z2"], before[:16])
    assert_close(module.memory.bank.rows[:16], unit(calls[0]["z1"]))
    assert torch.equal(module.memory.bank.rows[16:], before[16:])


def test_cmc_compares_each_view_with_the_bank_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    module = steps.made("cmc", "memory.bank=0.0")
    assert isinstance(module, CMC)
    first, second = (memory.bank.rows.clone() for memory in module._memories())
    calls = recorded_calls(module, monkeypatch)
    steps.step(module, BATCHES[0])
    assert torch.equal(calls[0]["negatives"], second)
    assert torch.equal(calls[1]["negatives"], first)
    for memory, call in zip(module._memories(), calls, strict=True):
        assert_close(memory.bank.rows[:16], unit(call["z1"]))


@torch.no_grad()
def test_keys_are_shuffled_over_the_parts_of_split_batch_norm() -> None:
    """Samples that share the statistics of a query do not share those of its key."""
    module = moco()
    images = steps.first_views(module, BATCHES[0])[:16]
    other = images.clone()
    other[3] = 0.0  # in part 3 of 0 … 3, with 7, 11 and 15
    queries, keys = (
        (network(images) - network(other)).abs().amax(dim=1) > 1e-6 for network in (module.encoder, module.keys)
    )
    assert queries.nonzero()[:, 0].tolist() == [3, 7, 11, 15]
    companions = keys.nonzero()[:, 0].tolist()
    assert 3 in companions
    assert len(companions) == 4
    assert companions != [3, 7, 11, 15]
    module.eval()  # the order of the batch is restored
    assert_close(module.keys(images), module.key_head(module.key_encoder(images)))


def test_the_momentum_encoder_gets_no_gradient() -> None:
    for module in (moco(), steps.made("mocov3")):
        assert isinstance(module, MoCo | MoCoV3)
        steps.step(module, BATCHES[0])
        steps.loss(module, BATCHES[1]).backward()
        slow = [*module.key_encoder.parameters(), *module.key_head.parameters()]
        assert all(weight.grad is None and not weight.requires_grad for weight in slow)
        assert all(weight.grad is not None for weight in module.encoder.parameters())
        optimized = {id(weight) for weight in module._optimizer(module).param_groups[0]["params"]}
        assert not optimized & {id(weight) for weight in slow}


def test_the_momentum_encoder_follows_the_encoder() -> None:
    """θ' = mθ' + (1−m)θ, weight by weight, after the step that moved θ."""
    module = moco("memory.momentum=0.75")
    slow = [weight.detach().clone() for weight in module.key_encoder.parameters()]
    steps.step(module, BATCHES[0])
    steps.step(module, BATCHES[1], rate=1.0)
    fast = [weight.detach().clone() for weight in module.encoder.parameters()]
    first = [weight.detach().clone() for weight in module.key_encoder.parameters()]
    assert any(not torch.equal(one, other) for one, other in zip(slow, first, strict=True))
    steps.step(module, BATCHES[2], rate=0.0)
    for weight, before, ahead in zip(module.key_encoder.parameters(), first, fast, strict=True):
        assert_close(weight, 0.75 * before + 0.25 * ahead)

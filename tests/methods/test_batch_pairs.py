"""Listed pairs never repel each other: losses and gradients of each method against a loop in float64."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.steps import SIZE, made, step
from torch import Tensor, nn

from hardneg.methods.batch_pairs import BatchPairs
from hardneg.methods.method import Method

PAIRS = torch.tensor([[0, 1], [1, 9], [2, 15], [3, 40], [4, 41], [4, 47], [30, 31]])
LISTED = {frozenset(pair) for pair in PAIRS.tolist()}
BATCH = torch.tensor([9, 0, 1, 2, 3, 40, 4, 15, 20, 21, 22, 23, 24, 25, 26, 27])
TEMPERATURE = 0.4


def of_embeddings(name: str, *overrides: str) -> Method:
    """A method whose views are embeddings already: encoder and head change nothing."""
    module = made(name, f"objective.temperature={TEMPERATURE}", *overrides).double()
    module.encoder = module.head = nn.Identity()
    for part in ("key_encoder", "key_head", "predictor"):
        if hasattr(module, part):
            setattr(module, part, Copy())
    return module


class Copy(nn.Module):
    """Its outputs are its inputs, but other tensors: without a gradient where none is recorded."""

    def forward(self, given: Tensor) -> Tensor:
        return given.clone()


def embeddings(rows: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 64, generator=draw, dtype=torch.float64)


def unit(vectors: Tensor) -> Tensor:
    return vectors / vectors.norm(dim=1, keepdim=True)


def loop(anchors: Tensor, positives: Tensor, ids: list[int], candidates: Tensor, of_candidates: list[int]) -> Tensor:
    """InfoNCE with candidates of other ids that form no listed pair with the anchor, one exponential after another."""
    anchors, positives, candidates = unit(anchors), unit(positives), unit(candidates)
    total = anchors.new_zeros(())
    for anchor, positive, own in zip(anchors, positives, ids, strict=True):
        right = torch.exp(anchor @ positive / TEMPERATURE)
        below = right
        for candidate, other in zip(candidates, of_candidates, strict=True):
            if other != own and frozenset((own, other)) not in LISTED:
                below = below + torch.exp(anchor @ candidate / TEMPERATURE)
        total = total - torch.log(right / below)
    return total / len(anchors)


def simclr(module: Method, views: Tensor, index: Tensor) -> Tensor:
    z1, z2 = views.chunk(2)
    ids = index.tolist() * 2
    return loop(views, torch.cat([z2, z1]), ids, views, ids)


def moco(module: Method, views: Tensor, index: Tensor) -> Tensor:
    queries, keys = views.chunk(2)
    queue: Any = module.queue
    return loop(queries, keys.detach(), index.tolist(), queue.keys.double(), queue.ids.tolist())


def moco_v3(module: Method, views: Tensor, index: Tensor) -> Tensor:
    one, two = views.chunk(2)
    ids = index.tolist()
    both = loop(one, two.detach(), ids, two.detach(), ids) + loop(two, one.detach(), ids, one.detach(), ids)
    return 2 * TEMPERATURE * both


def bank(module: Method, views: Tensor, index: Tensor) -> Tensor:
    memory: Any = module.memory
    rows = memory.bank.rows.double()
    return loop(views, rows[index], index.tolist(), rows, list(range(SIZE)))


WAYS: dict[str, tuple[str, list[str], int, Callable[[Method, Tensor, Tensor], Tensor]]] = {
    "simclr": ("simclr", [], 2, simclr),
    "moco": ("moco", ["memory={queue: 40, split: 1}"], 2, moco),
    "moco_v3": ("mocov3", [], 2, moco_v3),
    "bank": ("ir", [], 1, bank),
}


@pytest.mark.parametrize("way", WAYS)
def test_loss_and_gradient_are_those_of_a_loop_without_the_pairs(way: str) -> None:
    name, overrides, views, expected = WAYS[way]
    module = of_embeddings(name, *overrides)
    if way == "moco":  # keys of two earlier batches, of which some are listed with samples of this one
        queue: Any = module.queue
        queue.enqueue(embeddings(40, seed=7), ids=torch.tensor([*range(8, 48)]))
    losses, gradients = [], []
    for pairs in (None, PAIRS):
        if pairs is not None:
            module.leave_out(pairs)
        given = embeddings(views * len(BATCH)).requires_grad_()
        losses.append(module.loss(given, BATCH, None))
        losses[-1].backward()  # type: ignore[no-untyped-call]
        assert given.grad is not None
        gradients.append(given.grad)
    own = embeddings(views * len(BATCH)).requires_grad_()
    right = expected(module, own, BATCH)
    right.backward()  # type: ignore[no-untyped-call]
    # The bank and the queue hold float32.
    torch.testing.assert_close(losses[1], right, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients[1], own.grad, rtol=1e-5, atol=1e-7)
    assert abs(float(losses[0].detach() - right.detach())) > 1e-3  # without the pairs it differs


def test_two_listed_samples_alone_in_a_batch_do_not_move() -> None:
    module = of_embeddings("simclr")
    module.leave_out(PAIRS)
    given = embeddings(4).requires_grad_()
    module.loss(given, torch.tensor([0, 1]), None).backward()  # type: ignore[no-untyped-call]
    assert given.grad is not None
    assert not given.grad.any()  # without negatives the loss is constant
    module.loss(given, torch.tensor([0, 2]), None).backward()  # type: ignore[no-untyped-call]
    assert given.grad.abs().max() > 1e-3


def test_a_batch_without_listed_pairs_takes_the_short_path() -> None:
    module = made("simclr")
    module.leave_out(PAIRS)
    assert module.id_arguments(torch.tensor([0, 2, 4, 30])) == {}
    assert module.id_arguments(BATCH).keys() == {"ids", "not_negatives"}


def test_a_queue_remembers_the_ids_of_earlier_steps() -> None:
    """Sample 4 is compared with the keys of later batches, and never with those of its partners 41 and 47."""
    module = made("moco", "memory={queue: 48, split: 1}")
    module.leave_out(PAIRS)
    seen: Counter[int] = Counter()
    objective = module.objective
    forward = objective.forward

    def record(*arguments: Any, **named: Any) -> Tensor:
        if "negative_ids" in named:
            own, pairs = named["ids"], named["not_negatives"]
            listed = {frozenset(pair) for pair in pairs.tolist()}
            partners = {
                (int(a), int(b)) for a in own for b in named["negative_ids"] if frozenset((int(a), int(b))) in LISTED
            }
            assert {frozenset(pair) for pair in partners} <= listed
            seen["partners in the queue"] += len(partners)
        return forward(*arguments, **named)

    objective.forward = record  # type: ignore[method-assign]
    for start in (32, 0, 16, 32, 0):
        step(module, torch.arange(start, start + 16))
    assert seen["partners in the queue"] > 5
    queue: Any = module.queue
    assert sorted(queue.ids.tolist()) == list(range(48))


@pytest.mark.parametrize("way", ["cmc", "ir"])
def test_banks_with_clusters_train_with_listed_pairs(way: str) -> None:
    for close in ("negatives", "positives"):
        module = made(way, f"memory={json.dumps({'clusters': 5, 'close': close, 'cluster_after': 0})}")
        module.leave_out(PAIRS)
        assert all(torch.isfinite(torch.tensor(step(module, BATCH))) for _ in range(2))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30),
    st.lists(st.integers(0, 12), min_size=1, max_size=8, unique=True),
)
def test_the_pairs_of_a_batch_are_those_of_a_loop(pairs: list[tuple[int, int]], ids: list[int]) -> None:
    listed = BatchPairs(torch.tensor(pairs, dtype=torch.int64).view(-1, 2))
    both = {*pairs, *((b, a) for a, b in pairs)}
    for within in (False, True):
        expected = {(a, b) for a, b in both if a in ids and (b in ids or not within)}
        found = [(a, b) for a, b in listed.of(torch.tensor(ids), within).tolist()]
        assert len(found) == len(set(found))
        assert set(found) == expected

"""The loss in the interface of pytorch-metric-learning, against that library's own NTXentLoss."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses, miners, trainers
from torch import Tensor, nn
from torch.testing import assert_close

import hardneg as hn
from hardneg.integrations.metric_learning import NTXentLoss

ROWS, DIM = 12, 6
LABELS = torch.tensor([0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 3, 4])  # 4 occurs once


def embeddings(rows: int = ROWS, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, DIM, generator=generator, dtype=torch.float64).requires_grad_()


def assert_same(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *others: Any) -> None:
    """Both have the same value and the same gradient in the embeddings."""
    found, expected = [], []
    for loss, results in ((ours, found), (theirs, expected)):
        z = embeddings()
        value = loss(z, LABELS, *others)
        value.backward()
        results += [value.detach(), z.grad]
    assert float(expected[0]) > 0.1
    assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_it_is_their_loss_of_a_batch() -> None:
    assert_same(NTXentLoss(0.1), losses.NTXentLoss(0.1))


def test_it_is_their_loss_of_reference_rows() -> None:
    rows, labels = embeddings(20, seed=1).detach(), torch.arange(20) % 5
    assert_same(NTXentLoss(0.2), losses.NTXentLoss(0.2), None, rows, labels)


def test_it_is_their_loss_of_the_pairs_of_a_miner() -> None:
    miner = miners.MultiSimilarityMiner(epsilon=0.1)
    pairs = miner(embeddings(), LABELS)
    assert 0 < len(pairs[2]) < ROWS * ROWS / 2
    # An anchor whose negatives the miner dropped has a loss of 0 there, and is left out of the mean here.
    kept = torch.isin(pairs[0], pairs[2])
    assert_same(NTXentLoss(0.2), losses.NTXentLoss(0.2), (pairs[0][kept], pairs[1][kept], *pairs[2:]))


def test_triplets_count_each_pair_once() -> None:
    triplets = torch.tensor([[0, 1, 5], [0, 1, 6], [2, 3, 0], [2, 4, 0]]).unbind(dim=1)
    pairs = tuple(torch.tensor(part) for part in ([0, 2, 2], [1, 3, 4], [0, 0, 2], [5, 6, 0]))
    assert_same(lambda z, y, _: NTXentLoss(0.2)(z, y, triplets), losses.NTXentLoss(0.2), pairs)


def test_it_works_in_cross_batch_memory() -> None:
    found = []
    for loss in (NTXentLoss(0.2), losses.NTXentLoss(0.2)):
        memory = losses.CrossBatchMemory(loss, DIM, memory_size=30)
        for step in range(4):  # the memory fills in the third step
            z = embeddings(seed=step)
            value = memory(z, LABELS)
            value.backward()
            found.append((value.detach(), z.grad))
    assert_close(found[:4], found[4:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("symmetric", [True, False])
def test_it_works_in_self_supervised_loss(symmetric: bool) -> None:
    z1, z2 = embeddings(), embeddings(seed=1)
    ours, theirs = (losses.SelfSupervisedLoss(loss, symmetric)(z1, z2) for loss in (NTXentLoss(), losses.NTXentLoss()))
    assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    if symmetric:
        assert_close(ours, hn.simclr(0.07)(z1, z2))


def test_it_trains_in_their_trainer(tmp_path: Any) -> None:
    torch.manual_seed(0)
    centers = 3 * torch.randn(4, 8)
    labels = torch.arange(120) % 4
    data = torch.utils.data.TensorDataset(centers[labels] + torch.randn(120, 8), labels)
    model, before = nn.Linear(8, 4), None
    loss = NTXentLoss(hn.Learnable(0.2), hardening=hn.Exponential(0.5))
    before = loss(model(data.tensors[0]), labels).item()
    parts = [model, loss]
    trainers.MetricLossOnly(
        models={"trunk": model},
        optimizers={"trunk_optimizer": torch.optim.Adam([p for part in parts for p in part.parameters()], lr=0.01)},
        batch_size=40,
        loss_funcs={"metric_loss": loss},
        dataset=data,
        dataloader_num_workers=0,
        mining_funcs={},
    ).train(num_epochs=5)
    assert loss(model(data.tensors[0]), labels).item() < 0.7 * before


def test_a_hardening_acts_on_the_negatives_of_both_paths() -> None:
    """The pairs of a batch, given explicitly, are those that labels find."""
    same = LABELS[:, None] == LABELS
    positive, negative = same & ~torch.eye(ROWS, dtype=torch.bool), ~same
    pairs = (*positive.nonzero(as_tuple=True), *negative.nonzero(as_tuple=True))
    loss = NTXentLoss(0.3, hardening=(hn.Ring(0.2, 0.9), hn.Exponential(1.0)))
    by_pairs = loss(embeddings(), LABELS, pairs), loss.diagnostics()["support"]
    by_label = loss(embeddings(), LABELS), loss.diagnostics()["support"]
    assert_close(by_pairs, by_label)
    assert 5 < by_label[1] < 0.75 * float(negative.sum(dim=1).double().mean())


def test_schedules_move_on_both_paths() -> None:
    loss = NTXentLoss(hn.Linear(0.5, 0.1))
    loss.set_progress(1.0)
    fixed = NTXentLoss(0.1)
    rows = embeddings(5, seed=1), torch.arange(5)
    assert_close(loss(embeddings(), LABELS), fixed(embeddings(), LABELS))
    assert_close(loss(embeddings(), LABELS, None, *rows), fixed(embeddings(), LABELS, None, *rows))


def test_a_saved_loss_goes_on_with_the_same_draws() -> None:
    loss, loaded = NTXentLoss(0.1, num_negatives=2), NTXentLoss(0.1, num_negatives=2)
    rows = embeddings(5, seed=1), torch.arange(5)
    for others in ((), (), (None, *rows)):  # the draws of both paths have been counted, those of pairs last
        loss(embeddings(), LABELS, *others)
    loaded.load_state_dict(loss.state_dict())
    for others in ((), (None, *rows)):
        assert_close(loaded(embeddings(), LABELS, *others), loss(embeddings(), LABELS, *others), rtol=0, atol=0)


def test_a_batch_without_positives_has_no_loss() -> None:
    z, empty = embeddings(), torch.empty(0, dtype=torch.long)
    value = NTXentLoss()(z, LABELS, (empty, empty, torch.tensor([0]), torch.tensor([5])))
    value.backward()
    assert value == 0
    assert z.grad is not None
    assert not z.grad.any()


Z = torch.randn(3, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: NTXentLoss(in_batch="other"), "in_batch='other' follows from the call"),
        (lambda: NTXentLoss(hardening={"batch": hn.Uniform()}), "give one hardening here"),
        (lambda: NTXentLoss(reduction="none"), "use 'mean' or 'sum'"),
        (lambda: NTXentLoss()(Z), "needs labels"),
        (lambda: NTXentLoss()(Z, torch.zeros(2, dtype=torch.long)), "labels must have shape"),
        (lambda: NTXentLoss()(Z, [0, 0, 1]), "labels must be a tensor, got list"),
        (lambda: NTXentLoss()(Z, torch.tensor([0, 0, 1]), ref_emb=Z), "belong together"),
        (lambda: NTXentLoss()(Z, LABELS[:3], None, Z[:, :1], LABELS[:3]), "with d = 2, got .3, 1."),
        (lambda: NTXentLoss()(Z, None, ([0], [1], [2])), "indices_tuple must be an integer tensor, got list"),
        (lambda: NTXentLoss()(Z, None, None, Z, torch.tensor([0, 0, 1])), "pass labels, or indices_tuple"),
        (lambda: NTXentLoss()(Z, None, (torch.tensor([0]),) * 2), "got 2 tensors"),
        (lambda: NTXentLoss()(Z, None, (torch.tensor([0]), torch.tensor([7]), torch.tensor([1]))), "indices_tuple"),
    ],
)
def test_mistakes_give_one_line(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)

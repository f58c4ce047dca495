"""The lines of docs/translate.md give the numbers of the code they replace."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_metric_learning.losses
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import (
    CrossBatchMemory,
    NTXentLoss,
    SelfSupervisedLoss,
    SupConLoss,
    TripletMarginLoss,
)
from pytorch_metric_learning.miners import BatchEasyHardMiner
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, normalize
from torch.testing import assert_close

import hardneg as hn

PAGE = (Path(__file__).parents[1] / "docs" / "translate.md").read_text(encoding="utf-8")


def translated(start: str, **names: Any) -> Any:
    """The value of the code in the row of the table whose left cell starts with ``start``."""
    (cell,) = re.findall(rf"^\| \*\*[^*]+\*\* `{re.escape(start)}.*?\| (.*) \|$", PAGE, re.MULTILINE)
    return eval(cell.split("`")[1], {"hn": hn, "torch": torch, **names})


def check_gradients(theirs: Callable[[Tensor], Tensor], ours: Callable[[Tensor], Tensor], *shape: int) -> None:
    """Compare values and gradients at random embeddings."""
    drawn = torch.randn(*shape, dtype=torch.float64)
    one, other = (drawn.clone().requires_grad_() for _ in range(2))
    expected, found = theirs(one), ours(other)
    assert_close(found, expected)
    (found - expected).backward()
    assert_close(other.grad, -one.grad)


@pytest.fixture
def views() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    z1 = torch.randn(10, 7, generator=generator, dtype=torch.float64)
    return z1, z1 + torch.randn(10, 7, generator=generator, dtype=torch.float64)


def matrix(a: Tensor, b: Tensor) -> Tensor:
    return cosine_similarity(a[:, None], b[None], dim=-1)


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_pytorch_metric_learning(views: tuple[Tensor, Tensor], temperature: float) -> None:
    z1, z2 = views
    labels = torch.arange(10)
    theirs = NTXentLoss(temperature)(torch.cat(views), labels.repeat(2))
    assert_close(hn.simclr(temperature)(z1, z2), theirs)
    assert_close(hn.simclr(temperature)(z1, z2), SelfSupervisedLoss(NTXentLoss(temperature))(z1, z2))
    classes = labels % 3
    assert_close(hn.supcon(temperature)(z1, labels=classes), SupConLoss(temperature)(z1, classes))


CLASSES = torch.arange(24) % 5


def test_nt_xent_with_class_labels() -> None:
    check_gradients(
        lambda z: NTXentLoss(0.3)(z, CLASSES),
        lambda z: translated("NTXentLoss(t)(z, labels)`", t=0.3, z=z, labels=CLASSES),
        24, 7,
    )  # fmt: skip


def khosla(features: Tensor, labels: Tensor, temperature: float, base_temperature: float) -> Tensor:
    """Eq. 2 of Khosla et al. 2020 as a loop, scaled as in their code. features: (B, V, d)"""
    rows = [
        (normalize(row, dim=0), int(label)) for sample, label in zip(features, labels, strict=True) for row in sample
    ]
    losses = []
    for i, (anchor, label) in enumerate(rows):
        scores = [anchor @ other / temperature for other, _ in rows]
        total = torch.logsumexp(torch.stack([score for j, score in enumerate(scores) if j != i]), dim=0)
        terms = [total - scores[j] for j, (_, other) in enumerate(rows) if j != i and other == label]
        losses.append(torch.stack(terms).mean())
    return temperature / base_temperature * torch.stack(losses).mean()


@pytest.mark.parametrize("number", [2, 3])
def test_the_layout_of_khosla_with_labels(number: int) -> None:
    labels = torch.arange(6) % 3
    start = "SupConLoss(t, base_temperature=t)(f, labels)`"
    ours: Callable[[Tensor], Tensor] = lambda f: translated(start, t=0.2, f=f, labels=labels)  # noqa: E731
    check_gradients(lambda f: khosla(f, labels, 0.2, 0.2), ours, 6, number, 5)
    check_gradients(lambda f: khosla(f, labels, 0.2, 0.07), lambda f: 0.2 / 0.07 * ours(f), 6, number, 5)


def test_the_layout_of_khosla_without_labels() -> None:
    check_gradients(
        lambda f: khosla(f, torch.arange(6), 0.2, 0.2),
        lambda f: translated("SupConLoss(t, base_temperature=t)(f)`", t=0.2, f=f),
        6, 2, 5,
    )  # fmt: skip


def test_a_cross_batch_memory_is_a_queue_that_is_smaller_by_the_batch() -> None:
    memory, queue = CrossBatchMemory(SupConLoss(0.2), 7, memory_size=50), hn.Queue(26, 7, dtype=torch.float64)
    memory.embedding_memory = memory.embedding_memory.double()
    for step in range(5):  # the memory is full after the second
        z, labels = torch.randn(24, 7, dtype=torch.float64), (torch.arange(24) + step) % 5
        found = translated("CrossBatchMemory(SupConLoss(t)", t=0.2, z=z, labels=labels, queue=queue)
        assert_close(found, memory(z, labels))
        queue.enqueue(z, labels)


def supcon_of(anchors: Tensor, columns: Tensor, labels: Tensor, of_columns: Tensor) -> Tensor:
    """Khosla's loss, eq. 2, at t = 0.2; the first columns are the anchors themselves."""
    scores = normalize(anchors) @ normalize(columns).T / 0.2  # (B, N)
    itself = torch.eye(*scores.shape, dtype=torch.bool)
    logs = scores - torch.logsumexp(scores.masked_fill(itself, -torch.inf), dim=1, keepdim=True)
    same = (labels[:, None] == of_columns) & ~itself
    return -(logs.where(same, 0).sum(1) / same.sum(1)).mean()


def test_a_cross_batch_memory_has_no_gradient_in_the_candidates_and_a_queue_has() -> None:
    memory, queue = CrossBatchMemory(SupConLoss(0.2), 7, memory_size=50), hn.Queue(26, 7, dtype=torch.float64)
    memory.embedding_memory = memory.embedding_memory.double()
    old, labels = torch.randn(26, 7, dtype=torch.float64), torch.arange(26) % 5
    memory(old, labels)
    queue.enqueue(old, labels)
    drawn, classes = torch.randn(24, 7, dtype=torch.float64), torch.arange(24) % 5
    losses = {
        "memory": lambda z: memory(z, classes),
        "detached": lambda z: supcon_of(z, torch.cat([z.detach(), old]), classes, torch.cat([classes, labels])),
        "queue": lambda z: translated("CrossBatchMemory(SupConLoss(t)", t=0.2, z=z, labels=classes, queue=queue),
        "whole": lambda z: supcon_of(z, torch.cat([z, old]), classes, torch.cat([classes, labels])),
    }
    values, gradients = {}, {}
    for name, loss in losses.items():
        z = drawn.clone().requires_grad_()
        values[name] = loss(z)
        (gradients[name],) = torch.autograd.grad(values[name], z)
    for name in ("detached", "queue", "whole"):
        assert_close(values[name], values["memory"])
    assert_close(gradients["memory"], gradients["detached"])
    assert_close(gradients["queue"], gradients["whole"])
    assert (gradients["queue"] - gradients["memory"]).norm() > 0.1 * gradients["memory"].norm()


def test_default_temperatures_are_those_of_the_table() -> None:
    for theirs, ours in (("SupConLoss", "hn.supcon"), ("NTXentLoss", "hn.simclr"), ("NTXentLoss", "hn.InfoNCE")):
        (row,) = re.findall(
            rf"^\| pytorch-metric-learning `{theirs}` \| (\S+) \| .*`{ours}`.* \| (\S+) \|$", PAGE, re.M
        )
        found = (getattr(pytorch_metric_learning.losses, theirs)().temperature, getattr(hn, ours[3:])().temperature)
        assert found == tuple(map(float, row))


@pytest.mark.parametrize("margin", [0.0, 0.2])
def test_smooth_triplets_of_the_hardest_negatives(margin: float) -> None:
    cosine = CosineSimilarity()
    theirs = TripletMarginLoss(margin, smooth_loss=True, distance=cosine)
    miner = BatchEasyHardMiner(pos_strategy="all", neg_strategy="hard", distance=cosine)
    hardest = hn.Ring(0.999, 1.0)
    loss = hn.InfoNCE(1.0, hardest, supervision="full", average="pairs", negative_count=math.exp(margin))
    check_gradients(lambda z: theirs(z, CLASSES, miner(z.detach(), CLASSES)), lambda z: loss(z, labels=CLASSES), 24, 7)


def test_one_drawn_negative_is_the_smooth_triplet_loss_in_expectation() -> None:
    z, labels = torch.randn(20, 7, dtype=torch.float64), torch.arange(20) % 5
    theirs = TripletMarginLoss(0.0, smooth_loss=True, distance=CosineSimilarity())(z, labels)
    loss = hn.InfoNCE(
        1.0, supervision="full", average="pairs", num_negatives=1, generator=torch.Generator().manual_seed(0)
    )
    draws = torch.stack([loss(z, labels=labels) for _ in range(400)])
    error = draws.std() / len(draws) ** 0.5
    assert error < 0.01 * theirs
    assert abs(draws.mean() - theirs) < 4 * error


def test_sentence_transformers_ranking_loss(views: tuple[Tensor, Tensor]) -> None:
    anchors, positives = views
    hard = torch.randn(10, 7, dtype=torch.float64)
    rows = torch.arange(10)
    plain = cross_entropy(20 * matrix(anchors, positives), rows)
    assert_close(hn.simcse(1 / 20)(anchors, positives), plain)
    with_hard = cross_entropy(20 * matrix(anchors, torch.cat([positives, hard])), rows)
    assert_close(hn.simcse(1 / 20)(anchors, positives, negatives=hard), with_hard)
    backward = cross_entropy(20 * matrix(positives, anchors), rows)
    assert_close(hn.simcse(1 / 20, symmetric=True)(anchors, positives), (plain + backward) / 2)


def test_gist(views: tuple[Tensor, Tensor]) -> None:
    anchors, positives = views
    guide_a, guide_p = (normalize(torch.randn(10, 4, dtype=torch.float64), dim=1) for _ in range(2))
    rows = torch.arange(10)
    limit = (guide_a * guide_p).sum(dim=1, keepdim=True)
    blocks = [
        (matrix(anchors, positives), guide_a @ guide_p.T),
        (matrix(anchors, anchors), guide_a @ guide_a.T),
        (matrix(positives, positives), guide_p @ guide_p.T),
    ]
    logits = torch.cat([scores.masked_fill(guided > limit, -torch.inf) for scores, guided in blocks], dim=1) / 0.01
    # A score of a text with itself is masked because the guide finds it closer than the positive.
    logits[rows, rows] = matrix(anchors, positives).diagonal() / 0.01  # rounding may put the positive above itself
    loss = hn.gist(0.01, reduction="sum")  # an anchor without negatives adds 0
    assert_close(loss(anchors, positives, guide=(guide_a, guide_p)), cross_entropy(logits, rows, reduction="sum"))


def test_debiased_is_the_published_formula(views: tuple[Tensor, Tensor]) -> None:
    z = normalize(torch.cat(views), dim=1)
    exponentials = (z @ z.T / 0.5).exp()
    negatives = exponentials[~torch.eye(10, dtype=torch.bool).repeat(2, 2)].view(20, 18).sum(dim=1)
    positive = exponentials.diagonal(10).repeat(2)
    corrected = ((negatives - 0.1 * 18 * positive) / 0.9).clamp(min=18 * torch.e ** (-1 / 0.5))
    assert_close(hn.debiased(0.1, 0.5)(*views), -(positive / (positive + corrected)).log().mean())

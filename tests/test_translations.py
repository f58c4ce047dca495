"""The lines of docs/translate.md give the numbers of the code they replace."""

import pytest
import torch
from pytorch_metric_learning.losses import NTXentLoss, SelfSupervisedLoss, SupConLoss
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, normalize
from torch.testing import assert_close

import hardneg as hn


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

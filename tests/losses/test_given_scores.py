"""The loss from given scores, against the loss of embeddings with those scores and against cross-entropy."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import hardneg as hn

pytestmark = pytest.mark.filterwarnings("ignore:.*anchors are floored")
BANDS: dict[str, tuple[hn.Hardening, dict[str, Any]]] = {
    "none": (hn.Uniform(), {}),
    "tilt": (hn.Exponential(0.7), {"beta": 0.7}),
    "ring": (hn.Ring(0.2, 0.8), {"rings": ((0.2, 0.8),)}),
    "below": (hn.BelowPositive(0.35), {"below": ("margin", 0.35)}),
}


def embeddings(several: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Anchors (5, 3), positives (5, M, 3), negatives (5, 7, 3) and a mask (5, 7)."""
    generator = torch.Generator().manual_seed(several)
    z1, z2, negatives = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 3), (5, several, 3), (5, 7, 3))
    )
    mask = torch.rand(5, 7, generator=generator) < 0.7
    mask[4] = False  # an anchor without candidates
    return z1, z2, negatives, mask


def test_scores_of_embeddings_give_the_loss_of_the_loops() -> None:
    reached: Counter[str] = Counter()
    for band, prior, combine, count, several, masked in itertools.product(
        BANDS, (0.0, 0.1), ("mean_of_logs", "log_of_sum"), ("support", "batch", 5.0), (1, 3), (True, False)
    ):
        z1, z2, negatives, mask = embeddings(several)
        hardening, known = BANDS[band]
        options: dict[str, Any] = {"class_prior": prior, "combine_positives": combine, "negative_count": count}
        truth = oracle.info_nce(
            z1.numpy(), z2.numpy(), negatives=negatives.numpy(), negative_mask=mask.numpy() if masked else None,
            temperature=0.8, in_batch=None, normalize=False, **options, **known,
        )  # fmt: skip
        loss = hn.InfoNCE(0.8, hardening, **options, reduction="none")
        positive, candidates = torch.einsum("bd,bmd->bm", z1, z2), torch.einsum("bd,bnd->bn", z1, negatives)
        found = loss.from_scores(positive, candidates, mask if masked else None)
        assert_close(found, torch.tensor(truth.losses, dtype=torch.float64), rtol=1e-10, atol=1e-10)
        loss.reduction = "mean"
        assert float(loss.from_scores(positive, candidates, mask if masked else None)) == pytest.approx(truth.mean)
        reached.update(
            [band] * any(truth.valid) + ["floored"] * any(truth.floored) + ["empty"] * (not all(truth.valid))
        )
    assert min(reached[name] for name in (*BANDS, "floored", "empty")) >= 10, reached


def test_one_positive_is_cross_entropy() -> None:
    positive, candidates = torch.randn(6, 1), torch.randn(6, 9)
    expected = torch.nn.functional.cross_entropy(torch.cat([positive, candidates], 1) / 0.3, torch.zeros(6).long())
    assert_close(hn.InfoNCE(0.3).from_scores(positive, candidates), expected)
    # No setting of the candidates of a batch matters.
    assert_close(hn.clip(0.3, symmetric=False).from_scores(positive, candidates), expected)


@pytest.mark.parametrize("options", [{}, {"hardening": hn.Exponential(0.5), "class_prior": 0.02, "debias": "exact"}])
def test_gradients_in_the_scores_are_exact(options: dict[str, Any]) -> None:
    positive, candidates = torch.randn(4, 2, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    loss = hn.InfoNCE(0.7, **options)
    inputs = positive.requires_grad_(), candidates.requires_grad_()
    assert torch.autograd.gradcheck(loss.from_scores, inputs)
    assert torch.autograd.gradgradcheck(loss.from_scores, inputs)
    value = loss.from_scores(*inputs)
    assert loss.diagnostics()["support"] == 6
    with torch.no_grad():
        candidates += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_scores_are_the_source_given_of_a_hardening_by_source() -> None:
    positive, candidates = torch.randn(4, 1), torch.randn(4, 6)
    ring = hn.Ring(0.5, 1.0)
    expected = hn.InfoNCE(hardening=ring).from_scores(positive, candidates)
    assert_close(hn.InfoNCE(hardening={"given": ring}).from_scores(positive, candidates), expected)
    assert not torch.allclose(hn.InfoNCE().from_scores(positive, candidates), expected)


def test_no_candidates_give_zero() -> None:
    assert float(hn.InfoNCE().from_scores(torch.zeros(3, 1), torch.zeros(3, 0), torch.zeros(3, 0).bool())) == 0.0


def test_large_scores_never_give_nan() -> None:
    scores = torch.from_numpy(np.array([[1e30, -1e30, 3.0]])).float()
    for options in ({}, {"hardening": hn.Exponential(2.0)}, {"class_prior": 0.3}):
        leaf = scores.clone().requires_grad_()
        value = hn.InfoNCE(0.5, **options).from_scores(torch.tensor([[1.0]]), leaf)
        value.backward()
        assert value.isfinite()
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        ({"supervision": "full"}, {}, "supervision='full' needs labels"),
        ({"in_batch": "other", "symmetric": True}, {}, "from_scores has one direction"),
        ({}, {"positive": torch.zeros(3)}, r"positive must have shape \(B, M\), got \(3,\)"),
        ({}, {"positive": torch.zeros(3, 0)}, r"positive must have shape \(B, M\) with B, M ≥ 1"),
        ({}, {"positive": torch.zeros(3, 1, dtype=torch.long)}, "positive must have a floating dtype"),
        ({}, {"candidates": torch.zeros(2, 4)}, "candidates must have 3 rows"),
        ({}, {"candidates": torch.full((3, 4), torch.nan)}, "candidates holds NaN"),
        ({}, {"mask": torch.ones(3, 4)}, "mask must be a bool tensor"),
        ({}, {"mask": torch.ones(3, 5).bool()}, r"of shape \(3, 4\), got torch.bool, \(3, 5\)"),
    ],
)
def test_wrong_scores_raise(options: dict[str, Any], change: dict[str, Tensor], message: str) -> None:
    given = {"positive": torch.zeros(3, 1), "candidates": torch.zeros(3, 4)} | change
    with pytest.raises(ValueError, match=message):
        hn.InfoNCE(**options).from_scores(**given)

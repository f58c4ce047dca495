"""Padded and masked positives give the same loss as separate calls, each with the positives of one anchor."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import hardneg as hn

OPTIONS: list[dict[str, Any]] = [
    {},
    {"combine_positives": "log_of_mean", "hardening": hn.Ring(0.2, 0.8)},
    {"combine_positives": "in_denominator", "hardening": hn.Exponential(2.0)},
    {"class_prior": 0.1, "hardening": hn.Exponential(1.0)},
    {"class_prior": 0.1, "debias": "exact", "hardening": hn.Exponential(1.0), "combine_positives": "log_of_mean"},
    {"positive_in_denominator": False},
    {"hardening": hn.BelowPositive(0.1)},
    {"hardening": hn.Custom(lambda s: s.exp())},
]


def mean_score(z1: Tensor, z2: Tensor, mask: Tensor) -> float:
    """Mean cosine with the positives, of the anchors that have any."""
    cosines = torch.cosine_similarity(z1[:, None], z2, dim=2).detach()  # (B, M)
    means = [float(row[chosen].mean()) for row, chosen in zip(cosines, mask, strict=True) if chosen.any()]
    return sum(means) / len(means) if means else 0.0


@pytest.mark.filterwarnings("ignore:.*anchors are floored")
@given(
    seed=st.integers(0, 10_000),
    option=st.sampled_from(range(len(OPTIONS))),
    backend=st.sampled_from(["reference", "auto"]),
)
def test_padding_changes_neither_loss_nor_gradient(seed: int, option: int, backend: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    z1 = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    z2 = torch.randn(4, 5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    negatives = torch.randn(9, 3, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=generator) < 0.6
    mask[0] = False  # an anchor without positives
    loss = hn.InfoNCE(in_batch=None, reduction="none", backend=backend, **OPTIONS[option])
    together = loss(z1, z2, negatives=negatives, positive_mask=mask)
    report, some = loss.diagnostics(), mask.any(dim=1)
    assert report["without_positives"] == 4 - int(some.sum()) >= 1
    # A band may leave an anchor no candidate.
    assert int(some.sum()) - report["without_candidates"] <= together.count_nonzero() <= some.sum()
    assert_close(report["positive_score"], mean_score(z1, z2, mask) / loss.temperature)
    alone = [
        loss(z1[i : i + 1], z2[i : i + 1, mask[i]], negatives=negatives)[0] if some[i] else z1.sum() * 0
        for i in range(4)
    ]
    assert_close(together, torch.stack(alone))
    weights = torch.arange(1.0, 5.0, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad(together @ weights, (z1, z2), retain_graph=True),
        torch.autograd.grad(torch.stack(alone) @ weights, (z1, z2), allow_unused=True),
        strict=True,
    ):
        assert_close(one, torch.zeros_like(one) if other is None else other)


def test_an_invalid_mask_raises() -> None:
    z1, z2, n = torch.randn(4, 3), torch.randn(4, 5, 3), torch.randn(9, 3)
    mask = torch.ones(4, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"positive_mask must have shape \(4, 5\)"):
        hn.moco()(z1, z2, negatives=n, positive_mask=mask[:, :3])
    with pytest.raises(ValueError, match="positive_mask must be a bool tensor"):
        hn.moco()(z1, z2, negatives=n, positive_mask=mask.float())
    with pytest.raises(ValueError, match=r"z2 is not \(B, M, d\)"):
        hn.moco()(z1, z2[:, 0], negatives=n, positive_mask=mask)
    with pytest.raises(ValueError, match="set in_batch=None"):
        hn.InfoNCE()(z1, z2, negatives=n, positive_mask=mask)

"""The objective where its value is known: other losses, closed forms, limits."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from torch.testing import assert_close

import hardneg as hn

BACKENDS = ("reference", "tiled")


def views(rows: int = 12, dim: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z1, z2 = torch.randn(2, rows, dim, generator=generator, dtype=torch.float64)
    return z1, z2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [0.05, 0.5, 3.0])
def test_plain_infonce_is_cross_entropy_over_the_other_rows(backend: str, temperature: float) -> None:
    z1, z2 = views()
    z = normalize(torch.cat([z1, z2]), dim=1)
    logits = (z @ z.T / temperature).fill_diagonal_(-torch.inf)
    partner = torch.arange(24).roll(12)
    assert_close(hn.simclr(temperature, backend=backend)(z1, z2), cross_entropy(logits, partner))


@pytest.mark.parametrize("backend", BACKENDS)
def test_simcse_is_cross_entropy_over_the_other_view(backend: str) -> None:
    z1, z2 = views()
    logits = normalize(z1, dim=1) @ normalize(z2, dim=1).T / 0.05
    assert_close(hn.simcse(backend=backend)(z1, z2), cross_entropy(logits, torch.arange(12)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_clip_is_the_mean_of_both_directions(backend: str) -> None:
    z1, z2 = views()
    logits = (normalize(z1, dim=1) @ normalize(z2, dim=1).T) / 0.07
    expected = (cross_entropy(logits, torch.arange(12)) + cross_entropy(logits.T, torch.arange(12))) / 2
    assert_close(hn.clip(backend=backend).double()(z1, z2), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_moco_is_cross_entropy_over_positive_and_queue(backend: str) -> None:
    query, key = (normalize(z, dim=1) for z in views())
    queue = normalize(torch.randn(40, 6, dtype=torch.float64), dim=1)
    logits = torch.cat([(query * key).sum(1, keepdim=True), query @ queue.T], dim=1) / 0.07
    expected = cross_entropy(logits, torch.zeros(12, dtype=torch.long))
    assert_close(hn.moco(backend=backend)(query, key, negatives=queue), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_supcon_is_khosla_equation_2(backend: str) -> None:
    z1, z2 = views()
    labels = torch.arange(12) % 3
    z, y = normalize(torch.cat([z1, z2]), dim=1), labels.repeat(2)
    logits = z @ z.T / 0.07
    itself = torch.eye(24, dtype=torch.bool)
    log_probability = logits - logits.masked_fill(itself, -torch.inf).logsumexp(dim=1, keepdim=True)
    positive = (y[:, None] == y) & ~itself
    expected = -(log_probability * positive).sum(dim=1) / positive.sum(dim=1)
    assert_close(hn.supcon(backend=backend)(z1, z2, labels=labels), expected.mean())


@pytest.mark.parametrize("backend", BACKENDS)
def test_hcl_is_the_published_formula(backend: str) -> None:
    z1, z2 = views(rows=16)
    beta, prior, temperature = 1.0, 0.1, 0.5
    z = normalize(torch.cat([z1, z2]), dim=1)
    exponentials = (z @ z.T / temperature).exp()
    others = ~(torch.eye(16, dtype=torch.bool).repeat(2, 2))
    negatives = exponentials[others].view(32, 30)
    positive = exponentials.diagonal(16).repeat(2)
    weights = (beta * negatives.log()).exp()
    reweighted = (weights * negatives).sum(dim=1) / weights.mean(dim=1)
    debiased = ((reweighted - prior * 30 * positive) / (1 - prior)).clamp(min=30 * math.exp(-1 / temperature))
    expected = -(positive / (positive + debiased)).log().mean()
    assert_close(hn.hcl(beta, prior, temperature, backend=backend)(z1, z2), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_vanishing_tilt_is_no_tilt(backend: str) -> None:
    z1, z2 = views()
    assert_close(hn.hcl(1e-9, 0.0, backend=backend)(z1, z2), hn.simclr()(z1, z2), rtol=1e-7, atol=0)
    assert_close(hn.hcl(0.0, 0.0, backend=backend)(z1, z2), hn.simclr()(z1, z2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_huge_tilt_is_the_hardest_negative(backend: str) -> None:
    z1, z2 = views()
    z = normalize(torch.cat([z1, z2]), dim=1)
    scores = z @ z.T / 0.5
    own = torch.eye(12, dtype=torch.bool).repeat(2, 2)
    hardest, positive = scores.masked_fill(own, -torch.inf).amax(dim=1), scores.diagonal(12).repeat(2)
    expected = torch.nn.functional.softplus(math.log(22) + hardest - positive).mean()
    assert_close(hn.hcl(1e5, 0.0, backend=backend)(z1, z2), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_whole_ring_is_no_ring(backend: str) -> None:
    z1, z2 = views()
    assert_close(hn.InfoNCE(hardening=hn.Ring(0.0, 1.0), backend=backend)(z1, z2), hn.simclr()(z1, z2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_hscl_with_all_labels_different_is_hcl_without_debiasing(backend: str) -> None:
    z1, z2 = views()
    supervised = hn.hscl(2.0, backend=backend)(z1, z2, labels=torch.arange(12))
    assert_close(supervised, hn.hcl(2.0, 0.0)(z1, z2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_function_as_custom_weight_is_the_threshold(backend: str) -> None:
    z1, z2 = views()
    step = hn.Custom(lambda s: (s.exp() >= 1.1).to(s.dtype))
    threshold = hn.InfoNCE(hardening=hn.Threshold(1.1), backend=backend)
    assert_close(hn.InfoNCE(hardening=step)(z1, z2), threshold(z1, z2))


def test_exact_debiasing_recovers_the_true_negatives_mean_where_hcl_does_not() -> None:
    # METHODS, section 1: a labelled toy whose candidates hold the anchor's class in exactly the share τ⁺, and whose
    # positives are a fair sample of that class. The truth is the tilted mean over the other class alone.
    prior, beta = 0.25, 1.0
    same, different = torch.tensor([0.2, 0.9, 1.4]), torch.tensor([-0.8, -0.5, -0.1, 0.0, 0.3, 0.5, 0.6, 0.7, 0.1])
    same, different = same.double(), different.double()
    candidates = torch.cat([same, different])[:, None]  # one dimension, unnormalized: the score is the entry itself
    anchor, positives = torch.ones(1, 1, dtype=torch.float64), same[None, :, None]
    weight = (beta * different).exp()
    truth = (weight * different.exp()).sum() / weight.sum()
    found = {}
    for form in ("hcl", "exact"):
        loss = hn.InfoNCE(
            temperature=1.0,
            hardening=hn.Exponential(beta),
            class_prior=prior,
            debias=form,
            in_batch=None,
            normalize=False,
            positive_in_denominator=False,
            negative_count=1,
        )
        # decoupled with Q = 1: L = log G − mean p
        found[form] = (loss(anchor, positives, negatives=candidates) + same.mean()).exp()
    assert_close(found["exact"], truth)
    assert abs(found["hcl"] - truth) > 0.05 * truth


def test_weight_range_changes_the_weights_only() -> None:
    z1, z2 = views()
    plain = hn.InfoNCE(normalize=False, hardening=hn.Exponential(1.0), weight_range=2.0)
    scores = torch.cat([z1, z2]) @ torch.cat([z1, z2]).T / 0.5
    own = torch.eye(12, dtype=torch.bool).repeat(2, 2)
    largest = scores.masked_fill(own, 0).abs().max()
    stretched = hn.InfoNCE(normalize=False, hardening=hn.Exponential(float(2.0 / largest)))
    assert_close(plain(z1, z2), stretched(z1, z2))


def test_k_draws_from_a_support_of_one_are_that_negative() -> None:
    z1, z2 = views()
    drawn = hn.InfoNCE(hardening=hn.Ring(0.999, 1.0), num_negatives=5)
    fixed = hn.InfoNCE(hardening=hn.Ring(0.999, 1.0), negative_count=5)
    assert_close(drawn(z1, z2), fixed(z1, z2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_draws_are_uniform_over_the_support(backend: str) -> None:
    from scipy.stats import chisquare

    size, draws = 16, 40_000
    # Only the fraction of draws that fall on each of 16 kept candidates shows in the gradient of the candidates.
    anchor, positive = torch.zeros(1, 16), torch.zeros(1, 16)
    negatives = torch.zeros(20, 16, requires_grad=True)
    loss = hn.InfoNCE(
        temperature=1.0,
        in_batch=None,
        normalize=False,
        num_negatives=draws,
        positive_in_denominator=False,
        backend=backend,
        generator=torch.Generator().manual_seed(0),
    )
    kept = torch.arange(20)[None] < size
    anchor[:, 0] = 1.0
    loss(anchor, positive, negatives=negatives, negative_mask=kept).backward()
    assert negatives.grad is not None
    counts = negatives.grad[:, 0] * draws  # each draw has softmax weight 1/draws
    assert counts[size:].abs().max() == 0
    assert chisquare(counts[:size].double().numpy().round()).pvalue > 0.01

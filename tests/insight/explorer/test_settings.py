"""The page's setting of a loss, and the weights of an exported table, against the library."""

import random

import pytest
import torch

import hardneg as hn
from hardneg.diagnostics.neighbors import nearest_others
from hardneg.insight.explorer.settings import loss_of, neighbor_weights, shown_setting


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (hn.simclr(temperature=0.2), {"temperature": 0.2}),
        (hn.hcl(beta=2.0, tau_plus=0.1), {"beta": 2.0, "prior": 0.1}),
        (hn.InfoNCE(0.5, (hn.Ring(0.5, 0.9), hn.Exponential(1.0))), {"lower": 0.5, "upper": 0.9, "beta": 1.0}),
        (hn.InfoNCE(0.5, hn.Threshold(cosine=0.25)), {"threshold": 0.25}),
        (hn.InfoNCE(0.5, hn.Threshold(score=0.5)), {"threshold": 0.25}),
        (hn.InfoNCE(0.5, hn.BelowPositive(margin=0.5)), {"limit": "margin", "margin": 0.25}),
        (hn.InfoNCE(0.5, hn.BelowPositive(relative=0.95)), {"limit": "relative", "relative": 0.95}),
        (hn.InfoNCE(supervision="negatives"), {"labels": True}),
        (hn.InfoNCE(hn.Learnable(0.07)), {"temperature": pytest.approx(0.07, rel=1e-6)}),
        (hn.InfoNCE(hn.Linear(0.5, 0.1)), {"temperature": pytest.approx(0.1)}),
        (hn.ring_nce(in_batch="both"), {"lower": pytest.approx(0.9), "upper": pytest.approx(0.99)}),
    ],
)
def test_a_loss_is_shown_by_its_sliders(loss: hn.InfoNCE, expected: dict[str, object]) -> None:
    shown = shown_setting(loss)
    assert shown.left_out == []
    assert {key: shown.setting[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("loss", "left_out"),
    [
        (hn.InfoNCE(hardening=hn.Guided()), "Guided"),
        (hn.InfoNCE(hardening={"batch": hn.Exponential(1.0)}), "by source"),
        (hn.InfoNCE(class_prior=0.1, debias="exact"), "exact"),
        (hn.InfoNCE(normalize=False), "normalize=False"),
        (hn.InfoNCE(negative_count="batch"), "negative_count='batch'"),
        (hn.InfoNCE(negative_count=100.0), "negative_count=100.0"),
        (hn.InfoNCE(num_negatives=5), "num_negatives=5"),
        (hn.InfoNCE(in_batch="other", symmetric=True), "in_batch='other' symmetric=True"),
        (hn.moco(), "in_batch=None (negatives of a queue or a bank)"),
        (hn.scl(), "positives by label of supervision='full'"),
        (hn.supcon(), "combine_positives='in_denominator'"),
        (hn.decoupled(), "positive_in_denominator=False"),
        (hn.InfoNCE(weight_range=2.0), "weight_range=2.0"),
        (hn.llave(), "grad_through_weights=False normalize_weights=False"),
    ],
)
def test_what_the_page_cannot_show_is_named(loss: hn.InfoNCE, left_out: str) -> None:
    assert left_out in " ".join(shown_setting(loss).left_out)


def test_a_setting_makes_the_loss_that_it_shows() -> None:
    loss = hn.InfoNCE(0.3, (hn.Ring(0.1, 0.8), hn.Threshold(cosine=0.1), hn.Exponential(2.0)), class_prior=0.1)
    assert repr(loss_of(shown_setting(loss).setting)) == repr(loss)


def test_exported_weights_are_shares_of_the_gradient_with_detached_weights() -> None:
    # With grad_through_weights=False and τ⁺ = 0, ∂L/∂s_j ∝ q_j e^{s_j}: the library's own gradient gives q.
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    features = torch.randn(40, 6, dtype=torch.float64, generator=generator)
    positives = features + 0.3 * torch.randn(40, 6, dtype=torch.float64, generator=generator)
    unit, second = (torch.nn.functional.normalize(each, dim=1) for each in (features, positives))
    labels = torch.arange(40) % 4 - 1
    near = nearest_others(features, 39).indices
    some_dropped = 0
    for _ in range(20):
        setting = {"temperature": draw.choice([0.2, 0.5]), "beta": draw.choice([0.0, 1.0, 3.0])}
        if draw.random() < 0.5:
            setting |= {"lower": 0.25, "upper": 0.9}
        if draw.random() < 0.5:
            setting["threshold"] = -0.2
        setting |= {"limit": draw.choice(["off", "margin", "relative"]), "margin": 0.3, "relative": 0.6}
        setting["labels"] = draw.random() < 0.5
        found = neighbor_weights(features, near, (unit * second).sum(dim=1), labels, setting)
        mine = loss_of(setting)
        loss = hn.InfoNCE(mine.temperature, mine.hardening, supervision=mine.supervision, in_batch=None,
                          reduction="none", backend="reference", grad_through_weights=False)  # fmt: skip
        given = {"labels": labels, "negative_labels": labels} if setting["labels"] else {}
        own = torch.arange(40)
        for anchor in (0, 7, 21):
            candidates = unit.clone().requires_grad_()
            rows = {name: value[anchor : anchor + 1] if name == "labels" else value for name, value in given.items()}
            value = loss(unit[anchor, None], second[anchor, None], negatives=candidates,
                         exclude=own[anchor, None], **rows)  # fmt: skip
            (gradient,) = torch.autograd.grad(value.sum(), candidates)
            cosines = unit @ unit[anchor]
            slopes = gradient.norm(dim=1) / (1 - cosines**2).clamp(min=1e-12).sqrt()
            weights = slopes * (-cosines / setting["temperature"]).exp()
            expected = (weights / weights.sum().clamp(min=1e-300))[near[anchor]]
            torch.testing.assert_close(found[anchor], expected, rtol=1e-7, atol=1e-10)
            some_dropped += bool((expected == 0).any() and (expected > 0).any())
    assert some_dropped > 20

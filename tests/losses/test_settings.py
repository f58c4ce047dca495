"""Settings of presets, settings assigned after construction, and the state of the draws."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from losses.kernels.interpreted import refuses_overwriting
from torch import Tensor
from torch.testing import assert_close

import hardneg as hn
from hardneg.losses.presets import infograph


def views(rows: int = 16, dim: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z1 = torch.randn(rows, dim, generator=generator)
    return z1, z1 + torch.randn(rows, dim, generator=generator)


def test_a_band_given_to_a_preset_is_added_to_its_tilt() -> None:
    ring = hn.Ring(0.5, 0.9)
    composed = hn.hcl(beta=5, tau_plus=0.0, hardening=ring)
    assert composed.hardening == (hn.Exponential(5), ring)
    expected = hn.InfoNCE(hardening=(ring, hn.Exponential(5)))(*views())
    assert_close(composed(*views()), expected)
    assert abs(float(expected) - float(hn.hcl(beta=5, tau_plus=0.0)(*views()))) > 1e-3
    assert abs(float(expected) - float(hn.InfoNCE(hardening=ring)(*views()))) > 1e-3


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (lambda: hn.hscl(hardening=hn.Ring(0.1, 0.9)), [hn.Exponential, hn.Ring]),
        (lambda: hn.hscl_threshold(hardening=hn.Exponential(1.0)), [hn.Threshold, hn.Exponential]),
        (lambda: hn.ring_nce(hardening=(hn.BelowPositive(), hn.Exponential(1))), None),
        (lambda: hn.simclr(hardening=hn.Ring(0.1, 0.9)), [hn.Ring]),
    ],
)  # fmt: skip
def test_presets_combine_their_hardening_with_given_ones(
    make: Callable[[], hn.InfoNCE], kinds: list[type] | None
) -> None:
    assert [type(part) for part in make().hardening] == (kinds or [hn.Ring, hn.BelowPositive, hn.Exponential])


@pytest.mark.parametrize("make", [hn.hcl, hn.hscl])
def test_a_second_tilt_raises(make: Callable[..., hn.InfoNCE]) -> None:
    with pytest.raises(ValueError, match="at most one tilt"):
        make(beta=2.0, hardening=hn.Exponential(1.0))


@pytest.mark.parametrize("make", [hn.debiased, hn.hcl, infograph])
def test_a_class_prior_under_two_names_raises(make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"class_prior is called tau_plus in \w+: pass tau_plus=0\.3"):
        make(tau_plus=0.1, class_prior=0.3)


# Options with which a setting matters, and the value assigned to it.
ASSIGNED: dict[str, tuple[dict[str, Any], Any]] = {
    "temperature": ({}, 0.2),
    "hardening": ({}, hn.Ring(0.2, 0.8)),
    "class_prior": ({"class_prior": 0.02}, 0.0),
    "debias": ({"class_prior": 0.02, "hardening": hn.Exponential(1.0)}, "exact"),
    "in_batch": ({}, "other"),
    "symmetric": ({"in_batch": "other"}, True),
    "supervision": ({"supervision": "positives"}, "full"),
    "combine_positives": ({"supervision": "full"}, "log_of_mean"),
    "average": ({"supervision": "full"}, "pairs"),
    "negative_count": ({}, 7.0),
    "positive_in_denominator": ({}, False),
    "num_negatives": ({}, 3),
    "weight_range": ({"normalize": False, "hardening": hn.Exponential(1.0)}, 2.0),
    "grad_through_weights": ({"hardening": hn.Exponential(1.0)}, False),
    "normalize_weights": ({"hardening": hn.Exponential(1.0)}, False),
    "normalize": ({}, False),
    "reduction": ({}, "sum"),
    "backend": ({}, "reference"),
}


def loss_and_gradient(loss: hn.InfoNCE) -> tuple[Tensor, Tensor]:
    z1, z2 = views()
    labels = {"labels": torch.arange(16) % 5 % 3} if loss.supervision != "none" else {}
    value = loss(z1.requires_grad_(), z2, **labels)
    value.sum().backward()
    assert z1.grad is not None
    return value.detach(), z1.grad


def made(options: dict[str, Any]) -> hn.InfoNCE:
    return hn.InfoNCE(**options, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ASSIGNED)
def test_a_setting_assigned_later_takes_effect(name: str) -> None:
    options, new = ASSIGNED[name]
    loss, expected, before = made(options), made({**options, name: new}), made(options)
    before_value, before_gradient = loss_and_gradient(before)
    setattr(loss, name, new)
    value, gradient = loss_and_gradient(loss)
    expected_value, expected_gradient = loss_and_gradient(expected)
    assert_close(value, expected_value)
    assert_close(gradient, expected_gradient)
    if name != "backend":
        assert value.shape != before_value.shape or not (
            torch.allclose(value, before_value) and torch.allclose(gradient, before_gradient)
        )
    assert repr(loss) == repr(expected)


def test_every_setting_is_assigned_in_the_test_above() -> None:
    assert set(hn.InfoNCE.SETTINGS) - set(ASSIGNED) == {"gather", "generator"}


@pytest.mark.parametrize(
    ("name", "new", "message"),
    [
        ("class_prior", 1.0, "class_prior must be"),
        ("temperature", -1.0, "temperature must be"),
        ("hardening", (hn.Exponential(1.0), hn.Exponential(2.0)), "at most one tilt"),
        ("hardening", "hard", "hardening must be"),
        ("symmetric", True, "needs in_batch='other'"),
        ("num_negatives", True, "num_negatives must be"),
        ("backend", "quick", "backend='quick' is not known"),
    ],
)
def test_an_invalid_setting_assigned_later_raises_and_changes_nothing(name: str, new: Any, message: str) -> None:
    loss = hn.hcl(tau_plus=0.01)
    shown, value = repr(loss), loss(*views())
    with pytest.raises(ValueError, match=message):
        setattr(loss, name, new)
    assert repr(loss) == shown
    assert_close(loss(*views()), value)


def test_a_learnable_temperature_and_a_number_replace_each_other() -> None:
    loss = hn.simclr(0.5)
    loss.temperature = hn.Learnable(0.1)
    assert [name for name, _ in loss.named_parameters()] == ["temperature.log_value"]
    assert_close(loss(*views()), hn.simclr(0.1)(*views()))
    loss.temperature = 0.3
    assert list(loss.parameters()) == []
    assert_close(loss(*views()), hn.simclr(0.3)(*views()))


def test_settings_of_the_other_losses_take_effect_or_raise() -> None:
    nodes, graphs, batch = torch.randn(6, 4), torch.randn(3, 4), torch.tensor([0, 0, 1, 1, 2, 2])
    jsd = hn.JSD()
    jsd.beta = 3.0
    assert_close(jsd(nodes, graphs, batch), hn.JSD(beta=3.0)(nodes, graphs, batch))
    with pytest.raises(ValueError, match="class_prior must be"):
        jsd.class_prior = 2.0
    assert jsd.class_prior == 0.0
    local = hn.LocalAggregation()
    with pytest.raises(ValueError, match="temperature must be"):
        local.temperature = 0.0
    assert local.temperature == 0.07


def test_schedules_still_move_after_an_assignment() -> None:
    loss = hn.simclr()
    loss.set_progress(0.5)
    loss.hardening = hn.Exponential(hn.Linear(0.0, 4.0))
    assert_close(loss(*views()), hn.InfoNCE(hardening=hn.Exponential(2.0))(*views()))
    loss.set_progress(1.0)
    assert_close(loss(*views()), hn.InfoNCE(hardening=hn.Exponential(4.0))(*views()))


def test_relative_limits_are_below_a_positive_with_a_negative_score() -> None:
    # The candidate at −0.49 scores above the positive at −0.50 and must be dropped. (Cosines of plane vectors.)
    def at(cosine: float) -> Tensor:
        return torch.tensor([[cosine, (1 - cosine**2) ** 0.5]])

    loss = hn.moco(temperature=1.0, hardening=hn.BelowPositive(relative=0.95))
    anchor = torch.tensor([[1.0, 0.0]])
    assert float(loss(anchor, at(-0.5), negatives=at(-0.49))) == 0.0
    assert float(loss(anchor, at(-0.5), negatives=at(-0.51))) == 0.0  # within 5 % of it
    assert_close(loss(anchor, at(-0.5), negatives=at(-0.53)), torch.tensor(-0.03).exp().log1p())
    assert_close(loss(anchor, at(0.5), negatives=at(0.47)), torch.tensor(-0.03).exp().log1p())
    assert float(loss(anchor, at(0.5), negatives=at(0.48))) == 0.0


def test_thresholds_at_tiny_temperatures_do_not_overflow() -> None:
    loss = hn.hscl_threshold(-0.5, 0.1, temperature=1e-4)
    z1, z2 = views()
    labels = torch.arange(16) % 4
    for progress, lowest in ((0.0, -0.5), (1.0, 0.1)):
        loss.set_progress(progress)
        assert torch.isfinite(loss(z1, z2, labels=labels))
        z = torch.nn.functional.normalize(torch.cat([z1, z2]), dim=1).double()
        y = labels.repeat(2)
        kept = (z @ z.T >= lowest) & (y[:, None] != y)
        assert loss.diagnostics()["support"] == pytest.approx(float(kept.sum(dim=1)[kept.any(dim=1)].double().mean()))


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_no_argument_may_be_overwritten_before_the_backward_pass(backend: str) -> None:
    generator = torch.Generator().manual_seed(1)
    z1, z2 = views(8)
    arguments = {
        "z1": z1, "z2": z2, "labels": torch.arange(8) % 3, "negatives": torch.randn(9, 6, generator=generator),
        "exclude": torch.arange(8), "negative_labels": torch.arange(9) % 4,
        "negative_mask": torch.rand(8, 9, generator=generator) < 0.7,
    }  # fmt: skip
    assert refuses_overwriting({"supervision": "full"}, arguments, backend) == list(arguments)


@pytest.mark.parametrize("symmetric", [False, True])
def test_draws_continue_after_loading_the_state_dict(symmetric: bool) -> None:
    def fresh() -> hn.InfoNCE:
        return hn.InfoNCE(in_batch="other", symmetric=symmetric, num_negatives=2, reduction="none")

    loss = fresh()
    values = [loss(*views()) for _ in range(5)]
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(values))
    again = fresh()
    again.load_state_dict(copy.deepcopy(loss.state_dict()))
    following = [loss(*views()) for _ in range(3)]
    torch.manual_seed(12345)  # the global generator is not used
    assert all(torch.equal(again(*views()), value) for value in following)
    assert not torch.equal(fresh()(*views()), following[0])


def test_draws_are_the_same_inside_a_compiled_graph() -> None:
    eager = hn.InfoNCE(num_negatives=3, generator=torch.Generator().manual_seed(4), backend="reference")
    inner = hn.InfoNCE(num_negatives=3, generator=torch.Generator().manual_seed(4), backend="reference")
    compiled = torch.compile(inner, backend="aot_eager")
    for _ in range(3):
        assert_close(compiled(*views()), eager(*views()))
    assert torch.equal(inner.draw_state, eager.draw_state)


def test_a_generator_seeds_the_draws() -> None:
    def drawn(seed: int) -> Tensor:
        loss = hn.InfoNCE(num_negatives=2, reduction="none", generator=torch.Generator().manual_seed(seed))
        result: Tensor = loss(*views())
        return result

    assert torch.equal(drawn(0), drawn(0))
    assert not torch.equal(drawn(0), drawn(1))


def test_draws_are_uniform_over_the_support() -> None:
    # One anchor, ten negatives with different losses; chi-square with 9 degrees of freedom.
    loss = hn.moco(temperature=1.0, num_negatives=1000, generator=torch.Generator().manual_seed(0))
    anchor, cosines = torch.tensor([[1.0, 0.0]]), torch.linspace(-0.9, 0.9, 10)
    negatives = torch.stack([cosines, (1 - cosines**2).sqrt()], dim=1)
    counts = torch.zeros(10)
    from hardneg.randomness import integers

    for call in range(20):
        key = torch.tensor([int(loss.draw_state[0]), call])
        picked = integers(key, torch.arange(1), 1000)[0] % 10
        expected = negatives[picked, 0].exp().mean()
        value = loss(anchor, torch.tensor([[1.0, 0.0]]), negatives=negatives)
        assert_close(value, torch.log1p(1000 * expected * torch.tensor(-1.0).exp()))
        counts += torch.bincount(picked, minlength=10)
    assert float(((counts - 2000).square() / 2000).sum()) < 27.9  # 0.999 quantile


@pytest.mark.parametrize(
    ("made", "name", "new"),
    [
        (hn.Queue(size=4, dim=2), "size", 8),
        (hn.MemoryBank(size=4, dim=2), "momentum", 2.0),
        (hn.Clusters(k=2), "k", 3),
        (hn.UniformBatchSampler(size=8, batch_size=2), "batch_size", 4),
        (hn.ProximityBatchSampler(size=80, batch_size=2, candidates=20, neighbors=5), "neighbors", 50),
        (hn.KNNBatchSampler(size=8, batch_size=2), "coverage", "once"),
    ],
)
def test_arguments_of_memories_and_samplers_cannot_be_assigned_later(made: Any, name: str, new: Any) -> None:
    before = getattr(made, name)
    with pytest.raises(AttributeError, match=f"{name} is fixed: make a new"):
        setattr(made, name, new)
    assert getattr(made, name) == before
    assert getattr(copy.deepcopy(made), name) == before


def test_a_parameter_as_setting_raises_and_changes_nothing() -> None:
    for name in ("temperature", "class_prior", "hardening", "negative_count"):
        loss = hn.InfoNCE(temperature=0.3)
        value = loss(*views())
        with pytest.raises(ValueError, match=name):
            setattr(loss, name, torch.nn.Parameter(torch.tensor(0.2)))
        assert list(loss.parameters()) == []
        assert_close(loss(*views()), value)


def test_losses_and_memories_may_be_subclassed() -> None:
    class Scaled(hn.InfoNCE):
        def __init__(self, factor: float = 2.0, **options: Any) -> None:
            super().__init__(**options)
            self.factor = factor

        def forward(self, *given: Tensor, **named: Any) -> Tensor:
            return self.factor * super().forward(*given, **named)

    class Small(hn.Queue):
        def __init__(self) -> None:
            super().__init__(size=8, dim=5)

    loss = Scaled(temperature=0.3)
    loss.factor = 3.0
    loss.class_prior = 0.01
    assert_close(loss(*views()), 3 * hn.InfoNCE(temperature=0.3, class_prior=0.01)(*views()))
    with pytest.raises(AttributeError, match="size is fixed"):
        Small().size = 9


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_a_checkpointed_loss_is_correct_or_raises(backend: str, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    z1, z2 = views()
    plain, again = (z1.clone().requires_grad_() for _ in range(2))
    loss = hn.hcl(tau_plus=0.01, backend=backend)
    loss(plain, z2).backward()
    checkpoint(lambda z: loss(z, z2), again, use_reentrant=reentrant).backward()
    assert_close(again.grad, plain.grad)
    drawing = hn.InfoNCE(num_negatives=3, backend=backend)
    value = checkpoint(lambda z: drawing(z, z2), again, use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match="keep the loss outside"):
        value.backward()


def test_a_loss_constructed_in_inference_mode_can_train() -> None:
    with torch.inference_mode():
        loss, labels = hn.InfoNCE(num_negatives=3, supervision="negatives"), torch.arange(16) % 3
    z1, z2 = views()
    loss(z1.requires_grad_(), z2, labels=labels).backward()
    assert int(loss.draw_state[1]) == 1


@pytest.mark.parametrize("relative", [1.0, 1.5, 3.0])
def test_relative_limits_of_anchors_without_positives_keep_nothing(relative: float) -> None:
    labels = torch.tensor([0, 0, 1, 1, 2, 3, 4, 5])
    for backend in ("tiled", "reference"):
        loss = hn.InfoNCE(hardening=hn.BelowPositive(relative=relative), supervision="full", backend=backend)
        assert torch.isfinite(loss(views(8)[0], labels=labels))
        assert loss.diagnostics()["without_candidates"] >= 4
        assert loss.diagnostics()["effective_negatives"] == loss.diagnostics()["effective_negatives"]


def test_assigning_progress_moves_schedules() -> None:
    beta = hn.Linear(0.0, 4.0)
    for make in (lambda: hn.InfoNCE(hardening=hn.Exponential(beta)), lambda: hn.JSD(beta)):
        assigned, moved = make(), make()
        assigned.progress = 1.0
        moved.set_progress(1.0)
        given = views() if isinstance(assigned, hn.InfoNCE) else (*views(), torch.arange(16))
        assert_close(assigned(*given), moved(*given))
        with pytest.raises(ValueError, match="fraction must be"):
            assigned.progress = 2.0
        assert assigned.progress == 1.0
    with pytest.raises(AttributeError, match="cannot be deleted"):
        del hn.simclr().class_prior


def test_a_threshold_on_cosines_follows_the_temperature() -> None:
    labels = torch.arange(16) % 4
    moved, made = hn.hscl_threshold(-0.3, 0.0, temperature=0.5), hn.hscl_threshold(-0.3, 0.0, temperature=0.1)
    for loss in (moved, made):
        loss.set_progress(0.5)
    moved.temperature = 0.1
    assert_close(moved(*views(), labels=labels), made(*views(), labels=labels))
    with pytest.raises(ValueError, match="needs a temperature that is known"):
        moved.temperature = hn.Learnable(0.1)
    with pytest.raises(ValueError, match="exactly one of"):
        hn.Threshold(1.0, cosine=0.5)

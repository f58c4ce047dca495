"""Schedules: their values against the papers' formulas, their state, and their representation."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hardneg as hn
from hardneg.losses.schedules import value


@pytest.mark.parametrize("epochs", [7, 100, 400])
@pytest.mark.parametrize("changes", [1, 3, 10])
def test_hardness_anneal_is_the_papers_formula_at_every_epoch(epochs: int, changes: int) -> None:
    for epoch in range(epochs + 1):
        expected = 2.0 * (1 - (epoch * changes // epochs) / changes)  # HCL appendix D.1, in integers
        assert hn.HardnessAnneal(2.0, changes).at(epoch / epochs) == pytest.approx(expected)


@pytest.mark.parametrize("changes", [1, 3, 10])
def test_hardness_anneal_up_takes_the_same_values_in_reverse(changes: int) -> None:
    middles = [(step + 0.5) / changes for step in range(changes)]
    down = [hn.HardnessAnneal(1.0, changes).at(p) for p in middles]
    up = [hn.HardnessAnneal(1.0, changes, "up").at(p) for p in middles]
    assert up == pytest.approx(down[::-1])


def test_ring_nce_anneals_from_all_but_the_closest_to_the_papers_ring() -> None:
    loss = hn.ring_nce()
    for epoch, lower, upper in [(0, 0.0, 0.9), (50, 0.45, 0.945), (100, 0.9, 0.99), (300, 0.9, 0.99)]:
        loss.set_progress(epoch / 300)
        assert loss.hardening[0].at(loss.progress).percentiles() == pytest.approx((lower, upper))


def test_ring_annealing_ends_after_a_third_of_training() -> None:
    shares = [hn.RingAnneal().at(epoch / 300) for epoch in (0, 50, 99, 100, 101, 300)]
    assert shares == pytest.approx([1.0, 0.55, 0.109, 0.1, 0.1, 0.1])


def test_hscl_threshold_moves_as_equation_4() -> None:
    loss = hn.hscl_threshold(-0.5, 0.1, temperature=0.5)
    for epoch in (1, 50, 200):
        loss.set_progress((epoch - 1) / 199)
        cosine = -0.5 + (epoch - 1) / 199 * 0.6
        assert loss.hardening[0].at(loss.progress).in_scores(0.5).bounds(None)[0] == pytest.approx(cosine / 0.5)


@given(
    start=st.floats(-5, 5),
    end=st.floats(-5, 5),
    until=st.floats(0.01, 1),
    progress=st.floats(0, 1),
)
def test_linear_is_between_its_ends(start: float, end: float, until: float, progress: float) -> None:
    between = hn.Linear(start, end, until).at(progress)
    assert min(start, end) - 1e-12 <= between <= max(start, end) + 1e-12
    assert hn.Linear(start, end, until).at(1.0) == end


def test_arithmetic_of_schedules_is_that_of_their_values() -> None:
    a, b = hn.Linear(1.0, 3.0), hn.Steps([2.0, 4.0], [0.5])
    for p in (0.0, 0.4, 0.5, 1.0):
        x, y = a.at(p), b.at(p)
        found = [value(s, p) for s in (a + b, 1 + a, a - b, 1 - a, a * b, 2 * a, a / b, 1 / a, -a)]
        assert found == pytest.approx([x + y, 1 + x, x - y, 1 - x, x * y, 2 * x, x / y, 1 / x, -x])
    assert (a * 0).exp().at(0.3) == 1.0


def test_adaptive_moves_down_on_gain_up_on_loss_and_stays_in_range() -> None:
    share = hn.Adaptive(start=0.2, step=0.05, window=5)
    share.update(0.5)
    assert share.at(0.0) == 0.2  # nothing to compare with yet
    for accuracy in (0.6, 0.7, 0.8, 0.9):
        share.update(accuracy)
    assert share.at(0.0) == pytest.approx(0.1)  # 0.2 − 4·0.05 is below the minimum
    share.update(0.1)
    assert share.at(0.0) == pytest.approx(0.15)


def test_adaptive_with_lower_is_better_moves_down_when_the_loss_falls() -> None:
    share = hn.Adaptive(step=0.01, window=10, better="lower")
    for loss in (3.0, 2.5, 2.0):
        share.update(loss)
    assert share.at(0.0) == pytest.approx(0.98)


def test_adaptive_compares_with_the_mean_of_its_window_only() -> None:
    share = hn.Adaptive(window=2, step=0.1)
    for reading in (100.0, 0.0, 0.0, 0.5):  # the 100 is outside the window by the fourth
        share.update(reading)
    assert share.at(0.0) == pytest.approx(0.9)  # up, up (clamped at 1), then down once


def test_progress_and_adaptive_state_are_in_the_state_dict(tmp_path: object) -> None:
    share = hn.Adaptive()
    loss = hn.InfoNCE(hardening=hn.Ring(1 - share, 1 - 0.1 * share), temperature=hn.Learnable(0.2))
    for reading in (0.1, 0.3, 0.2, 0.4):
        share.update(reading)
    loss.set_progress(0.25)
    file = f"{tmp_path}/loss.pt"
    torch.save(loss.state_dict(), file)
    other = hn.Adaptive()
    fresh = hn.InfoNCE(hardening=hn.Ring(1 - other, 1 - 0.1 * other), temperature=hn.Learnable(0.5))
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert fresh.progress == 0.25
    assert other.state() == share.state()  # once, though it drives two settings
    assert isinstance(fresh.temperature, hn.Learnable)
    assert float(fresh.temperature().detach()) == pytest.approx(0.2)


def test_a_loss_can_be_copied_and_pickled_state_included() -> None:
    loss = hn.hcl(beta=hn.HardnessAnneal(1.0, 4))
    loss.set_progress(0.5)
    loss(torch.randn(4, 3), torch.randn(4, 3))
    z = torch.randn(4, 3), torch.randn(4, 3)
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert twin(*z) == loss(*z)


@pytest.mark.filterwarnings("ignore:.*anchors are floored")
@pytest.mark.parametrize("setting", ["temperature", "class_prior", "beta", "tau", "ring", "margin"])
def test_a_schedule_moves_every_setting_that_takes_one(setting: str) -> None:
    torch.manual_seed(0)
    z1 = torch.randn(16, 8)
    z2 = z1 + torch.randn(16, 8)

    def make(x: object) -> hn.InfoNCE:
        return {
            "temperature": lambda: hn.InfoNCE(temperature=x),  # type: ignore[arg-type]
            "class_prior": lambda: hn.InfoNCE(class_prior=x),  # type: ignore[arg-type]
            "beta": lambda: hn.InfoNCE(hardening=hn.Exponential(x)),  # type: ignore[arg-type]
            "tau": lambda: hn.InfoNCE(hardening=hn.Threshold(x)),  # type: ignore[arg-type]
            "ring": lambda: hn.InfoNCE(hardening=hn.Ring(x, 1.0)),  # type: ignore[arg-type]
            "margin": lambda: hn.InfoNCE(hardening=hn.BelowPositive(x)),  # type: ignore[arg-type]
        }[setting]()

    scheduled = make(hn.Linear(0.1, 0.6))
    for progress, number in ((0.0, 0.1), (0.5, 0.35), (1.0, 0.6)):
        scheduled.set_progress(progress)
        assert scheduled(z1, z2) == pytest.approx(float(make(number)(z1, z2)), rel=1e-6)
    assert make(0.1)(z1, z2) != make(0.6)(z1, z2)


@pytest.mark.parametrize(
    "loss",
    [
        lambda: hn.InfoNCE(temperature=hn.Steps([0.5, -1.0, 0.5], [0.3, 0.6])),
        lambda: hn.InfoNCE(class_prior=hn.Steps([0.1, 1.5, 0.1], [0.3, 0.6])),
        lambda: hn.InfoNCE(hardening=hn.Exponential(hn.Steps([0.1, -1.5, 0.1], [0.3, 0.6]))),
        lambda: hn.InfoNCE(hardening=hn.Ring(hn.Steps([0.1, 0.9, 0.1], [0.3, 0.6]), 0.5)),
    ],
)
def test_a_schedule_with_an_invalid_value_raises_when_it_is_reached(loss: Callable[[], hn.InfoNCE]) -> None:
    made = loss()
    with pytest.raises(ValueError, match="must be"):
        made.set_progress(0.5)


def test_an_adaptive_schedule_moves_the_loss_without_set_progress() -> None:
    share = hn.Adaptive(step=0.4)
    loss = hn.InfoNCE(hardening=hn.Ring(1 - share, 1.0), in_batch="other")
    z1, z2 = torch.randn(2, 11, 4)
    supports = []
    for reading in (0.1, 0.2, 0.3):
        share.update(reading)
        loss(z1, z2)
        supports.append(loss.diagnostics()["support"])
    assert supports == [10.0, 6.0, 2.0]


def test_presets_with_schedules_can_be_pickled() -> None:
    loss = pickle.loads(pickle.dumps(hn.hscl_threshold()))
    assert loss.supervision == "full"


SHARE = hn.RingAnneal()


@pytest.mark.parametrize(
    "schedule",
    [
        hn.Constant(0.1),
        hn.Linear(0.2, 1 / 3, until=0.7),
        hn.Steps([1.0, 0.5, 0.1], [0.25, 0.5]),
        hn.HardnessAnneal(2.0, 3, "up"),
        SHARE,
        hn.Adaptive(0.8, 0.1, 3, 0.2, 0.9, "lower"),
        1 - SHARE,
        2 * SHARE + hn.Linear(0.0, 1.0),
        (1 - 0.1 * SHARE) / (3 - hn.Constant(1.0)),
        -SHARE - (0.5 - SHARE),
        (SHARE * 2).exp(),
        hn.Linear(0.0, 1.0).exp() * 2,
    ],
)
def test_evaluating_the_repr_of_a_schedule_gives_the_same_schedule(schedule: hn.Schedule) -> None:
    again = eval(repr(schedule), {name: getattr(hn, name) for name in hn.__all__})
    assert repr(again) == repr(schedule)
    assert [again.at(p / 20) for p in range(21)] == [schedule.at(p / 20) for p in range(21)]


def test_the_repr_of_a_loss_shows_its_schedules() -> None:
    assert "Exponential(beta=Linear(start=0.0, end=2.0, until=1.0))" in repr(hn.hscl(beta=hn.Linear(0, 2)))


def test_a_user_defined_schedule_has_a_repr() -> None:
    class Squared(hn.Schedule):
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def at(self, progress: float) -> float:
            return self.factor * progress**2

    class Renamed(Squared):
        def __init__(self, other: float) -> None:
            super().__init__(other)

    assert repr(1 - Squared(3.0)) == "(1.0 - Squared(factor=3.0))"
    assert "Renamed object" in repr(Renamed(3.0))

"""Recipes, batches and optimizers, each against its plain definition."""

import copy
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hardneg as hn
from hardneg.methods.step_timer import StepTimer
from hardneg.samplers.refreshed import RefreshedBatchSampler
from hardneg.training import optimizers, recipe
from hardneg.training.batches import Batches, sampler
from hardneg.training.callbacks.progress_bar import Bar


@given(
    size=st.integers(2, 40),
    batch=st.integers(1, 12),
    epochs=st.integers(1, 4),
    start=st.integers(0, 30),
    name=st.sampled_from(["uniform", "proximity", "knn"]),
)
def test_batches_resume_anywhere(size: int, batch: int, epochs: int, start: int, name: str) -> None:
    options = [f"trainer.batch_size={min(batch, size)}", f"batches.sampler={name}", "batches.refresh_every=2",
               f"batches.candidates={size - 1}", f"batches.neighbors={min(3, size - 1)}"]  # fmt: skip
    settings = recipe.load({}, options)
    embeddings = torch.randn(size, 3, generator=torch.Generator().manual_seed(size))

    def used(batches: Batches, start: int) -> tuple[list[list[int]], list[dict[str, Any]]]:
        """The batches from a step to the end of the last epoch, and the state after each."""
        drawn, states = [], []
        for _ in range(start // len(batches), epochs):
            for index in batches:
                drawn.append(index.tolist())
                if isinstance(batches.sampler, RefreshedBatchSampler):
                    batches.sampler.after_step(embeddings + start + len(drawn))
                states.append(batches.state_after(start + len(drawn)))
        return drawn, states

    whole, states = used(Batches(sampler(settings, size)), 0)
    assert len(whole) == epochs * (size // min(batch, size))
    start = min(start, len(whole) - 1)
    again = Batches(sampler(settings, size))
    again.resume(states[start])
    assert used(again, start + 1)[0] == whole[start + 1 :]


@pytest.mark.parametrize("start", [0, 1, 63, 64, 65, 149, 150, 151, 299])
def test_batches_drawn_ahead_are_those_of_the_sampler(start: int) -> None:
    def drawn(epoch: int) -> list[list[int]]:
        plain = hn.UniformBatchSampler(size=450, batch_size=3, seed=5)
        plain.set_epoch(epoch)
        return list(plain)

    batches = Batches(hn.UniformBatchSampler(size=450, batch_size=3, seed=5))
    taken = list(itertools.islice(itertools.chain(batches, batches), start))
    batches.resume(batches.state_after(start))
    for _ in range(start // 150, 2):
        taken += batches
    assert [index.tolist() for index in taken] == drawn(0) + drawn(1)
    assert [index.tolist() for index in batches.drawn] == drawn(1)[max(0, start - 150) :]


def test_the_last_batch_of_an_epoch_may_be_short() -> None:
    batches = Batches(hn.UniformBatchSampler(size=10, batch_size=4, drop_last=False))
    assert [[len(index) for index in batches] for _ in range(2)] == [[4, 4, 2]] * 2


def test_lars_does_not_change_weights_without_a_gradient() -> None:
    layer = nn.Linear(2, 2)
    before = copy.deepcopy(layer.state_dict())
    optimizer = optimizers.LARS(layer.parameters(), lr=1.0)
    optimizer.step()
    layer.bias.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(layer.weight, before["weight"])
    assert torch.equal(layer.bias, before["bias"] - 1)


def test_lars_takes_the_steps_of_its_definition() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    other = copy.deepcopy(layer)
    optimizer = optimizers.LARS(layer.parameters(), lr=0.5, momentum=0.8, weight_decay=0.1, trust=0.01)
    momentum = [torch.zeros_like(w) for w in other.parameters()]
    for _ in range(3):
        x = torch.randn(4, 3)
        for network in (layer, other):
            network.zero_grad()
            network(x).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            for w, m in zip(other.parameters(), momentum, strict=True):
                assert w.grad is not None
                g = w.grad.clone()
                if w.dim() > 1:
                    g = g + 0.1 * w
                    g = g * (0.01 * float(w.norm()) / float(g.norm()))
                m.copy_(0.8 * m + g)
                w -= 0.5 * m
    for one, another in zip(layer.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, another)


def test_a_run_may_be_all_warmup() -> None:
    rate = optimizers.learning_rate("cosine", warmup=1.0)
    assert [rate(p) for p in (0.0, 0.5, 1.0)] == [0.0, 0.5, 1.0]


def test_numbers_that_yaml_takes_for_text_are_numbers_everywhere() -> None:
    made = recipe.load({}, ["objective.temperature=1e-1", "views.options={scale: [2e-1, 1.0]}"])
    assert made.objective["temperature"] == 0.1
    assert made.views.options["scale"] == [0.2, 1.0]


def test_scaled_and_clipped_gradients_get_an_optimizer_that_lightning_clips_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lightning.pytorch.plugins.precision.amp import _optimizer_handles_unscaling

    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda weight: True))
    network = torch.nn.Linear(2, 2)
    assert _optimizer_handles_unscaling(optimizers.build("adam", [network], 0.1, 0.0))
    assert not _optimizer_handles_unscaling(optimizers.build("adam", [network], 0.1, 0.0, scaled_and_clipped=True))


def test_learning_rates_follow_their_schedules() -> None:
    step = optimizers.learning_rate("step", drops=(0.5, 0.75))
    assert [step(p) for p in (0.0, 0.5, 0.8)] == pytest.approx([1.0, 0.1, 0.01])
    assert optimizers.learning_rate("constant")(0.7) == 1.0
    with pytest.raises(ValueError, match="did you mean 'cosine'"):
        optimizers.learning_rate("cosin")
    with pytest.raises(ValueError, match="did you mean 'adam'"):
        optimizers.build("adm", [], 0.1, 0.0)


def test_a_recipe_that_is_written_and_read_is_equal(tmp_path: Path) -> None:
    made = recipe.load(
        {"about": "τ", "optimizer": {"drops": [3, 5]}},
        [
            "optimizer.lr=1e-3",
            "objective.preset=hcl",
            "objective.beta={schedule: linear, start: 2, end: 0}",
            "optimizer.clip=1",
        ],
    )
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe.dump(made))
    assert recipe.load(file) == made
    loss = made.make_loss()
    loss.set_progress(0.5)
    assert loss.hardening[0].at(loss.progress).tilt() == 1.0
    assert (made.optimizer.clip, made.optimizer.lr) == (1.0, 0.001)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainr.epochs=3"], "trainr is not a key of the recipe: did you mean trainer"),
        (["trainer.epochs=many"], "trainer.epochs must be an integer, got 'many'"),
        (["trainer.epochs=1.5"], "trainer.epochs must be an integer, got 1.5"),
        (["trainer.channels_last=3"], "trainer.channels_last must be true or false, got 3"),
        (["seed=true"], "seed must be an integer, got True"),
        (["trainer=3"], "trainer must hold keys and values"),
        (["objective.preset=hlc"], "objective.preset='hlc' is not known: did you mean hcl"),
        (["objective.preset=hcl", "objective.bta=1"], "bta is not an argument of hcl: did you mean objective.beta"),
        (["objective.beta={schedule: lin}", "objective.preset=hcl"], "did you mean linear"),
        (["objective.temperature=-1"], "temperature must be > 0"),
        (["epochs"], "an override must be key=value"),
    ],
)
def test_a_wrong_recipe_is_refused_with_a_suggestion(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe.load({}, overrides)


def test_unreadable_yaml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(ValueError, match="not readable YAML"):
        recipe.load(tmp_path / "bad.yaml")


def test_the_objective_of_a_recipe_is_the_preset() -> None:
    loss = recipe.load({"objective": {"preset": "hscl", "beta": 2, "temperature": 0.2}}).make_loss()
    assert isinstance(loss, hn.InfoNCE)
    assert loss.supervision == "full"
    assert loss.temperature == 0.2


def test_the_timer_does_not_count_the_interval_before_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 100.0, 104.0])
    monkeypatch.setattr("hardneg.methods.step_timer.time.perf_counter", lambda: next(now))
    timer = StepTimer()
    timer.mark("data")
    timer.mark("augmentation")
    timer.mark("network")
    timer.restart()
    timer.mark("data")
    assert timer.read() == {"augmentation": 1.0, "network": 2.0, "data": 4.0}


class Event:
    """A CUDA event whose time the test sets."""

    now, made = 0.0, 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        Event.made += 1

    def record(self) -> None:
        self.at = Event.now

    def elapsed_time(self, other: "Event") -> float:
        return 1000 * (other.at - self.at)


def test_the_timer_of_a_gpu_reuses_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    timer = StepTimer()
    timer.on_gpu = True
    timer.restart()
    for seconds in (1.0, 2.0, 3.0):
        for name in ("data", "network", "data", "network"):
            Event.now += seconds
            timer.mark(name)
        assert timer.read() == {"data": 2 * seconds, "network": 2 * seconds}
    assert Event.made == 5


def test_a_bar_is_updated_at_most_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    moves, now = [], iter([0.0, 0.01, 0.09, 0.11, 0.15, 0.3])
    monkeypatch.setattr("hardneg.training.callbacks.progress_bar.time.monotonic", lambda: next(now))
    stack = SimpleNamespace(update=lambda task, completed, facts: moves.append(completed))
    bar = Bar(stack, "run")  # type: ignore[arg-type]
    for step in range(6):
        bar.on_train_batch_end(SimpleNamespace(global_step=step, callbacks=[]), None, None, None, step)  # type: ignore[arg-type]
    assert moves == [0, 3, 5]


@pytest.mark.parametrize(("anneal", "shares"), [
    ("linear", [1.0, 0.55, 0.1, 0.1]), ("step", [1.0, 0.7, 0.1, 0.1]), ("none", [0.1] * 4),
])  # fmt: skip
def test_the_ring_narrows_by_its_annealing_policy(anneal: str, shares: list[float]) -> None:
    loss = recipe.load({"objective": {"preset": "ring_nce", "anneal": anneal}}).make_loss()
    for progress, share in zip((0.0, 1 / 6, 1 / 3, 1.0), shares, strict=True):
        loss.set_progress(progress)
        lower, upper = loss.hardening[0].at(progress).percentiles() or (0, 0)
        assert (lower, upper) == pytest.approx((1 - share, 1 - 0.1 * share))


def test_the_ring_narrows_while_the_observed_metric_improves() -> None:
    for anneal, readings, step in (("accuracy", (0.5, 0.6, 0.7), 0.05), ("loss", (3.0, 2.0, 1.0), 0.01)):
        loss = recipe.load({"objective": {"preset": "ring_nce", "anneal": anneal}}).make_loss()
        assert loss.observes_loss == (anneal == "loss")
        for reading in readings:
            loss.observe(**{anneal: reading})
            loss.observe(**{"loss" if anneal == "accuracy" else "accuracy": 1e9})  # not observed
        assert (loss.hardening[0].at(0.0).percentiles() or (0, 0))[0] == pytest.approx(2 * step)
        other = recipe.load({"objective": {"preset": "ring_nce", "anneal": anneal}}).make_loss()
        other.load_state_dict(loss.state_dict())
        assert other.hardening[0].at(0.0).percentiles() == loss.hardening[0].at(0.0).percentiles()

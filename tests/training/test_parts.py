"""Recipes, batches and optimisers, each against its plain definition."""

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hardneg as hn
from hardneg.training import optimizers, recipe
from hardneg.training.batches import Batches


@given(
    size=st.integers(1, 40),
    batch=st.integers(1, 12),
    epochs=st.integers(1, 4),
    start=st.integers(0, 30),
    processes=st.sampled_from([1, 2, 3]),
)
def test_batches_resume_anywhere_and_are_shared_out(
    size: int, batch: int, epochs: int, start: int, processes: int
) -> None:
    batch = min(batch * processes, size - size % processes) or processes
    if batch > size:
        return
    whole = [index.tolist() for index in Batches(size, batch, epochs, seed=1)]
    assert len(whole) == epochs * (size // batch)
    for epoch in range(epochs):
        steps = size // batch
        seen = [i for index in whole[epoch * steps : (epoch + 1) * steps] for i in index]
        assert len(set(seen)) == len(seen) == steps * batch
    parts = []
    for rank in range(processes):
        batches = Batches(size, batch, epochs, 1, rank, processes)
        batches.start = min(start, len(batches))
        parts.append([index.tolist() for index in batches])
    joined = [[i for share in shares for i in share] for shares in zip(*parts, strict=True)]
    assert joined == whole[min(start, len(whole)) :]


def test_batches_of_the_wrong_size_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size must be from 1 to the number of samples, 10, got 11"):
        Batches(10, 11, 1, 0)
    with pytest.raises(ValueError, match="multiple of the 2 processes"):
        Batches(10, 3, 1, 0, 0, 2)


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


def test_learning_rates_follow_their_schedules() -> None:
    step = optimizers.learning_rate("step", drops=(0.5, 0.75))
    assert [step(p) for p in (0.0, 0.5, 0.8)] == pytest.approx([1.0, 0.1, 0.01])
    assert optimizers.learning_rate("constant")(0.7) == 1.0
    with pytest.raises(ValueError, match="did you mean 'cosine'"):
        optimizers.learning_rate("cosin")
    with pytest.raises(ValueError, match="did you mean 'adam'"):
        optimizers.build("adm", [], 0.1, 0.0)


def test_a_recipe_survives_being_written_and_read(tmp_path: Path) -> None:
    made = recipe.load(
        {"about": "τ", "optimizer": {"lr": "1e-3", "drops": [3, 5]}},
        ["objective.preset=hcl", "objective.beta={schedule: linear, start: 2, end: 0}", "optimizer.clip=1"],
    )
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe.dump(made))
    assert recipe.load(file) == made
    loss = recipe.objective(made)
    loss.set_progress(0.5)
    assert loss.hardening[0].at(loss.progress).tilt() == 1.0
    assert made.optimizer.clip == 1.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainr.epochs=3"], "trainr is not a key of the recipe: did you mean trainer"),
        (["trainer.epochs=many"], "trainer.epochs must be int, got 'many'"),
        (["trainer.epochs=1.5"], "trainer.epochs must be int, got 1.5"),
        (["trainer.channels_last=3"], "trainer.channels_last must be bool, got 3"),
        (["seed=true"], "seed must be int, got True"),
        (["trainer=3"], "trainer must hold keys and values"),
        (["objective.preset=hlc"], "objective.preset='hlc' is not known: did you mean hcl"),
        (["objective.preset=hcl", "objective.bta=1"], "objective.bta is not an argument of hcl: did you mean beta"),
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
    loss = recipe.objective(recipe.load({"objective": {"preset": "hscl", "beta": 2, "temperature": 0.2}}))
    assert isinstance(loss, hn.InfoNCE)
    assert loss.supervision == "full"
    assert loss.temperature == 0.2

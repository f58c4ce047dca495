"""Checkpoints without the state of a loss load with a warning, also with strict=True."""

import pytest
import torch
from torch import nn

import hardneg as hn


def model(loss: nn.Module | None) -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 2))
    if loss is not None:
        module.add_module("loss", loss)
    return module


@pytest.mark.parametrize(
    ("loss", "missing"),
    [
        (hn.simclr(), ["loss._extra_state"]),
        (hn.InfoNCE(num_negatives=3), ["loss.draw_state", "loss._extra_state"]),
        (hn.clip(), ["loss._extra_state", "loss.temperature.log_value"]),
        (hn.JSD(), ["loss._extra_state"]),
        (hn.LocalAggregation(hn.Learnable(0.1)), ["loss._extra_state", "loss.temperature.log_value"]),
    ],
)
def test_a_checkpoint_from_before_the_loss_was_added_loads(loss: nn.Module, missing: list[str]) -> None:
    before = {name: tensor.clone() for name, tensor in loss.state_dict().items()}
    with pytest.warns(UserWarning, match="keeps its current state") as caught:
        found = model(loss).load_state_dict(model(None).state_dict(), strict=True)
    assert found.missing_keys == []
    for name in missing:
        assert any(name in str(warning.message) for warning in caught)
    assert all(torch.equal(tensor, before[name]) for name, tensor in loss.state_dict().items())


def test_other_missing_weights_are_still_refused() -> None:
    with pytest.warns(UserWarning, match="keeps its current state"), pytest.raises(RuntimeError, match=r"0\.weight"):
        model(hn.simclr()).load_state_dict({})


def test_a_complete_checkpoint_loads_without_warning(recwarn: pytest.WarningsRecorder) -> None:
    saved = hn.InfoNCE(hn.Learnable(0.2), num_negatives=3)
    saved.set_progress(0.5)
    loaded = hn.InfoNCE(hn.Learnable(0.5), num_negatives=3)
    model(loaded).load_state_dict(model(saved).state_dict())
    assert loaded.progress == 0.5
    assert torch.equal(loaded.draw_state, saved.draw_state)
    assert not recwarn.list


def test_a_fixed_temperature_may_become_learnable_between_checkpoints() -> None:
    saved, loaded = hn.simclr(0.2), hn.simclr(hn.Learnable(0.3))
    saved.set_progress(0.25)
    with pytest.warns(UserWarning, match=r"no temperature\.log_value: Learnable keeps its current state"):
        loaded.load_state_dict(saved.state_dict())
    assert loaded.progress == 0.25
    assert float(loaded.temperature().detach()) == pytest.approx(0.3)  # type: ignore[operator]

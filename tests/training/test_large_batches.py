"""Batches that do not fit: gradient accumulation, and encoders that run in chunks."""

import copy
import json
from pathlib import Path

import pytest
import torch
from methods.gradients import Gradients
from torch import Tensor, nn
from torch.testing import assert_close

import hardneg as hn
from hardneg.training import build, engine, recipe, run
from hardneg.training.chunked_encoders import in_chunks

# Steps too small to change a weight: all gradients of a run are then taken at the same weights.
STILL = ["trainer.epochs=1", "trainer.knn_every=0", "optimizer={name: sgd, lr: 1.0e-30, weight_decay: 0, momentum: 0}"]
PLAIN = ["encoder.name=processes:plain_encoder", "encoder.options={}", "encoder.norm=false"]  # no batch-norm


def gradients(folder: Path, *overrides: str, name: str = "digits-simclr") -> list[dict[str, Tensor]]:
    """The gradient of every optimizer step of a run."""
    found = Gradients(str(folder))
    run.train(recipe.load(recipe.find(name), [*STILL, *overrides]), folder, callbacks=[found])
    return found.steps


@pytest.mark.parametrize(("method", "fixed"), [("digits-simclr", []), ("digits-moco", ["memory.momentum=1"])])
def test_an_accumulated_gradient_is_the_mean_over_its_batches(tmp_path: Path, method: str, fixed: list[str]) -> None:
    # The queue of MoCo is updated after each batch, with one batch per step as with two.
    one = gradients(tmp_path / "one", *fixed, name=method)
    two = gradients(tmp_path / "two", *fixed, "trainer.accumulate=2", name=method)
    assert (len(one), len(two)) == (5, 3)
    for step, batches in enumerate([one[0:2], one[2:4], one[4:5]]):  # Lightning divides the last one by 2, too
        for name, gradient in two[step].items():
            assert_close(gradient, sum(batch[name] for batch in batches) / 2, rtol=1e-4, atol=1e-6)


def test_steps_count_optimizer_steps_and_schedules_follow_them(tmp_path: Path) -> None:
    overrides = ["trainer.epochs=2", "trainer.accumulate=2", "optimizer.schedule=cosine", "trainer.knn_every=0"]
    run.train(recipe.load(recipe.find("digits-simclr"), overrides), tmp_path / "run")
    lines = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 6]  # five batches per epoch
    assert [line["lr"] for line in lines] == pytest.approx([0.0005, 0.0])
    assert 5 < lines[0]["loss"] < 7  # of a batch, as without accumulation


class Encoder(nn.Module):
    """Has dropout and batch-norm, if they are wanted, and records how many samples it is given at a time."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        norm_layer = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(6, 8), norm_layer, nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 4))
        self.double()
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        embeddings: Tensor = self.layers(x)
        return embeddings


def data() -> Tensor:
    return torch.randn(2, 25, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_chunks_have_the_loss_and_gradient_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    encoder = Encoder()
    whole = copy.deepcopy(encoder)
    loss = hn.hcl(beta=1.0)
    with in_chunks([encoder], chunk_size=7):
        value = loss(*map(encoder, data()))
        value.backward()
        copied = copy.deepcopy(encoder)
    expected = loss(*map(whole, data()))
    expected.backward()
    assert_close(value, expected, rtol=1e-12, atol=0)
    for weight, reference in zip(encoder.parameters(), whole.parameters(), strict=True):
        assert_close(weight.grad, reference.grad, rtol=1e-10, atol=1e-14)
    assert encoder.sizes == [7, 6, 6, 6] * 2 + [6, 6, 6, 7] * 2  # two views forward, and again backward from the end
    encoder(data()[0])
    assert encoder.sizes[-1] == 25  # whole again
    copied.layers[0].weight.data.zero_()
    assert not torch.equal(copied(data()[0]), encoder(data()[0]))  # a copy does not use the weights of the original


@pytest.mark.filterwarnings("ignore:encoder has batch-norm")
def test_chunks_draw_and_normalize_as_cached_step_does() -> None:
    torch.manual_seed(0)
    encoder = Encoder(dropout=0.3, norm=True)
    reference = copy.deepcopy(encoder)
    loss = hn.simclr()
    torch.manual_seed(5)
    with in_chunks([encoder], chunk_size=7):
        loss(*map(encoder, data())).backward()
    torch.manual_seed(5)
    hn.cached_step(reference, tuple(data()), loss, chunk_size=7)
    for weight, expected in zip(encoder.parameters(), reference.parameters(), strict=True):
        assert_close(weight.grad, expected.grad, rtol=1e-10, atol=1e-14)
    for (name, buffer), expected in zip(encoder.named_buffers(), reference.buffers(), strict=True):
        assert_close(buffer, expected, msg=lambda text, name=name: f"{name}: {text}")


def test_an_encoder_is_not_cut_in_evaluation_and_without_gradients_keeps_no_graph() -> None:
    encoder = Encoder()
    with in_chunks([encoder], chunk_size=7):
        with torch.no_grad():
            assert not encoder(data()[0]).requires_grad
        encoder.eval()(data()[0])
    assert encoder.sizes == [7, 6, 6, 6, 25]


def encoder_of_channels(channels: int) -> nn.Module:
    """As `processes.plain_encoder`, for the encoders of CMC, which are told their channels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64 * channels, 16))


OPTIONS = {
    "digits-simclr": PLAIN,
    "digits-moco": [*PLAIN, "memory.split=1"],
    "digits-cmc": ["encoder.name=training.test_large_batches:encoder_of_channels", "encoder.norm=false"],
}


@pytest.mark.parametrize("method", OPTIONS)
def test_a_run_in_chunks_has_the_gradients_of_whole_batches(tmp_path: Path, method: str) -> None:
    whole = gradients(tmp_path / "whole", *OPTIONS[method], name=method)
    chunked = gradients(tmp_path / "chunked", *OPTIONS[method], "trainer.chunk_size=100", name=method)
    assert len(whole) == len(chunked) == 5
    for one, other in zip(whole, chunked, strict=True):
        for name, gradient in one.items():
            assert_close(other[name], gradient, rtol=1e-4, atol=1e-6)


def test_batch_norm_in_chunks_gives_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="batch-norm in training mode, which sees one chunk at a time"):
        gradients(tmp_path / "run", "trainer.chunk_size=100")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.chunk_size=0"], r"trainer\.chunk_size"),
        (["trainer.accumulate=0"], r"trainer\.accumulate"),
        (["trainer.chunk_size=8", "trainer.compile=default"], r"trainer\.chunk_size=8 .*leave out trainer\.compile"),
    ],
)
def test_settings_that_cannot_be_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe.load({}, overrides)


def test_synchronized_batch_norm_is_refused_with_split_batch_norm() -> None:
    settings = recipe.load(recipe.find("digits-moco"), ["trainer.sync_batchnorm=true", "trainer.devices=2"])
    module = build.method(settings, build.data(settings))
    with pytest.raises(ValueError, match=r"trainer\.sync_batchnorm=true would undo memory\.split"):
        engine.check_method(settings, module, torch.device("cuda"))


def test_graphs_are_not_cut_into_chunks() -> None:
    with pytest.raises(ValueError, match=r"trainer\.chunk_size is not used by method=graphcl on graphs"):
        recipe.load(recipe.find("imdb-binary-graphcl"), ["trainer.chunk_size=8"])


def test_synchronized_batch_norm_is_refused_on_cpus(tmp_path: Path) -> None:
    settings = recipe.load({}, ["trainer.sync_batchnorm=true", "trainer.devices=2", "trainer.accelerator=cpu"])
    with pytest.raises(ValueError, match=r"trainer\.sync_batchnorm=true needs GPUs"):
        run.train(settings, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []

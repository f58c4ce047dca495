"""A step in chunks gives the gradient of the whole batch."""

import copy
import functools
import random
import warnings
import weakref
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cached_processes
import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import hardneg as hn
from hardneg import checks

DOUBLE: dict[str, Any] = {"dtype": torch.float64}


def encoder(dropout: float = 0.0, seed: int = 0, norm: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(6, 16), norm or nn.LayerNorm(16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 8)]
    return nn.Sequential(*layers).double()


def gradients(*modules: nn.Module) -> list[Tensor]:
    return [p.grad for module in modules for p in module.parameters() if p.grad is not None]


def views(rows: int = 23, **options: Any) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 6, **DOUBLE), torch.randn(rows, 6, **DOUBLE)


def whole(net: nn.Module, inputs: tuple[Tensor, ...], loss: Callable[..., Tensor], **more: Any) -> tuple[Tensor, Any]:
    """The plain step on a copy of the encoder, and of the loss if it has parameters: loss and gradients."""
    net, loss = copy.deepcopy((net, loss))
    value = loss(*(net(view) for view in inputs), **more)
    value.backward()
    return value.detach(), gradients(net, *([loss] if isinstance(loss, nn.Module) else []))


@pytest.mark.parametrize("chunk_size", [1, 4, 23, 100, (5, 9)], ids=str)
def test_chunks_of_any_size_give_the_gradient_of_the_whole_batch(chunk_size: Any) -> None:
    net, inputs = encoder(), views()
    expected = whole(net, inputs, loss := hn.hcl())
    value = hn.cached_step(net, inputs, loss, chunk_size=chunk_size)
    assert not value.requires_grad
    assert_close((value, gradients(net)), expected, rtol=1e-12, atol=1e-12)


def test_in_float32_the_gradient_is_that_of_the_whole_batch_to_1e_6() -> None:
    net, inputs = encoder().float(), tuple(view.float() for view in views(64))
    loss = hn.simclr()
    _, exact = whole(copy.deepcopy(net).double(), tuple(view.double() for view in inputs), loss)
    hn.cached_step(net, inputs, loss, chunk_size=10)
    for found, wanted in zip(gradients(net), exact, strict=True):
        assert (found - wanted).norm() <= 1e-6 * wanted.norm()


def test_gradient_accumulation_over_small_batches_gives_another_gradient() -> None:
    net, inputs = encoder(), views(24)
    _, expected = whole(net, inputs, loss := hn.simclr())
    for part in zip(*(view.split(4) for view in inputs), strict=True):
        (loss(*map(net, part)) / 6).backward()
    assert not torch.allclose(gradients(net)[0], expected[0], rtol=0.1)


@pytest.mark.parametrize(
    ("loss", "more"),
    [
        (hn.supcon(), {"labels": torch.arange(23) % 4}),
        (hn.InfoNCE(hn.Learnable(0.2), hardening=hn.Ring(0.5, 0.9)).double(), {}),
        (hn.InfoNCE(in_batch="other", backend="reference"), {"negatives": torch.randn(9, 8, **DOUBLE)}),
    ],
    ids=["labels", "learnable temperature", "negatives"],
)
def test_arguments_are_passed_to_the_loss_and_its_parameters_get_gradients(loss: hn.InfoNCE, more: Any) -> None:
    net, inputs = encoder(), views()
    expected = whole(net, inputs, loss, **more)
    loss.zero_grad()
    value = hn.cached_step(net, inputs, loss, chunk_size=5, **more)
    assert_close((value, gradients(net, loss)), expected, rtol=1e-12, atol=1e-12)
    assert loss.diagnostics()["anchors"] > 0


def test_all_leaves_of_the_loss_get_gradients() -> None:
    net, inputs = encoder(), views()
    negatives, teacher = torch.randn(9, 8, **DOUBLE, requires_grad=True), encoder(seed=1)

    def loss(z1: Tensor, z2: Tensor, extra: Tensor) -> Tensor:
        return hn.simclr()(z1, z2, negatives=torch.cat([negatives, teacher(extra)]))

    loss(*map(net, inputs), inputs[0]).backward()
    expected = [*gradients(net, teacher), negatives.grad]
    net.zero_grad(), teacher.zero_grad()
    negatives.grad = None
    hn.cached_step(net, inputs, loss, chunk_size=5, extra=inputs[0])
    assert_close([*gradients(net, teacher), negatives.grad], expected, rtol=1e-12, atol=1e-12)


def test_gradients_are_added_to_existing_ones() -> None:
    net, inputs = encoder(), views()
    _, expected = whole(net, inputs, loss := hn.simclr())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    hn.cached_step(net, inputs, loss, chunk_size=7, backward=lambda part: (part / 2).backward())
    assert_close(gradients(net), [1 + gradient / 2 for gradient in expected], rtol=1e-12, atol=1e-12)


def test_two_encoders_encode_one_view_each_and_a_frozen_one_runs_once() -> None:
    image, text, inputs, loss = encoder(), encoder(seed=1), views(), hn.clip()
    expected = loss(image(inputs[0]), text(inputs[1]))
    expected.backward()
    wanted = gradients(image, text)
    for frozen in (False, True):
        image.zero_grad(), text.zero_grad(), loss.zero_grad()
        image.requires_grad_(not frozen)
        calls: list[int] = []
        image.register_forward_pre_hook(lambda module, rows, calls=calls: calls.append(len(rows[0])))
        value = hn.cached_step((image, text), inputs, loss, chunk_size=(6, 23))
        assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
        found = gradients(text) if frozen else gradients(image, text)
        assert_close(found, wanted[len(wanted) // 2 * frozen :], rtol=1e-12, atol=1e-12)
        assert calls == [6, 6, 6, 5] * (1 if frozen else 2)


# --- inputs ---


class Pair(NamedTuple):
    ids: Tensor
    mask: Tensor


def test_the_encoder_gets_chunks_of_the_same_structure() -> None:
    table, seen = nn.EmbeddingBag(50, 8, mode="sum", **DOUBLE), []
    ids, mask = torch.randint(50, (11, 7)), torch.rand(11, 7, **DOUBLE)

    def encode(tokens: Any) -> Tensor:
        seen.append(tokens)
        inner = tokens["inner"]
        return table(inner.ids, per_sample_weights=inner.mask) * tokens["scale"]

    view = UserDict(inner=Pair(ids, mask), scale=torch.tensor(2.0), task="sts", nothing=None)
    value = hn.cached_step(encode, (view, view), hn.simclr(), chunk_size=4)
    full = 2 * table(ids, per_sample_weights=mask)
    assert_close(value, hn.simclr()(full, full).detach(), rtol=1e-12, atol=0)
    assert [len(tokens["inner"].ids) for tokens in seen] == [4, 4, 3] * 4
    assert all(tokens["task"] == "sts" and tokens["nothing"] is None for tokens in seen)


def test_a_single_view_needs_no_tuple_and_views_may_differ_in_rows() -> None:
    net, (x, _) = encoder(), views(12)
    labels, more = torch.arange(12) % 3, torch.randn(30, 6, **DOUBLE)
    expected = whole(net, (x,), hn.supcon(), labels=labels)
    value = hn.cached_step(net, x, hn.supcon(), chunk_size=5, labels=labels)
    assert_close((value, gradients(net)), expected, rtol=1e-12, atol=1e-12)
    net.zero_grad()
    triplet = lambda anchor, positive, hard: hn.simcse()(anchor, positive, negatives=hard)  # noqa: E731
    expected = whole(net, (x, 2 * x, more), triplet)
    value = hn.cached_step(net, [x, 2 * x, more], triplet, chunk_size=5)
    assert_close((value, gradients(net)), expected, rtol=1e-12, atol=1e-12)


def test_other_types_of_inputs_are_split_by_the_caller() -> None:
    net = nn.EmbeddingBag(256, 8, **DOUBLE)
    texts = ["one", "two", "three", "four", "five"]

    def encode(part: list[str]) -> Tensor:
        return torch.cat([net(torch.tensor([list(text.encode())])) for text in part])

    embeddings = encode(texts)
    hn.simclr()(embeddings, embeddings + 1).backward()
    expected, net.weight.grad = net.weight.grad, None
    hn.cached_step(
        (encode, lambda part: encode(part) + 1),
        (texts, texts),
        hn.simclr(),
        chunk_size=2,
        split=lambda view, size: [view[start : start + size] for start in range(0, len(view), size)],
    )
    assert_close(net.weight.grad, expected, rtol=1e-12, atol=1e-12)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "dict": ({"encoder": lambda x: {"embedding": x}}, "one floating tensor of embeddings .* got dict: wrap it"),
    "tuple": ({"encoder": lambda x: (x, x)}, "got tuple"),
    "integers": ({"encoder": lambda x: x.long()}, "got a tensor of torch.int64"),
    "pooled": ({"encoder": lambda x: x.mean(dim=0, keepdim=True)}, "a row per sample, got 1 for 4"),
    "no module": ({"encoder": 3}, "encoder must be a module or a function, got int"),
    "encoders": ({"encoder": (encoder(), encoder(), encoder())}, "encoder must be one, or one per view: got 3 for 2"),
    "chunk": ({"chunk_size": 0}, "chunk_size must be a whole number ≥ 1, got 0"),
    "chunks": ({"chunk_size": (2, 2, 2)}, "chunk_size must be one, or one per view: got 3 for 2"),
    "rows": ({"inputs": ({"a": torch.zeros(3, 6), "b": torch.zeros(4, 6)},)}, "one row per sample, got 3, 4 rows"),
    "no rows": ({"inputs": torch.zeros(0, 6)}, "one row per sample, got 0 rows"),
    "texts": ({"inputs": ["a", "b"]}, "got no tensor in a str: split it with split="),
    "object": ({"inputs": object()}, "inputs holds a object, which cannot be split"),
    "no views": ({"inputs": ()}, "at least one view"),
    "no chunks": ({"split": lambda view, size: []}, "split returned no chunk"),
    "losses": ({"loss": hn.InfoNCE(reduction="none")}, r"one number, got \(8,\): use reduction='mean'"),
    "float": ({"loss": lambda z1, z2: 3.0}, "one number, got float"),
    "frozen": ({"encoder": encoder().requires_grad_(False)}, "depends on no parameter that requires a gradient"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_errors_name_the_argument_and_the_fix(name: str) -> None:
    given, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        hn.cached_step(**{"encoder": encoder(), "inputs": views(4), "loss": hn.simclr()} | given)


def test_calling_it_without_gradients_raises() -> None:
    with torch.no_grad(), pytest.raises(ValueError, match="gradients, which are disabled"):
        hn.cached_step(encoder(), views(4), hn.simclr())


# --- the two passes ---


class Mask(nn.Module):
    """Dropout that records its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.drawn.append(torch.rand_like(x) > 0.5)
        return x * self.drawn[-1]


def test_both_passes_draw_the_same_dropout_masks_and_the_gradient_is_theirs() -> None:
    net, inputs = nn.Sequential(encoder(), mask := Mask(), nn.Linear(8, 8, **DOUBLE)), views()
    hn.cached_step(net, inputs, loss := hn.simclr(), chunk_size=6)
    found, passes = gradients(net), len(mask.drawn) // 2
    assert passes == 8
    assert len({tuple(drawn.flatten().tolist()) for drawn in mask.drawn}) == passes  # no two chunks have the same
    drawn = torch.cat(mask.drawn[:passes]).split(23)
    net.zero_grad()
    z1, z2 = (net[2](net[0](view) * kept) for view, kept in zip(inputs, drawn, strict=True))
    loss(z1, z2).backward()
    assert_close(found, gradients(net), rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
def test_both_passes_draw_the_same_masks_on_every_device_of_an_encoder() -> None:
    here = nn.Sequential(encoder(), on_host := Mask())
    there = nn.Sequential(nn.Linear(8, 8, **DOUBLE), on_device := Mask()).cuda()
    hn.cached_step(lambda x: there(here(x).cuda()), views(), hn.simclr(), chunk_size=6)
    for mask in (on_host, on_device):
        first, second = mask.drawn[:8], mask.drawn[8:]
        assert_close(second, first, rtol=0, atol=0)
        assert not torch.equal(first[0], first[1])


def test_random_state_afterwards_is_that_of_one_pass_and_the_loss() -> None:
    net, inputs = encoder(dropout=0.5), views(8)
    torch.manual_seed(3)
    for view in inputs:
        for chunk in view.split(4):
            net(chunk)
    torch.rand(1)
    expected = torch.rand(3)
    torch.manual_seed(3)
    hn.cached_step(net, inputs, lambda *z: hn.simclr()(*z) * torch.rand(()), chunk_size=4)
    assert_close(torch.rand(3), expected, rtol=0, atol=0)


def test_an_encoder_with_other_embeddings_in_the_second_pass_raises() -> None:
    net = encoder()
    with pytest.raises(ValueError, match="different embeddings for a chunk in the second pass"):
        hn.cached_step(lambda x: net(x) * random.random(), views(8), hn.simclr(), chunk_size=4)


def test_only_the_activations_of_one_chunk_are_stored() -> None:
    net, inputs = encoder(), views(64)
    held, peak = 0, 0

    def release(size: int) -> None:
        nonlocal held
        held -= size

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    def pack(tensor: Tensor) -> Kept:
        nonlocal held, peak
        kept, size = Kept(tensor), tensor.numel() if tensor.shape[0] == len(current) else 0  # weights do not count
        weakref.finalize(kept, release, size)
        held += size
        peak = max(peak, held)
        return kept

    current = inputs[0]

    def observed(x: Tensor) -> Tensor:
        nonlocal current
        current = x
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
            return net(x)

    observed(inputs[0][:4])
    of_a_chunk, peak = peak, 0
    assert held == 0
    hn.simclr()(*map(observed, inputs)).backward()
    of_the_batch, peak = peak, 0
    hn.cached_step(observed, inputs, hn.simclr(), chunk_size=4)
    assert of_the_batch == 2 * 16 * of_a_chunk
    assert peak == of_a_chunk
    assert held == 0


@pytest.mark.parametrize("wrap", [lambda net: net, lambda net: lambda x: net(x), lambda net: functools.partial(net)])
def test_batch_norm_warns_and_updates_its_statistics_once_per_chunk(wrap: Callable[[nn.Module], Any]) -> None:
    net, inputs = encoder(norm=nn.BatchNorm1d(16)), views()
    plain = copy.deepcopy(net)
    z1, z2 = (torch.cat([plain(chunk) for chunk in view.tensor_split(4)]) for view in inputs)
    hn.simclr()(z1, z2).backward()
    with pytest.warns(UserWarning, match="sees one chunk at a time"):
        hn.cached_step(wrap(net), inputs, hn.simclr(), chunk_size=6)
    assert_close(gradients(net), gradients(plain), rtol=1e-12, atol=1e-12)
    assert_close(net.state_dict(), plain.state_dict(), rtol=0, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hn.cached_step(net.eval(), inputs, hn.simclr(), chunk_size=6)


def test_compiled_encoders_draw_the_same_masks_in_both_passes() -> None:
    net, inputs = encoder(dropout=0.4), views(12)
    compiled = torch.compile(net, backend="aot_eager")
    torch.manual_seed(5)
    z1, z2 = (torch.cat([compiled(chunk) for chunk in view.split(6)]) for view in inputs)
    (expected := hn.simclr()(z1, z2)).backward()
    wanted = gradients(net)
    wanted = [gradient.clone() for gradient in wanted]
    net.zero_grad()
    torch.manual_seed(5)
    value = hn.cached_step(compiled, inputs, hn.simclr(), chunk_size=6)
    assert_close((value, gradients(net)), (expected.detach(), wanted), rtol=1e-12, atol=1e-12)


# --- mixed precision ---


@pytest.mark.parametrize("inside", [False, True], ids=["the encoder", "the whole step"])
def test_in_bfloat16_the_error_is_that_of_the_whole_batch(inside: bool) -> None:
    net, inputs = encoder(dropout=0.0).float(), tuple(view.float() for view in views(64))
    mixed = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)

    def encode(x: Tensor) -> Tensor:
        with mixed():
            return net(x)

    loss = hn.hcl()
    _, exact = whole(copy.deepcopy(net).double(), tuple(view.double() for view in inputs), loss)
    value = loss(*map(encode, inputs))
    value.backward()
    plain = [gradient.clone() for gradient in gradients(net)]
    net.zero_grad()
    if inside:
        with mixed():
            found = hn.cached_step(net, inputs, loss, chunk_size=10)
    else:
        found = hn.cached_step(encode, inputs, loss, chunk_size=10)
    assert_close(found, value.detach(), rtol=1e-6, atol=0)
    for ours, other, wanted in zip(gradients(net), plain, exact, strict=True):
        assert (ours - wanted).norm() <= max(1.2 * (other - wanted).norm(), 0.01 * wanted.norm())


def test_in_float16_gradients_are_scaled_before_they_underflow() -> None:
    net, inputs = encoder().float(), tuple(view.float() for view in views(32))

    def loss(z1: Tensor, z2: Tensor) -> Tensor:
        return 1e-7 * hn.simclr()(z1, z2)  # as small as with a very large batch

    _, expected = whole(net, inputs, loss)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)  # type: ignore[attr-defined]
    with torch.autocast("cpu", torch.float16):
        hn.cached_step(net, inputs, loss, chunk_size=8, backward=lambda part: scaler.scale(part).backward())
    for ours, wanted in zip(gradients(net), expected, strict=True):
        assert (ours / 2**24 - wanted).norm() <= 0.01 * wanted.norm()


# --- Lightning and DDP ---


class Trained(L.LightningModule):
    def __init__(self, chunk_size: int | None) -> None:
        super().__init__()
        self.net, self.loss = encoder(), hn.InfoNCE(hn.Learnable(0.3)).double()
        self.chunk_size, self.automatic_optimization = chunk_size, chunk_size is None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        view1, view2 = batch
        if self.chunk_size is None:
            return self.loss(self.net(view1), self.net(view2))
        optimizer = self.optimizers()
        optimizer.zero_grad()
        value = hn.cached_step(
            self.net, (view1, view2), self.loss, chunk_size=self.chunk_size, backward=self.manual_backward
        )
        optimizer.step()
        self.log("loss", value)
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_lightning_module_trains_to_the_weights_of_the_whole_batch(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(*views(60))
    trained = []
    for chunk_size in (None, 8):
        trainer = L.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        module = Trained(chunk_size)
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=20))
        trained.append(module)
    assert trainer.global_step == 6
    assert "loss" in trainer.callback_metrics
    assert_close(trained[1].state_dict(), trained[0].state_dict(), rtol=1e-12, atol=1e-12)
    assert not torch.equal(trained[1].net[0].weight, encoder()[0].weight)


def test_two_processes_reduce_gradients_once_and_get_those_of_one_process(tmp_path: Path) -> None:
    ranks = cached_processes.launch(tmp_path)
    for name in ("one encoder", "two encoders"):
        model = cached_processes.Model()
        view1, view2 = cached_processes.batch()
        model.loss(model.first(view1), (model.second if name == "two encoders" else model.first)(view2)).backward()
        for found in ranks:
            if name == "one encoder":
                assert_close(found["one encoder, step 0"], cached_processes.gradients(model.first))
                assert_close(found["one encoder, step 1"], cached_processes.gradients(model.first))
                assert found["reductions, step 0"] == {"": torch.tensor(1)}
                assert found["reductions, step 1"] == {"": torch.tensor(1)}
            else:
                wanted = {key: g for key, g in cached_processes.gradients(model).items() if not key.startswith("loss")}
                assert_close(found["two encoders"], wanted)


def test_a_different_second_pass_on_an_accelerator_gives_nan_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "on_accelerator", lambda device: True)
    layer = nn.Linear(5, 4)
    calls: list[int] = []

    def encoder(x: Tensor) -> Tensor:
        calls.append(len(x))
        return layer(x) * len(calls)

    hn.cached_step(encoder, (torch.randn(6, 5), torch.randn(6, 5)), hn.InfoNCE(), chunk_size=3)
    assert layer.weight.grad is not None
    assert layer.weight.grad.isnan().all()

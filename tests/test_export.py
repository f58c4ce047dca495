"""Exported files: they hold what the encoder computes, under the names others expect, or they are not there."""

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hardneg
from hardneg.export import SUFFIXES, export, export_run, read_info, verify
from hardneg.images import encoders

FORMATS = sorted(SUFFIXES)


def small_network(channels: int = 3, features: int = 5) -> nn.Module:
    """Convolution, batch-norm with statistics of its own, pooling: small, and different in training mode."""
    network = nn.Sequential(
        nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(2), Mean(), nn.Linear(4, features)
    )
    network.train()
    network(torch.rand(8, channels, 8, 8))  # moves the running statistics
    return network


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(2)


def loaded(file: Path, network: Callable[[], nn.Module]) -> Callable[[Tensor], Tensor]:
    """The file in the hands of somebody who has never seen hardneg.export."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        match file.suffix:
            case ".safetensors":
                from safetensors.torch import load_file

                fresh = network().eval()
                fresh.load_state_dict(load_file(file))
                return fresh
            case ".pt":
                return torch.jit.load(file)  # type: ignore[no-any-return, no-untyped-call]
            case ".pt2":
                return torch.export.load(file).module()
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": np.asarray(images)})[0])


@pytest.mark.parametrize("format", FORMATS)
def test_the_file_computes_what_the_encoder_does_for_any_batch(format: str, tmp_path: Path) -> None:
    network = small_network()
    file = export(network, torch.rand(1, 3, 8, 8), tmp_path / "new" / "encoder", format)
    assert file == tmp_path / "new" / f"encoder{SUFFIXES[format]}"
    assert [left.name for left in file.parent.iterdir()] == [file.name]
    program = loaded(file, small_network)
    for batch in (1, 2, 7):
        images = torch.rand(batch, 3, 8, 8)
        torch.testing.assert_close(program(images), network.eval()(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_carries_the_same_notes(format: str, tmp_path: Path) -> None:
    info = {"recipe": "about: τ⁺\nseed: 0\n", "mean": "[0.5]"}
    file = export(small_network(), torch.rand(1, 3, 8, 8), tmp_path / "encoder", format, info)
    told = {**info, "hardneg": hardneg.__version__, "shape": "3,8,8", "features": "5"}
    found = read_info(file)
    assert told.items() <= found.items()
    assert format == "onnx" or found == told  # the exporter adds notes of its own there


@pytest.mark.parametrize("format", FORMATS)
def test_exporting_says_nothing_and_changes_nothing(
    format: str, tmp_path: Path, recwarn: pytest.WarningsRecorder, capfd: pytest.CaptureFixture[str]
) -> None:
    network = small_network()
    network[1].eval()  # type: ignore[index]  # as a user freezes one layer
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    export(network, torch.rand(1, 3, 8, 8), tmp_path / "encoder", format)
    assert [network.training, network[0].training, network[1].training] == [True, True, False]  # type: ignore[index]
    assert all(weight.requires_grad for weight in network.parameters())
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert [str(warning.message) for warning in recwarn] == []
    assert "".join(capfd.readouterr()) == ""


def torchvision_shapes(blocks: tuple[int, ...] = (2, 2, 2, 2)) -> Iterator[tuple[str, tuple[int, ...]]]:
    """torchvision's resnet18 without ``fc``, as its state dict lists it: written from its documentation, not ours."""

    def norm(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        for part in ("weight", "bias", "running_mean", "running_var"):
            yield f"{name}.{part}", (width,)
        yield f"{name}.num_batches_tracked", ()

    yield "conv1.weight", (64, 3, 7, 7)
    yield from norm("bn1", 64)
    before = 64
    for layer, (count, width) in enumerate(zip(blocks, (64, 128, 256, 512), strict=True), start=1):
        for block in range(count):
            here = f"layer{layer}.{block}"
            yield f"{here}.conv1.weight", (width, before, 3, 3)
            yield from norm(f"{here}.bn1", width)
            yield f"{here}.conv2.weight", (width, width, 3, 3)
            yield from norm(f"{here}.bn2", width)
            if before != width:
                yield f"{here}.downsample.0.weight", (width, before, 1, 1)
                yield from norm(f"{here}.downsample.1", width)
            before = width


def test_a_resnet_is_written_under_torchvisions_names_and_shapes(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    network = encoders.resnet18("imagenet").to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    file = export(network, torch.rand(1, 3, 64, 64), tmp_path / "resnet18")
    written = {name: tuple(tensor.shape) for name, tensor in load_file(file).items()}
    assert written == dict(torchvision_shapes())
    # 11,689,512 weights are published for torchvision's resnet18, 513,000 of them in fc.
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    assert sum(int(np.prod(shape)) for name, shape in written.items() if not name.endswith(buffers)) == 11_176_512


def test_a_resnet_with_the_small_stem_goes_out_whole(tmp_path: Path) -> None:
    network = encoders.resnet18()
    file = export(network, torch.rand(1, 3, 16, 16), tmp_path / "resnet18", "onnx")
    assert verify(file, network, torch.rand(1, 3, 16, 16)) < 1e-4


def test_a_compiled_half_precision_encoder_is_written_as_plain_float32(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    network = encoders.Tiny(channels=1, size=4).bfloat16()
    wrapped = torch.compile(network)  # compiles at the first call, which must not come
    file = export(wrapped, torch.rand(1, 1, 4, 4), tmp_path / "tiny")  # type: ignore[arg-type]
    written = load_file(file)
    assert written.keys() == network.state_dict().keys()
    assert {tensor.dtype for name, tensor in written.items() if "tracked" not in name} == {torch.float32}


def test_weights_used_twice_are_written_and_read_back(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    file = export(nn.Sequential(layer, nn.ReLU(), layer), torch.rand(1, 4), tmp_path / "tied")
    assert verify(file, nn.Sequential(layer, nn.ReLU(), layer), torch.rand(1, 4)) == 0


def test_verification_sees_another_encoder(tmp_path: Path) -> None:
    network = small_network()
    file = export(network, torch.rand(1, 3, 8, 8), tmp_path / "encoder", "torchscript")
    assert verify(file, network, torch.rand(1, 3, 8, 8)) < 1e-5
    with torch.no_grad():
        network[5].bias += 0.01  # type: ignore[index]
    with pytest.raises(ValueError, match=r"differs from the encoder by 0\.01 in a batch of 1"):
        verify(file, network, torch.rand(1, 3, 8, 8))


class ByBatch(nn.Module):
    """What a tracer cannot follow: Python that looks at the size of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) * (2.0 if len(x) == 1 else 3.0)


@pytest.mark.parametrize("format", ["torchscript", "torch_export", "onnx"])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_an_encoder_that_looks_at_its_batch_is_refused_and_the_old_file_stays(format: str, tmp_path: Path) -> None:
    file = tmp_path / f"encoder{SUFFIXES[format]}"
    file.write_text("what was there")
    with pytest.raises(ValueError, match="use format='safetensors'"):
        export(ByBatch(), torch.rand(1, 3, 2, 2), file, format)
    assert file.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": "safetensor"}, "format='safetensor' is not known: did you mean 'safetensors'"),
        ({"to": "encoder.pt"}, "must end in .safetensors for format='safetensors'"),
        ({"example": torch.rand(2, 3, 8, 8)}, r"example must be one picture \(1, C, H, W\), got \(2, 3, 8, 8\)"),
        ({"example": torch.zeros(1, 3, 8, 8, dtype=torch.uint8)}, r"example must have a floating dtype"),
        ({"encoder": nn.Conv2d(3, 1, 1)}, r"must return \(B, features\), got \(1, 1, 8, 8\)"),
        ({"encoder": len}, "encoder must be a torch.nn.Module, got builtin_function_or_method"),
        ({"info": {"epochs": 3}}, "info must map text to text, got 'epochs': 3"),
        ({"tolerance": -1.0}, "tolerance must be ≥ 0, got -1"),
    ],
)
def test_bad_arguments_are_named_and_nothing_is_written(
    changed: dict[str, object], message: str, tmp_path: Path
) -> None:
    given = {"encoder": small_network(), "example": torch.rand(1, 3, 8, 8), "to": "encoder", **changed}
    given["to"] = tmp_path / "new" / str(given["to"])
    with pytest.raises(ValueError, match=message):
        export(**given)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_diverged_encoder_is_refused(tmp_path: Path) -> None:
    network = small_network()
    with torch.no_grad():
        network[5].weight.fill_(torch.inf)  # type: ignore[index]
    with pytest.raises(ValueError, match="NaN or inf"):
        export(network, torch.rand(1, 3, 8, 8), tmp_path / "encoder")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("format", "module"), [("safetensors", "safetensors.torch"), ("onnx", "onnxscript")])
def test_a_missing_extra_says_what_installs_it(
    format: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # its import now fails
    with pytest.raises(ImportError, match=r'pip install "hardneg\[export\]"'):
        export(small_network(), torch.rand(1, 3, 8, 8), tmp_path / "encoder", format)
    assert list(tmp_path.iterdir()) == []


def test_notes_of_a_missing_or_foreign_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist: export an encoder first"):
        read_info(tmp_path / "encoder.onnx")
    (tmp_path / "encoder.bin").touch()
    with pytest.raises(ValueError, match=r"must end in one of \.safetensors"):
        read_info(tmp_path / "encoder.bin")


def test_a_run_is_exported_with_its_recipe_and_pixels(tmp_path: Path) -> None:
    import json

    from hardneg.training import recipe, run

    standard = "views.options={scale: [0.5, 1.0], mean: [0.3], std: [0.2]}"
    chosen = ["trainer.epochs=1", "trainer.knn_every=0", "trainer.accelerator=cpu", standard]
    trained = recipe.load(recipe.find("digits-simclr"), chosen)
    result = run.train(trained, tmp_path / "run")
    file, difference = export_run(tmp_path / "run", "torchscript")
    assert file == tmp_path / "run" / "exported.pt"
    assert difference < 1e-5
    notes = read_info(file)
    assert (json.loads(notes["mean"]), json.loads(notes["std"]), notes["shape"]) == ([0.3], [0.2], "1,8,8")
    (tmp_path / "again.yaml").write_text(notes["recipe"])
    assert recipe.load(tmp_path / "again.yaml") == trained
    # Used as the notes say, the file gives the features of the trained encoder.
    pixels = torch.randint(0, 256, (5, 1, 8, 8), dtype=torch.uint8)
    seen = (pixels / 255 - 0.3) / 0.2
    torch.testing.assert_close(loaded(file, nn.Identity)(seen), result.encoder.eval()(seen), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="is the run's own file"):
        export_run(tmp_path / "run", "safetensors", tmp_path / "run" / "encoder.safetensors")


@settings(max_examples=20, deadline=None)
@given(channels=st.integers(1, 4), side=st.integers(3, 9), features=st.integers(1, 6), scale=st.floats(1e-30, 1e30))
def test_safetensors_are_exact_at_every_size_and_scale(
    channels: int, side: int, features: int, scale: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    network = small_network(channels, features)
    with torch.no_grad():
        network[5].weight.mul_(scale)  # type: ignore[index]
    example = torch.rand(1, channels, side, side)
    file = export(network, example, tmp_path_factory.mktemp("exact") / "encoder", tolerance=0.0)
    assert verify(file, network, example, tolerance=0.0) == 0.0

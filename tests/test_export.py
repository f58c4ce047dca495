"""Exported files compute the features of the encoder, under the documented names; a failed export writes none."""

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
    """A small network with batch-norm, which computes other features in training mode."""
    network = nn.Sequential(
        nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(2), Mean(), nn.Linear(4, features)
    )
    network.train()
    network(torch.rand(8, channels, 8, 8))  # updates the running statistics
    return network


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(2)


def loaded(file: Path, network: Callable[[], nn.Module]) -> Callable[..., Tensor]:
    """The program of the file, loaded without hardneg."""
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
def test_the_file_computes_the_features_of_the_encoder_for_any_batch_size(format: str, tmp_path: Path) -> None:
    network = small_network()
    file = export(network, torch.rand(1, 3, 8, 8), tmp_path / "new" / "encoder", format)
    assert file == tmp_path / "new" / f"encoder{SUFFIXES[format]}"
    assert [found.name for found in file.parent.iterdir()] == [file.name]
    (tmp_path / "plain").touch()
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode
    program = loaded(file, small_network)
    for batch in (1, 2, 7):
        images = torch.rand(batch, 3, 8, 8)
        torch.testing.assert_close(program(images), network.eval()(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_carries_the_same_metadata(format: str, tmp_path: Path) -> None:
    info = {"recipe": "about: τ⁺\nseed: 0\n", "mean": "[0.5]"}
    file = export(small_network(), torch.rand(1, 3, 8, 8), tmp_path / "encoder", format, info)
    expected = {**info, "hardneg": hardneg.__version__, "shape": "3,8,8", "features": "5"}
    found = read_info(file)
    assert expected.items() <= found.items()
    assert format == "onnx" or found == expected  # the ONNX exporter adds metadata of its own


@pytest.mark.parametrize("format", FORMATS)
def test_exporting_prints_nothing_and_does_not_change_the_encoder(
    format: str, tmp_path: Path, recwarn: pytest.WarningsRecorder, capfd: pytest.CaptureFixture[str]
) -> None:
    network = small_network()
    network[1].eval()  # type: ignore[index]  # a frozen layer
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    export(network, torch.rand(1, 3, 8, 8), tmp_path / "encoder", format)
    assert [network.training, network[0].training, network[1].training] == [True, True, False]  # type: ignore[index]
    assert all(weight.requires_grad for weight in network.parameters())
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert [str(warning.message) for warning in recwarn] == []
    assert "".join(capfd.readouterr()) == ""


# Encoders with several inputs by name


class TextEncoder(nn.Module):
    """Token embeddings, one layer of attention, and the mean over the tokens that are not masked."""

    def __init__(self, vocabulary: int = 50, dim: int = 8) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(vocabulary, dim), nn.Linear(dim, 3 * dim)

    def embed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        query, key, value = self.attention(self.embedding(input_ids)).chunk(3, dim=2)  # (B, L, d) each
        scores = query @ key.transpose(1, 2) + (1 - attention_mask[:, None]) * -1e4
        weights = attention_mask / attention_mask.sum(dim=1, keepdim=True)
        return (weights[:, :, None] * (scores.softmax(dim=2) @ value)).sum(dim=1)


class ByKeyword(TextEncoder):
    """Called as transformers' models: ``encoder(**tokens)``, with optional inputs and one that is not used."""

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        assert attention_mask is not None
        return self.embed(input_ids, attention_mask)


class ByKeywords(TextEncoder):
    def forward(self, **tokens: Tensor) -> Tensor:
        return self.embed(tokens["input_ids"], tokens["attention_mask"])


class ByDict(TextEncoder):
    """Called as sentence-transformers' modules: ``encoder(tokens)``."""

    def forward(self, features: dict[str, Tensor], **options: object) -> Tensor:
        return self.embed(features["input_ids"], features["attention_mask"])


TOKENS = {
    "attention_mask": torch.tensor([[1, 1, 1, 1, 0]]),  # not in the order of the parameters
    "input_ids": torch.tensor([[7, 42, 3, 49, 0]]),
}


def tokens(batch: int) -> dict[str, Tensor]:
    lengths = torch.randint(1, 6, (batch, 1))
    return {"attention_mask": (torch.arange(5) < lengths).long(), "input_ids": torch.randint(50, (batch, 5))}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", [ByKeyword, ByKeywords, ByDict])
def test_encoders_with_inputs_by_name_are_exported(
    format: str, kind: type[TextEncoder], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    network = kind()
    if format in ("torchscript", "torch_export") and kind is ByKeywords:
        with pytest.raises(ValueError, match=rf"takes attention_mask, input_ids through \*\*kwargs, .*{format}"):
            export(network, TOKENS, tmp_path / "encoder", format)
        assert list(tmp_path.iterdir()) == []
        return
    file = export(network, TOKENS, tmp_path / "encoder", format)
    assert [str(warning.message) for warning in recwarn] == []
    assert read_info(file)["shape"] == '{"attention_mask": [5], "input_ids": [5]}'
    assert verify(file, network, {name: tensor.numpy() for name, tensor in TOKENS.items()}) < 1e-5
    if format == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        assert {entry.name for entry in session.get_inputs()} == {"attention_mask", "input_ids"}
    program = None if format == "onnx" else loaded(file, kind)
    for batch in (1, 2, 7):
        given = tokens(batch)
        with torch.no_grad():
            expected = network(given) if kind is ByDict else network(**given)
        if program is None:
            feed = {name: tensor.numpy() for name, tensor in given.items()}
            found = torch.from_numpy(session.run(["features"], feed)[0])
        else:
            found = program(given) if kind is ByDict else program(**given)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_verify_compares_inputs_by_name_with_the_encoder(tmp_path: Path) -> None:
    network = ByDict()
    file = export(network, TOKENS, tmp_path / "encoder", "torch_export")
    with torch.no_grad():
        network.attention.weight.mul_(2)
    with pytest.raises(ValueError, match="differs from the encoder"):
        verify(file, network, TOKENS)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({}, "example must map the names of the inputs to tensors"),
        ({"input_ids": torch.ones(2, 5).long()}, r"example\['input_ids'\] must have shape \(1, …\), .* got \(2, 5\)"),
        ({"input_ids": "text"}, r"example\['input_ids'\] must be a tensor, a numpy array or a list"),
        ({"features": torch.ones(1, 5)}, "example has an input 'features', the name of the output"),
    ],
)
def test_errors_name_the_input_of_the_example(example: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        export(ByDict(), example, tmp_path / "encoder")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_an_encoder_that_returns_no_tensor_raises_an_error_that_names_the_fix(tmp_path: Path) -> None:
    class Output(ByKeyword):
        def forward(self, *args: Any, **tokens: Any) -> Any:
            return {"sentence_embedding": super().forward(**tokens)}

    with pytest.raises(ValueError, match=r"must return \(B, features\), got dict for one sample: wrap it in a module"):
        export(Output(), TOKENS, tmp_path / "encoder")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_bert_of_transformers_is_exported(format: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = transformers.BertModel(
                transformers.BertConfig(
                    vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
                )
            )

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, 0]  # type: ignore[no-any-return]

    network = Pooled()
    file = export(network, TOKENS, tmp_path / "bert", format)
    assert verify(file, network, TOKENS) < 1e-4


def torchvision_shapes(blocks: tuple[int, ...] = (2, 2, 2, 2)) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes in the state dict of torchvision's resnet18 without ``fc``, from its documentation."""

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


def test_a_resnet_with_the_small_stem_is_exported_to_onnx(tmp_path: Path) -> None:
    network = encoders.resnet18()
    file = export(network, torch.rand(1, 3, 16, 16), tmp_path / "resnet18", "onnx")
    assert verify(file, network, torch.rand(1, 3, 16, 16)) < 1e-4


def test_a_compiled_half_precision_encoder_is_written_as_plain_float32(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    network = encoders.Tiny(channels=1, size=4).bfloat16()
    wrapped = torch.compile(network)  # compiles at the first call, which export does not make
    file = export(wrapped, torch.rand(1, 1, 4, 4), tmp_path / "tiny")  # type: ignore[arg-type]
    written = load_file(file)
    assert written.keys() == network.state_dict().keys()
    assert {tensor.dtype for name, tensor in written.items() if "tracked" not in name} == {torch.float32}


def test_weights_used_twice_are_written_and_read_back(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    file = export(nn.Sequential(layer, nn.ReLU(), layer), torch.rand(1, 4), tmp_path / "tied")
    assert verify(file, nn.Sequential(layer, nn.ReLU(), layer), torch.rand(1, 4)) == 0


def test_verify_raises_for_another_encoder(tmp_path: Path) -> None:
    network = small_network()
    file = export(network, torch.rand(1, 3, 8, 8), tmp_path / "encoder", "torchscript")
    assert verify(file, network, torch.rand(1, 3, 8, 8)) < 1e-5
    with torch.no_grad():
        network[5].bias += 0.01  # type: ignore[index]
    with pytest.raises(ValueError, match=r"differs from the encoder by 0\.01 in a batch of 1"):
        verify(file, network, torch.rand(1, 3, 8, 8))


class ByBatch(nn.Module):
    """An encoder that cannot be traced: Python code that depends on the batch size."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) * (2.0 if len(x) == 1 else 3.0)


@pytest.mark.parametrize("format", ["torchscript", "torch_export", "onnx"])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_an_encoder_that_depends_on_the_batch_size_raises_and_the_old_file_stays(format: str, tmp_path: Path) -> None:
    file = tmp_path / f"encoder{SUFFIXES[format]}"
    file.write_text("old")
    with pytest.raises(ValueError, match="use format='safetensors'"):
        export(ByBatch(), torch.rand(1, 3, 2, 2), file, format)
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": "safetensor"}, "format='safetensor' is not known: did you mean 'safetensors'"),
        ({"to": "encoder.pt"}, "must end in .safetensors for format='safetensors'"),
        ({"example": torch.rand(2, 3, 8, 8)}, r"example must be one image \(1, C, H, W\), got \(2, 3, 8, 8\)"),
        ({"example": torch.zeros(1, 3, 8, 8, dtype=torch.uint8)}, r"example must have a floating dtype"),
        ({"encoder": nn.Conv2d(3, 1, 1)}, r"must return \(B, features\), got \(1, 1, 8, 8\)"),
        ({"encoder": len}, "encoder must be a torch.nn.Module, got builtin_function_or_method"),
        ({"info": {"epochs": 3}}, "info must map text to text, got 'epochs': 3"),
        ({"tolerance": -1.0}, "tolerance must be ≥ 0, got -1"),
    ],
)
def test_errors_name_the_argument_and_nothing_is_written(
    changed: dict[str, object], message: str, tmp_path: Path
) -> None:
    given = {"encoder": small_network(), "example": torch.rand(1, 3, 8, 8), "to": "encoder", **changed}
    given["to"] = tmp_path / "new" / str(given["to"])
    with pytest.raises(ValueError, match=message):
        export(**given)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_diverged_encoder_raises(tmp_path: Path) -> None:
    network = small_network()
    with torch.no_grad():
        network[5].weight.fill_(torch.inf)  # type: ignore[index]
    with pytest.raises(ValueError, match="NaN or inf"):
        export(network, torch.rand(1, 3, 8, 8), tmp_path / "encoder")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("format", "module"), [("safetensors", "safetensors.torch"), ("onnx", "onnxscript")])
def test_a_missing_extra_raises_an_error_with_the_install_command(
    format: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # makes its import fail
    with pytest.raises(ImportError, match=r'pip install "hardneg\[export\]"'):
        export(small_network(), torch.rand(1, 3, 8, 8), tmp_path / "encoder", format)
    assert list(tmp_path.iterdir()) == []


def test_reading_metadata_of_a_missing_or_foreign_file_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist: export an encoder first"):
        read_info(tmp_path / "encoder.onnx")
    (tmp_path / "encoder.bin").touch()
    with pytest.raises(ValueError, match=r"must end in one of \.safetensors"):
        read_info(tmp_path / "encoder.bin")


def test_a_run_is_exported_with_its_recipe_and_pixel_statistics(tmp_path: Path) -> None:
    import json

    from hardneg.training import recipe, run

    standard = "views.options={scale: [0.5, 1.0], mean: [0.3], std: [0.2]}"
    chosen = ["trainer.epochs=1", "trainer.knn_every=0", "trainer.accelerator=cpu", standard]
    trained = recipe.load(recipe.find("digits-simclr"), chosen)
    result = run.train(trained, tmp_path / "run")
    file, difference = export_run(tmp_path / "run", "torchscript")
    assert file == tmp_path / "run" / "exported.pt"
    assert difference < 1e-5
    metadata = read_info(file)
    assert (json.loads(metadata["mean"]), json.loads(metadata["std"]), metadata["shape"]) == ([0.3], [0.2], "1,8,8")
    (tmp_path / "again.yaml").write_text(metadata["recipe"])
    assert recipe.load(tmp_path / "again.yaml") == trained
    # On pixels standardized by the metadata, the file gives the features of the trained encoder.
    pixels = torch.randint(0, 256, (5, 1, 8, 8), dtype=torch.uint8)
    seen = (pixels / 255 - 0.3) / 0.2
    torch.testing.assert_close(loaded(file, nn.Identity)(seen), result.encoder.eval()(seen), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="is the run's own file"):
        export_run(tmp_path / "run", "safetensors", tmp_path / "run" / "encoder.safetensors")


def test_metadata_hold_the_name_of_the_data_and_not_where_they_are() -> None:
    from hardneg.training import recipe

    local = recipe.load({"modality": "images"}, ["data.source=/home/someone/photos", "encoder.name=tiny"])
    assert recipe.without_folders(local).data.source == "photos"
    named = recipe.load({}, ["data.source=digits"])
    assert recipe.without_folders(named) == named


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

"""Text encoders: padding changes nothing, and pretrained models agree with the libraries they come from."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import write_model
from torch import nn
from torch.testing import assert_close

from hardneg.text.encoders import (
    GRUEncoder,
    HashEmbedding,
    TransformerEncoder,
    TwoEncoders,
    build,
    encode,
    tokenizer_of,
)
from hardneg.text.features import encode_with, extract_texts
from hardneg.text.text_set import TextSet
from hardneg.text.tokens import Tokens

TEXTS = ["the cat sat on the mat.", "a dog", "", "the dog ran, the cat ran", "mat"]


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "two":
        return TwoEncoders(GRUEncoder(8, 6, 50), GRUEncoder(10, 6, 50))
    kinds = {"gru": GRUEncoder(8, 6, 50), "one-way": GRUEncoder(7, 6, 50, bidirectional=False)}
    return kinds.get(name) or TransformerEncoder(8, words=50, heads=2)


@pytest.mark.parametrize("name", ["gru", "one-way", "transformer", "two"])
def test_features_of_a_batch_are_those_of_each_text_alone(name: str) -> None:
    encoder = make(name)
    together = extract_texts(encoder, TextSet(TEXTS))
    alone = torch.cat([extract_texts(encoder, TextSet([text])) for text in TEXTS])
    assert_close(together, alone, atol=1e-6, rtol=1e-5)
    assert encoder.training  # as before
    assert len(torch.unique(together, dim=0)) == len(TEXTS)


def test_a_gru_equals_its_recurrence_written_as_a_loop() -> None:
    encoder = GRUEncoder(6, 4, 50).double()
    tokens = TextSet(TEXTS).token_batch(torch.tensor([3]), tokenizer_of(encoder))
    words = encoder.words(tokens.ids)[0]  # (L, 4)
    gru, found = encoder.gru, []
    for suffix, order in (("", range(len(words))), ("_reverse", range(len(words) - 1, -1, -1))):
        w, u, b, c = (getattr(gru, f"{part}_l0{suffix}") for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        h = torch.zeros(3, dtype=torch.float64)
        for place in order:
            (xr, xz, xn), (hr, hz, hn) = (w @ words[place] + b).chunk(3), (u @ h + c).chunk(3)
            z = torch.sigmoid(xz + hz)
            h = (1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * h
        found.append(h)
    assert_close(encoder(tokens)[0], torch.cat(found))


def test_hash_embeddings_tell_all_words_apart() -> None:
    torch.manual_seed(0)
    ids = torch.randperm(1 << 20)[:4000] * 2000  # twice as many words as rows
    vectors = HashEmbedding(2000, 8)(ids[None])[0]
    assert len(torch.unique(vectors, dim=0)) >= 3990


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_pretrained_folder_gives_the_features_of_sentence_transformers(tmp_path: Path, pooling: str) -> None:
    library = pytest.importorskip("sentence_transformers")
    folder = write_model(tmp_path / "model", pooling)
    model = library.SentenceTransformer(str(folder), device="cpu")
    texts = [text for text in TEXTS if text] + ["the " * 40]  # longer than the model takes
    wanted = model.encode(texts, convert_to_tensor=True)
    with pytest.warns(UserWarning, match="1 of 5 texts are longer than the 24 tokens"):
        assert_close(encode_with(build(str(folder), None, {}))(texts), wanted, atol=1e-5, rtol=1e-4)
    with pytest.warns(UserWarning, match="longer than the 24"):
        assert_close(encode_with(model)(texts), wanted, atol=1e-5, rtol=1e-4)  # the object itself
    assert tokenizer_of(model) is tokenizer_of(model)
    rows = torch.zeros(1, dtype=torch.int64)
    assert encode(model, TextSet(["a cat"]).token_batch(rows, tokenizer_of(model))).shape == (1, 16)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_trained_model_is_written_for_sentence_transformers(tmp_path: Path, pooling: str) -> None:
    library = pytest.importorskip("sentence_transformers")
    encoder = build(str(write_model(tmp_path / "model", None)), pooling, {"max_length": 6})
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.add_(0.01 * torch.randn_like(weight))  # a step of training
    encoder.save_pretrained(tmp_path / "written")
    texts = [text for text in TEXTS if text]
    with pytest.warns(UserWarning, match="longer than the 6 tokens"):
        wanted = encode_with(encoder)(texts)
    found = library.SentenceTransformer(str(tmp_path / "written"), device="cpu").encode(texts, convert_to_tensor=True)
    assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    with pytest.warns(UserWarning, match="longer than the 6 tokens"):
        assert_close(encode_with(build(str(tmp_path / "written"), None, {}))(texts), wanted)


def test_a_length_without_room_for_a_token_is_refused(tmp_path: Path) -> None:
    encoder = build(str(write_model(tmp_path / "model")), None, {})
    with pytest.raises(ValueError, match="max_length=2 holds the 2 marks of this tokenizer only"):
        TextSet(TEXTS, max_length=2).tokens(tokenizer_of(encoder))


def test_the_dropout_of_a_pretrained_model_can_be_set(tmp_path: Path) -> None:
    encoder = build(str(write_model(tmp_path / "model")), None, {"dropout": 0.3, "max_length": 9})
    assert {layer.p for layer in encoder.modules() if isinstance(layer, nn.Dropout)} == {0.3}
    assert tokenizer_of(encoder).max_length == 9


def test_a_model_stored_in_half_precision_is_trained_in_float32(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight.half() for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float16", "torch_dtype": "float16"}))
    encoder = build(str(folder), None, {})
    assert {weight.dtype for weight in encoder.parameters()} == {torch.float32}


def test_every_weight_of_a_pretrained_model_gets_a_gradient(tmp_path: Path) -> None:
    encoder = build(str(write_model(tmp_path / "model")), None, {})
    tokens = TextSet(TEXTS).token_batch(torch.arange(4), tokenizer_of(encoder))
    encoder(tokens).square().sum().backward()
    assert [name for name, weight in encoder.named_parameters() if weight.grad is None] == []


def test_models_that_cannot_be_used_are_refused_with_one_line(tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain", None)
    with pytest.raises(ValueError, match=r"does not say how to pool tokens: set encoder\.pooling=cls or mean"):
        build(str(plain), None, {})
    assert build(str(plain), "cls", {}).features == 16
    dense = write_model(tmp_path / "dense")
    modules = json.loads((dense / "modules.json").read_text())
    (dense / "modules.json").write_text(json.dumps([*modules, {"path": "2_Dense", "type": "evil.module.Dense"}]))
    with pytest.raises(ValueError, match="has a module Dense, which is not supported"):
        build(str(dense), None, {})
    (tmp_path / "empty").mkdir()
    for name, message in (
        (str(tmp_path / "empty"), "has no config.json"),
        (str(tmp_path / "nothing"), "is not a folder of a model"),
        ("./nothing", "is not a folder of a model"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            build(name, "mean", {"width": 128})  # an option of another encoder
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"encoder\.options of encoder\.name='gru': .*'depth'"):
        build("gru", None, {"depth": 3})
    with pytest.raises(ValueError, match=r"encoder\.pooling=mean is for pretrained models"):
        build("gru", "mean", {})
    with pytest.raises(ValueError, match="has no tokenizer"):
        tokenizer_of(nn.Flatten())


def test_a_model_folder_runs_no_code_of_its_own(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "code.Model", "AutoConfig": "code.Config"}
    config["model_type"] = "unheard_of"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ValueError, match="cannot be loaded as a pretrained model"):
        build(str(folder), None, {})
    assert not (tmp_path / "ran").exists()


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    torch.save(build(str(folder), None, {}).model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"cannot be loaded as a pretrained model .*safetensors"):
        build(str(folder), None, {})


def test_a_pretrained_tokenizer_can_serve_an_encoder_from_scratch(tmp_path: Path) -> None:
    encoder = build("gru", None, {"width": 8, "word_dim": 4, "tokenizer": str(write_model(tmp_path / "model"))})
    assert isinstance(encoder.words, nn.Embedding)
    assert encoder.words.num_embeddings == 15
    assert extract_texts(encoder, TextSet(TEXTS)).isfinite().all()


def test_mean_pooling_ignores_padding() -> None:
    encoder = TransformerEncoder(8, words=50, heads=2).eval()
    ids = torch.tensor([[5, 6, 9, 9]])
    padded = Tokens(ids, torch.tensor([[True, True, False, False]]))
    short = Tokens(ids[:, :2], torch.ones(1, 2, dtype=torch.bool))
    assert_close(encoder(padded), encoder(short), atol=1e-6, rtol=1e-5)

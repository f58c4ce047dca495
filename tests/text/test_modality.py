"""Runs on texts: trained, resumed exactly, evaluated, reported, and refused with one line."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import write_model

import hardneg
from hardneg import modality
from hardneg.insight.report import write_report
from hardneg.text.features import extract_texts
from hardneg.text.text_set import TextSet
from hardneg.training import build, evaluate, recipe, run, saved_run
from hardneg.training.callbacks.checkpoints import Checkpoints

SMALL = ["encoder.name=transformer", "encoder.options={width: 16, layers: 1, heads: 2, words: 500}", "trainer.epochs=2",
         "trainer.batch_size=8", "trainer.save_every=3"]  # fmt: skip
PROXIMITY = ["batches.sampler=proximity", "batches.candidates=20", "batches.neighbors=7", "batches.restart=0.7",
             "batches.refresh_every=0"]  # fmt: skip
WAYS = {
    "simcse": ("sentences-simcse", []),
    "proximity": ("sentences-simcse", PROXIMITY),
    "hard": ("sentences-simcse", ["objective={preset: hcl, in_batch: other, temperature: 0.05, tau_plus: 0.0}"]),
    "quick_thoughts": ("sentences-quickthoughts", ["encoder.name=gru", "encoder.options={width: 8, word_dim: 6}"]),
}


@pytest.fixture(autouse=True)
def _texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labeled sentences about two topics, in the working directory."""
    monkeypatch.chdir(tmp_path)
    words = {"sea": ["wave", "boat", "fish", "salt"], "hill": ["tree", "path", "rock", "deer"]}
    rows = [
        {"text": f"the {words[topic][n % 4]} and the {words[topic][n // 4 % 4]} were {n}", "label": topic}
        for n in range(16)
        for topic in words
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def settings(way: str, *more: str) -> recipe.Recipe:
    name, overrides = WAYS[way]
    return recipe.load(recipe.find(name), ["data.source=mine.jsonl", *SMALL, *overrides, *more])


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way in ("proximity", "quick_thoughts") else pytest.mark.slow) for way in WAYS]
)
def test_a_run_is_trained_evaluated_and_resumed_bitwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    whole = run.train(settings(way), tmp_path / "whole")
    assert math.isfinite(whole.metrics["loss"])
    assert whole.metrics["step"] == 8

    class Stop(Exception):
        pass

    step = Checkpoints.on_train_batch_end

    def stopped(self: Checkpoints, trainer: object, *rest: object) -> None:
        step(self, trainer, *rest)  # type: ignore[arg-type]
        if trainer.global_step == 5:  # type: ignore[attr-defined]
            raise Stop

    monkeypatch.setattr(Checkpoints, "on_train_batch_end", stopped)
    with pytest.raises(Stop):
        run.train(settings(way), tmp_path / "part")
    monkeypatch.setattr(Checkpoints, "on_train_batch_end", step)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run.train(settings(way), tmp_path / "part", resume=True)
    files = [(tmp_path / name / "encoder.safetensors").read_bytes() for name in ("whole", "part")]
    assert files[0] == files[1]
    found = evaluate.evaluate(tmp_path / "whole")
    assert found.keys() == {"nearest_folds", "logistic", "uniformity"}
    assert found["logistic"] > 0.8  # the words tell the topics apart
    loaded = saved_run.load_run(tmp_path / "whole")
    texts = build.data(loaded.settings)
    features = extract_texts(whole.encoder, texts)
    assert torch.equal(extract_texts(loaded.encoder, texts), features)
    encoder = hardneg.load_encoder(tmp_path / "whole")
    torch.testing.assert_close(encoder(texts.texts[:9], batch_size=4), features[:9])
    torch.testing.assert_close(encoder(texts.texts[3]), features[3])
    with pytest.raises(ValueError, match="a text must be a string that is not empty, got 7"):
        encoder(["one", 7])


def test_a_graph_that_is_built_once_composes_the_first_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hardneg.samplers import ProximityBatchSampler

    states = []
    draw = ProximityBatchSampler._draw

    def drawn(self: ProximityBatchSampler, step: int, length: int) -> list[int]:
        states.append((self.refreshes, self.graph is not None))
        return draw(self, step, length)

    monkeypatch.setattr(ProximityBatchSampler, "_draw", drawn)
    run.train(settings("proximity"), tmp_path / "run")
    assert states == [(1, True)] * 8
    with pytest.raises(ValueError, match=r"set batches\.embeddings=encode"):
        run.train(settings("proximity", "batches.embeddings=bank"), tmp_path / "bank")
    assert not (tmp_path / "bank").exists()


def test_a_pretrained_folder_is_trained_and_evaluated_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model")
    more = ["encoder.name=model", "encoder.options={}", "trainer.epochs=1", "optimizer.schedule=linear"]
    done = run.train(settings("simcse", *more), tmp_path / "run")
    before = modality.get("text").encoder(recipe.load({"method": "simcse", "encoder": {"name": "model"}}).encoder, (1,))
    changed = [
        name for name, weight in done.encoder.state_dict().items() if not torch.equal(weight, before.state_dict()[name])
    ]
    assert any("layer.1" in name for name in changed)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert evaluate.evaluate(tmp_path / "run").keys() == {"nearest_folds", "logistic", "uniformity"}
    (tmp_path / "model").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="is not a folder of a model"):
        evaluate.evaluate(tmp_path / "run")


def test_a_sentence_transformer_object_is_trained_and_evaluated(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")

    def model() -> Any:
        return library.SentenceTransformer(str(write_model(tmp_path / "model")), device="cpu")

    texts = ["the cat sat", "a dog ran", "the mat .", "a cat ran", "the dog sat"] * 4
    made = recipe.load(recipe.find("sentences-simcse"), ["trainer.epochs=1", "trainer.batch_size=4"])
    run.train(made, tmp_path / "run", encoder=model(), data=texts)
    (tmp_path / "model" / "1_Pooling" / "config.json").unlink()
    (tmp_path / "model" / "1_Pooling").rmdir()
    found = evaluate.evaluate(tmp_path / "run", encoder=model(), data=texts)
    assert found.keys() == {"uniformity"}  # there are no labels


def test_an_encoder_is_evaluated_on_pairs_and_on_retrieval(tmp_path: Path) -> None:
    run.train(settings("simcse", "trainer.epochs=1"), tmp_path / "run")
    (tmp_path / "pairs.tsv").write_text("s1\ts2\tscore\nthe wave\tthe wave\t5\nthe wave\tthe tree\t1\nboat\tdeer\t0\n")
    found = evaluate.evaluate(tmp_path / "run", str(tmp_path / "pairs.tsv"))
    assert found.keys() == {"spearman"}
    assert found["spearman"] > 0.4
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    (folder / "queries.jsonl").write_text('{"_id": "q1", "text": "the wave"}\n{"_id": "q2", "text": "the deer"}\n')
    corpus = [{"_id": f"d{n}", "title": "", "text": text} for n, text in enumerate(["the deer", "salt", "the wave"])]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in corpus))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td2\t1\nq2\td0\t1\n")
    assert evaluate.evaluate(tmp_path / "run", str(folder)) == {"ndcg_10": 1.0, "recall_10": 1.0, "mrr_10": 1.0}
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td9\t1\n")
    with pytest.raises(ValueError, match="names 'd9', which is not in"):
        evaluate.evaluate(tmp_path / "run", str(folder))
    (folder / "corpus.jsonl").unlink()
    with pytest.raises(ValueError, match=r"no corpus\.jsonl"):
        evaluate.evaluate(tmp_path / "run", str(folder))


def test_the_report_shows_sentences_as_text(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script> \u202egnp"
    made = recipe.load(recipe.find("sentences-simcse"), [*SMALL, "data.source=mine.jsonl", "trainer.epochs=1"])
    rows = Path("mine.jsonl").read_text()
    Path("mine.jsonl").write_text(rows.replace("the wave and the wave were 0", json.dumps(hostile)[1:-1]))
    run.train(made, tmp_path / "run")
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<div class="texts">' in page
    assert len(re.findall(r"<bdi>the \w+ and the \w+ were \d+</bdi>", page)) > 10
    assert "<script>alert" not in page
    assert "\u202e" not in page


def test_the_modality_of_a_source_follows_from_the_method(tmp_path: Path) -> None:
    assert recipe.load({"method": "simcse", "data": {"source": "hf:some/texts"}}).modality == "text"
    assert recipe.load({"method": "simclr", "data": {"source": "hf:some/images"}}).modality == "images"
    assert recipe.load({"method": "simcse"}).modality == "text"
    with pytest.raises(ValueError, match=r"method=simclr trains on images.*use method=simcse, quick_thoughts"):
        recipe.load({"method": "simclr", "data": {"source": "lines.txt"}})
    assert recipe.code_names(recipe.load({"method": "simcse", "data": {"source": "hf:texts"}})) == []


BAD = [
    (["data.source=missing.txt"], "does not exist"),
    (["data.source=one.txt"], r"has 1 sample to train on"),
    (["data.source=latin.txt"], "line 1 is not utf-8"),
    (["encoder.name=gruu"], r"encoder\.name='gruu': got an unexpected .*encoder\.options=\{\} removes"),
    (["encoder.name=gruu", "encoder.options={}", "encoder.pooling=cls"], "is neither gru nor transformer"),
    (["encoder.options.dropout=0"], "no dropout"),
    (["encoder.options.heads=3"], "must be a multiple of heads=3"),
    (["encoder.pooling=mean"], "is for pretrained models"),
    (["objective={preset: moco}"], "in_batch=None"),
    (["objective={preset: supcon}", "data.source=plain.txt"], "no labels"),
    (["views.preset=simclr"], "views"),
]


@pytest.mark.parametrize(("overrides", "message"), BAD, ids=[overrides[0] for overrides, _ in BAD])
def test_bad_input_is_one_line_and_nothing_is_written(
    tmp_path: Path, overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    Path("one.txt").write_text("only one sentence\n")
    Path("plain.txt").write_text("a sentence\n" * 20)
    Path("latin.txt").write_bytes("café\n".encode("cp1252"))
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        run.train(settings("simcse", *overrides), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_texts_that_are_streamed_train_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hardneg.text import files

    Path("lines.txt").write_text("".join(f"line {number} of {number % 5}\n" for number in range(40)))
    first = run.train(settings("simcse", "data.source=lines.txt"), tmp_path / "held")
    monkeypatch.setattr(files, "IN_MEMORY", 10)
    texts = build.data(settings("simcse", "data.source=lines.txt"))
    assert isinstance(texts, TextSet)
    assert not texts.in_memory
    second = run.train(settings("simcse", "data.source=lines.txt"), tmp_path / "streamed")
    for name, weight in first.encoder.state_dict().items():
        assert torch.equal(weight, second.encoder.state_dict()[name]), name

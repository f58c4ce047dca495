"""Texts as a modality: sources, encoders, embeddings and evaluation in one place."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hardneg import callables
from hardneg.division import Division, difference
from hardneg.evaluation import EvaluationResult, Metric, evaluate_texts, get_metric
from hardneg.modality import GIVEN, DataSection, EncoderSection, EvaluationRequest, Modality, ViewsSection
from hardneg.recipe_section import Count, Section
from hardneg.text import encoders, evaluation_data
from hardneg.text.data import PYTHON_DOCS, SUFFIXES, load_texts
from hardneg.text.features import encode_with, extract_texts
from hardneg.text.files import suffix_of
from hardneg.text.pretrained import PretrainedEncoder, is_folder
from hardneg.text.text_set import TextSet

SHAPE = (1,)  # texts differ in length, and an encoder does not depend on it


class TextData(DataSection):
    """Texts from a source."""

    source: str = PYTHON_DOCS
    """A .txt, .jsonl, .csv, .tsv, .parquet or .arrow file, a folder, ``hf:NAME``, ``python-docs``, or
    ``package.module:callable``."""
    column: str | None = None
    """Column of the texts in a table; by default ``text``, ``sentence`` or the only column."""
    encoding: str = "utf-8"
    """Of text files."""
    max_length: Count | None = None
    """Tokens of a training text that are used; by default as many as the encoder takes."""


class TextEncoder(EncoderSection):
    """A text encoder."""

    name: str = "transformer"
    """``transformer`` or ``gru``, which are trained from scratch; the folder or hub name of a pretrained model; or
    ``package.module:callable``."""
    pooling: Literal["cls", "mean"] | None = None
    """From tokens to a vector; by default as a sentence-transformers model was trained."""


class Text(Modality):
    """Texts in a `TextSet`."""

    name = "text"
    Data, Views, Encoder, TrainerOptions = TextData, ViewsSection, TextEncoder, Section
    encoders = encoders.ENCODERS
    has_test_set = False
    unit = "texts"

    def accepts(self, source: str) -> bool:
        named = source == PYTHON_DOCS or source.startswith("hf:")
        return named or (not callables.is_name(source) and suffix_of(Path(source)) in SUFFIXES)

    def resolve(self, source: str) -> str:
        path = self.location(source)
        return source if path is None else str(path.resolve() if ".." in path.parts else path.absolute())

    def resolve_encoder(self, name: str) -> str:
        """A folder gets its absolute path."""
        return str(Path(name).expanduser().absolute()) if name not in encoders.ENCODERS and is_folder(name) else name

    def location(self, source: str) -> Path | None:
        by_name = source in (PYTHON_DOCS, GIVEN) or source.startswith("hf:") or callables.is_name(source)
        return None if by_name else Path(source).expanduser()

    def load(self, data: Any, *, labels: bool = False, given: Any = None) -> TextSet:
        texts = load_texts(
            _source(data.source, given), column=data.column, encoding=data.encoding, max_length=data.max_length
        )
        if labels and (texts.labels is None or not bool((texts.labels >= 0).any())):
            raise ValueError(f"{texts.name} has no labels, and this loss needs them: choose one without labels")
        return texts

    def load_test(self, data: Any, train: Any, *, given: Any = None) -> None:
        return None

    def load_shown(self, data: Any, shape: tuple[int, ...], division: Division, *, given: Any = None) -> TextSet:
        return self.load(data, given=given)

    def shape(self, samples: Any) -> tuple[int, ...]:
        return SHAPE

    def check_shape(self, shape: tuple[int, ...]) -> None:
        if shape != SHAPE:
            raise ValueError(f"shape {shape} is not that of a text, {SHAPE}")

    def views(self, views: Any, shape: tuple[int, ...]) -> Any:
        raise ValueError("texts have no views: use method=simcse, whose views are two passes with dropout")

    def view_bytes(self, views: Any, shape: tuple[int, ...], count: int) -> int:
        return 0  # texts differ in length

    def encoder(self, encoder: Any, shape: tuple[int, ...]) -> nn.Module:
        return encoders.build(encoder.name, encoder.pooling, dict(encoder.options))

    def encoder_options(self, name: str) -> set[str]:
        if name in self.encoders or ":" in name:
            return super().encoder_options(name)
        return {*inspect.signature(PretrainedEncoder).parameters} - {"name", "pooling"}

    def unused_encoder_keys(self, name: str) -> set[str]:
        return {"pooling"} if name in self.encoders or ":" in name else set()

    def feature_size(self, encoder: nn.Module, shape: tuple[int, ...]) -> int:
        width = getattr(encoder, "features", None)
        if not isinstance(width, int):
            rows = torch.zeros(1, dtype=torch.int64)
            tokens = TextSet(["text"]).token_batch(rows, encoders.tokenizer_of(encoder))
            device = next(iter(encoder.parameters()), rows).device
            with torch.no_grad():
                width = encoders.encode(encoder, tokens.to(device)).shape[1]
        return width

    def embed(self, network: nn.Module, samples: Any, views: Any = None, workers: int = 0) -> Tensor:
        return extract_texts(network, samples)

    def labeled(self, features: Tensor, samples: Any) -> tuple[Tensor, Tensor]:
        labels = samples.labels.to(features.device)
        return features[labels >= 0], labels[labels >= 0]

    def evaluate(self, encoder: nn.Module, request: EvaluationRequest, workers: int = 0) -> EvaluationResult:
        encode = encode_with(encoder)
        metrics = None if request.metrics is None else [get_metric(metric) for metric in request.metrics]
        if request.named:  # metrics with texts of their own are not of this source
            found = evaluation_data.find(request.data.source)
            protocols = set(found) or {"folds", "features"}
            metrics = [metric for metric in metrics or () if metric.protocol in protocols] or None
            if found:
                fitting = ("ndcg_10", "recall_10", "mrr_10") if "retrieval" in found else ("spearman",)
                return evaluate_texts(encode, metrics or fitting, seed=request.seed, **found)
        if metrics is not None and all(metric.protocol == "texts" for metric in metrics):
            return evaluate_texts(encode, metrics, seed=request.seed)
        texts = self.load(request.data, given=request.given)
        recorded = Division() if request.named or request.division is None else request.division
        if change := difference(recorded, texts.division):
            warnings.warn(f"{request.data.source} {change}", stacklevel=3)
        return evaluate_texts(encode, metrics or _fitting(texts), texts.texts, texts.labels, seed=request.seed)

    def sample(self, samples: Any, rows: Tensor) -> TextSet:
        part: TextSet = samples.subset(rows)
        return part

    def thumbnail(self, samples: Any, index: int) -> Tensor:
        raise ValueError("a text has no image: it is shown as text")

    def caption(self, samples: Any, index: int) -> str:
        text: str = samples.texts[index]
        return text

    def transform(
        self, data: Any, shape: tuple[int, ...], views: Any, recorded: Mapping[str, Any]
    ) -> Callable[[Any], str]:
        return _checked_text

    def features(self, encoder: nn.Module, inputs: Sequence[Any], device: torch.device) -> Tensor:
        return extract_texts(encoder, TextSet(list(inputs)))

    def resident(self, samples: Any) -> TextSet:
        found: TextSet = samples
        return found


def _checked_text(text: Any) -> str:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"a text must be a string that is not empty, got {text!r}")
    return text


def _source(source: str, given: Any) -> Any:
    """The source of a recipe as `load_texts` takes it: a name, a path, or an object."""
    if given is not None:
        return given
    if source == GIVEN:
        raise ValueError("the data of this run were given in Python: pass data=")
    if callables.is_name(source) and not source.startswith("hf:"):
        return callables.load(source, "data.source")
    return source


def _fitting(texts: TextSet) -> Sequence[str | Metric]:
    """The metrics that a set of texts allows."""
    labeled = texts.labels is not None and bool((texts.labels >= 0).any())
    return ("nearest_folds", "logistic", "uniformity") if labeled else ("uniformity",)

"""Evaluate features by metrics of the registry; the results as they are stored in ``evaluation.json``."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, get_args

from torch import Tensor

from hardneg import checks
from hardneg.checks import TensorLike
from hardneg.evaluation.metrics import (
    DEFAULT_METRICS,
    FORMATS,
    NOTES,
    Better,
    Metric,
    MetricFormat,
    columns,
    get_metric,
    is_built_in,
    is_number,
)


class EvaluationResult(dict[str, float]):
    """The value of each metric.

    notes: by metric, a remark such as "not converged after 500 iterations"; most have none · formats: how metrics that
    are not built in are shown · measured: how many samples trained the probes and how many tested them, in words; empty
    if it is not known

    Examples:
        >>> result = EvaluationResult({"linear": 0.9}, {"linear": "not converged after 500 iterations"})
        >>> result["linear"], result.to_json()["notes"]
        (0.9, {'linear': 'not converged after 500 iterations'})
    """

    def __init__(
        self,
        values: Mapping[str, float],
        notes: Mapping[str, str] | None = None,
        formats: Mapping[str, MetricFormat] | None = None,
    ) -> None:
        super().__init__(values)
        self.measured = ""
        self.notes = {metric: note for metric, note in (notes or {}).items() if note}
        self.formats = {metric: shown for metric, shown in (formats or {}).items() if not is_built_in(metric)}

    def format(self, metric: str) -> MetricFormat:
        """How one of the metrics is shown."""
        return columns({"": {metric: [self[metric]]}}, self.formats)[metric]

    @property
    def main_notes(self) -> dict[str, str]:
        """The notes on fits that the values come from; see `is_minor`."""
        return {metric: note for metric, note in self.notes.items() if not is_minor(note)}

    def to_json(self) -> dict[str, Any]:
        """The values, with notes and formats under separate keys if there are any."""
        content: dict[str, Any] = {**self}
        if self.notes:
            content[NOTES] = self.notes
        if self.formats:
            content[FORMATS] = {metric: asdict(shown) for metric, shown in self.formats.items()}
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any], file: str | Path) -> Self:
        """Read what `to_json` wrote; entries that are not finite numbers are left out. file: named in errors."""
        notes, formats = content.get(NOTES, {}), content.get(FORMATS, {})
        if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
            raise ValueError(f"{file}: {NOTES} must map metrics to texts: evaluate the run again")
        if not isinstance(formats, dict) or not all(map(_is_format, formats.values())):
            raise ValueError(f"{file}: {FORMATS} must map metrics to title, better and percent: evaluate the run again")
        values = {metric: float(value) for metric, value in content.items() if is_number(value)}
        return cls(values, notes, {metric: MetricFormat(**shown) for metric, shown in formats.items()})


def evaluate_features(
    train_features: TensorLike,
    train_labels: TensorLike,
    test_features: TensorLike,
    test_labels: TensorLike,
    metrics: Sequence[str | Metric] = DEFAULT_METRICS,
    seed: int = 0,
) -> EvaluationResult:
    """Compute metrics of frozen features of a train and a test set.

    train_features: (N, d) · train_labels: (N,) · test_features: (T, d) · test_labels: (T,) · metrics: names of
    registered metrics, or `Metric` objects; one that needs more labels than there are is left out of the result ·
    seed: of random choices, such as the labels drawn for ``few_5`` and the validation split of ``linear``

    Metrics on one set are computed on the test set.

    Examples:
        >>> import torch
        >>> features, labels = torch.eye(2).repeat(20, 1), torch.tensor([0, 1]).repeat(20)
        >>> evaluate_features(features, labels, features, labels, ["nearest", "few_5"])
        {'nearest': 1.0, 'few_5': 1.0}
    """
    train = checks.as_tensor("train_features", train_features), checks.as_tensor("train_labels", train_labels)
    test = checks.as_tensor("test_features", test_features), checks.as_tensor("test_labels", test_labels)
    if len(train[1]) == 0 or len(test[1]) == 0:
        raise ValueError(
            f"the train set has {len(train[1])} labeled samples and the test set {len(test[1])}: both need at least one"
        )
    arguments: dict[str, tuple[Tensor, ...]] = {"train_test": (*train, *test), "folds": test, "features": test[:1]}
    return _evaluate(metrics, arguments, seed)


def evaluate_set(
    features: TensorLike, labels: TensorLike | None, metrics: Sequence[str | Metric] = ("svm",), seed: int = 0
) -> EvaluationResult:
    """Compute metrics of the frozen features of one set, by cross-validation or without labels.

    features: (N, d) · labels: (N,), −1 where unknown, or None for metrics that need none · metrics, seed: as for
    `evaluate_features`

    Examples:
        >>> import torch
        >>> evaluate_set(torch.eye(2).repeat(20, 1), torch.tensor([0, 1]).repeat(20))
        {'svm': 1.0}
    """
    one = checks.as_tensor("features", features)
    arguments: dict[str, tuple[Tensor, ...]] = {"features": (one,)}
    if labels is not None:
        arguments["folds"] = one, checks.as_tensor("labels", labels)
    return _evaluate(metrics, arguments, seed)


def evaluate_texts(
    encode: Callable[[Sequence[str]], Tensor],
    metrics: Sequence[str | Metric],
    texts: Sequence[str] | None = None,
    labels: TensorLike | None = None,
    *,
    pairs: tuple[Sequence[str], Sequence[str], TensorLike] | None = None,
    retrieval: tuple[Sequence[str], Sequence[str], TensorLike] | None = None,
    seed: int = 0,
) -> EvaluationResult:
    """Compute metrics of a text encoder.

    encode: maps a list of texts to features (N, d) · metrics, seed: as for `evaluate_features` · texts, labels: of
    metrics on one set, labels (N,) · pairs: first texts, second texts and scores (P,) · retrieval: queries, corpus and
    judgements, as for `retrieval_scores`

    Examples:
        >>> import torch
        >>> vectors = {"a": [1.0, 0.0], "b": [0.0, 1.0], "ab": [1.0, 1.0]}
        >>> def encode(texts): return torch.tensor([vectors[text] for text in texts])
        >>> evaluate_texts(encode, ["spearman"], pairs=(["a", "a", "a"], ["a", "ab", "b"], [5.0, 3.0, 0.0]))
        {'spearman': 1.0}
    """
    needed = {get_metric(metric).protocol for metric in metrics}
    arguments: dict[str, tuple[Any, ...]] = {"texts": (encode,)}
    if texts is not None and needed & {"features", "folds"}:
        features = encode(texts)
        arguments["features"] = (features,)
        if labels is not None:
            arguments["folds"] = features, checks.as_tensor("labels", labels).to(features.device)
    if pairs is not None:
        arguments["pairs"] = encode(pairs[0]), encode(pairs[1]), checks.as_tensor("scores", pairs[2])
    if retrieval is not None:
        judgements = checks.as_tensor("judgements", retrieval[2])
        arguments["retrieval"] = encode(retrieval[0]), encode(retrieval[1]), judgements
    return _evaluate(metrics, arguments, seed)


NEEDED = {
    "train_test": "a train and a test set",
    "folds": "labels",
    "features": "samples",
    "texts": "a text encoder",
    "pairs": "pairs of texts with scores",
    "retrieval": "queries, a corpus and judgements",
}


def _evaluate(metrics: Sequence[str | Metric], arguments: Mapping[str, tuple[Any, ...]], seed: int) -> EvaluationResult:
    """Compute each metric with the arguments of its protocol."""
    chosen = [get_metric(metric) for metric in metrics]
    for metric in chosen:
        if metric.protocol not in arguments:
            raise ValueError(f"metric {metric.name!r} needs {NEEDED[metric.protocol]}: leave it out, or pass them")
    values: dict[str, float] = {}
    notes: dict[str, str] = {}
    for metric in chosen:
        computed = metric(*arguments[metric.protocol], seed)
        if computed is not None:
            values[metric.name], notes[metric.name] = computed
    return EvaluationResult(values, notes, {metric.name: metric.format for metric in chosen if metric.name in values})


def merged_formats(results: Iterable[EvaluationResult]) -> dict[str, MetricFormat]:
    """The formats of several results; where they differ, the last one is used."""
    return {metric: shown for result in results for metric, shown in result.formats.items()}


def is_minor(note: str) -> bool:
    """Whether a note is on fits that a result does not use: JSON and reports hold it, result lines leave it out.

    Examples:
        >>> is_minor("not converged after 500 iterations for 3 of 7 candidate penalties; the final fit has converged")
        True
        >>> is_minor("not converged after 500 iterations")
        False
    """
    return "; the final fit has converged" in note or "; the final fits have converged" in note


def notes_of_seeds(notes: Mapping[int, str]) -> list[str]:
    """Combine the notes on one metric of several runs, by seed: each note once, with its seeds.

    Examples:
        >>> notes_of_seeds({0: "not converged after 500 iterations", 2: "not converged after 500 iterations"})
        ['not converged after 500 iterations (seeds 0, 2)']
    """
    seeds_of: dict[str, list[int]] = {}
    for seed, note in notes.items():
        seeds_of.setdefault(note, []).append(seed)
    return [f"{note} (seed{'s' * (len(s) > 1)} {', '.join(map(str, s))})" for note, s in seeds_of.items()]


def _is_format(content: object) -> bool:
    """Whether this is a `MetricFormat` as `EvaluationResult.to_json` writes it."""
    return (
        isinstance(content, dict)
        and content.keys() == {"title", "better", "percent"}
        and isinstance(content["title"], str)
        and content["better"] in get_args(Better)
        and isinstance(content["percent"], bool)
    )

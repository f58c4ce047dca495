"""The registry of metrics: what is computed from the features of an encoder, and how each number is shown.

The terminal, ``evaluation.json``, the report and ``hardneg compare`` all use it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from hardneg import callables, checks
from hardneg.evaluation.alignment import uniformity
from hardneg.evaluation.features import class_indices
from hardneg.evaluation.knn import few_label_accuracy, knn_accuracy
from hardneg.evaluation.linear import linear_probe
from hardneg.evaluation.retrieval import retrieval_scores
from hardneg.evaluation.sentences import DIVIDED, FOLDED, classification_accuracy, logistic_accuracy, nearest_accuracy
from hardneg.evaluation.sts import TASKS, spearman, sts_alignment, sts_spearman, sts_uniformity
from hardneg.evaluation.svm import svm_accuracy

Better = Literal["higher", "lower"]
Protocol = Literal["train_test", "folds", "features", "texts", "pairs", "retrieval"]
Value = float | tuple[float, str] | None  # what a metric's function returns

DEFAULT_METRICS = ("knn", "nearest", "linear", "few_1", "few_5")
NOTES, FORMATS = "notes", "metrics"  # keys of evaluation.json that are not metrics
_NAME = re.compile(r"[A-Za-z]\w{0,99}")
_FEW = re.compile(r"few_([1-9]\d{0,5})")
_RETRIEVAL = re.compile(r"(ndcg|recall|mrr)_([1-9]\d{0,5})")


@dataclass(frozen=True)
class MetricFormat:
    """How a metric is shown: its title, whether higher or lower is better, and whether it is a percentage.

    Examples:
        >>> uniformity = MetricFormat("uniformity", better="lower", percent=False)
        >>> uniformity.heading, uniformity.text(-2.5), MetricFormat("kNN").text(0.912)
        ('uniformity ↓', '−2.5', '91.2 %')
    """

    title: str
    better: Better = "higher"
    percent: bool = True

    @property
    def heading(self) -> str:
        """The title, with an arrow if lower is better."""
        return f"{self.title} ↓" if self.better == "lower" else self.title

    @property
    def unit(self) -> str:
        """What follows a number: " %" or nothing."""
        return " %" if self.percent else ""

    def scaled(self, value: float) -> float:
        """The value in the unit in which it is shown."""
        return 100 * value if self.percent else value

    def number(self, value: float, sign: str = "") -> str:
        """The value without its unit: one decimal of a percentage, else three digits; sign: "+" to show it always."""
        return f"{self.scaled(value):{sign}{'.1f' if self.percent else '.3g'}}".replace("-", "−")

    def text(self, value: float) -> str:
        """The value with its unit."""
        return self.number(value) + self.unit

    def improves(self, change: float) -> bool:
        """Whether a change of the value by this amount is an improvement."""
        return change > 0 if self.better == "higher" else change < 0


@dataclass(frozen=True)
class Metric:
    """A number that evaluates the features of a frozen encoder.

    Args:
        name: the key in ``evaluation.json``: letters, digits and underscores.
        title: the heading in tables and in the report.
        function: computes the metric; see ``protocol`` for its arguments. It returns a number, or a number and a note
            such as "not converged after 500 iterations", or None if the data do not allow the metric.
        better: ``"higher"`` or ``"lower"``.
        protocol: ``"train_test"``: function(train_features, train_labels, test_features, test_labels, seed) ·
            ``"folds"``: function(features, labels, seed) of one labeled set, which the function splits itself ·
            ``"features"``: function(features, seed), without labels · ``"texts"``: function(encode, seed), where
            encode maps a list of texts to features (N, d) · ``"pairs"``: function(first, second, scores, seed) of pairs
            of features and their similarity · ``"retrieval"``: function(queries, corpus, judgements, seed), as for
            `retrieval_scores`.
        percent: show the value, a fraction, as a percentage.

    Examples:
        >>> import hardneg as hn
        >>> spread = Metric(
        ...     "spread",
        ...     "spread",
        ...     lambda features, seed: hn.uniformity(features),
        ...     better="lower",
        ...     protocol="features",
        ...     percent=False,
        ... )
        >>> import torch
        >>> from hardneg.evaluation import evaluate_set
        >>> evaluate_set(torch.tensor([[1.0], [-1.0]]), None, [spread])
        {'spread': -8.0}
    """

    name: str
    title: str
    function: Callable[..., Value]
    better: Better = "higher"
    protocol: Protocol = "train_test"
    percent: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name) or self.name in (NOTES, FORMATS):
            raise ValueError(
                f"name of a metric must be letters, digits and underscores, and neither {NOTES!r} nor {FORMATS!r}, "
                f"got {self.name!r}"
            )
        if not isinstance(self.title, str) or not self.title:
            raise ValueError(f"title of metric {self.name!r} must be a text, got {self.title!r}")
        if not callable(self.function):
            raise ValueError(f"function of metric {self.name!r} must be callable, got {self.function!r}")
        checks.choice("better", self.better, get_args(Better))
        checks.choice("protocol", self.protocol, get_args(Protocol))

    def __call__(self, *arguments: object) -> tuple[float, str] | None:
        """The value and its note, which is empty for most; None if the data do not allow the metric."""
        returned = self.function(*arguments)
        if returned is None:
            return None
        value, note = returned if isinstance(returned, tuple) else (returned, "")
        try:
            number = float(value)  # value may be a numpy scalar or a tensor
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"metric {self.name!r} must return a number, got {value!r}") from error
        if not is_number(number):
            raise ValueError(f"metric {self.name!r} must return a finite number, got {number}")
        return number, str(note)

    @property
    def format(self) -> MetricFormat:
        """How the metric is shown."""
        return MetricFormat(self.title, self.better, self.percent)


_registered: dict[str, Metric] = {}


def register(metric: Metric) -> Metric:
    """Add a metric to the registry, so that it can be evaluated and shown by name; returns it.

    A metric of the same name is replaced, unless it is built in.

    Examples:
        >>> def error(train_features, train_labels, test_features, test_labels, seed):
        ...     return 1 - knn_accuracy(train_features, train_labels, test_features, test_labels, k=1)
        >>> register(Metric("nearest_error", "1-NN error", error, better="lower")).name
        'nearest_error'
    """
    if is_built_in(metric.name):
        raise ValueError(f"metric {metric.name!r} is built in and cannot be replaced: choose another name")
    _registered[metric.name] = metric
    return metric


def get_metric(metric: str | Metric) -> Metric:
    """The registered metric of this name.

    ``few_N`` is 1-NN accuracy from N labels per class; ``ndcg_K``, ``recall_K`` and ``mrr_K`` are of the K texts that
    are retrieved; for every N and K.
    """
    if isinstance(metric, Metric):
        return metric
    if few := _FEW.fullmatch(metric):
        return few_label_metric(int(few[1]))
    if found := _RETRIEVAL.fullmatch(metric):
        return retrieval_metric(found[1], int(found[2]))
    checks.choice("metric", metric, tuple(_registered))
    return _registered[metric]


def is_built_in(name: str) -> bool:
    """Whether a built-in metric has this name."""
    return name in _BUILT_IN or any(form.fullmatch(name) for form in (_FEW, _RETRIEVAL))


def metric_from(name: str) -> Metric:
    """Import and register the metric that ``package.module:callable`` names.

    name: of a `Metric` object, or of a function(train_features, train_labels, test_features, test_labels, seed), whose
    name is the metric's; higher is better, and the value is shown as a percentage

    Examples:
        >>> import sys, types
        >>> sys.modules["my_metrics"] = types.ModuleType("my_metrics")
        >>> sys.modules["my_metrics"].half = lambda train_features, train_labels, test_features, test_labels, seed: 0.5
        >>> metric_from("my_metrics:half").title
        'half'
    """
    target: Callable[..., Value] = callables.load(name, "metric")
    if not isinstance(target, Metric):
        attribute = name.rpartition(":")[2]
        target = Metric(attribute, attribute.replace("_", " "), target)
    return register(target)


def columns(
    rows: Mapping[str, Mapping[str, Sequence[float]]], formats: Mapping[str, MetricFormat] | None = None
) -> dict[str, MetricFormat]:
    """The metrics of a table in the order of its columns, each with its format.

    rows: values by row and metric · formats: of metrics that are not registered here, as run folders describe them

    Examples:
        >>> [*columns({"SimCLR": {"other": [3.0], "few_10": [0.8], "few_2": [0.7], "knn": [0.9]}})]
        ['knn', 'few_2', 'few_10', 'other']
    """
    order = [*_registered]
    values: dict[str, list[float]] = {}
    for row in rows.values():
        for metric, given in row.items():
            values.setdefault(metric, []).extend(given)

    def rank(metric: str) -> tuple[int, int]:
        if few := _FEW.fullmatch(metric):
            return order.index("few_1"), int(few[1])
        if found := _RETRIEVAL.fullmatch(metric):
            return order.index(f"{found[1]}_10"), int(found[2])
        return (order.index(metric) if metric in order else len(order)), 0

    def shown(metric: str) -> MetricFormat:
        if metric in _registered or is_built_in(metric):
            return get_metric(metric).format
        # Neither registered nor described: assume that higher is better, and percentages if all values are fractions.
        fractions = all(0 <= value <= 1 for value in values[metric])
        return (formats or {}).get(metric, MetricFormat(metric.replace("_", " "), percent=fractions))

    return {metric: shown(metric) for metric in sorted(values, key=rank) if values[metric]}


def is_number(value: object) -> bool:
    """Whether the value is a finite number that a chart can show."""
    # Measured values are far below the bound; axes overflow above it.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e100


# --- the metrics that are built in ---


def few_label_metric(per_class: int) -> Metric:
    """The metric of 1-NN accuracy from a few labeled training samples per class."""

    def accuracy(
        train_features: Tensor, train_labels: Tensor, test_features: Tensor, test_labels: Tensor, seed: int
    ) -> Value:
        if int(class_indices(train_labels)[1].bincount().min()) < per_class:
            return None
        return few_label_accuracy(train_features, train_labels, test_features, test_labels, per_class, seed=seed)[0]

    return Metric(f"few_{per_class}", f"{per_class} label{'s' * (per_class > 1)}/class", accuracy)


def _knn(train_features: Tensor, train_labels: Tensor, test_features: Tensor, test_labels: Tensor, seed: int) -> Value:
    return knn_accuracy(train_features, train_labels, test_features, test_labels)


def _nearest(
    train_features: Tensor, train_labels: Tensor, test_features: Tensor, test_labels: Tensor, seed: int
) -> Value:
    return knn_accuracy(train_features, train_labels, test_features, test_labels, k=1)


def _linear(
    train_features: Tensor, train_labels: Tensor, test_features: Tensor, test_labels: Tensor, seed: int
) -> Value:
    # With fewer labels none can be held out to choose the penalty.
    if int(class_indices(train_labels)[1].bincount().max()) < 3:
        return None
    probe = linear_probe(train_features, train_labels, test_features, test_labels, seed=seed)
    return probe.accuracy, probe.note


def _svm(features: Tensor, labels: Tensor, seed: int) -> Value:
    result = svm_accuracy(features, labels, seed=seed)
    return result.mean, result.note


def _fill_folds(labels: Tensor) -> bool:
    """Whether every class has a sample for each of ten folds."""
    counts = class_indices(labels[labels >= 0])[1].bincount()
    return len(counts) > 1 and int(counts.min()) >= 10


def _logistic(features: Tensor, labels: Tensor, seed: int) -> Value:
    if not _fill_folds(labels):
        return None
    result = logistic_accuracy(features, labels, seed=seed)
    return result.mean, result.note


def _nearest_folds(features: Tensor, labels: Tensor, seed: int) -> Value:
    return nearest_accuracy(features, labels, seed=seed) if _fill_folds(labels) else None


def retrieval_metric(name: str, k: int) -> Metric:
    """The metric ``ndcg``, ``recall`` or ``mrr`` of the k texts that are retrieved."""
    title = {"ndcg": "nDCG", "recall": "recall", "mrr": "MRR"}[name]

    def score(queries: Tensor, corpus: Tensor, judgements: Tensor, seed: int) -> Value:
        found: float = getattr(retrieval_scores(queries, corpus, judgements, k), name)
        return found

    return Metric(f"{name}_{k}", f"{title}@{k}", score, protocol="retrieval")


def _sts(task: str) -> Metric:
    title = {"STSB": "STS-B", "SICKR": "SICK-R"}.get(task, task)
    return Metric(task.lower(), title, lambda encode, seed: sts_spearman(encode, task), protocol="texts")


def _classification(task: str) -> Metric:
    title = "SST-2" if task == "SST2" else task
    return Metric(
        task.lower(), title, lambda encode, seed: classification_accuracy(encode, task, seed), protocol="texts"
    )


_BUILT_IN = {
    metric.name: metric
    for metric in (
        Metric("knn", "kNN", _knn),
        Metric("nearest", "1-NN", _nearest),
        Metric("linear", "linear probe", _linear),
        few_label_metric(1),
        few_label_metric(5),
        Metric("svm", "SVM, 10 folds", _svm, protocol="folds"),
        Metric("logistic", "logistic regression, 10 folds", _logistic, protocol="folds"),
        Metric("nearest_folds", "1-NN, 10 folds", _nearest_folds, protocol="folds"),
        Metric(
            "spearman",
            "Spearman",
            lambda first, second, scores, seed: spearman(first, second, scores),
            protocol="pairs",
        ),
        *(retrieval_metric(name, 10) for name in ("ndcg", "recall", "mrr")),
        *map(_sts, TASKS),
        *map(_classification, (*FOLDED, *DIVIDED)),
        Metric(
            "sts_alignment",
            "alignment on STS-B",
            lambda encode, seed: sts_alignment(encode),
            "lower",
            "texts",
            percent=False,
        ),
        Metric(
            "sts_uniformity",
            "uniformity on STS-B",
            lambda encode, seed: sts_uniformity(encode),
            "lower",
            "texts",
            percent=False,
        ),
        Metric(
            "uniformity",
            "uniformity",
            lambda features, seed: None if len(features) < 2 else uniformity(features),
            "lower",
            "features",
            percent=False,
        ),
    )
}
_registered.update(_BUILT_IN)

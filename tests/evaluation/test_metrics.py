"""The registry of metrics: built-in ones equal their functions, users add their own, and files describe them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import hardneg as hn
from hardneg.evaluation import (
    DEFAULT_METRICS,
    EvaluationResult,
    Metric,
    MetricFormat,
    evaluate_features,
    evaluate_set,
    get_metric,
    metric_from,
    metrics,
    register,
)
from hardneg.evaluation.metrics import columns
from hardneg.evaluation.svm import svm_accuracy
from hardneg.images import ImageSet, load_images
from hardneg.images.features import extract_set


@pytest.fixture(autouse=True)
def _only_built_in_metrics() -> Iterator[None]:
    before = dict(metrics._registered)
    metrics._registered.clear()
    metrics._registered.update(metrics._BUILT_IN)
    yield
    metrics._registered.clear()
    metrics._registered.update(before)


def blobs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    return torch.eye(4)[labels] + 0.5 * torch.randn(count, 4, generator=generator), labels


SETS = (*blobs(80, 0), *blobs(40, 1))


def nearest_error(
    train_features: Tensor, train_labels: Tensor, test_features: Tensor, test_labels: Tensor, seed: int
) -> float:
    return 1 - hn.knn_accuracy(train_features, train_labels, test_features, test_labels, k=1)


ERROR = Metric("nearest_error", "1-NN error", nearest_error, better="lower")
SPREAD = Metric(
    "spread",
    "spread",
    lambda features, seed: hn.uniformity(features),
    better="lower",
    protocol="features",
    percent=False,
)


def test_each_metric_equals_its_own_function() -> None:
    found = evaluate_features(*SETS)
    assert tuple(found) == DEFAULT_METRICS
    assert found["knn"] == hn.knn_accuracy(*SETS)
    assert found["nearest"] == hn.knn_accuracy(*SETS, k=1)
    assert found["few_1"] == hn.few_label_accuracy(*SETS, per_class=1)[0]
    assert found["few_5"] == hn.few_label_accuracy(*SETS, per_class=5)[0]
    assert found["linear"] == hn.linear_probe(*SETS).accuracy
    assert evaluate_set(*SETS[:2], seed=3) == {"svm": svm_accuracy(*SETS[:2], seed=3).mean}
    assert evaluate_features(*SETS, metrics=["few_7"], seed=2) == {
        "few_7": hn.few_label_accuracy(*SETS, per_class=7, seed=2)[0]
    }


def test_numpy_arrays_give_the_results_of_tensors() -> None:
    assert evaluate_features(*(part.numpy() for part in SETS)) == evaluate_features(*SETS)
    features, labels = (part.numpy() for part in SETS[:2])
    assert evaluate_set(features, labels, ["svm", SPREAD]) == evaluate_set(*SETS[:2], ["svm", SPREAD])


def test_metrics_that_need_more_labels_are_left_out() -> None:
    features, labels = blobs(4, 0)
    assert set(evaluate_features(features, labels, features, labels)) == {"knn", "nearest", "few_1"}
    twice = (torch.cat([features] * 2), torch.cat([labels] * 2))  # two per class: none can be held out for the penalty
    assert "linear" not in evaluate_features(*twice, features, labels)
    with pytest.raises(ValueError, match="the train set has 0 labeled samples and the test set 4: both need"):
        evaluate_features(features[:0], labels[:0], features, labels)


def test_a_registered_metric_is_evaluated_by_name() -> None:
    with pytest.raises(ValueError, match="metric='nearest_error' is not known: did you mean 'nearest'"):
        evaluate_features(*SETS, metrics=["nearest_error"])
    register(ERROR)
    found = evaluate_features(*SETS, metrics=["nearest", "nearest_error"])
    assert found["nearest_error"] == 1 - found["nearest"] > 0
    replacement = register(Metric("nearest_error", "error", lambda *_: 0.25))
    assert get_metric("nearest_error") is replacement


def test_a_metric_is_computed_on_the_data_of_its_protocol() -> None:
    def folds(features: Tensor, labels: Tensor, seed: int) -> float:
        assert torch.equal(features, SETS[2])
        assert torch.equal(labels, SETS[3])
        return seed

    mixed = [Metric("folds", "folds", folds, protocol="folds"), SPREAD, "knn"]
    found = evaluate_features(*SETS, metrics=mixed, seed=5)
    assert found == {"folds": 5, "spread": hn.uniformity(SETS[2]), "knn": hn.knn_accuracy(*SETS)}
    assert evaluate_set(SETS[0], None, [SPREAD]) == {"spread": hn.uniformity(SETS[0])}
    with pytest.raises(ValueError, match="metric 'knn' needs a train and a test set"):
        evaluate_set(*SETS[:2], ["knn"])
    with pytest.raises(ValueError, match="metric 'svm' needs labels"):
        evaluate_set(SETS[0], None)


@pytest.mark.parametrize(
    ("returned", "expected", "notes"),
    [
        (np.float32(0.5), {"own": 0.5}, {}),
        (torch.tensor(2), {"own": 2.0}, {}),
        ((0.5, "not converged"), {"own": 0.5}, {"own": "not converged"}),
        ((0.5, ""), {"own": 0.5}, {}),
        (None, {}, {}),
    ],
)
def test_a_function_returns_a_number_with_or_without_a_note_or_none(
    returned: object, expected: dict[str, float], notes: dict[str, str]
) -> None:
    found = evaluate_set(SETS[0], None, [Metric("own", "own", lambda *_: returned, protocol="features")])  # type: ignore[arg-type, return-value]
    assert found == expected
    assert found.notes == notes


MODULE = """
from hardneg.evaluation import Metric

def calibration_error(train_features, train_labels, test_features, test_labels, seed):
    return 0.25

spread = Metric("spread", "spread", lambda features, seed: features.std(), "lower", "features", percent=False)
number = 3
"""


def test_module_and_callable_name_a_function_or_a_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_metrics.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        function, instance = (metric_from(f"my_own_metrics:{name}") for name in ("calibration_error", "spread"))
        assert function.format == MetricFormat("calibration error", "higher", True)
        assert instance.format == MetricFormat("spread", "lower", False)
        found = evaluate_features(*SETS, metrics=["calibration_error", "spread"])  # registered by name
        assert found == {"calibration_error": 0.25, "spread": pytest.approx(float(SETS[2].std()))}
        with pytest.raises(ValueError, match="could not be imported: AttributeError"):
            metric_from("my_own_metrics:missing")
        with pytest.raises(ValueError, match="call"):
            metric_from("my_own_metrics:number")
    finally:
        sys.modules.pop("my_own_metrics", None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "a b"}, "name of a metric must be letters, digits and underscores.* got 'a b'"),
        ({"name": "notes"}, "neither 'notes' nor 'metrics', got 'notes'"),
        ({"title": ""}, "title of metric 'own' must be a text, got ''"),
        ({"function": 3}, "function of metric 'own' must be callable, got 3"),
        ({"better": "highest"}, "better='highest' is not known: did you mean 'higher'"),
        ({"protocol": "fold"}, "protocol='fold' is not known: did you mean 'folds'"),
    ],
)
def test_errors_of_a_metric_name_the_argument(changes: dict[str, object], message: str) -> None:
    arguments = {"name": "own", "title": "own", "function": nearest_error}
    with pytest.raises(ValueError, match=message):
        Metric(**{**arguments, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("returned", ["0.5 %", float("nan"), float("inf"), torch.ones(2), [0.5]])
def test_a_value_that_is_not_a_finite_number_is_an_error(returned: object) -> None:
    metric = Metric("own", "own", lambda *_: returned, protocol="features")  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"metric 'own' must return a (finite )?number, got"):
        evaluate_set(SETS[0], None, [metric])


def test_built_in_metrics_cannot_be_replaced() -> None:
    for name in ("knn", "svm", "few_3"):
        with pytest.raises(ValueError, match=f"metric '{name}' is built in and cannot be replaced"):
            register(Metric(name, "own", nearest_error))


def test_a_file_describes_the_metrics_that_are_not_built_in() -> None:
    found = evaluate_features(*SETS, metrics=["knn", ERROR, SPREAD])
    content = found.to_json()
    assert content["metrics"] == {
        "nearest_error": {"title": "1-NN error", "better": "lower", "percent": True},
        "spread": {"title": "spread", "better": "lower", "percent": False},
    }
    read = EvaluationResult.from_json(content, "evaluation.json")
    assert read == found
    assert read.formats == {"nearest_error": ERROR.format, "spread": SPREAD.format}
    assert read.format("spread").text(-2.0) == "−2"  # not registered here: known from the file
    assert evaluate_features(*SETS, metrics=["knn"]).to_json() == {"knn": found["knn"]}


@pytest.mark.parametrize(
    "described",
    [[], {"x": {}}, {"x": {"title": "x", "better": "best", "percent": True}},
     {"x": {"title": 3, "better": "lower", "percent": True}}, {"x": {"title": "x", "better": [], "percent": True}}],
)  # fmt: skip
def test_a_broken_description_is_an_error_that_names_the_file(described: object) -> None:
    with pytest.raises(ValueError, match=r"run/evaluation\.json: metrics must map metrics to title"):
        EvaluationResult.from_json({"x": 0.5, "metrics": described}, "run/evaluation.json")


def test_a_file_cannot_change_the_description_of_a_built_in_metric() -> None:
    described = {"knn": {"title": "mine", "better": "lower", "percent": False}}
    read = EvaluationResult.from_json({"knn": 0.5, "metrics": described}, "evaluation.json")
    assert read.format("knn") == MetricFormat("kNN", "higher", True)
    assert read.to_json() == {"knn": 0.5}


def test_columns_are_ordered_and_undescribed_metrics_are_percentages_if_fractions() -> None:
    register(ERROR)
    row = {"zeta": [3.0], "few_10": [0.5], "nearest_error": [0.1], "few_2": [0.5], "alpha": [0.5], "linear": [0.9],
           "empty": [], "knn": [0.9]}  # fmt: skip
    found = columns({"a": row, "b": {"spread": [-2.0]}}, {"spread": SPREAD.format})
    assert [*found] == ["knn", "linear", "few_2", "few_10", "nearest_error", "zeta", "alpha", "spread"]
    assert found["spread"] == SPREAD.format
    assert found["nearest_error"] == ERROR.format
    assert (found["alpha"].percent, found["zeta"].percent) == (True, False)
    assert found["few_10"].title == "10 labels/class"


def test_a_streamed_set_gives_the_features_of_one_in_memory_without_its_broken_images(tmp_path: Path) -> None:
    for number in range(150):
        folder = tmp_path / "train" / str(number % 3)
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number).save(folder / f"{number:03}.png")
    file = tmp_path / "train" / "1" / "100.png"
    file.write_bytes(file.read_bytes()[:45])  # a valid header without an image
    with pytest.warns(UserWarning, match="skipped 1 of 150"):
        memory = load_images(tmp_path, "train")
    streamed = load_images(tmp_path, "train", in_memory=0)
    assert isinstance(memory, ImageSet)
    assert not isinstance(streamed, ImageSet)
    with pytest.warns(UserWarning, match="skipped 1 of 150"):
        features, labels = extract_set(nn.Flatten(), streamed, batch_size=64)
    expected, expected_labels = extract_set(nn.Flatten(), memory, batch_size=7)
    assert torch.equal(features, expected)
    assert torch.equal(labels, expected_labels)


def test_a_set_without_labels_cannot_be_evaluated() -> None:
    with pytest.raises(ValueError, match="has no labels"):
        extract_set(nn.Flatten(), ImageSet(torch.zeros(3, 1, 2, 2, dtype=torch.uint8)))

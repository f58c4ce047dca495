"""Accuracies of the SVM equal a grid search of scikit-learn in each fold; the test fold is not used for any choice."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits, load_iris
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import Tensor

from hardneg.evaluation import svm
from hardneg.evaluation.svm import PENALTIES, svm_accuracy
from hardneg.randomness import mix


def iris() -> tuple[Tensor, Tensor]:
    features, labels = load_iris(return_X_y=True)
    return torch.tensor(features), torch.tensor(labels)


def plain(
    features: Tensor,
    labels: Tensor,
    kernel: str,
    standardize: bool,
    repeats: int,
    grid: tuple[float, ...],
    gamma: str = "scale",
) -> tuple[list[float], list[float]]:
    """The same protocol by scikit-learn: a grid search inside each fold."""
    x, y, scores, chosen = features.numpy(), labels.numpy(), [], []
    for repeat in range(repeats):
        outer = StratifiedKFold(10, shuffle=True, random_state=mix(0, repeat) % 2**32)
        for fold, (train, test) in enumerate(outer.split(x, y)):
            inner = StratifiedKFold(5, shuffle=True, random_state=mix(0, repeat, fold) % 2**32)
            machine = SVC(kernel=kernel, gamma=gamma)
            machine = make_pipeline(StandardScaler(), machine) if standardize else machine
            name = "svc__C" if standardize else "C"
            search = GridSearchCV(machine, {name: list(grid)}, cv=inner).fit(x[train], y[train])
            scores.append(search.score(x[test], y[test]))
            chosen.append(search.best_params_[name])
    return scores, chosen


@pytest.mark.parametrize("kernel", ["rbf", "linear"])
@pytest.mark.parametrize("standardize", [False, True])
def test_accuracies_equal_a_grid_search_in_each_fold(kernel: str, standardize: bool) -> None:
    features, labels = iris()
    features = features + torch.randn(150, 4, generator=torch.Generator().manual_seed(0))  # noise, so that folds differ
    # A linear SVM on unscaled features converges slowly with a high penalty.
    grid = PENALTIES if kernel == "rbf" else PENALTIES[:5]
    result = svm_accuracy(features, labels, kernel, grid, standardize=standardize)
    scores, chosen = plain(features, labels, kernel, standardize, 1, grid)
    assert result.accuracies.flatten().tolist() == pytest.approx(scores)
    assert result.penalties.flatten().tolist() == chosen
    assert result.unconverged == 0


def test_gamma_auto_equals_scikit_learn() -> None:
    features, labels = iris()
    features = 3 * features + torch.randn(150, 4, generator=torch.Generator().manual_seed(0))
    scores, _ = plain(features, labels, "rbf", False, 1, PENALTIES, gamma="auto")
    result = svm_accuracy(features, labels, gamma="auto")
    assert result.accuracies.flatten().tolist() == pytest.approx(scores)
    assert result.accuracies.tolist() != svm_accuracy(features, labels).accuracies.tolist()


def test_many_classes_equal_scikit_learn() -> None:
    images, numbers = load_digits(return_X_y=True)
    features, labels = torch.tensor(images[:300]), torch.tensor(numbers[:300])
    scores, _ = plain(features, labels, "rbf", False, 2, grid=(1.0, 10.0))
    result = svm_accuracy(features, labels, penalties=(10.0, 1.0), repeats=2)  # in any order
    assert result.accuracies.flatten().tolist() == pytest.approx(scores)


def test_the_number_of_threads_does_not_change_the_result() -> None:
    features, labels = iris()
    one, many = (svm_accuracy(features, labels, folds=5, jobs=jobs) for jobs in (1, 3))
    assert (one.accuracies == many.accuracies).all()


def test_the_seed_chooses_the_folds() -> None:
    features, labels = iris()
    features = features + torch.randn(150, 4, generator=torch.Generator().manual_seed(1))
    runs = [svm_accuracy(features, labels, penalties=[1.0], seed=seed).accuracies for seed in (0, 0, 1)]
    assert (runs[0] == runs[1]).all()
    assert (runs[0] != runs[2]).any()


def test_random_labels_give_accuracy_one_half() -> None:
    # Choosing C on the test fold, as published code does, would give more than one half.
    generator = torch.Generator().manual_seed(2)
    features, labels = torch.randn(120, 5, generator=generator), torch.arange(120) % 2
    result = svm_accuracy(features, labels, penalties=(0.1, 1.0, 10.0), repeats=2)
    assert abs(result.mean - 0.5) < 0.1


def test_both_standard_deviations_equal_numpy() -> None:
    features, labels = iris()
    features = features + torch.randn(150, 4, generator=torch.Generator().manual_seed(3))
    result = svm_accuracy(features, labels, penalties=[1.0], repeats=3)
    assert result.mean == pytest.approx(np.mean([row.mean() for row in result.accuracies]))
    assert result.std_of_repeats == pytest.approx(np.std([row.mean() for row in result.accuracies], ddof=1))
    assert result.std_of_folds == pytest.approx(np.mean([np.std(row) for row in result.accuracies]))
    assert "std of 3 repeats of 10 folds" in str(result)


def test_unknown_labels_are_left_out() -> None:
    features, labels = iris()
    more = torch.cat([features, torch.full((5, 4), 1e6, dtype=features.dtype)])
    unknown = torch.cat([labels, torch.full((5,), -1)])
    with_unknown, without = svm_accuracy(more, unknown, folds=5), svm_accuracy(features, labels, folds=5)
    assert (with_unknown.accuracies == without.accuracies).all()


def test_folds_without_convergence_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svm, "STEPS", 3)
    features, labels = iris()
    assert svm_accuracy(features, labels, "linear", penalties=[1e3], folds=5).unconverged == 5


def test_numpy_arrays_give_the_results_of_tensors() -> None:
    features, labels = iris()
    found = svm_accuracy(features.numpy(), labels.numpy().astype("int32"), folds=3, penalties=np.array([0.1, 1.0]))
    assert (found.accuracies == svm_accuracy(features, labels, folds=3, penalties=[0.1, 1.0]).accuracies).all()


@settings(max_examples=12)
@given(
    scale=st.sampled_from([0.0, 1e-20, 1.0, 1e3]),
    constant=st.booleans(),
    kernel=st.sampled_from(["rbf", "linear"]),
    standardize=st.booleans(),
)
def test_degenerate_features_give_an_accuracy(scale: float, constant: bool, kernel: str, standardize: bool) -> None:
    features = torch.randn(24, 2, generator=torch.Generator().manual_seed(4)) * scale
    if constant:
        features[:, 0] = scale
    labels = torch.arange(24) % 2
    options = {"folds": 3, "inner_folds": 2, "penalties": (0.1, 1.0), "jobs": 1}
    accuracy = svm_accuracy(features, labels, kernel, standardize=standardize, **options).mean
    assert 0 <= accuracy <= 1
    if scale == 0:  # equal features: one of two equal classes is always predicted
        assert accuracy == 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": torch.zeros(150, dtype=torch.int64)}, "two classes or more"),
        ({"labels": torch.tensor([0] * 146 + [1] * 4)}, "smallest class has 4 samples"),
        ({"labels": torch.tensor([0] * 140 + [1] * 10), "inner_folds": 10}, "smallest class has 10 samples"),
        ({"features": torch.full((150, 2), torch.nan)}, "features holds NaN"),
        ({"kernel": "rbs"}, "did you mean 'rbf'"),
        ({"gamma": "auta"}, "did you mean 'auto'"),
        ({"penalties": []}, "penalties is empty"),
        ({"penalties": [0.0]}, "penalties must be > 0"),
        ({"folds": 1}, "folds must be a whole number ≥ 2"),
        ({"repeats": 0}, "repeats must be"),
    ],
)
def test_errors_name_the_argument_and_the_fix(changes: dict[str, object], message: str) -> None:
    features, labels = iris()
    with pytest.raises(ValueError, match=message):
        svm_accuracy(**{"features": features, "labels": labels, **changes})

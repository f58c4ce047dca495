"""Sentence classification: folds of scikit-learn's logistic regression, and the public sets."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hardneg.evaluation import evaluate_texts, linear_folds, linear_probe
from hardneg.evaluation.sentences import logistic_accuracy, nearest_accuracy, read_classification, stratified_folds


def blobs(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (240,), generator=generator)
    return torch.randn(240, 6, generator=generator) + 1.2 * torch.eye(3, 6)[labels], labels


def test_each_fold_has_the_accuracy_of_scikit_learn() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    features, labels = blobs()
    result, folds = logistic_accuracy(features, labels, penalties=[1e-2], seed=3), stratified_folds(labels, 10, 3)
    for fold, accuracy in enumerate(result.accuracies):
        train, test = (folds != fold).numpy(), (folds == fold).numpy()
        x, y = features.double().numpy(), labels.numpy()
        x = (x - x[train].mean(axis=0)) / x[train].std(axis=0)
        model = linear_model.LogisticRegression(C=1 / (train.sum() * 1e-2), max_iter=1000, tol=1e-8)
        assert accuracy == pytest.approx(model.fit(x[train], y[train]).score(x[test], y[test]), abs=1e-9)
    assert 0.5 < result.mean < 0.95


@pytest.mark.parametrize("coefficients", [1, 1 << 22])  # one fold at a time, and all folds together
def test_folds_fitted_together_are_the_linear_probes_of_each(
    coefficients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_folds, "COEFFICIENTS", coefficients)
    features, labels = blobs(1)
    features = 40 * features + 1000  # each fold is standardized by its own training set
    folds, penalties = stratified_folds(labels, 5, 2), (1e-3, 1e-1, 1.0)
    result = linear_folds.probe_folds(features, labels, folds, penalties, seeds=range(5))
    for fold, found in enumerate(result):
        train, test = folds != fold, folds == fold
        alone = linear_probe(features[train], labels[train], features[test], labels[test], penalties, seed=fold)
        assert (found.accuracy, found.penalty, found.converged) == (alone.accuracy, alone.penalty, alone.converged)
    assert len({found.penalty for found in result}) > 1


def test_the_nearest_neighbor_is_that_of_a_loop() -> None:
    features, labels = blobs()
    folds = stratified_folds(labels, 10, 5)
    correct = 0
    for row in range(240):
        others = [other for other in range(240) if folds[other] != folds[row]]
        cosines = torch.cosine_similarity(features[row : row + 1], features[others]).tolist()
        nearest = others[cosines.index(max(cosines))]
        correct += int(labels[nearest] == labels[row])
    assert nearest_accuracy(features, labels, seed=5) == pytest.approx(correct / 240)


def test_every_fold_holds_its_share_of_each_class() -> None:
    targets = torch.tensor([0] * 57 + [1] * 13 + [2] * 30)
    table = torch.stack([targets[stratified_folds(targets, 10, 1) == fold].bincount(minlength=3) for fold in range(10)])
    assert table.sum(dim=1).tolist() == [10] * 10
    assert bool(((table.max(dim=0).values - table.min(dim=0).values) <= 1).all())


def test_folds_are_equally_large_and_the_penalty_is_chosen_in_each() -> None:
    features, labels = blobs()
    result = logistic_accuracy(features, labels)
    assert len(result.accuracies) == len(result.penalties) == 10
    for accuracy in result.accuracies:
        assert 24 * accuracy == pytest.approx(round(24 * accuracy), abs=1e-9)
    assert len(set(result.penalties)) > 1  # chosen in each fold


def test_unknown_labels_are_left_out_and_small_classes_refused() -> None:
    features, labels = blobs()
    with_unknown = torch.cat([features, torch.full((5, 6), 100.0)]), torch.cat([labels, torch.full((5,), -1)])
    assert logistic_accuracy(*with_unknown).mean == logistic_accuracy(features, labels).mean
    labels = torch.where(torch.arange(240) < 4, 3, labels)
    with pytest.raises(ValueError, match="smallest class has 4 samples, too few for folds=10"):
        logistic_accuracy(features, labels)
    with pytest.raises(ValueError, match="two classes or more"):
        logistic_accuracy(features, torch.zeros(240, dtype=torch.int64))


def letters(texts: Sequence[str]) -> Tensor:
    return torch.tensor([[float(text.count(letter)) for letter in "xyz"] for text in texts])


def test_tasks_are_read_by_name_with_folds_or_with_their_test_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ["task\tsplit\tlabel\ttext"]
    rows += [f"MR\tall\t{number % 2}\t{'xy'[number % 2] * (number % 3 + 1)} z" for number in range(40)]
    for split in ("train", "test"):
        rows += [f"TREC\t{split}\t{'xyz'[n % 3]}\t{'xyz'[n % 3] * (n % 4 + 1)}" for n in range(30)]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "sentclf.tsv").write_text("\n".join(rows) + "\n")
    monkeypatch.setenv("HARDNEG_DATA", str(tmp_path))
    assert evaluate_texts(letters, ["mr", "trec"]) == {"mr": 1.0, "trec": 1.0}
    assert read_classification("TREC", "test")[1].tolist() == [number % 3 for number in range(30)]
    with pytest.raises(ValueError, match="no texts of CR"):
        evaluate_texts(letters, ["cr"])


@pytest.mark.skipif(
    not (Path(os.environ.get("HARDNEG_DATA", "")) / "text" / "sentclf.tsv.xz").is_file(), reason="needs HARDNEG_DATA"
)
def test_the_public_sets_have_their_published_sizes() -> None:
    sizes = {
        (task, split): torch.bincount(read_classification(task, split)[1]).tolist()
        for task, split in (("MR", "all"), ("SUBJ", "all"), ("MPQA", "all"), ("TREC", "test"), ("SST2", "test"))
    }
    assert sizes["MR", "all"] == [5331, 5331]
    assert sizes["SUBJ", "all"] == [5000, 5000]
    assert sorted(sizes["MPQA", "all"]) == [3311, 7292]
    assert (sum(sizes["TREC", "test"]), len(sizes["TREC", "test"])) == (500, 6)
    assert sum(sizes["SST2", "test"]) == 1821

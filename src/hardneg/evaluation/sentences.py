"""Sentence classification: logistic regression on frozen features, over folds or on a given test set."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hardneg import checks
from hardneg.checks import TensorLike
from hardneg.evaluation.features import checked_features, class_indices, random_ranks
from hardneg.evaluation.knn import knn_accuracy
from hardneg.evaluation.linear import linear_probe
from hardneg.evaluation.linear_folds import probe_folds
from hardneg.evaluation.sts import Encode, find_file, table
from hardneg.randomness import mix

FOLDED = ("MR", "CR", "SUBJ", "MPQA")  # tested over ten folds
DIVIDED = ("TREC", "SST2")  # with a test set of their own
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # SentEval's C from 1/4 to 8 are 1e-4 to 4e-4 on its sets of 10,000 texts
FILE = "sentclf.tsv"  # columns task, split, label, text


@dataclass(frozen=True)
class LogisticResult:
    """Accuracy of each fold, in [0, 1], with the penalty chosen there; note: how many folds have not converged."""

    accuracies: tuple[float, ...]
    penalties: tuple[float, ...]
    note: str

    @property
    def mean(self) -> float:
        """Mean accuracy over the folds."""
        return sum(self.accuracies) / len(self.accuracies)


def logistic_accuracy(
    features: TensorLike,
    labels: TensorLike,
    folds: int = 10,
    penalties: Sequence[float] = PENALTIES,
    seed: int = 0,
) -> LogisticResult:
    """Cross-validate logistic regression whose L2 penalty is chosen on held-out samples of each training part.

    features: (N, d) · labels: (N,), −1 = unknown, left out · folds: stratified, each tested once · penalties: as for
    `linear_probe` · seed: of the folds and of the held-out samples

    Examples:
        >>> features, labels = torch.eye(2).repeat(20, 1), torch.tensor([0, 1]).repeat(20)
        >>> logistic_accuracy(features, labels).mean
        1.0
    """
    rows, targets = _labeled(features, labels, folds)
    fold_of = stratified_folds(targets, folds, seed)
    seeds = [mix(seed, fold) % 2**31 for fold in range(folds)]
    results = probe_folds(rows, targets, fold_of, penalties, seeds)
    failed = sum(not result.converged for result in results)
    note = f"not converged in {failed} of {folds} folds" if failed else ""
    return LogisticResult(tuple(r.accuracy for r in results), tuple(r.penalty for r in results), note)


def nearest_accuracy(features: TensorLike, labels: TensorLike, folds: int = 10, seed: int = 0) -> float:
    """Cross-validated accuracy of the label of the nearest neighbor by cosine; arguments as `logistic_accuracy`.

    It depends on similarities alone, while a regression can also use directions in which texts differ little.

    Examples:
        >>> nearest_accuracy(torch.eye(2).repeat(20, 1), torch.tensor([0, 1]).repeat(20))
        1.0
    """
    rows, targets = _labeled(features, labels, folds)
    fold_of = stratified_folds(targets, folds, seed)
    correct = 0.0
    for fold in range(folds):
        train, test = fold_of != fold, fold_of == fold
        correct += knn_accuracy(rows[train], targets[train], rows[test], targets[test], k=1) * int(test.sum())
    return correct / len(targets)


def _labeled(features: TensorLike, labels: TensorLike, folds: int) -> tuple[Tensor, Tensor]:
    """Features (n, d) and class indices (n,) of the labeled samples; raises if a class is too small for the folds."""
    rows, numbers, _, _ = checked_features(features, labels, features)
    checks.whole("folds", folds, at_least=2)
    rows, numbers = rows[numbers >= 0], numbers[numbers >= 0]
    classes, targets = class_indices(numbers)
    if len(classes) < 2:
        raise ValueError(f"labels must hold two classes or more, got {classes.tolist()}: add another class")
    if (fewest := int(targets.bincount().min())) < folds:
        raise ValueError(f"the smallest class has {fewest} samples, too few for folds={folds}: lower it")
    return rows, targets


def stratified_folds(targets: Tensor, folds: int, seed: int = 0) -> Tensor:
    """The fold of each sample, (N,): equally many of all samples and of each class in every fold, up to one.

    Samples are numbered class after class, in random order within a class, and assigned to the folds in turn.

    Examples:
        >>> stratified_folds(torch.tensor([0, 1, 0, 1]), 2).bincount()
        tensor([2, 2])
    """
    counts = targets.bincount()
    return (random_ranks(targets, seed) + (counts.cumsum(0) - counts)[targets]) % folds


def classification_accuracy(encode: Encode, task: str, seed: int = 0) -> tuple[float, str]:
    """Accuracy on one of the tasks ``FOLDED`` and ``DIVIDED`` of SentEval, and a note on convergence."""
    checks.choice("task", task, (*FOLDED, *DIVIDED))
    if task in FOLDED:
        features, labels = _encoded(encode, task, "all")
        result = logistic_accuracy(features, labels, seed=seed)
        return result.mean, result.note
    probe = linear_probe(*_encoded(encode, task, "train"), *_encoded(encode, task, "test"), PENALTIES, seed=seed)
    return probe.accuracy, probe.note


def _encoded(encode: Encode, task: str, split: str) -> tuple[Tensor, Tensor]:
    """Features (N, d) and labels (N,) of a task, both on the device of the encoder, where the fits are faster."""
    texts, labels = read_classification(task, split)
    features = encode(texts)
    return features, labels.to(features.device)


def read_classification(task: str, split: str) -> tuple[list[str], Tensor]:
    """Texts and labels (N,) of a task, from ``sentclf.tsv`` or ``sentclf.tsv.xz``; see `find_file`."""
    file = find_file(FILE)
    rows = [row for row in table(file, 4) if row[0] == task]
    names = {label: number for number, label in enumerate(sorted({row[2] for row in rows}))}
    chosen = [row for row in rows if row[1] == split]
    if not chosen:
        raise ValueError(f"{file} has no texts of {task}, split {split!r}: unpack the data again")
    return [row[3] for row in chosen], torch.tensor([names[row[2]] for row in chosen])

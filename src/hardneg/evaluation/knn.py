"""kNN classification of frozen features: weighted kNN, and 1-NN from a few labels per class (METHODS, section 6).

The search is exact: cosines in at least float32, one tile of test rows × all training rows at a time.
"""

import statistics

import torch
from torch import Tensor

from hardneg import checks
from hardneg.checks import TensorLike, whole
from hardneg.evaluation.features import (
    checked_features,
    checked_labels,
    class_indices,
    random_ranks,
    share_equal,
)
from hardneg.losses.inputs import normalized
from hardneg.matmul import exact_products, largest_columns, row_blocks, where_precise


def knn_accuracy(
    train_features: TensorLike,
    train_labels: TensorLike,
    test_features: TensorLike,
    test_labels: TensorLike,
    k: int = 200,
    temperature: float = 0.1,
    chunk: int | None = None,
) -> float:
    """Accuracy of weighted kNN on the test set, in [0, 1]; arguments as for `knn_predict`.

    test_labels: (T,) integer; a label that is not in the training set counts as an error

    Examples:
        >>> train, test = torch.eye(2), torch.tensor([[0.9, 0.1], [0.8, 0.2]])
        >>> knn_accuracy(train, torch.tensor([3, 7]), test, torch.tensor([3, 7]), k=1)
        0.5
    """
    train, labels, test, _ = checked_features(train_features, train_labels, test_features)
    expected = checked_labels("test_labels", test_labels, test, "test_features")
    return share_equal(knn_predict(train, labels, test, k, temperature, chunk), expected)


def knn_predict(
    train_features: TensorLike,
    train_labels: TensorLike,
    test_features: TensorLike,
    k: int = 200,
    temperature: float = 0.1,
    chunk: int | None = None,
) -> Tensor:
    """Predict labels by a vote of the k nearest training samples, weighted by e^{cos/temperature}.

    train_features: (N, d) tensor or numpy array, not necessarily normalized; the cosine of a zero vector is 0 ·
    train_labels: (N,) integers · test_features: (T, d) · k: number of neighbors, at most N are used; k = 1 is 1-NN ·
    temperature: of the weights · chunk: test rows per tile (default: as many as fit into 128 MiB) · returns (T,)

    Ties are broken deterministically: of equal cosines the training sample with the lower index is the neighbor, of
    equal votes the smaller label is predicted.

    Examples:
        >>> train = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.1, 1.0]])
        >>> knn_predict(train, torch.tensor([3, 7, 7]), torch.tensor([[2.0, 0.1], [0.0, 5.0]]), k=1)
        tensor([3, 7])
    """
    train, labels, test, dtype = checked_features(train_features, train_labels, test_features)
    k = whole("k", k)
    temperature = checks.number("temperature", temperature, above=0, below=float("inf"))
    chunk = None if chunk is None else whole("chunk", chunk)
    with exact_products(train.device):
        return _vote(_normalized(train, dtype), labels, _normalized(test, dtype), k, temperature, chunk)


def few_label_accuracy(
    train_features: TensorLike,
    train_labels: TensorLike,
    test_features: TensorLike,
    test_labels: TensorLike,
    per_class: int,
    draws: int = 20,
    seed: int = 0,
) -> tuple[float, float]:
    """Accuracy of 1-NN from a few labeled training samples per class: mean and standard deviation over random draws.

    train_features: (N, d) tensor or numpy array · train_labels: (N,) integers · test_features: (T, d) · test_labels:
    (T,) · per_class: labels per class, drawn without replacement · draws: number of draws · seed: of the draws; with
    the same seed, the samples of a small ``per_class`` are among those of a larger one · returns the mean, in [0, 1],
    and the sample standard deviation over the draws (0 for one draw)

    Examples:
        >>> features, labels = torch.eye(2).repeat(5, 1), torch.tensor([3, 7]).repeat(5)
        >>> few_label_accuracy(features, labels, features, labels, per_class=1)
        (1.0, 0.0)
    """
    train, labels, test, dtype = checked_features(train_features, train_labels, test_features)
    expected = checked_labels("test_labels", test_labels, test, "test_features")
    per_class, draws = whole("per_class", per_class), whole("draws", draws)
    classes, targets = class_indices(labels)
    counts = targets.bincount()
    smallest = int(counts.argmin())
    if int(counts[smallest]) < per_class:
        raise ValueError(
            f"per_class={per_class}, but train_labels has class {int(classes[smallest])} only "
            f"{int(counts[smallest])} times: lower per_class, or leave this class out"
        )
    accuracies = []
    with exact_products(train.device):
        train, test = _normalized(train, dtype), _normalized(test, dtype)
        for draw in range(draws):
            drawn = (random_ranks(targets, seed, draw) < per_class).nonzero()[:, 0]  # (C · per_class,)
            predicted = _vote(train[drawn], labels[drawn], test, k=1)
            accuracies.append(share_equal(predicted, expected))
    return statistics.fmean(accuracies), statistics.stdev(accuracies) if draws > 1 else 0.0


def _normalized(features: Tensor, dtype: torch.dtype) -> Tensor:
    """Normalize features (N, d) block by block, so that temporaries stay small."""
    unit = torch.empty_like(features, dtype=dtype)
    for block in row_blocks(*features.shape):
        unit[block] = normalized(features[block].to(dtype))
    return unit


def _vote(
    train: Tensor, labels: Tensor, test: Tensor, k: int, temperature: float = 1.0, chunk: int | None = None
) -> Tensor:
    """Labels (T,) of test (T, d) by a weighted vote of the k nearest of train (N, d); both are normalized."""
    classes, targets = class_indices(labels)
    k = min(k, len(train))
    # Votes are integers, whose sum does not depend on the order of summation; 62 bits hold k of them.
    vote_scale = 2.0 ** min(52, 62 - k.bit_length())
    predicted = torch.empty(len(test), dtype=torch.int64, device=test.device)
    for block in row_blocks(len(test), len(train), chunk):
        cosines = test[block] @ train.T  # (R, N)
        nearest = largest_columns(cosines, k)  # (R, k)
        near = where_precise(cosines.gather(1, nearest)).double()
        # Relative to the weight of the nearest neighbor, so that no temperature overflows.
        weights = ((near - near.amax(dim=1, keepdim=True)) / temperature).exp()
        votes = torch.zeros(len(cosines), len(classes), dtype=torch.int64, device=test.device)  # (R, C)
        votes.scatter_add_(1, targets[nearest], (weights * vote_scale).round().long().to(votes.device))
        predicted[block] = votes.argmax(dim=1)  # the first of equal votes
    return classes[predicted]

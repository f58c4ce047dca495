"""Nearest neighbours of frozen features: weighted kNN, 1-NN, and 1-NN from a few labels per class (METHODS, section 6).

All exact: cosines in at least float32, a tile of test rows against all training rows at a time.
"""

import statistics

import torch
from torch import Tensor

from hardneg import checks
from hardneg.checks import whole
from hardneg.evaluation.features import check_sets, class_indices, random_ranks, share_equal
from hardneg.losses.inputs import normalized
from hardneg.matmul import exact_products, largest_columns, row_blocks, where_precise


def knn_accuracy(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    k: int = 200,
    temperature: float = 0.1,
    chunk: int | None = None,
) -> float:
    """Share of the test samples that weighted kNN labels correctly, in [0, 1]; arguments as in `knn_predict`.

    test_labels: (T,) integer; a label that training does not hold counts as an error

    Examples:
        >>> train, test = torch.eye(2), torch.tensor([[0.9, 0.1], [0.8, 0.2]])
        >>> knn_accuracy(train, torch.tensor([3, 7]), test, torch.tensor([3, 7]), k=1)
        0.5
    """
    check_sets(train_features, train_labels, test_features, test_labels)
    return share_equal(knn_predict(train_features, train_labels, test_features, k, temperature, chunk), test_labels)


def knn_predict(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    k: int = 200,
    temperature: float = 0.1,
    chunk: int | None = None,
) -> Tensor:
    """Labels by vote of the k nearest training samples, each with weight e^{cos/temperature}.

    train_features: (N, d), of any length; the cosine of a zero vector is 0 · train_labels: (N,) any integers ·
    test_features: (T, d) · k: neighbours; all N samples vote where N < k, and k = 1 is plain 1-NN · temperature: of the
    weights · chunk: test rows at a time (default: as many as keep a tile at 128 MiB) · returns (T,)

    Ties are broken the same way on every run: of equal cosines the earlier training samples are neighbours, of equal
    votes the smaller label wins.

    Examples:
        >>> train = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.1, 1.0]])
        >>> knn_predict(train, torch.tensor([3, 7, 7]), torch.tensor([[2.0, 0.1], [0.0, 5.0]]), k=1)
        tensor([3, 7])
    """
    dtype = check_sets(train_features, train_labels, test_features)
    whole("k", k)
    checks.number("temperature", temperature, above=0, below=float("inf"))
    if chunk is not None:
        whole("chunk", chunk)
    with exact_products(train_features.device):
        train, test = _unit(train_features, dtype), _unit(test_features, dtype)
        return _vote(train, train_labels, test, k, temperature, chunk)


def few_label_accuracy(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    per_class: int,
    draws: int = 20,
    seed: int = 0,
) -> tuple[float, float]:
    """1-NN accuracy when only a few training samples of each class have labels: mean and spread over random draws.

    train_features: (N, d) · train_labels: (N,) any integers · test_features: (T, d) · test_labels: (T,) · per_class:
    labels per class, drawn without replacement · draws: how often · seed: of the draws; with one seed, what is drawn
    for a small ``per_class`` is also drawn for a larger one · returns the mean, in [0, 1], and the sample standard
    deviation over the draws (0 for one draw)

    Examples:
        >>> features, labels = torch.eye(2).repeat(5, 1), torch.tensor([3, 7]).repeat(5)
        >>> few_label_accuracy(features, labels, features, labels, per_class=1)
        (1.0, 0.0)
    """
    dtype = check_sets(train_features, train_labels, test_features, test_labels)
    whole("per_class", per_class)
    whole("draws", draws)
    classes, targets = class_indices(train_labels)
    counts = targets.bincount()
    smallest = int(counts.argmin())
    if int(counts[smallest]) < per_class:
        raise ValueError(
            f"per_class={per_class}, but train_labels holds class {int(classes[smallest])} only "
            f"{int(counts[smallest])} times: lower per_class, or leave this class out"
        )
    accuracies = []
    with exact_products(train_features.device):
        train, test = _unit(train_features, dtype), _unit(test_features, dtype)
        for draw in range(draws):
            drawn = (random_ranks(targets, seed, draw) < per_class).nonzero()[:, 0]  # (C · per_class,)
            predicted = _vote(train[drawn], train_labels[drawn], test, k=1)
            accuracies.append(share_equal(predicted, test_labels))
    return statistics.fmean(accuracies), statistics.stdev(accuracies) if draws > 1 else 0.0


def _unit(features: Tensor, dtype: torch.dtype) -> Tensor:
    """Features of unit length, (N, d), made block by block so that temporaries stay small."""
    unit = torch.empty_like(features, dtype=dtype)
    for block in row_blocks(*features.shape):
        unit[block] = normalized(features[block].to(dtype))
    return unit


def _vote(
    train: Tensor, labels: Tensor, test: Tensor, k: int, temperature: float = 1.0, chunk: int | None = None
) -> Tensor:
    """Labels (T,) of unit vectors test (T, d) by vote of their k nearest among train (N, d)."""
    classes, targets = class_indices(labels)
    k = min(k, len(train))
    # Votes are whole numbers, whose sum does not depend on the order in which an accelerator adds them; 62 bits hold k.
    whole_vote = 2.0 ** min(52, 62 - k.bit_length())
    winners = torch.empty(len(test), dtype=torch.int64, device=test.device)
    for block in row_blocks(len(test), len(train), chunk):
        cosines = test[block] @ train.T  # (R, N)
        nearest = largest_columns(cosines, k)  # (R, k)
        near = where_precise(cosines.gather(1, nearest)).double()
        # Relative to the nearest neighbour's weight: no temperature overflows.
        weights = ((near - near.amax(dim=1, keepdim=True)) / temperature).exp()
        votes = torch.zeros(len(cosines), len(classes), dtype=torch.int64, device=test.device)  # (R, C)
        votes.scatter_add_(1, targets[nearest], (weights * whole_vote).round().long().to(votes.device))
        winners[block] = votes.argmax(dim=1)  # the first of equals
    return classes[winners]

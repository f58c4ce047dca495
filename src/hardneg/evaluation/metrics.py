"""Every figure that a trained encoder is judged by, in one call."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from hardneg.evaluation.features import class_indices
from hardneg.evaluation.knn import few_label_accuracy, knn_accuracy
from hardneg.evaluation.linear import linear_probe

METRICS = {
    "knn": "weighted kNN, k = 200",
    "nearest": "1-NN",
    "few_1": "1-NN from 1 label per class",
    "few_5": "1-NN from 5 labels per class",
    "linear": "linear readout",
}

NOTES = "notes"  # the key of the notes beside the numbers in JSON


class Accuracies(dict[str, float]):
    """Accuracies in [0, 1] by metric.

    notes: by metric, what the number does not say, as "not converged after 500 iterations"; none for a sound number

    Examples:
        >>> found = Accuracies({"linear": 0.9}, {"linear": "not converged after 500 iterations"})
        >>> found["linear"], found.to_json()["notes"]
        (0.9, {'linear': 'not converged after 500 iterations'})
    """

    def __init__(self, numbers: Mapping[str, float], notes: Mapping[str, str]) -> None:
        super().__init__(numbers)
        self.notes = {metric: note for metric, note in notes.items() if note}

    def to_json(self) -> dict[str, float | dict[str, str]]:
        """The numbers, and the notes under a key of their own if there are any."""
        return {**self, NOTES: self.notes} if self.notes else {**self}


def notes_of_seeds(notes: Mapping[int, str]) -> list[str]:
    """Notes on one metric of several runs, by seed: each note once, with its seeds.

    Examples:
        >>> notes_of_seeds({0: "not converged after 500 iterations", 2: "not converged after 500 iterations"})
        ['not converged after 500 iterations (seeds 0, 2)']
    """
    found: dict[str, list[int]] = {}
    for seed, note in notes.items():
        found.setdefault(note, []).append(seed)
    return [f"{note} (seed{'s' * (len(s) > 1)} {', '.join(map(str, s))})" for note, s in found.items()]


def judge(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    metrics: Sequence[str] = tuple(METRICS),
    seed: int = 0,
) -> Accuracies:
    """Accuracies in [0, 1] of frozen features, with notes; a figure that too few labels forbid is left out.

    train_features: (N, d) · train_labels: (N,) · test_features: (T, d) · test_labels: (T,) · metrics: names from
    ``METRICS`` · seed: of the labels drawn for ``few_…`` and of the validation split of ``linear``

    Examples:
        >>> import torch
        >>> features, labels = torch.eye(2).repeat(20, 1), torch.tensor([0, 1]).repeat(20)
        >>> judge(features, labels, features, labels, ["nearest", "few_5"])
        {'nearest': 1.0, 'few_5': 1.0}
    """
    for name in metrics:
        if name not in METRICS:
            raise ValueError(f"metrics must be among {', '.join(METRICS)}, got {name!r}")
    if len(train_labels) == 0 or len(test_labels) == 0:
        raise ValueError(
            f"{len(train_labels)} labelled samples to learn from and {len(test_labels)} to be asked about: give more"
        )
    sets = (train_features, train_labels, test_features, test_labels)
    counts = class_indices(train_labels)[1].bincount()
    smallest = int(counts.min())
    found: dict[str, float] = {}
    notes: dict[str, str] = {}
    for name in metrics:
        if name == "knn":
            found[name] = knn_accuracy(*sets)
        elif name == "nearest":
            found[name] = knn_accuracy(*sets, k=1)
        elif name == "linear":
            if int(counts.max()) > 2:  # else there is none to choose the penalty on
                probe = linear_probe(*sets, seed=seed)
                found[name], notes[name] = probe.accuracy, probe.note
        elif (per_class := int(name.removeprefix("few_"))) <= smallest:
            found[name] = few_label_accuracy(*sets, per_class=per_class, seed=seed)[0]
    return Accuracies(found, notes)

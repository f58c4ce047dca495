"""Evaluation of frozen features: nearest neighbours, a few labels per class, and a linear readout."""

from hardneg.evaluation.features import extract
from hardneg.evaluation.knn import few_label_accuracy, knn_accuracy, knn_predict
from hardneg.evaluation.linear import LinearResult, linear_probe
from hardneg.evaluation.metrics import METRICS, Accuracies, judge

__all__ = [
    "METRICS",
    "Accuracies",
    "LinearResult",
    "extract",
    "few_label_accuracy",
    "judge",
    "knn_accuracy",
    "knn_predict",
    "linear_probe",
]

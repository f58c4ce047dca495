"""Evaluation of frozen features: nearest neighbours, a few labels per class, and a linear readout."""

from hardneg.evaluation.features import extract
from hardneg.evaluation.knn import few_label_accuracy, knn_accuracy, knn_predict
from hardneg.evaluation.linear import LinearResult, linear_probe

__all__ = ["LinearResult", "extract", "few_label_accuracy", "knn_accuracy", "knn_predict", "linear_probe"]

"""Evaluation of frozen features: kNN, 1-NN from a few labels, linear probe, SVM, and user-defined metrics."""

from hardneg.evaluation.features import extract
from hardneg.evaluation.knn import few_label_accuracy, knn_accuracy, knn_predict
from hardneg.evaluation.linear import LinearResult, linear_probe
from hardneg.evaluation.metrics import DEFAULT_METRICS, Metric, MetricFormat, get_metric, metric_from, register
from hardneg.evaluation.results import EvaluationResult, evaluate_features, evaluate_set, evaluate_texts

__all__ = [
    "DEFAULT_METRICS",
    "EvaluationResult",
    "LinearResult",
    "Metric",
    "MetricFormat",
    "evaluate_features",
    "evaluate_set",
    "evaluate_texts",
    "extract",
    "few_label_accuracy",
    "get_metric",
    "knn_accuracy",
    "knn_predict",
    "linear_probe",
    "metric_from",
    "register",
]

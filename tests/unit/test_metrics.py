"""Metrics beside accuracy: what scikit-learn gives, with intervals of the units."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as sk

from dpdist.core.metrics import ACCURACY, RMSE, calibration_error, class_metrics, error_metrics

RANDOM = np.random.default_rng(0)
LABELS = (RANDOM.random(400) < 0.2).astype(np.int64)
LOGITS = np.stack([np.zeros(400), 1.5 * LABELS - 1.5 + RANDOM.normal(size=400)], 1)


def test_metrics_of_two_classes_are_those_of_scikit_learn():
    found = class_metrics(LOGITS, LABELS)
    chances, predicted = 1 / (1 + np.exp(-LOGITS[:, 1])), LOGITS.argmax(1)
    wanted = {
        "AUC": sk.roc_auc_score(LABELS, chances),
        "average precision": sk.average_precision_score(LABELS, chances),
        "Brier score": sk.brier_score_loss(LABELS, chances),
        "balanced accuracy": sk.balanced_accuracy_score(LABELS, predicted),
        ACCURACY: sk.accuracy_score(LABELS, predicted),
    }
    assert {*found} == {*wanted, "expected calibration error"}
    for name, value in wanted.items():
        assert found[name][0] == pytest.approx(value)
        assert found[name][1] < value < found[name][2]
    assert found == class_metrics(LOGITS, LABELS)  # the same records, the same intervals


def test_intervals_of_users_are_wider():
    """Ten equal records of one person are one observation."""
    logits, labels, users = (np.repeat(each, 10, axis=0) for each in
                             (LOGITS, LABELS, np.arange(400)))  # fmt: skip
    width = {}
    for name, given in (("once", None), ("records", None), ("users", users)):
        of = (LOGITS, LABELS) if name == "once" else (logits, labels)
        found = class_metrics(*of, given)
        width[name] = {metric: found[metric][2] - found[metric][1] for metric in ("AUC", ACCURACY)}
    for metric in ("AUC", ACCURACY):
        assert width["users"][metric] == pytest.approx(width["once"][metric], rel=0.3)
        assert width["records"][metric] < 0.5 * width["users"][metric]


def test_errors_of_numbers_and_of_probabilities():
    low, high = error_metrics(np.arange(100.0))[RMSE][1:]
    assert low < np.sqrt(49.5) < high
    assert calibration_error(np.full(10, 0.9), np.array([1.0] * 9 + [0.0])) == pytest.approx(0)
    assert calibration_error(np.full(10, 0.9), np.zeros(10)) == pytest.approx(0.9)

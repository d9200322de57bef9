"""Metrics of predictions on test records, with 95 % intervals.

scikit-learn computes those that it has. Intervals are by the bootstrap: test records, or users with
all their records, are resampled with replacement.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import numpy as np

Metrics = dict[str, list[float]]  # value, and low and high of its interval, if any

ACCURACY, RMSE = "accuracy", "root mean squared error"
_BINS = 15  # of the calibration error
_MOST_DRAWS, _LEAST_DRAWS, _NUMBERS = 200, 100, 2_000_000  # _NUMBERS: records in all resamples


def class_metrics(
    logits: np.ndarray, labels: np.ndarray, users: np.ndarray | None = None
) -> Metrics:
    """Return the metrics of classified records, by name; {} if a logit is not finite.

    Args:
        logits: (records, classes); their softmax is the probability of each class.
        labels: (records,), integers.
        users: (records,), a number for each user; None if each record is its own unit.
    """
    if not np.isfinite(logits).all():
        return {}
    from scipy.special import softmax
    from scipy.stats import binomtest
    from sklearn import metrics as sk

    chances = softmax(logits.astype(np.float64), axis=1)
    predicted, present = logits.argmax(1), np.unique(labels)
    right = (predicted == labels).astype(np.float64)

    def balanced(weights: np.ndarray) -> float:
        hits, all_of = (np.bincount(labels, w)[present] for w in (right * weights, weights))
        return float((hits[all_of > 0] / all_of[all_of > 0]).mean())

    measured: dict[str, _Metric] = {"balanced accuracy": balanced}
    if users is not None:
        measured[ACCURACY] = lambda weights: float(np.average(right, weights=weights))
    if logits.shape[1] == 2 and len(present) == 2:
        scores = logits[:, 1].astype(np.float64) - logits[:, 0]  # chances may all be 0 and 1
        measured["AUC"] = _of_both(sk.roc_auc_score, labels, scores)
        measured["average precision"] = _of_both(sk.average_precision_score, labels, scores)
        measured["Brier score"] = _of_both(sk.brier_score_loss, labels, chances[:, 1])
    found = _with_intervals(measured, len(labels), users)
    if users is None:
        wilson = binomtest(int(right.sum()), len(right)).proportion_ci(method="wilson")
        found[ACCURACY] = [float(right.mean()), float(wilson.low), float(wilson.high)]
    # Without an interval: a resample with repetitions looks worse calibrated than the records.
    return found | {"expected calibration error": [calibration_error(chances.max(1), right)]}


def error_metrics(squared: np.ndarray, users: np.ndarray | None = None) -> Metrics:
    """Return the metrics of predicted numbers.

    Args:
        squared: (records,), the mean squared error of each record's numbers.
        users: as in `class_metrics`.
    """
    if not np.isfinite(squared).all():
        return {}
    rmse: _Metric = lambda weights: float(np.sqrt(np.average(squared, weights=weights)))  # noqa: E731
    return _with_intervals({RMSE: rmse}, len(squared), users)


def calibration_error(chances: np.ndarray, right: np.ndarray) -> float:
    """Return the expected calibration error over 15 bins of equal width.

    Args:
        chances: (records,), of the predicted class.
        right: (records,), 1 if it is the label, else 0.
    """
    place = np.minimum((chances * _BINS).astype(int), _BINS - 1)
    return float(np.abs(np.bincount(place, right - chances)).sum() / len(right))


_Metric = Callable[[np.ndarray], float]  # of the weights of the records


def _of_both(metric: Callable[..., float], labels: np.ndarray, scores: np.ndarray) -> _Metric:
    """Return a metric that is NaN if all weight is on one class."""

    def of(weights: np.ndarray) -> float:
        if len(np.unique(labels[weights > 0])) < 2:
            return np.nan
        return float(metric(labels, scores, sample_weight=weights))

    return of


def _with_intervals(
    measured: Mapping[str, _Metric], records: int, users: np.ndarray | None
) -> Metrics:
    users = np.arange(records) if users is None else users
    units = int(users.max()) + 1
    random = np.random.default_rng(0)  # fixed: the same records give the same intervals
    draws = int(np.clip(_NUMBERS // records, _LEAST_DRAWS, _MOST_DRAWS))
    every: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(draws):
        weights = np.bincount(random.integers(units, size=units), minlength=units)[users]
        for name, metric in measured.items():
            every[name].append(metric(weights.astype(np.float64)))
    found = Metrics()
    for name, metric in measured.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # all of them NaN
            low, high = np.nanquantile(every[name], [0.025, 0.975])
        value = metric(np.ones(records))
        found[name] = [value, float(low), float(high)] if np.isfinite(low) else [value]
    return found

"""Geometry that no valid certificate can contradict.

Two inputs with different certified predictions cannot be closer than the sum of their radii: a
point between them would have both labels. So data sets with close inputs of different classes put
a hard ceiling on certified accuracy, whoever claims it.
"""

from __future__ import annotations

import numpy as np
from scipy.spatial.distance import cdist

_METRICS = {"l1": "cityblock", "l2": "euclidean", "linf": "chebyshev"}
_ROWS = 500


def certified_accuracy_ceiling(
    inputs: np.ndarray, labels: np.ndarray, radius: float, norm: str
) -> float:
    """No valid certificate has a larger certified accuracy at ``radius`` on these clean inputs.

    Inputs of different classes closer than twice the radius cannot both be right and certified:
    pairing such inputs greedily loses at least one of each pair. When every two classes exclude
    each other entirely, at most one class's share is left.
    """
    flat, labels = _flat(inputs), np.asarray(labels)
    count = len(labels)
    free = np.ones(count, dtype=bool)
    pairs = 0
    everything_excluded = True
    for i in range(count):
        other = np.flatnonzero(labels != labels[i])
        distances = cdist(flat[i : i + 1], flat[other], _metric(norm))[0]
        close = other[distances < 2 * radius]
        everything_excluded &= len(close) == len(other)
        if free[i] and free[close].any():
            # The partner with the least index: which one is irrelevant to validity.
            free[close[free[close]][0]] = free[i] = False
            pairs += 1
    if everything_excluded:
        return float(np.unique(labels, return_counts=True)[1].max() / count)
    return 1 - pairs / count


def _flat(inputs: np.ndarray) -> np.ndarray:
    values = np.asarray(inputs, dtype=np.float64)
    return values.reshape(len(values), -1)


def _metric(norm: str) -> str:
    if norm not in _METRICS:
        raise ValueError(f"norm must be one of {', '.join(_METRICS)}, got {norm!r}")
    return _METRICS[norm]

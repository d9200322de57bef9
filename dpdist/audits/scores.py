"""Membership scores from what a bank of models says of every record: LiRA and RMIA.

phi (S, N) float64: of model s and record i the log-odds of its label, ln p_y - ln (1 - p_y). member
(S, N) bool: whether model s was trained with record i. target: the attacked model's row; all others
are the references, whose members the adversary knows (it trained them). Scores are (N,), larger
where the record is more likely a member. Arithmetic only: no torch, no files.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, logsumexp, ndtr

Array = NDArray[np.float64]
Bits = NDArray[np.bool_]

OWN_VARIANCE = 64  # models from which on a record's own variance is better than a common one


def log_odds(logits: ArrayLike, labels: ArrayLike) -> Array:
    """ln p_y - ln (1 - p_y) in float64, 1 - p_y by the logsumexp of the others: exact also where
    p_y rounds to 1. logits: (N, classes), or log probabilities; labels: (N,)."""
    values, y = np.array(logits, dtype=np.float64), np.asarray(labels)[:, None]
    own = np.take_along_axis(values, y, 1)[:, 0]
    np.put_along_axis(values, y, -np.inf, 1)
    return np.asarray(own - logsumexp(values, axis=1), np.float64)


def top_probabilities(logits: ArrayLike, count: int = 3) -> Array:
    """The largest class probabilities of each row, sorted: (N, count), 0 where classes lack."""
    values = np.asarray(logits, dtype=np.float64)
    values = np.exp(values - logsumexp(values, axis=1, keepdims=True))
    top = -np.sort(-values, axis=1)[:, :count]
    return np.pad(top, ((0, 0), (0, count - top.shape[1])))


def lira_online(phi: Array, member: Bits, target: int) -> Array:
    """ln N(phi; in) - ln N(phi; out), Gaussians fitted to the references (Carlini et al. 2022,
    Algorithm 1): a variance for each record from 64 models on, else one in common."""
    seen, (inside, outside) = phi[target], _sides(phi, member, target)
    return np.asarray(_log_density(seen, *inside) - _log_density(seen, *outside))


def lira_offline(phi: Array, member: Bits, target: int) -> Array:
    """Phi((phi - mean) / deviation) of the references without the record (Carlini et al. 2022,
    Section VI-C): no model with it is needed."""
    mean, deviation = _sides(phi, member, target)[1]
    return np.asarray(ndtr((phi[target] - mean) / deviation))


def rmia(
    phi: Array,
    member: Bits,
    target: int,
    population: Array,
    *,
    online: bool = True,
    gamma: float = 2.0,
    a: float = 0.3,
) -> Array:
    """The share of population points z that the record beats: ratio(x) >= gamma ratio(z), ratio =
    p_target(y | x) / p(x) (Zarifzadeh, Liu and Shokri 2024, equation 4).

    population (S, Z): phi of points that no model was trained with. online: p is the mean over all
    references; otherwise over those without the record, moved to ((1 + a) p + 1 - a) / 2.
    """
    others = np.arange(len(phi)) != target
    p, p_z = expit(phi), expit(population)
    if online:
        usual, usual_z = p[others].mean(0), p_z[others].mean(0)
    else:
        usual, _ = _mean(p, ~member & others[:, None])
        usual, usual_z = (((1 + a) * q + 1 - a) / 2 for q in (usual, p_z[others].mean(0)))
    least = np.finfo(float).tiny
    ratio = p[target] / np.maximum(usual, least)
    ratio_z = np.sort(p_z[target] / np.maximum(usual_z, least))
    return np.searchsorted(ratio_z, ratio / gamma, side="right") / len(ratio_z)


def _sides(
    phi: Array, member: Bits, target: int
) -> tuple[tuple[Array, Array | float], tuple[Array, Array | float]]:
    """Mean (N,) and deviation of the references with each record, and of those without."""
    others = (np.arange(len(phi)) != target)[:, None]
    inside, outside = (
        _gaussian(phi, chosen & others, len(phi) >= OWN_VARIANCE) for chosen in (member, ~member)
    )
    return inside, outside


def _gaussian(phi: Array, chosen: Bits, own: bool) -> tuple[Array, Array | float]:
    mean, count = _mean(phi, chosen)
    squares = np.where(chosen, (phi - mean) ** 2, 0.0).sum(0)
    freedom = np.maximum(count - 1, 0)
    common = np.sqrt(squares.sum() / max(1, freedom.sum()))
    floor = 1e-6 * max(1.0, float(np.abs(mean).max()))  # references that agree to the last bit
    if not own:
        return mean, max(float(common), floor)
    deviation = np.sqrt(squares / np.maximum(freedom, 1))
    return mean, np.maximum(np.where(freedom > 0, deviation, common), floor)


def _mean(values: Array, chosen: Bits) -> tuple[Array, NDArray[np.int64]]:
    """Over the chosen models, for each record, and their number; where there are none, the mean of
    all chosen values."""
    count = chosen.sum(0)
    total = np.where(chosen, values, 0.0).sum(0)
    overall = total.sum() / max(1, count.sum())
    return np.where(count > 0, total / np.maximum(count, 1), overall), count


def _log_density(x: Array, mean: Array, deviation: Array | float) -> Array:
    return -np.log(deviation) - ((x - mean) / deviation) ** 2 / 2

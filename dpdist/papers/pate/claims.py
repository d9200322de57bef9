"""Epsilons of PATE (Papernot et al. 2018): proved without looking at votes, and by the votes."""

from __future__ import annotations

import math

import numpy as np

from dpdist.privacy import mechanisms
from dpdist.privacy.claims import claimed_guarantee
from dpdist.privacy.guarantee import Guarantee
from dpdist.privacy.mechanisms import Array


def confident_gnmax_epsilon(
    delta: float, queries: int, answers: int, threshold_std: float, vote_std: float
) -> float:
    """Return the data-independent epsilon of PATE's Confident-GNMax (Papernot et al. 2018).

    One record moves one teacher's vote: L2 sensitivity 1 in the threshold test (paid for every one
    of `queries`), sqrt(2) in the noisy vote (paid for `answers`). The caps on both are fixed before
    looking at votes. All releases are Gaussian, so the composition is exact.
    """
    if queries < 1 or answers < 0 or answers > queries:
        raise ValueError(f"0 <= answers <= queries is needed, got {answers} of {queries}")
    m = math.sqrt(queries / threshold_std**2 + 2 * answers / vote_std**2)
    return float(mechanisms.gaussian_epsilon(delta, 1.0, m))


def pate_guarantee(
    queries: int, answers: int, threshold_std: float, vote_std: float, delta: float = 1e-5
) -> Guarantee:
    """Return the guarantee of PATE with Confident-GNMax.

    Proved, data-independent, both caps fixed beforehand.
    """
    value = confident_gnmax_epsilon(delta, queries, answers, threshold_std, vote_std)
    return Guarantee(
        value,
        delta,
        "add-or-remove-one",
        "proved",
        "exact Gaussian composition, data-independent",
        (f"at most {queries} queries and {answers} answers, fixed beforehand",),
    )


def vote_flip_log_probability(votes: Array, vote_std: float) -> Array:
    """Return ln q, (queries,): noisy votes give another class than the first with at most q.

    q = min(sum over others i of erfc((n_first - n_i) / 2 s) / 2, 1 - 1/K). votes: (queries, K).
    Source: Papernot et al. 2018, Proposition 7.
    """
    from scipy import special

    ordered = np.sort(np.asarray(votes, float), axis=1)
    gaps = ordered[:, -1:] - ordered[:, :-1]
    tails = special.logsumexp(special.log_ndtr(-gaps / (math.sqrt(2) * vote_std)), axis=1)
    found: Array = np.minimum(tails, math.log1p(-1 / ordered.shape[1]))
    return found


def data_dependent_rdp(log_q: Array, std: float, orders: Array) -> Array:
    """Return Renyi costs of noisy votes whose likeliest answer is missed with probability <= q.

    Papernot et al. 2018, Theorem 6 at the orders of Proposition 10: mu_2 = s sqrt(ln 1/q), mu_1 =
    mu_2 + 1. Nowhere above order / s^2, which does not look at votes.

    Args:
        log_q: ln q, (queries,).
        std: Noise s on each count of votes; a record takes one from a count and adds it to another.
        orders: Renyi orders above 1, (orders,).

    Returns:
        Costs, (queries, orders).
    """
    given, order = np.asarray(log_q, float)[:, None], np.asarray(orders, float)[None, :]
    free = np.broadcast_to(order / std**2, (len(given), order.shape[1]))
    with np.errstate(all="ignore"):  # where the theorem does not hold, its value is not taken
        second = std * np.sqrt(-given)
        first = second + 1
        at_first, at_second = first / std**2, second / std**2
        limit = (second - 1) * at_second - second * (
            np.log1p(1 / (first - 1)) + np.log1p(1 / (second - 1))
        )
        holds = (second > 1) & (first >= order) & (given <= limit) & (given + at_second < 0)
        stays = np.log(-np.expm1(given))
        a = stays - np.log(-np.expm1((given + at_second) * (1 - 1 / second)))
        b = at_first - given / (first - 1)
        found = np.logaddexp(stays + (order - 1) * a, given + (order - 1) * b) / (order - 1)
    result: Array = np.where(holds & (found < free), np.maximum(found, 0.0), free)
    return result


_VOTES_AT_ONCE = 2000  # queries
_VOTE_ORDERS = 1 + np.geomspace(0.05, 5000.0, 400)


def data_dependent_pate_claims(
    votes: Array,
    vote_std: float,
    threshold: float = 0.0,
    threshold_std: float = 0.0,
    delta: float = 1e-5,
) -> dict[str, Guarantee]:
    """Return epsilons of PATE that depend on the votes: CLAIMED, private themselves, for no plan.

    They speak of these votes alone, not of those of other data sets, so they are no differential
    privacy. Whoever reads one learns something of the records.

    Args:
        votes: Counts of votes, (queries, classes).
        vote_std: Noise on each count.
        threshold: Votes, plus noise of `threshold_std`, that a query needs to be answered; with
            threshold_std 0 all are answered.
        threshold_std: Noise of that test.
        delta: Delta.

    Returns:
        None is above the proved bound that does not look at votes. "all pass": every query is
        charged its test and its answer. "expected": an answer's cost
        times the probability that the query passes, as papers print it; the mean of a random cost
        bounds nothing.
    """
    from scipy import special

    costs = {"all pass": np.zeros(len(_VOTE_ORDERS)), "expected": np.zeros(len(_VOTE_ORDERS))}
    for begin in range(0, len(votes), _VOTES_AT_ONCE):
        part = np.asarray(votes[begin : begin + _VOTES_AT_ONCE], float)
        answer = data_dependent_rdp(
            vote_flip_log_probability(part, vote_std), vote_std, _VOTE_ORDERS
        )
        passes = np.ones(len(part))
        if threshold_std:
            far = (part.max(axis=1) - threshold) / threshold_std
            rarer = np.minimum(special.log_ndtr(far), special.log_ndtr(-far))
            # One count moves by one, where an answer's two do.
            test = data_dependent_rdp(rarer, math.sqrt(2) * threshold_std, _VOTE_ORDERS).sum(axis=0)
            passes = special.ndtr(far)
            costs["all pass"] += test
            costs["expected"] += test
        costs["all pass"] += answer.sum(axis=0)
        costs["expected"] += (passes[:, None] * answer).sum(axis=0)
    fixed = pate_guarantee(len(votes), len(votes), threshold_std or math.inf, vote_std, delta)
    return {
        name: claimed_guarantee(
            min(fixed.epsilon, float(np.min(cost + math.log(1 / delta) / (_VOTE_ORDERS - 1)))),
            delta,
            "add-or-remove-one",
            "PATE, Renyi bounds that depend on the votes",
            ("of these votes alone", "the figure is private"),
        )
        for name, cost in costs.items()
    }

"""Privacy claims of the published systems, by their own formulas, beside the proved guarantee.

A claim is a theorem's formula evaluated at its hyper-parameters, with its assumptions, a verdict
and the reason. A claim that is not sound is never a guarantee: its proved epsilon is infinite
unless something else (DP-SGD, for instance) protects the records.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dpdist.privacy import mechanisms
from dpdist.privacy.guarantee import Guarantee, Neighbours, format_delta, format_epsilon
from dpdist.privacy.mechanisms import Array

# --- claims of one run ------------------------------------------------------------------------


Verdict = Literal["sound", "sound if", "not sound"]


@dataclass(frozen=True)
class Claim:
    """One published claim.

    printed: the epsilon the paper prints, if it prints one. claimed: its theorem's value at
    `setting`; None if the paper gives no formula. proved: what holds for the mechanism as
    published.
    """

    system: str
    setting: str
    printed: float | None
    claimed: Guarantee | None
    proved: Guarantee
    verdict: Verdict
    reason: str

    @property
    def claimed_text(self) -> str:
        """Return the theorem's value, and the printed one where it differs by more than 1 %."""
        if self.claimed is None:
            return "no formula" if self.printed is None else f"prints {self.printed:.4g}"
        text = format_epsilon(self.claimed.epsilon)
        if self.printed is None or math.isclose(self.printed, self.claimed.epsilon, rel_tol=0.01):
            return text
        return f"{text} (prints {self.printed:.4g})"

    @property
    def summary_line(self) -> str:
        """Return the claim and its verdict in one line."""
        if self.claimed is None:
            return f"{self.claimed_text}: {self.verdict}: {self.reason}"
        return (
            f"epsilon = {format_epsilon(self.claimed.epsilon)} at delta = "
            f"{format_delta(self.claimed.delta)} ({self.claimed.source}): {self.verdict}: "
            f"{self.reason}"
        )

    @property
    def proved_text(self) -> str:
        """Return the proved epsilon."""
        return format_epsilon(self.proved.epsilon)

    def to_dict(self) -> dict[str, Any]:
        """Return the claim as plain JSON types."""
        return {
            "system": self.system,
            "setting": self.setting,
            "printed_epsilon": self.printed,
            "claimed": None if self.claimed is None else self.claimed.to_dict(),
            "proved": self.proved.to_dict(),
            "verdict": self.verdict,
            "reason": self.reason,
        }


def claimed_guarantee(
    epsilon: float, delta: float, neighbours: Neighbours, source: str, assumptions: Sequence[str]
) -> Guarantee:
    """Return what a theorem claims; no run is charged by it."""
    return Guarantee(epsilon, delta, neighbours, "claimed", source, tuple(assumptions))


# --- the theorems -----------------------------------------------------------------------------


def classic_rdp_epsilon(
    sample_rate: float, noise_multiplier: float, steps: int, delta: float, highest_order: int = 256
) -> float:
    """Return epsilon of the Poisson-subsampled Gaussian by RDP at whole orders.

    The conversion is epsilon = RDP + ln(1/delta)/(order - 1).

    The accountant of DPlis and of Abadi-era code (moments up to `highest_order`).
    """
    import dp_accounting as dpa

    from dpdist.privacy.accounting import compose_rdp

    orders = np.arange(2, highest_order + 1)
    step = dpa.PoissonSampledDpEvent(sample_rate, dpa.GaussianDpEvent(noise_multiplier))
    event = dpa.SelfComposedDpEvent(step, steps)
    rdp = compose_rdp(event, "add-or-remove-one", list(orders)).rdp
    return float(np.min(rdp - math.log(delta) / (orders - 1)))


def secure_sgd_claim(
    records: int, batch_size: int, noise_multiplier: float, steps: int, delta: float = 1e-5
) -> Guarantee:
    """Return the claim of Secure-SGD: DP-SGD's guarantee by the moments accountant.

    Source: HGM, IJCAI 2019, Algorithm 1.
    """
    return claimed_guarantee(
        classic_rdp_epsilon(batch_size / records, noise_multiplier, steps, delta, 65),
        delta,
        "add-or-remove-one",
        "Secure-SGD, moments accountant (64 moments)",
        ("per-example clipping", "Poisson sampling", "r independent of private records"),
    )


def pate_guarantee(
    queries: int, answers: int, threshold_std: float, vote_std: float, delta: float = 1e-5
) -> Guarantee:
    """Return the guarantee of PATE with Confident-GNMax.

    Proved, data-independent, both caps fixed beforehand.
    """
    value = mechanisms.confident_gnmax_epsilon(delta, queries, answers, threshold_std, vote_std)
    return Guarantee(
        value,
        delta,
        "add-or-remove-one",
        "proved",
        "exact Gaussian composition, data-independent",
        (f"at most {queries} queries and {answers} answers, fixed beforehand",),
    )


def pate_claim(
    queries: int, answers: int, threshold_std: float, vote_std: float, delta: float = 1e-5
) -> Guarantee:
    """Return Confident-GNMax's epsilon by Renyi bounds that do not look at votes.

    epsilon = rho + 2 sqrt(rho ln(1/delta)), rho = Q / 2 s1^2 + A / s2^2. Source: Papernot et
    al. 2018.
    """
    rho = queries / (2 * threshold_std**2) + answers / vote_std**2
    return claimed_guarantee(
        rho + 2 * math.sqrt(rho * math.log(1 / delta)),
        delta,
        "add-or-remove-one",
        "Confident-GNMax, Renyi bounds independent of the data",
        (f"at most {queries} queries and {answers} answers, fixed beforehand",),
    )


# --- composition of many equal steps ------------------------------------------------------------


def advanced_composition_epsilon(
    step_epsilon: float, step_delta: float, steps: int, delta: float
) -> float:
    """Return epsilon at `delta` of `steps` mechanisms that are (step_epsilon, step_delta)-DP.

    sqrt(2 k ln(1/d)) e + k e (exp(e) - 1), d = delta - k step_delta: proved, for adaptive steps.
    Source: Dwork, Rothblum and Vadhan 2010; Dwork and Roth 2014, Theorem 3.20. Raises ValueError
    where the steps' deltas leave nothing of delta.
    """
    slack = _composition_slack(step_epsilon, step_delta, steps, delta)
    if step_epsilon > _LARGEST_EPSILON:
        return math.inf
    drift = steps * step_epsilon * math.expm1(step_epsilon)
    return math.sqrt(2 * steps * math.log(1 / slack)) * step_epsilon + drift


def optimal_composition_epsilon(
    step_epsilon: float, step_delta: float, steps: int, delta: float
) -> float:
    """Return the least epsilon that any composition theorem for such steps can give, rounded up.

    That of `steps` answers of randomised response (Kairouz, Oh and Viswanath 2015, Theorem 3.3).
    Arguments and errors are those of `advanced_composition_epsilon`.
    """
    _composition_slack(step_epsilon, step_delta, steps, delta)
    if step_epsilon > _LARGEST_EPSILON:
        return steps * step_epsilon
    from scipy import special

    left = np.arange(steps + 1.0)  # answers that speak against
    counts = (
        special.gammaln(steps + 1) - special.gammaln(left + 1) - special.gammaln(steps - left + 1)
    )
    whole = -steps * np.logaddexp(0.0, step_epsilon)
    first, second = ((counts + n * step_epsilon + whole) for n in (steps - left, left))
    broken = steps * math.log1p(-step_delta)  # ln of the probability that no delta was used

    def holds(epsilon: float) -> bool:
        losses = np.maximum(0.0, -np.expm1(np.minimum(epsilon + second - first, 0.0)))
        profile = float(np.sum(np.exp(first) * losses))
        total = -math.expm1(broken) + math.exp(broken) * profile
        return total * (1 + _ROUNDING) <= delta

    low, high = 0.0, steps * step_epsilon
    if holds(low):
        return 0.0
    if not holds(high):  # rounding, or delta at its least
        return high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


_LARGEST_EPSILON = 700.0  # beyond, exp(epsilon) is no float64
_ROUNDING = 1e-5  # relative, of sums of up to a million terms


def _composition_slack(step_epsilon: float, step_delta: float, steps: int, delta: float) -> float:
    if step_epsilon <= 0 or not 0 <= step_delta < 1 or steps < 1 or not 0 < delta < 1:
        raise ValueError("step epsilon > 0, 0 <= step delta < 1, steps >= 1, 0 < delta < 1 needed")
    slack = delta - steps * step_delta
    if slack <= 1e-9 * delta:  # nothing but rounding
        raise ValueError(
            f"delta: must be above {steps:,} x {step_delta:g} = {steps * step_delta:g}, the steps' "
            f"own, got {delta:g}"
        )
    return slack


def advanced_dp_sgd_epsilon(
    sample_rate: float, noise_multiplier: float, steps: int, delta: float
) -> float:
    """Return epsilon of DP-SGD by advanced composition of amplified steps: proved, and loose.

    A step is the exact Gaussian at delta / (2 steps), with ln(1 + q (exp(e) - 1)) by Poisson
    sampling. Add-or-remove-one.
    """
    step_delta = delta / (2 * steps)
    within = min(step_delta / sample_rate, 0.5)
    alone = float(mechanisms.gaussian_epsilon(within, noise_multiplier))
    if alone > _LARGEST_EPSILON:
        return math.inf
    step_epsilon = max(math.log1p(sample_rate * math.expm1(alone)), 1e-300)
    return advanced_composition_epsilon(step_epsilon, step_delta, steps, delta)


def clt_epsilon(sample_rate: float, noise_multiplier: float, steps: int, delta: float) -> float:
    """Return epsilon of DP-SGD by the central limit theorem: an APPROXIMATION, proved of nothing.

    mu = q sqrt(T (exp(1 / sigma^2) - 1)) of Gaussian differential privacy, a limit of many steps at
    small q; it may lie below what holds. Source: Bu, Dong, Long and Su 2020, Corollary 4.
    """
    exponent = noise_multiplier**-2
    if exponent > _LARGEST_EPSILON:
        return math.inf
    mu = sample_rate * math.sqrt(steps * math.expm1(exponent))
    return float(mechanisms.gaussian_epsilon(delta, 1.0, mu))


# --- epsilon of PATE by its votes ---------------------------------------------------------------


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

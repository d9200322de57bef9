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
from dpdist.privacy.plan import PrivacyPlan

# --- claims of one run ------------------------------------------------------------------------


Verdict = Literal["sound", "sound if", "not sound"]

PUBLIC_LABELS = "labels are public"


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


def unproved_guarantee(
    delta: float, reason: str, neighbours: Neighbours = "add-or-remove-one"
) -> Guarantee:
    """Return a guarantee with epsilon infinity: nothing is proved, with the reason."""
    return Guarantee(math.inf, delta, neighbours, "proved", f"none: {reason}")


def _claimed_guarantee(
    epsilon: float, delta: float, neighbours: Neighbours, source: str, assumptions: Sequence[str]
) -> Guarantee:
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


def dplis_claim(
    records: int, batch_size: int, noise_multiplier: float, steps: int, delta: float = 1e-5
) -> Guarantee:
    """Return the claim of DPlis: DP-SGD's guarantee; smoothing before the clip costs nothing.

    Source: PoPETs 2021.
    """
    return _claimed_guarantee(
        classic_rdp_epsilon(batch_size / records, noise_multiplier, steps, delta),
        delta,
        "add-or-remove-one",
        "DPlis, DP-SGD by RDP at whole orders",
        ("Poisson sampling", "smoothing noise independent of the data"),
    )


def secure_sgd_claim(
    records: int, batch_size: int, noise_multiplier: float, steps: int, delta: float = 1e-5
) -> Guarantee:
    """Return the claim of Secure-SGD: DP-SGD's guarantee by the moments accountant.

    Source: HGM, IJCAI 2019, Algorithm 1.
    """
    return _claimed_guarantee(
        classic_rdp_epsilon(batch_size / records, noise_multiplier, steps, delta, 65),
        delta,
        "add-or-remove-one",
        "Secure-SGD, moments accountant (64 moments)",
        ("per-example clipping", "Poisson sampling", "r independent of private records"),
    )


def hgm_claim(noise_scale: float, delta: float, weighted_sensitivity: float = 1.0) -> Guarantee:
    """Return HGM's Theorem 3 solved for epsilon.

    It is the extended Gaussian at the weighted sensitivity.
    """
    value = mechanisms.extended_gaussian_epsilon(delta, noise_scale, weighted_sensitivity)
    return _claimed_guarantee(
        float(value), delta, "replace-one", "HGM Theorem 3", ("r > 0, fixed in advance",)
    )


def dpal_gammas(
    encoder_sensitivity: float, batch_size: float, weight_norm: float
) -> tuple[float, float]:
    """Return (gamma, gamma_x) of DPAL Theorem 4.

    2 Delta_R / (m ||theta_1^T||_{1,1}) and Delta_R / m.
    """
    return (
        2 * encoder_sensitivity / (batch_size * weight_norm),
        encoder_sensitivity / batch_size,
    )


def dpal_claim(epsilon_1: float, epsilon_2: float, gamma: float, gamma_x: float) -> Guarantee:
    """Return DPAL's Theorem 4: pure epsilon_1 (1 + 1/gamma + 1/gamma_x) + epsilon_2.

    Source: DPAL / StoBatch, ICML 2020.
    """
    if min(epsilon_1, epsilon_2, gamma, gamma_x) <= 0:
        raise ValueError("epsilon_1, epsilon_2, gamma and gamma_x must be > 0")
    return _claimed_guarantee(
        epsilon_1 * (1 + 1 / gamma + 1 / gamma_x) + epsilon_2,
        0.0,
        "replace-one",
        "DPAL Theorem 4",
        ("one noise draw for the whole run", "disjoint fixed batches", "no composition over steps"),
    )


def dpal_encoder_budget(total: float, epsilon_2: float, gamma: float, gamma_x: float) -> float:
    """Return the epsilon_1 that makes Theorem 4's sum equal `total`."""
    return (total - epsilon_2) / (1 + 1 / gamma + 1 / gamma_x)


def _smallest_residual_epsilon(cost: float, delta: float) -> float:
    """Return the smallest epsilon with lambda epsilon = cost * order(lambda, epsilon)."""
    from scipy.optimize import minimize_scalar

    log_delta = math.log(1 / delta)

    def epsilon(mix: float) -> float:
        inner = cost**2 + 4 * mix * cost * log_delta / (1 - mix)
        return (cost + math.sqrt(inner)) / (2 * mix)

    return float(
        minimize_scalar(epsilon, bounds=(1e-9, 1 - 1e-9), method="bounded").fun  # unimodal
    )


def residual_claim(
    input_noise: float,
    residual_noise: float,
    input_norm: float,
    residual_norm: float,
    passes: float,
    delta: float = 1e-5,
) -> Guarantee:
    """Return residual perturbation's Theorem 1 (Strategy I), solved for the smallest epsilon.

    input_noise: pi. residual_noise: gamma. input_norm: R. residual_norm: G. passes: T b / N.
    """
    cost = 2 * passes * max(input_norm / input_noise, residual_norm / residual_noise) ** 2
    return _claimed_guarantee(
        _smallest_residual_epsilon(cost, delta),
        delta,
        "replace-one",
        "Residual Perturbation Theorem 1",
        (PUBLIC_LABELS, "inputs of norm <= R", "Gaussian residual outputs with mean norm <= G"),
    )


def residual_black_box_claim(
    output_noise: float,
    residual_noise: float,
    weight_norm: float,
    loss_bound: float,
    floor: float,
    blocks: int,
    delta: float = 1e-5,
) -> Guarantee:
    """Return residual perturbation's Theorem 2 (Strategy II): one prediction, solved for epsilon.

    output_noise: pi. residual_noise: gamma. weight_norm: a bound on ||w||. loss_bound: B.
    floor: eta_0. blocks: M.
    """
    cost = 2 * blocks * max(loss_bound / (floor * residual_noise), weight_norm / output_noise) ** 2
    return _claimed_guarantee(
        _smallest_residual_epsilon(cost, delta),
        delta,
        "replace-one",
        "Residual Perturbation Theorem 2",
        ("one query only", "bounded weights and residuals", "the model itself stays secret"),
    )


def residual_input_guarantee(
    input_noise: float, input_norm: float, passes: float, delta: float = 1e-5
) -> Guarantee:
    """Return the guarantee that does hold for Strategy I.

    It is that of the noisy input alone, as a Gaussian release per pass.

    Inputs at most 2 R apart, exact Gaussian profile. It protects inputs, not labels.
    """
    apart = 2 * input_norm * math.sqrt(passes)
    return Guarantee(
        float(mechanisms.gaussian_epsilon(delta, input_noise, apart)),
        delta,
        "replace-one",
        "proved",
        "exact Gaussian profile of the noisy inputs",
        (PUBLIC_LABELS, "inputs clipped to norm R", "every record passes exactly T b / N times"),
    )


def transdenoiser_training_claim(
    xi_up: float, sample_rate: float, steps: int, delta: float = 1e-5, constant: float = 2.0
) -> Guarantee:
    """Return TransDenoiser's Theorem 3: epsilon = c2 q sqrt(T ln(1/delta)) / xi_up.

    The paper leaves c2 open; `constant` is our choice, the order of Abadi et al.'s.
    """
    value = constant * sample_rate * math.sqrt(steps * math.log(1 / delta)) / xi_up
    return _claimed_guarantee(
        value,
        delta,
        "add-or-remove-one",
        f"TransDenoiser Theorem 3 with c2 = {constant:g}",
        ("C-Lipschitz loss", "transformed noise counts as added noise"),
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
    return _claimed_guarantee(
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
        name: _claimed_guarantee(
            min(fixed.epsilon, float(np.min(cost + math.log(1 / delta) / (_VOTE_ORDERS - 1)))),
            delta,
            "add-or-remove-one",
            "PATE, Renyi bounds that depend on the votes",
            ("of these votes alone", "the figure is private"),
        )
        for name, cost in costs.items()
    }


# --- the table of published claims ------------------------------------------------------------


def _dp_sgd(records: int, batch: int, noise: float, steps: int, delta: float = 1e-5) -> Guarantee:
    return PrivacyPlan.dp_sgd(
        records=records, batch_size=batch, noise_multiplier=noise, steps=steps, delta=delta
    ).guarantee()


def _dplis(data: str, records: int, noise: float, steps: int, printed: float) -> Claim:
    return Claim(
        f"DPlis, {data}",
        f"N {records}, L 256, sigma {noise:g}, T {steps}",
        printed,
        dplis_claim(records, 256, noise, steps),
        _dp_sgd(records, 256, noise, steps),
        "sound",
        "DP-SGD; per-record smoothing before the clip is free",
    )


def _residual(data: str, pi: float, printed: float) -> Claim:
    every_pass, once = (residual_input_guarantee(pi, 30, passes) for passes in (100, 1))
    return Claim(
        f"Residual I, {data}",
        f"pi {pi:g}, gamma {2 * pi:g}, R = G = 30, 100 passes",
        printed,
        residual_claim(pi, 2 * pi, 30, 30, 100),
        unproved_guarantee(1e-5, "labels enter gradients without noise", "replace-one"),
        "not sound",
        "labels unprotected, G unverifiable, printed budget does not follow; with labels public "
        f"and inputs clipped: {format_epsilon(every_pass.epsilon, 3)}; with noise drawn once "
        f"(noisy-records): {format_epsilon(once.epsilon, 3)}",
    )


def _residual_dp_sgd(data: str, records: int, printed: float) -> Claim:
    steps = 100 * (records // 128)
    claimed = secure_sgd_claim(records, 128, 1.1, steps)
    return Claim(
        f"DP-SGD beside Residual I, {data}",
        f"N {records}, sigma 1.1; L 128, 100 epochs (our reading)",
        printed,
        claimed,
        _dp_sgd(records, 128, 1.1, steps),
        "sound if",
        "batches are Poisson-sampled; the batch size behind the printed budget is not printed",
    )


def _dpal(data: str, total: float, epsilon_2: float, sensitivity: int, batch: int) -> Claim:
    # The weight norm is not printed; 1 keeps gamma in the range of gamma_x.
    gamma, gamma_x = dpal_gammas(sensitivity, batch, 1.0)
    epsilon_1 = dpal_encoder_budget(total, epsilon_2, gamma, gamma_x)
    return Claim(
        f"DPAL / StoBatch, {data}",
        f"m {batch}, Delta_R {sensitivity}, epsilon_2 {epsilon_2:g}, weight norm 1 (our choice)",
        total,
        dpal_claim(epsilon_1, epsilon_2, gamma, gamma_x),
        unproved_guarantee(0.0, "one Laplace vector shared by all records cancels", "replace-one"),
        "not sound",
        "shared noise cancels between records, sensitivity is a ratio, noise reused every step",
    )


def _hgm() -> list[Claim]:
    exact = float(mechanisms.gaussian_epsilon(1e-5, 4.8542))
    secure = (50_000, 125, 4.0, 40_000)
    return [
        Claim(
            "HGM (one release)",
            "noise 4.8542, weighted sensitivity 1",
            None,
            hgm_claim(4.8542, 1e-5),
            Guarantee(exact, 1e-5, "replace-one", "proved", "exact Gaussian profile"),
            "sound if",
            "r > 0 is fixed without private records; loose: the analytic Gaussian is exact",
        ),
        Claim(
            "Secure-SGD",
            f"N {secure[0]}, L {secure[1]}, sigma {secure[2]:g}, T {secure[3]} (our choice)",
            None,
            secure_sgd_claim(*secure),
            unproved_guarantee(1e-5, "r is computed from private records"),
            "sound if",
            "r is public or private by itself and examples are clipped one by one (the code does "
            f"neither); then {format_epsilon(_dp_sgd(*secure).epsilon)} at our choice of 100 "
            "epochs",
        ),
    ]


def _transdenoiser() -> list[Claim]:
    steps = 31_726  # what noise multiplier 2 affords at epsilon 1, batch 128
    return [
        Claim(
            "TransDenoiser",
            f"xi_up 2, B 128, N 60000, T {steps}",
            1.0,
            transdenoiser_training_claim(2.0, 128 / 60_000, steps),
            unproved_guarantee(1e-5, "the transformed noise depends on the record it should hide"),
            "not sound",
            "data-dependent rank-deficient covariance (S_min = 0), factor T taken twice, no clip",
        ),
        Claim(
            "TransDenoiser_sepdp",
            f"noise multiplier 2, B 128, N 60000, T {steps}",
            1.0,
            secure_sgd_claim(60_000, 128, 2.0, steps),
            _dp_sgd(60_000, 128, 2.0, steps),
            "sound if",
            "gradients are clipped one by one; the input noise earns nothing",
        ),
    ]


def _others() -> list[Claim]:
    return [
        Claim(
            "PATE, Confident-GNMax",
            "4000 queries, thresholds 200, votes 40",
            7.44,
            None,
            pate_guarantee(4000, 4000, 200.0, 40.0),
            "sound if",
            "charged without looking at votes; the printed value is an expected, data-dependent "
            "cost. Capped at 1323 answers: "
            f"{format_epsilon(pate_guarantee(4000, 1323, 200.0, 40.0).epsilon)}",
        ),
        Claim(
            "AdLM",
            "described only",
            None,
            None,
            unproved_guarantee(0.0, "the mechanism is not specified", "replace-one"),
            "not sound",
            "too little is specified to check; Laplace noise is reused while coefficients change",
        ),
    ]


def published_claims() -> list[Claim]:
    """Return one row per published claim, at the settings of the papers."""
    return [
        _dplis("MNIST", 60_000, 1.1, 6057, 1.99),
        _dplis("MNIST", 60_000, 1.1, 129_642, 10.0),
        _dplis("CIFAR-10", 50_000, 1.1, 4097, 1.99),
        _dplis("CIFAR-10", 50_000, 1.1, 89_746, 10.0),
        _dplis("PubFig83", 9688, 2.0, 2960, 4.06),
        _dplis("CelebA1000", 25_000, 1.3, 9700, 4.88),
        *_hgm(),
        _dpal("MNIST", 0.2, 0.1, 4950, 2499),
        _dpal("CIFAR-10", 2.0, 1.0, 9504, 1851),
        _residual("IDC", 0.25, 1.1e3),
        _residual("CIFAR-10", 2.25, 3e3),
        _residual_dp_sgd("IDC", 9988, 15.79),
        _residual_dp_sgd("CIFAR-10", 12_500, 22.33),
        Claim(
            "Residual II",
            "pi 1, gamma 2, ||w|| <= 1, B 1, eta_0 0.1, 3 blocks (bounds are ours)",
            None,
            residual_black_box_claim(1.0, 2.0, 1.0, 1.0, 0.1, 3),
            unproved_guarantee(1e-5, "the model is not private and queries compose", "replace-one"),
            "not sound",
            "covers one prediction with fresh noise, any two models; k predictions cost k times",
        ),
        *_transdenoiser(),
        *_others(),
    ]

"""What the published systems claim, by their own formulas, and what is proved for the same run.

A claim is a theorem's formula evaluated at its hyper-parameters, with its assumptions, a verdict
and the reason. A claim that is not sound is never a guarantee: its proved epsilon is infinite
unless something else (DP-SGD, for instance) protects the records.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dpdist.privacy import mechanisms
from dpdist.privacy.guarantee import Guarantee, Neighbours, format_delta, format_epsilon

Verdict = Literal["sound", "sound if", "not sound"]

LABELS_OPEN = "labels are public"


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
        """The theorem's value, and the printed one where it differs by more than 1 %."""
        if self.claimed is None:
            return "no formula" if self.printed is None else f"prints {self.printed:.4g}"
        text = format_epsilon(self.claimed.epsilon)
        if self.printed is None or math.isclose(self.printed, self.claimed.epsilon, rel_tol=0.01):
            return text
        return f"{text} (prints {self.printed:.4g})"

    @property
    def line(self) -> str:
        """What is claimed and what holds of it, in one line."""
        if self.claimed is None:
            return f"{self.claimed_text}: {self.verdict}: {self.reason}"
        return (
            f"epsilon = {format_epsilon(self.claimed.epsilon)} at delta = "
            f"{format_delta(self.claimed.delta)} ({self.claimed.source}): {self.verdict}: "
            f"{self.reason}"
        )

    @property
    def proved_text(self) -> str:
        """The proved epsilon."""
        return format_epsilon(self.proved.epsilon)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "system": self.system,
            "setting": self.setting,
            "printed_epsilon": self.printed,
            "claimed": None if self.claimed is None else self.claimed.to_dict(),
            "proved": self.proved.to_dict(),
            "verdict": self.verdict,
            "reason": self.reason,
        }


def unproved(delta: float, why: str, neighbours: Neighbours = "add-or-remove-one") -> Guarantee:
    """Epsilon infinity: nothing is proved, and why."""
    return Guarantee(math.inf, delta, neighbours, "proved", f"none: {why}")


def _claimed(
    epsilon: float, delta: float, neighbours: Neighbours, source: str, assumptions: Sequence[str]
) -> Guarantee:
    return Guarantee(epsilon, delta, neighbours, "claimed", source, tuple(assumptions))


# --- the theorems -----------------------------------------------------------------------------


def classic_rdp_epsilon(
    sample_rate: float, noise_multiplier: float, steps: int, delta: float, highest_order: int = 256
) -> float:
    """Poisson-subsampled Gaussian RDP at whole orders with epsilon = RDP + ln(1/delta)/(order - 1).

    The accountant of DPlis and of Abadi-era code (moments up to `highest_order`).
    """
    import dp_accounting as dpa
    import numpy as np

    from dpdist.privacy.accounting import compose_rdp

    orders = np.arange(2, highest_order + 1)
    step = dpa.PoissonSampledDpEvent(sample_rate, dpa.GaussianDpEvent(noise_multiplier))
    event = dpa.SelfComposedDpEvent(step, steps)
    rdp = compose_rdp(event, "add-or-remove-one", list(orders)).rdp
    return float(np.min(rdp - math.log(delta) / (orders - 1)))


def dplis_claim(
    records: int, batch_size: int, noise_multiplier: float, steps: int, delta: float = 1e-5
) -> Guarantee:
    """DPlis (PoPETs 2021): DP-SGD's guarantee; smoothing before the clip costs nothing."""
    return _claimed(
        classic_rdp_epsilon(batch_size / records, noise_multiplier, steps, delta),
        delta,
        "add-or-remove-one",
        "DPlis, DP-SGD by RDP at whole orders",
        ("Poisson sampling", "smoothing noise independent of the data"),
    )


def secure_sgd_claim(
    records: int, batch_size: int, noise_multiplier: float, steps: int, delta: float = 1e-5
) -> Guarantee:
    """Secure-SGD (HGM, IJCAI 2019, Algorithm 1): DP-SGD's guarantee by the moments accountant."""
    return _claimed(
        classic_rdp_epsilon(batch_size / records, noise_multiplier, steps, delta, 65),
        delta,
        "add-or-remove-one",
        "Secure-SGD, moments accountant (64 moments)",
        ("per-example clipping", "Poisson sampling", "r independent of private records"),
    )


def hgm_claim(noise_scale: float, delta: float, weighted_sensitivity: float = 1.0) -> Guarantee:
    """HGM Theorem 3 solved for epsilon: the extended Gaussian at the weighted sensitivity."""
    value = mechanisms.extended_gaussian_epsilon(delta, noise_scale, weighted_sensitivity)
    return _claimed(
        float(value), delta, "replace-one", "HGM Theorem 3", ("r > 0, fixed in advance",)
    )


def dpal_gammas(
    encoder_sensitivity: float, batch_size: float, weight_norm: float
) -> tuple[float, float]:
    """(gamma, gamma_x) of DPAL Theorem 4: 2 Delta_R / (m ||theta_1^T||_{1,1}) and Delta_R / m."""
    return (
        2 * encoder_sensitivity / (batch_size * weight_norm),
        encoder_sensitivity / batch_size,
    )


def dpal_claim(epsilon_1: float, epsilon_2: float, gamma: float, gamma_x: float) -> Guarantee:
    """DPAL / StoBatch (ICML 2020) Theorem 4: pure epsilon_1 (1 + 1/gamma + 1/gamma_x) +
    epsilon_2."""
    if min(epsilon_1, epsilon_2, gamma, gamma_x) <= 0:
        raise ValueError("epsilon_1, epsilon_2, gamma and gamma_x must be > 0")
    return _claimed(
        epsilon_1 * (1 + 1 / gamma + 1 / gamma_x) + epsilon_2,
        0.0,
        "replace-one",
        "DPAL Theorem 4",
        ("one noise draw for the whole run", "disjoint fixed batches", "no composition over steps"),
    )


def dpal_encoder_budget(total: float, epsilon_2: float, gamma: float, gamma_x: float) -> float:
    """epsilon_1 that makes Theorem 4's sum equal `total`."""
    return (total - epsilon_2) / (1 + 1 / gamma + 1 / gamma_x)


def _smallest_residual_epsilon(cost: float, delta: float) -> float:
    """min over lambda of the epsilon with lambda epsilon = cost * order(lambda, epsilon)."""
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
    """Residual perturbation, Strategy I, Theorem 1, solved for the smallest epsilon.

    input_noise: pi. residual_noise: gamma. input_norm: R. residual_norm: G. passes: T b / N.
    """
    cost = 2 * passes * max(input_norm / input_noise, residual_norm / residual_noise) ** 2
    return _claimed(
        _smallest_residual_epsilon(cost, delta),
        delta,
        "replace-one",
        "Residual Perturbation Theorem 1",
        (LABELS_OPEN, "inputs of norm <= R", "Gaussian residual outputs with mean norm <= G"),
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
    """Residual perturbation, Strategy II, Theorem 2: one prediction, solved for epsilon.

    output_noise: pi. residual_noise: gamma. weight_norm: a bound on ||w||. loss_bound: B.
    floor: eta_0. blocks: M.
    """
    cost = 2 * blocks * max(loss_bound / (floor * residual_noise), weight_norm / output_noise) ** 2
    return _claimed(
        _smallest_residual_epsilon(cost, delta),
        delta,
        "replace-one",
        "Residual Perturbation Theorem 2",
        ("one query only", "bounded weights and residuals", "the model itself stays secret"),
    )


def residual_input_guarantee(
    input_noise: float, input_norm: float, passes: float, delta: float = 1e-5
) -> Guarantee:
    """What does follow for Strategy I: the noisy input alone, as a Gaussian release per pass.

    Inputs at most 2 R apart, exact Gaussian profile. It protects inputs, not labels.
    """
    apart = 2 * input_norm * math.sqrt(passes)
    return Guarantee(
        float(mechanisms.gaussian_epsilon(delta, input_noise, apart)),
        delta,
        "replace-one",
        "proved",
        "exact Gaussian profile of the noisy inputs",
        (LABELS_OPEN, "inputs clipped to norm R", "every record passes exactly T b / N times"),
    )


def transdenoiser_training_claim(
    xi_up: float, sample_rate: float, steps: int, delta: float = 1e-5, constant: float = 2.0
) -> Guarantee:
    """TransDenoiser Theorem 3: epsilon = c2 q sqrt(T ln(1/delta)) / xi_up.

    The paper leaves c2 open; `constant` is our choice, the order of Abadi et al.'s.
    """
    value = constant * sample_rate * math.sqrt(steps * math.log(1 / delta)) / xi_up
    return _claimed(
        value,
        delta,
        "add-or-remove-one",
        f"TransDenoiser Theorem 3 with c2 = {constant:g}",
        ("C-Lipschitz loss", "transformed noise counts as added noise"),
    )


def pate_guarantee(
    queries: int, answers: int, threshold_std: float, vote_std: float, delta: float = 1e-5
) -> Guarantee:
    """PATE with Confident-GNMax: proved, data-independent, both caps fixed beforehand."""
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
    """Confident-GNMax by Renyi bounds that do not look at votes (Papernot et al. 2018): epsilon =
    rho + 2 sqrt(rho ln(1/delta)), rho = Q / 2 s1^2 + A / s2^2."""
    rho = queries / (2 * threshold_std**2) + answers / vote_std**2
    return _claimed(
        rho + 2 * math.sqrt(rho * math.log(1 / delta)),
        delta,
        "add-or-remove-one",
        "Confident-GNMax, Renyi bounds independent of the data",
        (f"at most {queries} queries and {answers} answers, fixed beforehand",),
    )

"""Claims of DPAL by its own formulas. None of them is proved."""

from __future__ import annotations

from dpdist.privacy.claims import claimed_guarantee
from dpdist.privacy.guarantee import Guarantee


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
    return claimed_guarantee(
        epsilon_1 * (1 + 1 / gamma + 1 / gamma_x) + epsilon_2,
        0.0,
        "replace-one",
        "DPAL Theorem 4",
        ("one noise draw for the whole run", "disjoint fixed batches", "no composition over steps"),
    )


def dpal_encoder_budget(total: float, epsilon_2: float, gamma: float, gamma_x: float) -> float:
    """Return the epsilon_1 that makes Theorem 4's sum equal `total`."""
    return (total - epsilon_2) / (1 + 1 / gamma + 1 / gamma_x)


def dpal_encoder_sensitivity(inputs: int, hidden: int) -> int:
    """Return DPAL's Delta_R = d (beta + 2) as printed: 25 * (14^2 + 2) = 4,950 on MNIST."""
    return inputs * (hidden + 2)


def dpal_output_sensitivity(last_hidden: int) -> int:
    """Return DPAL's Delta_L2 = 2 |h_pi| as printed: 512 on MNIST."""
    return 2 * last_hidden

"""Claim of TransDenoiser by its own formula. It is not proved."""

from __future__ import annotations

import math

from dpdist.privacy.claims import claimed_guarantee
from dpdist.privacy.guarantee import Guarantee


def transdenoiser_training_claim(
    xi_up: float, sample_rate: float, steps: int, delta: float = 1e-5, constant: float = 2.0
) -> Guarantee:
    """Return TransDenoiser's Theorem 3: epsilon = c2 q sqrt(T ln(1/delta)) / xi_up.

    The paper leaves c2 open; `constant` is our choice, the order of Abadi et al.'s.
    """
    value = constant * sample_rate * math.sqrt(steps * math.log(1 / delta)) / xi_up
    return claimed_guarantee(
        value,
        delta,
        "add-or-remove-one",
        f"TransDenoiser Theorem 3 with c2 = {constant:g}",
        ("C-Lipschitz loss", "transformed noise counts as added noise"),
    )


def mixed_gaussian_added_std(
    xi_low: float, xi_up: float, s_min: float, sigma: float, steps: int = 1
) -> float:
    """Return the noise MMGA adds to the transformed noise (TransDenoiser, Algorithm 1).

    xi_up when sqrt(steps S_min) sigma < xi_low, nothing when it reaches xi_up, the missing variance
    in between. steps = 1 is the reading without the unjustified factor.
    """
    if not 0 <= xi_low <= xi_up:
        raise ValueError(f"0 <= xi_low <= xi_up is needed, got {xi_low} and {xi_up}")
    transformed = math.sqrt(steps * s_min) * sigma
    if transformed < xi_low:
        return xi_up
    return math.sqrt(max(0.0, xi_up**2 - transformed**2))

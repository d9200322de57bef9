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

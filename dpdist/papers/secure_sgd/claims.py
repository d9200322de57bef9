"""Claims of the heterogeneous Gaussian mechanism and Secure-SGD (Phan et al., IJCAI 2019)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from dpdist.privacy import mechanisms
from dpdist.privacy.claims import claimed_guarantee
from dpdist.privacy.guarantee import Guarantee
from dpdist.privacy.mechanisms import Array


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


def hgm_claim(noise_scale: float, delta: float) -> Guarantee:
    """Return HGM's Theorem 3 solved for epsilon: the extended Gaussian at sensitivity 1."""
    value = mechanisms.extended_gaussian_epsilon(delta, noise_scale)
    return claimed_guarantee(
        float(value), delta, "replace-one", "HGM Theorem 3", ("r > 0, fixed in advance",)
    )


def redistribution(weights: ArrayLike, floor: float = 1e-3) -> Array:
    """Return a redistribution vector r > 0 with sum 1 from non-negative weights, shape (K,).

    floor: smallest share, relative to the uniform 1/K; the theorem's r_i = 0 would leave an output
    without noise. The vector must not depend on private records, or the noise leaks them.
    """
    weights = np.asarray(weights, float)
    total = weights.sum()
    shares = weights / total if total > 0 else np.full(weights.shape, 1 / weights.size)
    return (1 - floor) * shares + floor / weights.size

"""Claims of residual perturbation by its own formulas, and a bound for its input noise."""

from __future__ import annotations

import math

from dpdist.privacy import mechanisms
from dpdist.privacy.claims import claimed_guarantee
from dpdist.privacy.guarantee import Guarantee

PUBLIC_LABELS = "labels are public"


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
    return claimed_guarantee(
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
    return claimed_guarantee(
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

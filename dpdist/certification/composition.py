"""Composition of robustness: two layers with their own Laplace noise, one product of scores.

DPAL and StoBatch (ICML 2020) add noise to the input and to the first hidden layer and multiply the
two expected scores. With size kappa certified by the first alone and phi by the second alone, the
paper claims kappa + phi. Two independent randomisations multiply their loss ratios instead: at
distance mu the product is (epsilon mu / kappa + epsilon mu / phi)-robust, so what holds is the
harmonic kappa phi / (kappa + phi), below either of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpdist.certification.expected_score_bounds import ScoreBounds, pure_epsilon


@dataclass(frozen=True)
class ComposedSize:
    """A certified L-infinity size, and whether it holds."""

    size: float
    valid: bool
    label: str
    why: str


def harmonic(
    bounds: ScoreBounds,
    input_scale: float,
    input_sensitivity: float,
    hidden_scale: float,
    hidden_sensitivity: float,
) -> ComposedSize:
    """The certificate that holds, for the product of two scores with fresh noise at full scale.

    Scales: of the Laplace noises actually drawn for every prediction. Sensitivities: L-infinity to
    L1, per unit of input change (input: its number of pixels; hidden: the sum of |weights| of the
    layer as a matrix). bounds: of the product's expected scores.
    """
    _check(input_scale, input_sensitivity, hidden_scale, hidden_sensitivity)
    epsilon = pure_epsilon(bounds)
    if np.isinf(epsilon):
        return ComposedSize(np.inf, True, _HARMONIC, _WHY_HARMONIC)
    kappa = epsilon * input_scale / input_sensitivity
    phi = epsilon * hidden_scale / hidden_sensitivity
    size = kappa * phi / (kappa + phi) if kappa > 0 and phi > 0 else 0.0
    return ComposedSize(size, True, _HARMONIC, _WHY_HARMONIC)


def as_printed(
    bounds: ScoreBounds,
    input_scale: float,
    hidden_scale: float,
    *,
    attack_size: float,
    pixels: int,
    hidden_units: int,
    weight_norm: float,
) -> ComposedSize:
    """DPAL's Proposition 1 and Equation 15: kappa + phi. Not valid; for comparison only.

    As there: kappa = input_scale * epsilon / (attack_size * pixels) counts multiples of the attack
    size but is compared with it; phi = hidden_scale * epsilon / (hidden_units * weight_norm); the
    scales are those of training, whatever fraction 1/psi of them the prediction draws.
    """
    _check(input_scale, attack_size * pixels, hidden_scale, hidden_units * weight_norm)
    epsilon = pure_epsilon(bounds)
    kappa = input_scale * epsilon / (attack_size * pixels)
    phi = hidden_scale * epsilon / (hidden_units * weight_norm)
    return ComposedSize(kappa + phi, False, _PRINTED, _WHY_PRINTED)


_HARMONIC = "harmonic composition, kappa phi / (kappa + phi)"
_WHY_HARMONIC = "independent randomisations multiply their loss ratios, so epsilons add"
_PRINTED = "as printed, kappa + phi: claimed, not valid"
_WHY_PRINTED = (
    "the sum goes the wrong way (epsilons add, sizes do not), kappa is a multiple of the attack "
    "size and not a size, and the noise drawn is smaller than the noise certified"
)


def _check(*values: float) -> None:
    if not all(value > 0 for value in values):
        raise ValueError(f"noise scales and sensitivities must be positive, got {values}")

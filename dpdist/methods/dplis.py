"""DPlis: private training on a smoothed loss (Wang et al., "DPlis", PoPETs 2021).

L_smooth(theta) = E loss(theta + s * N(0, I)), estimated per record by K draws of parameter noise
whose gradients are averaged before the clip (Equation 6, Algorithm 2). Privacy is that of DP-SGD:
the smoothing noise is independent of the data and sits before the clip.

The authors' released code sums the K gradients instead of averaging them, which is an effective
clip of C/K on the mean with a K-fold step for unclipped records. So three variants exist here:

* `dplis_draws(..., aggregate="mean")`: as the paper writes it;
* `dplis_draws(..., aggregate="sum")`: as the released code does it;
* `sum_control(K)`: plain DP-SGD with its gradient multiplied by K before the clip, which separates
  smoothing from the sum's larger gradients.
"""

from __future__ import annotations

import math

from dpdist.errors import UserError
from dpdist.gradients.perturbations import Aggregate, Draws, ParameterDraws


def dplis_scale(
    radius: float,
    learning_rate: float,
    batch_size: int,
    noise_multiplier: float,
    clip_norm: float,
) -> float:
    """Standard deviation of the smoothing noise on every weight.

    radius: R, smoothing in units of one step's noise (10 is the paper's rule without tuning);
    learning_rate: eta, of the averaged gradient; batch_size: the expected batch L. Returns
    R * (eta / L) * noise_multiplier * clip_norm (Equation 6). Raises UserError for values out of
    range.
    """
    named = {
        "radius": radius,
        "learning_rate": learning_rate,
        "noise_multiplier": noise_multiplier,
        "clip_norm": clip_norm,
    }
    for name, value in named.items():
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"DPlis: {name} must be a finite number >= 0, got {value}")
    if batch_size < 1:
        raise UserError(f"DPlis: batch_size must be at least 1, got {batch_size}")
    return radius * (learning_rate / batch_size) * noise_multiplier * clip_norm


def dplis_draws(
    radius: float,
    learning_rate: float,
    batch_size: int,
    noise_multiplier: float,
    clip_norm: float,
    *,
    draws: int = 10,
    aggregate: Aggregate = "mean",
    per_example: bool = False,
    input_std: float = 0.0,
) -> ParameterDraws:
    """DPlis' parameter noise for the gradient engine; see `dplis_scale` for the arguments.

    draws: K (the paper uses 10, 20 on text; 3 already helps). per_example: a draw of its own for
    every record, as Algorithm 2 is written; False shares the draws over the batch, as the authors'
    code does. input_std: of input noise in every draw, beside the paper's.
    """
    std = dplis_scale(radius, learning_rate, batch_size, noise_multiplier, clip_norm)
    return ParameterDraws(
        draws, std, per_example=per_example, aggregate=aggregate, input_std=input_std
    )


def sum_control(draws: int = 10) -> Draws:
    """Plain DP-SGD with gradient x K before the clip: DPlis' "sum" variant without smoothing."""
    return Draws(gradient_scale=float(draws))

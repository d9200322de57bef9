"""Secure-SGD: DP-SGD on a network with noise behind its first layer (HGM, IJCAI 2019, Algorithm 1).

A composition of three parts: DP-SGD (clip, noise, Poisson sampling), HGM's noise behind the first
layer, PixelDP's certificate at prediction. Privacy is that of DP-SGD and of what r cost. The AGM
variant has equal noise, calibrated by the analytic Gaussian mechanism (Balle and Wang 2018).
"""

from __future__ import annotations

from dpdist.methods.options import HiddenNoiseMethod, Redistribution
from dpdist.privacy.plan import GaussianReleases, NonPrivate, Phase


def redistribution_cost(method: object) -> tuple[Phase, ...]:
    """What the shares r cost beside the training: nothing, one noised sum, or everything."""
    section = method.redistribution if isinstance(method, HiddenNoiseMethod) else None
    if not isinstance(section, Redistribution) or section.source == "public":
        return ()
    if section.source == "paid":
        return (GaussianReleases(section.noise_multiplier, 1, section.sample_rate),)
    return (NonPrivate("the redistribution r is computed from private records"),)

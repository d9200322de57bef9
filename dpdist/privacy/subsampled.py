"""The privacy loss of one step with sampling, built without a Python loop.

The library evaluates the hockey-stick divergence point by point, which takes seconds for small
noise. Here the same closed form is evaluated for all points at once; everything else is the
library's.
"""

from __future__ import annotations

import math

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from scipy import stats

from dpdist.privacy.guarantee import Neighbours


def _amplified(epsilon: np.ndarray, sample_rate: float) -> np.ndarray:
    """log(1 + (e^epsilon - 1) / q), the loss without subsampling; needs epsilon > log(1 - q)."""
    epsilon = np.asarray(epsilon, dtype=float)
    if sample_rate == 1:
        return epsilon
    large = epsilon > 1.0
    safe = np.where(large, epsilon, 1.0)
    far = safe - math.log(sample_rate) + np.log1p(-(1 - sample_rate) * np.exp(-safe))
    with np.errstate(divide="ignore"):
        near = np.log1p(np.maximum(np.expm1(np.where(large, 0.0, epsilon)) / sample_rate, -1.0))
    return np.where(large, far, near)


def _replace_cutoff(epsilon: np.ndarray, sample_rate: float, sigma: float) -> np.ndarray:
    """Where the loss of (1-q) N(0) + q N(-1) against (1-q) N(0) + q N(1) equals epsilon.

    With a = e^(1/(2 s^2)) (1-q)/q it solves sinh(x/s^2 + epsilon/2) = -a sinh(epsilon/2).
    """
    if sample_rate == 1:
        return -epsilon * sigma**2 / 2
    half = np.abs(epsilon) / 2
    with np.errstate(divide="ignore"):
        log_sinh = half + np.log(-np.expm1(-2 * half)) - math.log(2)
    log_a = 0.5 / sigma**2 + math.log1p(-sample_rate) - math.log(sample_rate)
    exponent = log_a + log_sinh  # of |right-hand side|; -inf at epsilon = 0
    large = exponent > 0
    far = np.where(large, exponent, 0.0)
    far = far + np.log1p(np.sqrt(1 + np.exp(-2 * far)))
    near = np.arcsinh(np.exp(np.where(large, 0.0, exponent)))
    inverse = -np.sign(epsilon) * np.where(large, far, near)
    return sigma**2 * (inverse - epsilon / 2)


class _SampledGaussianLoss(GaussianPrivacyLoss):
    """The library's loss at sensitivity 1, with divergences for whole arrays."""

    def divergences(self, epsilons: np.ndarray) -> np.ndarray:
        """Hockey-stick divergence at every epsilon; same shape."""
        q, sigma = self.sampling_prob, self._standard_deviation
        edge = -math.log1p(-q) if q < 1 else math.inf
        if self.adjacency_type == AdjacencyType.REPLACE:
            inner, outside = np.full(epsilons.shape, True), np.zeros_like(epsilons)
            cutoff = _replace_cutoff(epsilons, q, sigma)
        elif self.adjacency_type == AdjacencyType.REMOVE:
            inner, outside = epsilons > -edge, -np.expm1(np.minimum(epsilons, 0.0))
            cutoff = -0.5 - sigma**2 * _amplified(np.where(inner, epsilons, 0.0), q)
        else:
            inner, outside = epsilons < edge, np.zeros_like(epsilons)
            cutoff = 0.5 + sigma**2 * _amplified(np.where(inner, -epsilons, 0.0), q)
        delta = self.mu_upper_cdf(cutoff) - np.exp(epsilons + self.mu_lower_log_cdf(cutoff))
        return np.clip(np.where(inner, delta, outside), 0.0, 1.0)


def _pmf(sigma: float, sample_rate: float, adjacency: AdjacencyType, grid: float) -> pld_pmf.PLDPmf:
    loss = _SampledGaussianLoss(sigma, sampling_prob=sample_rate, adjacency_type=adjacency)
    bounds = loss.connect_dots_bounds()
    low, high = math.floor(bounds.epsilon_lower / grid), math.ceil(bounds.epsilon_upper / grid)
    deltas = loss.divergences(np.arange(low, high + 1) * grid)
    if high - low < 1000:  # what the library keeps as a list
        return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, low, high, deltas)
    # The same; the library takes five times as long to list the losses first.
    falls = np.diff(np.minimum.accumulate(deltas))
    p = np.zeros_like(deltas)
    p[0] = 1 - deltas[0] + falls[0] / math.expm1(grid)
    p[1:-1] = (falls[1:] - falls[:-1] * math.exp(grid)) / math.expm1(grid)
    p[-1] = falls[-1] / math.expm1(-grid)
    return pld_pmf.DensePLDPmf(grid, low, np.maximum(p, 0.0), float(deltas.min()), True)


def sampled_gaussian_pld(
    noise_multiplier: float, sample_rate: float, neighbours: Neighbours, grid: float
) -> PrivacyLossDistribution:
    """Pessimistic loss of one Poisson-sampled Gaussian step, 0 < sample_rate <= 1.

    Connect-the-dots discretisation (Doroshenko et al. 2022) with spacing `grid`; equal to the
    library's from_gaussian_mechanism up to rounding. Under replace-one the sensitivity is 2.
    """
    if neighbours == "replace-one":
        return PrivacyLossDistribution(
            _pmf(noise_multiplier, sample_rate, AdjacencyType.REPLACE, grid)
        )
    if sample_rate == 1:
        return PrivacyLossDistribution(_pmf(noise_multiplier, 1.0, AdjacencyType.REMOVE, grid))
    return PrivacyLossDistribution(
        _pmf(noise_multiplier, sample_rate, AdjacencyType.REMOVE, grid),
        _pmf(noise_multiplier, sample_rate, AdjacencyType.ADD, grid),
    )


def truncated_gaussian_pld(
    records: int,
    noise_multiplier: float,
    sample_rate: float,
    batch_cap: int,
    neighbours: Neighbours,
    grid: float,
) -> PrivacyLossDistribution:
    """Pessimistic loss of one step whose Poisson batch is cut to a random subset of `batch_cap`.

    With probability t (the other records alone fill the cap) a record's presence displaces another
    one: then, with its conditional probability of being kept, the sum moves by up to two bounds,
    which the replace-one loss at half the noise dominates. Otherwise the step is the untruncated
    one. The two are mixed with weight t (arXiv 2508.15089).
    """
    others_fill = float(stats.binom.sf(batch_cap - 1, records - 1, sample_rate))
    plain = sampled_gaussian_pld(noise_multiplier, sample_rate, neighbours, grid)
    if others_fill == 0.0:
        return plain
    kept = float(stats.binom.sf(batch_cap, records, sample_rate)) * batch_cap / records
    displaced = _pmf(
        noise_multiplier / 2, min(1.0, kept / others_fill), AdjacencyType.REPLACE, grid
    )
    return PrivacyLossDistribution(displaced).compute_mixture(plain, others_fill)

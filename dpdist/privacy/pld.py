"""Compute privacy loss distributions (PLD) of events, their composition, and rounding errors.

Counts are applied here, because the library's PLD accountant ignores the count of some events
(randomized response): `compose_pld` self-composes every leaf itself. The loss of a step with
Poisson sampling is evaluated at all points at once, by the library's closed form.

Best of K secret runs. A run has distribution Q on a data set and Q' on a neighbor; K is drawn
from a distribution with generating function phi, the runs are independent, and only the best one is
released (ties are broken by labels drawn in advance). On the first data set the released outcome
has density q(y) phi'(1 - t(y)), t(y) = Q(better than y). With L = ln q/q' and G(t) = max {Q'(T):
Q(T) = t},

    delta(epsilon) <= E_Q [ max over t of (phi'(1 - t) - e^(epsilon - L) phi'(1 - G(t)))_+ ],

because t'(y) = Q'(better than y) <= G(t(y)) (Neyman and Pearson) and phi' increases. For a loss L
the maximum is a convex function of q'/q, so the right side is an f-divergence, and a pair that
dominates (Q, Q') may stand for it. K = 0 has the same chance on both sides and adds nothing at
epsilon >= 0; below 0 the bound of the other direction gives the rest. docs/explanation/proofs.md
has the proof step by step. Other bounds of the same price: Koskela, Redberg and Wang (ICML 2024,
arXiv 2402.06701), Xiang et al. (arXiv 2402.13087).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Generic, TypeVar

import dp_accounting as dpa
import numpy as np
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld_library
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from scipy import stats

from dpdist.privacy.guarantee import Neighbors
from dpdist.privacy.profiles import (
    LossPmf,
    loss_directions,
    pld_from_profiles,
    pointwise_maximum,
    upper_hull,
)
from dpdist.privacy.selection import TrialDistribution

# --- events that the library lacks ------------------------------------------------------------


@dataclass(frozen=True)
class WorstOfDpEvent(dpa.DpEvent):  # type: ignore[misc]
    """One of `events`, chosen without the data.

    Costs the pointwise maximum of their profiles and of `floor`, or, where that is 0, of their
    Renyi curves.

    floor: a delta; any mechanism whose profile stays below the maximum is covered as well.
    """

    events: list[dpa.DpEvent]
    floor: float = 0.0


@dataclass(frozen=True)
class CountsDpEvent(dpa.DpEvent):  # type: ignore[misc]
    """Numbers of records by class, each record in one class at most, with Gaussian noise.

    A record that comes, goes or is blanked out moves one count by 1. A replaced one takes 1 from a
    count and adds 1 to another: sqrt 2 in L2 norm, and not 2 as a clipped gradient may.

    deviation: of the noise on each count, in records.
    """

    deviation: float

    def gaussian_for_rdp(self, sensitivity: float) -> dpa.DpEvent:
        """Return a Gaussian release in units of the sensitivity.

        sensitivity: of a sum of contributions of norm 1, which is 2 under replace-one, else 1.
        """
        return dpa.GaussianDpEvent(self.deviation / math.sqrt(sensitivity))

    def gaussian(self, adjacency: Neighbors) -> dpa.DpEvent:
        """Return the equal Gaussian release of contributions of norm 1, which may turn over."""
        scale = math.sqrt(2) if adjacency == "replace-one" else 1.0
        return dpa.GaussianDpEvent(self.deviation * scale)


# --- losses of events and their composition ---------------------------------------------------


_RELATIONS = {
    "add-or-remove-one": dpa.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace-one": dpa.NeighboringRelation.REPLACE_ONE,
}
FINEST_GRID = 1e-4
# Distributions are composed by Fourier transforms in double precision, whose rounding can make a
# delta too small: by 2.4e-17 for each composed release at most where it could be compared with the
# exact Gaussian profile (10 to 100,000 releases). Forty times that is charged.
_ROUNDING = 1e-15


class UnsupportedMechanismError(ValueError):
    """No implemented theorem covers this event under this accountant and neighboring relation."""


class LossTooLarge(UnsupportedMechanismError):
    """The privacy loss is so large (little or no noise) that no PLD is computed."""


def library_relation(adjacency: Neighbors) -> dpa.NeighboringRelation:
    """Return the library's name of the relation. Raises ValueError for an unknown one."""
    if adjacency not in _RELATIONS:
        raise ValueError(f"adjacency must be one of {sorted(_RELATIONS)}, got {adjacency!r}")
    return _RELATIONS[adjacency]


@dataclass(frozen=True)
class PrivacyLoss:
    """The privacy loss of an event. pld: None if it is not private.

    rounding: the error of its deltas, which is charged; a delta within ten times of it is
    hardly resolved, one below it not at all.
    """

    pld: PrivacyLossDistribution | None
    rounding: float

    def epsilon(self, delta: float) -> float:
        """Return the smallest epsilon at `delta`; infinity where rounding leaves nothing of it."""
        if self.pld is None or delta <= self.rounding:
            return math.inf
        return float(self.pld.get_epsilon_for_delta(delta - self.rounding))

    def delta(self, epsilon: float) -> float:
        """Return the smallest delta at `epsilon`."""
        if self.pld is None:
            return 1.0
        return min(1.0, float(self.pld.get_delta_for_epsilon(epsilon)) + self.rounding)

    def resolves(self, delta: float) -> bool:
        return delta > 10 * self.rounding


def compute_privacy_loss(event: dpa.DpEvent, adjacency: Neighbors, grid: float) -> PrivacyLoss:
    """Return the loss of one run of `event`, pessimistic at every grid width.

    Raises UnsupportedMechanismError.
    """
    return PrivacyLoss(compose_pld(event, adjacency, grid), rounding_delta(_count_releases(event)))


def rounding_delta(releases: int) -> float:
    """Return the delta that is charged for the rounding of composed releases."""
    return _ROUNDING * releases


def _count_releases(event: dpa.DpEvent) -> int:
    """Return the number of composed releases."""
    if isinstance(event, dpa.SelfComposedDpEvent):
        in_one = isinstance(event.event, dpa.GaussianDpEvent)  # see `compose_pld`
        return 1 if in_one else event.count * _count_releases(event.event)
    if isinstance(event, dpa.ComposedDpEvent):
        return sum(map(_count_releases, event.events))
    if isinstance(event, WorstOfDpEvent):
        return max(map(_count_releases, event.events))
    if isinstance(event, RepeatAndSelectDpEvent):  # an error of one run's delta counts E[K] times
        releases: int = math.ceil(event.mean * _count_releases(event.event))
        return releases
    return 1


def compose_pld(
    event: dpa.DpEvent, adjacency: Neighbors, grid: float = FINEST_GRID, count: int = 1
) -> PrivacyLossDistribution | None:
    """Return the privacy loss distribution of `count` adaptive runs of `event`, or None.

    None if the event is not private.

    Pessimistic at every grid width. Raises UnsupportedMechanismError where no PLD is known to us.
    """
    # ValueError for another, which would be priced as add-or-remove-one
    library_relation(adjacency)
    identity = pld_library.identity(value_discretization_interval=grid)
    if count == 0 or isinstance(event, dpa.NoOpDpEvent):
        return identity
    if isinstance(event, dpa.NonPrivateDpEvent):
        return None
    if isinstance(event, CountsDpEvent):
        return compose_pld(event.gaussian(adjacency), adjacency, grid, count)
    if isinstance(event, dpa.SelfComposedDpEvent):
        return compose_pld(event.event, adjacency, grid, count * event.count)
    if isinstance(event, dpa.ComposedDpEvent):
        total = identity
        for part, same in groupby(event.events):
            piece = compose_pld(part, adjacency, grid, count * len(list(same)))
            if piece is None:
                return None
            total = total.compose(piece)
        return total
    if isinstance(event, RepeatAndSelectDpEvent):
        searched = _cached_selection_pld(Hashable(event), adjacency, grid)
        return None if searched is None else _self_compose_or_none(searched, count)
    if isinstance(event, WorstOfDpEvent):
        found = [compose_pld(choice, adjacency, grid) for choice in event.events]
        known = [loss for loss in found if loss is not None]
        if len(known) < len(found):
            return None
        return _self_compose_or_none(pointwise_maximum(known, event.floor), count)
    return _mechanism_pld(event, adjacency, grid, count)


_T = TypeVar("_T")


class Hashable(Generic[_T]):
    """An event, or a list of events, by its text: events that hold lists have no hash."""

    def __init__(self, value: _T) -> None:
        self.value, self._text = value, repr(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hashable) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


@lru_cache(maxsize=32)  # small: a search's distribution has a few thousand losses
def _cached_selection_pld(
    search: Hashable[RepeatAndSelectDpEvent], adjacency: Neighbors, grid: float
) -> PrivacyLossDistribution | None:
    one = compose_pld(search.value.event, adjacency, grid)
    distribution = TrialDistribution(search.value.mean, search.value.shape)
    return None if one is None else selection_pld(one, distribution)


def _self_compose_or_none(
    loss: PrivacyLossDistribution, count: int
) -> PrivacyLossDistribution | None:
    """Return the distribution composed `count` times.

    None if hardly any finite loss is left, which the library cannot compose.
    """
    if loss.get_delta_for_epsilon(math.inf) > 1 - 1e-6:
        return None
    return loss.self_compose(count)


def _mechanism_pld(
    event: dpa.DpEvent, adjacency: Neighbors, grid: float, count: int
) -> PrivacyLossDistribution | None:
    """Return `compose_pld` of a single mechanism."""
    identity = pld_library.identity(value_discretization_interval=grid)
    sample_rate, inner = 1.0, event
    if isinstance(event, dpa.PoissonSampledDpEvent):
        sample_rate, inner = event.sampling_probability, event.event
        if sample_rate == 0:
            return identity
    if isinstance(inner, dpa.GaussianDpEvent):
        if inner.noise_multiplier == 0:
            return None
        if sample_rate == 1.0:  # n Gaussian releases are one with sigma / sqrt(n), exactly
            return sampled_gaussian_pld(
                inner.noise_multiplier / math.sqrt(count), 1.0, adjacency, grid
            )
        one = sampled_gaussian_pld(inner.noise_multiplier, sample_rate, adjacency, grid)
        return one.self_compose(count)
    if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
        if event.noise_multiplier == 0:
            return None
        one = truncated_gaussian_pld(
            event.dataset_size, event.noise_multiplier, event.sampling_probability,
            event.truncated_batch_size, adjacency, grid,
        )  # fmt: skip
        return one.self_compose(count)
    if isinstance(event, dpa.RandomizedResponseDpEvent):
        if adjacency != "replace-one":
            raise UnsupportedMechanismError(
                "randomized response is accounted under replace-one only"
            )
        if event.noise_parameter == 0:
            return None
        return pld_library.from_randomized_response(
            noise_parameter=event.noise_parameter,
            num_buckets=event.num_buckets,
            value_discretization_interval=grid,
            neighboring_relation=library_relation(adjacency),
        ).self_compose(count)
    raise UnsupportedMechanismError(
        f"no privacy loss distribution is known for {type(event).__name__}"
    )


# --- one sampled step -------------------------------------------------------------------------


def _loss_before_sampling(epsilon: np.ndarray, sample_rate: float) -> np.ndarray:
    """Return log(1 + (e^epsilon - 1) / q), the loss without subsampling.

    Needs epsilon > log(1 - q).
    """
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
    """Return the point of loss epsilon of (1-q) N(0) + q N(-1) against (1-q) N(0) + q N(1).

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
    losses: np.ndarray = sigma**2 * (inverse - epsilon / 2)
    return losses


class _SampledGaussianLoss(GaussianPrivacyLoss):  # type: ignore[misc]
    """The library's loss at sensitivity 1, with divergences for whole arrays."""

    def divergences(self, epsilons: np.ndarray) -> np.ndarray:
        """Return the hockey-stick divergence at every epsilon, in the same shape."""
        q, sigma = self.sampling_prob, self._standard_deviation
        edge = -math.log1p(-q) if q < 1 else math.inf
        if self.adjacency_type == AdjacencyType.REPLACE:
            inner, outside = np.full(epsilons.shape, True), np.zeros_like(epsilons)
            cutoff = _replace_cutoff(epsilons, q, sigma)
        elif self.adjacency_type == AdjacencyType.REMOVE:
            inner, outside = epsilons > -edge, -np.expm1(np.minimum(epsilons, 0.0))
            cutoff = -0.5 - sigma**2 * _loss_before_sampling(np.where(inner, epsilons, 0.0), q)
        else:
            inner, outside = epsilons < edge, np.zeros_like(epsilons)
            cutoff = 0.5 + sigma**2 * _loss_before_sampling(np.where(inner, -epsilons, 0.0), q)
        delta = self.mu_upper_cdf(cutoff) - np.exp(epsilons + self.mu_lower_log_cdf(cutoff))
        return np.clip(np.where(inner, delta, outside), 0.0, 1.0)


def _sampled_gaussian_pmf(
    sigma: float, sample_rate: float, adjacency: AdjacencyType, grid: float
) -> pld_pmf.PLDPmf:
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


@lru_cache(maxsize=4)  # one entry can hold tens of megabytes
def sampled_gaussian_pld(
    noise_multiplier: float, sample_rate: float, adjacency: Neighbors, grid: float
) -> PrivacyLossDistribution:
    """Return the pessimistic loss of one Poisson-sampled Gaussian step, 0 < sample_rate <= 1.

    Connect-the-dots discretization (Doroshenko et al. 2022) with spacing `grid`; equal to the
    library's from_gaussian_mechanism up to rounding. Under replace-one the sensitivity is 2.
    """
    if adjacency == "replace-one":
        return PrivacyLossDistribution(
            _sampled_gaussian_pmf(noise_multiplier, sample_rate, AdjacencyType.REPLACE, grid)
        )
    if sample_rate == 1:
        return PrivacyLossDistribution(
            _sampled_gaussian_pmf(noise_multiplier, 1.0, AdjacencyType.REMOVE, grid)
        )
    return PrivacyLossDistribution(
        _sampled_gaussian_pmf(noise_multiplier, sample_rate, AdjacencyType.REMOVE, grid),
        _sampled_gaussian_pmf(noise_multiplier, sample_rate, AdjacencyType.ADD, grid),
    )


@lru_cache(maxsize=4)
def truncated_gaussian_pld(
    records: int,
    noise_multiplier: float,
    sample_rate: float,
    batch_cap: int,
    adjacency: Neighbors,
    grid: float,
) -> PrivacyLossDistribution:
    """Return the pessimistic loss of one step whose Poisson batch is cut at random to `batch_cap`.

    With probability t (the other records alone fill the cap) a record's presence displaces another
    one: then, with its conditional probability of being kept, the sum moves by up to two bounds,
    which the replace-one loss at half the noise dominates. Otherwise the step is the untruncated
    one. The two are mixed with weight t (arXiv 2508.15089).
    """
    others_fill = float(stats.binom.sf(batch_cap - 1, records - 1, sample_rate))
    plain = sampled_gaussian_pld(noise_multiplier, sample_rate, adjacency, grid)
    if others_fill == 0.0:
        return plain
    kept = float(stats.binom.sf(batch_cap, records, sample_rate)) * batch_cap / records
    displaced = _sampled_gaussian_pmf(
        noise_multiplier / 2, min(1.0, kept / others_fill), AdjacencyType.REPLACE, grid
    )
    return PrivacyLossDistribution(displaced).compute_mixture(plain, others_fill)


# --- the best of several secret runs ----------------------------------------------------------


_POINTS = 10_000  # at which the maximum over t is bounded, for each term; any number is sound
_LOSSES = 10_000  # of one run that are distinguished, about; any number is sound
_SUPPORT = 1_024  # losses of the result on each side of zero
_SLACK = 1e-13  # relative, for what rounding may take from the highest lines
_NEGLIGIBLE = 1e-15  # deltas below the accuracy of a composed distribution


def selection_pld(
    loss: PrivacyLossDistribution, distribution: TrialDistribution
) -> PrivacyLossDistribution:
    """Return the loss of releasing the best of K runs, each with this loss; an upper bound."""
    sides = loss_directions(loss)
    times = math.ceil(max(len(side.probabilities) for side in sides) / _LOSSES)
    prices = [_SelectionProfile(side.coarsen(times), distribution) for side in sides]
    top = max(price.top() for price in prices)
    apart = max(1, -(-top // _SUPPORT))
    steps = apart * np.arange(0, top // apart + 2)
    deltas = [price.deltas(steps) for price in prices]
    return pld_from_profiles(sides[0].grid, times * steps, deltas)


class _SelectionProfile:
    """The bound for one direction: sum_i p_i H(e^(epsilon - l_i)) + E[K] P(L infinite)."""

    def __init__(self, losses: LossPmf, distribution: TrialDistribution) -> None:
        self.grid, self.distribution, self.losses = losses.grid, distribution, losses
        self._heights, self._slopes = _envelope(losses, distribution)
        with np.errstate(divide="ignore"):
            self._turns = np.diff(self._heights) / np.diff(self._slopes)

    def deltas(self, steps: np.ndarray) -> np.ndarray:
        """Return the bound at epsilon = steps * grid >= 0, not cut at 1: float64, as steps."""
        p, first = self.losses.probabilities, self.losses.lower_loss
        low = int(steps[0]) - first - len(p) + 1
        # H at every difference epsilon - loss that occurs.
        gaps = np.arange(low, int(steps[-1]) - first + 1)
        c = np.exp(np.minimum(gaps * self.grid, 700.0))
        line = np.searchsorted(-self._turns, -c)
        worst = np.maximum(self._heights[line] - c * self._slopes[line], 0.0)[::-1]
        begin = len(worst) - (steps - first - low) - 1
        found = np.array([p @ worst[b : b + len(p)] for b in begin])
        return found + self.losses.infinity_mass * self.distribution.mean

    def top(self) -> int:
        """Return the steps of an epsilon beyond which delta hardly falls."""
        floor = self.losses.infinity_mass * self.distribution.mean * (1 + 1e-9) + _NEGLIGIBLE
        last = self.losses.lower_loss + len(self.losses.probabilities)
        with np.errstate(divide="ignore"):
            spread = np.log((self._heights / self._slopes).max())  # beyond it H is zero
        end = max(self.grid, last * self.grid + spread)
        steps = np.unique(np.geomspace(1, min(end, 300.0) / self.grid, 160).astype(int))
        low = self.deltas(steps) <= floor
        return int(steps[np.argmax(low)] if low.any() else steps[-1])


def _envelope(losses: LossPmf, distribution: TrialDistribution) -> tuple[np.ndarray, np.ndarray]:
    """Return lines a - c b whose maximum bounds phi'(1 - t) - c phi'(1 - G(t)), all t and c >= 0.

    Between two points t < u the first term is at most phi'(1 - t), the second at least
    c phi'(1 - G(u)): the values at the points alone would be too small. Only lines that are the
    highest somewhere are kept; heights a and slopes b both ascend.
    """
    deficit = max(0.0, 1.0 - losses.reverse_probabilities.sum())
    # Neyman-Pearson: the least losses first, where Q' has most. Linear in between: randomized.
    size = np.minimum(np.concatenate([[0.0], np.cumsum(losses.probabilities), [1.0]]), 1.0)
    power = np.concatenate([[deficit], deficit + np.cumsum(losses.reverse_probabilities), [1.0]])
    power = np.minimum(power, 1.0)
    fine = _evenly_tilted(distribution)
    t = np.unique(np.concatenate([fine, np.interp(fine, power, size)]))
    g = np.interp(t, size, power)
    # In ascending order, also where rounding says otherwise (heights too large, slopes too small).
    heights = np.maximum.accumulate(distribution.pgf_derivative(t[:-1])[::-1])
    slopes = np.minimum.accumulate(distribution.pgf_derivative(g[1:]))[::-1]
    last = np.append(np.diff(slopes) > 0, True)  # of equal slopes the highest
    heights, slopes = heights[last], slopes[last]
    kept = upper_hull(slopes, heights)
    return heights[kept] * (1 + _SLACK), slopes[kept]


def _evenly_tilted(distribution: TrialDistribution) -> np.ndarray:
    """Return points from 0 to 1 between which phi'(1 - t) falls by about the same ratio."""
    rough = np.concatenate([[0.0], np.logspace(-15, 0, 2_000)])
    fallen = -np.log(np.maximum(distribution.pgf_derivative(rough), 1e-9))
    points = np.interp(np.linspace(fallen[0], fallen[-1], _POINTS), fallen, rough)
    return np.concatenate([points, [0.0, 1.0]])

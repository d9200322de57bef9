"""Privacy loss distributions of events, and by how much their floating-point sums may err.

Counts are applied by us: the library's PLD accountant ignores the count of some events (randomized
response), so composition goes through `compose_pld`, which self-composes every leaf itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import dp_accounting as dpa
import numpy as np
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld_library
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import fft

from dpdist.privacy.best_of import best_of
from dpdist.privacy.events import WorstOfDpEvent
from dpdist.privacy.guarantee import Neighbours
from dpdist.privacy.profiles import maximum
from dpdist.privacy.selection import SelectionLaw
from dpdist.privacy.subsampled import sampled_gaussian_pld, truncated_gaussian_pld

_RELATIONS = {
    "add-or-remove-one": dpa.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace-one": dpa.NeighboringRelation.REPLACE_ONE,
}
FINEST_GRID = 1e-4
# Distributions are composed by Fourier transforms in double precision, whose rounding can make a
# delta too small: by 2.4e-17 for each composed release at most where it could be compared with the
# exact Gaussian profile (10 to 100,000 releases). Forty times that is charged.
_ROUNDING = 1e-15


_LARGEST_EXPONENT = 700.0  # of e, in a float64


class Unsupported(ValueError):
    """No theorem we implement covers this event under this accountant and neighbouring relation."""


class LossTooLarge(Unsupported):
    """The privacy loss is so large (little or no noise) that no PLD is computed."""


def relation(neighbours: Neighbours) -> dpa.NeighboringRelation:
    """The library's name of the relation. Raises ValueError for an unknown one."""
    if neighbours not in _RELATIONS:
        raise ValueError(f"neighbours must be one of {sorted(_RELATIONS)}, got {neighbours!r}")
    return _RELATIONS[neighbours]


@dataclass(frozen=True)
class Loss:
    """The privacy loss of an event. pld: None if it is not private. rounding: of its deltas, which
    is charged; a delta within ten times of it is hardly resolved, one below it not at all."""

    pld: PrivacyLossDistribution | None
    rounding: float

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon at `delta`; infinity where rounding leaves nothing of it."""
        if self.pld is None or delta <= self.rounding:
            return math.inf
        return float(self.pld.get_epsilon_for_delta(delta - self.rounding))

    def delta(self, epsilon: float) -> float:
        """The smallest delta at `epsilon`."""
        if self.pld is None:
            return 1.0
        return min(1.0, float(self.pld.get_delta_for_epsilon(epsilon)) + self.rounding)

    def resolves(self, delta: float) -> bool:
        return delta > 10 * self.rounding


def loss_of(event: dpa.DpEvent, neighbours: Neighbours, grid: float) -> Loss:
    """The loss of one run of `event`, pessimistic at every grid width. Raises Unsupported."""
    return Loss(compose_pld(event, neighbours, grid), rounding(_releases(event)))


def rounding(releases: int) -> float:
    """What composing so many releases is charged, in delta."""
    return _ROUNDING * releases


def _releases(event: dpa.DpEvent) -> int:
    """How many releases are composed."""
    if isinstance(event, dpa.SelfComposedDpEvent):
        in_one = isinstance(event.event, dpa.GaussianDpEvent)  # see `compose_pld`
        return 1 if in_one else event.count * _releases(event.event)
    if isinstance(event, dpa.ComposedDpEvent):
        return sum(map(_releases, event.events))
    if isinstance(event, WorstOfDpEvent):
        return max(map(_releases, event.events))
    if isinstance(event, RepeatAndSelectDpEvent):  # an error of one run's delta counts E[K] times
        return math.ceil(event.mean * _releases(event.event))
    return 1


@lru_cache(maxsize=4)  # one entry can hold tens of megabytes
def _gaussian_pld(
    noise_multiplier: float, sample_rate: float, neighbours: Neighbours, grid: float
) -> PrivacyLossDistribution:
    return sampled_gaussian_pld(noise_multiplier, sample_rate, neighbours, grid)


@lru_cache(maxsize=4)  # one entry can hold tens of megabytes
def _truncated_pld(
    event: dpa.TruncatedSubsampledGaussianDpEvent, neighbours: Neighbours, grid: float
) -> PrivacyLossDistribution:
    return truncated_gaussian_pld(
        records=event.dataset_size,
        noise_multiplier=event.noise_multiplier,
        sample_rate=event.sampling_probability,
        batch_cap=event.truncated_batch_size,
        neighbours=neighbours,
        grid=grid,
    )


def _laplace_pld(
    noise_multiplier: float, sample_rate: float, neighbours: Neighbours, grid: float
) -> PrivacyLossDistribution:
    if neighbours == "replace-one":
        if sample_rate < 1.0:
            raise Unsupported("subsampled Laplace noise is not supported under replace-one")
        noise_multiplier = noise_multiplier / 2
    if sample_rate < 1.0 and 1 / noise_multiplier > _LARGEST_EXPONENT:
        raise LossTooLarge(f"a sampled Laplace release with noise {noise_multiplier:g}")
    return pld_library.from_laplace_mechanism(
        noise_multiplier, sampling_prob=sample_rate, value_discretization_interval=grid
    )


def compose_pld(
    event: dpa.DpEvent, neighbours: Neighbours, grid: float = FINEST_GRID, count: int = 1
) -> PrivacyLossDistribution | None:
    """The privacy loss distribution of `count` adaptive runs of `event`; None if it is not private.

    Pessimistic at every grid width. Raises Unsupported where no PLD is known to us.
    """
    relation(neighbours)  # ValueError for another, which would be priced as add-or-remove-one
    identity = pld_library.identity(value_discretization_interval=grid)
    if count == 0 or isinstance(event, dpa.NoOpDpEvent):
        return identity
    if isinstance(event, dpa.NonPrivateDpEvent):
        return None
    if isinstance(event, dpa.SelfComposedDpEvent):
        return compose_pld(event.event, neighbours, grid, count * event.count)
    if isinstance(event, dpa.ComposedDpEvent):
        total = identity
        for part, same in groupby(event.events):
            piece = compose_pld(part, neighbours, grid, count * len(list(same)))
            if piece is None:
                return None
            total = total.compose(piece)
        return total
    if isinstance(event, RepeatAndSelectDpEvent):
        searched = _searched(_Named(event), neighbours, grid)
        return None if searched is None else _repeated(searched, count)
    if isinstance(event, WorstOfDpEvent):
        found = [compose_pld(choice, neighbours, grid) for choice in event.events]
        known = [loss for loss in found if loss is not None]
        if len(known) < len(found):
            return None
        return _repeated(maximum(known, event.floor), count)
    return _mechanism_pld(event, neighbours, grid, count)


class _Named:
    """An event by its text: events that hold lists have no hash."""

    def __init__(self, event: RepeatAndSelectDpEvent) -> None:
        self.event, self.text = event, repr(event)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Named) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


@lru_cache(maxsize=32)  # small: a search's distribution has a few thousand losses
def _searched(
    search: _Named, neighbours: Neighbours, grid: float
) -> PrivacyLossDistribution | None:
    one = compose_pld(search.event.event, neighbours, grid)
    law = SelectionLaw(search.event.mean, search.event.shape)
    return None if one is None else best_of(one, law)


def _repeated(loss: PrivacyLossDistribution, count: int) -> PrivacyLossDistribution | None:
    """It, `count` times over; None where hardly anything finite is left, which the library cannot
    compose."""
    lost = max(loss._pmf_remove._infinity_mass, loss._pmf_add._infinity_mass)
    if lost > 1 - 1e-6:
        return None
    return loss if count == 1 else self_compose(loss, count)


def self_compose(loss: PrivacyLossDistribution, count: int) -> PrivacyLossDistribution:
    """`loss.self_compose(count)`, to the last bit but five times as fast."""
    sides = [loss._pmf_remove]
    if loss._pmf_add is not loss._pmf_remove:
        sides.append(loss._pmf_add)
    return PrivacyLossDistribution(*(_self_composed(side, count) for side in sides))


def _self_composed(pmf: pld_pmf.PLDPmf, count: int) -> pld_pmf.PLDPmf:
    if not (isinstance(pmf, pld_pmf.DensePLDPmf) and pmf._probs.any()):
        return pmf.self_compose(count)
    p, truncated = pmf._probs, 1e-15  # the library's share of the mass
    low, high = _chernoff(p, count, truncated)
    size = fft.next_fast_len(max(high - low + 1, len(p)))
    composed = np.real(fft.ifft(fft.fft(p, size) ** count))
    infinite = truncated - math.expm1(count * math.log1p(-pmf._infinity_mass))
    return pld_pmf.DensePLDPmf(
        pmf._discretization,
        pmf._lower_loss * count + low,
        np.roll(composed, -low)[: high - low + 1],
        infinite,
        True,
    )


def _chernoff(p: np.ndarray, count: int, outside: float) -> tuple[int, int]:
    """Indices between which a sum of `count` indices lies but for a probability `outside`."""
    low, high = 0, (len(p) - 1) * count
    tilt = np.exp(np.arange(len(p)) / len(p))
    up = down = p
    for order in range(1, 21):
        up, down = up * tilt, down / tilt
        scale, least = len(p) / order, math.log(2 / outside)
        high = min(high, math.ceil((count * math.log(up.sum()) + least) * scale))
        low = max(low, math.floor(-(count * math.log(down.sum()) + least) * scale))
    return low, high


def _mechanism_pld(
    event: dpa.DpEvent, neighbours: Neighbours, grid: float, count: int
) -> PrivacyLossDistribution | None:
    """`compose_pld` of a single mechanism."""
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
            return _gaussian_pld(inner.noise_multiplier / math.sqrt(count), 1.0, neighbours, grid)
        one = _gaussian_pld(inner.noise_multiplier, sample_rate, neighbours, grid)
        return self_compose(one, count)
    if isinstance(inner, dpa.LaplaceDpEvent):
        if inner.noise_multiplier == 0:
            return None
        one = _laplace_pld(inner.noise_multiplier, sample_rate, neighbours, grid)
        return self_compose(one, count)
    if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
        if event.noise_multiplier == 0:
            return None
        return self_compose(_truncated_pld(event, neighbours, grid), count)
    if isinstance(event, dpa.RandomizedResponseDpEvent):
        if neighbours != "replace-one":
            raise Unsupported("randomized response is accounted under replace-one only")
        if event.noise_parameter == 0 and event.num_buckets > 1:
            return None
        if event.num_buckets == 1:
            return identity
        return pld_library.from_randomized_response(
            noise_parameter=event.noise_parameter,
            num_buckets=event.num_buckets,
            value_discretization_interval=grid,
            neighboring_relation=relation(neighbours),
        ).self_compose(count)
    raise Unsupported(f"no privacy loss distribution is known for {type(event).__name__}")

"""From a dp_accounting event to (epsilon, delta): PLD where it applies, RDP otherwise, and named.

Convention of this package: the noise multiplier of an event is noise scale / bound on ONE
record's contribution, whatever the neighbouring relation. Under replace-one a contribution can
turn into its opposite, so the sensitivity is twice that bound. The library applies this factor 2
in PLD and leaves it out in RDP; here it is applied in both: under RDP the multipliers are halved
before the library sees them.

Counts are applied by us: the library's PLD accountant ignores the count of some events (randomized
response), so composition goes through `compose_pld`, which self-composes every leaf itself.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import dp_accounting as dpa
import numpy as np
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.pld import privacy_loss_distribution as pld_library
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.rdp import RdpAccountant

from dpdist.privacy.events import WorstOfDpEvent
from dpdist.privacy.guarantee import Neighbours
from dpdist.privacy.subsampled import sampled_gaussian_pld, truncated_gaussian_pld

_RELATIONS = {
    "add-or-remove-one": dpa.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace-one": dpa.NeighboringRelation.REPLACE_ONE,
}
FINEST_GRID = 1e-4
_LARGEST_SPAN = 1e6  # beyond, a guarantee is meaningless and the library overflows
_MAX_GRID_POINTS = 1e6  # about one second and 100 MB per composition
# Whole orders are computed in closed form, fractional ones by slow series.
QUICK_ORDERS = (*range(2, 33), 40, 48, 64, 96, 128, 256, 512)


class Unsupported(ValueError):
    """No theorem we implement covers this event under this accountant and neighbouring relation."""


class LossTooLarge(Unsupported):
    """The privacy loss is so large (little or no noise) that no PLD is computed."""


def relation(neighbours: Neighbours) -> dpa.NeighboringRelation:
    """The library's name of the relation. Raises ValueError for an unknown one."""
    if neighbours not in _RELATIONS:
        raise ValueError(f"neighbours must be one of {sorted(_RELATIONS)}, got {neighbours!r}")
    return _RELATIONS[neighbours]


# --- privacy loss distributions ---------------------------------------------------------------


@lru_cache(maxsize=4)  # one entry can hold tens of megabytes
def _gaussian_pld(
    noise_multiplier: float, sample_rate: float, neighbours: Neighbours, grid: float
) -> PrivacyLossDistribution:
    if sample_rate < 1.0:
        return sampled_gaussian_pld(noise_multiplier, sample_rate, neighbours, grid)
    return pld_library.from_gaussian_mechanism(
        standard_deviation=noise_multiplier,
        value_discretization_interval=grid,
        neighboring_relation=relation(neighbours),
    )


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
    return pld_library.from_laplace_mechanism(
        noise_multiplier, sampling_prob=sample_rate, value_discretization_interval=grid
    )


def compose_pld(
    event: dpa.DpEvent, neighbours: Neighbours, grid: float = FINEST_GRID, count: int = 1
) -> PrivacyLossDistribution | None:
    """The privacy loss distribution of `count` adaptive runs of `event`; None if it is not private.

    Pessimistic at every grid width. Raises Unsupported where no PLD is known to us.
    """
    identity = pld_library.identity(value_discretization_interval=grid)
    if count == 0 or isinstance(event, dpa.NoOpDpEvent):
        return identity
    if isinstance(event, dpa.NonPrivateDpEvent):
        return None
    if isinstance(event, dpa.SelfComposedDpEvent):
        return compose_pld(event.event, neighbours, grid, count * event.count)
    if isinstance(event, dpa.ComposedDpEvent):
        total = identity
        for part in event.events:
            piece = compose_pld(part, neighbours, grid, count)
            if piece is None:
                return None
            total = total.compose(piece)
        return total

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
        return one.self_compose(count)
    if isinstance(inner, dpa.LaplaceDpEvent):
        if inner.noise_multiplier == 0:
            return None
        one = _laplace_pld(inner.noise_multiplier, sample_rate, neighbours, grid)
        return one.self_compose(count)
    if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
        if event.noise_multiplier == 0:
            return None
        return _truncated_pld(event, neighbours, grid).self_compose(count)
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


# --- Renyi differential privacy ---------------------------------------------------------------


def _in_units_of(event: dpa.DpEvent, sensitivity: float) -> dpa.DpEvent:
    """The event with its noise in units of the relation's sensitivity, for the library's RDP."""
    if isinstance(event, dpa.GaussianDpEvent):
        return dpa.GaussianDpEvent(event.noise_multiplier / sensitivity)
    if isinstance(event, dpa.LaplaceDpEvent):
        if event.noise_multiplier == 0:
            return dpa.NonPrivateDpEvent()
        return dpa.LaplaceDpEvent(event.noise_multiplier / sensitivity)
    if isinstance(event, dpa.SelfComposedDpEvent):
        return dpa.SelfComposedDpEvent(_in_units_of(event.event, sensitivity), event.count)
    if isinstance(event, dpa.ComposedDpEvent):
        return dpa.ComposedDpEvent([_in_units_of(part, sensitivity) for part in event.events])
    if isinstance(event, RepeatAndSelectDpEvent):
        inner = _in_units_of(event.event, sensitivity)
        return RepeatAndSelectDpEvent(inner, event.mean, event.shape)
    if isinstance(event, WorstOfDpEvent):
        choices = [_in_units_of(choice, sensitivity) for choice in event.events]
        return WorstOfDpEvent(choices, event.max_order)
    if sensitivity == 1 or isinstance(event, dpa.NoOpDpEvent | dpa.NonPrivateDpEvent):
        return event
    raise Unsupported(
        f"{type(event).__name__} has no Renyi bound under replace-one; "
        "use add-or-remove-one, or full batches"
    )


class _Renyi(RdpAccountant):
    """The library's accountant, and what it lacks: pointwise maxima, negative shapes of a search's
    law."""

    def _maybe_compose(self, event: dpa.DpEvent, count: int, do_compose: bool) -> Any:
        negative = isinstance(event, RepeatAndSelectDpEvent) and event.shape < 0
        if not (negative or isinstance(event, WorstOfDpEvent)):
            return super()._maybe_compose(event, count, do_compose)
        parts = event.events if isinstance(event, WorstOfDpEvent) else [event.event]
        before: np.ndarray = self.rdp
        curves: list[np.ndarray] = []
        for part in parts:
            self._rdp = np.zeros_like(before)
            error = self._maybe_compose(part, 1, do_compose)
            curves.append(self._rdp)
            if error is not None:
                self._rdp = before
                return error
        if isinstance(event, WorstOfDpEvent):
            curve = np.max(curves, axis=0)
            if event.max_order is not None:
                curve = np.where(self._orders > event.max_order, np.inf, curve)
        else:
            curve = best_of_runs(self._orders, curves[0], event.mean, event.shape)
        self._rdp = before + count * curve if do_compose else before
        return None


def best_of_runs(orders: np.ndarray, rdp: np.ndarray, mean: float, shape: float) -> np.ndarray:
    """Renyi curve of the best of K runs, K truncated negative binomial with any shape > -1.

    orders: > 1, ascending. rdp: of one run at these orders. Papernot and Steinke 2022, Theorem 2;
    a curve does not fall with its order, so a bound at a higher order holds at the lower ones.
    """
    from dpdist.privacy.selection import SelectionLaw

    gamma = SelectionLaw(mean, shape).gamma
    hidden = (1 + shape) * np.min((1 - 1 / orders) * rdp - math.log(gamma) / orders)
    curve = rdp + hidden + math.log(mean) / (orders - 1)
    return np.minimum.accumulate(curve[::-1])[::-1]


def compose_rdp(
    event: dpa.DpEvent, neighbours: Neighbours, orders: Sequence[float] | None = None
) -> RdpAccountant:
    """The library's RDP accountant after composing `event`. Raises Unsupported with the reason."""
    relation(neighbours)
    event = _in_units_of(event, 2.0 if neighbours == "replace-one" else 1.0)
    accountant = _Renyi(orders)
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.ERROR)  # it warns of each fractional order it leaves out: still a bound
    try:
        accountant.compose(event)
    except dpa.UnsupportedEventError as error:
        raise Unsupported(f"the RDP accountant refuses this event: {error}") from error
    finally:
        absl.setLevel(level)
    return accountant


# --- epsilon and delta ------------------------------------------------------------------------


def grid_for(event: dpa.DpEvent, neighbours: Neighbours) -> float:
    """The finest grid (1e-4 times a power of ten) on which the composed loss has a workable size.

    A coarser grid stays an upper bound. It depends only on the event, so that a calibration and the
    guarantee it promised use the same one. Raises LossTooLarge above a loss of a million.
    """
    span = compose_rdp(_untruncated(event), "add-or-remove-one", QUICK_ORDERS).get_epsilon(1e-10)
    if neighbours == "replace-one":
        span *= 4
    if span > _LARGEST_SPAN:
        raise LossTooLarge(f"losses up to {span:.3g} are too large for a distribution on a grid")
    excess = max(1.0, span / FINEST_GRID / _MAX_GRID_POINTS)
    return FINEST_GRID * 10.0 ** math.ceil(math.log10(excess))


def _untruncated(event: dpa.DpEvent) -> dpa.DpEvent:
    """The event without caps on the batch: no bound, only the order of magnitude of its losses."""
    if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
        inner = dpa.GaussianDpEvent(event.noise_multiplier)
        return dpa.PoissonSampledDpEvent(event.sampling_probability, inner)
    if isinstance(event, dpa.PoissonSampledDpEvent) and isinstance(event.event, dpa.LaplaceDpEvent):
        return event.event
    if isinstance(event, dpa.SelfComposedDpEvent):
        return dpa.SelfComposedDpEvent(_untruncated(event.event), event.count)
    if isinstance(event, dpa.ComposedDpEvent):
        return dpa.ComposedDpEvent([_untruncated(part) for part in event.events])
    if isinstance(event, dpa.RandomizedResponseDpEvent):
        return dpa.NoOpDpEvent()
    if isinstance(event, WorstOfDpEvent):
        return WorstOfDpEvent([_untruncated(part) for part in event.events])
    return event


def _worst(values: Sequence[float]) -> float:
    return max(values, default=0.0)


def epsilon(
    alternatives: Sequence[dpa.DpEvent], delta: float, neighbours: Neighbours
) -> tuple[float, str]:
    """(epsilon, accountant's name) at `delta`: the worst of the paths a record may take.

    alternatives: one event per part of the data a record may lie in (one event: no parallel parts).
    PLD is used when it covers every alternative, RDP otherwise, and where the grid is too coarse
    for the PLD to be the smaller bound (deltas below 1e-14, losses in the hundreds).
    Raises Unsupported when neither covers them.
    """
    try:
        grids = [grid_for(event, neighbours) for event in alternatives]
        losses = [
            compose_pld(event, neighbours, grid)
            for event, grid in zip(alternatives, grids, strict=True)
        ]
    except Unsupported as no_pld:
        try:
            accountants = [compose_rdp(event, neighbours) for event in alternatives]
        except Unsupported as no_rdp:
            if isinstance(no_pld, LossTooLarge):
                return math.inf, f"no finite bound ({no_pld})"
            raise Unsupported(f"{no_rdp} (and {no_pld})") from no_rdp
        return _worst([accountant.get_epsilon(delta) for accountant in accountants]), rdp_name()
    values = [math.inf if loss is None else loss.get_epsilon_for_delta(delta) for loss in losses]
    value, grid = float(_worst(values)), max(grids, default=FINEST_GRID)
    if math.isinf(value) or grid > FINEST_GRID:
        by_rdp = _rdp_epsilon(alternatives, delta, neighbours)
        if by_rdp < value:
            return by_rdp, rdp_name()
    return value, pld_name(grid)


def _rdp_epsilon(
    alternatives: Sequence[dpa.DpEvent], delta: float, neighbours: Neighbours
) -> float:
    """Epsilon by RDP, infinity where it does not apply: for deltas and losses too fine for a
    grid."""
    try:
        accountants = [compose_rdp(event, neighbours) for event in alternatives]
    except Unsupported:
        return math.inf
    return _worst([accountant.get_epsilon(delta) for accountant in accountants])


def coarse_epsilon(
    alternatives: Sequence[dpa.DpEvent], delta: float, neighbours: Neighbours
) -> float:
    """An upper bound on epsilon from a grid ten times coarser: for curves and searches."""
    losses = [compose_pld(e, neighbours, 10 * grid_for(e, neighbours)) for e in alternatives]
    return _worst([math.inf if x is None else x.get_epsilon_for_delta(delta) for x in losses])


def delta_profile(
    alternatives: Sequence[dpa.DpEvent], neighbours: Neighbours
) -> Callable[[float], float]:
    """epsilon -> the smallest proved delta, by the accountant that `epsilon` would use."""
    try:
        losses = [compose_pld(e, neighbours, grid_for(e, neighbours)) for e in alternatives]
    except Unsupported:
        accountants = [compose_rdp(event, neighbours) for event in alternatives]
        return lambda at: _worst([accountant.get_delta(at) for accountant in accountants])
    return lambda at: _worst(
        [1.0 if loss is None else float(loss.get_delta_for_epsilon(at)) for loss in losses]
    )


def delta_at(
    alternatives: Sequence[dpa.DpEvent], target_epsilon: float, neighbours: Neighbours
) -> float:
    """The smallest proved delta at one epsilon."""
    return delta_profile(alternatives, neighbours)(target_epsilon)


def library_version() -> str:
    """Name and version of the accounting library."""
    from importlib.metadata import version

    return f"dp-accounting {version('dp-accounting')}"


def pld_name(grid: float) -> str:
    """How a PLD result names its accountant."""
    return f"PLD (grid {grid:g}, {library_version()})"


def rdp_name() -> str:
    """How an RDP result names its accountant."""
    return f"RDP ({library_version()})"

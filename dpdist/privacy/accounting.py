"""Compute (epsilon, delta) from a dp_accounting event: PLD where it applies, RDP otherwise.

The accountant that was used is named in the result. Convention of this package: the noise
multiplier of an event is noise scale / bound on ONE record's contribution, whatever the
neighboring relation. Under replace-one a contribution can turn into its opposite, so the
sensitivity is twice that bound. The library applies this factor 2 in PLD and leaves it out in RDP;
here it is applied in both: under RDP the multipliers are halved before the library sees them.
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
from dp_accounting.rdp import RdpAccountant

from dpdist.privacy.guarantee import Neighbors
from dpdist.privacy.pld import (
    FINEST_GRID,
    CountsDpEvent,
    Hashable,
    LossTooLarge,
    PrivacyLoss,
    UnsupportedMechanismError,
    WorstOfDpEvent,
    compute_privacy_loss,
    library_relation,
)
from dpdist.privacy.selection import TrialDistribution

_LARGEST_SPAN = 1e6  # beyond, a guarantee is meaningless and the library overflows
_MAX_GRID_POINTS = 1e6  # about one second and 100 MB per composition
# Whole orders are computed in closed form, fractional ones by slow series.
QUICK_ORDERS = (*range(2, 33), 40, 48, 64, 96, 128, 256, 512)


# --- Renyi differential privacy ---------------------------------------------------------------


def _map_parts(event: dpa.DpEvent, change: Callable[[dpa.DpEvent], dpa.DpEvent]) -> dpa.DpEvent:
    """Return the event with the events that it is made of changed; one that is made of none."""
    if isinstance(event, dpa.SelfComposedDpEvent):
        return dpa.SelfComposedDpEvent(change(event.event), event.count)
    if isinstance(event, dpa.ComposedDpEvent):
        return dpa.ComposedDpEvent([change(part) for part in event.events])
    if isinstance(event, RepeatAndSelectDpEvent):
        return RepeatAndSelectDpEvent(change(event.event), event.mean, event.shape)
    if isinstance(event, WorstOfDpEvent):
        return WorstOfDpEvent([change(choice) for choice in event.events], event.floor)
    return event


def _rescale_noise(event: dpa.DpEvent, sensitivity: float) -> dpa.DpEvent:
    """Return the event with noise in units of the relation's sensitivity, for the library's RDP."""
    if isinstance(event, dpa.GaussianDpEvent):
        return dpa.GaussianDpEvent(event.noise_multiplier / sensitivity)
    if isinstance(event, CountsDpEvent):
        return event.gaussian_for_rdp(sensitivity)
    changed = _map_parts(event, lambda part: _rescale_noise(part, sensitivity))
    same = isinstance(event, dpa.NoOpDpEvent | dpa.NonPrivateDpEvent)
    if changed is not event or sensitivity == 1 or same:
        return changed
    raise UnsupportedMechanismError(
        f"{type(event).__name__} has no Renyi bound under replace-one; "
        "use add-or-remove-one, or full batches"
    )


class _ExtendedRdpAccountant(RdpAccountant):  # type: ignore[misc]
    """The library's accountant with pointwise maxima and negative shapes of `RepeatAndSelect`."""

    def _maybe_compose(self, event: dpa.DpEvent, count: int, do_compose: bool) -> Any:
        negative = isinstance(event, RepeatAndSelectDpEvent) and event.shape < 0
        if isinstance(event, WorstOfDpEvent) and event.floor:
            return self.CompositionErrorDetails(
                invalid_event=event, error_message="its floor bounds profiles, not Renyi curves"
            )
        if negative and event.shape <= -1:
            return self.CompositionErrorDetails(
                invalid_event=event,
                error_message="no Renyi bound of a binomial distribution is known to us",
            )
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
        else:
            curve = selection_rdp(self._orders, curves[0], event.mean, event.shape)
        self._rdp = before + count * curve if do_compose else before
        return None


def selection_rdp(orders: np.ndarray, rdp: np.ndarray, mean: float, shape: float) -> np.ndarray:
    """Return the Renyi curve of the best of K runs, K truncated negative binomial, any shape > -1.

    orders: > 1, ascending. rdp: of one run at these orders. Papernot and Steinke 2022, Theorem 2;
    a curve does not fall with its order, so a bound at a higher order holds at the lower ones.
    """
    log_gamma = TrialDistribution(mean, shape).log_gamma
    hidden = (1 + shape) * np.min((1 - 1 / orders) * rdp - log_gamma / orders)
    curve = rdp + hidden + math.log(mean) / (orders - 1)
    return np.minimum.accumulate(curve[::-1])[::-1]


def _add_negligible_releases(event: dpa.DpEvent) -> dpa.DpEvent:
    """Return the event with a very noisy release added to each run of a search: an upper bound."""
    if isinstance(event, RepeatAndSelectDpEvent):
        inner = dpa.ComposedDpEvent(
            [_add_negligible_releases(event.event), dpa.GaussianDpEvent(1e6)]
        )
        return RepeatAndSelectDpEvent(inner, event.mean, event.shape)
    return _map_parts(event, _add_negligible_releases)


def compose_rdp(
    event: dpa.DpEvent, adjacency: Neighbors, orders: Sequence[float] | None = None
) -> RdpAccountant:
    """Return the library's RDP accountant after composing `event`.

    Raises UnsupportedMechanismError with the reason.
    """
    library_relation(adjacency)
    event = _rescale_noise(event, 2.0 if adjacency == "replace-one" else 1.0)
    accountant = _ExtendedRdpAccountant(orders)
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.ERROR)  # it warns of each fractional order it leaves out: still a bound
    try:
        try:
            accountant.compose(event)
        except ValueError:  # the library's logarithm of a search's divergence that rounds to zero
            accountant = _ExtendedRdpAccountant(orders)
            accountant.compose(_add_negligible_releases(event))
    except dpa.UnsupportedEventError as error:
        raise UnsupportedMechanismError(
            f"the RDP accountant refuses this event: {error}"
        ) from error
    finally:
        absl.setLevel(level)
    return accountant


# --- epsilon and delta ------------------------------------------------------------------------


def choose_grid(event: dpa.DpEvent, adjacency: Neighbors) -> float:
    """Return the finest grid on which the composed loss has a workable size.

    A grid is 1e-4 times a power of ten.

    A coarser grid stays an upper bound. It depends only on the event, so that a calibration and the
    guarantee it promised use the same one. Raises LossTooLarge above a loss of a million.
    """
    span = compose_rdp(_approximate_event(event), "add-or-remove-one", QUICK_ORDERS).get_epsilon(
        1e-10
    )
    if adjacency == "replace-one":
        span *= 4
    if span > _LARGEST_SPAN:
        raise LossTooLarge(f"losses up to {span:.3g} are too large for a distribution on a grid")
    excess = max(1.0, span / FINEST_GRID / _MAX_GRID_POINTS)
    return FINEST_GRID * 10.0 ** math.ceil(math.log10(excess))


def _approximate_event(event: dpa.DpEvent) -> dpa.DpEvent:
    """Return a similar event that has Renyi curves, without caps on the batch.

    It is no bound, only the order of magnitude of the losses.
    """
    if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
        inner = dpa.GaussianDpEvent(event.noise_multiplier)
        return dpa.PoissonSampledDpEvent(event.sampling_probability, inner)
    if isinstance(event, dpa.RandomizedResponseDpEvent):
        return dpa.NoOpDpEvent()
    if isinstance(event, WorstOfDpEvent):
        return WorstOfDpEvent([_approximate_event(part) for part in event.events])
    if isinstance(event, RepeatAndSelectDpEvent):
        shape = event.shape if event.shape > -1 else math.inf
        return RepeatAndSelectDpEvent(_approximate_event(event.event), event.mean, shape)
    return _map_parts(event, _approximate_event)


def _contains_selection(event: dpa.DpEvent) -> bool:
    """Return whether the event holds a search: neither bound of its price is always smaller."""
    if isinstance(event, RepeatAndSelectDpEvent):
        return True
    if isinstance(event, dpa.SelfComposedDpEvent):
        return _contains_selection(event.event)
    if isinstance(event, dpa.ComposedDpEvent | WorstOfDpEvent):
        return any(map(_contains_selection, event.events))
    return False


def compute_epsilon(
    path_events: Sequence[dpa.DpEvent], delta: float, adjacency: Neighbors
) -> tuple[float, str]:
    """Return (epsilon, accountant's name) at `delta`: the worst of the paths a record may take.

    path_events: one event per part of the data a record may lie in (one event: no parallel parts).
    PLD is used when it covers every alternative, RDP otherwise, and where it is the smaller bound:
    the grid is coarse (losses in the hundreds), the delta is hardly above the rounding that a PLD
    is charged for, or a search is priced. Raises UnsupportedMechanismError when neither covers
    them.
    """
    return _cached_epsilon(Hashable(list(path_events)), delta, adjacency)


def _epsilon(
    paths: Hashable[list[dpa.DpEvent]], delta: float, adjacency: Neighbors
) -> tuple[float, str]:
    alternatives = paths.value
    try:
        grids, losses = compute_privacy_losses(alternatives, adjacency)
    except UnsupportedMechanismError as no_pld:
        try:
            return rdp_epsilon(alternatives, delta, adjacency), rdp_accountant_name()
        except UnsupportedMechanismError as no_rdp:
            if isinstance(no_pld, LossTooLarge):
                return math.inf, f"no finite bound ({no_pld})"
            raise UnsupportedMechanismError(f"{no_rdp} (and {no_pld})") from no_rdp
    value, grid = (
        max((loss.epsilon(delta) for loss in losses), default=0.0),
        max(grids, default=FINEST_GRID),
    )
    resolved = all(loss.resolves(delta) for loss in losses)
    search = any(map(_contains_selection, alternatives))
    good = resolved and math.isfinite(value) and grid <= FINEST_GRID
    if good and not search:
        return value, pld_accountant_name(grid)
    try:
        # Beside a search's own distribution, orders that are quick to compute are enough.
        orders = QUICK_ORDERS if good else None
        by_rdp = rdp_epsilon(alternatives, delta, adjacency, orders)
        if by_rdp < value:
            return by_rdp, rdp_accountant_name()
    except UnsupportedMechanismError:
        if math.isinf(value) and not resolved:
            return value, f"no finite bound (PLD does not resolve delta {delta:g})"
    return value, pld_accountant_name(grid, search)


# A run asks for the price of its plan a dozen times. No decorator: `make mutation` skips those.
_cached_epsilon = lru_cache(maxsize=1000)(_epsilon)


def compute_privacy_losses(
    path_events: Sequence[dpa.DpEvent], adjacency: Neighbors, grid_factor: int = 1
) -> tuple[list[float], list[PrivacyLoss]]:
    """Return grids and losses, one per alternative, from which a price is computed.

    Raises UnsupportedMechanismError.

    grid_factor: how many times the price's grid.
    """
    grids = [grid_factor * choose_grid(event, adjacency) for event in path_events]
    found = [
        compute_privacy_loss(e, adjacency, grid) for e, grid in zip(path_events, grids, strict=True)
    ]
    return grids, found


def rdp_epsilon(
    path_events: Sequence[dpa.DpEvent],
    delta: float,
    adjacency: Neighbors,
    orders: Sequence[float] | None = None,
) -> float:
    """Return epsilon by RDP at these orders; None: all of the library's.

    Raises UnsupportedMechanismError.
    """
    accountants = [compose_rdp(event, adjacency, orders) for event in path_events]
    return max((accountant.get_epsilon(delta) for accountant in accountants), default=0.0)


def approximate_epsilon(
    path_events: Sequence[dpa.DpEvent], delta: float, adjacency: Neighbors
) -> float:
    """Return an approximate epsilon, by Renyi orders that are quick, to start a search from.

    It is no bound where the orders bound only a similar event (`_approximate_event`), and infinity
    where they do not apply.
    """
    near = [_approximate_event(event) for event in path_events]
    try:
        return rdp_epsilon(near, delta, adjacency, QUICK_ORDERS)
    except UnsupportedMechanismError:
        return math.inf


def coarse_epsilon(path_events: Sequence[dpa.DpEvent], delta: float, adjacency: Neighbors) -> float:
    """Return an upper bound on epsilon from a grid ten times coarser: for curves and searches.

    Raises UnsupportedMechanismError where there is no PLD or it does not resolve `delta`.
    """
    return _cached_coarse_epsilon(Hashable(list(path_events)), delta, adjacency)


def _coarse_epsilon(
    paths: Hashable[list[dpa.DpEvent]], delta: float, adjacency: Neighbors
) -> float:
    _, losses = compute_privacy_losses(paths.value, adjacency, grid_factor=10)
    if not all(loss.resolves(delta) for loss in losses):
        raise UnsupportedMechanismError(f"PLD does not resolve delta {delta:g}")
    return max((loss.epsilon(delta) for loss in losses), default=0.0)


_cached_coarse_epsilon = lru_cache(maxsize=1000)(_coarse_epsilon)


def library_version() -> str:
    """Return name and version of the accounting library."""
    from importlib.metadata import version

    return f"dp-accounting {version('dp-accounting')}"


def pld_accountant_name(grid: float, has_selection: bool = False) -> str:
    """Return the accountant's name in a PLD result, which may be of the best of K runs."""
    return f"PLD{' of best-of-K' if has_selection else ''} (grid {grid:g}, {library_version()})"


def rdp_accountant_name() -> str:
    """Return the accountant's name in an RDP result."""
    return f"RDP ({library_version()})"

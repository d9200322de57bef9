"""What is done with one input in each mode: draw, count, decide.

Everything here is a pure function of the random units. A procedure splits its work on an input
into ``units`` that can be done anywhere in any order (blocks of a fixed-n estimate; a sequential
test is one unit), and puts the results together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from dpdist.certification import units
from dpdist.certification.bounds import clopper_pearson_lower, clopper_pearson_upper
from dpdist.certification.sampling import Counter
from dpdist.certification.sequential import (
    TargetTest,
    anytime_lower,
    beta_mixture_rejects,
    planned_looks,
)
from dpdist.certification.settings import CertifySettings
from dpdist.certification.verdict import ABSTAIN, Verdict

# Error of the upper bound by which hopeless inputs are given up (never adds a certificate).
FUTILE = 0.01

Partial = dict[str, Any]  # JSON: "selected" from the first unit, then counts


class Procedure(Protocol):
    spending: str  # how the error is spent over the looks

    @property
    def units(self) -> int:
        """Into how many pieces the work on one input can be cut."""
        ...

    def work(self, sampler: Any, x: Tensor, index: int, low: int, high: int) -> Partial:
        """Units low..high-1 of one input."""
        ...

    def verdict(self, partials: Sequence[Partial]) -> Any:
        """The certificate, from partial results that together cover every unit once."""
        ...


def join(first: Partial, second: Partial) -> Partial:
    """The partial result of two intervals of units: counts and integer sums add up exactly."""
    both: Partial = {
        name: [a + b for a, b in zip(first[name], second[name], strict=True)]
        for name in first
        if name != "selected"
    }
    for part in (first, second):
        if "selected" in part:
            both["selected"] = part["selected"]
    return both


class Selecting(Protocol):
    """Settings with a number of draws that choose the class."""

    @property
    def n0(self) -> int: ...


def select(sampler: Counter, settings: Selecting, x: Tensor, index: int) -> int:
    """The class whose probability will be estimated, from n0 draws used for nothing else."""
    n0 = settings.n0
    return int(sampler.histogram(x, index, units.SELECT, 0, n0, n0).argmax())


def _block(
    sampler: Counter, settings: CertifySettings, batch: int, x: Tensor, index: int, block: int
) -> np.ndarray:
    """Histogram of one canonical block of the estimate; the last one may be counted in part."""
    draws = min(batch, settings.n - block * batch)
    return sampler.histogram(x, index, units.ESTIMATE, block, batch, draws)


class FixedDraws:
    """Cohen et al. 2019, CERTIFY: select by n0 draws, Clopper-Pearson on n others."""

    spending = "none"

    def __init__(self, settings: CertifySettings, batch: int) -> None:
        self._settings = settings
        self._batch = batch

    @property
    def units(self) -> int:
        return -(-self._settings.n // self._batch)

    def work(self, sampler: Counter, x: Tensor, index: int, low: int, high: int) -> Partial:
        partial: Partial = {}
        if low == 0:
            partial["selected"] = select(sampler, self._settings, x, index)
        blocks = [
            _block(sampler, self._settings, self._batch, x, index, block)
            for block in range(low, high)
        ]
        partial["histogram"] = np.sum(blocks, axis=0).tolist()
        return partial

    def verdict(self, partials: Sequence[Partial]) -> Verdict:
        settings = self._settings
        histogram = np.sum([partial["histogram"] for partial in partials], axis=0)
        if histogram.sum() != settings.n:
            raise ValueError(f"{histogram.sum()} draws counted instead of {settings.n}")
        selected = next(partial["selected"] for partial in partials if "selected" in partial)
        k = int(histogram[selected])
        p_lower = float(clopper_pearson_lower(k, settings.n, settings.alpha))
        certified = p_lower > 0.5
        return Verdict(
            prediction=selected if certified else ABSTAIN,
            selected=selected,
            k=k,
            n=settings.n,
            p_lower=p_lower,
            radius=float(settings.smoothing.radius(p_lower)),
            histogram=tuple(int(count) for count in histogram),
        )


class TargetRadius:
    """Early stopping: exact tests of the target radii at planned looks; certifies those only."""

    spending = "alpha*sqrt(n/cap), exact binomial"
    units = 1

    def __init__(self, settings: CertifySettings, batch: int) -> None:
        self._settings = settings
        self._batch = batch
        self._p0 = _hypotheses(settings)
        self._looks = planned_looks(settings.n, batch)

    def work(self, sampler: Counter, x: Tensor, index: int, low: int, high: int) -> Partial:
        settings = self._settings
        selected = select(sampler, settings, x, index)
        test = TargetTest(self._p0, settings.alpha, self._looks, FUTILE)
        hits = block = place = 0
        for place, look in enumerate(self._looks):
            while block * self._batch < look:
                counts = _block(sampler, settings, self._batch, x, index, block)
                hits += int(counts[selected])
                block += 1
            if test.look(place, hits):
                break
        return {
            "selected": selected,
            "k": hits,
            "n": self._looks[place],
            "looks": place + 1,
            "passed": test.passed(),
        }

    def verdict(self, partials: Sequence[Partial]) -> Verdict:
        (partial,) = partials
        passed = partial["passed"]
        last = max(passed - 1, 0)
        return Verdict(
            prediction=partial["selected"] if passed else ABSTAIN,
            selected=partial["selected"],
            k=partial["k"],
            n=partial["n"],
            p_lower=self._p0[last] if passed else 0.0,
            radius=self._settings.radii[last] if passed else 0.0,
            looks=partial["looks"],
            target=self._settings.radii[last],
        )


class Anytime:
    """A confidence sequence: stops when every radius is decided, and may be re-bounded later."""

    spending = "beta mixture, 1/alpha"
    units = 1

    def __init__(self, settings: CertifySettings, batch: int) -> None:
        self._settings = settings
        self._batch = batch
        self._p0 = _hypotheses(settings)

    def work(self, sampler: Counter, x: Tensor, index: int, low: int, high: int) -> Partial:
        settings = self._settings
        selected = select(sampler, settings, x, index)
        hits = draws = block = passed = 0
        while draws < settings.n:
            counts = _block(sampler, settings, self._batch, x, index, block)
            hits += int(counts[selected])
            draws += int(counts.sum())
            block += 1
            while passed < len(self._p0) and beta_mixture_rejects(
                hits, draws, self._p0[passed], settings.alpha
            ):
                passed += 1
            if self._p0 and (
                passed == len(self._p0)
                or clopper_pearson_upper(hits, draws, FUTILE) <= self._p0[passed]
            ):
                break
        return {"selected": selected, "k": hits, "n": draws, "looks": block}

    def verdict(self, partials: Sequence[Partial]) -> Verdict:
        (partial,) = partials
        settings = self._settings
        p_lower = float(anytime_lower(partial["k"], partial["n"], settings.alpha))
        return Verdict(
            prediction=partial["selected"] if p_lower > 0.5 else ABSTAIN,
            selected=partial["selected"],
            k=partial["k"],
            n=partial["n"],
            p_lower=p_lower,
            radius=float(settings.smoothing.radius(p_lower)),
            looks=partial["looks"],
            target=settings.radii[-1] if settings.radii else None,
        )


PROCEDURES: dict[str, type[FixedDraws] | type[TargetRadius] | type[Anytime]] = {
    "fixed": FixedDraws,
    "target": TargetRadius,
    "anytime": Anytime,
}


def _hypotheses(settings: CertifySettings) -> tuple[float, ...]:
    """p0 of each radius, a hair above the exact one so that rounding cannot favour a radius."""
    exact = [settings.smoothing.probability_for_radius(radius) for radius in settings.radii]
    return tuple(p + (1 - p) * 1e-9 for p in exact)

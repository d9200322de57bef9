"""A Renyi filter: what may be spent on the same records when runs are chosen by earlier results.

A composed epsilon holds for runs that were all fixed beforehand. Whoever looks at a result and then
chooses the next run can pick, for every result, the run that does most harm with it: each choice
composes to (epsilon, delta), all together do not. A sum that is capped in advance survives this, if
it is a sum of ONE number per run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from dpdist.privacy.guarantee import Guarantee, Neighbours
from dpdist.privacy.phases import Phase, data_alternatives, walk

# Whole orders: sampled Gaussians have a closed form there.
_ORDERS = (*range(2, 65), *(2**k for k in range(7, 15)))


@dataclass(frozen=True)
class RenyiFilter:
    """Runs whose Renyi divergences at `order` add up to at most `share`, whatever each was chosen
    by, are together (epsilon, delta)-differentially private.

    Feldman and Zrnic 2021 (individual accounting via a Renyi filter), with one order fixed in
    advance: "some order suffices" is no filter. The conversion is Canonne, Kamath and Steinke 2020,
    Proposition 12. `fixed` chooses order and share.
    """

    epsilon: float
    delta: float
    neighbours: Neighbours
    order: int
    share: float

    @classmethod
    def fixed(cls, epsilon: float, delta: float, neighbours: Neighbours) -> RenyiFilter:
        """The filter of a ceiling, at the order where most Gaussian noise fits under it.

        Raises ValueError for a ceiling that no order reaches.
        """
        if not (math.isfinite(epsilon) and epsilon > 0 and 0 < delta < 1):
            raise ValueError(f"not a ceiling: epsilon {epsilon} at delta {delta}")
        order = max(_ORDERS, key=lambda a: (epsilon - _conversion(a, delta)) / a)
        share = epsilon - _conversion(order, delta)
        if share <= 0:
            raise ValueError(f"no Renyi order proves epsilon {epsilon:g} at delta {delta:g}")
        return cls(epsilon, delta, neighbours, order, share)

    def cost(self, phases: Sequence[Phase], records: int) -> float:
        """Renyi divergence of phases at the filter's order: of the worst path a record may take.

        Raises dpdist.privacy.accounting.Unsupported when no bound is known.
        """
        return _divergence(tuple(phases), records, self.neighbours, self.order)

    def epsilon_of(self, spent: float) -> float:
        """What a sum fixed in advance at `spent` would promise."""
        return max(0.0, spent + _conversion(self.order, self.delta))

    def guarantee(self, spent: float, size_public: bool) -> Guarantee:
        """The ceiling: it holds from the first run on, however little is spent.

        A sum above the share (restarts cost more than was reserved) is stated as it is.
        """
        from dpdist.privacy import accounting

        lines = [
            "every release of these records is on this budget",
            "each run was executed as planned",
        ]
        if spent > self.share:
            lines.append("restarts, which carried the sum above its share, followed no result")
        return Guarantee(
            self.epsilon if spent <= self.share else self.epsilon_of(spent),
            self.delta,
            self.neighbours,
            "proved",
            f"Renyi filter of order {self.order} ({accounting.library_version()})",
            tuple(lines),
            size_public,
        )

    def __str__(self) -> str:
        return f"epsilon {self.epsilon!r} at delta {self.delta!r}, {self.neighbours}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; the fields are the arguments."""
        return asdict(self)


@lru_cache(maxsize=1024)  # every charge is counted anew with each new one
def _divergence(
    phases: tuple[Phase, ...], records: int, neighbours: Neighbours, order: int
) -> float:
    from dpdist.privacy import accounting

    several = any(phase.weighs_orders for phase in walk(phases))
    orders = sorted({*accounting.QUICK_ORDERS, order}) if several else [order]
    at = orders.index(order)
    paths = data_alternatives(phases, records, neighbours)
    curves = [accounting.compose_rdp(path, neighbours, orders).rdp for path in paths]
    return max((float(curve[at]) for curve in curves), default=0.0)


def _conversion(order: int, delta: float) -> float:
    """epsilon - Renyi divergence."""
    return math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)

"""Events the accounting library lacks. Import only where dp_accounting is needed anyway."""

from __future__ import annotations

from dataclasses import dataclass

import dp_accounting as dpa


@dataclass(frozen=True)
class WorstOfDpEvent(dpa.DpEvent):
    """One of `events`, chosen without the data: costs the pointwise maximum of their Renyi curves.

    max_order: the curves count up to this order only, and any mechanism whose curve lies below the
    maximum there is covered as well. None: all orders.
    """

    events: list[dpa.DpEvent]
    max_order: float | None = None

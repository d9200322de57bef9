"""Events the accounting library lacks. Import only where dp_accounting is needed anyway."""

from __future__ import annotations

from dataclasses import dataclass

import dp_accounting as dpa


@dataclass(frozen=True)
class WorstOfDpEvent(dpa.DpEvent):
    """One of `events`, chosen without the data: costs the pointwise maximum of their profiles and
    of `floor`, or, where that is 0, of their Renyi curves.

    floor: a delta; any mechanism whose profile stays below the maximum is covered as well.
    """

    events: list[dpa.DpEvent]
    floor: float = 0.0

"""A phase of a plan: something that reads the records, described by itself.

Its class says how it is stored, which dp_accounting events price it, what must hold for the price
to be true and how it reads in a card. A new kind is a subclass of `Phase` and a line of
`dpdist.privacy.catalogue`: nobody asks which kind a phase is.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from dpdist.privacy.guarantee import Neighbours

if TYPE_CHECKING:
    import dp_accounting as dpa
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    from dpdist.privacy.releases import GaussianSteps

Sequences = tuple[tuple["Phase", ...], ...]
Reader = Callable[[Sequence[dict[str, Any]]], tuple["Phase", ...]]


class Phase(ABC):
    """One part of a plan. Subclasses are frozen dataclasses whose fields are their JSON form.

    kind: its name in JSON. capped: what it costs depends on the true number of records.
    weighs_orders: its Renyi divergence at one order follows from those at others as well.
    """

    kind: ClassVar[str]
    weighs_orders: ClassVar[bool] = False

    # --- its price

    @abstractmethod
    def events(self, records: int) -> list[dpa.DpEvent]:
        """One event per path that a record may take through it, in a data set of `records`."""

    @property
    def inner(self) -> Sequences:
        """The sequences of phases it is made of, if it is made of phases."""
        return ()

    @property
    def settings(self) -> Sequences:
        """The sequences of which one is run in its place; most phases are their only setting."""
        return ((self,),)

    @property
    def capped(self) -> bool:
        return False

    @property
    def priced_by_profile(self) -> bool:
        """Whether its price is computed from nothing but its hockey-stick profile, so that it
        covers every mechanism whose profile does not rise above."""
        return False

    @property
    def loop(self) -> GaussianSteps | None:
        """What of it the training loop executes; None: it is charged in full from the start."""
        return None

    def taken(self, steps: int) -> tuple[Phase, ...]:
        """What was released of it when the training loop took so many of its steps."""
        loop = self.loop
        return (replace(loop, steps=steps),) if loop is not None and steps else ()

    @property
    def pays_for(self) -> int:
        """How many answers it pays for beside the loop, one at a time (votes before it, what models
        are asked after it): the ledger counts each before its noise is drawn."""
        return 0

    @property
    def units(self) -> int | None:
        """How many releases it plans that are charged one by one; None: it is charged at once."""
        return None

    def at(self, units: int) -> tuple[Phase, ...]:
        """What was released of it: so many units, or all of it so many times."""
        return self.times(units) if units else ()

    @property
    def unproved(self) -> str | None:
        """Why no theorem covers it; None where one does."""
        return None

    def refused(self, neighbours: Neighbours) -> str | None:
        """Why it cannot be accounted under this relation; None where it can."""
        return None

    def times(self, runs: int) -> tuple[Phase, ...]:
        """It, `runs` times over."""
        return (self,) * runs

    def at_most(self, other: Phase) -> bool:
        """Whether it is a post-processing of `other`: every accountant then agrees that it costs no
        more."""
        return self == other

    def group_loss(self, size: int, grid: float) -> tuple[PrivacyLossDistribution, int] | None:
        """The exact loss of `size` records that come or go together, and the number of releases
        composed in it; None where no exact one is known."""
        return None

    # --- its words

    @property
    @abstractmethod
    def words(self) -> str:
        """It in a sentence, for readers of a card: nothing that must stay secret."""

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What must hold for its price to be true, besides what must hold for its inner phases."""
        return ()

    # --- JSON

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `phase_from_dict` inverts it. Infinity becomes "inf"."""
        values = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]
        return {"kind": self.kind, **values}

    @classmethod
    def read(cls, values: dict[str, Any], phases: Reader) -> Phase:
        """From its fields in JSON. phases: reads a list of phases. Raises ValueError, TypeError or
        KeyError."""
        return cls(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, Phase):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return "inf" if value == math.inf else value


# --- sequences --------------------------------------------------------------------------------


def walk(phases: Sequence[Phase]) -> Iterator[Phase]:
    """Every phase, after the phases that it is made of."""
    for phase in phases:
        for sequence in phase.inner:
            yield from walk(sequence)
        yield phase


def sequence_alternatives(phases: Sequence[Phase], records: int) -> list[dpa.DpEvent]:
    """Paths through phases that run one after the other (adaptively) on the same data."""
    return compose_alternatives([phase.events(records) for phase in phases])


def data_alternatives(
    phases: Sequence[Phase], records: int, neighbours: Neighbours
) -> list[dpa.DpEvent]:
    """Paths through phases for a data set of `records` records and every neighbour of it.

    The loss of a capped batch depends on the number of OTHER records: one fewer than `records` when
    a record is removed, all of them when one is added. Raises dpdist.privacy.losses.Unsupported for
    a phase that cannot be accounted under the relation, whoever charged it under which.
    """
    refused = [why for phase in walk(phases) if (why := phase.refused(neighbours)) is not None]
    if refused:
        from dpdist.privacy.losses import Unsupported

        raise Unsupported(refused[0])
    paths = sequence_alternatives(phases, records)
    if neighbours == "add-or-remove-one" and any(phase.capped for phase in walk(phases)):
        paths += sequence_alternatives(phases, records + 1)
    return paths


def compose_alternatives(choices: Sequence[Sequence[dpa.DpEvent]]) -> list[dpa.DpEvent]:
    """Every way of choosing one event per entry, each composed in order."""
    import dp_accounting as dpa

    return [
        path[0] if len(path) == 1 else dpa.ComposedDpEvent(list(path))
        for path in itertools.product(*choices)
    ]

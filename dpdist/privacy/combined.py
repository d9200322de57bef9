"""Phases made of phases: on disjoint parts of the data, the best of several runs, one of several
settings."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dpdist.privacy.guarantee import Neighbours
from dpdist.privacy.phases import Phase, Reader, Sequences, sequence_alternatives
from dpdist.privacy.selection import SelectionLaw

if TYPE_CHECKING:
    import dp_accounting as dpa


@dataclass(frozen=True)
class ParallelParts(Phase):
    """Mechanisms on disjoint parts of the data: a record pays only for the part it lies in.

    parts: one sequence of phases per part. The partition must not depend on other records, and each
    record must lie in one part only (by identity, not by content).
    """

    kind: ClassVar[str] = "parallel-parts"
    parts: Sequences

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("ParallelParts needs at least one part")

    def events(self, records: int) -> list[dpa.DpEvent]:
        return [path for part in self.parts for path in sequence_alternatives(part, records)]

    @property
    def inner(self) -> Sequences:
        return self.parts

    def refused(self, neighbours: Neighbours) -> str | None:
        if neighbours == "add-or-remove-one":
            return None
        return (
            "parallel parts are accounted under add-or-remove-one only: a replaced record may "
            "change parts and then costs both"
        )

    @property
    def words(self) -> str:
        return f"on disjoint parts of the data: {_either(self.parts)}"

    @property
    def assumptions(self) -> tuple[str, ...]:
        return ("every record lies in one part only, whatever the other records are",)

    @classmethod
    def read(cls, values: dict[str, Any], phases: Reader) -> Phase:
        return cls(tuple(map(phases, values["parts"])))


@dataclass(frozen=True)
class RepeatAndSelect(Phase):
    """Run `phases` K times, release only the best run; K is secret and random.

    mean, shape: of K's law, see `dpdist.privacy.selection.SelectionLaw`. Costs the smaller of what
    `dpdist.privacy.best_of` and Papernot and Steinke 2022 (Theorems 2 and 6) prove.
    """

    kind: ClassVar[str] = "repeat-and-select"
    weighs_orders: ClassVar[bool] = True
    phases: tuple[Phase, ...]
    mean: float
    shape: float

    def __post_init__(self) -> None:
        SelectionLaw(self.mean, self.shape)  # its limits hold here

    def events(self, records: int) -> list[dpa.DpEvent]:
        from dp_accounting.dp_event import RepeatAndSelectDpEvent

        paths = sequence_alternatives(self.phases, records)
        return [RepeatAndSelectDpEvent(path, self.mean, self.shape) for path in paths]

    @property
    def inner(self) -> Sequences:
        return (self.phases,)

    @property
    def words(self) -> str:
        """A search's own number of runs stays secret; only its law is told."""
        law = SelectionLaw(self.mean, self.shape).describe()
        return f"the best of a secret random number of runs ({law}) of: {_either(self.inner)}"

    @property
    def assumptions(self) -> tuple[str, ...]:
        return ("the number of runs and all unselected runs stay secret",)

    @classmethod
    def read(cls, values: dict[str, Any], phases: Reader) -> Phase:
        return cls(phases(values["phases"]), float(values["mean"]), float(values["shape"]))


@dataclass(frozen=True)
class WorstOf(Phase):
    """One of several mechanisms, chosen without looking at the data; the choice may be public.

    Costs the pointwise maximum of the profiles of `choices` and of `floor`, a delta. With a floor
    nothing else prices it, so that it covers every mechanism whose profile does not rise above, in
    either direction, at any epsilon; Renyi curves would not do, as they do not order profiles.
    """

    kind: ClassVar[str] = "worst-of"
    choices: Sequences
    floor: float = 0.0

    def __post_init__(self) -> None:
        if not self.choices:
            raise ValueError("WorstOf needs at least one choice")
        if not 0 <= self.floor < 1:
            raise ValueError(f"floor must be in [0, 1), got {self.floor}")

    @property
    def priced_by_profile(self) -> bool:
        return self.floor > 0

    def events(self, records: int) -> list[dpa.DpEvent]:
        from dpdist.privacy.events import WorstOfDpEvent

        choices = [sequence_alternatives(choice, records) for choice in self.choices]
        return [WorstOfDpEvent(list(path), self.floor) for path in itertools.product(*choices)]

    @property
    def inner(self) -> Sequences:
        return self.choices

    @property
    def settings(self) -> Sequences:
        return self.choices

    @property
    def words(self) -> str:
        return f"a setting chosen without the data that costs at most: {_either(self.choices)}"

    @property
    def assumptions(self) -> tuple[str, ...]:
        return ("every setting that was tried costs at most as much as the one described",)

    @classmethod
    def read(cls, values: dict[str, Any], phases: Reader) -> Phase:
        if "max_order" in values:
            raise ValueError(
                "its search was priced by Renyi curves, which do not order what its trials cost; "
                "repeat it under another name"
            )
        return cls(tuple(map(phases, values["choices"])), values["floor"])


def _either(sequences: Sequences) -> str:
    return "; or ".join(" then ".join(phase.words for phase in phases) for phases in sequences)

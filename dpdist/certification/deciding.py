"""The job of `dpdist certify --decide`: inputs in a random order, until the set's answer is there.

What a visit finds is a pure function of input, keyed noise and cap, and the answer that of the
visits in their canonical order: a visit that comes too early waits for those before it, and what
was done beyond the answer is not counted. So the table is the same on any number of workers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dpdist import bulk
from dpdist.bulk.job import Book, Cut, Item, Piece, Row, Task
from dpdist.certification import decided
from dpdist.certification.certificate import sample
from dpdist.certification.job import Certification, Data
from dpdist.certification.set_level import OPEN, Judge, LabelTest
from dpdist.certification.worker import Assignment, sampler_of

if TYPE_CHECKING:
    from dpdist.certification.decision import Decision

_ORDER = "order"  # the stage of the keys by which inputs are sorted
_AHEAD = 4  # visits that an actor is given beyond the ones it does


@dataclass(frozen=True)
class Visit:
    """An input, to be drawn until its test ends, at most `cap` times in all. place: in the
    order."""

    place: int
    index: int
    label: int
    cap: int
    x: np.ndarray


class Tester:
    """Called with a visit; returns its row of the table."""

    def __init__(self, shared: tuple[Assignment, LabelTest]) -> None:
        self._assignment, self._test = shared
        self._sampler = sampler_of(self._assignment)

    def __call__(self, visit: Visit) -> list[Row]:
        x, batch = torch.from_numpy(visit.x), self._assignment.executed.batch
        hits = draws = block = 0
        outcome = OPEN
        while outcome == OPEN and draws < visit.cap:
            counts = sample(self._sampler, x, visit.index, block, batch, visit.cap)
            hits, draws = hits + int(counts[visit.label]), draws + int(counts.sum())
            outcome, block = self._test.outcome(hits, draws), block + 1
        named = {"place": visit.place, "index": visit.index, "label": visit.label}
        return [named | {"hits": hits, "draws": draws, "outcome": outcome}]


class Testing(Task):
    """Visits in their order, round after round, as far as the answer needs them."""

    def __init__(
        self, shared: tuple[Assignment, LabelTest], data: Data, order: list[int],
        rounds: tuple[int, ...], judge: Judge,
    ) -> None:  # fmt: skip
        visits: dict[Item, tuple[int, int]] = {
            f"{index} up to {cap}": (index, cap) for cap in rounds for index in order
        }
        self._places = {index: place for place, index in enumerate(order)}
        weights = {name: int(cap == rounds[0]) for name, (_, cap) in visits.items()}
        rate, longest = shared[0].executed.rate, rounds[-1]
        silence = max(60.0, 10 * longest / rate)
        super().__init__(visits, Tester, shared, silence=silence, weights=weights)
        self._visits, self._data, self._labels = visits, data, np.asarray(data.labels)
        self._rounds, self._judge = rounds, judge
        self._waiting = iter(visits)  # for its turn in the canonical order
        self._next: Item | None = next(self._waiting)
        self.found: dict[int, Row] = {}  # of each input, in the order of the first round

    def cut(self, seconds: float) -> Cut:
        return replace(super().cut(seconds), ahead=_AHEAD)

    def chunk(self, pieces: list[Piece]) -> tuple[str, Visit]:
        (piece,) = pieces
        index, cap = self._visits[piece.item]
        x = np.array(self._data.batch(np.asarray([index])).numpy()[0])
        visit = Visit(self._places[index], index, int(self._labels[index]), cap, x)
        return str(piece.item), visit

    def effort(self, piece: Piece, partial: Any) -> int:
        return sum(row["draws"] for row in partial)

    def wanted(self, item: Item, rows: Mapping[Item, list[Row]]) -> bool:
        self.judged(rows)
        index, cap = self._visits[item]
        return self._judge.answer == OPEN and (cap == self._rounds[0] or self._open(index, cap))

    def unfinished(self, rows: Mapping[Item, list[Row]]) -> bool:
        self.judged(rows)
        return self._next is not None and self._judge.answer == OPEN

    def judged(self, rows: Mapping[Item, list[Row]]) -> None:
        """Take in the visits whose turn has come."""
        while self._next is not None and self._judge.answer == OPEN:
            index, cap = self._visits[self._next]
            first = cap == self._rounds[0]
            if first or self._open(index, cap):
                if self._next not in rows:
                    return
                (row,) = rows[self._next]
                (self._judge.first if first else self._judge.later)(row["outcome"])
                self.found[index] = row
            self._next = next(self._waiting, None)

    def _open(self, index: int, cap: int) -> bool:
        """Whether the earlier rounds left it so."""
        before = self._rounds[self._rounds.index(cap) - 1]
        found = self.found.get(index)
        return found is not None and found["outcome"] == OPEN and found["draws"] == before


class Deciding(Certification):
    """Of one question."""

    file, key, columns = decided.TABLE, decided.KEY, decided.COLUMNS
    schema, order = decided.SCHEMA, ("place",)

    def __init__(
        self, asked: Decision, model_folder: Path, dataset: Data, trusted_factory: str | None
    ) -> None:
        super().__init__(model_folder, dataset, asked.certificate, trusted_factory, gpus=0)
        self.kind = bulk.Kind("decision", "deciding", frozenset({"sensitivity", "radii"}))
        self.schema = decided.SCHEMA
        self._asked, assignment = asked, self._assignment
        # What one answer shows may suggest the next question, which must not be of the same draws,
        # even by the same seed.
        question = json.dumps(assignment.settings.identity | asked.identity, sort_keys=True)
        source = replace(assignment.source, purpose=f"decide {question}")
        self._assignment = replace(assignment, source=source)

    def identity(self) -> dict[str, Any]:
        found = super().identity()
        settings = found["settings"] | self._asked.identity
        return found | {"settings": settings, "inputs": len(self._indices)}

    def open(self, about: dict[str, Any], output: Path) -> Task:
        assignment, asked = self._pinned(about, output), self._asked
        judge = Judge(len(self._indices), Fraction(asked.share), asked.error)
        place: Any = assignment.place  # that of votes
        test = LabelTest(place.certified, asked.radius, judge.sides)
        order = sorted(self._indices, key=lambda index: assignment.source.key(index, _ORDER, 0))
        rounds = decided.caps(asked.certificate.n, assignment.executed.batch)
        return Testing((assignment, test), self._dataset, order, rounds, judge)

    def finish(self, book: Book, output: Path) -> list[Row]:
        task = book.task
        assert isinstance(task, Testing)
        task.judged(book.rows)
        return list(task.found.values())

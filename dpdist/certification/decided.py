"""The table of a question about a whole set, and the only reader of its answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa

from dpdist import bulk
from dpdist.base.errors import UserError
from dpdist.base.reading import check_shape
from dpdist.base.table_files import Column
from dpdist.certification.noises import NOISES, Gaussian
from dpdist.certification.quadrature import stated
from dpdist.certification.set_level import ANSWERS, FAILS, OPEN, PASSES, Judge, LabelTest

TABLE, KEY = "decision.parquet", b"dpdist.decision"
SCHEMA = pa.schema(
    [
        pa.field(name, pa.int64(), nullable=False)
        for name in ("place", "index", "label", "hits", "draws", "outcome")
    ]
)
COLUMNS: dict[str, Column] = {
    "place": (int, 0), "index": (int, 0), "label": (int, 0), "hits": (int, 0), "draws": (int, 1),
    "outcome": (int, FAILS),
}  # fmt: skip
_ABOUT = {
    "settings.share": str, "settings.radius": float, "settings.error": float, "settings.n": int,
    "settings.sigma": float, "settings.noise": str, "settings.batch": int, "inputs": int,
    "model": str,
}  # fmt: skip
_ROUNDS = (32, 4, 1)  # the cap of a round is n over this


@dataclass(frozen=True)
class Decided:
    """answer: PASSES (yes), FAILS (no) or OPEN. inputs: of the set; seen: of them; passing,
    failing: shown to; draws: of all inputs together."""

    path: Path
    model: str
    share: str
    radius: float
    norm: str
    error: float
    answer: int
    inputs: int
    seen: int
    passing: int
    failing: int
    draws: int

    @property
    def line(self) -> tuple[str, str]:
        """Name and value, as a summary shows it."""
        asked = f"accuracy >= {self.share} at {self.norm.upper()} {self.radius:.15g}"
        return (
            f"of all {self.inputs:,} inputs chosen, {asked}",
            f"{ANSWERS[self.answer]} ({self.terms})",
        )

    @property
    def terms(self) -> str:
        seen = f"{self.seen:,} of {self.inputs:,} inputs, {self.draws:,} draws"
        if self.answer == OPEN:
            return f"{self.passing:,} pass, {self.failing:,} do not; {seen}"
        return f"probability {100 * (1 - self.error):.12g} %; {seen}"

    @property
    def stated(self) -> str:
        """What the answer says."""
        share = f"{100 * float(self.share):.12g} % of these inputs"
        return {
            PASSES: f"at least {share} are right, and stay so at every distance below the radius",
            FAILS: f"of fewer than {share} could the label's own probability certify the radius",
            OPEN: "nothing; with more draws (--n) it is another question, with an error of its own",
        }[self.answer]


def read_decision(path: Path) -> Decided:
    """The answer, made again from the counts. Raises UserError for a table that is damaged."""
    table = bulk.read_table(path, COLUMNS, KEY)
    about = check_shape(bulk.about_table(table, KEY, str(path)), str(path), _ABOUT)
    settings, inputs = about["settings"], about["inputs"]
    try:
        judge = Judge(inputs, Fraction(settings["share"]), settings["error"])
        noise = NOISES[settings["noise"]](settings["sigma"])
        both = stated(about, settings["sigma"])
        test = LabelTest(Gaussian(both.both) if both else noise, settings["radius"], judge.sides)
        rows = sorted(table.to_pylist(), key=lambda row: row["place"])
        sound = [row["place"] for row in rows] == list(range(len(rows))) and len(rows) <= inputs
        sound = sound and len({row["index"] for row in rows}) == len(rows)
        for row in rows:
            sound = sound and row["outcome"] == test.outcome(row["hits"], row["draws"])
    except (KeyError, ValueError, ZeroDivisionError):
        sound = False
    if not sound:
        raise UserError(f"{path}: damaged: its outcomes are not those of its counts")
    for first, outcome in replayed(rows, caps(settings["n"], settings["batch"])):
        (judge.first if first else judge.later)(outcome)
    return Decided(
        path, about["model"], settings["share"], settings["radius"], noise.norm,
        settings["error"], judge.answer, inputs, judge.seen, judge.shown[PASSES],
        judge.shown[FAILS], sum(row["draws"] for row in rows),
    )  # fmt: skip


def caps(n: int, batch: int) -> tuple[int, ...]:
    """Draws of an input at the end of each round: whole blocks, but for the last."""
    rounded = (min(n, -(-n // (part * batch)) * batch) for part in _ROUNDS)
    return tuple(dict.fromkeys(rounded))


def replayed(rows: Sequence[dict[str, Any]], rounds: Sequence[int]) -> Iterator[tuple[bool, int]]:
    """Whether it was in the first round, and the outcome then, of every visit in its order."""
    before = 0
    for number, cap in enumerate(rounds):
        for row in rows:
            if row["draws"] > before:
                yield number == 0, row["outcome"] if row["draws"] <= cap else OPEN
        before = cap

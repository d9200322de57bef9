"""The only reader of attacks and of checks of certificates, and what is printed of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpdist import bulk
from dpdist.attacks.plausible import plausibility
from dpdist.attacks.table import (
    ANSWERS,
    CHECK_COLUMNS,
    CHECK_TABLE,
    INDEPENDENT,
    KEY,
    MEAN_SCORES,
    SUBMITTED,
    VOTES,
    about,
    read,
)
from dpdist.base.errors import UserError
from dpdist.base.fields import MOST
from dpdist.base.reading import check_shape, read_json, shown
from dpdist.base.rounding import exact, percent
from dpdist.certification.verdict import ABSTAIN
from dpdist.randomness.places import PLACES, Place

NONE = "none"
VERDICT = "check.json"
_CHECK = {
    "plausible": bool, "contradictions": int, "certified": int, "inputs": int, "alpha": float,
    "allowed": int, "p_value": float, "certificates": str,
}  # fmt: skip


@dataclass(frozen=True)
class Shares:
    """Of the inputs: answered rightly, not answered, answered with another class; together 1.

    Only the last refutes anything: a randomised classifier that abstains has not decided between
    two classes, and its most likely one may be the right one. So what a model withstands is at most
    right + abstained, but for the error of each answer.
    """

    right: float
    abstained: float
    wrong: float

    def percent(self) -> list[str]:
        return [percent(share) for share in (self.right, self.abstained, self.wrong)]


@dataclass(frozen=True)
class AttackTable:
    """One evaluation under attack. Arrays of equal length, one entry per attack, size and input.

    noise: the kind of the place where the attacked classifier is random; sigma: of its input noise,
    or None. numbers: coordinates of one input. model, data: what names both. votes: whether
    the classifier answered by votes of draws, or by their mean scores.
    """

    path: Path
    norm: str
    noise: str
    sigma: float | None
    steps: int
    restarts: int
    draws: int
    n: int
    alpha: float
    model: str
    data: str
    numbers: int
    attack: np.ndarray
    size: np.ndarray
    index: np.ndarray
    label: np.ndarray
    prediction: np.ndarray
    votes: bool = True

    @property
    def name(self) -> str:
        return self.path.parent.name

    @property
    def attacks(self) -> list[str]:
        return [name for name in dict.fromkeys(self.attack.tolist()) if name != NONE]

    @property
    def sizes(self) -> list[float]:
        return sorted({float(size) for size in self.size[self.attack != NONE]})

    @property
    def inputs(self) -> int:
        return len(np.unique(self.index))

    def shares(self, attack: str, size: float) -> Shares:
        """What became of the inputs under one attack. Raises ValueError where it was not made."""
        here = (self.attack == attack) & (self.size == size)
        if not here.any():
            raise ValueError(f"{self.path}: no attack {attack} of size {size:g}")
        return self._shares(here)

    def worst(self, size: float) -> Shares:
        """Under all attacks of this size: right under each, wrong under one at least."""
        return self._shares((self.size == size) & (self.attack != NONE))

    def has(self, attack: str, size: float) -> bool:
        return bool(((self.attack == attack) & (self.size == size)).any())

    def _shares(self, here: np.ndarray) -> Shares:
        other = here & (self.prediction != self.label)
        wrong = set(self.index[other & (self.prediction != ABSTAIN)].tolist())
        abstained = set(self.index[other].tolist()) - wrong
        every = set(self.index[here].tolist())
        right = every - wrong - abstained
        return Shares(*(len(some) / len(every) for some in (right, abstained, wrong)))

    @property
    def classifier(self) -> str:
        """What was attacked, in words."""
        words = self.place.words(self.sigma)
        by = "" if self.votes else f" by their {MEAN_SCORES}"
        return f"{words}: {self.n:,} draws per answer{by}" if self.place.random else words

    @property
    def place(self) -> type[Place]:
        return PLACES[self.noise]

    @property
    def certified_as(self) -> tuple[str, float | None]:
        """What a certificate of the same classifier says of its noise."""
        return self.place.certified_as, self.sigma


def read_attack(path: Path) -> AttackTable:
    """One attacks.parquet. Raises UserError when it is none, or not of its settings."""
    columns = read(path)
    said = about(columns)
    settings, noise = said["settings"], {"sigma": None, **said["noise"]}
    check_shape(noise, str(path), {"sigma": float | None})
    if noise["kind"] not in PLACES:
        raise UserError(f"{path}: damaged: no such place of noise: {shown(noise['kind'])}")
    table = AttackTable(
        path=path,
        norm=settings["norm"],
        noise=noise["kind"],
        sigma=noise["sigma"],
        steps=settings["steps"],
        restarts=settings["restarts"],
        draws=settings["draws"],
        n=settings["n"],
        alpha=settings["alpha"],
        model=said["model"],
        data=said["data"],
        numbers=numbers_of(said["input_shape"], path),
        votes=said.get(ANSWERS, VOTES) == VOTES,
        attack=np.array(columns["attack"].to_pylist()),
        **{name: columns[name].to_numpy() for name in ("size", "index", "label", "prediction")},
    )
    bulk.check_labels(said, table.index, table.label, path)
    if not table.has(NONE, 0.0):
        raise UserError(f"{path}: damaged: has no answers without an attack")
    return table


def numbers_of(shape: list[Any], where: Path) -> int:
    """How many numbers an input of this shape has. Raises UserError when it is no shape."""
    if not shape or not all(type(size) is int and size >= 1 for size in shape):
        raise UserError(f"{where}: damaged: input_shape must be sizes >= 1, got {shown(shape)}")
    return math.prod(shape)


def read_check(path: Path) -> dict[str, Any]:
    """Return one check.json, with the hash of its model, after it was made again from the points
    that were tried.

    Raises:
        UserError: it or the table beside it is missing or damaged, or it is not the verdict on
            these points.
    """
    stated = read_json(path, _CHECK)
    made, model = _verdict(path.with_name(CHECK_TABLE), stated)
    for name, value in made.items():
        same = stated[name] == value
        if isinstance(value, float):
            same = math.isclose(stated[name], value, rel_tol=1e-9, abs_tol=1e-300)
        if not same:
            raise UserError(
                f"{path}: damaged: {name} must be {value}, as {CHECK_TABLE} beside it says, got "
                f"{shown(stated[name])}; remove the folder and check again"
            )
    return {**stated, "name": path.parent.name, "model": model, "path": path}


def _verdict(path: Path, stated: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return what the table of a check says of its certificates, and the model's hash. stated: what
    tables of early versions do not say."""
    table = bulk.read_table(path, CHECK_COLUMNS, KEY)
    said = {SUBMITTED: stated["inputs"], INDEPENDENT: True, **about(table)}
    shape = {"model": str, "again.alpha": float, SUBMITTED: int, INDEPENDENT: bool}
    check_shape(said, str(path), shape)
    index, certified, prediction = (
        table[name].to_numpy() for name in ("index", "certified", "prediction")
    )
    attacks = sorted(set(table["attack"].to_pylist()))
    inputs, against = np.unique(index), (prediction != ABSTAIN) & (prediction != certified)
    whole = len(attacks) * len(inputs) == table.num_rows
    if not whole or table["contradiction"].to_pylist() != against.tolist():
        raise UserError(f"{path}: damaged: its rows are not one for each attack and input")
    if not len(inputs) <= said[SUBMITTED] <= MOST or not 0 < said["again"]["alpha"] < 1:
        raise UserError(f"{path}: damaged: no such number of certificates, or no such alpha")
    verdict = plausibility(
        len(np.unique(index[against])),
        said[SUBMITTED],
        said["again"]["alpha"],
        len(attacks),
        independent=said[INDEPENDENT],
    )
    found = {
        "plausible": verdict.plausible, "contradictions": verdict.contradictions,
        "certified": len(inputs), "inputs": verdict.inputs, "alpha": said["again"]["alpha"],
        "allowed": verdict.allowed, "p_value": verdict.p_value,
    }  # fmt: skip
    return found, said["model"]


def attack_line(table: AttackTable) -> str:
    """What became of the inputs at each size, in one line."""
    at = "; ".join(f"{_worst_line(table, size)} at {exact(size)}" for size in table.sizes)
    scope = f"{table.norm}, {', '.join(table.attacks)}, {table.inputs:,} inputs"
    return f"{at} ({scope}; {table.classifier})"


def _worst_line(table: AttackTable, size: float) -> str:
    right, abstained, wrong = table.worst(size).percent()
    undecided = ""
    if table.place.random or table.worst(size).abstained:  # the network itself: no finite logits
        undecided = f", {abstained} % abstained"
    return f"{right} % right{undecided}, {wrong} % wrong"


def check_line(check: dict[str, Any]) -> str:
    """A check of certificates in one line."""
    verdict = "plausible" if check["plausible"] else "IMPLAUSIBLE: these certificates do not hold"
    return (
        f"{check['contradictions']} of {check['certified']:,} certified inputs contradicted; "
        f"{check['inputs']:,} certificates at alpha = {check['alpha']:g} allow {check['allowed']} "
        f"(p = {check['p_value']:.3g}): {verdict}"
    )

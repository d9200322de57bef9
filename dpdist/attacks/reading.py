"""The only reader of attacks and of checks of certificates, and what is printed of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dpdist import bulk
from dpdist.attacks.plausibility import plausibility
from dpdist.attacks.table import (
    ANSWERS,
    CHECK_COLUMNS,
    CHECK_TABLE,
    CHECKED,
    KEY,
    MEAN_SCORES,
    VOTES,
    about,
    read,
)
from dpdist.base.binomial import two_sided_p_value
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
    _check_complete(table, settings)
    _check_answers(table, columns)
    return table


def _check_complete(table: AttackTable, settings: dict[str, Any]) -> None:
    """Raise UserError unless each chosen input has one row under every attack and size, in their
    order, with one label."""
    inputs = np.unique(table.index)
    start, every = settings.get("start", int(inputs[0])), settings.get("every", 1)
    wanted = inputs
    if type(start) is int and type(every) is int and "every" in settings:
        wanted = start + every * np.arange(len(inputs))
    whole = len(table.index) % len(inputs) == 0 and np.array_equal(inputs, wanted)
    if whole:
        shape = (-1, len(inputs))
        attack, size = table.attack.reshape(shape), table.size.reshape(shape)
        pairs = list(zip(attack[:, 0].tolist(), size[:, 0].tolist(), strict=True))
        whole = pairs == sorted(set(pairs)) and all(
            bool((one == other).all())
            for one, other in (
                (table.index.reshape(shape), inputs),
                (table.label.reshape(shape), table.label[: len(inputs)]),
                (attack, attack[:, :1]),
                (size, size[:, :1]),
            )
        )
    if not whole:
        raise UserError(
            f"{table.path}: damaged: must have one row for each input under every attack and size, "
            "in their order"
        )


def _check_answers(table: AttackTable, columns: pa.Table) -> None:
    """Raise UserError unless what each row says beside its answer is possible with it.

    Of the counts only the largest is kept: whose it is stays the publisher's own word.
    """
    hits, n, distance = (columns[name].to_numpy() for name in ("hits", "n", "distance"))
    random, answered = table.place.random, table.prediction != ABSTAIN
    none = table.attack == NONE
    sound = (n == (table.n if random else 1)) & (hits <= n)
    sound &= (distance <= table.size) & ((table.size == 0) == none)
    if not random:
        sound &= hits == answered
    elif table.votes:
        for count in np.unique(hits[sound]).tolist():
            here = hits == count
            second = min(count, table.n - count)  # at most so many said another class, or none
            if two_sided_p_value(count, count) > table.alpha:
                sound &= ~(here & answered)
            if two_sided_p_value(count, count + second) <= table.alpha:
                sound &= ~(here & ~answered)
    if not sound.all():
        row = int(sound.argmin())
        raise UserError(
            f"{table.path}: damaged: what it says of input {table.index[row]} under "
            f"{table.attack[row]} is not possible: its draws, distance and answer do not fit"
        )


def numbers_of(shape: list[Any], where: Path) -> int:
    """How many numbers an input of this shape has. Raises UserError when it is no shape."""
    if not shape or not all(type(size) is int and size >= 1 for size in shape):
        raise UserError(f"{where}: damaged: input_shape must be sizes >= 1, got {shown(shape)}")
    return math.prod(shape)


def read_check(path: Path) -> dict[str, Any]:
    """Return one check.json, whose figures are made again from the table of attacked points.

    Raises:
        UserError: one of the two is missing or damaged, or does not follow from the other.
    """
    stated = read_json(path, _CHECK)
    where = path.with_name(CHECK_TABLE)
    table = bulk.read_table(where, CHECK_COLUMNS, KEY)
    said = check_shape(about(table), str(where), {"again.alpha": float})
    attacks, contradicted, certified = _check_points(table, where)
    method, known = str(stated.get("method", "")), said.get(CHECKED)
    if known is None:  # begun by an earlier version, which did not say
        known = {name: stated[name] for name in ("inputs", "certificates")}
        known["noise_bank"] = method.startswith("Markov")
    shape = {"inputs": int, "noise_bank": bool, "certificates": str}
    check_shape(known, str(where), shape)
    if not certified <= known["inputs"] <= MOST:
        raise UserError(f"{path}: damaged: inputs must be at least the {certified} certified ones")
    verdict = plausibility(
        contradicted, known["inputs"], said["again"]["alpha"], attacks,
        independent=not known["noise_bank"],
    )  # fmt: skip
    made = {
        "contradictions": contradicted, "certified": certified, "inputs": known["inputs"],
        "alpha": said["again"]["alpha"], "plausible": verdict.plausible,
        "allowed": verdict.allowed, "certificates": known["certificates"],
    }  # fmt: skip
    for name, value in made.items():
        if stated[name] != value:
            raise UserError(
                f"{path}: damaged: {name} does not follow from {where.name}: it says "
                f"{shown(stated[name])}, computed again {shown(value)}"
            )
    return {**stated, "p_value": verdict.p_value, "name": path.parent.name}


def _check_points(table: pa.Table, where: Path) -> tuple[int, int, int]:
    """Return the numbers of attacks, of contradicted inputs and of attacked ones in a table of
    attacked points. Raises UserError for rows that do not follow from their answers."""
    names = ("index", "certified", "radius", "distance", "selected", "prediction")
    index, certified, radius, distance, selected, answer = (table[n].to_numpy() for n in names)
    attack, inputs = np.array(table["attack"].to_pylist()), np.unique(index)
    other = (answer != ABSTAIN) & (answer != certified)
    sound = len(index) % len(inputs) == 0
    if sound:
        shape = (-1, len(inputs))
        each = attack.reshape(shape)
        sound = each[:, 0].tolist() == sorted(set(each[:, 0])) and all(
            bool((whole.reshape(shape) == whole[: len(inputs)]).all())
            for whole in (index, certified, radius)
        )
        sound = sound and bool(
            (each == each[:, :1]).all() and (index[: len(inputs)] == inputs).all()
        )
        sound = sound and bool(((answer == ABSTAIN) | (answer == selected)).all())
        sound = sound and bool((distance <= radius).all())
        sound = sound and table["contradiction"].to_pylist() == other.tolist()
    if not sound:
        raise UserError(
            f"{where}: damaged: must have one row for each certified input under every attack, in "
            "their order, each with what follows from its answer"
        )
    return len(index) // len(inputs), len(np.unique(index[other])), len(inputs)


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

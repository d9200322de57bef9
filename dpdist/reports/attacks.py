"""Read a run's attacks: right, abstained and wrong against size, beside what is certified."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cluster.reading import read_json, shown
from dpdist.attacks import table as tables
from dpdist.certification.reading import CertificateTable
from dpdist.certification.verdict import ABSTAIN
from dpdist.errors import UserError

NONE = "none"
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
        return [_percent(share) for share in (self.right, self.abstained, self.wrong)]


@dataclass(frozen=True)
class AttackTable:
    """One evaluation under attack. Arrays of equal length, one entry per attack, size and input.

    noise: "none", "input" or "hidden", where the attacked classifier is random; sigma: of its
    input noise, or None. numbers: coordinates of one input. model, data: what names both.
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
        if self.noise == "input":
            return f"smoothed, sigma {self.sigma:g}: {self.n:,} draws per answer"
        if self.noise == "hidden":
            return f"noise in the first hidden layer: {self.n:,} draws per answer"
        return "the network itself"


@dataclass(frozen=True)
class Grid:
    """A table to show: the header and rows of text, percentages without their sign."""

    header: list[str]
    rows: list[list[str]]
    notes: list[str]


def read_attacks(folder: Path) -> list[AttackTable]:
    """All finished evaluations of a run; ``folder`` is its attacks/."""
    return [read_attack(path) for path in sorted(folder.glob("*/attacks.parquet"))]


def read_checks(folder: Path) -> list[dict[str, Any]]:
    """The verdict of each check of certificates, with its folder's ``name``."""
    return [read_check(path) for path in sorted(folder.glob("*/check.json"))]


def read_check(path: Path) -> dict[str, Any]:
    """One check.json. Raises UserError when it is missing or damaged."""
    return {**read_json(path, _CHECK), "name": path.parent.name}


def summary_rows(
    tables: Sequence[AttackTable], checks: Sequence[dict[str, Any]]
) -> list[tuple[str, str]]:
    """Name and value of each evaluation and check, for the summary of a run."""
    rows = []
    for table in tables:
        at = "; ".join(f"{_worst_line(table, size)} at {size:g}" for size in table.sizes)
        scope = f"{table.norm}, {', '.join(table.attacks)}, {table.inputs:,} inputs"
        rows.append((f"under attack, {table.name}", f"{at} ({scope}; {table.classifier})"))
    rows += [(f"certificates attacked, {c['certificates']}", check_line(c)) for c in checks]
    return rows


def _worst_line(table: AttackTable, size: float) -> str:
    right, abstained, wrong = table.worst(size).percent()
    undecided = "" if table.noise == "none" else f", {abstained} % abstained"
    return f"{right} % right{undecided}, {wrong} % wrong"


def check_line(check: dict[str, Any]) -> str:
    """A check of certificates in one line."""
    verdict = "plausible" if check["plausible"] else "IMPLAUSIBLE: these certificates do not hold"
    return (
        f"{check['contradictions']} of {check['certified']:,} certified inputs contradicted; "
        f"{check['inputs']:,} certificates at alpha = {check['alpha']:g} allow {check['allowed']} "
        f"(p = {check['p_value']:.3g}): {verdict}"
    )


def grid(table: AttackTable, certificates: Sequence[CertificateTable]) -> Grid:
    """What became of the inputs, in %: a row for each size and attack, and one for all attacks.

    Certified columns are of the same model and data, at the least radius that contains the attack's
    ball, on the inputs that both tables have.
    """
    beside = [(other, _common(table, other)) for other in certificates if _same(table, other)]
    beside = [(other, common) for other, common in beside if common.any()]
    header = [f"{table.norm} size", "attack", "right", "abstained", "wrong"]
    header += [f"certified {other.name}" for other, _ in beside]

    def certified(size: float) -> list[str]:
        shares = []
        for other, common in beside:
            radius = size * ball_factor(other.norm, table.norm, table.numbers)
            shares.append(_percent(float(np.mean((other.certified() >= radius)[common]))))
        return shares

    rows = [["0", NONE, *table.shares(NONE, 0.0).percent(), *certified(0.0)]]
    for size in table.sizes:
        done = [name for name in table.attacks if table.has(name, size)]
        found = [(name, table.shares(name, size)) for name in done]
        if len(done) > 1:
            found.append(("all of them", table.worst(size)))
        rows += [[f"{size:g}", name, *s.percent(), *certified(size)] for name, s in found]
    notes = [_note(table, other, int(common.sum())) for other, common in beside]
    return Grid(header, rows, notes)


def ball_factor(certified: str, attacked: str, numbers: int) -> float:
    """The certified radius that contains the attacked ball of size 1, in ``numbers`` dimensions.

    Raises ValueError for an unknown norm.
    """
    order = {"l1": 1.0, "l2": 2.0, "linf": math.inf}
    if certified not in order or attacked not in order:
        raise ValueError(f"norms must be l1, l2 or linf, got {certified!r} and {attacked!r}")
    p, q = order[certified], order[attacked]
    # ||x||_p <= n^(1/p - 1/q) ||x||_q for p <= q, and ||x||_p <= ||x||_q otherwise.
    return numbers ** (1 / p - 1 / q) if p < q else 1.0


def read_attack(path: Path) -> AttackTable:
    """One attacks.parquet. Raises UserError when it is none, or not of its settings."""
    columns = tables.read(path)
    about = tables.about(columns)
    settings = about["settings"]
    found = AttackTable(
        path=path,
        norm=settings["norm"],
        noise=about["noise"]["kind"],
        sigma=settings["sigma"],
        steps=settings["steps"],
        restarts=settings["restarts"],
        draws=settings["draws"],
        n=settings["n"],
        alpha=settings["alpha"],
        model=about["model"],
        data=about["data"],
        numbers=numbers_of(about["input_shape"], path),
        attack=np.array(columns["attack"].to_pylist()),
        **{name: columns[name].to_numpy() for name in ("size", "index", "label", "prediction")},
    )
    if not found.has(NONE, 0.0):
        raise UserError(f"{path}: damaged: has no answers without an attack")
    return found


def numbers_of(shape: list[Any], where: Path) -> int:
    """How many numbers an input of this shape has. Raises UserError when it is no shape."""
    if not shape or not all(type(size) is int and size >= 1 for size in shape):
        raise UserError(f"{where}: damaged: input_shape must be sizes >= 1, got {shown(shape)}")
    return math.prod(shape)


def _common(table: AttackTable, other: CertificateTable) -> np.ndarray:
    return np.isin(other.index, table.index)


def _same(table: AttackTable, other: CertificateTable) -> bool:
    """Whether both are of one model and one data set, so that an index names one input."""
    return (other.about.get("model"), other.about.get("data")) == (table.model, table.data)


def same_classifier(table: AttackTable, other: CertificateTable) -> bool:
    """Whether the attacked classifier is the certified one: model, data, kind of noise and scale.

    Attacks smooth by Gaussian noise, and take a model's own hidden noise, which is part of it.
    """
    if not _same(table, other):
        return False
    if table.noise == "hidden":
        return other.mode == "scores"
    attacked = (table.noise, table.sigma)
    return other.noise == "gaussian" and attacked == ("input", other.sigma)


def _note(table: AttackTable, other: CertificateTable, common: int) -> str:
    note = f"certified {other.name}: {common:,} of these inputs"
    if other.norm != table.norm:
        factor = ball_factor(other.norm, table.norm, table.numbers)
        note += f", {table.norm} size s by {other.norm} radius {factor:.4g} s"
    if not same_classifier(table, other):
        note += "; of another classifier than the attacked one (smoothed by that noise)"
    return note


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"

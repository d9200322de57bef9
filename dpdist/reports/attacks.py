"""Read a run's attacks: accuracy against size, beside what is certified, and checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cluster.reading import read_json, shown
from cluster.table_files import Column, read_table
from dpdist.errors import UserError

if TYPE_CHECKING:
    from dpdist.reports.facts import CertificateTable

NONE = "none"
_CHECK = {
    "plausible": bool, "contradictions": int, "certified": int, "inputs": int, "alpha": float,
    "allowed": int, "p_value": float, "certificates": str,
}  # fmt: skip
_SETTINGS = {
    "settings.norm": str, "settings.sigma": float | None, "settings.steps": int,
    "settings.restarts": int, "settings.draws": int, "settings.n": int, "settings.alpha": float,
    "noise.kind": str, "model": str, "dataset": str, "input_shape": list,
}  # fmt: skip
_COLUMNS: dict[str, Column] = {
    "attack": (str, None), "size": (float, 0), "index": (int, 0), "label": (int, 0),
    "prediction": (int, -1),
}  # fmt: skip


@dataclass(frozen=True)
class AttackTable:
    """One evaluation under attack. Arrays of equal length, one entry per attack, size and input.

    noise: "none", "input" or "hidden", where the attacked classifier is random; sigma: of its
    input noise, or None. numbers: coordinates of one input.
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

    def accuracy(self, attack: str, size: float) -> float:
        """Share of the inputs answered rightly under this attack; an abstention is not right."""
        return float(np.mean((self.prediction == self.label)[self._at(attack, size)]))

    def abstained(self, attack: str, size: float) -> float:
        """Share of the inputs on which the attacked classifier abstained."""
        return float(np.mean(self.prediction[self._at(attack, size)] < 0))

    def worst(self, size: float) -> float:
        """Share of the inputs answered rightly under every attack of this size."""
        here = (self.size == size) & (self.attack != NONE)
        failed = set(self.index[here & (self.prediction != self.label)].tolist())
        return 1 - len(failed) / self.inputs

    def _at(self, attack: str, size: float) -> np.ndarray:
        here = (self.attack == attack) & (self.size == size)
        if not here.any():
            raise ValueError(f"{self.path}: no attack {attack} of size {size:g}")
        return here

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
        at = ", ".join(f"{100 * table.worst(size):.2f} % at {size:g}" for size in table.sizes)
        scope = f"{table.norm}, {', '.join(table.attacks)}, {table.inputs:,} inputs"
        rows.append((f"under attack, {table.name}", f"{at} ({scope}; {table.classifier})"))
    rows += [(f"certificates attacked, {c['certificates']}", check_line(c)) for c in checks]
    return rows


def check_line(check: dict[str, Any]) -> str:
    """A check of certificates in one line."""
    verdict = "plausible" if check["plausible"] else "IMPLAUSIBLE: these certificates do not hold"
    return (
        f"{check['contradictions']} of {check['certified']:,} certified inputs contradicted; "
        f"{check['inputs']:,} certificates at alpha = {check['alpha']:g} allow {check['allowed']} "
        f"(p = {check['p_value']:.3g}): {verdict}"
    )


def grid(table: AttackTable, certificates: Sequence[CertificateTable]) -> Grid:
    """Accuracy in % against size; columns: each attack, all of them, abstentions, certified.

    Certified columns are of the same model, at the least radius that contains the attack's ball,
    on the inputs that both tables have.
    """
    beside = [(other, _common(table, other)) for other in certificates]
    beside = [(other, common) for other, common in beside if common.any() and _same(table, other)]
    attacks = table.attacks
    header = [f"{table.norm} size", *attacks, "worst"]
    random = table.noise != "none"
    header += ["abstained"] if random else []
    header += [f"certified {other.name}" for other, _ in beside]
    rows = []
    for size in (0.0, *table.sizes):
        if size == 0:
            clean = _percent(table.accuracy(NONE, 0.0))
            row = ["0", *[clean] * (len(attacks) + 1)]
            row += [_percent(table.abstained(NONE, 0.0))] if random else []
        else:
            row = [f"{size:g}"]
            done = [name for name in attacks if _has(table, name, size)]
            row += [_percent(table.accuracy(a, size)) if a in done else "" for a in attacks]
            row.append(_percent(table.worst(size)))
            row += [_percent(max(table.abstained(a, size) for a in done))] if random else []
        for other, common in beside:
            radius = size * ball_factor(other.norm, table.norm, table.numbers)
            right = other.correct & (other.radius >= radius)
            row.append(_percent(float(np.mean(right[common]))))
        rows.append(row)
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
    """One attacks.parquet, with the settings.json beside it."""
    columns = read_table(path, _COLUMNS)
    about = read_json(path.parent / "settings.json", _SETTINGS)
    settings = about["settings"]
    return AttackTable(
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
        data=about["dataset"],
        numbers=numbers_of(about["input_shape"], path.parent / "settings.json"),
        attack=np.array(columns["attack"].to_pylist()),
        **{name: columns[name].to_numpy() for name in ("size", "index", "label", "prediction")},
    )


def numbers_of(shape: list[Any], where: Path) -> int:
    """How many numbers an input of this shape has. Raises UserError when it is no shape."""
    if not shape or not all(type(size) is int and size >= 1 for size in shape):
        raise UserError(f"{where}: damaged: input_shape must be sizes >= 1, got {shown(shape)}")
    return math.prod(shape)


def _common(table: AttackTable, other: CertificateTable) -> np.ndarray:
    return np.isin(other.index, table.index)


def _same(table: AttackTable, other: CertificateTable) -> bool:
    return other.model == table.model


def _note(table: AttackTable, other: CertificateTable, common: int) -> str:
    note = f"certified {other.name}: {common:,} of these inputs"
    if other.norm != table.norm:
        factor = ball_factor(other.norm, table.norm, table.numbers)
        note += f", {table.norm} size s by {other.norm} radius {factor:.4g} s"
    same_noise = other.mode == "scores" if table.noise == "hidden" else other.sigma == table.sigma
    if not same_noise:
        note += "; of another classifier than the attacked one (smoothed by that noise)"
    return note


def _has(table: AttackTable, attack: str, size: float) -> bool:
    return bool(((table.attack == attack) & (table.size == size)).any())


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"

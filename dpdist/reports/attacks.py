"""A run's attacks: right, abstained and wrong against size, beside what is certified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from dpdist.attacks.reading import NONE, AttackTable
from dpdist.base.rounding import exact, percent
from dpdist.certification.certificate import CertificateTable
from dpdist.certification.radii import ball_factor


@dataclass(frozen=True)
class Grid:
    """A table to show: the header and rows of text, percentages without their sign."""

    header: list[str]
    rows: list[list[str]]
    notes: list[str]


def grid(
    table: AttackTable,
    certificates: Sequence[CertificateTable],
    called: Callable[[CertificateTable], str] = attrgetter("name"),
) -> Grid:
    """What became of the inputs, in %: a row for each size and attack, and one for all attacks.

    Certified columns are of the same model and data, at the least radius that contains the attack's
    ball, on the inputs that both tables have. called: what a certification is called.
    """
    beside = [(other, _common(table, other)) for other in certificates if _same(table, other)]
    beside = [(other, common) for other, common in beside if common.any()]
    header = [f"{table.norm} size", "attack", "right", "abstained", "wrong"]
    header += [f"certified {called(other)}" for other, _ in beside]

    def certified(size: float) -> list[str]:
        shares = []
        for other, common in beside:
            radius = size * ball_factor(other.norm, table.norm, table.numbers)
            shares.append(percent(float(np.mean((other.certified() >= radius)[common]))))
        return shares

    rows = [["0", NONE, *table.shares(NONE, 0.0).percent(), *certified(0.0)]]
    for size in table.sizes:
        done = [name for name in table.attacks if table.has(name, size)]
        found = [(name, table.shares(name, size)) for name in done]
        if len(done) > 1:
            found.append(("all of them", table.worst(size)))
        rows += [[exact(size), name, *s.percent(), *certified(size)] for name, s in found]
    notes = [f"certified {called(o)}: {_note(table, o, int(c.sum()))}" for o, c in beside]
    return Grid(header, rows, notes)


def _common(table: AttackTable, other: CertificateTable) -> np.ndarray:
    return np.isin(other.index, table.index)


def _same(table: AttackTable, other: CertificateTable) -> bool:
    """Whether both are of one model and one data set, so that an index names one input."""
    return (other.about.get("model"), other.about.get("data")) == (table.model, table.data)


def same_classifier(table: AttackTable, other: CertificateTable) -> bool:
    """Whether the attacked classifier is the certified one: model, data, kind of noise and scale,
    and whether it answers by votes of draws or by their mean scores.

    Attacks smooth by Gaussian noise, and take a model's own noise, which is part of it.
    """
    if not _same(table, other):
        return False
    return _same_noise(table, other) and table.votes == other.by_votes


def _same_noise(table: AttackTable, other: CertificateTable) -> bool:
    return table.certified_as == other.attacked_as


def _note(table: AttackTable, other: CertificateTable, common: int) -> str:
    note = f"{common:,} of these inputs"
    if other.norm != table.norm:
        factor = ball_factor(other.norm, table.norm, table.numbers)
        note += f", {table.norm} size s by {other.norm} radius {factor:.4g} s"
    if not same_classifier(table, other):
        by = "smoothed by that noise"
        if _same_noise(table, other):
            by = "that answers by " + ("votes" if other.by_votes else "mean scores")
        note += f"; of another classifier than the attacked one ({by})"
    return note

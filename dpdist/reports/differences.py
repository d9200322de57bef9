"""Runs against the first of them, on the same inputs: differences, and how sure they are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dpdist.base.errors import UserError
from dpdist.base.rounding import bound, exact, percent
from dpdist.certification.certificate import CertificateTable
from dpdist.certification.curves import CurveDifference, curve_difference
from dpdist.certification.paired import ERROR, Comparison, compare, difference_interval, holm
from dpdist.reports.compare import NORMS, markdown
from dpdist.reports.facts import MOST_INPUTS, Facts

_HEADER = (
    "run", "what", "size", "inputs", "{first}, %", "run, %", "difference", "interval",
    "all intervals", "only {first} : only run", "p", "p, Holm", "p, any time",
)  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """A later run against the first: what was compared, at which size ("" for plain accuracy)."""

    run: str
    what: str
    size: str
    found: Comparison


@dataclass(frozen=True, eq=False)
class PairedSizes:
    """Certified sizes of the same inputs, by the first run and by a later one: (N,), -1 where the
    answer is wrong. what: by which certificate, in which norm."""

    run: str
    what: str
    norm: str
    first: np.ndarray
    later: np.ndarray


def differences(
    runs: Sequence[Facts], sizes: Mapping[str, Sequence[float]]
) -> tuple[list[Difference], list[str]]:
    """Every later run against the first, in plain accuracy and at the sizes of each norm.

    Also what could not be compared, in words. Raises UserError for runs of which no inputs, no data
    set or no terms of certification are the same.
    """
    rows: list[Difference] = []
    notes: list[str] = []
    for later in runs[1:]:
        rows += _plain(runs[0], later, notes)
        for two in _certified(runs[0], later, notes):
            for size in sizes[two.norm]:
                found = compare(two.first >= size, two.later >= size)
                rows.append(Difference(two.run, two.what, exact(size), found))
    return rows, notes


def whole_curves(
    runs: Sequence[Facts], sizes: Mapping[str, Sequence[float]]
) -> list[tuple[PairedSizes, CurveDifference]]:
    """Every later run against the first, at every size up to the largest listed one: all sizes,
    certificates and runs together."""
    pairs = [two for later in runs[1:] for two in _certified(runs[0], later, []) if sizes[two.norm]]
    return [
        (two, curve_difference(two.first, two.later, max(sizes[two.norm]), ERROR / len(pairs)))
        for two in pairs
    ]


def curves_grid(curves: Sequence[tuple[PairedSizes, CurveDifference]]) -> list[list[str]]:
    """Header and rows of text, rounded so that no more is said than holds."""
    shown = [["run", "what", "sizes", "better", "worse", "difference, everywhere"]]
    for two, found in curves:
        everywhere = _interval(float(found.low.min()), float(found.high.max()))
        upto = f"up to {found.knots[-1]:.12g}"
        shown.append([two.run, two.what, upto, _at(found.ahead), _at(found.behind), everywhere])
    return shown


def _at(stretches: Sequence[tuple[float, float]]) -> str:
    inside = ((float(bound(a, 5, up=True)), float(bound(b, 5))) for a, b in stretches)
    return ", ".join(f"above {a:.12g} to {b:.12g}" for a, b in inside) or "nowhere"


def grid(first: str, rows: Sequence[Difference]) -> list[list[str]]:
    """Header and rows of text; differences and intervals in percentage points, rounded outwards."""
    shown = [[name.format(first=first) for name in _HEADER]]
    for row, corrected in zip(rows, holm([row.found.p_value for row in rows]), strict=True):
        it = row.found
        every = difference_interval(it.only_first, it.only_second, it.inputs, ERROR / len(rows))
        shown.append(
            [
                row.run, row.what, row.size, f"{it.inputs:,}", percent(it.first),
                percent(it.second), f"{100 * it.difference:+.2f}",
                _interval(it.low, it.high), _interval(*every),
                f"{it.only_first} : {it.only_second}",
                *(f"{p:.2g}" for p in (it.p_value, corrected, it.anytime)),
            ]
        )  # fmt: skip
    return shown


def _interval(low: float, high: float) -> str:
    ends = float(percent(low)) + 0.0, float(percent(high, up=True)) + 0.0  # + 0.0: never -0
    return f"{ends[0]:+.2f} to {ends[1]:+.2f}"


def section(runs: Sequence[Facts], sizes: Mapping[str, Sequence[float]]) -> list[str]:
    """Paragraphs of Markdown: `differences` as a table, what it claims, what it leaves out."""
    rows, notes = differences(runs, sizes)
    first = runs[0].folder.name
    if not rows:
        return notes
    return [
        markdown(grid(first, rows)),
        f"Each run less {first}, on the inputs of both, in percentage points. Interval: wrong with "
        f"probability at most {100 * ERROR:g} % (exact binomial bounds, conservative); all "
        f"intervals: any of the {len(rows)} with probability at most that, so a curve over sizes, "
        "or several runs, are compared as a whole. p: exact "
        f"two-sided McNemar; Holm: corrected for the {len(rows)} rows above; any time: valid "
        "however often one looks while inputs are added in the table's order.",
        "Claimed for the population that these inputs are a sample of, and for these trained "
        "models, not for other trainings of the same recipes. Certificates are taken as made: each "
        "may be wrong with its own alpha.",
        *_curves_section(runs, sizes, first),
        *notes,
    ]


def _curves_section(
    runs: Sequence[Facts], sizes: Mapping[str, Sequence[float]], first: str
) -> list[str]:
    curves = whole_curves(runs, sizes)
    if not curves:
        return []
    return [
        markdown(curves_grid(curves)),
        f"Whole curves: each run less {first} at every size, between those listed too. Any of this "
        f"table is wrong with probability at most {100 * ERROR:g} %: all sizes, certificates and "
        "runs together.",
    ]


def _plain(first: Facts, later: Facts, notes: list[str]) -> list[Difference]:
    two = []
    for facts in (first, later):
        if not facts.evaluation:
            return []
        if "next_tokens" in facts.evaluation:
            notes.append(
                f"Next tokens of {later.folder.name} are not compared one by one: those of a "
                "document are not independent; repeat the runs and compare perplexities."
            )
            return []
        two.append(_right(facts))
    if first.evaluation["fingerprint"] != later.evaluation["fingerprint"]:  # type: ignore[index]
        _refuse(first, later, "they were evaluated on different data")
    return [Difference(later.folder.name, "plain accuracy", "", compare(two[0], two[1]))]


def _right(facts: Facts) -> np.ndarray:
    """Whether each input was answered rightly, bool (N,). Raises UserError when damaged."""
    about = facts.evaluation or {}
    inputs = about["inputs"]
    try:
        wrong = sorted({int(index) for index in about["wrong"].split()})
        sound = 1 <= inputs <= MOST_INPUTS and about["accuracy"] == (inputs - len(wrong)) / inputs
        sound = sound and all(0 <= index < inputs for index in wrong[:1] + wrong[-1:])
    except (AttributeError, KeyError, ValueError):
        sound = False
    if not sound or not isinstance(about.get("fingerprint"), str):
        raise UserError(f"{facts.folder.evaluation}: damaged: its wrong inputs are not its own")
    right = np.ones(inputs, dtype=bool)
    right[wrong] = False
    return right


def _pairs(
    first: Facts, later: Facts, notes: list[str]
) -> Iterator[tuple[CertificateTable, CertificateTable]]:
    """Of each terms of certification in both runs, the two tables with the most common inputs."""
    matched = set()
    for mine in first.tables:
        others = [other for other in later.tables if other.terms == mine.terms]
        rivals = [table for table in first.tables if table.terms == mine.terms]
        if not others or mine is not rivals[0]:
            continue
        found = max(itertools.product(rivals, others), key=lambda two: len(_common(*two)[0]))
        matched |= {id(table) for table in (*rivals, *others)}
        yield found
    if first.tables and later.tables and not matched:
        closest = min((_differing(a, b) for a in first.tables for b in later.tables), key=len)
        _refuse(first, later, f"their certificates differ in {', '.join(closest)}")
    for facts in (first, later):
        names = [table.name for table in facts.tables if id(table) not in matched]
        if names:
            notes.append(
                f"Not compared: {', '.join(names)} of {facts.folder.name} (the other run has no "
                "certificates on these terms)."
            )


def _differing(mine: CertificateTable, other: CertificateTable) -> list[str]:
    terms, others = mine.terms, other.terms
    return [
        f"{name} ({terms.get(name)} and {others.get(name)})"
        for name in {**terms, **others}
        if terms.get(name) != others.get(name)
    ]


def _common(mine: CertificateTable, other: CertificateTable) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the inputs that both tables have, by index, in its order; none of other data."""
    data = mine.about.get("data")
    if data is None or data != other.about.get("data"):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    _, own, others = np.intersect1d(mine.index, other.index, return_indices=True)
    return own, others


def _certified(first: Facts, later: Facts, notes: list[str]) -> Iterator[PairedSizes]:
    """What both runs certify of the same inputs, by the same certificates on the same terms."""
    for mine, other in _pairs(first, later, notes):
        if mine.terms["noise_bank"]:
            raise UserError(
                f"{mine.path}: its inputs share one noise bank: they are no independent sample"
            )
        own, others = _common(mine, other)
        if not len(own):
            raise UserError(
                f"{mine.path} and {other.path}: no input in common, or not of the same data set"
            )
        if (mine.label[own] != other.label[others]).any():
            raise UserError(f"{mine.path} and {other.path}: different labels for the same inputs")
        numbers = math.prod(later.input_shape)
        for norm in NORMS:
            two = [table.kind.sizes_in(table.table, norm, numbers) for table in (mine, other)]
            by_name = {theirs.name: theirs for theirs in two[1]}
            for ours in two[0]:
                if not ours.holds:
                    continue
                if (theirs := by_name.get(ours.name)) is None:
                    continue
                yield PairedSizes(
                    later.folder.name,
                    f"{ours.title}, {NORMS[norm]}",
                    norm,
                    ours.certified(mine.label)[own],
                    theirs.certified(other.label)[others],
                )


def _refuse(first: Facts, later: Facts, why: str) -> None:
    raise UserError(
        f"{first.folder.name} and {later.folder.name}: no difference can be stated: {why}"
    )

"""From stored counts, without the model: other alphas, merged tables, what labels could reach."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dpdist import bulk
from dpdist.base.binomial import clopper_pearson_upper
from dpdist.base.errors import UserError
from dpdist.base.reading import check_shape
from dpdist.certification import reading
from dpdist.certification import table as tables
from dpdist.certification.catalogue import kind_of


def rebound(table: pa.Table, alpha: float) -> pa.Table:
    """The same counts, certified at another error probability (chosen without seeing the counts).

    Fixed-n counts get a new Clopper-Pearson bound, anytime counts a new confidence sequence, sums
    of scores a new bound of their kind. Raises UserError for results of early stopping: their
    stopping rule was built for one alpha and one radius, and says nothing else.
    """
    if not 0 < alpha < 1:
        raise UserError(f"alpha: must be between 0 and 1, got {alpha}")
    kind = kind_of(table)
    rows, notes = kind.rebound(table, alpha)
    return tables.build(
        rows, {**tables.about(table), "rebound_alpha": alpha, **notes}, kind.table_schema()
    )


# What may differ between tables of the same certification done in shares: the inputs; what was
# asked of the executed classifier, which is compared itself; what was seen of it on some inputs;
# and settings on which no result depends (`Certificate.free`).
_SHARE = ("start", "every", "max_inputs")
_ASKED = ("form", "batch", "generator")
_OF_CHECK = ("check", "notes")


def merge(parts: Sequence[pa.Table]) -> pa.Table:
    """One table from shares of one data set (different ``start``, ``every`` or ``max_inputs``).

    It shows the radii that any of them was to show. Raises UserError when they are not of the same
    model, data, classifier, settings and alpha, or when they have different results for the same
    input.
    """
    if not parts:
        raise UserError("nothing to merge")
    notes = [tables.about(part) for part in parts]
    rows: dict[int, dict[str, Any]] = {}
    for part in parts:
        if different := kept_apart_by(parts[0], part):
            raise UserError(f"cannot merge results that differ in {', '.join(different)}")
        for row in part.to_pylist():
            if rows.setdefault(row["index"], row) != row:
                raise UserError(f"cannot merge: two different results for input {row['index']}")
    seeds = sorted({seed for note in notes for seed in note.get("seeds", [note["seed"]])})
    settings = {k: v for k, v in notes[0]["settings"].items() if k not in _SHARE}
    if radii := sorted({radius for part in parts for radius in reading.of(part).radii}):
        settings["radii"] = radii
    classifier = {k: v for k, v in notes[0]["classifier"].items() if k != "check"}
    classifier["notes"] = sorted({why for note in notes for why in note["classifier"]["notes"]})
    about = notes[0] | {"settings": settings, "classifier": classifier}
    about |= {"seed": seeds[0], "seeds": seeds}
    if shares := _all_shares(notes):
        about["shares"] = shares
    if all(bulk.LABELS in note for note in notes):
        pairs = [(row["index"], row["label"]) for row in rows.values()]
        about[bulk.LABELS] = bulk.label_digest(*zip(*pairs, strict=True))
    else:
        about.pop(bulk.LABELS, None)
    return tables.build(list(rows.values()), about, parts[0].schema.remove_metadata())


def _all_shares(notes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return which inputs the merged tables hold, none where one does not say; in one order,
    whatever the order of the tables."""
    found: list[dict[str, Any]] = []
    for note in notes:
        if "seeds" in note and "shares" not in note:
            return []  # merged by a version that did not say
        share = {name: note["settings"][name] for name in _SHARE if name in note["settings"]}
        found += [each for each in note.get("shares", [share]) if each not in found]
    return sorted(found, key=lambda each: json.dumps(each, sort_keys=True))


def shares(parts: Sequence[pa.Table]) -> list[list[int]]:
    """Which of the tables (by place) are shares of one certification: groups of two and more.

    A merged table is no share. The same counts certified at another alpha are another one.
    """
    groups: dict[str, list[int]] = {}
    for place in _unmerged(parts):
        groups.setdefault(json.dumps(identity(parts[place]), sort_keys=True), []).append(place)
    return [group for group in groups.values() if len(group) > 1]


def apart(parts: Sequence[pa.Table]) -> list[tuple[int, int, list[str]]]:
    """The tables (by place) that `shares` leaves out though they are not merged ones, each with the
    nearest other one and by what it differs from that; the nearest first. None without another."""
    places, grouped = _unmerged(parts), {place for group in shares(parts) for place in group}
    found = []
    for place in places:
        if place not in grouped and len(places) > 1:
            others = ((o, kept_apart_by(parts[place], parts[o])) for o in places if o != place)
            found.append((place, *min(others, key=lambda other: len(other[1]))))
    return sorted(found, key=lambda left: len(left[2]))


def _unmerged(parts: Sequence[pa.Table]) -> list[int]:
    return [place for place, part in enumerate(parts) if "seeds" not in tables.about(part)]


def kept_apart_by(first: pa.Table, second: pa.Table) -> list[str]:
    """By what the two are no shares of one certification."""
    one, other = identity(first), identity(second)
    return sorted(k for k in one.keys() | other.keys() if one.get(k) != other.get(k))


_ABOUT = {"settings": dict, "classifier.notes": list, "model": str, "data": str}


def identity(table: pa.Table) -> dict[str, Any]:
    """What shares of one certification have in common."""
    note, found = tables.about(table), reading.of(table)
    if "settings" not in note:
        raise UserError("cannot merge a table that does not say what it was computed from")
    check_shape(note, "the table's description", _ABOUT)
    executed = {k: v for k, v in note["classifier"].items() if k not in _OF_CHECK}
    classifier = {f"classifier.{k}": v for k, v in executed.items()}
    unsaid = {*_SHARE, *_ASKED, *found.kind.free}
    settings = {k: v for k, v in note["settings"].items() if k not in unsaid}
    rebound = {name: note.get(name) for name in ("rebound_alpha", "rebound_bound")}
    about = {"model": note["model"], "data": note["data"], "alpha": found.alpha}
    whole = {**settings, **classifier, **rebound, **about}
    return {k: v for k, v in whole.items() if v is not None}  # or there was no such key yet


def label_reach(table: pa.Table) -> np.ndarray | None:
    """The radius R(u) that an upper bound u of each label's own probability could certify by the
    table's kind of certificate: float64 (N,).

    Each u is below that probability with probability at most the table's alpha, and R is rounded
    up; negative where there is none. None where the counts of all classes were not
    kept, as in the modes that stop early.
    """
    counted = table.select(["histogram", "label", "n", "alpha"]).to_pylist()
    if any(row["histogram"] is None for row in counted):
        return None
    hits = [row["histogram"][row["label"]] for row in counted]
    errors = [row["alpha"] for row in counted]
    upper = np.minimum(clopper_pearson_upper(hits, [row["n"] for row in counted], errors), 1.0)
    # It rounds down; here it must not.
    return kind_of(table).reach(table, upper) * (1 + 1e-11)

"""Read a table of certificates, recompute it at other errors, and merge tables.

Every printed certified accuracy comes from this reader. Recomputation and merging use the stored
counts alone, without the model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dpdist.certification import table as tables
from dpdist.certification.registry import kind_of_table
from dpdist.certification.table import CertificateTable
from dpdist.cluster import job_folder
from dpdist.core.binomial import clopper_pearson_upper
from dpdist.core.errors import UserError
from dpdist.core.fields import MAX_COUNT
from dpdist.core.files import check_shape, error_text, read_table

# --- the reader -------------------------------------------------------------------------------


# What one table states once: column, name among its settings.
_ONCE = {
    "alpha": "alpha", "sigma": "sigma", "mode": "mode", "noise": "noise", "norm": "norm",
    "n0": "n0", "cap": "n",
}  # fmt: skip


def read(path: Path) -> CertificateTable:
    """A finished table. Raises UserError when it is none, or states no one alpha, sigma or mode."""
    table = tables.read(path)
    found = from_arrow(table, path)
    if columns := found.kind.table_format.extra_columns():
        read_table(path, columns)
    try:
        found.kind.table_format.check(table, str(path))
    except (ValueError, ArithmeticError) as error:  # of what no certificate is computed
        raise UserError(
            f"{path}: damaged: its rows cannot be computed again: {error_text(error)}"
        ) from error
    check_complete(found)
    return found


def check_complete(certificates: CertificateTable) -> None:
    """Check that a table has a row for every input that its settings choose, and no others.

    Where a table does not say how many inputs there were, those it has must be the first that its
    settings choose. One that names no settings says nothing of what it should hold.

    Raises:
        UserError: an input is missing, or is there though it was not chosen.
    """
    about, have = certificates.job_record, np.sort(certificates.index)
    settings = about.get("settings", {})
    if "seeds" in about and "shares" not in about:  # merged by a version that did not say of what
        return
    chosen = [
        certificates.certificate_class.model_construct(start=start, every=every, max_inputs=most)
        for start, every, most in (
            _read_shard(share, certificates.path) for share in about.get("shares", [settings])
        )
    ]
    inputs = about.get("inputs")
    if inputs is None:
        if len(chosen) > 1 or not settings:
            return
        inputs = int(have[-1]) + 1
    elif type(inputs) is not int or not 0 < inputs <= MAX_COUNT:
        raise UserError(f"{certificates.path}: damaged: inputs must be a number of inputs")
    wanted = np.unique(np.concatenate([np.asarray(each.indices(inputs)) for each in chosen]))
    if np.array_equal(have, wanted):
        return
    missing, more = np.setdiff1d(wanted, have), np.setdiff1d(have, wanted)
    said = [f"lacks {len(missing):,} of the {len(wanted):,} inputs"] if len(missing) else []
    said += [f"holds {len(more):,} that were not chosen"] if len(more) else []
    first = int(min([*missing[:1], *more[:1]]))
    raise UserError(
        f"{certificates.path}: damaged: must have one row for each input that its settings choose, "
        f"{' and '.join(said)} (input {first}); certify again"
    )


def _read_shard(share: Any, path: Path) -> tuple[int, int, int | None]:
    """Return the first input, the step and the most inputs of a share."""
    given = share if isinstance(share, dict) else {"start": share}
    start, every, most = given.get("start", 0), given.get("every", 1), given.get("max_inputs")
    numbers = (start, every, 1 if most is None else most)
    if not all(type(number) is int and number <= MAX_COUNT for number in numbers) or not (
        start >= 0 and min(numbers[1:]) >= 1
    ):
        raise UserError(f"{path}: damaged: start, every and max_inputs must choose inputs")
    return start, every, most


def from_arrow(table: pa.Table, path: Path = Path("certificates/-")) -> CertificateTable:
    """Return a table in memory, checked. Raises as `read`; path: for messages and its name."""
    if not table.num_rows:
        raise UserError(f"{path}: no certificates in the table")
    about = tables.read_job_record(table)
    check_shape({"settings": {}, "seed": "", **about}, str(path), {"settings": dict, "seed": str})
    once = {column: _constant_value(table, about, column, path) for column in _ONCE}
    once["n"] = once.pop("cap")
    names = ("index", "label", "prediction", "radius")
    arrays = {name: table[name].to_numpy() for name in names}
    if len(np.unique(arrays["index"])) < table.num_rows:
        raise UserError(f"{path}: damaged: has more than one certificate of the same input")
    if not (np.diff(arrays["index"]) > 0).all():
        raise UserError(f"{path}: damaged: its rows must be in the order of their inputs")
    job_folder.check_labels(about, arrays["index"], arrays["label"], path)
    kind = kind_of_table(table, path)
    return CertificateTable(path=path, kind=kind, job_record=about, table=table, **once, **arrays)


def _constant_value(table: pa.Table, about: dict[str, Any], column: str, path: Path) -> Any:
    values = table[column].unique().to_pylist()
    if len(values) > 1:
        raise UserError(
            f"{path}: its rows differ in {column} ({', '.join(map(str, sorted(values)))}), so no "
            "one statement holds for all of them; merge or certify again"
        )
    stated = about.get("settings", {}).get(_ONCE[column], values[0])
    if column == "alpha":
        stated = about.get("rebound_alpha", stated)
    if stated != values[0]:
        raise UserError(
            f"{path}: damaged: its rows say {column} {values[0]}, its settings {stated}"
        )
    return values[0]


# --- recomputation and merging ----------------------------------------------------------------


def recertify(table: pa.Table, alpha: float) -> pa.Table:
    """The same counts, certified at another error probability (chosen without seeing the counts).

    Fixed-n counts get a new Clopper-Pearson bound, anytime counts a new confidence sequence, sums
    of scores a new bound of their kind. Raises UserError for results of early stopping: their
    stopping rule was built for one alpha and one radius, and says nothing else.
    """
    if not 0 < alpha < 1:
        raise UserError(f"alpha: must be between 0 and 1, got {alpha}")
    table_format = kind_of_table(table).table_format
    rows, notes = table_format.recertify(table, alpha)
    return tables.build(
        rows,
        {**tables.read_job_record(table), "rebound_alpha": alpha, **notes},
        table_format.schema(),
    )


# What may differ between tables of the same certification done in shares: the inputs; what was
# asked of the executed classifier, which is compared itself; what was seen of it on some inputs;
# and settings on which no result depends (`Certificate.result_free_fields`).
_SHARE = ("start", "every", "max_inputs")
_ASKED = ("form", "batch", "generator")
_OF_CHECK = ("check", "notes")


def merge_tables(parts: Sequence[pa.Table]) -> pa.Table:
    """One table from shares of one data set (different ``start``, ``every`` or ``max_inputs``).

    It shows the radii that any of them was to show. Raises UserError when they are not of the same
    model, data, classifier, settings and alpha, or when they have different results for the same
    input.
    """
    if not parts:
        raise UserError("nothing to merge")
    notes = [tables.read_job_record(part) for part in parts]
    rows: dict[int, dict[str, Any]] = {}
    for part in parts:
        if different := merge_conflicts(parts[0], part):
            raise UserError(
                f"cannot merge results that differ in {', '.join(different)}",
                see="how-to/certification.md#share-the-work-among-machines",
            )
        for row in part.to_pylist():
            if rows.setdefault(row["index"], row) != row:
                raise UserError(f"cannot merge: two different results for input {row['index']}")
    seeds = sorted({seed for note in notes for seed in note.get("seeds", [note["seed"]])})
    settings = {k: v for k, v in notes[0]["settings"].items() if k not in _SHARE}
    if radii := sorted({radius for part in parts for radius in from_arrow(part).radii}):
        settings["radii"] = radii
    classifier = {k: v for k, v in notes[0]["classifier"].items() if k != "check"}
    classifier["notes"] = sorted({why for note in notes for why in note["classifier"]["notes"]})
    about = notes[0] | {"settings": settings, "classifier": classifier}
    about |= {"seed": seeds[0], "seeds": seeds}
    if all({tables.INPUT_RANGE, tables.CLEAN_WRONG} <= note.keys() for note in notes):
        lows, highs = zip(*(note[tables.INPUT_RANGE] for note in notes), strict=True)
        about[tables.INPUT_RANGE] = [min(lows), max(highs)]
        wrong = {int(each) for note in notes for each in note[tables.CLEAN_WRONG].split()}
        about[tables.CLEAN_WRONG] = " ".join(map(str, sorted(wrong)))
    if shares := _all_shards(notes):
        about["shares"] = shares
    if all(job_folder.LABEL_DIGEST_KEY in note for note in notes):
        pairs = [(row["index"], row["label"]) for row in rows.values()]
        about[job_folder.LABEL_DIGEST_KEY] = job_folder.label_digest(*zip(*pairs, strict=True))
    else:
        about.pop(job_folder.LABEL_DIGEST_KEY, None)
    return tables.build(list(rows.values()), about, parts[0].schema.remove_metadata())


def _all_shards(notes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return which inputs the merged tables hold, none where one does not say; in one order,
    whatever the order of the tables."""
    found: list[dict[str, Any]] = []
    for note in notes:
        if "seeds" in note and "shares" not in note:
            return []  # merged by a version that did not say
        share = {name: note["settings"][name] for name in _SHARE if name in note["settings"]}
        found += [each for each in note.get("shares", [share]) if each not in found]
    return sorted(found, key=lambda each: json.dumps(each, sort_keys=True))


def shards_of_one_run(parts: Sequence[pa.Table]) -> list[list[int]]:
    """Return the groups of tables (by place) that are shares of one certification.

    A group has two and more.

    A merged table is no share. The same counts certified at another alpha are another one.
    """
    groups: dict[str, list[int]] = {}
    for place in _unmerged_indices(parts):
        groups.setdefault(json.dumps(merge_identity(parts[place]), sort_keys=True), []).append(
            place
        )
    return [group for group in groups.values() if len(group) > 1]


def unmerged_tables(parts: Sequence[pa.Table]) -> list[tuple[int, int, list[str]]]:
    """The tables (by place) that `shards_of_one_run` leaves out though they are not merged ones,
    each with the nearest other one and by what it differs from that; the nearest first. None
    without another."""
    places, grouped = (
        _unmerged_indices(parts),
        {place for group in shards_of_one_run(parts) for place in group},
    )
    found = []
    for place in places:
        if place not in grouped and len(places) > 1:
            others = ((o, merge_conflicts(parts[place], parts[o])) for o in places if o != place)
            found.append((place, *min(others, key=lambda other: len(other[1]))))
    return sorted(found, key=lambda left: len(left[2]))


def _unmerged_indices(parts: Sequence[pa.Table]) -> list[int]:
    return [
        place for place, part in enumerate(parts) if "seeds" not in tables.read_job_record(part)
    ]


def merge_conflicts(first: pa.Table, second: pa.Table) -> list[str]:
    """Return the differences by which the two are no shares of one certification."""
    one, other = merge_identity(first), merge_identity(second)
    return sorted(k for k in one.keys() | other.keys() if one.get(k) != other.get(k))


_ABOUT = {"settings": dict, "classifier.notes": list, "model": str, "data": str}


def merge_identity(table: pa.Table) -> dict[str, Any]:
    """Return the properties that shares of one certification have in common."""
    note, found = tables.read_job_record(table), from_arrow(table)
    if "settings" not in note:
        raise UserError("cannot merge a table that does not say what it was computed from")
    check_shape(note, "the table's description", _ABOUT)
    executed = {k: v for k, v in note["classifier"].items() if k not in _OF_CHECK}
    classifier = {f"classifier.{k}": v for k, v in executed.items()}
    unsaid = {*_SHARE, *_ASKED, *found.certificate_class.result_free_fields}
    settings = {k: v for k, v in note["settings"].items() if k not in unsaid}
    rebound = {name: note.get(name) for name in ("rebound_alpha", "rebound_bound")}
    about = {"model": note["model"], "data": note["data"], "alpha": found.alpha}
    whole = {**settings, **classifier, **rebound, **about}
    return {k: v for k, v in whole.items() if v is not None}  # or there was no such key yet


def achievable_label_radii(table: pa.Table) -> np.ndarray | None:
    """The radius R(u) that an upper bound u of each label's own probability could certify by the
    table's kind of certificate: float64 (N,).

    Each u is below that probability with probability at most the table's alpha, and R is rounded
    up; negative where there is none. None where no votes certify, and where the counts of all
    classes were not kept, as in the modes that stop early.
    """
    counted = table.select(["histogram", "label", "n", "alpha"]).to_pylist()
    if any(row["histogram"] is None for row in counted):
        return None
    hits = [row["histogram"][row["label"]] for row in counted]
    errors = [row["alpha"] for row in counted]
    upper = np.minimum(clopper_pearson_upper(hits, [row["n"] for row in counted], errors), 1.0)
    radius = kind_of_table(table).table_format.achievable_radius(table, upper)
    return None if radius is None else radius * (1 + 1e-11)  # it rounds down; here it must not

"""Read a table of certificates, and recompute it at other errors.

Every printed certified accuracy comes from this reader. Recomputation uses the stored counts alone,
without the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dpdist.certification import table as tables
from dpdist.certification.registry import class_of_table
from dpdist.certification.table import CertificateTable
from dpdist.cluster import job_folder
from dpdist.core.binomial import clopper_pearson_upper
from dpdist.core.errors import UserError
from dpdist.core.fields import MAX_COUNT
from dpdist.core.files import check_columns, check_shape, error_text

# --- the reader -------------------------------------------------------------------------------


# Columns with one value in a table, and their names in the settings.
_ONCE = {
    "alpha": "alpha", "sigma": "sigma", "mode": "mode", "noise": "noise", "norm": "norm",
    "n0": "n0", "cap": "n",
}  # fmt: skip


def read(path: Path) -> CertificateTable:
    """Return a finished table, with every row checked. Raises UserError if it is damaged."""
    return checked(tables.read(path), path)


def checked(table: pa.Table, path: Path) -> CertificateTable:
    """Return a table that was read from a path, with every row checked. Raises as `read`."""
    found = from_arrow(table, path)
    check_columns(table, found.certificate_class.extra_columns(), path)
    try:
        found.certificate_class.check_table(table, str(path))
    except (ValueError, ArithmeticError) as error:  # values for which no certificate is defined
        raise UserError(
            f"{path}: damaged: its rows cannot be computed again: {error_text(error)}"
        ) from error
    check_complete(found)
    return found


def check_complete(certificates: CertificateTable) -> None:
    """Check that a table has a row for every input that its settings choose, and no others.

    If a table does not state how many inputs there were, its own must be the first that its
    settings choose. A table without settings is not checked.

    Raises:
        UserError: an input is missing, or was not chosen.
    """
    about, have = certificates.job_record, np.sort(certificates.index)
    if not about.get("settings"):
        return
    inputs = about.get("inputs", int(have[-1]) + 1)
    if type(inputs) is not int or not 0 < inputs <= MAX_COUNT:
        raise UserError(f"{certificates.path}: damaged: inputs must be a number of inputs")
    wanted = np.asarray(certificates.read_settings().indices(inputs))
    if np.array_equal(have, wanted):
        return
    missing, more = np.setdiff1d(wanted, have), np.setdiff1d(have, wanted)
    first = int(min([*missing[:1], *more[:1]]))
    raise UserError(
        f"{certificates.path}: damaged: must have one row for each of the {len(wanted):,} inputs "
        f"that its settings choose, got {len(missing):,} missing and {len(more):,} others (input "
        f"{first}); certify again"
    )


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
    kind = class_of_table(table, path)
    return CertificateTable(
        path=path, certificate_class=kind, job_record=about, table=table, **once, **arrays
    )


def _constant_value(table: pa.Table, about: dict[str, Any], column: str, path: Path) -> Any:
    values = table[column].unique().to_pylist()
    if len(values) > 1:
        raise UserError(
            f"{path}: {column} must be the same in all rows, got "
            f"{', '.join(map(str, sorted(values)))}; certify again"
        )
    stated = about.get("settings", {}).get(_ONCE[column], values[0])
    if column == "alpha":
        stated = about.get("rebound_alpha", stated)
    if stated != values[0]:
        raise UserError(
            f"{path}: damaged: {column} must be {stated}, as its settings say, got {values[0]}"
        )
    return values[0]


# --- recomputation ----------------------------------------------------------------


def recertify(table: pa.Table, alpha: float) -> pa.Table:
    """Return a table of the same counts at a different error, chosen without seeing the counts.

    Fixed-n counts get a new Clopper-Pearson bound, anytime counts a new confidence sequence, sums
    of scores a new bound of their kind. Raises UserError for results of early stopping: their
    stopping rule is valid only for its own alpha and radii.
    """
    if not 0 < alpha < 1:
        raise UserError(f"alpha: must be between 0 and 1, got {alpha}")
    kind = class_of_table(table)
    made = {name: column.tolist() for name, column in kind.recertify(table, alpha).items()}
    rows = [
        row | {name: column[place] for name, column in made.items()} | {"alpha": alpha}
        for place, row in enumerate(table.to_pylist())
    ]
    about = {**tables.read_job_record(table), "rebound_alpha": alpha}
    return tables.build(rows, about, kind.table_schema())


def achievable_label_radii(table: pa.Table) -> np.ndarray | None:
    """Return the radius that an upper bound of each label's probability could certify.

    float64 (N,), rounded up, and negative if there is none. Each upper bound is below the
    probability with probability at most the table's alpha. None if certificates are not by votes,
    or if the counts of all classes were not kept, as in the modes that stop early.
    """
    counted = table.select(["histogram", "label", "n", "alpha"]).to_pylist()
    if any(row["histogram"] is None for row in counted):
        return None
    hits = [row["histogram"][row["label"]] for row in counted]
    errors = [row["alpha"] for row in counted]
    upper = np.minimum(clopper_pearson_upper(hits, [row["n"] for row in counted], errors), 1.0)
    radius = class_of_table(table).achievable_radius(table, upper)
    return None if radius is None else radius * (1 + 1e-11)  # it rounds down; here it must not

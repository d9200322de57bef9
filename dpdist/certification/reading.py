"""The one reader of a table of certificates: every printed certified accuracy comes from here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dpdist import bulk
from dpdist.base.errors import UserError
from dpdist.base.fields import MOST
from dpdist.base.reading import check_shape, reason
from dpdist.base.table_files import read_table
from dpdist.certification import table as tables
from dpdist.certification.catalogue import kind_of
from dpdist.certification.certificate import CertificateTable

# What one table states once: column, name among its settings.
_ONCE = {
    "alpha": "alpha", "sigma": "sigma", "mode": "mode", "noise": "noise", "norm": "norm",
    "n0": "n0", "cap": "n",
}  # fmt: skip


def read(path: Path) -> CertificateTable:
    """A finished table. Raises UserError when it is none, or states no one alpha, sigma or mode."""
    table = tables.read(path)
    found = of(table, path)
    if columns := found.kind.columns():
        read_table(path, columns)
    try:
        found.kind.check(table, str(path))
    except (ValueError, ArithmeticError) as error:  # of what no certificate is computed
        raise UserError(
            f"{path}: damaged: its rows cannot be computed again: {reason(error)}"
        ) from error
    check_complete(found)
    return found


def check_complete(found: CertificateTable) -> None:
    """Check that a table has a row for every input that its settings choose, and no others.

    Where a table does not say how many inputs there were, those it has must be the first that its
    settings choose. One that names no settings says nothing of what it should hold.

    Raises:
        UserError: an input is missing, or is there though it was not chosen.
    """
    about, have = found.about, np.sort(found.index)
    settings = about.get("settings", {})
    if "seeds" in about and "shares" not in about:  # merged by a version that did not say of what
        return
    chosen = [
        found.kind.model_construct(start=start, every=every, max_inputs=most)
        for start, every, most in (
            _share(share, found.path) for share in about.get("shares", [settings])
        )
    ]
    inputs = about.get("inputs")
    if inputs is None:
        if len(chosen) > 1 or not settings:
            return
        inputs = int(have[-1]) + 1
    elif type(inputs) is not int or not 0 < inputs <= MOST:
        raise UserError(f"{found.path}: damaged: inputs must be a number of inputs")
    wanted = np.unique(np.concatenate([np.asarray(each.indices(inputs)) for each in chosen]))
    if np.array_equal(have, wanted):
        return
    missing, more = np.setdiff1d(wanted, have), np.setdiff1d(have, wanted)
    said = [f"lacks {len(missing):,} of the {len(wanted):,} inputs"] if len(missing) else []
    said += [f"holds {len(more):,} that were not chosen"] if len(more) else []
    first = int(min([*missing[:1], *more[:1]]))
    raise UserError(
        f"{found.path}: damaged: must have one row for each input that its settings choose, "
        f"{' and '.join(said)} (input {first}); certify again"
    )


def _share(share: Any, path: Path) -> tuple[int, int, int | None]:
    """Return the first input, the step and the most inputs of a share."""
    given = share if isinstance(share, dict) else {"start": share}
    start, every, most = given.get("start", 0), given.get("every", 1), given.get("max_inputs")
    numbers = (start, every, 1 if most is None else most)
    if not all(type(number) is int and number <= MOST for number in numbers) or not (
        start >= 0 and min(numbers[1:]) >= 1
    ):
        raise UserError(f"{path}: damaged: start, every and max_inputs must choose inputs")
    return start, every, most


def of(table: pa.Table, path: Path = Path("certificates/-")) -> CertificateTable:
    """What a table in memory states. Raises as `read`; path: for messages and its name."""
    if not table.num_rows:
        raise UserError(f"{path}: no certificates in the table")
    about = tables.about(table)
    check_shape({"settings": {}, "seed": "", **about}, str(path), {"settings": dict, "seed": str})
    once = {column: _once(table, about, column, path) for column in _ONCE}
    once["n"] = once.pop("cap")
    names = ("index", "label", "prediction", "radius")
    arrays = {name: table[name].to_numpy() for name in names}
    if len(np.unique(arrays["index"])) < table.num_rows:
        raise UserError(f"{path}: damaged: has more than one certificate of the same input")
    if not (np.diff(arrays["index"]) > 0).all():
        raise UserError(f"{path}: damaged: its rows must be in the order of their inputs")
    bulk.check_labels(about, arrays["index"], arrays["label"], path)
    kind = kind_of(table, path)
    return CertificateTable(path=path, kind=kind, about=about, table=table, **once, **arrays)


def _once(table: pa.Table, about: dict[str, Any], column: str, path: Path) -> Any:
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

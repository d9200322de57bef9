"""Every single-field edit of every file of a release is refused, or is the publisher's own word.

After each edit all that follows from it is made again (pages, sums, what release.json says of a
table, a table's digest), as somebody would who wants to deceive; a signature would tell.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.folder_contents import changed_at
from test_release import (
    call,
    changed_table,
    copied,
    made,
    say_what_follows,
    work,
    write_pages,
)

from dpdist.certification import table as tables
from dpdist.core.errors import UserError
from dpdist.privacy.card import PRIVACY_CARD
from dpdist.release.files import DESCRIPTION, table_name
from dpdist.release.verify import verify_release

__all__ = ["call", "copied", "made", "work"]
pytestmark = pytest.mark.slow
TABLE = table_name(1)

# What `verify` cannot tell; a signature tells whose word it is.
_REASON_SUGGESTION = "a suggestion: the reader chooses how to certify"
_REASON_COUNTS = "until --redraw counts inputs again"
_REASON_MEASURED = "measured of the inputs, which no file of a release holds"
_REASON_RADII = "which radii are shown, each computed from the counts"
_REASON_TEST_DATA = "where the reader finds test data: --redraw loads them and compares"
_REASON_OTHER_RUNS = "of other runs and of faults, which the publisher's ledger holds"
_REASON_FREE_TEXT = "texts and assumptions that no phase implies"
UNVERIFIABLE_FIELDS: dict[str, dict[str, str]] = {
    DESCRIPTION: {
        **dict.fromkeys(
            (
                "certificate", "certificate.alpha", "certificate.n", "certificate.n0",
                "certificate.radii", "certificate.radii.*",
                "certificate.sigma",
            ),
            _REASON_SUGGESTION,
        ),
        **dict.fromkeys(
            ("data.columns.user", "data.columns.image", "data.columns.label", "data.test"),
            _REASON_TEST_DATA
        ),
        "license": "a decision",
        "name": "a name",
        **dict.fromkeys(
            ("tested", "tested.accuracy", "tested.data", "tested.inputs"),
            "clean accuracy, which no file holds the answers of",
        ),
    },
    PRIVACY_CARD: {
        **dict.fromkeys(("assumptions", "extra.model", "notes", "notes.*", "unit"),
            _REASON_FREE_TEXT),
        **dict.fromkeys(("plan", "reexecuted_releases"), _REASON_OTHER_RUNS),
    },
    "model.json": {},
    table_name(1): {
        **dict.fromkeys(
            (
                "about.classifier.batch", "about.classifier.check", "about.data", "about.inputs",
                "about.seed", "about.settings.batch", "histogram",
                "label",
            ),
            _REASON_COUNTS,
        ),
        **dict.fromkeys(("about.settings.radii", "about.settings.radii.*"), _REASON_RADII),
        **dict.fromkeys(
            ("about.clean_wrong", "about.input_range.*", "about.input_shape",
             "about.input_shape.*"),
            _REASON_MEASURED,
        ),
        **dict.fromkeys(
            ("about.classifier.machine", "about.classifier.torch_version"), "where it was counted"
        ),
    },
}  # fmt: skip
"""By file: fields of which a single edit passes (pages and sums made again), and why."""


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value[:2])
    for key, each in inner:
        yield (*path, key)
        if isinstance(each, dict | list):
            yield from leaves(each, (*path, key))


def others(value: Any) -> list[Any]:
    """Other values: of the same kind, and none."""
    if isinstance(value, bool):
        found = [not value]
    elif isinstance(value, int):
        found = [value + 1, max(0, value - 1)]
    elif isinstance(value, float):
        found = [value * 1.01 + 0.01, value / 2]
    elif isinstance(value, str):
        found = [f"{value} of mine", f"{value[:-1]}0"]
    elif isinstance(value, list):
        found = [value[:-1], [*value, *value[-1:]]]
        for place, each in enumerate(value):
            if isinstance(each, int) and each > 0:  # one less of what is counted
                found.append([*value[:place], each - 1, *value[place + 1 :]])
    else:
        found = ["x", 1]
    return [other for other in [*found, None] if other != value]


def found_at(value: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        value = value[part]
    return value


def said(path: tuple[Any, ...]) -> str:
    return ".".join("*" if isinstance(part, int) else part for part in path)


def believed(folder: Path, name: str, edit: Any) -> bool:
    """Whether the release passes after an edit, and all that follows from it."""
    again = shutil.copytree(folder, folder.with_name("again"), dirs_exist_ok=True)
    try:
        edit(again)
    except (pa.ArrowException, ValueError, TypeError):
        return False  # no table can hold it
    try:
        if name == TABLE:
            say_what_follows(again)
        write_pages(again)
    except (UserError, KeyError, TypeError, ValueError, AttributeError, IndexError):
        pass  # nobody could make pages of it; what is there is shown to verify
    try:
        verify_release(again)
    except UserError as error:
        assert "\n" not in str(error)
        return False
    return True


def edits_of_json(folder: Path, name: str) -> set[str]:
    whole, passed = json.loads((folder / name).read_text()), set()
    for path in leaves(whole):
        for value in others(found_at(whole, path)):

            def edit(again: Path, path: Any = path, value: Any = value) -> None:
                text = json.dumps(changed_at(whole, path, value), indent=2, sort_keys=True) + "\n"
                (again / name).write_text(text)

            if believed(folder, name, edit):
                passed.add(said(path))
    return passed


def edits_of_tables(folder: Path) -> set[str]:
    table, passed = tables.read(folder / TABLE), set()
    rows, about = table.to_pylist(), tables.read_job_record(table)
    for column, value in rows[3].items():
        for other in others(value):

            def edit(again: Path, at: str = column, to: Any = other) -> None:
                changed_table(again, lambda rows: rows[3].__setitem__(at, to))

            if believed(folder, TABLE, edit):
                passed.add(column)
    for path in leaves(about):
        for other in others(found_at(about, path)):

            def describe(again: Path, path: Any = path, to: Any = other) -> None:
                new = changed_at(about, path, to)
                changed_table(again, about=lambda said: (said.clear(), said.update(new)))

            if believed(folder, TABLE, describe):
                passed.add(f"about.{said(path)}")
    return passed


@pytest.mark.parametrize("name", [DESCRIPTION, PRIVACY_CARD, "model.json", TABLE])
def test_every_edit_is_refused_or_listed(copied, name):
    found = edits_of_tables(copied) if name == TABLE else edits_of_json(copied, name)
    assert found == set(UNVERIFIABLE_FIELDS[name])

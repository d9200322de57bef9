"""Which tests `make check` runs, by their markers, and what it says of those that it leaves out."""

from __future__ import annotations

import ast
import os
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.sources import marks_of

NIGHTLY = "nightly"  # marker of what `make nightly` alone runs
IS_NIGHT = bool(os.environ.get("DPDIST_NIGHTLY"))
LEFT_OUT = {"whole", "slow", "long", NIGHTLY}  # markers of what `make check` leaves out
GUARANTEE = "guarantee"


def first_cases(values: Iterable[Any], kept: int) -> list[Any]:
    """Return the cases of a parameter, of which those behind the first `kept` are long."""
    return [
        value if place < kept else pytest.param(value, marks=pytest.mark.long)
        for place, value in enumerate(values)
    ]


@cache
def markers_of(path: Path) -> set[str]:
    """Return the markers that a file's `pytestmark` gives to all its tests; it is not imported."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            several = isinstance(node.value, ast.List | ast.Tuple)
            return marks_of(node.value.elts if several else [node.value])
    return set()


def is_left_out(path: Path) -> bool:
    """Return whether `make check` leaves out a whole file."""
    return bool(markers_of(path) & LEFT_OUT)


def count(path: Path) -> tuple[int, int]:
    """Return how many test functions of a file `make check` runs, and how many there are."""
    found = [
        marks_of(node.decorator_list)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    left = sum(is_left_out(path) or bool(LEFT_OUT & marks) for marks in found)
    return len(found) - left, len(found)


def report(paths: Iterable[Path]) -> list[str]:
    """Return what `make check` says of these files: how much of them it runs, which guarantees."""
    counts = {path: count(path) for path in sorted(paths, key=lambda path: path.name)}
    carrying = {path: each for path, each in counts.items() if GUARANTEE in markers_of(path)}
    left = [path.stem.removeprefix("test_") for path, (run, _) in carrying.items() if not run]
    files = sum(run > 0 for run, _ in counts.values())
    return [
        f"{files} of {len(counts)} test files, {_share(counts.values())} test functions; left out "
        f"is what is marked {', '.join(sorted(LEFT_OUT))} (make test, make test-all, make nightly)",
        f"of a guarantee: {len(carrying) - len(left)} of {len(carrying)} files, "
        f"{_share(carrying.values())} test functions: "
        + ", ".join(_name(path, *each) for path, each in carrying.items() if each[0]),
        f"of a guarantee, wholly left out: {', '.join(left) or 'none'}",
    ]


def _share(counts: Collection[tuple[int, int]]) -> str:
    run, total = (sum(each[side] for each in counts) for side in (0, 1))
    return f"{run:,} of {total:,}"


def _name(path: Path, run: int, total: int) -> str:
    """Return a file's name, with how much of it is run where that is a part."""
    part = f" ({run} of {total})" if run < total else ""
    return path.stem.removeprefix("test_") + part

"""Read files for comparison with an earlier state, and damage them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpdist.cluster.object_store import ObjectStore


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file of a folder and of those in it, by name, in order."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def gone(path: Path) -> None:
    """Remove a file."""
    path.unlink()


def empty(path: Path) -> None:
    """Leave nothing in a file."""
    path.write_bytes(b"")


def half(path: Path) -> None:
    """Leave the first half of a file, as a torn write does."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def changed_at(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    """Return a copy of nested lists and dicts with another value at one place."""
    whole = inner = copy.deepcopy(value)
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = to
    return whole


def forge_manifest(store: ObjectStore, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the first manifest of an archive."""
    manifest = json.loads(store.get("00000001/manifest.json"))
    change(manifest)
    store.put("00000001/manifest.json", json.dumps(manifest).encode())

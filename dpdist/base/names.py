"""Names that come from outside (an archive's manifest, a job's log, a command line), kept inside.

A name is accepted as it is or not at all: nothing is normalised, so that what was checked is what
is used, on every file system.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from pathlib import Path

_LONGEST = 255  # bytes of one part of a path, on the usual file systems


def check_path(name: object, what: str = "path") -> str:
    """`name`, which is a path below a folder, its parts separated by single slashes.

    Raises ValueError for anything absolute, with '.' or '..' or empty parts, a backslash, a drive,
    or a character that does not print.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"{what}: must be a relative path, got {name!r}")
    parts = name.split("/")
    outside = any(part in ("", ".", "..") or part != part.strip() for part in parts)
    if outside or "\\" in name or ":" in parts[0] or not name.isprintable():
        raise ValueError(f"{what}: {name!r} is not a plain path below the folder")
    if any(len(part.encode()) > _LONGEST for part in parts):
        raise ValueError(f"{what}: {name[:40]!r}... is too long")
    return name


def check_paths(names: Iterable[object], what: str = "path") -> list[str]:
    """All of `names`, each as in `check_path`, no two of which would be one file anywhere.

    Raises ValueError also when two differ only by case or by how a character is composed, and when
    one is a folder of another.
    """
    paths = [check_path(name, what) for name in names]
    seen: dict[str, str] = {}
    for path in paths:
        key = _folded(path)
        if key in seen:
            raise ValueError(f"{what}: {path!r} and {seen[key]!r} are the same file on some disks")
        seen[key] = path
    for key, path in seen.items():
        parts = key.split("/")
        for end in range(1, len(parts)):
            above = seen.get("/".join(parts[:end]))
            if above is not None:
                raise ValueError(f"{what}: {above!r} cannot be a file and the folder of {path!r}")
    return paths


def place(folder: Path, path: str) -> Path:
    """Where a file of `path` (as in `check_path`) lies below `folder`; nothing is made.

    Raises ValueError when a link on the way leads elsewhere, or something else has the place.
    """
    target = folder
    for part in check_path(path).split("/"):
        if target.is_symlink() and target != folder:
            raise ValueError(f"{target} is a link; remove it")
        if target.exists() and not target.is_dir():
            raise ValueError(f"{target} is in the way, where a folder belongs; move it away")
        target = target / part
    if target.is_dir() and not target.is_symlink():
        raise ValueError(f"{target} is a folder, where a file belongs; move it away")
    return target


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFKC", path).casefold())

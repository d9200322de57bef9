"""What was decoded once is read as it was written, or not at all.

A folder of the cache is as private and as decisive as the files that it was made of: which records
are public, tested on or trained on follows from it. So its last file says what the others held.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from dpdist.base.errors import UserError
from dpdist.base.reading import read_json
from dpdist.base.storage import sync, write_json

_SUMS = "sums.json"


def seal(folder: Path) -> None:
    """Bring a folder's files to the disk, and say what they hold."""
    paths = sorted(folder.iterdir())
    for path in paths:
        sync(path)
    write_json(folder / _SUMS, {path.name: [*_seen(path), _digest(path)] for path in paths})


def check_sealed(folder: Path) -> None:
    """Raise UserError unless the files are those that were written. One whose size and time are
    still the same is not read again."""
    if not (folder / _SUMS).exists():
        raise damaged(folder / _SUMS)
    for name, said in read_json(folder / _SUMS).items():
        path = folder / name
        if not isinstance(said, list) or not path.is_file():
            raise damaged(path)
        if [*_seen(path), said[-1]] != said and _digest(path) != said[-1]:
            raise damaged(path)


def damaged(path: Path) -> UserError:
    """The complaint about a file of the cache."""
    return UserError(f"{path}: damaged; remove {path.parent}, which is made again of your data")


def _seen(path: Path) -> list[int]:
    info = os.stat(path)
    return [info.st_size, info.st_mtime_ns]


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()

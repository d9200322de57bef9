"""Which files a power cut leaves: what was synced, and the names on the way to it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dpdist.privacy.ledger import Anchor


def anchor_of(lines: bytes) -> Anchor:
    """The anchor of a journal's whole lines."""
    return Anchor(lines.count(b"\n"), json.loads(lines.splitlines()[-1])["check"])


class Disk:
    """Watches every fsync from when it is made; folders that are there already count as durable."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._content: dict[int, bytes] = {}
        self._names: dict[int, set[str]] = {}
        for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
            self._names[folder.stat().st_ino] = set(os.listdir(folder))
        real = os.fsync

        def fsync(descriptor: int) -> None:
            real(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.is_dir():
                self._names[path.stat().st_ino] = set(os.listdir(path))
            else:
                self._content[os.fstat(descriptor).st_ino] = path.read_bytes()

        patch.setattr(os, "fsync", fsync)

    def is_reachable(self, path: Path) -> bool:
        """Whether `path` can still be reached after a power cut."""
        way = [path, *path.parents]
        way = way[: way.index(self._root)]
        return all(each.name in self._names.get(each.parent.stat().st_ino, set()) for each in way)

    def surviving_bytes(self, path: Path) -> bytes | None:
        """The bytes of `path` that a power cut leaves at least; None where it leaves none."""
        return self._content.get(path.stat().st_ino) if self.is_reachable(path) else None

"""An append-only file of finished work: what was written survives ``kill -9`` of its writer."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any


class Journal:
    """One JSON value per line, each with its checksum; a torn last line is dropped on opening.

    ``sync`` makes what was appended durable against a power cut; without it a killed process still
    loses nothing, because each append reaches the operating system.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.entries, good = _read(self.path)
        self._file = open(self.path, "ab")  # noqa: SIM115 - closed by close()
        self._file.truncate(good)

    def append(self, entry: Any) -> None:
        text = json.dumps(entry, separators=(",", ":"))
        self._file.write(f"{zlib.crc32(text.encode()):08x} {text}\n".encode())
        self._file.flush()

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            self.sync()
            self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _read(path: Path) -> tuple[list[Any], int]:
    """Entries up to the first damaged line, and how many bytes they take."""
    entries: list[Any] = []
    good = 0
    if not path.exists():
        return entries, good
    with open(path, "rb") as file:
        for line in file:
            checksum, _, text = line.rstrip(b"\n").partition(b" ")
            if not line.endswith(b"\n") or checksum != f"{zlib.crc32(text):08x}".encode():
                break
            entries.append(json.loads(text))
            good += len(line)
    return entries, good

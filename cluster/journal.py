"""An append-only file of finished work: what was written survives ``kill -9`` of its writer."""

from __future__ import annotations

import fcntl
import json
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from dpdist.base.errors import ClusterError
from dpdist.base.reading import not_blocking

_LOCK_SECONDS = 2.0  # a writer that was just killed may need that long to be gone


class InUse(ClusterError):
    """Another process appends to the file."""


class OtherHeader(ClusterError):
    """The file's first line is not the one it must have."""


class Journal:
    """One JSON value per line, each with its checksum; a torn last line is dropped on opening.

    Holds an exclusive lock until ``close``, which the death of the process releases as well. Raises
    InUse when another process holds it. ``sync`` makes what was appended durable against a power
    cut; without it a killed process still loses nothing, because each append reaches the operating
    system.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _locked(self.path)
        self._earlier = 0  # bytes of undamaged lines
        for _, end in _lines(self.path):
            self._earlier = end
        self._file.truncate(self._earlier)
        self._begun = False

    @property
    def header(self) -> Any:
        """The first line, or None while there is none."""
        return next((json.loads(text) for text, _ in _lines(self.path)), None)

    def begin(self, header: Any) -> None:
        """Let `header` be the first line, no entry: written to an empty journal, else required.

        Raises OtherHeader when the first line is another.
        """
        found = self.header
        if found is None:
            self.append(header)
        elif found != header:
            raise OtherHeader(f"{self.path} does not begin with {header!r}")
        self._begun = True

    @property
    def entries(self) -> Iterator[Any]:
        """What the file held when it was opened, read one by one: it may be larger than memory."""
        for place, (text, end) in enumerate(_lines(self.path)):
            if end > self._earlier:
                return
            if place or not self._begun:
                yield json.loads(text)

    def append(self, entry: Any) -> None:
        text = json.dumps(entry, separators=(",", ":"), allow_nan=False)
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


def _locked(path: Path) -> IO[bytes]:
    """The file, opened to append and locked. Raises InUse."""
    deadline = time.monotonic() + _LOCK_SECONDS
    not_blocking(path)
    while True:
        file = open(path, "ab")  # noqa: SIM115 - closed by close()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                raise InUse(f"{path} is being written by another process") from None
        file.close()  # held, or removed meanwhile by who held it
        time.sleep(0.05)


def _lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """(text, where its line ends) up to the first damaged line."""
    end = 0
    with open(path, "rb") as file:
        for line in file:
            checksum, _, text = line.rstrip(b"\n").partition(b" ")
            if not line.endswith(b"\n") or checksum != f"{zlib.crc32(text):08x}".encode():
                return
            end += len(line)
            yield text, end

"""An append-only file of JSON records: durable, private, chained, one writer at a time.

One record per line; each line carries a hash that chains it to all earlier lines. A line torn by a
crash is dropped when the file is opened again, because its write never returned; any other damage
is an error.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from pathlib import Path
from typing import IO, Any, Self

_VERSION = 1
_LOCK_SECONDS = 15.0


class JournalError(RuntimeError):
    """The file is corrupt, of another kind, or in use by another process."""


class JournalBusy(JournalError):
    """Another process is writing the file; it may end soon."""


def _chain(previous: str, body: str) -> str:
    return hashlib.blake2b(f"{previous}\n{body}".encode(), digest_size=16).hexdigest()


def _encode(record: dict[str, Any]) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _parse(raw: bytes, path: Path) -> tuple[list[dict[str, Any]], str, int]:
    """(records, last hash, length in bytes of the intact part); drops a torn last line.

    A last line is torn when its newline is missing or a crash left zero bytes in it. Raises
    JournalError for any other damage.
    """
    records: list[dict[str, Any]] = []
    previous, intact = "", 0
    lines = raw.split(b"\n")
    complete, rest = lines[:-1], lines[-1]
    for number, line in enumerate(complete, start=1):
        try:
            entry = json.loads(line)
            if entry["check"] != _chain(previous, _encode(entry["record"])):
                raise ValueError("its check does not follow from the lines before it")
        except (ValueError, KeyError, TypeError) as error:
            if number == len(complete) and not rest.strip(b"\0") and b"\0" in line + rest:
                break
            raise JournalError(f"{path}, line {number}, is corrupt: {error}") from error
        records.append(entry["record"])
        previous = entry["check"]
        intact += len(line) + 1
    return records, previous, intact


class Journal:
    """The records of a file. `open` to append, `read` to look; `records` excludes the header."""

    def __init__(
        self, path: Path, records: list[dict[str, Any]], check: str, file: IO[bytes] | None
    ) -> None:
        self.path = path
        self.header = records[0] if records else {}
        self.records = records[1:]
        self._check = check
        self._file = file

    @classmethod
    def open(cls, path: str | Path, kind: str, header: dict[str, Any]) -> Journal:
        """Create the file with `header`, or load it; holds an exclusive lock until `close`.

        New folders and files are readable by their owner only. Raises JournalError if the file is
        corrupt, of another kind, or stays locked by another process for 15 seconds. That an
        existing header equals `header` is for the caller to check.
        """
        path = Path(path)
        created_folder = not path.parent.exists()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        file = os.fdopen(descriptor, "r+b", buffering=0)
        try:
            _lock(file, path)
            file.seek(0)
            records, check, intact = _parse(file.read(), path)
            file.truncate(intact)
            if records:
                _check_kind(records[0], kind, path)
                return cls(path, records, check, file)
            first = {**header, "kind": kind, "version": _VERSION}
            journal = cls(path, [first], "", file)
            journal._write(first)
            _sync_folder(path.parent)
            if created_folder:
                _sync_folder(path.parent.parent)
            return journal
        except BaseException:
            file.close()
            raise

    @classmethod
    def read(cls, path: str | Path, kind: str) -> Journal:
        """Load a file without locking it; it cannot be written. Raises JournalError, OSError."""
        path = Path(path)
        records, check, _ = _parse(path.read_bytes(), path)
        if not records:
            raise JournalError(f"{path} is empty: nothing was ever recorded in it")
        _check_kind(records[0], kind, path)
        return cls(path, records, check, None)

    def append(self, record: dict[str, Any]) -> None:
        """Add a record; it is on the disk when this returns. Raises JournalError if it is not."""
        self._write(record)
        self.records.append(record)

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            raise JournalError(f"{self.path} is not open for writing")
        body = _encode(record)
        check = _chain(self._check, body)
        line = f'{{"record":{body},"check":"{check}"}}\n'.encode()
        start = os.fstat(self._file.fileno()).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file.fileno(), line[written:])
            os.fsync(self._file.fileno())
        except OSError as error:
            # A half-written line would poison the chain; if it cannot be undone, stop writing.
            try:
                self._file.truncate(start)
            finally:
                self.close()
            raise JournalError(f"{self.path} could not be written: {error}") from error
        self._check = check

    def close(self) -> None:
        """Release the lock; further writes raise JournalError."""
        if self._file is not None:
            self._file.close()
            self._file = None


class OnJournal:
    """Base of what keeps its records in a journal: a context manager that releases its lock."""

    _journal: Journal

    def close(self) -> None:
        """Release the lock; further writes raise JournalError."""
        self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_kind(header: dict[str, Any], kind: str, path: Path) -> None:
    if header.get("kind") != kind or header.get("version") != _VERSION:
        raise JournalError(f"{path} is not a {kind} file of version {_VERSION}")


def _lock(file: IO[bytes], path: Path) -> None:
    """One writer at a time; a process that dies loses its lock."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise JournalBusy(f"{path} is being written by another process") from None
            time.sleep(0.1)


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

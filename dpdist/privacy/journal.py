"""An append-only file of JSON records: durable, private, chained, one writer at a time.

One record per line; each line carries a hash that chains it to all earlier lines. A line torn by a
crash is dropped when the file is opened again, because its write never returned; any other damage
is an error.

A chain cannot see that its end was cut off. So an anchor beside the file (NAME.anchor) says how
many lines were written and the last one's check. It is written after each line is durable: after a
crash it may lag behind the file, and it is never ahead of it. A file that does not go as far as its
anchor is an error.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Self

from dpdist.base.reading import not_blocking
from dpdist.base.storage import make_folder, sync

_VERSION = 2
_LOCK_SECONDS = 15.0
_TORN_READ_SECONDS = 0.05


class JournalError(RuntimeError):
    """The file is corrupt, of another kind, or in use by another process."""


class JournalBusy(JournalError):
    """Another process is writing the file; it may end soon."""


class JournalCut(JournalError):
    """The file lacks lines that were written to it."""


@dataclass(frozen=True)
class Anchor:
    """Names a state of a journal. records: its lines, header included. check: the last one's."""

    records: int
    check: str

    def __post_init__(self) -> None:
        whole = isinstance(self.records, int) and not isinstance(self.records, bool)
        if not whole or self.records < 1 or not isinstance(self.check, str):
            raise ValueError(f"not an anchor: {self.records!r}, {self.check!r}")

    @classmethod
    def of(cls, raw: bytes) -> Anchor:
        """The anchor of a journal's whole lines."""
        return cls(raw.count(b"\n"), json.loads(raw.splitlines()[-1])["check"])

    @classmethod
    def from_line(cls, line: str) -> Anchor:
        """Inverse of `line`. Raises ValueError."""
        records, _, check = line.removesuffix("\n").partition(" ")
        return cls(int(records), check)

    @property
    def line(self) -> str:
        """As it stands in the file: always of the same length, so that it is replaced in place."""
        return f"{self.records:012d} {self.check}\n"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def anchor_path(path: Path) -> Path:
    """Where the anchor of the journal `path` lies."""
    return path.with_suffix(".anchor")


def _chain(previous: str, body: str) -> str:
    return hashlib.blake2b(f"{previous}\n{body}".encode(), digest_size=16).hexdigest()


def _encode(record: dict[str, Any]) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _parse(raw: bytes, path: Path) -> tuple[list[dict[str, Any]], list[str], int]:
    """(records, their checks, length in bytes of the intact part); drops a torn last line.

    A last line is torn when its newline is missing or a crash left zero bytes in it. Raises
    JournalError for any other damage.
    """
    records: list[dict[str, Any]] = []
    checks: list[str] = []
    previous, intact = "", 0
    lines = raw.split(b"\n")
    complete, rest = lines[:-1], lines[-1]
    for number, line in enumerate(complete, start=1):
        try:
            entry = json.loads(line)
            if not isinstance(entry["record"], dict):
                raise TypeError("its record has no keys")
            if entry["check"] != _chain(previous, _encode(entry["record"])):
                raise ValueError("its check does not follow from the lines before it")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if number == len(complete) and not rest.strip(b"\0") and b"\0" in line + rest:
                break
            raise JournalError(f"{path}, line {number}, is corrupt: {error}") from error
        records.append(entry["record"])
        previous = entry["check"]
        checks.append(previous)
        intact += len(line) + 1
    return records, checks, intact


def _read_anchor(path: Path) -> Anchor | None:
    where = anchor_path(path)
    not_blocking(where)
    try:
        line = where.read_text()
        return Anchor.from_line(line) if line else None  # a crash came before its first line
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise JournalCut(f"{where} is damaged: what {path.name} held cannot be told") from error


def _check_anchor(
    anchor: Anchor | None, records: list[dict[str, Any]], checks: list[str], path: Path
) -> None:
    """Raise JournalCut unless the file goes as far as its anchor."""
    if anchor is None:
        # A crash may come between the first line and the anchor, and then nothing is recorded.
        if len(records) > 1:
            raise JournalCut(
                f"{anchor_path(path)} is missing: without it nobody can tell whether {path.name} "
                "still holds all that was recorded"
            )
    elif not _reaches(checks, anchor):
        raise JournalCut(
            f"{path} lacks records that were written to it ({anchor_path(path).name} knows of "
            f"{anchor.records} lines, {len(checks)} are there): it was cut, replaced, or is an "
            "old copy"
        )


def _reaches(checks: list[str], anchor: Anchor) -> bool:
    return anchor.records <= len(checks) and checks[anchor.records - 1] == anchor.check


class ChainedJournal:
    """The records of a file. `open` to append, `read` to look; `records` excludes the header."""

    def __init__(
        self, path: Path, records: list[dict[str, Any]], checks: list[str], file: IO[bytes] | None
    ) -> None:
        self.path = path
        self.header = records[0] if records else {}
        self.records = records[1:]
        self._checks = checks
        self._file = file
        self._anchor_file: IO[bytes] | None = None

    @property
    def anchor(self) -> Anchor:
        """What is in the file now; to be kept by whoever relies on all of it."""
        return Anchor(len(self._checks), self._checks[-1])

    def reaches(self, anchor: Anchor) -> bool:
        """Whether everything is still there that was when `anchor` was taken."""
        return _reaches(self._checks, anchor)

    @classmethod
    def open(cls, path: str | Path, kind: str, header: dict[str, Any]) -> ChainedJournal:
        """Create the file with `header`, or load it; holds an exclusive lock until `close`.

        New folders and files are readable by their owner only. Raises JournalError if the file is
        corrupt, cut, of another kind, or stays locked by another process for 15 seconds. That an
        existing header equals `header` is for the caller to check.
        """
        path = Path(path)
        make_folder(path.parent, 0o700)
        if not path.exists() and (anchor := _read_anchor(path)):
            _check_anchor(anchor, [], [], path)
        not_blocking(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        file = os.fdopen(descriptor, "r+b", buffering=0)
        journal = cls(path, [], [], file)
        try:
            _lock(file, path)
            file.seek(0)
            records, checks, intact = _parse(file.read(), path)
            _check_anchor(_read_anchor(path), records, checks, path)
            if records:
                _check_kind(records[0], kind, path)
            file.truncate(intact)
            journal = cls(path, records, checks, file)
            if not records:
                # No two journals begin alike: the anchor of an empty one is not met by a new file.
                own = {"kind": kind, "version": _VERSION, "id": secrets.token_hex(8)}
                journal.header = {**header, **own}
                journal._write(journal.header)
                sync(path.parent)
            journal._open_anchor()
            return journal
        except BaseException:
            journal.close()
            raise

    @classmethod
    def read(cls, path: str | Path, kind: str) -> ChainedJournal:
        """Load a file without locking it; it cannot be written. Raises JournalError, OSError."""
        path = Path(path)
        not_blocking(path)
        try:
            return cls._look(path, kind)
        except JournalCut:  # or an anchor that was being written at that moment
            time.sleep(_TORN_READ_SECONDS)
            return cls._look(path, kind)

    @classmethod
    def _look(cls, path: Path, kind: str) -> ChainedJournal:
        anchor = _read_anchor(path)  # first: whoever writes meanwhile only makes the file longer
        records, checks, _ = _parse(path.read_bytes(), path)
        if not records:
            raise JournalError(f"{path} is empty: nothing was ever recorded in it, or all is gone")
        _check_kind(records[0], kind, path)
        _check_anchor(anchor, records, checks, path)
        return cls(path, records, checks, None)

    def append(self, record: dict[str, Any]) -> None:
        """Add a record; it is on the disk when this returns. Raises JournalError if it is not."""
        self._write(record)
        self.records.append(record)

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            raise JournalError(f"{self.path} is not open for writing")
        body = _encode(record)
        check = _chain(self._checks[-1] if self._checks else "", body)
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
        self._checks.append(check)
        if self._anchor_file is not None:
            self._write_anchor(self._anchor_file)

    def _open_anchor(self) -> None:
        """Bring the anchor up to date; it is on the disk when this returns."""
        descriptor = os.open(anchor_path(self.path), os.O_RDWR | os.O_CREAT, 0o600)
        self._anchor_file = os.fdopen(descriptor, "r+b", buffering=0)
        self._write_anchor(self._anchor_file)
        os.fsync(descriptor)
        sync(self.path.parent)

    def _write_anchor(self, file: IO[bytes]) -> None:
        """Not synced for each line: an anchor that a power cut leaves behind the file is lawful."""
        try:
            os.pwrite(file.fileno(), self.anchor.line.encode(), 0)
        except OSError as error:  # the line itself is durable: nothing is forgotten
            self.close()
            raise JournalError(f"{anchor_path(self.path)} could not be written: {error}") from error

    def close(self) -> None:
        """Release the lock; further writes raise JournalError."""
        for file in (self._anchor_file, self._file):
            if file is not None:
                file.close()
        self._anchor_file = self._file = None


class OnJournal:
    """Base of what keeps its records in a journal: a context manager that releases its lock."""

    _journal: ChainedJournal

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


def check_free(path: Path, seconds: float) -> None:
    """Wait until no other process is writing the journal at `path`, if there is one; writes
    nothing. Raises JournalBusy when one still is after so many seconds, OSError."""
    try:
        file = path.open("r+b", buffering=0)
    except FileNotFoundError:
        return
    with file:
        _lock(file, path, seconds)


def _lock(file: IO[bytes], path: Path, seconds: float | None = None) -> None:
    """One writer at a time; a process that dies loses its lock."""
    deadline = time.monotonic() + (_LOCK_SECONDS if seconds is None else seconds)
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise JournalBusy(f"{path} is being written by another process") from None
            time.sleep(0.1)

"""The privacy ledger: a write-ahead journal of every release, on a chained append-only file.

Every release is durable in the file BEFORE its noise is added. Crashes and restarts then cannot
hide a release: an exact replay (same epoch, step and release id) is the same release and is stored
once; anything else is counted again.

The journal has one JSON record per line; each line contains a hash that chains it to all earlier
lines. A line torn by a crash is dropped when the file is opened again, because its write never
returned; any other damage is an error. A chain cannot show that its end was cut off, so an anchor
file (NAME.anchor) contains the number of lines and the last hash. It is written after each line is
durable: after a crash it may lag behind the file and is never ahead of it. A file that is shorter
than its anchor says is an error.

An attempt epoch numbers the attempts. Everything that can change a floating-point sum (recipe,
world size, micro-batch, device, code version) belongs to an attempt's identity; when it changes,
the epoch increases, and sampling and noise are drawn again under the new epoch. The same noise
added to two different sums would cancel in their difference and reveal data: `record` raises an
error for it.

A plain copy of the folder cannot be distinguished from the original. So every process that
continues draws its own nonce, written here before its first new step: two copies share only the
noise of the steps announced before the copy, for whose sums `record` requires equality. To continue
with fresh randomness is the same mechanism (adaptive composition): a new step counts once,
whichever copy takes it, and an announced step is replayed under its own nonce.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal, Self

from dpdist.core.files import check_regular_or_missing, fsync_path, make_folder
from dpdist.privacy.guarantee import POST_PROCESSED, Guarantee, kind_of
from dpdist.privacy.phases import Phase
from dpdist.privacy.plan import PrivacyPlan

# --- the chained journal ----------------------------------------------------------------------


_VERSION = 3
_LOCK_SECONDS = 15.0
_TORN_READ_SECONDS = 0.05


class JournalError(RuntimeError):
    """The file is corrupt, of another kind, or in use by another process."""


class JournalBusy(JournalError):
    """Another process is writing the file; it may end soon."""


class JournalTruncated(JournalError):
    """The file lacks lines that were written to it."""


@dataclass(frozen=True)
class Anchor:
    """The name of a journal's state.

    records: number of its lines, header included. check: the check of the last line.
    """

    records: int
    check: str

    def __post_init__(self) -> None:
        whole = isinstance(self.records, int) and not isinstance(self.records, bool)
        if not whole or self.records < 1 or not isinstance(self.check, str):
            raise ValueError(f"not an anchor: {self.records!r}, {self.check!r}")

    @classmethod
    def from_line(cls, line: str) -> Anchor:
        """Return the anchor that `line` wrote. Raises ValueError."""
        records, _, check = line.removesuffix("\n").partition(" ")
        return cls(int(records), check)

    @property
    def file_line(self) -> str:
        """Return the anchor's line of the file, always of one length, to be replaced in place."""
        return f"{self.records:012d} {self.check}\n"

    def to_dict(self) -> dict[str, Any]:
        """Return the anchor as plain JSON types."""
        return asdict(self)


def anchor_path(path: Path) -> Path:
    """Return the path of the anchor of the journal `path`."""
    return path.with_suffix(".anchor")


def _chain(previous: str, body: str) -> str:
    return hashlib.blake2b(f"{previous}\n{body}".encode(), digest_size=16).hexdigest()


def _encode(record: dict[str, Any]) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _parse(raw: bytes, path: Path) -> tuple[list[dict[str, Any]], list[str], int]:
    """Return (records, their checks, length in bytes of the intact part); drop a torn last line.

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
    check_regular_or_missing(where)
    try:
        line = where.read_text()
        return Anchor.from_line(line) if line else None  # a crash came before its first line
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise JournalTruncated(
            f"{where} is damaged: the completeness of {path.name} cannot be checked; restore it"
        ) from error


def _check_anchor(
    anchor: Anchor | None, records: list[dict[str, Any]], checks: list[str], path: Path
) -> None:
    """Raise JournalTruncated unless the file goes as far as its anchor."""
    if anchor is None:
        # A crash may come between the first line and the anchor, and then nothing is recorded.
        if len(records) > 1:
            raise JournalTruncated(
                f"{anchor_path(path)} is missing, so that the completeness of {path.name} cannot "
                "be checked; restore it"
            )
    elif not _contains_anchor(checks, anchor):
        raise JournalTruncated(
            f"{path} lacks records that were written to it ({anchor_path(path).name} counts "
            f"{anchor.records} lines, the file has {len(checks)}): it was cut, replaced, or is an "
            "old copy"
        )


def _contains_anchor(checks: list[str], anchor: Anchor) -> bool:
    return anchor.records <= len(checks) and checks[anchor.records - 1] == anchor.check


class ChainedJournal:
    """The records of a file, chained by checksums.

    `open` to append, `read` to look; `records` excludes the header.
    """

    def __init__(
        self, path: Path, records: list[dict[str, Any]], checks: list[str], file: IO[bytes] | None
    ) -> None:
        self.path = path
        self.header = records[0] if records else {}
        self.records = records[1:]
        self._checks = checks
        self._file = file
        self._anchor_file: IO[bytes] | None = None
        self._process = os.getpid()

    @property
    def anchor(self) -> Anchor:
        """Return the anchor of the file's present state, for a reader that relies on it."""
        return Anchor(len(self._checks), self._checks[-1])

    def contains_anchor(self, anchor: Anchor) -> bool:
        """Return whether the file still holds everything that it held when `anchor` was taken."""
        return _contains_anchor(self._checks, anchor)

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
        check_regular_or_missing(path)
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
                fsync_path(path.parent)
            journal._open_anchor()
            return journal
        except BaseException:
            journal.close()
            raise

    @classmethod
    def read(cls, path: str | Path, kind: str) -> ChainedJournal:
        """Load a file without locking it; it cannot be written. Raises JournalError, OSError."""
        path = Path(path)
        check_regular_or_missing(path)
        try:
            return cls._load(path, kind)
        except JournalTruncated:  # or an anchor that was being written at that moment
            time.sleep(_TORN_READ_SECONDS)
            return cls._load(path, kind)

    @classmethod
    def _load(cls, path: Path, kind: str) -> ChainedJournal:
        anchor = _read_anchor(path)  # first: whoever writes meanwhile only makes the file longer
        records, checks, _ = _parse(path.read_bytes(), path)
        if not records:
            raise JournalError(
                f"{path} is empty: nothing was recorded in it, or its lines are lost"
            )
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
        if os.getpid() != self._process:  # a fork has the lock as well, and does not see our lines
            raise JournalError(
                f"{self.path} was opened by the process of which this one is a fork: open it in "
                "this process"
            )
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
        except BaseException:  # Ctrl-C: the line may be there, and none may follow that ignores it
            self.close()
            raise
        self._checks.append(check)
        if self._anchor_file is not None:
            self._write_anchor(self._anchor_file)

    def _open_anchor(self) -> None:
        """Bring the anchor up to date; it is on the disk when this returns."""
        descriptor = os.open(anchor_path(self.path), os.O_RDWR | os.O_CREAT, 0o600)
        self._anchor_file = os.fdopen(descriptor, "r+b", buffering=0)
        self._write_anchor(self._anchor_file)
        os.fsync(descriptor)
        fsync_path(self.path.parent)

    def _write_anchor(self, file: IO[bytes]) -> None:
        """Write the anchor without a sync: after a power cut it may lag behind the file."""
        try:
            os.pwrite(file.fileno(), self.anchor.file_line.encode(), 0)
        except OSError as error:  # the line itself is durable: nothing is forgotten
            self.close()
            raise JournalError(f"{anchor_path(self.path)} could not be written: {error}") from error

    def close(self) -> None:
        """Release the lock; further writes raise JournalError."""
        for file in (self._anchor_file, self._file):
            if file is not None:
                file.close()
        self._anchor_file = self._file = None


class JournalBacked:
    """Base of classes that keep records in a journal: a context manager that releases its lock."""

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


def wait_until_unlocked(path: Path, seconds: float) -> None:
    """Wait until no other process is writing the journal at `path`; write nothing.

    Raises JournalBusy if one still is after `seconds`, OSError.
    """
    try:
        file = path.open("r+b", buffering=0)
    except FileNotFoundError:
        return
    with file:
        _lock(file, path, seconds)


def _lock(file: IO[bytes], path: Path, seconds: float | None = None) -> None:
    """Lock the file for one writer at a time; a process that dies loses its lock."""
    deadline = time.monotonic() + (_LOCK_SECONDS if seconds is None else seconds)
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise JournalBusy(f"{path} is being written by another process") from None
            time.sleep(0.1)


# --- the ledger -------------------------------------------------------------------------------


LedgerError = JournalError
_KIND = "plan"


class ReplayConflict(LedgerError):
    """The same epoch and step with another sum, to which the same noise would be added.

    Take a new epoch.
    """


class QueriesExhausted(LedgerError):
    """All answers that the plan counts were given, or were started and lost."""


def new_nonce() -> str:
    """Return a random label for one process, from the operating system's generator."""
    return secrets.token_hex(16)


class Ledger(JournalBacked):
    """The record of all releases under one plan. Use `open` to write, `read` to look at it."""

    def __init__(self, journal: ChainedJournal) -> None:
        self.path = journal.path
        self.plan_fingerprint: str = journal.header["plan"]
        self._journal = journal
        self._epoch: int | None = None
        self._identity: dict[str, str] = {}
        self._attempts: list[dict[str, Any]] = []
        self._nonces: list[str] = []  # of the processes that wrote here, the last one in force
        self._nonce: str | None = None  # of this process
        self._releases: dict[tuple[int, int], tuple[str, str]] = {}  # by epoch and step: id, nonce
        self._releases_per_step: Counter[int] = Counter()
        self._query_nonces: list[tuple[str, str]] = []  # question and nonce
        self._answers: dict[str, list[float]] = {}
        self._changes: set[str] = set()
        self._first_shown: int | None = None
        for record in journal.records:
            self._apply(record)

    # --- opening

    @classmethod
    def open(cls, path: str | Path, plan_fingerprint: str, *, nonce: str | None = None) -> Ledger:
        """Create the ledger of a plan, or load it and append to it.

        nonce: of this process, where it had the ledger open before. Holds an exclusive lock until
        `close`. Raises LedgerError if the file is corrupt, was written under another plan, or stays
        locked by another process for 15 seconds.
        """
        journal = ChainedJournal.open(path, _KIND, {"plan": plan_fingerprint})
        found = journal.header["plan"]
        if found != plan_fingerprint:
            journal.close()
            raise LedgerError(
                f"{path} belongs to plan {found[:12]}..., not to "
                f"{plan_fingerprint[:12]}...: use a different run folder for a different plan"
            )
        ledger = cls(journal)
        ledger._nonce = nonce
        return ledger

    @classmethod
    def read(cls, path: str | Path) -> Ledger:
        """Load a ledger without locking it; it cannot be written. Raises LedgerError, OSError."""
        return cls(ChainedJournal.read(path, _KIND))

    # --- writing

    def _apply(self, record: dict[str, Any]) -> None:
        kind = record.get("kind")
        if kind == "attempt":
            self._epoch = record["epoch"]
            self._identity = record["identity"]
            self._attempts.append(record)
            self._nonces.append(record["nonce"])
        elif kind == "process":
            self._nonces.append(record["nonce"])
        elif kind == "release":
            self._releases[record["epoch"], record["step"]] = record["id"], self._nonces[-1]
            self._releases_per_step[record["step"]] += 1
        elif kind == "asked":
            self._query_nonces.append((record["id"], self._nonces[-1] if self._nonces else ""))
        elif kind == "answered":
            self._answers[record["id"]] = record["values"]
        elif kind == "changed":
            self._changes.update(record["parts"])
        elif kind == "shown":
            self._first_shown = record["step"]
        else:
            raise LedgerError(f"{self.path} holds an unknown kind of record: {kind!r}")

    def _append(self, record: dict[str, Any]) -> None:
        self._journal.append(record)
        self._apply(record)

    def note_changes(self, parts: Iterable[str]) -> None:
        """Record durably the changes of other code in the training between two steps."""
        if new := sorted({*parts} - self._changes):
            self._append({"kind": "changed", "parts": new})

    @property
    def changes(self) -> tuple[str, ...]:
        """Return the parts of the training that other code changed between steps, in words."""
        return tuple(sorted(self._changes))

    def note_shown(self, step: int) -> None:
        """Record durably that the script sees private metrics from this step on."""
        if self._first_shown is None:
            self._append({"kind": "shown", "step": step})

    @property
    def post_processed(self) -> tuple[str, ...]:
        """Return an assumption for each unchecked effect of other code between steps."""
        lines = []
        if self._changes:
            changes = " and ".join(self.changes)
            lines.append(f"between two steps the script changed {changes} by released values alone")
        if self._first_shown is not None:
            lines.append(
                f"losses and counts of private records were shown to the script from step "
                f"{self._first_shown:,} on (private_metrics), and nothing that it did or kept "
                "follows from them"
            )
        return tuple(f"{POST_PROCESSED}: {line}" for line in lines)

    def begin_attempt(self, identity: dict[str, str]) -> int:
        """Return the attempt epoch for a start or restart with this identity.

        Same identity as the last attempt: same epoch, steps may be replayed exactly. Otherwise the
        next epoch, recorded durably. Identity: all that can change the floating-point sum.
        """
        identity = {str(key): str(value) for key, value in identity.items()}
        if self._epoch is None or identity != self._identity:
            self._new_attempt(identity, "start" if self._epoch is None else "identity changed")
        assert self._epoch is not None
        return self._epoch

    def new_epoch(self, reason: str) -> int:
        """Begin the next epoch, e.g. after a ReplayConflict.

        Raises LedgerError before any attempt.
        """
        if self._epoch is None:
            raise LedgerError("begin_attempt comes before new_epoch")
        self._new_attempt(self._identity, reason)
        return self._epoch

    def _new_attempt(self, identity: dict[str, str], reason: str) -> None:
        epoch = 0 if self._epoch is None else self._epoch + 1
        self._nonce = new_nonce()  # one of its own for each
        record = {"epoch": epoch, "identity": identity, "reason": reason, "nonce": self._nonce}
        self._append({"kind": "attempt", **record})

    @property
    def nonce(self) -> str:
        """Return the random label of this process, part of the keys of all its new releases."""
        if self._nonce is None:
            self._nonce = new_nonce()
        return self._nonce

    def announce_process(self) -> str:
        """Record `nonce` durably and return it; all later records are drawn under it."""
        if self.nonce not in self._nonces[-1:]:
            self._append({"kind": "process", "nonce": self.nonce})
        return self.nonce

    def announced_steps(self, first: int) -> list[tuple[int, int, str]]:
        """Return the steps from `first` on that the current attempt has announced.

        Such a step may have been released: it is replayed under its own nonce, and only its own sum
        gets that noise. Returns (first step, end, nonce) of each run of steps.
        """
        found: list[tuple[int, int, str]] = []
        for (epoch, step), (_, nonce) in sorted(self._releases.items()):
            if epoch != self._epoch or step < first:
                continue
            if found and found[-1][1:] == (step, nonce):
                found[-1] = (found[-1][0], step + 1, nonce)
            else:
                found.append((step, step + 1, nonce))
        return found

    def record(self, step: int, release_id: str) -> Literal["new", "replay"]:
        """Announce the release of `step` (from 0) in the current epoch; durable on return.

        The entry follows the nonce of the process that takes a new step.

        release_id: hex, at least 64 digits, a hash of key id, epoch, step and the bytes of the
        pre-noise sum. Returns "replay" if exactly this release is already recorded. Raises
        ReplayConflict, and records nothing, if a different sum is recorded for this epoch and step;
        LedgerError if it cannot be made durable; ValueError for a malformed argument.
        """
        if self._epoch is None:
            raise LedgerError("begin_attempt comes before record")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step must be a whole number >= 0, got {step!r}")
        _check_id(release_id)
        known, _ = self._releases.get((self._epoch, step), (None, None))
        if known == release_id:
            return "replay"
        if known is not None:
            raise ReplayConflict(
                f"step {step} of epoch {self._epoch} was already announced with a different sum: "
                "the same noise on both would reveal their difference; begin a new epoch"
            )
        self.announce_process()
        self._append({"kind": "release", "epoch": self._epoch, "step": step, "id": release_id})
        return "new"

    def record_query(self, query_id: str, plan: PrivacyPlan) -> int:
        """Count an answer before its noise is drawn and return its number, from 0.

        Durable on return. query_id: as an id in `record`.

        Raises QueriesExhausted, and counts nothing, beyond the answers of the plan; LedgerError if
        it cannot be made durable.
        """
        _check_id(query_id)
        if self.num_queries >= plan.num_queries:
            raise QueriesExhausted(
                f"all {plan.num_queries:,} answers that epsilon pays for were given"
            )
        self.announce_process()
        self._append({"kind": "asked", "id": query_id})
        return self.num_queries - 1

    def nonce_of_query(self, query_id: str, plan: PrivacyPlan) -> str:
        """Return the nonce under which an answer is drawn, counted before or now (`record_query`).

        An answer that was counted before may be kept or lost.
        """
        for asked, nonce in self._query_nonces:
            if asked == query_id:
                return nonce
        self.record_query(query_id, plan)
        return self.nonce

    def record_answer(self, query_id: str, values: Sequence[float]) -> None:
        """Record a counted answer with its noise, which may be repeated without privacy cost."""
        self._append({"kind": "answered", "id": query_id, "values": list(values)})

    # --- reading

    @property
    def num_queries(self) -> int:
        """Return the number of counted answers."""
        return len(self._query_nonces)

    def find_answer(self, query_id: str) -> list[float] | None:
        """Return the answer that was given to this question, or None."""
        return self._answers.get(query_id)

    @property
    def recorded_answers(self) -> tuple[list[float], ...]:
        """Return the kept answers."""
        return tuple(self._answers.values())

    @property
    def anchor(self) -> Anchor:
        """Return the anchor of everything on record, to be kept with results of these releases."""
        return self._journal.anchor

    def contains_anchor(self, anchor: Anchor) -> bool:
        """Return whether everything on record when `anchor` was taken still is."""
        return self._journal.contains_anchor(anchor)

    @property
    def epoch(self) -> int | None:
        """Return the current attempt epoch; None before the first attempt."""
        return self._epoch

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """Return every attempt: epoch, identity, reason."""
        return [dict(attempt) for attempt in self._attempts]

    @property
    def release_counts(self) -> dict[int, int]:
        """Return the number of distinct releases of each step, one per epoch that announced it."""
        return dict(self._releases_per_step)

    def released_steps(self, epoch: int) -> set[int]:
        """Return the steps that were released in one attempt epoch."""
        return {step for of, step in self._releases if of == epoch}

    def count_repeated_steps(self, step: int, identity: dict[str, str] | None = None) -> int:
        """Return the number of recorded steps, from `step` on, that would be counted again.

        identity: of the attempt; None for the current one, whose exact replays do not count.
        """
        later = {done for done in self._releases_per_step if done >= step}
        if self._epoch is None or identity not in (None, self._identity):
            return len(later)
        return len(later - self.released_steps(self._epoch))

    @property
    def process_nonces(self) -> tuple[str, ...]:
        """Return the nonces of all processes that wrote here, in order, each once."""
        return tuple(dict.fromkeys(self._nonces))

    def released_units(self, plan: PrivacyPlan) -> dict[str, tuple[int, ...]]:
        """Return the first releases of each process, by its nonce.

        They are counted in units (`Phase.num_units`) of each of the plan's phases.

        A phase without units counts as 1 for the process under whose nonce it was drawn: votes when
        they were counted, others in the first attempt. Later free steps are not counted.
        """
        found = {nonce: [0] * len(plan.phases) for nonce in self.process_nonces}
        for (_, step), (_, nonce) in self._releases.items():
            place = plan.phase_index(step)
            found[nonce][place] += plan.phases[place].num_units is not None
        for place, phase in enumerate(plan.phases):
            drawn = [attempt["nonce"] for attempt in self._attempts]
            if phase.num_queries:
                drawn = [nonce for _, nonce in self._query_nonces if nonce in found]
            elif phase.num_units is not None:
                continue  # its steps are counted
            for nonce in drawn if phase.num_units is not None else drawn[:1]:
                found[nonce][place] += 1
        return {nonce: tuple(counts) for nonce, counts in found.items()}

    def remaining_units(self, plan: PrivacyPlan) -> tuple[int, ...]:
        """Return the number of units of each of the plan's phases that are not released yet."""
        done = [sum(counts) for counts in zip(*self.released_units(plan).values(), strict=True)]
        done = done or [0] * len(plan.phases)
        for step, releases in self._releases_per_step.items():
            place = plan.phase_index(step)
            done[place] -= (releases - 1) * (plan.phases[place].num_units is not None)
        planned = (1 if phase.num_units is None else phase.num_units for phase in plan.phases)
        return tuple(units - gone for units, gone in zip(planned, done, strict=True))

    @property
    def num_superseded(self) -> int:
        """Return the number of releases charged beyond the first of each step."""
        return sum(self._releases_per_step.values()) - len(self._releases_per_step)

    def released_phases(self, plan: PrivacyPlan) -> tuple[Phase, ...]:
        """Return the releases as phases: the plan's with their real counts.

        Raises LedgerError if the ledger was written under another plan.
        """
        if plan.fingerprint() != self.plan_fingerprint:
            raise LedgerError(f"{self.path} was not written under this plan")
        counts = [0 for _ in plan.step_counts()]
        for step, releases in self._releases_per_step.items():
            counts[plan.training_phase_index(step)] += releases
        return plan.executed_phases(counts)

    def superseded_phases(self, plan: PrivacyPlan) -> tuple[Phase, ...]:
        """Return the releases beyond the first of each step, as phases."""
        return tuple(
            replace(plan.training_phases[plan.training_phase_index(step)], steps=releases - 1)
            for step, releases in self._releases_per_step.items()
            if releases > 1
        )

    def guarantee(self, plan: PrivacyPlan, delta: float | None = None) -> Guarantee:
        """Return the proved guarantee of everything on record, re-executed steps included.

        Each distinct (epoch, step) is one release with that step's parameters; equal to
        plan.guarantee(steps=n) after n undisturbed steps. Its kind is "assumed: post-processing"
        where other code changed the training between steps, or was shown private metrics.
        """
        found = plan.guarantee_for_events(plan.path_events(self.released_phases(plan)), delta)
        return replace(found, kind=kind_of(self.post_processed))


def _check_id(release_id: str) -> None:
    try:
        valid = len(bytes.fromhex(release_id)) >= 32
    except (ValueError, TypeError):
        valid = False
    if not valid:
        raise ValueError("a release id is at least 32 bytes in hex")

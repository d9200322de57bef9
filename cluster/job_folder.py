"""Read and write the folder of a resumable job, whose results all belong to one set of settings.

    settings.json   the execution: model, data, settings, seed, executed classifier; written first
    journal.jsonl   its first line is the digest of those settings; then the finished work
    *.parquet       tables, with the settings and their digest in the metadata

Settings, journal and table are checked against each other whenever work resumes or a table is read,
so a second model cannot be certified into the same folder, even if one of the files was removed.
The journal is append-only: written lines survive ``kill -9`` of their writer.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike

from dpdist.core import files
from dpdist.core.errors import ClusterError, UserError
from dpdist.core.fields import FileShape, Keys
from dpdist.core.files import (
    ColumnSpec,
    atomic_replacement,
    check_regular_or_missing,
    parse_json,
    remove_leftovers,
    write_json,
)

# --- the journal ------------------------------------------------------------------------------


_LOCK_SECONDS = 2.0  # a killed writer may need this long to exit


class JournalInUseError(ClusterError):
    """A different process is writing the file."""


class HeaderMismatchError(ClusterError):
    """The file's first line is not the required header."""


class Journal:
    """A file with one JSON value and its checksum per line; an incomplete last line is dropped.

    The process has an exclusive lock until ``close`` or its end. Raises JournalInUseError if a
    different process has the lock. Appended lines survive a killed process, and after ``sync`` a
    power cut too.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _open_locked(self.path)
        self._initial_size = 0  # bytes of undamaged lines
        for _, end in _iter_lines(self.path):
            self._initial_size = end
        self._file.truncate(self._initial_size)
        self._has_header = False

    @property
    def header(self) -> Any:
        """Return the first line; None for an empty file."""
        return next((json.loads(text) for text, _ in _iter_lines(self.path)), None)

    def ensure_header(self, header: Any) -> None:
        """Write `header` as the first line of an empty journal, else require it there.

        Raises HeaderMismatchError for a different first line.
        """
        first = self.header
        if first is None:
            self.append(header)
        elif first != header:
            raise HeaderMismatchError(f"{self.path}: its first line must be {header!r}")
        self._has_header = True

    @property
    def entries(self) -> Iterator[Any]:
        """Yield the entries that the file had when it was opened; they may exceed the memory."""
        for place, (text, end) in enumerate(_iter_lines(self.path)):
            if end > self._initial_size:
                return
            if place or not self._has_header:
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

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_locked(path: Path) -> IO[bytes]:
    """Return the file, opened to append and locked. Raises JournalInUseError."""
    deadline = time.monotonic() + _LOCK_SECONDS
    check_regular_or_missing(path)
    while True:
        file = open(path, "ab")  # noqa: SIM115 - closed by close()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                raise JournalInUseError(f"{path}: a different process is writing it") from None
        file.close()  # locked, or removed meanwhile by the process that had the lock
        time.sleep(0.05)


def _iter_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield the text of each line and the offset of its end, up to the first damaged line."""
    end = 0
    with open(path, "rb") as file:
        for line in file:
            checksum, _, text = line.rstrip(b"\n").partition(b" ")
            if not line.endswith(b"\n") or checksum != f"{zlib.crc32(text):08x}".encode():
                return
            end += len(line)
            yield text, end


# --- settings and tables ----------------------------------------------------------------------


FORMAT = 2
SETTINGS, JOURNAL = "settings.json", "journal.jsonl"
_DIGEST = b"dpdist.settings"
LABEL_DIGEST_KEY = "labels"  # of a digest of the inputs' labels in a table's record

Progress = Callable[[int, int, float], None]


class JobRecord(FileShape):
    """settings.json: what is executed. Each kind of job adds its own keys.

    Attributes:
        format: Format of the job's folder.
        seed: Seed of the job's random numbers.
        settings: Settings of the job, complete with defaults.
    """

    newest_format = FORMAT

    format: int
    seed: str
    settings: Keys


def settings_digest(job_record: Mapping[str, Any]) -> str:
    """Return a digest of what was executed, which does not depend on the order of keys."""
    canonical = _canonical(job_record)
    return hashlib.blake2b(canonical, digest_size=16, person=b"dpdist.bulk.1").hexdigest()


def _canonical(job_record: Mapping[str, Any]) -> bytes:
    return json.dumps(job_record, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


@dataclass(frozen=True)
class JobKind:
    """One kind of job, with words for its messages.

    result_free_fields: settings that do not affect results. is_seed_secret: whether the seed is a
    key, which messages must not show.
    """

    name: str  # "certification"
    activity: str  # "certifying"
    result_free_fields: frozenset[str] = frozenset()
    is_seed_secret: bool = False


@contextmanager
def open_job_folder(output: Path, kind: JobKind) -> Iterator[Journal]:
    """Yield the folder's journal, locked by this process; remove the folder if nothing started.

    Raises UserError if a different process has the lock.
    """
    known = output.exists()
    try:
        journal = Journal(output / JOURNAL)
    except JournalInUseError as error:
        raise UserError(
            f"{output}: a different process is {kind.activity} into this folder; wait for it, stop "
            "it, or choose a different folder (--output)"
        ) from error
    with journal:
        remove_leftovers(output, *(path for path in output.rglob("*") if path.is_dir()))
        try:
            yield journal
        finally:
            if not (output / SETTINGS).exists() and journal.header is None:
                journal.path.unlink()
                if not known:
                    output.rmdir()


def pin_settings(
    journal: Journal,
    kind: JobKind,
    requested: Mapping[str, Any],
    seed: str | None,
    make_initial_record: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """Return the pinned settings of the journal's folder, which are stored before any result.

    Args:
        journal: the journal.
        kind: the kind of job.
        requested: the settings that affect results.
        seed: the requested seed, or None.
        make_initial_record: returns the rest (seed, executed classifier); called for a new folder.

    Raises:
        UserError: the folder contains a different job, whose differences are listed, or results
            without settings.
    """
    output = journal.path.parent
    path = output / SETTINGS
    if path.exists():
        about = JobRecord.read_keys(path)
        refuse_difference(output, kind, about, requested, seed)
    elif journal.header is not None:
        raise UserError(
            f"{output}: contains results of a {kind.name} (journal.jsonl) without settings.json; "
            "remove the folder, or choose a different one with --output"
        )
    else:
        about = json.loads(json.dumps({"format": FORMAT, **requested, **make_initial_record()}))
        write_json(path, about)
    try:
        journal.ensure_header({"settings": settings_digest(about)})
    except HeaderMismatchError as error:
        raise UserError(
            f"{output}: the results in journal.jsonl do not belong to settings.json (one of the "
            "two was replaced or changed); remove the folder, or choose a different one with "
            "--output"
        ) from error
    return about


def refuse_difference(
    output: Path,
    kind: JobKind,
    job_record: Mapping[str, Any],
    requested: Mapping[str, Any],
    seed: str | None,
) -> None:
    """Raise UserError, which lists the differences, unless `job_record` is what is `requested`."""
    old, new = _flatten_record(job_record), _flatten_record(json.loads(json.dumps(requested)))
    differences = [
        f"{name} was {old.get(name)!r}, now {value!r}"
        for name, value in new.items()
        if name not in kind.result_free_fields and old.get(name) != value
    ]
    if seed is not None and seed != job_record.get("seed"):
        shown = f"seed was {job_record.get('seed')!r}, now {seed!r}"
        differences.append("a different seed" if kind.is_seed_secret else shown)
    if differences:
        raise UserError(
            f"{output}: contains a different {kind.name} ({'; '.join(differences)}); choose a "
            "different folder with --output, or remove this one"
        )


def _flatten_record(job_record: Mapping[str, Any]) -> dict[str, Any]:
    flat = {k: v for k, v in job_record.items() if k not in ("settings", "format", "seed")}
    return flat | dict(job_record.get("settings", {}))


def schema_of(columns: Mapping[str, ColumnSpec], *own: pa.Field) -> pa.Schema:
    """Return the schema of columns without nulls, by the types of their values.

    own: fields of other types, which replace those of their columns.
    """
    kinds = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}
    named = {field.name: field for field in own}
    return pa.schema(
        [
            named[name] if name in named else pa.field(name, kinds[kind], nullable=False)
            for name, (kind, _) in columns.items()
        ]
    )


def build_table(
    rows: list[dict[str, Any]], schema: pa.Schema, job_record: Mapping[str, Any], key: bytes
) -> pa.Table:
    """Return the rows in their order as a table, with `job_record` and its digest as metadata."""
    return pa.Table.from_pylist(rows, schema=schema.with_metadata(table_metadata(job_record, key)))


def table_metadata(job_record: Mapping[str, Any], key: bytes) -> dict[bytes, bytes]:
    """Return a table's metadata: its pinned settings and their digest."""
    return {key: _canonical(job_record), _DIGEST: settings_digest(job_record).encode()}


def read_job_record(table: pa.Table, key: bytes, context: str = "the table") -> dict[str, Any]:
    """Return a table's pinned settings; an empty dict without any.

    Raises UserError if they are damaged.
    """
    return parse_json((table.schema.metadata or {}).get(key, b"{}"), f"{context}: its description")


def label_digest(index: ArrayLike, label: ArrayLike) -> str:
    """Return a digest of the labels of inputs, which does not depend on the order of rows.

    Repeated rows of one input and label count once.
    """
    pairs = np.unique(np.stack([np.asarray(index), np.asarray(label)], 1).astype("<i8"), axis=0)
    return hashlib.blake2b(pairs.tobytes(), digest_size=16, person=b"dpdist.labels").hexdigest()


def check_labels(
    job_record: Mapping[str, Any], index: ArrayLike, label: ArrayLike, context: Any
) -> None:
    """Raise UserError for a table whose labels do not match the digest in its record, if any."""
    if job_record.get(LABEL_DIGEST_KEY, digest := label_digest(index, label)) != digest:
        raise UserError(f"{context}: is damaged: labels: must match the digest in its record")


def write_table(table: pa.Table, path: Path) -> None:
    """Write one Parquet file atomically, with the same bytes for the same table."""
    with atomic_replacement(path) as aside:
        pq.write_table(table.combine_chunks(), aside, row_group_size=1 << 20)


def read_table(path: Path, columns: Mapping[str, ColumnSpec], key: bytes) -> pa.Table:
    """Return a table with these columns, checked against its settings.

    Raises as `dpdist.core.files.read_table`, and UserError if it does not match the settings in its
    metadata, or the settings.json in its folder.
    """
    table = files.read_table(path, columns)
    own = settings_digest(read_job_record(table, key, str(path)))
    if (table.schema.metadata or {}).get(_DIGEST) != own.encode():
        raise UserError(f"{path}: is damaged: its settings do not match its results")
    settings = path.parent / SETTINGS
    if settings.exists() and own != settings_digest(JobRecord.read_keys(settings)):
        raise UserError(
            f"{path}: is not of the settings in {settings.name} in its folder (one of the two was "
            "replaced or changed); remove the folder, and run again"
        )
    return table

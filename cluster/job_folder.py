"""The folder of a resumable job: its results belong to one set of settings, or to none.

    settings.json   the execution: model, data, settings, seed, executed classifier; written first
    journal.jsonl   its first line is the digest of those settings; then the finished work
    *.parquet       tables, with the settings and their digest in the metadata

Settings, journal and table are held against each other whenever work continues or a table is read:
a model certified into the folder of another one is refused, whichever of the files was removed in
between. The journal is append-only: lines that were written survive ``kill -9`` of their writer.
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


_LOCK_SECONDS = 2.0  # a writer that was just killed may need that long to be gone


class JournalInUseError(ClusterError):
    """Another process appends to the file."""


class HeaderMismatchError(ClusterError):
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
        self._file = _open_locked(self.path)
        self._initial_size = 0  # bytes of undamaged lines
        for _, end in _iter_lines(self.path):
            self._initial_size = end
        self._file.truncate(self._initial_size)
        self._has_header = False

    @property
    def header(self) -> Any:
        """The first line, or None while there is none."""
        return next((json.loads(text) for text, _ in _iter_lines(self.path)), None)

    def ensure_header(self, header: Any) -> None:
        """Let `header` be the first line, no entry: written to an empty journal, else required.

        Raises OtherHeader when the first line is another.
        """
        found = self.header
        if found is None:
            self.append(header)
        elif found != header:
            raise HeaderMismatchError(f"{self.path} does not begin with {header!r}")
        self._has_header = True

    @property
    def entries(self) -> Iterator[Any]:
        """Yield the entries that the file held when it was opened, since they may exceed memory."""
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
    """The file, opened to append and locked. Raises InUse."""
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
                raise JournalInUseError(f"{path} is being written by another process") from None
        file.close()  # held, or removed meanwhile by who held it
        time.sleep(0.05)


def _iter_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """(text, where its line ends) up to the first damaged line."""
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
LABEL_DIGEST_KEY = "labels"  # what a table says of the labels of its inputs

Progress = Callable[[int, int, float], None]


class JobRecord(FileShape):
    """settings.json: what is executed. Each kind of job adds keys of its own.

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
    """Names what was executed: equal for the same JSON, whatever the order of its keys."""
    made = hashlib.blake2b(_canonical(job_record), digest_size=16, person=b"dpdist.bulk.1")
    return made.hexdigest()


def _canonical(job_record: Mapping[str, Any]) -> bytes:
    return json.dumps(job_record, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


@dataclass(frozen=True)
class JobKind:
    """One kind of job, in words for its messages. result_free_fields: settings on which no result
    depends. is_seed_secret: its seed is a key, which no message shows."""

    name: str  # "certification"
    activity: str  # "certifying"
    result_free_fields: frozenset[str] = frozenset()
    is_seed_secret: bool = False


@contextmanager
def open_job_folder(output: Path, kind: JobKind) -> Iterator[Journal]:
    """The folder's journal, held by this process alone; a folder in which nothing began is removed.

    Raises UserError when another process holds it.
    """
    known = output.exists()
    try:
        journal = Journal(output / JOURNAL)
    except JournalInUseError as error:
        raise UserError(
            f"{output}: another process is {kind.activity} into this folder; wait for it, stop it, "
            "or choose another folder (--output)"
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
    """Return the pinned settings of the journal's folder.

    They are stored before any result and kept when the job is continued.

    requested: what results depend on. make_initial_record: the rest (seed, executed classifier),
    called for a new folder only. seed: the one asked for, or None. Raises UserError when the folder
    holds another job, naming what differs, or results that do not say which job they are of.
    """
    output = journal.path.parent
    path = output / SETTINGS
    if path.exists():
        about = JobRecord.read_keys(path)
        refuse_difference(output, kind, about, requested, seed)
    elif journal.header is not None:
        raise UserError(
            f"{output}: holds results of some {kind.name} (journal.jsonl), but not settings.json, "
            "which says of which; remove the folder, or choose another with --output"
        )
    else:
        about = json.loads(json.dumps({"format": FORMAT, **requested, **make_initial_record()}))
        write_json(path, about)
    try:
        journal.ensure_header({"settings": settings_digest(about)})
    except HeaderMismatchError as error:
        raise UserError(
            f"{output}: the results in journal.jsonl do not belong to settings.json (one of the "
            "two was changed or comes from elsewhere); remove the folder, or choose another with "
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
    """Raise UserError, naming what differs, unless `job_record` is what is `requested`."""
    old, new = _flatten_record(job_record), _flatten_record(json.loads(json.dumps(requested)))
    differences = [
        f"{name} was {old.get(name)!r}, now {value!r}"
        for name, value in new.items()
        if name not in kind.result_free_fields and old.get(name) != value
    ]
    if seed is not None and seed != job_record.get("seed"):
        shown = f"seed was {job_record.get('seed')!r}, now {seed!r}"
        differences.append("the seed is another" if kind.is_seed_secret else shown)
    if differences:
        raise UserError(
            f"{output}: holds another {kind.name} ({'; '.join(differences)}); choose another "
            "folder with --output, or remove this one"
        )


def _flatten_record(job_record: Mapping[str, Any]) -> dict[str, Any]:
    flat = {k: v for k, v in job_record.items() if k not in ("settings", "format", "seed")}
    return flat | dict(job_record.get("settings", {}))


def schema_of(columns: Mapping[str, ColumnSpec], *own: pa.Field) -> pa.Schema:
    """Return the schema of columns that are never empty, by the kinds of their values.

    own: fields of another type, each in the place of its column.
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
    """The rows as they are ordered, with `job_record` and its digest in the metadata."""
    return pa.Table.from_pylist(rows, schema=schema.with_metadata(table_metadata(job_record, key)))


def table_metadata(job_record: Mapping[str, Any], key: bytes) -> dict[bytes, bytes]:
    """Return a table's metadata: its pinned settings and their digest."""
    return {key: _canonical(job_record), _DIGEST: settings_digest(job_record).encode()}


def read_job_record(table: pa.Table, key: bytes, context: str = "the table") -> dict[str, Any]:
    """Return a table's pinned settings; empty where it has none.

    Raises UserError if they are damaged.
    """
    return parse_json((table.schema.metadata or {}).get(key, b"{}"), f"{context}: its description")


def label_digest(index: ArrayLike, label: ArrayLike) -> str:
    """Return a digest of the labels of inputs, whatever the order of their rows; several rows of
    one input with one label count once."""
    pairs = np.unique(np.stack([np.asarray(index), np.asarray(label)], 1).astype("<i8"), axis=0)
    return hashlib.blake2b(pairs.tobytes(), digest_size=16, person=b"dpdist.labels").hexdigest()


def check_labels(
    job_record: Mapping[str, Any], index: ArrayLike, label: ArrayLike, context: Any
) -> None:
    """Raise UserError for labels of a table that are not those it was made with, where it says."""
    if job_record.get(LABEL_DIGEST_KEY, found := label_digest(index, label)) != found:
        raise UserError(f"{context}: damaged: its labels are not those it was made with")


def write_table(table: pa.Table, path: Path) -> None:
    """One Parquet file, whole or not at all, and the same bytes for the same table."""
    with atomic_replacement(path) as aside:
        pq.write_table(table.combine_chunks(), aside, row_group_size=1 << 20)


def read_table(path: Path, columns: Mapping[str, ColumnSpec], key: bytes) -> pa.Table:
    """A table with these columns, held against the settings that it names.

    Raises as `dpdist.core.files.read_table`, and UserError when it is not of the settings in
    its metadata or in the settings.json beside it.
    """
    table = files.read_table(path, columns)
    own = settings_digest(read_job_record(table, key, str(path)))
    if (table.schema.metadata or {}).get(_DIGEST) != own.encode():
        raise UserError(f"{path}: damaged: the settings in it are not those of its results")
    beside = path.parent / SETTINGS
    if beside.exists() and own != settings_digest(JobRecord.read_keys(beside)):
        raise UserError(
            f"{path}: not of the settings in {beside.name} beside it: one of the two was "
            "changed or comes from elsewhere; remove the folder and run again"
        )
    return table

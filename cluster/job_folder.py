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
from types import TracebackType
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike

from dpdist.core import files
from dpdist.core.errors import ClusterError, UserError
from dpdist.core.files import (
    Column,
    not_blocking,
    parse_json,
    read_json,
    remove_leftovers,
    write_json,
    written_aside,
)

# --- the journal ------------------------------------------------------------------------------


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
        """Yield the entries that the file held when it was opened, since they may exceed memory."""
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


# --- settings and tables ----------------------------------------------------------------------


FORMAT = 1
SETTINGS, JOURNAL = "settings.json", "journal.jsonl"
_DIGEST = b"dpdist.settings"
LABELS = "labels"  # what a table says of the labels of its inputs
_SHAPE = {"format": int, "seed": str, "settings": dict}

Progress = Callable[[int, int, float], None]


def settings_digest(about: Mapping[str, Any]) -> str:
    """Names what was executed: equal for the same JSON, whatever the order of its keys."""
    return hashlib.blake2b(_canonical(about), digest_size=16, person=b"dpdist.bulk.1").hexdigest()


def _canonical(about: Mapping[str, Any]) -> bytes:
    return json.dumps(about, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


@dataclass(frozen=True)
class Kind:
    """One kind of job, in words for its messages. free: settings on which no result depends.
    secret: its seed is a key, which no message shows."""

    name: str  # "certification"
    doing: str  # "certifying"
    free: frozenset[str] = frozenset()
    secret: bool = False


@contextmanager
def held(output: Path, kind: Kind) -> Iterator[Journal]:
    """The folder's journal, held by this process alone; a folder in which nothing began is removed.

    Raises UserError when another process holds it.
    """
    known = output.exists()
    try:
        journal = Journal(output / JOURNAL)
    except InUse as error:
        raise UserError(
            f"{output}: another process is {kind.doing} into this folder; wait for it, stop it, or "
            "choose another folder (--output)"
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


def pin(
    journal: Journal,
    kind: Kind,
    wanted: Mapping[str, Any],
    seed: str | None,
    begin: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """Return the pinned settings of the journal's folder.

    They are stored before any result and kept when the job is continued.

    wanted: what results depend on. begin: the rest (seed, executed classifier), called for a new
    folder only. seed: the one asked for, or None. Raises UserError when the folder holds another
    job, naming what differs, or results that do not say which job they are of.
    """
    output = journal.path.parent
    path = output / SETTINGS
    if path.exists():
        about = _read_settings(path)
        refuse_difference(output, kind, about, wanted, seed)
    elif journal.header is not None:
        raise UserError(
            f"{output}: holds results of some {kind.name} (journal.jsonl), but not settings.json, "
            "which says of which; remove the folder, or choose another with --output"
        )
    else:
        about = json.loads(json.dumps({"format": FORMAT, **wanted, **begin()}))
        write_json(path, about)
    try:
        journal.begin({"settings": settings_digest(about)})
    except OtherHeader as error:
        raise UserError(
            f"{output}: the results in journal.jsonl do not belong to settings.json (one of the "
            "two was changed or comes from elsewhere); remove the folder, or choose another with "
            "--output"
        ) from error
    return about


def refuse_difference(
    output: Path,
    kind: Kind,
    about: Mapping[str, Any],
    wanted: Mapping[str, Any],
    seed: str | None,
) -> None:
    """Raise UserError, naming what differs, unless `about` is what is `wanted`."""
    old, new = _flat(about), _flat(json.loads(json.dumps(wanted)))
    differences = [
        f"{name} was {old.get(name)!r}, now {value!r}"
        for name, value in new.items()
        if name not in kind.free and old.get(name) != value
    ]
    if seed is not None and seed != about.get("seed"):
        shown = f"seed was {about.get('seed')!r}, now {seed!r}"
        differences.append("the seed is another" if kind.secret else shown)
    if differences:
        raise UserError(
            f"{output}: holds another {kind.name} ({'; '.join(differences)}); choose another "
            "folder with --output, or remove this one"
        )


def _flat(about: Mapping[str, Any]) -> dict[str, Any]:
    flat = {key: value for key, value in about.items() if key not in ("settings", "format", "seed")}
    return flat | dict(about.get("settings", {}))


def _read_settings(path: Path) -> dict[str, Any]:
    about = read_json(path, _SHAPE)
    if about["format"] > FORMAT:
        raise UserError(f"{path}: written by a newer version of dpdist")
    return about


def build_table(
    rows: list[dict[str, Any]], schema: pa.Schema, about: Mapping[str, Any], key: bytes
) -> pa.Table:
    """The rows as they are ordered, with `about` and its digest in the metadata."""
    return pa.Table.from_pylist(rows, schema=schema.with_metadata(metadata(about, key)))


def metadata(about: Mapping[str, Any], key: bytes) -> dict[bytes, bytes]:
    """Return a table's metadata: its pinned settings and their digest."""
    return {key: _canonical(about), _DIGEST: settings_digest(about).encode()}


def about_table(table: pa.Table, key: bytes, where: str = "the table") -> dict[str, Any]:
    """Return a table's pinned settings; empty where it has none.

    Raises UserError if they are damaged.
    """
    return parse_json((table.schema.metadata or {}).get(key, b"{}"), f"{where}: its description")


def label_digest(index: ArrayLike, label: ArrayLike) -> str:
    """Return a digest of the labels of inputs, whatever the order of their rows; several rows of
    one input with one label count once."""
    pairs = np.unique(np.stack([np.asarray(index), np.asarray(label)], 1).astype("<i8"), axis=0)
    return hashlib.blake2b(pairs.tobytes(), digest_size=16, person=b"dpdist.labels").hexdigest()


def check_labels(about: Mapping[str, Any], index: ArrayLike, label: ArrayLike, where: Any) -> None:
    """Raise UserError for labels of a table that are not those it was made with, where it says."""
    if about.get(LABELS, found := label_digest(index, label)) != found:
        raise UserError(f"{where}: damaged: its labels are not those it was made with")


def write_table(table: pa.Table, path: Path) -> None:
    """One Parquet file, whole or not at all, and the same bytes for the same table."""
    with written_aside(path) as aside:
        pq.write_table(table.combine_chunks(), aside, row_group_size=1 << 20)


def read_table(path: Path, columns: Mapping[str, Column], key: bytes) -> pa.Table:
    """A table with these columns, held against the settings that it names.

    Raises as `dpdist.core.files.read_table`, and UserError when it is not of the settings in
    its metadata or in the settings.json beside it.
    """
    table = files.read_table(path, columns)
    own = settings_digest(about_table(table, key, str(path)))
    if (table.schema.metadata or {}).get(_DIGEST) != own.encode():
        raise UserError(f"{path}: damaged: the settings in it are not those of its results")
    beside = path.parent / SETTINGS
    if beside.exists() and own != settings_digest(_read_settings(beside)):
        raise UserError(
            f"{path}: not of the settings in {beside.name} beside it: one of the two was "
            "changed or comes from elsewhere; remove the folder and run again"
        )
    return table

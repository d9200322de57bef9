"""Read untrusted files safely and write files that survive a crash.

A pipe, a device or a folder raises an error before it is opened, sizes are bounded, and JSON, YAML
and Parquet must have the expected shape. YAML is read strictly: a key given twice, and numbers that
YAML 1.1 reads in base 8 or 60, raise an error with their line. File names from outside (an
archive's manifest, a job's log, a command line) must be plain, and stay inside their folder. Files
are written atomically, in folders that only their owner can read. Each error is a UserError with
the file, the fault and the fix.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dpdist.core.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


# --- reading files and JSON -------------------------------------------------------------------


MAX_JSON_BYTES = 64 * 2**20  # of a JSON file


class MissingFileError(UserError):
    """A path that does not exist."""


def validate_path(path: str | Path) -> Path:
    """Return `path` with ~ expanded. Raises UserError for an invalid path."""
    text = str(path)
    if any(ord(letter) < 32 or letter == "\x7f" for letter in text):
        raise UserError(f"{quoted(text)}: a path must not have control characters")
    names = [len(os.fsencode(name)) for name in text.split("/")]
    if len(text) > 4000 or max(names) > 255:
        raise UserError(f"{quoted(text)}: the path is too long (a name has at most 255 bytes)")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        user = Path(text).parts[0]
        raise UserError(f"{text}: there is no home folder of {user}; write the path out") from None


def check_utf8_name(name: str | Path, context: str = "") -> None:
    """Raise UserError for a name that is not UTF-8, as Arrow, recipes and tables need.

    Args:
        name: a file's path, or any other name.
        context: start of the message; the name itself by default.
    """
    try:
        str(name).encode()
    except UnicodeEncodeError:
        raise UserError(f"{context or name}: the name must be UTF-8 text; rename it") from None


def exists_as_non_folder(path: Path) -> bool:
    """Return whether `path` is a file; False for a folder and for an unreadable path."""
    try:
        return path.exists() and not path.is_dir()
    except (OSError, ValueError):
        return False


def check_regular_file(path: str | Path, max_bytes: int | None = None) -> Path:
    """Return `path` if it is a regular file of at most `max_bytes` bytes.

    Raises MissingFileError, or UserError for anything else.
    """
    path = Path(path)
    try:
        info = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{quoted(str(path))}: cannot be read: {error_text(error)}") from None
    if not stat.S_ISREG(info.st_mode):
        raise UserError(f"{path}: is {_file_type(info.st_mode)}, must be a regular file")
    if max_bytes is not None and info.st_size > max_bytes:
        raise UserError(
            f"{path}: must have at most {max_bytes:,} bytes, got {info.st_size:,}; check that "
            "it is the right file"
        )
    return path


def _file_type(mode: int) -> str:
    names = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for is_kind, name in names if is_kind(mode)), "a device")


def check_regular_or_missing(path: str | Path) -> None:
    """Raise UserError if `path` exists and is not a regular file."""
    try:
        check_regular_file(path)
    except MissingFileError:
        return


def read_bytes(path: str | Path, max_bytes: int | None = None) -> bytes:
    """Return the content of a regular file. Raises as `check_regular_file`."""
    path = check_regular_file(path, max_bytes)
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error_text(error)}") from error


def read_text(path: str | Path, max_bytes: int = MAX_JSON_BYTES) -> str:
    """Return the content of a regular UTF-8 file. Raises as `check_regular_file`."""
    try:
        return read_bytes(path, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: must be UTF-8 text, got others at byte {error.start}") from None


def read_json(path: str | Path, shape: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON object in a file. shape: required dotted keys, with the type of each.

    Raises MissingFileError, or UserError for invalid JSON (also NaN, an infinite number or a key
    given twice) and for a missing key or a wrong type.
    """
    return parse_json(read_text(path), str(path), shape)


def parse_json(
    text: str | bytes, context: str, shape: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the JSON object in a text, as `read_json`. context: start of messages."""
    value = parse_any_json(text, context)
    if not isinstance(value, dict):
        raise UserError(f"{context}: damaged: must be an object of keys, got {quoted(value)}")
    return check_shape(value, context, shape or {})


def parse_any_json(text: str | bytes, context: str) -> Any:
    """Return any JSON value. Raises as `parse_json`."""
    try:
        return json.loads(
            text,
            parse_constant=_reject_constant,
            parse_float=_parse_finite,
            object_pairs_hook=_reject_duplicate_keys,
        )
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise UserError(f"{context}: damaged: {error_text(error)}") from None


def check_shape(value: dict[str, Any], context: str, shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return `value` if each dotted key of `shape` has a value of its type; ints are floats, too.

    Raises UserError.
    """
    for key, kind in shape.items():
        found: Any = value
        for part in key.split("."):
            if not isinstance(found, dict) or part not in found:
                raise UserError(f"{context}: damaged: {key} is missing")
            found = found[part]
        if not _has_type(found, kind):
            name = getattr(kind, "__name__", str(kind))
            raise UserError(f"{context}: damaged: {key} must be {name}, got {quoted(found)}")
    return value


def _has_type(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, int) and isinstance(1.0, kind):
        return abs(value) < 2**63
    return isinstance(value, kind)


def quoted(value: Any, max_length: int = 80) -> str:
    """Return any value as one short line for a message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a huge integer, endless nesting
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= max_length else f"{text[: max_length - 4]} ..."


def error_text(error: BaseException) -> str:
    """Return an error's text in one line."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:300] or type(error).__name__


def data_error(
    file: object,
    rule: str,
    *,
    row: int | None = None,
    line: int | None = None,
    column: str | None = None,
    cause: BaseException | None = None,
) -> UserError:
    """Return an error about a file of records: the place, and the broken rule.

    Guarantee: a library's text is not included, as it may quote a record, only the type of its
    error, or the operating system's text about the file.

    Args:
        file: its path.
        rule: what is required, or what is wrong.
        row: number of the record, from 0.
        line: number of the line, from 1.
        column: name of the column.
        cause: error that a library raised.
    """
    place = str(file)
    place += "" if row is None else f" row {row}"
    place += "" if line is None else f": line {line}"
    place += "" if column is None else f": column {column!r}"
    by = "" if column is not None else ":"
    if isinstance(cause, OSError) and cause.errno:
        rule += f" ({cause.strerror})"
    elif cause is not None:
        rule += f" ({type(cause).__name__})"
    return UserError(f"{place}{by} {rule}")


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _parse_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {quoted(key)} is given twice")
        found[key] = value
    return found


# --- writing files ----------------------------------------------------------------------------


def write_atomic(path: Path, data: bytes | str, *, durable: bool = True) -> None:
    """Replace `path` by `data`: after a crash it has the old or the new content.

    durable: False does not wait for the disk, for progress files that a power cut may damage.
    """
    with atomic_replacement(path, durable=durable) as aside:
        aside.write_bytes(data.encode() if isinstance(data, str) else data)


def write_files_atomic(files: Mapping[Path, str]) -> None:
    """Replace files that belong together; a full disk leaves the old ones as they are.

    All are written to temporary files before the first one is moved. The first is moved last.
    """
    with ExitStack() as stack:
        for path, text in files.items():
            remove_leftovers(path.parent, target_name=path.name)
            stack.enter_context(atomic_replacement(path)).write_bytes(text.encode())


@contextmanager
def atomic_replacement(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a path for a file that then replaces `path` as in `write_atomic`.

    Anywhere in a folder `private` of mode 0700 it gets mode 0600.
    """
    make_folder(path.parent)
    aside = _temporary_sibling(path)
    try:
        yield aside
        if any(each.name == "private" and not each.stat().st_mode & 0o77 for each in path.parents):
            aside.chmod(0o600)
        if durable:
            fsync_path(aside)
        os.replace(aside, path)
        if durable:
            fsync_path(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def write_result(path: Path, data: bytes | str) -> None:
    """Write a file at a path that a user names, atomically unless it is a pipe or device.

    A link is followed. Raises OSError, for example if the folder does not exist.
    """
    raw = data.encode() if isinstance(data, str) else data
    target = path.resolve()
    if not target.parent.is_dir() or (target.exists() and not target.is_file()):
        target.write_bytes(raw)
        return
    write_atomic(target, raw)


def own_only(path: str, flags: int) -> int:
    """Open a file, which is created for its owner only: the `opener` of `open`."""
    return os.open(path, flags, 0o600)


def write_secret_once(path: Path, text: str) -> None:
    """Write a secret at `path`, atomically and for its owner only, unless a file exists.

    If two processes write at once, both use the first one's secret.
    """
    if os.path.lexists(path):
        return
    aside = _temporary_sibling(path)
    try:
        with open(aside, "x", opener=own_only) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(aside, path)
        fsync_path(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def fsync_path(path: Path) -> None:
    """Sync a file's content, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary_sibling(path: Path) -> Path:
    """Return an unused path next to `path`, also if hosts share the disk."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")


_TEMPORARY_NAME = re.compile(r"\.(.+)\.(\d+)-[0-9a-f]{8}")  # of `_temporary_sibling`


def remove_leftovers(*folders: Path, target_name: str | None = None) -> None:
    """Remove temporary files of killed processes of this host from these folders.

    Only for folders without writers on other hosts, which would be taken for dead. target_name:
    remove only those of the file or folder with this name.
    """
    for folder in folders:
        for path in folder.iterdir() if folder.is_dir() else ():
            found = _TEMPORARY_NAME.fullmatch(path.name)
            if (
                found is None
                or target_name not in (None, found[1])
                or Path("/proc", found[2]).exists()
            ):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


SESSION_FOLDER = "DPDIST_SESSION_FOLDER"  # environment variable: folder of a local Ray session
TRAINING_FOLDER = "dpdist-training-"  # prefix of the folder of one of many trainings
_LOCK = "held.lock"


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield a new folder on this host (mode 0700), which is removed at the end.

    In a local Ray session it is in the session's folder. The next call removes folders of killed
    processes.
    """
    root = Path(tempfile.gettempdir())
    remove_unlocked_folders(root, prefix)
    session = os.environ.get(SESSION_FOLDER, "")
    inside = session if session and os.path.isdir(session) else root
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=inside))
    try:
        with lock_temporary_folder(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def lock_temporary_folder(folder: Path) -> Iterator[None]:
    """Mark a temporary folder as in use by this process, for `remove_unlocked_folders`."""
    new = folder / f"{_LOCK}.new"
    with new.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.replace(new, folder / _LOCK)  # so the file of this name is always locked
        yield


def remove_unlocked_folders(root: Path, prefix: str) -> None:
    """Remove this user's unlocked folders in `root` whose names have this prefix.

    A folder without a lock file is kept: it is being created, or is not dpdist's.
    """
    for folder in root.glob(f"{prefix}*"):
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Write JSON, sorted and indented, as `write_atomic`.

    Raises ValueError for a number that is not finite, which JSON does not have.
    """
    text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"
    write_atomic(path, text, durable=durable)


def finite_or_none(value: float) -> float | None:
    """Return a number for JSON: None if it is not finite."""
    return value if math.isfinite(value) else None


@contextmanager
def atomic_folder(
    folder: Path, *, replace: bool = False, keep_existing: bool = False
) -> Iterator[Path]:
    """Yield a path at which to build `folder`, which is moved to `folder` at the end.

    replace: an existing folder is replaced once the new one is complete. keep_existing: a folder
    that a different process moved there meanwhile stays, instead of an OSError.
    """
    old = _temporary_sibling(folder)
    if replace:
        remove_leftovers(folder.parent, target_name=folder.name)
    try:
        with _staging_path(folder) as aside:
            yield aside
            if replace and folder.exists():
                os.rename(folder, old)
            try:
                os.rename(aside, folder)
                fsync_path(folder.parent)
            except OSError:
                if not (keep_existing and folder.is_dir()):
                    raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def staging_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder for new files, which are then moved into `folder`.

    A new folder is created atomically. An existing one keeps its other files, and all of them if a
    path is taken (ValueError, as of `dpdist.core.files.resolve_inside`).
    """
    with _staging_path(folder) as aside:
        aside.mkdir()
        yield aside
        if not os.path.lexists(folder):
            os.rename(aside, folder)
            return
        files = sorted(path for path in aside.rglob("*") if path.is_file())
        places = [resolve_inside(folder, path.relative_to(aside).as_posix()) for path in files]
        for path, target in zip(files, places, strict=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)


@contextmanager
def _staging_path(folder: Path) -> Iterator[Path]:
    """Yield an unused path next to `folder`, and remove what is left there at the end.

    New parent folders that stay empty are removed, too.
    """
    aside = _temporary_sibling(folder)
    made = [above for above in folder.parents if not above.exists()]
    try:
        make_folder(folder.parent)
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        for above in made:
            with suppress(OSError):
                above.rmdir()


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Create a folder and its parents, and sync their names.

    A synced file would be lost with the name of a folder around it.

    mode: of `path` itself, if it is new.
    """
    new = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True, mode=mode)
    for each in new:
        fsync_path(each.parent)


def make_private_folder(path: Path) -> Path:
    """Return `path`, created for its owner only (mode 0700)."""
    make_folder(path)
    path.chmod(0o700)
    return path


# --- file names from outside ------------------------------------------------------------------


_MAX_NAME_BYTES = 255  # bytes of one part of a path, on the usual file systems


def check_relative_path(name: object, label: str = "path") -> str:
    """Return `name` if it is a plain path below a folder, with single slashes.

    Raises ValueError for an absolute path, '.', '..' or empty parts, a backslash, a drive, or a
    character that is not printable.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"{label}: must be a relative path, got {name!r}")
    parts = name.split("/")
    outside = any(part in ("", ".", "..") or part != part.strip() for part in parts)
    if outside or "\\" in name or ":" in parts[0] or not name.isprintable():
        raise ValueError(f"{label}: must be a plain path below the folder, got {name!r}")
    if any(len(part.encode()) > _MAX_NAME_BYTES for part in parts):
        raise ValueError(f"{label}: {name[:40]!r}... is too long")
    return name


def resolve_inside(folder: Path, path: str) -> Path:
    """Return the path of the file `path` below `folder`, without creating it.

    `path` is checked by `check_relative_path`. Raises ValueError for a link on the way, and for a
    file or folder in the way.
    """
    target = folder
    for part in check_relative_path(path).split("/"):
        if target.is_symlink() and target != folder:
            raise ValueError(f"{target} is a link; remove it")
        if target.exists() and not target.is_dir():
            raise ValueError(f"{target} is in the way, where a folder belongs; move it away")
        target = target / part
    if target.is_dir() and not target.is_symlink():
        raise ValueError(f"{target} is a folder, where a file belongs; move it away")
    return target


# --- comparing JSON values --------------------------------------------------------------------


def json_equal(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal except for the last bits of numbers.

    These differ between machines.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(json_equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(json_equal, one, other))
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (one, other))
    if numbers:
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-300)
    return type(one) is type(other) and one == other


# --- Parquet files ----------------------------------------------------------------------------


# By type: its name in messages, and the functions of pyarrow.types that recognize it.
_COLUMN_TYPES = {
    int: ("whole numbers", ("is_integer",)),
    float: ("numbers", ("is_floating",)),
    str: ("text", ("is_string", "is_large_string")),
    bool: ("true or false", ("is_boolean",)),
}
# int, float, str or bool, and the least value; object: any values, also missing ones
ColumnSpec = tuple[type, float | None]
_MAX_VALUES = 2**28  # in one table: a small compressed file may have more than fits into memory


# Key of the metadata of files of papers/dplis/features.py: a text, what a guarantee on them assumes
# of the network that computed them.
FEATURES_KEY = b"dpdist.features"


def open_parquet(path: str | Path) -> pq.ParquetFile:
    """Return an open Parquet file, of which only the footer is read.

    Raises:
        MissingFileError: the path does not exist.
        UserError: it is not a regular file, its name is not UTF-8, or its footer cannot be read.
    """
    import pyarrow.parquet as pq

    path = check_regular_file(path)  # opening a pipe would wait forever
    check_utf8_name(path)
    try:
        reader = pq.ParquetFile(path)
        names = reader.schema_arrow.names  # decoded only now
    except parquet_errors() as error:
        raise data_error(path, "not a readable Parquet file", cause=error) from None
    for name in names:
        check_utf8_name(name, f"{path}: column {name!r}")
    return reader


def parquet_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that pyarrow raises for a damaged Parquet file."""
    import pyarrow as pa

    return (OSError, ValueError, OverflowError, MemoryError, pa.ArrowException)


def count_values(reader: pq.ParquetFile) -> int:
    """Return the number of values of all columns and rows by a file's footer."""
    about = reader.metadata
    groups = [about.row_group(number) for number in range(about.num_row_groups)]
    columns = range(about.num_columns)
    stated = sum(group.column(column).num_values for group in groups for column in columns)
    values: int = max(stated, about.num_rows)
    return values


def read_table(path: str | Path, columns: Mapping[str, ColumnSpec]) -> pa.Table:
    """Return a Parquet table with at least one row.

    columns: required ones, without missing values, with the type and the least of their values.

    Raises MissingFileError, or UserError naming column and row of a wrong value.
    """
    path = Path(path)
    reader = open_parquet(path)
    if (values := count_values(reader)) > _MAX_VALUES:
        raise UserError(f"{path}: must have at most {_MAX_VALUES:,} values, got {values:,}")
    try:
        table = reader.read()
        table.validate(full=True)
    except parquet_errors() as error:
        raise data_error(path, "not a readable Parquet table", cause=error) from None
    check_columns(table, columns, path)
    if table.num_rows == 0:
        raise UserError(f"{path}: damaged: holds no rows")
    return table


def check_columns(table: pa.Table, columns: Mapping[str, ColumnSpec], path: Path) -> None:
    """Raise UserError naming column and row of a missing column or a wrong value."""
    names = table.column_names
    twice = sorted({name for name in names if names.count(name) > 1})
    missing = [name for name in columns if name not in names]
    if twice or missing:
        faults = [f"no column {name!r}" for name in missing]
        faults += [f"column {name!r} is there twice" for name in twice]
        raise UserError(f"{path}: damaged: {', '.join(faults)}")
    for name, (kind, least) in columns.items():
        _check_column(path, name, table[name], kind, least)


def _check_column(
    path: Path, name: str, values: pa.ChunkedArray, kind: type, minimum: float | None
) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc

    if kind is object:
        return
    words, known = _COLUMN_TYPES[kind]
    if not any(getattr(pa.types, name)(values.type) for name in known):
        raise UserError(f"{path}: damaged: column {name!r} must hold {words}, holds {values.type}")
    wrong = pc.is_null(values, nan_is_null=kind is float)
    if minimum is not None:
        wrong = pc.or_kleene(wrong, pc.less(values, minimum))
    row = pc.index(wrong, True).as_py()
    if row >= 0:
        right = words if minimum is None else f"{words} >= {minimum:g}"
        found = quoted(values[row].as_py())
        raise UserError(f"{path}: damaged: row {row}, {name!r} must hold {right}, got {found}")


# --- YAML files -------------------------------------------------------------------------------


MAX_YAML_BYTES = 128 * 2**10
_OTHER_BASE = re.compile(r"[-+]?0[0-7_]+|.*:.*")  # of a number, in YAML 1.1


def read_yaml(path: str | Path, *, other_bases: bool = False) -> list[Any]:
    """Return the documents of a YAML file, as dicts, lists, strings, numbers, booleans and None.

    other_bases: read 010 and 1:30 as YAML 1.1 does, as 8 and 90, for modes in cluster files.

    Raises MissingFileError, or UserError for what the module's docstring names, for more than
    128 KiB and for invalid YAML.
    """
    return parse_yaml(read_text(path, MAX_YAML_BYTES), str(path), other_bases=other_bases)


def parse_yaml(text: str, context: str, *, other_bases: bool = False) -> list[Any]:
    """Return the documents of a YAML text, as `read_yaml`. context: start of messages."""
    try:
        found = list(yaml.load_all(text, yaml.SafeLoader if other_bases else _Loader))
        json.dumps(found, default=str, skipkeys=True)  # an alias within itself has no end
        return found
    except UserError as error:
        raise UserError(f"{context}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: 5,000 digits
        raise UserError(f"{context}: cannot be read as YAML: {error_text(error)}") from None


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads dates as text, and raises an error for ambiguous values."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise UserError(f"line {key.start_mark.line + 1}: a key must be a word or a number")
            line, merged = key.start_mark.line + 1, key.tag.endswith(":merge")
            name = key.value if merged else self.construct_object(key)
            if name in seen:
                raise UserError(
                    f"{quoted(key.value)} is given twice, on lines {seen[name]} and {line}: keep "
                    "one"
                )
            seen[name] = line
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found

    def construct_scalar(self, node: Any) -> Any:
        if node.tag.endswith((":int", ":float")) and _OTHER_BASE.fullmatch(node.value):
            raise UserError(
                f"line {node.start_mark.line + 1}: must be a decimal number, got {node.value}, "
                f'which YAML reads in base 8 or 60; write "{node.value}" for the text'
            )
        return super().construct_scalar(node)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}

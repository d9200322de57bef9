"""The one door for files that are read back: regular, of bounded size, of the expected shape.

Whatever lies there, reading ends: a pipe, a device or a folder is refused before it is opened.
Every complaint is a UserError that names the file, what is wrong and what would be right.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpdist.base.errors import UserError

MOST_BYTES = 64 * 2**20  # of a JSON file
_DEPTH = 100  # of nested JSON values


class NoSuchFile(UserError):
    """There is nothing at the path."""


def usable_path(path: str | Path) -> Path:
    """`path` with ~ expanded. Raises UserError for one that no file system could hold."""
    text = str(path)
    if any(ord(letter) < 32 or letter == "\x7f" for letter in text):
        raise UserError(f"{shown(text)}: a path without control characters is needed")
    names = [len(os.fsencode(name)) for name in text.split("/")]
    if len(text) > 4000 or max(names) > 255:
        raise UserError(f"{shown(text)}: the path is too long (a name has at most 255 bytes)")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        user = Path(text).parts[0]
        raise UserError(f"{text}: there is no home folder of {user}; write the path out") from None


def check_text_name(name: str | Path, context: str = "") -> None:
    """Raise UserError for a name of bytes that are not UTF-8: Arrow, recipes and tables hold none.

    Args:
        name: a file's path, or any other name.
        context: begins the complaint; the name itself by default.
    """
    try:
        str(name).encode()
    except UnicodeEncodeError:
        raise UserError(f"{context or name}: the name must be UTF-8 text; rename it") from None


def is_file(path: Path) -> bool:
    """Whether something lies at `path` that is no folder; False too where nobody could look."""
    try:
        return path.exists() and not path.is_dir()
    except (OSError, ValueError):
        return False


def regular_file(path: str | Path, most: int | None = None) -> Path:
    """`path`, when a regular file of at most `most` bytes lies there.

    Raises NoSuchFile, and UserError for anything else.
    """
    path = Path(path)
    try:
        info = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise NoSuchFile(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{shown(str(path))}: cannot be read: {reason(error)}") from None
    if not stat.S_ISREG(info.st_mode):
        raise UserError(f"{path}: is {_kind(info.st_mode)}, must be a regular file")
    if most is not None and info.st_size > most:
        raise UserError(
            f"{path}: {info.st_size:,} bytes, at most {most:,} are read: is it the right file?"
        )
    return path


def _kind(mode: int) -> str:
    names = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for is_kind, name in names if is_kind(mode)), "a device")


def not_blocking(path: str | Path) -> None:
    """Raise UserError when opening `path`, or making it, would meet anything but a regular file."""
    try:
        regular_file(path)
    except NoSuchFile:
        return


def read_bytes(path: str | Path, most: int | None = None) -> bytes:
    """The content of a regular file. Raises as `regular_file`."""
    path = regular_file(path, most)
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {reason(error)}") from error


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """The content of a regular UTF-8 file. Raises as `regular_file`."""
    try:
        return read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: must be UTF-8 text, byte {error.start} is not") from None


def read_json(path: str | Path, shape: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A JSON object. shape: dotted keys that must be there, with the type of each value.

    Raises NoSuchFile, and UserError for what is not JSON (NaN, an endless number or a key given
    twice included) or has another shape.
    """
    return parse_json(read_text(path), str(path), shape)


def parse_json(
    text: str | bytes, where: str, shape: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """`read_json` of text that came otherwise; `where` begins the complaints."""
    value = parse_any_json(text, where)
    if not isinstance(value, dict):
        raise UserError(f"{where}: damaged: must be an object of keys, got {shown(value)}")
    return check_shape(value, where, shape or {})


def parse_any_json(text: str | bytes, where: str) -> Any:
    """Any JSON value, at most 100 deep. Raises as `parse_json`."""
    try:
        value = json.loads(
            text, parse_constant=_no_number, parse_float=_finite, object_pairs_hook=_unique
        )
        _check_depth(value)
        return value
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise UserError(f"{where}: damaged: {reason(error)}") from None


def check_shape(value: dict[str, Any], where: str, shape: Mapping[str, Any]) -> dict[str, Any]:
    """`value`, when each dotted key of `shape` leads to a value of its type. A whole number is a
    float as well. Raises UserError."""
    for key, kind in shape.items():
        found: Any = value
        for part in key.split("."):
            if not isinstance(found, dict) or part not in found:
                raise UserError(f"{where}: damaged: {key} is missing")
            found = found[part]
        if not _is(found, kind):
            name = getattr(kind, "__name__", str(kind))
            raise UserError(f"{where}: damaged: {key} must be {name}, got {shown(found)}")
    return value


def _is(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, int) and isinstance(1.0, kind):
        return abs(value) < 2**63
    return isinstance(value, kind)


def shown(value: Any, most: int = 80) -> str:
    """A value for a message: one short line, whatever it is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an endless number, endless nesting
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def reason(error: BaseException) -> str:
    """An error's text in one line."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(said.split())[:300] or type(error).__name__


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {shown(key)} is given twice")
        found[key] = value
    return found


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ValueError(f"nested more than {_DEPTH} deep")

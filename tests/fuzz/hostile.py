"""Values that nobody should send, and ways to damage what lies on a disk."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

BASE: dict[str, Any] = {
    "name": "x",
    "data": {"name": "digits", "max_train": 200},
    "model": {"name": "linear"},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-4},
    "training": {"batch_size": 20, "steps": 3, "learning_rate": 0.5},
    "certify": {"sigma": 0.5, "n": 100, "max_inputs": 2},
}
# What no strategy makes by itself: edges, names of places and code, and deep or wide values.
DEEP: Any = 1
for _ in range(40):
    DEEP = [DEEP]
SPECIAL: list[Any] = [
    5e-324, 1e-12, 1 - 1e-16, 1e300, 10**400, "1e5", "nan", "x" * 5000, "a\0b", "~nosuchuser/x",
    "../..", "/dev/zero", "/nowhere/x", "*", "{", "$HOME", "\u202e", "2001-01-01", "builtins:len",
    "os:system", "no_such:f", "torchvision", "s3://", "file:///", "--help", DEEP, [0] * 2000,
    {str(i): i for i in range(2000)}, {"name": None}, {"name": "x"}, {"choice": []},
    {"choice": [{}]},
]  # fmt: skip

TEXT = st.text(st.characters(), max_size=20)  # surrogates too
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.integers(), st.floats(), TEXT,
    st.sampled_from(SPECIAL),
)  # fmt: skip
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
)


def options(schema: Any) -> Iterator[tuple[str, ...]]:
    """Every dotted field below a JSON schema, sections and their leaves."""

    def walk(node: Any, path: tuple[str, ...], room: int) -> Iterator[tuple[str, ...]]:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        for choice in (*node.get("anyOf", ()), *node.get("oneOf", ())):
            yield from walk(choice, path, room)
        for name, inner in node.get("properties", {}).items():
            yield (*path, name)
            if room:
                yield from walk(inner, (*path, name), room - 1)

    return walk(schema, (), 4)


def put(raw: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        inner = raw.get(part)
        if isinstance(inner, str):
            inner = {"name": inner}
        if not isinstance(inner, dict):
            inner = {}
        raw[part] = inner
        raw = inner
    raw[path[-1]] = value


# --- damage to a file: each takes the path and a chooser (a case's draw)

Draw = Callable[[Any], Any]


def _truncated(path: Path, draw: Draw) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: draw(st.integers(0, max(0, len(raw) - 1)))])


def _flipped(path: Path, draw: Draw) -> None:
    raw = bytearray(path.read_bytes())
    for _ in range(draw(st.integers(1, 8))):
        if raw:
            raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    path.write_bytes(bytes(raw))


# Beginnings of files and of JSON that readers know.
KNOWN = [
    b"", b"{", b"[]", b"{}", b"null", b"NaN", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 5000,
    b"9" * 5000, b'{"format": 1e999}', b'{"format": 99}', b"PAR1" + b"\xff" * 60 + b"PAR1",
    (2).to_bytes(8, "little") + b"{}", b"\x93NUMPY",
]  # fmt: skip


def _replaced(path: Path, draw: Draw) -> None:
    path.write_bytes(draw(st.sampled_from(KNOWN) | st.binary(max_size=100)))


def _gone(path: Path, draw: Draw) -> None:
    path.unlink()


def _folder(path: Path, draw: Draw) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path, draw: Draw) -> None:
    path.unlink()
    os.mkfifo(path)


def _device(path: Path, draw: Draw) -> None:
    path.unlink()
    path.symlink_to(draw(st.sampled_from(["/dev/zero", "/dev/null", "/nowhere/x", path.name])))


def _edited(path: Path, draw: Draw) -> None:
    """One place of a JSON file: removed, replaced, or of another type."""
    try:
        value = json.loads(path.read_text())
    except ValueError:
        return _flipped(path, draw)
    place, holder = value, None
    while isinstance(place, dict | list) and place and (holder is None or draw(st.booleans())):
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        holder, key = place, draw(st.sampled_from(list(keys)))
        place = place[key]
    if holder is None:
        return _replaced(path, draw)
    if isinstance(holder, dict) and draw(st.booleans()):
        del holder[key]
    else:
        holder[key] = draw(values)
    path.write_text(json.dumps(value, default=str))


DAMAGES = (_truncated, _flipped, _replaced, _gone, _folder, _pipe, _device)


def damage(path: Path, draw: Draw) -> str:
    """Damage one file; returns how."""
    kinds = (_edited, _edited, _edited, *DAMAGES) if path.suffix == ".json" else DAMAGES
    kind = draw(st.sampled_from(kinds))
    kind(path, draw)
    return kind.__name__


def restored(source: Path, target: Path) -> None:
    """Make `target` a copy of `source` again."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)

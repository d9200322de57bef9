"""Files that survive a crash: written whole or not at all, in folders only the owner can read."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from dpdist.base.names import place


def write_atomic(path: Path, data: bytes | str, *, durable: bool = True) -> None:
    """Replace `path` by `data`, durably: after a crash it holds the old content or the new one.

    durable: False does not wait for the disk; who reads it sees the old or the new content, but for
    a power cut. For what shows how far something is, and nothing rests on.
    """
    with written_aside(path, durable=durable) as aside:
        aside.write_bytes(data.encode() if isinstance(data, str) else data)


def write_together(files: Mapping[Path, str]) -> None:
    """Replace files that belong together: all are written aside before the first takes its place,
    so that a full disk leaves the old ones as they are. The first of them is replaced last."""
    with ExitStack() as stack:
        for path, text in files.items():
            remove_leftovers(path.parent, of=path.name)
            stack.enter_context(written_aside(path)).write_bytes(text.encode())


@contextmanager
def written_aside(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A path beside `path` to write a file at, which then takes its place as in `write_atomic`."""
    make_folder(path.parent)
    aside = _aside(path)
    try:
        yield aside
        if durable:
            sync(aside)
        os.replace(aside, path)
        if durable:
            sync(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def write_result(path: Path, data: bytes | str) -> None:
    """Write a file that a user asked for by its path, whole or not at all.

    A link is followed; into a pipe or device it is written as it is. Raises OSError, where its
    folder is not there among others.
    """
    raw = data.encode() if isinstance(data, str) else data
    target = path.resolve()
    if not target.parent.is_dir() or (target.exists() and not target.is_file()):
        target.write_bytes(raw)
        return
    write_atomic(target, raw)


def write_once(path: Path, text: str) -> None:
    """Write a secret at `path`, whole and durable, readable by its owner only, unless something is
    there: of two processes at once, the first one's stays for both."""
    if os.path.lexists(path):
        return
    aside = _aside(path)
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(aside, path)
        sync(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Bring a file's content to the disk, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(path: Path) -> Path:
    """A name beside `path` that no other process takes: hosts that share a disk share numbers."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")


_ASIDE = re.compile(r"\.(.+)\.(\d+)-[0-9a-f]{8}")  # as `_aside` makes them


def remove_leftovers(*folders: Path, of: str | None = None) -> None:
    """Remove what killed processes of this host left half-written in these folders.

    For who is alone there: on a disk that hosts share, another host's writer would be taken for a
    dead one. of: only what would have become the file or folder of that name.
    """
    for folder in folders:
        for path in folder.iterdir() if folder.is_dir() else ():
            found = _ASIDE.fullmatch(path.name)
            if found is None or of not in (None, found[1]) or Path("/proc", found[2]).exists():
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


SESSION_FOLDER = "DPDIST_SESSION_FOLDER"  # names the folder of a local Ray session, to all in it
TRAINING_FOLDER = "dpdist-training-"  # how the folder of one of many trainings begins
_LOCK = "held.lock"


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Make a folder on this host for its owner only (mode 0700), and remove it at the end.

    In a local Ray session it lies in the session's folder, whose reaper removes it after a
    `kill -9`. Elsewhere a killed process leaves it to the next one that makes such a folder.
    """
    root = Path(tempfile.gettempdir())
    remove_temporary(root, prefix)
    session = os.environ.get(SESSION_FOLDER, "")
    inside = session if session and os.path.isdir(session) else root
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=inside))
    try:
        with held(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Mark a temporary folder as in use while this process lives, for `remove_temporary`."""
    new = folder / f"{_LOCK}.new"
    with new.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.replace(new, folder / _LOCK)  # under this name it is never there and free
        yield


def remove_temporary(root: Path, prefix: str) -> None:
    """Remove the folders of this user below `root`, of names with this prefix, that nobody holds.

    One without a lock is left alone: it is being made, or is none of ours.
    """
    for folder in root.glob(f"{prefix}*"):
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """`write_atomic` of JSON, sorted and indented. Raises ValueError for a number that is not
    finite, which JSON cannot hold."""
    text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"
    write_atomic(path, text, durable=durable)


def json_number(value: float) -> float | None:
    """A measured number as JSON can hold it: null for one that is not finite."""
    return value if math.isfinite(value) else None


@contextmanager
def built_aside(folder: Path, *, replace: bool = False, first: bool = False) -> Iterator[Path]:
    """A path beside `folder` to build it at, moved there at the end: whole or not there.

    replace: a folder that is there already makes room for the new one, and only when that is whole.
    first: one that another process put there meanwhile stays, instead of an OSError.
    """
    old = _aside(folder)
    if replace:
        remove_leftovers(folder.parent, of=folder.name)
    try:
        with _beside(folder) as aside:
            yield aside
            if replace and folder.exists():
                os.rename(folder, old)
            try:
                os.rename(aside, folder)
                sync(folder.parent)
            except OSError:
                if not (first and folder.is_dir()):
                    raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def moved_in(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` to build files in, which then take their places below it.

    A folder that was not there is whole or not there. One that was keeps its other files, and all
    of them when a place is taken (ValueError, as of `dpdist.base.names.place`).
    """
    with _beside(folder) as aside:
        aside.mkdir()
        yield aside
        if not os.path.lexists(folder):
            os.rename(aside, folder)
            return
        files = sorted(path for path in aside.rglob("*") if path.is_file())
        places = [place(folder, path.relative_to(aside).as_posix()) for path in files]
        for path, target in zip(files, places, strict=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)


def move_together(files: Sequence[Path], folder: Path) -> list[Path]:
    """Move files into a folder on the same disk, under their names, and return where they are.

    All are moved, or none is there when an error leaves.
    """
    moved: list[Path] = []
    try:
        for file in files:
            moved.append(folder / file.name)
            os.replace(file, moved[-1])
    except BaseException:
        for path in moved:
            path.unlink(missing_ok=True)
        raise
    return moved


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """A path beside `folder`, where nothing is; what is there at the end is removed, and so are
    the folders above that were made for it and stayed empty."""
    aside = _aside(folder)
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
    """Create a folder, and those above it, so that their names survive a crash: a file that was
    synced is lost with the name of a folder around it.

    mode: of `path` itself, if it is new.
    """
    new = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True, mode=mode)
    for each in new:
        sync(each.parent)


def private_folder(path: Path) -> Path:
    """`path`, created for its owner only (mode 0700)."""
    make_folder(path)
    path.chmod(0o700)
    return path

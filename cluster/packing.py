"""What of a working directory travels to the cluster: code and recipes, never data, runs or
secrets."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from dpdist.base.errors import ClusterError

MAX_BYTES = 50 * 2**20
# What every host has installed, or needs not: left at home from a checkout.
_OF_CHECKOUT = ("cluster", "dpdist", "tuning", "tests", "docs", "benchmarks")
_FOLDERS = frozenset({"runs", "private", "data", "fetched", "build", "dist", "node_modules"})
# Code and recipes. All else travels only when it is named: a picture or a table may be a record.
_ENDINGS = frozenset({
    ".py", ".pyi", ".pyx", ".pxd", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".sh",
    ".yaml", ".yml", ".toml", ".cfg", ".ini", ".md", ".rst",
})  # fmt: skip
_NAMES = ("requirements*.txt", "constraints*.txt", "Makefile", "Dockerfile", "LICENSE*")
# Never, even where named.
_SECRETS = (".pem", ".key", ".p12", ".pfx", ".jks", ".keystore", ".kdbx")


@dataclass(frozen=True)
class Packed:
    """folder holds copies of `files` (relative paths), `size` bytes in all. left: what does not
    travel, files and whole folders (with a slash)."""

    folder: Path
    files: tuple[Path, ...]
    size: int
    left: tuple[str, ...]


@dataclass(frozen=True)
class Sending:
    """Choose the files of a directory that are sent to a cluster.

    source: the directory. named: files and folders in it that the user wants to travel, whatever
    their endings. used: those that the recipe reads, such as public weights. closed: folders and
    files that never travel, with all below: data, budgets, archives.
    """

    source: Path
    named: tuple[Path, ...] = ()
    used: tuple[Path, ...] = ()
    closed: tuple[Path, ...] = ()

    def chosen(self) -> tuple[list[Path], list[str]]:
        """Return the files that travel, relative and sorted, and what is left at home.

        Never: what is hidden (.git, .venv, .env, .ssh), folders named runs, private, data, fetched,
        build or dist, any folder with a pyvenv.cfg or a run.json, keys, links, what is closed, and
        our own packages of a checkout. Of the rest, code and recipes by their endings, and what is
        named. Raises ClusterError where something named never travels, and where a file or folder
        of the user's is named dpdist.
        """
        source = self.source
        checkout = (source / "dpdist" / "runs" / "recipe.py").is_file()
        if not checkout:
            for path in (source / "dpdist", source / "dpdist.py"):
                if path.exists():
                    raise ClusterError(
                        f"{path}: would hide the package 'dpdist' from the workers; rename it, or "
                        "submit from another directory"
                    )
        found: list[Path] = []
        left: list[str] = []
        for folder, folders, files in os.walk(source):
            here = Path(folder)
            ours = _OF_CHECKOUT if checkout and here == source else ()
            kept = [name for name in sorted(folders) if self._travels(here / name, ours)]
            for name in set(folders) - set(kept):
                if not (name.startswith((".", "__")) or name in ours):
                    left.append(f"{(here / name).relative_to(source)}/")
            folders[:] = kept
            for name in files:
                path = here / name
                if self._travels(path) and self._wanted(path):
                    found.append(path.relative_to(source))
                elif not name.startswith("."):
                    left.append(str(path.relative_to(source)))
        self._refuse_missing(found)
        return sorted(found), sorted(left)

    def _travels(self, path: Path, ours: Sequence[str] = ()) -> bool:
        """Return whether a file, or anything in a folder, may travel at all."""
        name = path.name
        if name.startswith(".") or path.is_symlink() or self._is_closed(path):
            return False
        if not path.is_dir():
            return path.is_file() and not name.lower().endswith(_SECRETS)
        known = name.startswith("__") or name in _FOLDERS or name.endswith(".egg-info")
        made = any((path / each).exists() for each in ("pyvenv.cfg", "run.json"))
        return not (known or made or name in ours)

    def _is_closed(self, path: Path) -> bool:
        """Return whether a path is, or lies in, what is closed."""
        return any(path == each or each in path.parents for each in self.closed)

    def _wanted(self, path: Path) -> bool:
        by_name = any(fnmatch(path.name, pattern) for pattern in _NAMES)
        if by_name or path.suffix.lower() in _ENDINGS:
            return True
        meant = (*self.named, *self.used)
        return any(path == each or each in path.parents for each in meant)

    def _refuse_missing(self, found: Sequence[Path]) -> None:
        """Raise ClusterError for something named of which nothing travels."""
        for each in self.named:
            if not any(each == self.source / path or each in (self.source / path).parents
                       for path in found):  # fmt: skip
                raise ClusterError(
                    f"--send {each}: must be a file or folder of {self.source} that may be sent; "
                    "data, budgets, runs, keys, links and hidden files never are"
                )


def closed_by(settings: Any, here: Path, root: Path | None = None) -> tuple[Path, ...]:
    """Return the files and folders that a recipe's settings name and that are never sent.

    Each `root` of data, where it does not hold `here` itself, and the data set below it; each
    `budget`; an `archive` that is a folder.

    Args:
        settings: a recipe as plain data.
        here: the directory that is sent, and that relative paths are relative to.
        root: of data sections that have none of their own.
    """
    if isinstance(settings, list | tuple):
        return tuple(path for each in settings for path in closed_by(each, here, root))
    if not isinstance(settings, dict):
        return ()
    found: list[Path] = []
    if settings.get("root") is not None:
        root = (here / settings["root"]).resolve()
        found += [root] if here != root and root not in here.parents else []
    if root is not None and "root" in settings:
        names = (settings.get(key) for key in ("name", "data"))
        found += [(root / name).resolve() for name in names if isinstance(name, str)]
    if settings.get("budget") is not None:
        found.append((here / settings["budget"]).resolve())
    archive = settings.get("archive")
    if isinstance(archive, str) and archive.startswith("file://"):
        found.append(Path(archive.removeprefix("file://")).resolve())
    own = settings.get("data")  # the recipe's own data: their root is that of all others
    if isinstance(own, dict) and own.get("root") is not None:
        root = (here / own["root"]).resolve()
    found += [path for each in settings.values() for path in closed_by(each, here, root)]
    return tuple(dict.fromkeys(found))


def pack(sending: Sending, target: Path, limit: int = MAX_BYTES) -> Packed:
    """Copy what travels into the new folder `target`.

    Raises ClusterError as `Sending.chosen`, and above `limit` bytes, naming the largest files.
    """
    source = sending.source
    files, left = sending.chosen()
    sizes = {path: (source / path).stat().st_size for path in files}
    total = sum(sizes.values())
    if total > limit:
        largest = sorted(files, key=lambda path: -sizes[path])[:3]
        named = ", ".join(f"{path} ({sizes[path] / 2**20:.0f} MiB)" for path in largest)
        raise ClusterError(
            f"{source}: {total / 2**20:.0f} MiB would be sent to the cluster, the limit is "
            f"{limit / 2**20:.0f}; largest: {named}. Data belong on the shared storage; submit "
            "from a directory that holds code and recipes only"
        )
    target.mkdir(parents=True)
    for path in files:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / path, target / path)
    return Packed(target, tuple(files), total, tuple(left))

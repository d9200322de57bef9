"""What of a working directory travels to the cluster: code and recipes, never data, runs or
secrets."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from dpdist.base.errors import ClusterError

MAX_BYTES = 50 * 2**20
# What every host has installed, or needs not: left at home from a checkout.
_OF_CHECKOUT = ("cluster", "dpdist", "tuning", "tests", "docs", "benchmarks")
_FOLDERS = frozenset({"runs", "private", "data", "fetched", "build", "dist", "node_modules"})
_ENDINGS = (
    ".parquet", ".arrow", ".npy", ".npz", ".csv", ".h5", ".tar", ".gz", ".zip", ".pem", ".key",
    ".pyc", ".ckpt", ".pt", ".pth", ".pkl",
)  # fmt: skip


@dataclass(frozen=True)
class Packed:
    """folder holds copies of `files` (relative paths), `size` bytes in all."""

    folder: Path
    files: tuple[Path, ...]
    size: int


def chosen(source: Path) -> list[Path]:
    """The files of `source` that travel, relative and sorted.

    Left out: everything hidden (.git, .venv, .env, .ssh), folders named runs, private, data,
    fetched, build or dist, any folder with a pyvenv.cfg or a run.json, data and key files by their
    endings, links, and our own packages of a checkout. Raises ClusterError when a file or folder
    of the user's is named dpdist.
    """
    checkout = (source / "dpdist" / "runs" / "recipe.py").is_file()
    if not checkout:
        for path in (source / "dpdist", source / "dpdist.py"):
            if path.exists():
                raise ClusterError(
                    f"{path}: would hide the package 'dpdist' from the workers; rename it, or "
                    "submit from another directory"
                )
    found: list[Path] = []
    for folder, folders, files in os.walk(source):
        here = Path(folder)
        folders[:] = [
            name
            for name in sorted(folders)
            if not name.startswith((".", "__"))
            and name not in _FOLDERS
            and not name.endswith(".egg-info")
            and not (checkout and here == source and name in _OF_CHECKOUT)
            and not (here / name / "pyvenv.cfg").exists()
            and not (here / name / "run.json").exists()
            and not (here / name).is_symlink()
        ]
        found += [
            (here / name).relative_to(source)
            for name in files
            if not name.startswith(".")
            and not name.lower().endswith(_ENDINGS)
            and not (here / name).is_symlink()
            and (here / name).is_file()
        ]
    return sorted(found)


def pack(source: Path, target: Path, limit: int = MAX_BYTES) -> Packed:
    """Copy what travels from `source` into the new folder `target`.

    Raises ClusterError above `limit` bytes, naming the largest files.
    """
    files = chosen(source)
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
    return Packed(target, tuple(files), total)

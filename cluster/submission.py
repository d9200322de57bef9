"""Submit jobs to a running cluster through Ray's job server: pack, submit, follow, stop, collect.

The server listens on the head's loopback interface only; an SSH tunnel (`ray dashboard
cluster.yaml`) brings it to this machine, and every request carries the cluster's token. Packed are
code and recipes of a working directory, never data, runs or secrets.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpdist.core.errors import ClusterError

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

# --- packing a working directory --------------------------------------------------------------


MAX_PACKAGE_BYTES = 50 * 2**20
# What every host has installed, or needs not: left at home from a checkout.
_CHECKOUT_FOLDERS = ("cluster", "dpdist", "tuning", "tests", "docs", "benchmarks")
_FOLDERS = frozenset({"runs", "private", "data", "fetched", "build", "dist", "node_modules"})
# Code and recipes. All else travels only when it is named: a picture or a table may be a record.
_INCLUDED_SUFFIXES = frozenset({
    ".py", ".pyi", ".pyx", ".pxd", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".sh",
    ".yaml", ".yml", ".toml", ".cfg", ".ini", ".md", ".rst",
})  # fmt: skip
_NAMES = ("requirements*.txt", "constraints*.txt", "Makefile", "Dockerfile", "LICENSE*")
# Never, even where named.
_SECRETS = (".pem", ".key", ".p12", ".pfx", ".jks", ".keystore", ".kdbx")


@dataclass(frozen=True)
class Package:
    """folder holds copies of `files` (relative paths), `size` bytes in all. excluded: what does not
    travel, files and whole folders (with a slash)."""

    folder: Path
    files: tuple[Path, ...]
    size: int
    excluded: tuple[str, ...]


@dataclass(frozen=True)
class PackageSpec:
    """Choose the files of a directory that are sent to a cluster.

    source: the directory. included: files and folders in it that the user wants to travel, whatever
    their endings. recipe_files: those that the recipe reads, such as public weights. excluded:
    folders and files that never travel, with all below: data, budgets, archives.
    """

    source: Path
    included: tuple[Path, ...] = ()
    recipe_files: tuple[Path, ...] = ()
    excluded: tuple[Path, ...] = ()

    def select_files(self) -> tuple[list[Path], list[str]]:
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
        found, left = list[Path](), list[str]()
        for folder, folders, files in os.walk(source):
            here = Path(folder)
            ours = _CHECKOUT_FOLDERS if checkout and here == source else ()
            kept = [name for name in sorted(folders) if self._may_be_sent(here / name, ours)]
            for name in set(folders) - set(kept):
                if not (name.startswith((".", "__")) or name in ours):
                    left.append(f"{(here / name).relative_to(source)}/")
            folders[:] = kept
            for name in files:
                path = here / name
                if self._may_be_sent(path) and self._is_selected(path):
                    found.append(path.relative_to(source))
                elif not name.startswith("."):
                    left.append(str(path.relative_to(source)))
        self._check_included(found)
        return sorted(found), sorted(left)

    def _may_be_sent(self, path: Path, own_packages: Sequence[str] = ()) -> bool:
        """Return whether a file, or anything in a folder, may travel at all."""
        name = path.name
        if name.startswith(".") or path.is_symlink() or self._is_excluded(path):
            return False
        if not path.is_dir():
            return path.is_file() and not name.lower().endswith(_SECRETS)
        known = name.startswith("__") or name in _FOLDERS or name.endswith(".egg-info")
        made = any((path / each).exists() for each in ("pyvenv.cfg", "run.json"))
        return not (known or made or name in own_packages)

    def _is_excluded(self, path: Path) -> bool:
        """Return whether a path is, or lies in, what is closed."""
        return any(path == each or each in path.parents for each in self.excluded)

    def _is_selected(self, path: Path) -> bool:
        by_name = any(fnmatch(path.name, pattern) for pattern in _NAMES)
        if by_name or path.suffix.lower() in _INCLUDED_SUFFIXES:
            return True
        meant = (*self.included, *self.recipe_files)
        return any(path == each or each in path.parents for each in meant)

    def _check_included(self, found: Sequence[Path]) -> None:
        """Raise ClusterError for something named of which nothing travels."""
        for each in self.included:
            if not any(each == self.source / path or each in (self.source / path).parents
                       for path in found):  # fmt: skip
                raise ClusterError(
                    f"--send {each}: must be a file or folder of {self.source} that may be sent; "
                    "data, budgets, runs, keys, links and hidden files never are"
                )


def excluded_paths(
    settings: Any, working_directory: Path, root: Path | None = None
) -> tuple[Path, ...]:
    """Return the files and folders that a recipe's settings name and that are never sent.

    Each `root` of data, where it does not hold `working_directory` itself, and the data set below
    it; each `budget`; an `archive` that is a folder.

    Args:
        settings: a recipe as plain data.
        working_directory: the directory that is sent, and that relative paths are relative to.
        root: of data sections that have none of their own.
    """
    if isinstance(settings, list | tuple):
        return tuple(
            path for each in settings for path in excluded_paths(each, working_directory, root)
        )
    if not isinstance(settings, dict):
        return ()
    found: list[Path] = []
    if settings.get("root") is not None:
        root = (working_directory / settings["root"]).resolve()
        if working_directory != root and root not in working_directory.parents:
            found.append(root)
    if root is not None and "root" in settings:
        names = (settings.get(key) for key in ("name", "data"))
        found += [(root / name).resolve() for name in names if isinstance(name, str)]
    if settings.get("budget") is not None:
        found.append((working_directory / settings["budget"]).resolve())
    archive = settings.get("archive")
    if isinstance(archive, str) and archive.startswith("file://"):
        found.append(Path(archive.removeprefix("file://")).resolve())
    own = settings.get("data")  # the recipe's own data: their root is that of all others
    if isinstance(own, dict) and own.get("root") is not None:
        root = (working_directory / own["root"]).resolve()
    found += [
        path for each in settings.values() for path in excluded_paths(each, working_directory, root)
    ]
    return tuple(dict.fromkeys(found))


def pack(spec: PackageSpec, target: Path, limit: int = MAX_PACKAGE_BYTES) -> Package:
    """Copy what travels into the new folder `target`.

    Raises ClusterError as `PackageSpec.select_files`, and above `limit` bytes, naming the largest
    files.
    """
    source = spec.source
    files, left = spec.select_files()
    sizes = {path: (source / path).stat().st_size for path in files}
    total = sum(sizes.values())
    if total > limit:
        largest = sorted(files, key=lambda path: -sizes[path])[:3]
        named = ", ".join(f"{path} ({sizes[path] / 2**20:.0f} MiB)" for path in largest)
        raise ClusterError(
            f"{source}: {total / 2**20:.0f} MiB would be sent to the cluster, the limit is "
            f"{limit / 2**20:.0f}; largest: {named}. Data belong on the shared storage; submit "
            "from a directory that holds code and recipes only",
            see="how-to/cluster.md#submit-follow-fetch",
        )
    target.mkdir(parents=True)
    for path in files:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / path, target / path)
    return Package(target, tuple(files), total, tuple(left))


# --- jobs -------------------------------------------------------------------------------------


DEFAULT_ADDRESS = "http://127.0.0.1:8265"
_POLL = 1.0  # seconds
_MAX_SILENCE_SECONDS = 300.0  # seconds without any answer before following gives up


class JobClient:
    """The jobs of the cluster whose job server answers at `address` (http://HOST:PORT).

    Raises ClusterError when nothing answers there or the token is refused.
    """

    def __init__(self, address: str | None = None) -> None:
        self.address = address or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_ADDRESS
        if not self.address.startswith(("http://", "https://")):
            raise ClusterError(f"RAY_API_SERVER_ADDRESS: {self.address}: must be http://HOST:PORT")
        _enable_token_authentication()
        from ray.job_submission import JobSubmissionClient

        self._client = self._call(lambda: JobSubmissionClient(self.address))

    def _call(self, action: Callable[[], Any]) -> Any:
        from ray.exceptions import AuthenticationError
        from requests.exceptions import RequestException

        try:
            return action()
        except AuthenticationError as error:
            raise ClusterError(
                f"{self.address}: the cluster refuses this machine's token: use the token the "
                "cluster was started with (~/.ray/auth_token, or RAY_AUTH_TOKEN_PATH)",
                see="how-to/cluster.md#what-every-cluster-needs",
            ) from error
        except (ConnectionError, RequestException) as error:
            raise _ServerUnreachableError(
                f"no cluster answers at {self.address}; open the tunnel first, with `ray dashboard "
                "cluster.yaml` or `ssh -N -L 8265:127.0.0.1:8265 HEAD`",
                see="how-to/cluster.md#submit-follow-fetch",
            ) from error
        except RuntimeError as error:
            raise ClusterError(f"{self.address}: {_last_line(error)}") from error

    def submit(
        self, name: str, entrypoint: str, *, working_dir: Path | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Start `entrypoint` (a shell command) on the head as job `name`, with a copy of
        `working_dir` as its directory on every host."""
        environment = {} if working_dir is None else {"working_dir": str(working_dir)}
        self._call(
            lambda: self._client.submit_job(
                entrypoint=entrypoint, submission_id=name, runtime_env=environment,
                metadata=dict(metadata or {}),
            )
        )  # fmt: skip

    def get_job(self, name: str) -> JobDetails:
        """Return what Ray says of a job. Raises ClusterError when there is none of that name."""
        try:
            found: JobDetails = self._call(lambda: self._client.get_job_info(name))
            return found
        except _ServerUnreachableError:
            raise
        except ClusterError as error:
            if "does not exist" in str(error):
                raise ClusterError(f"{name}: no such job at {self.address}") from error
            raise

    def list_jobs(self) -> list[JobDetails]:
        """All submitted jobs, the newest first."""
        found = [job for job in self._call(self._client.list_jobs) if job.submission_id]
        return sorted(found, key=lambda job: -(job.start_time or 0))

    def read_log(self, name: str) -> str:
        """All that the job has printed so far."""
        return self._call(lambda: self._client.get_job_logs(name)) or ""

    def stop(self, name: str) -> bool:
        """Ask a job to end (it gets SIGTERM); False when it had ended."""
        self.get_job(name)
        return bool(self._call(lambda: self._client.stop_job(name)))

    def follow(self, name: str, write: Callable[[str], None]) -> JobDetails:
        """Hand what the job prints to `write` until it has ended; returns its last state.

        Survives interruptions of the tunnel of up to five minutes. Raises ClusterError beyond.
        """
        shown, silent_since = 0, None
        while True:
            try:
                job, text = self.get_job(name), self.read_log(name)
                silent_since = None
            except _ServerUnreachableError:
                now = time.monotonic()
                silent_since = silent_since or now
                if now - silent_since > _MAX_SILENCE_SECONDS:
                    raise
                time.sleep(5 * _POLL)
                continue
            if len(text) > shown:
                write(text[shown:])
                shown = len(text)
            if job.status.is_terminal():
                return job
            time.sleep(_POLL)


class _ServerUnreachableError(ClusterError):
    pass


def _last_line(error: BaseException) -> str:
    """The last line of a server's traceback."""
    lines = [line for line in str(error).replace("\\n", "\n").splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _enable_token_authentication() -> None:
    """Send the token whenever this machine has one: Ray only does when the mode is set."""
    has_file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    if "RAY_AUTH_MODE" not in os.environ and ("RAY_AUTH_TOKEN" in os.environ or has_file.exists()):
        os.environ["RAY_AUTH_MODE"] = "token"
    from dpdist.cluster.session import reload_ray_environment

    reload_ray_environment()

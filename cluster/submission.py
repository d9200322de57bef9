"""Submit jobs to a running cluster through Ray's job server: pack, submit, follow and stop.

The server listens only on the head's loopback interface; an SSH tunnel (`ray dashboard
cluster.yaml`) makes it available on this machine, and every request has the cluster's token. The
package has code and recipes of a working directory, and never data, runs or secrets.
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
# Folders of a checkout that every host has installed, or does not need.
_CHECKOUT_FOLDERS = ("cluster", "dpdist", "tuning", "tests", "docs", "benchmarks")
_FOLDERS = frozenset({"runs", "private", "data", "fetched", "build", "dist", "node_modules"})
# Code and recipes. Other files are sent only if they are named: an image or a table may be a
# record.
_INCLUDED_SUFFIXES = frozenset({
    ".py", ".pyi", ".pyx", ".pxd", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".sh",
    ".yaml", ".yml", ".toml", ".cfg", ".ini", ".md", ".rst",
})  # fmt: skip
_NAMES = ("requirements*.txt", "constraints*.txt", "Makefile", "Dockerfile", "LICENSE*")
# Never sent, even if named.
_SECRETS = (".pem", ".key", ".p12", ".pfx", ".jks", ".keystore", ".kdbx")


@dataclass(frozen=True)
class Package:
    """A packed working directory.

    folder: has copies of `files` (relative paths), `size` bytes in total. excluded: files and whole
    folders (with a slash) that are not sent.
    """

    folder: Path
    files: tuple[Path, ...]
    size: int
    excluded: tuple[str, ...]


@dataclass(frozen=True)
class PackageSpec:
    """The choice of files in a directory that are sent to a cluster.

    source: the directory. included: files and folders in it that the user names, with any suffix.
    recipe_files: files that the recipe reads, such as public weights. excluded: folders and files
    that are never sent: data, budgets, archives.
    """

    source: Path
    included: tuple[Path, ...] = ()
    recipe_files: tuple[Path, ...] = ()
    excluded: tuple[Path, ...] = ()

    def select_files(self) -> tuple[list[Path], list[str]]:
        """Return the sorted relative paths of files that are sent, and of those that are not.

        Hidden files (.git, .venv, .env, .ssh), folders named runs, private, data, fetched, build or
        dist, folders with a pyvenv.cfg or a run.json, keys, links, `excluded`, and dpdist's own
        folders in a checkout are never sent. Of the rest, code and recipes are sent by their
        suffixes, and named files. Raises ClusterError if a named file is never sent, or a file or
        folder of the user is named dpdist.
        """
        source = self.source
        checkout = (source / "dpdist" / "runs" / "recipe.py").is_file()
        if not checkout:
            for path in (source / "dpdist", source / "dpdist.py"):
                if path.exists():
                    raise ClusterError(
                        f"{path}: must have a different name than the package 'dpdist', which it "
                        "would hide from the workers; rename it, or submit from a different folder"
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
        """Return whether a file, or the content of a folder, may be sent."""
        name = path.name
        if name.startswith(".") or path.is_symlink() or self._is_excluded(path):
            return False
        if not path.is_dir():
            return path.is_file() and not name.lower().endswith(_SECRETS)
        known = name.startswith("__") or name in _FOLDERS or name.endswith(".egg-info")
        made = any((path / each).exists() for each in ("pyvenv.cfg", "run.json"))
        return not (known or made or name in own_packages)

    def _is_excluded(self, path: Path) -> bool:
        """Return whether a path is excluded, or in an excluded folder."""
        return any(path == each or each in path.parents for each in self.excluded)

    def _is_selected(self, path: Path) -> bool:
        by_name = any(fnmatch(path.name, pattern) for pattern in _NAMES)
        if by_name or path.suffix.lower() in _INCLUDED_SUFFIXES:
            return True
        meant = (*self.included, *self.recipe_files)
        return any(path == each or each in path.parents for each in meant)

    def _check_included(self, found: Sequence[Path]) -> None:
        """Raise ClusterError for a named file or folder of which nothing is sent."""
        sent = [self.source / path for path in found]
        for each in self.included:
            if not any(each == path or each in path.parents for path in sent):
                raise ClusterError(
                    f"--send {each}: must be a file or folder of {self.source} that may be sent; "
                    "data, budgets, runs, keys, links and hidden files are never sent"
                )


def excluded_paths(
    settings: Any, working_directory: Path, root: Path | None = None
) -> tuple[Path, ...]:
    """Return the files and folders in a recipe's settings that must never be sent.

    They are each `root` of data, unless it contains `working_directory`, and the data set in it;
    each `budget`; and an `archive` that is a folder.

    Args:
        settings: a recipe as plain data.
        working_directory: the directory that is sent, and that relative paths are relative to.
        root: the root of data sections without their own.
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
    own = settings.get("data")  # the recipe's data: their root is the default of all others
    if isinstance(own, dict) and own.get("root") is not None:
        root = (working_directory / own["root"]).resolve()
    found += [
        path for each in settings.values() for path in excluded_paths(each, working_directory, root)
    ]
    return tuple(dict.fromkeys(found))


def pack(spec: PackageSpec, target: Path, limit: int = MAX_PACKAGE_BYTES) -> Package:
    """Copy the files to send into the new folder `target`, and return the package.

    Raises ClusterError as `PackageSpec.select_files`, and above `limit` bytes, with the largest
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
            f"{source}: must have at most {limit / 2**20:.0f} MiB to send, got "
            f"{total / 2**20:.0f} MiB; largest: {named}. Put data on the shared storage, and "
            "submit from a folder with only code and recipes",
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
_NO_AGENT = (
    "the cluster's agent does not take jobs: it has just started, so submit again in a minute; or "
    "another program on the head, such as a second Ray, uses the agent's port, 52365: end it, or "
    "start Ray with --dashboard-agent-listen-port PORT"
)
FETCH = "fetch"  # metadata of a job that prints a run's publishable files
_MAX_SILENCE_SECONDS = 300.0  # without an answer, before following ends


class JobClient:
    """The jobs of the cluster whose job server answers at `address` (http://HOST:PORT).

    Raises ClusterError if nothing answers or the token is not accepted.
    """

    def __init__(self, address: str | None = None) -> None:
        self.address = address or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_ADDRESS
        if not self.address.startswith(("http://", "https://")):
            raise ClusterError(
                f"RAY_API_SERVER_ADDRESS: must be http://HOST:PORT, got {self.address}"
            )
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
                f"{self.address}: the cluster refuses this machine's token; use the token that the "
                "cluster was started with (~/.ray/auth_token, or RAY_AUTH_TOKEN_PATH)",
                see="how-to/cluster.md#what-every-cluster-needs",
            ) from error
        except (ConnectionError, RequestException) as error:
            raise _ServerUnreachableError(
                f"{self.address}: no cluster answers; open the tunnel first, with `ray dashboard "
                "cluster.yaml` or `ssh -N -L 8265:127.0.0.1:8265 HEAD`",
                see="how-to/cluster.md#submit-follow-fetch",
            ) from error
        except RuntimeError as error:
            text, see = _last_line(error), ""
            if "No available agent" in text:
                text, see = _NO_AGENT, "how-to/cluster.md#a-ray-cluster-that-you-already-have"
            raise ClusterError(f"{self.address}: {text}", see=see) from error

    def submit(
        self,
        name: str,
        entrypoint: str,
        *,
        working_dir: Path | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        """Start a shell command on the head as job `name`.

        A copy of `working_dir` is its directory on every host.
        """
        environment = {} if working_dir is None else {"working_dir": str(working_dir)}
        self._call(
            lambda: self._client.submit_job(
                entrypoint=entrypoint,
                submission_id=name,
                runtime_env=environment,
                metadata=dict(metadata or {}),
            )
        )

    def get_job(self, name: str) -> JobDetails:
        """Return Ray's description of a job. Raises ClusterError if there is no such job."""
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
        """Return all submitted jobs but those of `dpdist cluster fetch`, the newest first."""
        found = [
            job
            for job in self._call(self._client.list_jobs)
            if job.submission_id and FETCH not in (job.metadata or {})
        ]
        return sorted(found, key=lambda job: -(job.start_time or 0))

    def read_log(self, name: str) -> str:
        """Return the output of a job so far."""
        return self._call(lambda: self._client.get_job_logs(name)) or ""

    def find_job(self, name: str) -> str:
        """Return the name of a job: `name` itself, or a job of the run of that name.

        It is the newest that has not ended, else the newest.
        """
        jobs = self.list_jobs()
        if any(job.submission_id == name for job in jobs):
            return name
        of_run = [job for job in jobs if (job.metadata or {}).get("run") == name]
        of_run.sort(key=lambda job: job.status.is_terminal())
        return (of_run[0].submission_id if of_run else None) or name

    def stop(self, name: str) -> bool:
        """Ask a job to end by SIGTERM; return False if it has already ended."""
        self.get_job(name)
        return bool(self._call(lambda: self._client.stop_job(name)))

    def follow(self, name: str, write: Callable[[str], None]) -> JobDetails:
        """Pass the output of a job to `write` until it ends; return its last state.

        Raises ClusterError if the server does not answer for five minutes.
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
    """Return the last line of a server's traceback."""
    lines = [line for line in str(error).replace("\\n", "\n").splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _enable_token_authentication() -> None:
    """Let Ray send this machine's token, if there is one: it does only if the mode is set."""
    has_file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    if "RAY_AUTH_MODE" not in os.environ and ("RAY_AUTH_TOKEN" in os.environ or has_file.exists()):
        os.environ["RAY_AUTH_MODE"] = "token"
    from dpdist.cluster.session import reload_ray_environment

    reload_ray_environment()
